"""reduce(message): the one communication of a step.

MPI sums host memory in place. A GPU message is staged through pinned host memory that is kept
for the whole run: any MPI works then, and Open MPI's own path for device pointers does the same
copies, into pageable memory. The device is synchronised here and nowhere else.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch

from hpctrain.parallel.device import synchronize
from hpctrain.parallel.message import Message
from hpctrain.parallel.mpi import MPI, Comm

# Named, never discovered: under Open MPI a bfloat16 tensor is summed as bytes, silently wrong.
MPI_TYPES = {"float32": MPI.FLOAT, "float64": MPI.DOUBLE}

Reduce = Callable[[Message], None]


def allreduce(comm: Comm, array: np.ndarray) -> None:
    """Sum a host array of float32 or float64 over all ranks, in place. Collective."""
    comm.Allreduce(MPI.IN_PLACE, [array, MPI_TYPES[array.dtype.name]])


def broadcast(comm: Comm, tensor: torch.Tensor) -> None:
    """Give all ranks the values that rank 0 holds, in place. Collective."""
    host = tensor.detach().cpu()
    comm.Bcast([host.numpy(), MPI.BYTE])
    tensor.data.copy_(host)


def direct(comm: Comm) -> Reduce:
    """Reduce messages in host memory where they lie."""

    def reduce(message: Message) -> None:
        """Sum the message over all ranks, in place. Collective."""
        allreduce(comm, message.array)

    return reduce


def staged(comm: Comm, message: Message) -> Reduce:
    """Reduce messages through a host copy of this message's size, pinned on GPU machines."""
    host = torch.zeros(
        message.tensor.shape, dtype=message.tensor.dtype, pin_memory=message.device.type == "cuda"
    )

    def reduce(message: Message) -> None:
        """Sum the message over all ranks, in place. Collective."""
        host.copy_(message.tensor, non_blocking=True)
        synchronize(message.device)
        allreduce(comm, host.numpy())
        message.tensor.copy_(host, non_blocking=True)

    return reduce


def choose_reduce(comm: Comm, message: Message) -> Reduce:
    """The reduction for this message: in place on the CPU, staged on a GPU."""
    return staged(comm, message) if message.device.type == "cuda" else direct(comm)
