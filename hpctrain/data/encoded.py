"""The rows of a split of JPEG files: read by byte offset, decoded by several threads.

``Encoded`` is a source like any other (``source.py``). For random parts of its images, which are
other ones in every epoch, nothing decoded may be kept: ``Encoded.files`` is the same split as a
source of undecoded files, which readers order, read ahead and keep like rows, and
``Encoded.decode`` makes rows of what a reader gave.

Threads share the work because Pillow decodes and resizes without the interpreter's lock. An image
is decoded by one thread, so their number changes no bit.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from itertools import pairwise

import numpy as np

from hpctrain.data.checks import Checks
from hpctrain.data.images import BadImage, Fit
from hpctrain.data.jpeg import Crop, decode_row, draw_crops
from hpctrain.data.offsets import read_offsets
from hpctrain.data.pack_file import PackFile, check_out, check_rows, read_exactly
from hpctrain.data.pack_format import Pack
from hpctrain.errors import UsageError

MOST_THREADS = 8
TASK_ROWS = 8  # that a thread takes at a time
READ_BYTES = 4 << 20  # read in one go, about


def decode_threads(threads: int | None = None) -> ThreadPoolExecutor:
    """So many threads; by default as many as cores may be used, at most 8."""
    return ThreadPoolExecutor(threads or min(MOST_THREADS, len(os.sched_getaffinity(0))), "decode")


def share_rows(threads: ThreadPoolExecutor, make: Callable[[slice], None], count: int) -> None:
    """Call `make` for all parts of `count` rows; of several errors the first part's is raised, when
    no thread writes any longer.
    """
    tasks: list[Future[None]] = [
        threads.submit(make, slice(start, min(count, start + TASK_ROWS)))
        for start in range(0, count, TASK_ROWS)
    ]
    wait(tasks)
    for task in tasks:
        task.result()


class Encoded(PackFile):
    """The rows of one split of a pack of JPEG files. Reading is thread-safe.

    ``labels`` is an (N,) int64 array, images are of ``dtype`` uint8 once decoded. Opening raises
    UsageError as ``PackFile`` does, and where the offsets of the files are damaged.
    """

    dtype = np.dtype(np.uint8)

    def __init__(
        self,
        pack: Pack,
        split_name: str,
        threads: int | None = None,
        checks: Checks | None = None,
    ) -> None:
        """Decode with `threads` threads; by default as many as cores may be used, at most 8."""
        if not pack.encoded:
            raise UsageError(f"{pack.path} holds pixels, not JPEG files: pack with --encoding jpeg")
        warnings.filterwarnings("ignore", module=r"PIL\.")  # remarks on odd metadata
        super().__init__(pack, split_name, checks)
        height, width, channels = pack.image_shape
        self._fit = Fit(width, height, channels, crop=pack.fit == "crop")
        self._threads = decode_threads(threads)
        try:
            self._offsets = read_offsets(self)  # (N + 1,)
        except BaseException:
            self.close()
            raise
        self.files = Files(self)

    def gather(self, indices: np.ndarray, out: np.ndarray) -> np.ndarray:
        """Read and decode the rows `indices` (n,), in that order, into `out` (n, H, W, C) uint8;
        returns it. RunError where the file has become shorter, or names a row that is no image.
        """
        check_out(out, (len(indices), *self.image_shape), self.dtype)
        check_rows(indices, len(self))
        order = np.argsort(indices, kind="stable")  # as they lie in the file

        def make(part: slice) -> None:
            places = order[part]
            for place, data in zip(places.tolist(), self.read(indices[places]), strict=True):
                out[place] = self._row(int(indices[place]), data)

        share_rows(self._threads, make, len(indices))
        return out

    def decode(
        self, files: np.ndarray, rows: np.ndarray, out: np.ndarray, least: float, key: int
    ) -> np.ndarray:
        """A random part of each of the `files` (n,) of `rows` (n,) into `out` (n, H, W, C) uint8,
        of at least the share `least` of its area, by `key` and its place alone; returns `out`.
        RunError as in `gather`.
        """
        check_out(out, (len(files), *self.image_shape), self.dtype)
        crops = draw_crops(least, len(files), key)

        def make(part: slice) -> None:
            for place in range(part.start, part.stop):
                out[place] = self._row(int(rows[place]), files[place], crops[place])

        share_rows(self._threads, make, len(files))
        return out

    def read(self, rows: np.ndarray) -> Iterator[memoryview]:
        """The files of `rows` (n,), in that order; consecutive ones are read together."""
        if len(rows) == 0:
            return
        self.touch("bytes", rows, self._offsets[rows], self._offsets[rows + 1])
        apart = (np.diff(rows) != 1) | (np.diff(self._offsets[rows] // READ_BYTES) != 0)
        cuts = (np.flatnonzero(apart) + 1).tolist()
        for start, stop in zip([0, *cuts], [*cuts, len(rows)], strict=True):
            ends = self._offsets[int(rows[start]) : int(rows[stop - 1]) + 2]
            data = memoryview(bytearray(int(ends[-1] - ends[0])))
            offset = self.split.images_offset + int(ends[0])
            read_exactly(self.pack.path, self.descriptor, [data], offset)
            bounds = (ends - ends[0]).tolist()
            yield from (data[a:b] for a, b in pairwise(bounds))

    def extent(self, rows: range) -> tuple[int, int]:
        """The bytes of the files' column, first and after the last, that hold these rows."""
        return int(self._offsets[rows.start]), int(self._offsets[rows.stop])

    def close(self) -> None:
        """End the threads and close the file; labels stay."""
        if hasattr(self, "_threads"):  # else opening failed
            self._threads.shutdown(cancel_futures=True)
        super().close()

    def __enter__(self) -> Encoded:
        return self

    def _row(
        self, row: int, data: bytes | memoryview, crop: Crop | None = None
    ) -> np.ndarray | int:
        """The pixels (H, W, C) of a row; 0 for one that cannot be used."""
        try:
            pixels = decode_row(data, self._fit, crop)
        except BadImage as error:
            self.meet_bad(row, f"cannot be decoded ({error})")
            return 0
        return np.frombuffer(pixels, np.uint8).reshape(self.image_shape)


class Files:
    """The same rows undecoded: a source whose images are (n,) objects, bytes each."""

    dtype = np.dtype(object)
    image_shape: tuple[int, ...] = ()

    def __init__(self, encoded: Encoded) -> None:
        self.labels, self._encoded = encoded.labels, encoded
        self.row_bytes = -(-encoded.split.files_bytes // encoded.split.rows)  # on average

    def gather(self, indices: np.ndarray, out: np.ndarray) -> np.ndarray:
        """Read the files of the rows `indices` (n,), in that order, into `out` (n,) of objects;
        returns it. RunError where the pack's file has become shorter.
        """
        check_rows(indices, len(self.labels))
        order = np.argsort(indices, kind="stable")
        for place, data in zip(order.tolist(), self._encoded.read(indices[order]), strict=True):
            out[place] = bytes(data)  # on its own: what is kept shall not hold its neighbours
        return out
