"""Run the tasks of ``pack`` in worker processes, or for one job in this process.

An image that crashes a decoder ends only a worker, which is reported. Workers are spawned, not
forked, and the kernel ends them when their parent dies.
"""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import signal
import warnings
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from functools import partial
from typing import Any

from hpctrain.cluster import PR_SET_PDEATHSIG
from hpctrain.errors import RunError

# Slurm sends them to all; a signal while a process is started would leave one half-started.
LEFT_TO_PARENT = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2)
ONE_THREAD = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS")  # of each worker
AHEAD = 3  # tasks per worker that are submitted ahead

Run = Callable[[str, Callable[..., Any], Iterable[tuple[Any, ...]], int], Iterator[Any]]


@contextmanager
def start_workers(jobs: int) -> Iterator[Run]:
    """Yield a function that runs tasks in `jobs` processes, or for one job in this process.

    Its arguments are a text for the progress bar, a function, the tasks as tuples of its arguments,
    of which the first is a list of images, and their number of images; it yields the results in the
    order of the tasks. It raises RunError if a worker dies.
    """
    from hpctrain.packing.report import progress  # imports rich, which a worker need not

    with _pool(jobs) if jobs > 1 else _no_pool() as submit:

        def run(
            what: str, function: Callable[..., Any], tasks: Iterable[tuple[Any, ...]], images: int
        ) -> Iterator[Any]:
            waiting: deque[tuple[Callable[[], Any], int]] = deque()
            with progress(what, images) as advance:
                for task in tasks:
                    waiting.append((submit(function, *task), len(task[0])))
                    if len(waiting) >= (AHEAD * jobs if jobs > 1 else 1):
                        result, count = waiting.popleft()
                        yield result()
                        advance(count)
                for result, count in waiting:
                    yield result()
                    advance(count)

        yield run


@contextmanager
def _no_pool() -> Iterator[Callable[..., Callable[[], Any]]]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # from Pillow, about unusual metadata
        yield partial  # called when the result is asked for


@contextmanager
def _pool(jobs: int) -> Iterator[Callable[..., Callable[[], Any]]]:
    for name in ONE_THREAD:
        os.environ.setdefault(name, "1")  # inherited by the workers; this process has begun already
    others = {*multiprocessing.active_children()}
    context = multiprocessing.get_context("spawn")
    pool = ProcessPoolExecutor(jobs, context, _begin, (os.getpid(),))

    def submit(*task: Any) -> Callable[[], Any]:
        mask = signal.pthread_sigmask(signal.SIG_BLOCK, LEFT_TO_PARENT)
        try:  # a process that this starts inherits the mask
            return pool.submit(*task).result
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, mask)

    try:
        yield submit
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


def _begin(parent: int) -> None:
    """Initialise a worker process."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)  # the parent has already died
    warnings.simplefilter("ignore")
