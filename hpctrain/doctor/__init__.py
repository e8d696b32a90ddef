"""``python -m hpctrain doctor``: check this machine and print findings with their verdicts.

Without a launcher, it checks one process; under mpirun or srun, all ranks, and it times Allreduce
between them. It also runs where training cannot: without an MPI library or torch, and under a
launcher of another MPI. The exit code is 1 if any finding is a failure.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Sequence
from statistics import median
from typing import Any

from rich.table import Table
from rich.text import Text

from hpctrain.cluster import launched_rank, launcher_name
from hpctrain.config import DoctorConfig
from hpctrain.doctor.findings import (
    KIB,
    MIB,
    VERDICTS,
    Finding,
    findings,
    hosts,
    judge,
    union,
)
from hpctrain.doctor.machine import RankFacts, collect
from hpctrain.errors import UsageError, first_line
from hpctrain.report.console import make_console, styled
from hpctrain.text import bytes_text, counted, discard_stdout

SIZES = (4, KIB, 32 * KIB, MIB, 8 * MIB, 64 * MIB)  # bytes of the messages timed
SLOW_NUMBER, SLOW_BANDWIDTH = 1e-3, 1e8  # an Allreduce of 4 B in s, of 1 MiB or more in bytes/s
LOOPS, LOOP_SECONDS = 5, 0.01  # number and approximate length of the loops that are timed
WIDTH = 100  # columns of the output if unknown
STYLES = {"ok": "green", "note": "cyan", "warn": "yellow", "fail": "bold red"}
NOUNS = {"note": "note", "warn": "warning", "fail": "failure"}

Timing = tuple[int, float, bool]  # bytes, seconds of one call, whether the sum was correct


def main(settings: DoctorConfig) -> int:
    """Print the findings. Return 1 if any is a failure, else 0. Collective."""
    launcher = launcher_name()  # before MPI_Init, which may set variables
    try:
        from hpctrain.parallel.mpi import conclude
    except UsageError as error:
        reason = first_line(error.__cause__ or error)
        ranks = [collect(None, launcher, reason)]
        return _conclude(_show(ranks)) if launched_rank() == 0 else 1
    try:
        return _examine(launcher)
    except BaseException as error:
        return conclude(error)


def _examine(launcher: str) -> int:
    from hpctrain.parallel import mpi

    try:
        comm = mpi.start_mpi()
    except mpi.LauncherMismatch:  # reported by the findings
        comm = mpi.MPI.COMM_WORLD.Dup()
    ranks = comm.gather(collect(comm, launcher)) or []  # of all, on rank 0
    speaks = comm.rank == 0 and (comm.size > 1 or launched_rank() == 0)
    rows = _show(ranks) if speaks else []
    if comm.size > 1 and comm.bcast(not any(rank.torch_error for rank in ranks)):
        timings = time_allreduce(comm)
        rows += _show_allreduce(ranks, timings) if speaks else []
    return comm.bcast(_conclude(rows) if speaks else 1)


def time_allreduce(comm: Any) -> list[Timing]:
    """Time Allreduce of float32 in messages of `SIZES`. Collective.

    The time of a size is the median over several loops, where that of a loop is the time of its
    slowest rank. All ranks return the same timings.
    """
    import numpy as np

    from hpctrain.parallel.reduce import allreduce

    vector = np.empty(max(SIZES) // 4, np.float32)
    timings = []
    for size in SIZES:
        part = vector[: size // 4]
        part.fill(comm.rank + 1)
        allreduce(comm, part)  # warm-up, and a check of the sum
        right = bool((part == comm.size * (comm.size + 1) // 2).all())
        part.fill(0)
        once = min(_time_loop(comm, part, 1) for _ in range(2))
        calls = max(1, min(1000, int(LOOP_SECONDS / once)))
        loops = LOOPS if once < 5 * LOOP_SECONDS else 3
        seconds = median(_time_loop(comm, part, calls) for _ in range(loops))
        timings.append((size, seconds, all(comm.allgather(right))))
    return timings


def _time_loop(comm: Any, part: Any, calls: int) -> float:
    """Return the seconds per Allreduce in a loop of `calls`, on the slowest rank. Collective."""
    from hpctrain.parallel.reduce import allreduce

    comm.Barrier()
    start = time.perf_counter()
    for _ in range(calls):
        allreduce(comm, part)
    return max(comm.allgather(time.perf_counter() - start)) / calls


def allreduce_finding(
    ranks: Sequence[RankFacts], size: int, seconds: float, is_right: bool
) -> Finding:
    """Judge an Allreduce of `size` bytes by its `seconds` and whether its sum was correct."""
    by_host = hosts(ranks)
    shares = any(len(group) > len(union(group)) for group in by_host.values())
    slow = seconds > SLOW_NUMBER if size <= 4 else size >= MIB and size / seconds < SLOW_BANDWIDTH
    cores = "slow: the ranks share cores, and some spin while others compute: start fewer"
    network = "slow for a network of clusters: use an MPI that was built for it"
    return judge(
        "Allreduce",
        bytes_text(size),
        (not is_right, "fail", "the sum is wrong: do not train with this MPI"),
        (slow and shares, "warn", cores),
        (slow and len(by_host) > 1, "warn", network),
        (slow, "warn", "slow for ranks of one host: do other jobs use these cores?"),
    )


def _show(ranks: Sequence[RankFacts]) -> list[Finding]:
    """Print the table of findings, and return them."""
    rows = findings(ranks)
    table = Table(box=None, show_header=False, pad_edge=False, padding=(0, 2, 0, 0))
    table.add_column(no_wrap=True)
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    for row in rows:
        found = styled(row.found)
        if row.advice:
            found.append("\n").append(styled(row.advice, STYLES[row.verdict]))
        table.add_row(styled(row.verdict, STYLES[row.verdict]), styled(row.name), found)
    _print(table)
    return rows


def _show_allreduce(ranks: Sequence[RankFacts], timings: Sequence[Timing]) -> list[Finding]:
    """Print the table of the bandwidth test, and return its findings."""
    about = f"Allreduce of float32 over {len(ranks)} ranks; GB/s is algorithm bandwidth"
    _print(styled(f"\n{about}, bytes / time"))
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="")
    table.add_column(no_wrap=True)
    for heading in ("size", "microseconds", "GB/s"):
        table.add_column(heading, justify="right", no_wrap=True)
    table.add_column(overflow="fold")
    rows = [allreduce_finding(ranks, *timing) for timing in timings]
    for row, (size, seconds, _) in zip(rows, timings, strict=True):
        style = STYLES[row.verdict]
        speed = f"{size / seconds / 1e9:.3f}"
        numbers = (f"{seconds * 1e6:,.1f}", "<0.001" if speed == "0.000" else speed)
        table.add_row(styled(row.verdict, style), row.found, *numbers, styled(row.advice, style))
    _print(table)
    return rows


def _conclude(rows: Sequence[Finding]) -> int:
    """Print the number of findings by verdict, and return the exit code."""
    counts = Counter(row.verdict for row in rows)
    parts = [f"{counts['ok']} ok", *(counted(counts[verdict], NOUNS[verdict]) for verdict in NOUNS)]
    worst = max((row.verdict for row in rows), key=VERDICTS.index)
    _print(styled("\n" + ", ".join(parts), STYLES[worst]))
    return int(worst == "fail")


def _print(content: Table | Text) -> None:
    """Print to standard output, without trailing blanks; discard it if its reader has ended.

    Characters that the output cannot encode are printed as escapes.
    """
    console = make_console(WIDTH)
    with console.capture() as drawn:
        console.print(content)
    text = "\n".join(line.rstrip() for line in drawn.get().splitlines())
    encoded = text.encode(console.encoding, "backslashreplace")
    try:
        print(encoded.decode(console.encoding), flush=True)
    except BrokenPipeError:
        discard_stdout()
