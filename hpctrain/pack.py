"""``hpctrain pack``: in one process, or on all ranks that a launcher started.

A single process does not initialize MPI. Of several ranks, rank 0 makes the pack
(``data/packing/make.py``) and divides the tasks; each rank runs its share in threads. A step is one
scatter and one gather of a bounded number of tasks and images, so that all that rank 0 sends or
receives in a step stays below the 2 GiB of an MPI message.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

from hpctrain.config import PackConfig
from hpctrain.data import pack  # before MPI_Init: importing h5py starts a process (uname)
from hpctrain.data.packing import report
from hpctrain.data.packing.decode import Span
from hpctrain.data.packing.make import TASKS_PER_WORKER
from hpctrain.data.packing.workers import PackTask, Processes, RunTasks, start_threads
from hpctrain.data.packing.write import writing
from hpctrain.errors import Failure, UsageError
from hpctrain.files import sync
from hpctrain.launcher import launched_size
from hpctrain.watchdog import started, waiting

STEP_TASKS = 512  # per rank, or more for many threads: those of all ranks start anew in each step
STEP_IMAGES, MOST_STEP_IMAGES = 1 << 15, 1 << 22  # per rank, and in all: below 1 GB of tasks


class RankTasks(NamedTuple):
    """The tasks of a rank in one step, which it runs in `jobs` threads.

    The rank must see `files` with the given sizes in bytes (None for folders)."""

    what: str
    function: Callable[..., Any]
    tasks: list[PackTask]
    jobs: int
    output: Path
    files: dict[str, int | None]


def main(config: PackConfig) -> int:
    """Make or check a pack; return the exit code. Collective."""
    if (launched_size() or 1) == 1:
        return pack.main(config)
    from hpctrain.parallel.hosts import fair_threads
    from hpctrain.parallel.mpi import call_on_root, start_mpi
    from hpctrain.report.bar import dumb_terminal, terminal_columns

    comm = start_mpi()
    started("packing")
    cores = fair_threads(comm)
    if comm.rank:
        _serve(comm)
    columns = 0 if comm.rank or dumb_terminal() else terminal_columns() or 0
    ranks = Processes(comm.size, cores, columns, partial(_start_ranks, comm, columns))
    return call_on_root(comm, lambda: _lead(comm, config, ranks))


def _lead(comm: Any, config: PackConfig, ranks: Processes) -> int:
    """Make or check the pack, then end the loops of the other ranks (rank 0)."""
    try:
        return pack.main(config, ranks)
    finally:
        comm.scatter([None] * comm.size)


def _serve(comm: Any) -> None:
    """Run this rank's tasks of every step until rank 0 sends None (all ranks but 0)."""
    while True:
        with waiting("rank 0"):
            given: RankTasks | None = comm.scatter(None)
        if given is None:
            return
        own = sum(task.images for task in given.tasks)
        with report.progress(given.what, own, own, 0) as advance:
            outcome = _attempt(given, advance)
        with waiting("rank 0"):
            comm.gather(outcome)


@contextmanager
def _start_ranks(
    comm: Any, columns: int, jobs: int, output: Path, files: list[str]
) -> Iterator[RunTasks]:
    """Yield a function that runs tasks on all ranks, each with `jobs` threads (rank 0)."""

    def run_tasks(
        what: str, function: Callable[..., Any], tasks: Iterable[PackTask], images: int
    ) -> Iterator[Any]:
        share = -(-images // comm.size)
        with report.progress(what, images, share, columns) as advance:
            for every in cut_steps(tasks, comm.size, jobs):
                yield from run_step(what, function, every, advance)

    def run_step(
        what: str,
        function: Callable[..., Any],
        every: list[PackTask],
        advance: Callable[[int], None],
    ) -> Iterator[Any]:
        sizes = {path: _size(path) for path in {*files, *_written(every)}}
        cuts = [-(-len(every) * rank // comm.size) for rank in range(comm.size + 1)]
        given = [
            RankTasks(what, function, every[start:stop], jobs, output, sizes)
            for start, stop in pairwise(cuts)
        ]
        with waiting():
            comm.scatter(given)
        own = _attempt(given[0], advance)
        with waiting():
            outcomes: list[tuple[list[Any], Failure | None]] = comm.gather(own)
        failed = [(rank, failure) for rank, (_, failure) in enumerate(outcomes) if failure]
        if failed:
            rank, first = failed[0]
            text = str(first) if len(failed) == comm.size else f"rank {rank}: {first}"
            raise type(first)(text)
        return (result for results, _ in outcomes for result in results)

    yield run_tasks


def cut_steps(tasks: Iterable[PackTask], ranks: int, jobs: int) -> Iterator[list[PackTask]]:
    """Yield the tasks of one step after the other, for `ranks` ranks of `jobs` threads."""
    most_tasks = ranks * max(STEP_TASKS, TASKS_PER_WORKER * jobs)
    most_images = min(ranks * STEP_IMAGES, MOST_STEP_IMAGES)
    step, images = list[PackTask](), 0
    for task in tasks:
        if step and (len(step) == most_tasks or images + task.images > most_images):
            yield step
            step, images = [], 0
        step.append(task)
        images += task.images
    if step:
        yield step


def _attempt(given: RankTasks, advance: Callable[[int], None]) -> tuple[list[Any], Failure | None]:
    """Run this rank's tasks; return their results, or none and the failure."""
    try:
        with writing(given.output), start_threads(given.jobs) as runner:
            for path, size in given.files.items():
                if _size(path) != size:
                    raise UsageError(
                        f"{path} is not on this host what it is on rank 0's: the source and the"
                        " folder of the pack must be where all hosts see them"
                    )
            results = list(runner.run(given.function, given.tasks, advance))
            for path in _written(given.tasks):
                sync(Path(path))  # rank 0 can sync only what its own host has written
            return results, None
    except Failure as error:
        return [], error


def _written(tasks: list[PackTask]) -> set[str]:
    """Return the files that tasks write."""
    given = (argument for task in tasks for argument in task.arguments)
    return {argument.path for argument in given if isinstance(argument, Span)}


def _size(path: str) -> int | None:
    """Return the size of a file in bytes, None for a folder, -1 if the path does not exist."""
    try:
        return None if os.path.isdir(path) else os.path.getsize(path)
    except FileNotFoundError:
        return -1
