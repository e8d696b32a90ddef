"""Does this MPI take device memory? Tried before a run relies on it, twice:

* by one process that is no rank of the job, because a MPI that takes none ends it by a signal:

      python -m hpctrain.parallel.trial GPU

  It copies within itself, out of place: in place, MPI does nothing with one rank. Exit code 0 where
  what was sent arrived;
* by all ranks of the job, because copies between processes, and sums, take other ways than copies
  within one.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from hpctrain.errors import RunError, UsageError
from hpctrain.parallel.device import choose_device
from hpctrain.parallel.memory import plain_zeros
from hpctrain.parallel.mpi import MPI, call_on_all, host_name, start_mpi
from hpctrain.parallel.transport import DeviceMemory, Transport, mpi_type
from hpctrain.streams import current_stream

LENGTHS = 16, 1 << 20  # numbers for each rank or of all: MPI sends small and large messages apart


def check_exchange(transport: Transport, device: torch.device) -> None:
    """Sum and exchange known numbers with all ranks. Collective. UsageError on all ranks where
    something else arrives on one; what crashes ends the run, and a line says in what.
    """
    comm = transport.comm
    where = f"[rank {comm.rank} of {comm.size} @{host_name()}]"
    text = f"{where} ended while MPI was tried with device memory: --reduce host needs no such MPI"
    with last_words(text):
        arrived = all([_arrives(transport, length, device) for length in LENGTHS])

    def refuse() -> None:
        if not arrived:
            raise UsageError(
                "--reduce mpi-gpu: MPI was given device memory and delivered other numbers than"
                " were sent; --reduce host works with any MPI"
            )

    call_on_all(comm, refuse)


def _arrives(transport: Transport, length: int, device: torch.device) -> bool:
    """Whether sums, blocks of all and blocks for all are as they should be. Collective."""
    rank, size = transport.comm.rank, transport.comm.size
    width = max(1, length // size)
    numbers = torch.arange(width * size, dtype=torch.float32, device=device)
    vector, received = (plain_zeros(width * size, torch.float32, device) for _ in range(2))
    blocks = [width] * size, [width * peer for peer in range(size)]
    try:
        vector.copy_(numbers % 8 + rank)  # exact, however they are added
        transport.allreduce(vector)
        summed = torch.equal(vector, numbers % 8 * size + size * (size - 1) // 2)
        vector.copy_(numbers + rank)
        transport.alltoallv(vector, blocks, received, blocks)
        peers = torch.arange(size, device=device).repeat_interleave(width)
        own = numbers[width * rank : width * (rank + 1)].repeat(size)
        exchanged = torch.equal(received, own + peers)
        vector.zero_()[width * rank : width * (rank + 1)] = rank + 1
        transport.allgatherv(vector, blocks)
        return summed and exchanged and torch.equal(vector, peers.float() + 1)
    except MPI.Exception as error:
        raise RunError(f"--reduce mpi-gpu: MPI refused device memory: {error}") from None


@contextmanager
def last_words(text: str) -> Iterator[None]:
    """Where this process is ended by a signal in the block, a shell says `text` in its place."""
    command = ["sh", "-c", 'read -r _ || printf "%s\\n" "$0" >&2', text]
    with subprocess.Popen(command, stdin=subprocess.PIPE, start_new_session=True) as shell:
        try:
            yield
        finally:
            shell.communicate(b"\n")


def main(gpu: int) -> int:
    """Copy to ourselves: by a sum over one rank, and by an exchange."""
    comm = start_mpi()
    device = choose_device("cuda", gpu)
    out, back = (plain_zeros(LENGTHS[-1], torch.float32, device) for _ in range(2))
    out.copy_(torch.arange(1, len(out) + 1, device=device))
    current_stream(device).synchronize()
    comm.Allreduce([out, mpi_type(out)], [back, mpi_type(back)])
    if not torch.equal(out, back) or not _arrives(DeviceMemory(comm), len(out), device):
        print("what arrived is not what was sent", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1])))
