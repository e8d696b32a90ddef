"""A trial in a process of its own: does this MPI take device memory?

    python -m hpctrain.parallel.trial GPU

Exit code 0 where what was sent came back; a MPI that is not GPU-aware ends the process by a signal.
"""

from __future__ import annotations

import sys

import torch

from hpctrain.parallel.device import choose_device
from hpctrain.parallel.memory import plain_zeros
from hpctrain.parallel.mpi import start_mpi
from hpctrain.parallel.transport import DeviceMemory

LENGTH = 1 << 20  # numbers: enough for what MPI treats as a large message


def main(gpu: int) -> int:
    """Send to ourselves, and sum over one rank."""
    comm = start_mpi()
    device = choose_device("cuda", gpu)
    out, back = (plain_zeros(LENGTH, torch.float32, device) for _ in range(2))
    out.copy_(torch.arange(LENGTH, device=device))
    transport = DeviceMemory(comm)
    transport.allreduce(out)
    transport.alltoallv(out, ([LENGTH], [0]), back, ([LENGTH], [0]))
    if not torch.equal(out, back):
        print("what came back is not what was sent", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1])))
