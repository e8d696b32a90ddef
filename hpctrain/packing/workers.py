"""What the worker processes of ``pack`` do: read, measure, decode and write images.

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
from typing import Any, NamedTuple

import numpy as np
from PIL import Image

from hpctrain.cluster import end_with_parent
from hpctrain.data.images import BadImage, Fit, as_jpeg, decode
from hpctrain.data.pack import checksum
from hpctrain.errors import RunError
from hpctrain.files import write_at
from hpctrain.packing.sources import Slice, read_files
from hpctrain.watchdog import doing

# Slurm sends them to all; a signal while a process is started would leave one half-started.
LEFT_TO_PARENT = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2)
ONE_THREAD = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS")  # of each worker
AHEAD = 3  # tasks per worker that are submitted ahead

Run = Callable[[str, Callable[..., Any], Iterable[tuple[Any, ...]], int], Iterator[Any]]


class Decoded(NamedTuple):
    """What is known of n decoded images."""

    crc32: np.ndarray  # (n,) uint32
    sizes: np.ndarray  # (n,) int64, bytes
    sums: np.ndarray  # (2, C) uint64: of the values of each channel and of their squares
    kept: int  # JPEG files that are stored as they are
    bad: list[tuple[int, str]]  # unreadable ones, with the reason


def read_each(slices: list[Slice], use: Callable[[bytes], Any], bad: Any) -> list[Any]:
    """Return the results (n,) of calling `use` with the bytes of each file, `bad` without any."""
    found = [bad] * len(slices)
    for row, given in enumerate(read_files(slices)):
        with suppress(BadImage):
            if not isinstance(given, BadImage):
                found[row] = use(given)
    return found


def sha256(data: bytes) -> bytes:
    """Return the SHA-256 of all bytes."""
    return hashlib.sha256(data).digest()


def read_sizes(slices: list[Slice]) -> list[int]:
    """Return the sizes (n,) of files in bytes, -1 for those that cannot be read."""
    found = [-1] * len(slices)
    for row, each in enumerate(slices):
        with suppress(OSError, ValueError):
            found[row] = os.stat(each.path).st_size
    return found


def decode_images(
    slices: list[Slice], labels: list[int], fit: Fit, path: str = "", offset: int = 0
) -> Decoded:
    """Decode images and write their pixels consecutively into the file `path`. Raises OSError.

    Without `path`, convert them to JPEG files and decode these as training will, to check and
    measure them.
    """
    crc32, sizes = np.zeros(len(slices), np.uint32), np.zeros(len(slices), np.int64)
    size, kept, bad = fit.width * fit.height * fit.channels, 0, list[tuple[int, str]]()
    pixels = memoryview(bytearray(size * len(slices)))
    for row, given in enumerate(read_files(slices)):
        try:
            if isinstance(given, BadImage):
                raise given
            file = given if path else as_jpeg(given)
            made = decode(file, fit)
        except BadImage as error:
            bad.append((row, str(error)))
            continue
        pixels[row * size : (row + 1) * size] = made
        crc32[row], sizes[row] = checksum(made if path else file, labels[row]), len(file)
        kept += file is given
    if path:
        with open(path, "r+b", buffering=0) as output:
            write_at(output.fileno(), pixels, offset)
    return Decoded(crc32, sizes, channel_sums(pixels, fit.channels), kept, bad)


def write_files(slices: list[Slice], labels: list[int], path: str, offset: int) -> list[int]:
    """Write images as JPEG files consecutively; return their checksums (n,). Raises OSError."""
    found = [0] * len(slices)
    with open(path, "r+b") as output:
        output.seek(offset)
        for row, given in enumerate(read_files(slices)):
            with suppress(BadImage):
                if not isinstance(given, BadImage):
                    file = as_jpeg(given)
                    found[row] = checksum(file, labels[row])
                    output.write(file)
    return found


def channel_sums(pixels: memoryview, channels: int) -> np.ndarray:
    """Return the exact sums of each channel's values and of their squares, (2, C) uint64."""
    planes = np.frombuffer(pixels, np.uint8).reshape(-1, channels).T
    counts = [Image.fromarray(np.ascontiguousarray(plane)[None]).histogram() for plane in planes]
    values, by_channel = np.arange(256, dtype=np.uint64), np.array(counts, np.uint64)
    return np.stack([by_channel @ values, by_channel @ values**2])


@contextmanager
def start_workers(jobs: int) -> Iterator[Run]:
    """Yield a function that runs tasks in `jobs` processes, or for one job in this process.

    Its arguments are a text for the progress bar, a function, the tasks as tuples of its arguments,
    of which the first is a list of images, and their number of images; it yields the results in the
    order of the tasks. It raises RunError if a worker dies.
    """
    from rich.progress import Progress

    from hpctrain.report.console import Console  # a worker needs no rich

    pool, others = None, {*multiprocessing.active_children()}
    if jobs > 1:
        for name in ONE_THREAD:
            os.environ.setdefault(name, "1")  # inherited by the workers; this process has begun
        context = multiprocessing.get_context("spawn")
        pool = ProcessPoolExecutor(jobs, context, _begin, (os.getpid(),))

    def submit(function: Callable[..., Any], *task: Any) -> Callable[[], Any]:
        """Begin a task, but none for one job; return the function that waits for its result."""
        if pool is None:
            return partial(function, *task)
        mask = signal.pthread_sigmask(signal.SIG_BLOCK, LEFT_TO_PARENT)
        try:  # a process that this starts inherits the mask
            return pool.submit(function, *task).result
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, mask)

    def run(
        what: str, function: Callable[..., Any], tasks: Iterable[tuple[Any, ...]], images: int
    ) -> Iterator[Any]:
        begun, done = ((submit(function, *task), len(task[0])) for task in tasks), 0
        waiting, console = deque(islice(begun, AHEAD * jobs)), Console(stderr=True)
        with Progress(console=console, disable=not console.is_terminal) as bar:
            shown = bar.add_task(what, total=images)
            while waiting:
                result, count = waiting.popleft()
                yield result()
                waiting.extend(islice(begun, 1))
                done += count
                doing(f"{what} image {done:,} of {images:,}")
                bar.update(shown, completed=done)

    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # from Pillow, about unusual metadata
            yield run
    except BrokenProcessPool:
        raise RunError(
            "a worker process of pack died: --jobs 1 shows where; if memory ran out, use fewer"
            " --jobs"
        ) from None
    finally:
        if pool:
            workers = {*multiprocessing.active_children()} - others
            pool.shutdown(wait=False, cancel_futures=True)
            for worker in workers:  # may hang in an image
                worker.kill()


def _begin(parent: int) -> None:
    """Initialise a worker process."""
    end_with_parent(parent)
    warnings.simplefilter("ignore")
