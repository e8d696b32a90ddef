"""Choice of the transport and the reduction of a run, by what each rank supports."""

from __future__ import annotations

import socket
from collections.abc import Callable, Sequence

import torch

from hpctrain.errors import UsageError
from hpctrain.parallel.device import choose_device, gpu_uuid, keep_memory
from hpctrain.parallel.hosts import comm_of_host, fair_threads
from hpctrain.parallel.memory import zeros_for_messages
from hpctrain.parallel.message import Message
from hpctrain.parallel.mpi import (
    Comm,
    agreed,
    allgather,
    is_gpu_aware,
    library,
    minimum,
    on_all,
    on_root,
)
from hpctrain.parallel.nccl import Nccl, nccl_version
from hpctrain.parallel.overlap import Overlapped, cut
from hpctrain.parallel.placement import (
    Choice,
    RankDevice,
    choose_transport,
    describe_sharing,
)
from hpctrain.parallel.reduce import Bfloat16Reduce, Plain, Reduce
from hpctrain.parallel.transport import (
    DeviceMemory,
    HostMemory,
    Pinned,
    Transport,
)
from hpctrain.parallel.tree import TreeReduce


def open_device(
    comm: Comm, requested: str, threads: Callable[[int], int]
) -> tuple[torch.device, int]:
    """Return this rank's device and its fair share of CPU threads. Collective.

    `threads` converts the share to the number of threads that torch uses. Raises UsageError on all
    ranks as `choose_device` does.
    """
    local_rank = comm_of_host(comm).rank
    with on_all(comm):
        device = choose_device(requested, local_rank)
    share = fair_threads(comm)
    torch.set_num_threads(threads(share))  # launchers set 1 or all cores
    keep_memory()
    return device, share


def open_transport(comm: Comm, device: torch.device, wanted: str) -> tuple[Transport, Choice, str]:
    """Open the transport for messages on `device`, according to --reduce. Collective.

    Also returns the choice with its reason, and a note if ranks share GPUs. Raises UsageError on
    all ranks as `choose_transport` and `make_transport` do.
    """
    ranks = allgather(comm, describe_rank(device))
    choice = on_root(comm, choose_transport, ranks, wanted)
    return make_transport(choice.name, comm, device), choice, describe_sharing(ranks)


def describe_rank(device: torch.device) -> RankDevice:
    """Describe the device of this rank."""
    if device.type == "cpu":
        return RankDevice(socket.gethostname())
    return RankDevice(socket.gethostname(), gpu_uuid(device), nccl_version())


def make_transport(name: str, comm: Comm, device: torch.device) -> Transport:
    """Make the chosen transport for vectors on `device`. Collective.

    Raises UsageError on all ranks if MPI does not take device memory.
    """
    match name:
        case "none":
            return Transport(comm)
        case "nccl":
            return Nccl(comm)
        case "mpi-gpu":
            with on_all(comm):
                ask_mpi()
            transport = DeviceMemory(comm)
            check_sum(transport, device)
            return transport
        case "host":
            return Pinned(comm)
    return HostMemory(comm)


def ask_mpi() -> None:
    """Raise UsageError if MPI says that it is not GPU-aware: it would crash."""
    if is_gpu_aware("rocm" if torch.version.hip else "cuda") is False:
        raise UsageError(
            f"--reduce mpi-gpu: {library()} is not GPU-aware; --reduce host works with any MPI"
        )


def check_sum(transport: Transport, device: torch.device) -> None:
    """Sum a few known numbers over all ranks. Collective.

    Raises UsageError on all ranks if one of them receives another sum.
    """
    comm = transport.comm
    vector = zeros_for_messages(16, torch.float32, device).fill_(comm.rank)
    transport.allreduce(vector)
    arrived = bool((vector == comm.size * (comm.size - 1) // 2).all())
    if not minimum(comm, arrived)[0]:
        raise agreed(
            UsageError(
                "--reduce mpi-gpu: MPI was given device memory and returned a wrong sum; --reduce"
                " host works with any MPI"
            )
        )


def choose_reduce(
    comm: Comm,
    message: Message,
    runs: Sequence[range] | None = None,
    comm_dtype: str = "fp32",
    transport: Transport | None = None,
    overlap: int = 0,
) -> Reduce:
    """Make the reduction for this message; by default one Allreduce.

    With `runs`, the shards that each rank carries, it sums in tree order. With `comm_dtype` "bf16",
    gradients are sent in half the bytes. `overlap` is the largest number of gradient segments that
    are summed while backward runs. The default `transport` is MPI, from a GPU through pinned host
    memory. Raises UsageError if the reduction is not possible.
    """
    on_gpu, length = message.device.type == "cuda", message.layout.length
    way = transport or (Pinned(comm) if on_gpu else HostMemory(comm))

    def over(span: range) -> Reduce:
        vector = message.tensor[span.start : span.stop]
        if runs is not None:
            return TreeReduce(way, vector, runs)
        if comm_dtype == "bf16":
            border = max(0, length - span.start)
            return Bfloat16Reduce(way, vector[:border], vector[border:])
        return Plain(way, vector)

    if not overlap:
        return over(range(len(message.tensor)))
    spans = cut(message.layout, overlap)
    rest = range(length, len(message.tensor))
    return Overlapped(message, spans, [over(span) for span in (*spans, rest)])
