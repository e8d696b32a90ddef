"""Read the samples of one split: rows of arrays in a file, a codec and sometimes an index.

    stored in                        codec   location of sample i
    pack of pixels                   raw     offset + i * image bytes
    pack of JPEG files               jpeg    bytes offsets[i] to offsets[i + 1]
    external HDF5 file, contiguous   raw     offset + rows[i] * image bytes
    external HDF5 file, otherwise    h5py    row rows[i], in slabs (``hdf5.py``)

So a contiguous dataset of any HDF5 file is read like a pack: at an offset, by preadv(2), without
HDF5. This holds neither the library's lock nor the interpreter's, takes 1 to 2 microseconds per
sample instead of 30, and reports a truncated file as an error instead of a signal.

The path of a batch is pack (file and offsets) -> split -> order (``orders.py``: order of the
samples) -> loader (``loader.py``: prefetching, augmentation) -> device (``streams.py``).
"""

from __future__ import annotations

import os
import warnings
import zlib
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import cached_property
from itertools import pairwise
from typing import TYPE_CHECKING, Any, Self

import numpy as np

from hpctrain.data.pack import LAYOUTS, Pack, Stored, checksum
from hpctrain.data.partition import READ_BYTES
from hpctrain.errors import RunError, UsageError
from hpctrain.watchdog import doing

if TYPE_CHECKING:
    from hpctrain.data.hdf5 import Slabs
    from hpctrain.data.images import Crop

IOV_MAX = 1024  # most buffers of one preadv(2)
READ_AHEAD = 128 << 10  # bytes of one request; Linux may read only so much of a longer one
MOST_AHEAD = 1 << 30  # bytes of images that are requested before any is read
GATHER_ROWS = 1 << 16  # rows gathered at a time: their Python lists take 40 bytes per row
PIECE_ROWS = 1 << 20  # labels that are read at a time from a whole split
PROBED = 16  # images of an external file by which it is recognised
TASK_FILES = 8  # JPEG files that a thread decodes at a time
CORRUPT = "is corrupt: its bytes or its label differ from its checksum"
CORRUPT_COPY = f"{CORRUPT}: remove this copy, and the next launch copies the pack again"
NOT_FINITE = "holds NaN or infinite values: write finite ones, or take it out of the file"

Bad = dict[int, str]  # samples that cannot be used, and why


def as_bytes(array: np.ndarray) -> memoryview:
    """Return a writable view of the memory of a C-contiguous array."""
    return array.reshape(-1).view(np.uint8).data


class File:
    """A file that is read at offsets. Reading is thread-safe."""

    def __init__(self, path: str, size: int) -> None:
        """Open the file. Raises UsageError if it cannot be opened or is not `size` bytes long."""
        self.path, self.descriptor = path, -1
        try:
            self.descriptor = os.open(path, os.O_RDONLY)
        except OSError as error:
            raise UsageError(f"{path} cannot be opened: {error.strerror}") from None
        there = os.fstat(self.descriptor).st_size
        if size != there:
            self.close()
            raise UsageError(
                f"{path} has {there:,} bytes here, but {size:,} when it was checked: give every"
                " rank the same finished file"
            )

    def read(self, buffers: list[memoryview], offset: int) -> None:
        """Fill all buffers with consecutive bytes from `offset` on. Raises RunError."""
        while buffers:
            try:
                count = os.preadv(self.descriptor, buffers[:IOV_MAX], offset)
            except OSError as error:
                raise RunError(
                    f"{self.path}: reading at byte {offset:,} failed: {error.strerror}"
                ) from None
            if count == 0 and any(len(buffer) for buffer in buffers):
                missing = sum(len(buffer) for buffer in buffers)
                raise RunError(
                    f"{self.path} ends at byte {offset:,}, {missing:,} bytes before the end of the"
                    " samples asked for: it was cut short while in use"
                )
            offset += count
            while buffers and count >= len(buffers[0]):
                count -= len(buffers.pop(0))
            if buffers:
                buffers[0] = buffers[0][count:]

    def gather(
        self, offset: int, indices: np.ndarray, out: memoryview, ahead: bool = False
    ) -> None:
        """Read rows `indices` (n,) of the array at byte `offset` into n equal parts of `out`.

        Rows are read in file order. Consecutive rows are read by one preadv, as a scatter read if
        their positions in `out` are not consecutive. With `ahead`, the kernel is asked for all of
        them first, so that a disk serves many requests at a time. Raises RunError.
        """
        if len(indices) == 0:
            return
        row_bytes = len(out) // len(indices)
        order = np.argsort(indices, kind="stable")
        for begin in range(0, len(order), GATHER_ROWS):
            part = order[begin : begin + GATHER_ROWS]
            starts = offset + indices[part] * row_bytes
            self._gather_ascending(starts, part.tolist(), row_bytes, out, ahead)

    def _gather_ascending(
        self, starts: np.ndarray, places: list[int], row_bytes: int, out: memoryview, ahead: bool
    ) -> None:
        """Read rows at ascending offsets `starts` (n,) into the parts `places` (n,) of `out`."""
        cuts = (np.flatnonzero(np.diff(starts) != row_bytes) + 1).tolist()
        runs = [*zip([0, *cuts], [*cuts, len(places)], starts[[0, *cuts]].tolist(), strict=True)]
        for start, stop, at in runs if ahead else ():
            self.read_ahead(at, (stop - start) * row_bytes)
        for start, stop, at in runs:
            first, count = places[start], stop - start
            if count == 1 or places[start:stop] == list(range(first, first + count)):
                part = out[first * row_bytes : (first + count) * row_bytes]
                try:
                    if os.preadv(self.descriptor, (part,), at) == len(part):
                        continue  # nearly always
                except OSError:
                    pass  # `read` reports the reason
                buffers = [part]
            else:
                buffers = [out[i * row_bytes : (i + 1) * row_bytes] for i in places[start:stop]]
            self.read(buffers, at)

    def read_ahead(self, offset: int, size: int) -> None:
        """Ask the kernel for bytes that are read soon, without waiting for them."""
        with suppress(OSError):  # of a file system that cannot do it
            for start in range(offset, offset + size, READ_AHEAD):
                part = min(READ_AHEAD, offset + size - start)
                os.posix_fadvise(self.descriptor, start, part, os.POSIX_FADV_WILLNEED)

    def close(self) -> None:
        """Close the file."""
        if self.descriptor >= 0:
            os.close(self.descriptor)
            self.descriptor = -1


class Column:
    """A number per sample, (N,): labels, checksums or offsets. Those of a range may be held."""

    def __init__(self, file: File, stored: Stored | np.ndarray) -> None:
        """The numbers are stored in the file, or already in memory."""
        self._file, self._stored = file, stored
        # The first sample and the numbers from it on. One attribute: threads may read it meanwhile.
        self._held = 0, stored if isinstance(stored, np.ndarray) else np.empty(0)

    def hold(self, samples: range) -> None:
        """Keep the numbers of `samples` in memory; drop others. Raises RunError."""
        if isinstance(self._stored, Stored):
            numbers = np.empty(len(samples), self._stored.dtype)
            offset = self._stored.place + samples.start * self._stored.row_bytes
            self._file.read([as_bytes(numbers)], offset)
            self._held = samples.start, numbers

    def take(self, indices: np.ndarray) -> np.ndarray:
        """Return the numbers of these samples, (n,). Raises RunError if they cannot be read."""
        first, held = self._held
        places = indices - first
        low, high = places.min(initial=len(held)), places.max(initial=0)
        if isinstance(self._stored, np.ndarray) or 0 <= low <= high < len(held):
            return held[places]
        numbers = np.empty(len(indices), self._stored.dtype)
        self._file.gather(self._stored.place, indices, as_bytes(numbers))
        return numbers


class Split:
    """The samples of one split of a pack or an external HDF5 file. Reading is thread-safe.

    Images have the shape ``image_shape`` (H, W, C) and the type ``dtype``: uint8, or the floats of
    an external file, which must be finite. A sample's checksum is compared when it is first read.
    Labels, checksums and JPEG file offsets are read on demand; ``hold`` keeps those of a range of
    samples in memory.
    """

    def __init__(
        self, pack: Pack, name: str, threads: int | None = None, verify: bool = True
    ) -> None:
        """Open a split. JPEG files are decoded by `threads` threads; default: one per usable core,
        at most 8. Without `verify`, checksums are not compared.

        Raises UsageError if a file is missing or not the one that was checked.
        """
        if name not in pack.splits:
            raise UsageError(f"{pack.path} has no split {name!r}; it has {', '.join(pack.splits)}")
        self.pack, self.name, self.info = pack, name, pack.splits[name]
        self.image_shape, self.dtype = pack.image_shape, pack.dtype
        self._threads: ThreadPoolExecutor | None = None  # that decode
        self._slabs: Slabs | None = None
        self._held = range(0)  # samples whose numbers are in memory
        self._ahead = False  # whether `gather` asks the kernel for images before it reads them
        info = self.info
        self._file = File(info.path, pack.sizes[info.path])
        try:
            self._labels = Column(self._file, info.labels)
            self._crc32 = Column(self._file, info.crc32) if verify and info.crc32 else None
            self._offsets = Column(self._file, info.offsets) if info.offsets else None
            self._seen = np.zeros(len(self), bool)  # read, and its checksum agreed
            if info.offsets:
                self._start_decoding(threads)
            if info.images.offset is None:
                from hpctrain.data.hdf5 import Slabs  # imports h5py

                self._slabs = Slabs(info.path, info.images, pack.sizes)
            self._check_identity()
        except BaseException:
            self.close()
            raise

    def gather(
        self,
        indices: np.ndarray,
        out: np.ndarray,
        crops: Sequence[Crop] | None = None,
        bad: Bad | None = None,
    ) -> np.ndarray:
        """Read the samples `indices` (n,), in that order, into `out` and return it.

        `out` is (n, H, W, C) of ``dtype``. With `crops` (n,), a crop of each JPEG file is decoded.
        A sample that is corrupt or not finite is described in `bad`, or raises RunError without it.
        Raises RunError if a file is truncated.
        """
        self._check_indices(indices)
        shape = len(indices), *self.image_shape
        if out.shape != shape or out.dtype != self.dtype or not out.flags.c_contiguous:
            raise ValueError(
                f"out is {out.dtype} {out.shape}, not C-contiguous {self.dtype} {shape}"
            )
        info, found = self.info, Bad()
        if self._threads:
            self._gather_files(self._threads, indices, out, crops, found)
        else:
            rows = indices if info.rows is None else info.rows[indices].astype(np.int64)
            self._read_images(rows, out, self._ahead and not self._seen[indices].all())
            self._compare(indices, out, found)
            if self.dtype.kind == "f":
                finite = np.isfinite(out).all(axis=(1, 2, 3))
                found |= dict.fromkeys(indices[~finite].tolist(), NOT_FINITE)
        self._report(found, bad)
        return out

    @cached_property
    def labels(self) -> np.ndarray:
        """The labels of all samples, (N,) int64, read on first access and kept: 8 bytes each."""
        return self.read_labels(np.arange(len(self)))

    def read_labels(self, indices: np.ndarray, bad: Bad | None = None) -> np.ndarray:
        """Return the labels of the samples `indices` (n,), (n,) int64.

        A label that is not a class is described in `bad` and returned as 0; without `bad`, it
        raises RunError. Raises RunError if labels cannot be read.
        """
        self._check_indices(indices)
        labels, classes = self._labels.take(indices).astype(np.int64), len(self.pack.classes)
        wrong = np.flatnonzero((labels < 0) | (labels >= classes))
        if len(wrong):
            why = "is corrupt: its label is {}, and there are {} classes, 0 to {}"
            found = {
                int(indices[row]): why.format(labels[row], classes, classes - 1)
                for row in wrong.tolist()
            }
            self._report(found, bad)
            labels[wrong] = 0  # on a GPU, a target that is not a class ends the process
        return labels

    def count_classes(self) -> np.ndarray:
        """Return the number of samples of each class, (K,) int64. Reads all labels, in parts."""
        counts = np.zeros(len(self.pack.classes), np.int64)
        for part in pieces(len(self)):
            counts += np.bincount(self.read_labels(part), minlength=len(counts))
        return counts

    def hold(self, samples: range) -> None:
        """Keep the labels, checksums and offsets of `samples` in memory.

        The kernel is asked to read their images, too: at once if they take 1 GiB at most, else
        those of every call of `gather` when they are first read.
        """
        if samples == self._held:
            return
        images, size = self.info.images, len(samples) * self.info.images.row_bytes
        if images.offset is not None and not self._offsets:
            self._ahead = size > MOST_AHEAD or self.info.rows is not None
            if not self._ahead:
                self._file.read_ahead(images.offset + samples.start * images.row_bytes, size)
        self._labels.hold(samples)
        if self._crc32:
            self._crc32.hold(samples)
        if self._offsets:
            self._offsets.hold(range(samples.start, samples.stop + 1))
        self._held = samples

    @property
    def stored_bytes(self) -> int:
        """Bytes of a sample as it is stored: of a JPEG file, the mean."""
        images = self.info.images
        return -(-images.shape[0] // len(self)) if self.info.offsets else images.row_bytes

    def byte_range(self, samples: range) -> range:
        """Return where these JPEG files, n > 0, lie among the bytes of the split."""
        assert self._offsets
        return range(*self._offsets.take(np.array([samples.start, samples.stop])).tolist())

    def describe(self, index: int) -> str:
        """Return where a sample is stored and, if the pack says so, where it came from."""
        source, where = self.source_of(index), f"sample {index} of split {self.name!r}"
        if self.pack.external is not None and self.info.rows is None:  # no split is drawn yet
            return f"{self.info.path}: {source}"
        return f"{self.info.path}: {where}{f' ({source})' if source else ''}"

    @property
    def has_sources(self) -> bool:
        """Whether it is known where the samples came from."""
        return self.info.names is not None or self.pack.external is not None

    def source_of(self, index: int) -> str:
        """Return where a sample came from, or "" if that is not known.

        In a pack that is the name of a file, relative to the source that was packed; of an external
        file it is the dataset and the row, such as "/x[5]".
        """
        if self.pack.external is not None:
            row = index if self.info.rows is None else self.info.rows[index]
            return f"{self.info.images.dataset}[{row}]"
        if self.info.names is None:
            return ""
        names, ends = self.info.names
        start, stop = Column(self._file, ends).take(np.array([index, index + 1])).tolist()
        if not 0 <= start < stop <= names.shape[0]:  # no checksum covers them
            return ""
        data = bytearray(stop - start)
        self._file.read([memoryview(data)], names.place + start)
        return data.decode("utf-8", "surrogateescape")

    def close(self) -> None:
        """Close the file and end the threads."""
        if self._threads:
            self._threads.shutdown(cancel_futures=True)
        if self._slabs:
            self._slabs.close()
        self._file.close()

    def __len__(self) -> int:
        return self.info.samples

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: Any) -> None:
        self.close()

    def probe(self) -> int:
        """Return the CRC-32 of some images of the file, by which an external file is recognised."""
        rows = probed_rows(self.info.images.shape[0])
        images = np.empty((len(rows), *self.image_shape), self.dtype)
        self._read_images(rows, images)
        return zlib.crc32(as_bytes(images))

    def _check_identity(self) -> None:
        """Raise UsageError if the file is not the one that was opened before."""
        same, stored = True, self.pack.identity
        if stored:
            there = bytearray(stored.shape[0])
            self._file.read([memoryview(there)], stored.place)
            same = there == self.pack.uuid.encode()
        elif self.info.probe is not None:
            same = self.probe() == self.info.probe
        if not same:
            raise UsageError(
                f"{self.info.path} is not the file that was checked (uuid {self.pack.uuid}): it was"
                f" replaced or overwritten meanwhile{': remove it' * self.pack.staged}"
            )

    def _start_decoding(self, threads: int | None) -> None:
        from hpctrain.data.images import Fit, decode_threads  # imports Pillow

        warnings.filterwarnings("ignore", module=r"PIL\.")  # about unusual metadata
        (height, width, channels), crop = self.image_shape, self.pack.fit == "crop"
        self._fit = Fit(width, height, channels, crop=crop)
        self._threads = decode_threads(threads)

    def _check_indices(self, indices: np.ndarray) -> None:
        if len(indices) and not 0 <= indices.min() <= indices.max() < len(self):
            raise IndexError(
                f"samples {indices.min()} to {indices.max()} asked of a split that has {len(self)}"
            )

    def _report(self, found: Bad, bad: Bad | None) -> None:
        """Describe the samples `found` in `bad`, or raise RunError without it."""
        described = {index: f"{self.describe(index)} {why}" for index, why in found.items()}
        if bad is not None:
            bad |= described
        elif text := describe_first([described]):
            raise RunError(text)

    def _read_images(self, rows: np.ndarray, out: np.ndarray, ahead: bool = False) -> None:
        """Read images (n, H, W, C): rearranged and divided, if they are not stored as such."""
        pack, stored = self.pack, self.info.images
        if pack.layout in ("NHWC", "NHW") and not pack.max_value:
            self._read_rows(rows, out.reshape(len(rows), *stored.shape[1:]), ahead)
            return
        step = max(1, READ_BYTES // stored.row_bytes)
        for first in range(0, len(rows), step):
            part = rows[first : first + step]
            values = np.empty((len(part), *stored.shape[1:]), stored.dtype)
            self._read_rows(part, values, ahead)
            images = values.transpose(LAYOUTS[pack.layout]).reshape(len(part), *self.image_shape)
            if pack.max_value:  # with 255, bytes become what those of a pack become
                images = images.astype(np.float32) * np.float32(1 / pack.max_value)
            out[first : first + step] = images

    def _read_rows(self, rows: np.ndarray, out: np.ndarray, ahead: bool) -> None:
        """Read rows of the images, (n, ...) as they are stored."""
        if self._slabs:
            self._slabs.read(rows, out)
        else:
            self._file.gather(self.info.images.place, rows, as_bytes(out), ahead)

    def _gather_files(
        self,
        threads: ThreadPoolExecutor,
        indices: np.ndarray,
        out: np.ndarray,
        crops: Sequence[Crop] | None,
        bad: Bad,
    ) -> None:
        """Read and decode JPEG files, or a crop of each."""
        from hpctrain.data.images import BadImage, decode_jpeg

        order = np.argsort(indices, kind="stable")  # file order

        def gather_part(places: np.ndarray) -> None:
            numbers = indices[places]
            files = [*self._read_files(numbers)]
            self._compare(numbers, files, bad)
            for place, number, file in zip(places.tolist(), numbers.tolist(), files, strict=True):
                if number in bad:
                    continue
                try:
                    pixels = decode_jpeg(file, self._fit, crops[place] if crops else None)
                    out[place] = np.frombuffer(pixels, np.uint8).reshape(self.image_shape)
                except BadImage as error:
                    bad[number] = f"cannot be decoded ({error})"

        parts = [order[start : start + TASK_FILES] for start in range(0, len(order), TASK_FILES)]
        for _ in threads.map(gather_part, parts):  # raises the error of the first part that has one
            pass

    def _read_files(self, indices: np.ndarray) -> Iterator[memoryview]:
        """Yield the JPEG files of `indices` (n,), in order; consecutive ones are read together.

        A file whose offsets are not within the split's bytes is empty.
        """
        stored = self.info.images
        if not (len(indices) and self._offsets):
            return
        starts, stops = self._offsets.take(indices), self._offsets.take(indices + 1)
        lost = ~((starts >= 0) & (starts < stops) & (stops <= stored.shape[0]))
        starts, stops = np.where(lost, 0, starts), np.where(lost, 0, stops)
        apart = (starts[1:] != stops[:-1]) | (np.diff(starts // READ_BYTES) != 0)
        cuts = (np.flatnonzero(apart) + 1).tolist()
        for first, last in zip([0, *cuts], [*cuts, len(indices)], strict=True):
            start, ends = int(starts[first]), (stops[first:last] - starts[first]).tolist()
            data = memoryview(bytearray(ends[-1]))
            self._file.read([data], stored.place + start)
            yield from (data[a:b] for a, b in pairwise([0, *ends]))

    def _compare(self, indices: np.ndarray, images: Sequence[Any] | np.ndarray, bad: Bad) -> None:
        """Compare the checksums of samples that are read for the first time.

        `images` are the bytes of the samples `indices` (n,).
        """
        if (seen := self._seen[indices]).all():
            return
        if not self._crc32:
            self._seen[indices] = True
            return
        new, labels = indices, self._labels.take(indices)
        if seen.any():
            places = np.flatnonzero(~seen)
            new, labels = indices[places], labels[places]
            images = [images[place] for place in places.tolist()]
        found = np.fromiter(map(checksum, images, labels.tolist()), np.uint32, len(new))
        why = CORRUPT_COPY if self.pack.staged else CORRUPT
        agrees = found == self._crc32.take(new)
        bad |= dict.fromkeys(new[~agrees].tolist(), why)
        self._seen[new[agrees]] = True


def find_corrupt(pack: Pack) -> Iterator[str]:
    """Read all samples of a pack; yield a line for each that is corrupt."""
    for name in pack.splits:
        with Split(pack, name) as split:
            for indices in pieces(len(split), max(1, READ_BYTES // pack.image_bytes)):
                doing(f"checking sample {indices[0]:,} of {name}")
                bad = Bad()
                out = np.empty((len(indices), *split.image_shape), split.dtype)
                split.gather(indices, out, bad=bad)
                split.read_labels(indices, bad)
                yield from bad.values()


def describe_first(found: Iterable[Bad]) -> str | None:
    """Describe in one sentence the samples that cannot be used, found by all ranks; None = none."""
    texts = {index: text for each in found for index, text in each.items()}
    if not texts:
        return None
    first, count = texts[min(texts)], len(texts)
    hint = "; 'hpctrain pack --check' lists all that are" if first.endswith(CORRUPT) else ""
    return first + (f" ({count} such images)" if count > 1 else "") + hint


def pieces(samples: int, size: int = PIECE_ROWS) -> Iterator[np.ndarray]:
    """Yield 0 ... samples-1 in consecutive pieces, (n,) int64 with n <= `size`."""
    for start in range(0, samples, size):
        yield np.arange(start, min(samples, start + size))


def probed_rows(rows: int) -> np.ndarray:
    """Return PROBED of this number of rows, or all, evenly spread, (n,) int64."""
    count = min(PROBED, rows)
    return np.unique(np.arange(count) * (rows - 1) // max(1, count - 1))
