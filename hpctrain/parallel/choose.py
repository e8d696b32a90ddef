"""Choice of the transport and the reduction of a run, by what each rank supports.

An MPI library that is not GPU-aware crashes when it is passed device memory. Before a run relies on
it, it is therefore tested twice:

* in a process that is not a rank of the job:

      python -m hpctrain.parallel.choose GPU

  It sends to itself, out of place: in place, MPI does nothing with one rank. The exit code is 0 if
  the data sent arrived;
* by all ranks of the job, because copies between processes, and sums, use other code paths than
  copies within one process.
"""

from __future__ import annotations

import faulthandler
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import torch

from hpctrain.errors import RunError, UsageError
from hpctrain.launcher import LAUNCHER_PREFIXES
from hpctrain.parallel.device import choose_device, gpu_uuid, keep_memory
from hpctrain.parallel.hosts import comm_of_host, fair_threads, local_ranks
from hpctrain.parallel.memory import EXCLUSIVE, is_exclusive, plain_zeros
from hpctrain.parallel.message import Message
from hpctrain.parallel.mpi import (
    MPI,
    Comm,
    allgather,
    call_on_all,
    first_of_all,
    host_name,
    start_mpi,
)
from hpctrain.parallel.nccl import Nccl, nccl_version
from hpctrain.parallel.overlap import Overlapped, cut
from hpctrain.parallel.placement import (
    Choice,
    RankDevice,
    and_other_hosts,
    choose_transport,
    describe_sharing,
    group_devices,
    merge_groups,
)
from hpctrain.parallel.reduce import Bfloat16Reduce, Plain, Reduce
from hpctrain.parallel.transport import (
    DeviceMemory,
    HostMemory,
    Pinned,
    Transport,
    mpi_type,
)
from hpctrain.parallel.tree import TreeReduce
from hpctrain.streams import current_stream
from hpctrain.watchdog import stack_file, waiting

TRIAL_SECONDS = 120.0
PACKAGES = str(Path(__file__).resolve().parents[2])  # the folder that holds hpctrain


def open_device(
    comm: Comm, requested: str, threads: Callable[[int], int]
) -> tuple[torch.device, int]:
    """Return this rank's device and its fair share of CPU threads. Collective.

    `threads` converts the share to the number of threads that torch uses. Raises UsageError on all
    ranks as `choose_device` does.
    """
    local_rank, _ = local_ranks(comm)
    device = call_on_all(comm, lambda: choose_device(requested, local_rank))
    share = fair_threads(comm)
    torch.set_num_threads(threads(share))  # launchers set 1 or all cores
    keep_memory()
    return device, share


def open_transport(comm: Comm, device: torch.device, wanted: str) -> tuple[Transport, Choice, str]:
    """Open the transport for messages on `device`, according to --reduce. Collective.

    Also returns the choice with its reason, and a note if ranks share GPUs. Raises UsageError on
    all ranks as `choose_transport` and `make_transport` do.
    """
    own, host = call_on_all(comm, lambda: describe_rank(device, wanted)), comm_of_host(comm)
    here = dict(sorted(allgather(host, (comm.rank, own))))
    with waiting():  # each host counts once
        groups = comm.allreduce({} if host.rank else group_devices(here), merge_groups)
    choice = call_on_all(comm, lambda: choose_transport(groups, wanted))
    shared = first_of_all(comm, (not host.rank and describe_sharing(here.values())) or None)
    note = and_other_hosts(shared.value, shared.ranks) if shared else ""
    return make_transport(choice, comm, device), choice, note


def make_transport(choice: Choice, comm: Comm, device: torch.device) -> Transport:
    """Make the chosen transport for vectors on `device`. Collective.

    Raises UsageError on all ranks if MPI does not deliver device memory correctly.
    """
    match choice.name:
        case "none":
            return Transport(comm)
        case "nccl":
            return Nccl(comm)
        case "mpi-gpu":
            transport = DeviceMemory(comm)
            check_exchange(transport, device)
            return transport
        case "host":
            return Pinned(comm)
    return HostMemory(comm)


def describe_rank(device: torch.device, wanted: str) -> RankDevice:
    """Describe the device of this rank. MPI is tested with device memory only for "mpi-gpu"."""
    if device.type == "cpu":
        return RankDevice(host_name(), "cpu")
    refusal = None
    if wanted == "mpi-gpu":
        refusal = exclusive_refusal(device.index) or try_device_memory(device.index)
    return RankDevice(host_name(), "cuda", gpu_uuid(device), nccl_version(), refusal)


def exclusive_refusal(gpu: int) -> str | None:
    """Return why no other process can use this GPU while this one holds it; None if one can."""
    if not is_exclusive(gpu):
        return None
    return (
        f"GPU {gpu} {EXCLUSIVE}: MPI cannot be tried with its memory; ask for the mode DEFAULT"
        f" (nvidia-smi -i {gpu} -c DEFAULT), or for --reduce nccl or host"
    )


def try_device_memory(
    gpu: int, program: Sequence[str] = ("-m", "hpctrain.parallel.choose")
) -> str | None:
    """Test MPI with device memory, in a process that is not a rank of this job.

    Returns None if the data arrived, else what happened. An MPI library that does not support
    device memory crashes, so it is not tested in this process.
    """
    own = {
        name: value for name, value in os.environ.items() if not name.startswith(LAUNCHER_PREFIXES)
    }
    own["PYTHONPATH"] = os.pathsep.join(filter(None, (PACKAGES, own.get("PYTHONPATH"))))
    command = [sys.executable, *program, str(gpu)]
    try:
        done = subprocess.run(
            command, env=own, capture_output=True, text=True, timeout=TRIAL_SECONDS
        )
    except subprocess.TimeoutExpired:
        return f"MPI was given device memory in a trial and did not return in {TRIAL_SECONDS:.0f} s"
    if done.returncode == 0:
        return None
    if done.returncode < 0:
        name = signal.Signals(-done.returncode).name
        return f"MPI was given device memory in a trial and crashed ({name}): it is not GPU-aware"
    words = [line for line in done.stderr.splitlines() if line.strip()] or ["it printed nothing"]
    return f"MPI was given device memory in a trial and failed: {words[-1]}"


LENGTHS = 16, 1 << 20  # of test vectors: MPI sends small and large messages in different ways


def check_exchange(transport: Transport, device: torch.device) -> None:
    """Sum and exchange known numbers with all ranks. Collective.

    Raises UsageError on all ranks if wrong numbers arrive on one. A crash ends the run, and a line
    on stderr gives the cause.
    """
    comm = transport.comm
    where = f"[rank {comm.rank} of {comm.size} @{host_name()}]"
    text = f"{where} ended while MPI was tried with device memory: --reduce host needs no such MPI"
    with print_if_crashed(text):
        arrived = all([_arrives(transport, length, device) for length in LENGTHS])

    def refuse() -> None:
        if not arrived:
            raise UsageError(
                "--reduce mpi-gpu: MPI was given device memory and delivered other numbers than"
                " were sent; --reduce host works with any MPI"
            )

    call_on_all(comm, refuse)


def _arrives(transport: Transport, length: int, device: torch.device) -> bool:
    """Whether all calls of a transport give the right numbers. Collective."""
    rank, size = transport.comm.rank, transport.comm.size
    width = max(1, length // size)
    numbers = torch.arange(width * size, dtype=torch.float32, device=device)
    vector, received = (plain_zeros(width * size, torch.float32, device) for _ in range(2))
    try:
        vector.copy_(numbers % 8 + rank)  # exact in any order of addition
        transport.allreduce(vector)
        summed = torch.equal(vector, numbers % 8 * size + size * (size - 1) // 2)
        vector.copy_(numbers + rank)
        transport.alltoall(vector, received)
        peers = torch.arange(size, device=device).repeat_interleave(width)
        own = numbers[width * rank : width * (rank + 1)].repeat(size)
        exchanged = torch.equal(received, own + peers)
        vector.zero_()[width * rank : width * (rank + 1)] = rank + 1
        transport.allgather(vector)
        gathered = torch.equal(vector, peers.float() + 1)
        before, after = (rank - 1) % size, (rank + 1) % size
        vector.copy_(numbers + rank)
        transport.exchange([(after, [vector])], [(before, [received])])
        return summed and exchanged and gathered and torch.equal(received, numbers + before)
    except MPI.Exception as error:
        raise RunError(f"--reduce mpi-gpu: MPI refused device memory: {error}") from None


@contextmanager
def print_if_crashed(text: str) -> Iterator[None]:
    """Print `text` to stderr if this process crashes in the block (SIGSEGV, SIGBUS, SIGABRT, ...).

    A shell prints it, since this process cannot. It prints nothing if the process is killed from
    outside, as all ranks are after a crash of one. After the block, stacks of crashes are written
    where they were before.
    """
    command = ["sh", "-c", 'read -r _ && printf "%s\\n" "$0" >&2; cat > /dev/null', text]
    was_enabled = faulthandler.is_enabled()
    with subprocess.Popen(command, stdin=subprocess.PIPE, start_new_session=True) as shell:
        assert shell.stdin is not None
        faulthandler.enable(shell.stdin)  # it writes the stack there when the process crashes
        try:
            yield
        finally:
            faulthandler.disable()
            if was_enabled:
                faulthandler.enable(stack_file())


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


def main(gpu: int) -> int:
    """Send device memory to this process itself, by a sum over one rank and by exchanges."""
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
