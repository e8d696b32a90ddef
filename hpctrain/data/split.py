"""Read the samples of one split: rows of arrays in a file, a codec and sometimes an index.

    stored in                        codec   location of sample i
    pack of pixels                   raw     offset + i * image bytes
    pack of JPEG files               jpeg    bytes offsets[i] to offsets[i + 1]
    external HDF5 file, contiguous   raw     offset + rows[i] * image bytes
    external HDF5 file, otherwise    h5py    row rows[i] (``external.py``)

A contiguous dataset is read by preadv(2), without HDF5: this holds neither the library's lock nor
the interpreter's, takes 1 to 2 microseconds per sample instead of 30, and reports a truncated file
as an error instead of a signal, unlike a memory map.
"""

from __future__ import annotations

import os
import warnings
import zlib
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import cached_property
from typing import TYPE_CHECKING, Any, Self

import numpy as np

from hpctrain.data.pack import LAYOUTS, Pack, Stored, checksum
from hpctrain.data.partition import READ_BYTES
from hpctrain.data.scale import divide
from hpctrain.errors import RunError, UsageError

if TYPE_CHECKING:
    from hpctrain.data.external import Rows
    from hpctrain.data.images import Crop

READ_AHEAD = 128 << 10  # bytes of one request; Linux may read only so much of a longer one
MOST_AHEAD = 1 << 30  # bytes of images that are requested before any is read
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
        self.path, self._descriptor = path, -1
        try:
            self._descriptor = os.open(path, os.O_RDONLY)
        except OSError as error:
            raise UsageError(f"{path} cannot be opened: {error.strerror}") from None
        if (there := os.fstat(self._descriptor).st_size) != size:
            self.close()
            sizes = f"{there:,} bytes here, but {size:,} when it was checked"
            raise UsageError(f"{path} has {sizes}: give every rank the same finished file")

    def read(self, buffer: memoryview, offset: int) -> None:
        """Fill `buffer` with the bytes from `offset` on. Raises RunError."""
        while True:
            try:
                count = os.preadv(self._descriptor, (buffer,), offset)
            except OSError as error:
                reason = f"reading at byte {offset:,} failed: {error.strerror}"
                raise RunError(f"{self.path}: {reason}") from None
            if count == len(buffer):
                return
            if count == 0:
                raise RunError(f"{self.path} was cut short while in use: no byte {offset:,}")
            buffer, offset = buffer[count:], offset + count

    def gather(
        self, offset: int, indices: np.ndarray, out: memoryview, ahead: bool = False
    ) -> None:
        """Read rows `indices` (n,) of the array at byte `offset` into n equal parts of `out`.

        Rows are read in file order; a run of consecutive ones by one preadv. With `ahead`, the
        kernel is asked for all of them first. Raises RunError.
        """
        if len(indices) == 0:
            return
        size = len(out) // len(indices)
        order = np.argsort(indices, kind="stable")
        rows = indices[order]
        cuts = np.flatnonzero((np.diff(rows) != 1) | (np.diff(order) != 1)) + 1
        bounds = np.concatenate([[0], cuts, [len(rows)]])
        first, lengths = bounds[:-1], (np.diff(bounds) * size).tolist()
        places, starts = (order[first] * size).tolist(), (offset + rows[first] * size).tolist()
        for start, length in zip(starts, lengths, strict=True) if ahead else ():
            self.read_ahead(start, length)
        for place, start, length in zip(places, starts, lengths, strict=True):
            self.read(out[place : place + length], start)

    def read_ahead(self, offset: int, size: int) -> None:
        """Ask the kernel for bytes that are read soon, without waiting for them."""
        with suppress(OSError):  # of a file system that cannot do it
            for start in range(offset, offset + size, READ_AHEAD):
                part = min(READ_AHEAD, offset + size - start)
                os.posix_fadvise(self._descriptor, start, part, os.POSIX_FADV_WILLNEED)

    def close(self) -> None:
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1


class Split:
    """The samples of one split of a pack or an external HDF5 file. Reading is thread-safe.

    Images have the shape ``image_shape`` (H, W, C) and the type ``dtype``: uint8, or the floats of
    an external file, which must be finite. A sample's checksum is compared when it is first read.
    """

    def __init__(
        self, pack: Pack, name: str, threads: int | None = None, verify: bool = True
    ) -> None:
        """Open a split. JPEG files are decoded by `threads` threads, by default one per usable
        core, at most 8; without `verify`, checksums are not compared.

        Raises UsageError if a file is missing or not the one that was checked.
        """
        if name not in pack.splits:
            raise UsageError(f"{pack.path} has no split {name!r}; it has {', '.join(pack.splits)}")
        info = pack.splits[name]
        self.pack, self.name = pack, name
        self.info = info if verify else info._replace(crc32=None)
        self.image_shape, self.dtype = pack.image_shape, pack.dtype
        self.threads = threads
        self._threads: ThreadPoolExecutor | None = None  # that decode
        self._rows: Rows | None = None
        # Samples whose numbers are in memory, and these: one attribute, for other threads.
        self._held: tuple[range, dict[str, np.ndarray]] = range(0), {}
        self._ahead = False  # whether `gather` asks the kernel for images before it reads them
        self._seen = np.zeros(len(self), bool)  # read, and its checksum agreed
        self._file = File(info.path, pack.sizes[info.path])
        try:
            if info.offsets:
                from hpctrain.data.images import Fit, decode_threads  # imports Pillow

                warnings.filterwarnings("ignore", module=r"PIL\.")  # about unusual metadata
                height, width, channels = self.image_shape
                self._fit = Fit(width, height, channels, crop=pack.fit == "crop")
                self._threads = decode_threads(threads)
            elif not info.images.offset:
                from hpctrain.data.external import Rows  # imports h5py

                self._rows = Rows(info.path, info.images, pack.sizes)
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
        """Read the samples `indices` (n,), in that order, into `out` (n, H, W, C) and return it.

        With `crops` (n,), a crop of each JPEG file is decoded. A sample that is corrupt or not
        finite is described in `bad`, or raises RunError without it, as a truncated file does.
        """
        self._check_indices(indices)
        wanted, found = (self.dtype, (len(indices), *self.image_shape)), Bad()
        if (out.dtype, out.shape) != wanted or not out.flags.c_contiguous:
            raise ValueError(f"out is {out.dtype} {out.shape}, not C-contiguous {wanted}")
        if self._threads:
            order = np.argsort(indices, kind="stable")  # file order
            parts = np.split(order, range(TASK_FILES, len(order), TASK_FILES))
            decoded = self._threads.map(lambda part: self._decode(indices, part, out, crops), parts)
            for bad_files in decoded:
                found |= bad_files
        else:
            rows = indices if self.info.rows is None else self.info.rows[indices].astype(np.int64)
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
        return np.concatenate([np.empty(0, np.int64), *map(self.read_labels, pieces(len(self)))])

    def read_labels(self, indices: np.ndarray, bad: Bad | None = None) -> np.ndarray:
        """Return the labels of the samples `indices` (n,), (n,) int64. Raises RunError.

        A label that is not a class is described in `bad` and returned as 0; without `bad`, it
        raises RunError.
        """
        self._check_indices(indices)
        labels, classes = self._take("labels", indices).astype(np.int64), len(self.pack.classes)
        wrong = (labels < 0) | (labels >= classes)
        if wrong.any():
            why = f"is corrupt: its label is {{}}, and there are {classes} classes"
            pairs = zip(indices[wrong].tolist(), labels[wrong].tolist(), strict=True)
            self._report({index: why.format(label) for index, label in pairs}, bad)
            labels[wrong] = 0  # on a GPU, a target that is not a class ends the process
        return labels

    def count_classes(self) -> np.ndarray:
        """Return the number of samples of each class, (K,) int64. Reads all labels, in parts."""
        classes = len(self.pack.classes)
        parts = (np.bincount(self.read_labels(p), minlength=classes) for p in pieces(len(self)))
        return sum(parts, np.zeros(classes, np.int64))

    def hold(self, samples: range) -> None:
        """Keep the labels, checksums and offsets of `samples` in memory; others are read on demand.

        The kernel is asked to read their images, too: at once if they take 1 GiB at most, else
        those of every call of `gather` when they are first read.
        """
        if samples == self._held[0]:
            return
        images, size = self.info.images, len(samples) * self.info.images.row_bytes
        if images.offset and not self.info.offsets:
            self._ahead = size > MOST_AHEAD or self.info.rows is not None
            if not self._ahead:
                self._file.read_ahead(images.offset + samples.start * images.row_bytes, size)
        held: dict[str, np.ndarray] = {}
        for name in ("labels", "crc32", "offsets"):
            if isinstance(stored := getattr(self.info, name), Stored):
                held[name] = np.empty(len(samples) + (name == "offsets"), stored.dtype)
                offset = stored.offset + samples.start * stored.row_bytes
                self._file.read(as_bytes(held[name]), offset)
        self._held = samples, held

    def _take(self, name: str, indices: np.ndarray) -> np.ndarray:
        """Return the labels, checksums or offsets of these samples, (n,). Raises RunError."""
        (samples, held), stored = self._held, getattr(self.info, name)
        if isinstance(stored, np.ndarray):
            return stored[indices]
        places = indices - samples.start
        if name in held and 0 <= places.min(initial=0) <= places.max(initial=0) < len(held[name]):
            return held[name][places]
        numbers = np.empty(len(indices), stored.dtype)
        self._file.gather(stored.offset, indices, as_bytes(numbers))
        return numbers

    @property
    def stored_bytes(self) -> int:
        """Bytes of a sample as it is stored: of a JPEG file, the mean."""
        images = self.info.images
        return -(-images.shape[0] // len(self)) if self.info.offsets else images.row_bytes

    def byte_range(self, samples: range) -> range:
        """Return where these JPEG files, n > 0, lie among the bytes of the split."""
        return range(*self._take("offsets", np.array([samples.start, samples.stop])).tolist())

    def source_of(self, index: int) -> str:
        """Return where a sample came from: the name of a packed file relative to its source, a
        dataset and its row as "/x[5]", or "" if that is not known.
        """
        if self.info.rows is not None:
            return f"{self.info.images.dataset}[{self.info.rows[index]}]"
        if (names := self.info.names) is None:
            return ""
        bounds = self._take("name_offsets", np.array([index, index + 1]))
        start, stop = bounds.clip(0, names.shape[0]).tolist()  # no checksum covers them
        data = bytearray(max(0, stop - start))
        self._file.read(memoryview(data), names.offset + start)
        return data.decode("utf-8", "surrogateescape")

    def close(self) -> None:
        """Close the file and end the threads."""
        if self._threads:
            self._threads.shutdown(cancel_futures=True)
        if self._rows:
            self._rows.close()
        self._file.close()

    def __len__(self) -> int:
        return self.info.samples

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: Any) -> None:
        self.close()

    def read_probe(self) -> tuple[np.ndarray, np.ndarray]:
        """Return some rows of an external file (n,), evenly spread, and their images."""
        last = self.info.images.shape[0] - 1
        rows = np.unique(np.arange(PROBED) * last // (PROBED - 1))
        images = np.empty((len(rows), *self.image_shape), self.dtype)
        self._read_images(rows, images)
        return rows, images

    def _check_identity(self) -> None:
        """Raise UsageError if the file is not the one that was opened before."""
        same, stored = True, self.pack.identity
        if stored:
            there = bytearray(stored.shape[0])
            self._file.read(memoryview(there), stored.offset)
            same = there == self.pack.uuid.encode()
        elif self.info.probe is not None:
            same = zlib.crc32(as_bytes(self.read_probe()[1])) == self.info.probe
        if not same:
            reason = f"replaced or overwritten since it was checked (uuid {self.pack.uuid})"
            raise UsageError(f"{self.info.path} was {reason}{': remove it' * self.pack.staged}")

    def _check_indices(self, indices: np.ndarray) -> None:
        if len(indices) and not 0 <= indices.min() <= indices.max() < len(self):
            raise IndexError(f"samples {indices.min()} to {indices.max()} of only {len(self)}")

    def _report(self, found: Bad, bad: Bad | None) -> None:
        """Describe the samples `found` in `bad`, or raise RunError without it."""
        described = Bad()
        for index, why in found.items():
            source = f" ({name})" if (name := self.source_of(index)) else ""
            sample = f"{self.info.path}: sample {index} of split {self.name!r}{source}"
            described[index] = f"{sample} {why}"
        if bad is not None:
            bad |= described
        elif text := describe_first([described]):
            raise RunError(text)

    def _read_images(self, rows: np.ndarray, out: np.ndarray, ahead: bool = False) -> None:
        """Read images (n, H, W, C): rearranged and divided, if they are not stored as such."""
        pack, stored = self.pack, self.info.images
        is_plain = pack.layout in ("NHWC", "NHW") and not pack.divisor
        step = max(1, len(rows) if is_plain else READ_BYTES // stored.row_bytes)
        for first in range(0, len(rows), step):
            part, images = rows[first : first + step], out[first : first + step]
            shape = (len(part), *stored.shape[1:])
            values = images.reshape(shape) if is_plain else np.empty(shape, stored.dtype)
            if self._rows:
                self._rows.read(part, values)
            else:
                self._file.gather(stored.offset, part, as_bytes(values), ahead)
            if not is_plain:
                values = values.transpose(LAYOUTS[pack.layout]).reshape(images.shape)
                if pack.divisor:  # with 255, values become what bytes of a pack become
                    with np.errstate(over="ignore", invalid="ignore"):  # `gather` reports these
                        values = divide(values, pack.divisor)
                images[...] = values

    def _decode(
        self, indices: np.ndarray, part: np.ndarray, out: np.ndarray, crops: Sequence[Crop] | None
    ) -> Bad:
        """Read and decode the JPEG files `indices[part]`, or a crop of each, to `out[part]`."""
        from hpctrain.data.images import BadImage, decode_jpeg

        stored, files, bad, indices = self.info.images, list[memoryview](), Bad(), indices[part]
        ends = zip(*(self._take("offsets", indices + n).tolist() for n in (0, 1)), strict=True)
        for start, stop in ends:
            is_within = 0 <= start < stop <= stored.shape[0]
            files.append(memoryview(bytearray(stop - start if is_within else 0)))  # empty: corrupt
            self._file.read(files[-1], stored.offset + start * is_within)
        self._compare(indices, files, bad)
        for place, number, file in zip(part.tolist(), indices.tolist(), files, strict=True):
            if number not in bad:
                try:
                    pixels = decode_jpeg(file, self._fit, crops[place] if crops else None)
                    out[place] = np.frombuffer(pixels, np.uint8).reshape(self.image_shape)
                except BadImage as error:
                    bad[number] = f"cannot be decoded ({error})"
        return bad

    def _compare(self, indices: np.ndarray, images: Sequence[Any] | np.ndarray, bad: Bad) -> None:
        """Compare the checksums of `indices` (n,) that are read for the first time, as `images`."""
        if (seen := self._seen[indices]).all():
            return
        new = indices[~seen]
        agrees = np.ones(len(new), bool)
        if self.info.crc32:
            if seen.any():
                images = [images[place] for place in np.flatnonzero(~seen).tolist()]
            found = [*map(checksum, images, self._take("labels", new).tolist())]
            agrees = np.array(found, np.uint32) == self._take("crc32", new)
            why = CORRUPT_COPY if self.pack.staged else CORRUPT
            bad |= dict.fromkeys(new[~agrees].tolist(), why)
        self._seen[new[agrees]] = True


def describe_first(found: Iterable[Bad]) -> str | None:
    """Describe in one sentence the samples that cannot be used, found by all ranks; None = none."""
    texts = {index: text for each in found for index, text in each.items()}
    if not texts:
        return None
    first, count = texts[min(texts)], f" ({len(texts)} such images)" if len(texts) > 1 else ""
    hint = "; 'hpctrain pack --check' lists all that are" if first.endswith(CORRUPT) else ""
    return first + count + hint


def pieces(samples: int, size: int = PIECE_ROWS) -> Iterator[np.ndarray]:
    """Yield 0 ... samples-1 in consecutive pieces, (n,) int64 with n <= `size`."""
    for start in range(0, samples, size):
        yield np.arange(start, min(samples, start + size))
