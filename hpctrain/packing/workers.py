"""The worker processes of ``pack``: they read, measure, decode and write images (``decoding.py``).

An image that crashes a decoder ends only a worker, which is reported. Workers are spawned, not
forked, and the kernel ends them when their parent dies.
"""

from __future__ import annotations

import hashlib
import multiprocessing
import os
import signal
import warnings
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager, suppress
from functools import partial
from itertools import islice
from typing import Any, Protocol

from hpctrain.cluster import end_with_parent
from hpctrain.data.images import BadImage
from hpctrain.data.slices import Slice, read_files
from hpctrain.errors import RunError

ENDS = {signal.SIGINT, signal.SIGTERM}  # signals that end pack
ONE_THREAD = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS")  # of each worker
LEAST_LARGE = 1 << 16  # bytes of files of which a part is hashed first
PART_BYTES = 1 << 12
TASKS_AHEAD = 3  # tasks per worker that are submitted ahead


class RunTasks(Protocol):
    """Runs a function in worker processes, and shows the progress."""

    def __call__(
        self,
        text: str,
        function: Callable[..., Any],
        tasks: Iterable[tuple[Any, ...]],
        images: int,
    ) -> Iterator[Any]:
        """Yield the result of the function for each task, in the order of the tasks.

        text: a description for the progress bar; tasks: the arguments of each call, the first one a
        list of images; images: their number in all tasks. Raises RunError if a worker dies.
        """


def apply_to_files(slices: list[Slice], use: Callable[[bytes], Any]) -> list[Any]:
    """Return for each file (n,) what `use` makes of its bytes, or a BadImage."""
    return [*read_files(slices, use)]


def sha256(data: bytes) -> bytes:
    """Return the SHA-256 of all bytes."""
    return hashlib.sha256(data).digest()


def hash_parts(slices: list[Slice], sizes: list[int]) -> list[bytes | BadImage]:
    """Return the SHA-256 (n,) of a part in the middle of large files, of all bytes of others.

    sizes: of the files in bytes, (n,).
    """
    parts = []
    for part, size in zip(slices, sizes, strict=True):
        if size > LEAST_LARGE:
            part = part._replace(offset=part.offset + size // 2, size=PART_BYTES)
        parts.append(part)
    return apply_to_files(parts, sha256)


def read_sizes(slices: list[Slice]) -> list[int]:
    """Return the sizes (n,) of files in bytes, -1 for those that cannot be read."""
    sizes = [-1] * len(slices)
    for row, part in enumerate(slices):
        with suppress(OSError, ValueError):
            sizes[row] = os.stat(part.path).st_size
    return sizes


@contextmanager
def start_workers(jobs: int) -> Iterator[RunTasks]:
    """Yield a function that runs tasks in `jobs` processes, or for one job in this process."""
    pool = None
    if jobs > 1:
        for name in ONE_THREAD:
            os.environ.setdefault(name, "1")  # inherited by the workers; this process has begun
        pool = ProcessPoolExecutor(
            jobs,
            mp_context=multiprocessing.get_context("spawn"),
            initializer=_begin_worker,
            initargs=(os.getpid(),),
        )

    def submit(function: Callable[..., Any], task: tuple[Any, ...]) -> Callable[[], Any]:
        """Begin a task; return the function that waits for its result."""
        if not pool:
            return partial(function, *task)
        signal.pthread_sigmask(signal.SIG_BLOCK, ENDS)
        try:  # a worker that this starts inherits the mask: signals wait for _begin_worker
            return pool.submit(function, *task).result
        finally:
            signal.pthread_sigmask(signal.SIG_UNBLOCK, ENDS)

    def run_tasks(
        text: str,
        function: Callable[..., Any],
        tasks: Iterable[tuple[Any, ...]],
        images: int,
    ) -> Iterator[Any]:
        submitted = ((submit(function, task), len(task[0])) for task in tasks)
        waiting = deque(islice(submitted, TASKS_AHEAD * jobs))
        from rich.progress import Progress  # while the workers start, which need none of these

        from hpctrain.report.console import Console
        from hpctrain.watchdog import doing

        done = 0
        console = Console(stderr=True)
        with Progress(console=console, disable=not console.is_terminal) as progress:
            bar = progress.add_task(text, total=images)
            while waiting:
                result, count = waiting.popleft()
                yield result()
                waiting.extend(islice(submitted, 1))
                done += count
                doing(f"{text} image {done:,} of {images:,}")
                progress.update(bar, completed=done)

    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # from Pillow, about unusual metadata
            yield run_tasks
    except BrokenProcessPool:
        raise RunError("a worker process of pack died: --jobs 1 shows where") from None
    finally:
        if pool:
            pool.shutdown(cancel_futures=True)


def _begin_worker(parent: int) -> None:
    end_with_parent(parent)
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # Ctrl-C ends it even within a decoder
    signal.pthread_sigmask(signal.SIG_UNBLOCK, ENDS)
    warnings.simplefilter("ignore")
