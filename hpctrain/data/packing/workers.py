"""Run the tasks of ``pack`` in a process pool.

An image that crashes a decoder ends only a worker, which is reported. Workers are spawned, not
forked, and the kernel ends them when their parent dies. One job runs in this process.
"""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import signal
import warnings
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from typing import Any, NamedTuple

from hpctrain.errors import RunError
from hpctrain.launcher import PR_SET_PDEATHSIG

LEFT_TO_PARENT = (signal.SIGINT, signal.SIGUSR1, signal.SIGUSR2)  # Slurm sends them to all
ONE_THREAD = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
WAITING = 3  # tasks per worker that are submitted ahead


class PackTask(NamedTuple):
    """The arguments of a function, and the number of images that it processes."""

    arguments: tuple[Any, ...]
    images: int


RunTasks = Callable[[str, Callable[..., Any], Iterable[PackTask], int], Iterator[Any]]
Run = Callable[[Callable[..., Any], Iterable[PackTask]], Iterator[tuple[Any, int]]]  # and images


@contextmanager
def start_workers(jobs: int) -> Iterator[RunTasks]:
    """Yield a function that runs tasks in `jobs` processes, or for one job in this process.

    Its arguments are a text for the progress bar, a function, the tasks and their number of images;
    it yields the results in the order of the tasks. It raises RunError if a worker dies.
    """
    from hpctrain.data.packing import report  # imports rich, which a worker need not

    with _pool(jobs) if jobs > 1 else _no_pool() as run:

        def run_tasks(
            what: str, function: Callable[..., Any], tasks: Iterable[PackTask], images: int
        ) -> Iterator[Any]:
            with report.progress(what, images) as advance:
                for result, count in run(function, tasks):
                    advance(count)
                    yield result

        yield run_tasks


@contextmanager
def _no_pool() -> Iterator[Run]:
    def run(function: Callable[..., Any], tasks: Iterable[PackTask]) -> Iterator[tuple[Any, int]]:
        return ((function(*task.arguments), task.images) for task in tasks)

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # from Pillow, about unusual metadata
        yield run


@contextmanager
def _pool(jobs: int) -> Iterator[Run]:
    others = {*multiprocessing.active_children()}
    context = multiprocessing.get_context("spawn")
    pool = ProcessPoolExecutor(jobs, context, _begin, (os.getpid(),))

    def run(function: Callable[..., Any], tasks: Iterable[PackTask]) -> Iterator[tuple[Any, int]]:
        waiting: deque[tuple[Future[Any], int]] = deque()
        for task in tasks:
            waiting.append((pool.submit(function, *task.arguments), task.images))
            if len(waiting) == WAITING * jobs:
                future, images = waiting.popleft()
                yield future.result(), images
        for future, images in waiting:
            yield future.result(), images

    try:
        _start_processes(pool, jobs)
        yield run
    except BrokenProcessPool:
        raise RunError(
            "a worker process of pack died: --jobs 1 shows where; if memory ran out, use fewer"
            " --jobs"
        ) from None
    finally:  # results have been received or are no longer needed
        workers = {*multiprocessing.active_children()} - others
        pool.shutdown(wait=False, cancel_futures=True)
        for worker in workers:  # may hang in an image
            worker.kill()


def _start_processes(pool: ProcessPoolExecutor, jobs: int) -> None:
    """Start the worker processes, which inherit a signal mask and thread limits."""
    before = {name: os.environ.get(name) for name in ONE_THREAD}
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, LEFT_TO_PARENT)
    os.environ.update(ONE_THREAD)
    try:
        for _ in range(jobs):  # a process each, as none is idle yet
            pool.submit(os.getpid)
    finally:
        for name, value in before.items():
            os.environ.pop(name) if value is None else os.environ.update({name: value})
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)


def _begin(parent: int) -> None:
    """Initialise a worker process."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)  # the parent has already died
    warnings.simplefilter("ignore")
