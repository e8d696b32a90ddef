"""Read the samples of one split: rows of arrays in a file, a codec and sometimes an index.

    stored in                        codec   location of sample i
    pack of pixels                   raw     offset + i * image bytes
    pack of JPEG files               jpeg    bytes offsets[i] to offsets[i + 1]
    external HDF5 file, contiguous   raw     offset + rows[i] * image bytes
    external HDF5 file, otherwise    h5py    row rows[i] (``hdf5.py``)
    set of external HDF5 files       both    row rows[i] of all files (``file_set.py``)

What has an offset is read without HDF5 (``stored.py``).
"""

from __future__ import annotations

import math
import warnings
import zlib
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cached_property
from typing import TYPE_CHECKING, Any, NamedTuple, Self

import numpy as np

from hpctrain.data.file_set import FileSetRows
from hpctrain.data.orders import block_starts
from hpctrain.data.pack import LAYOUTS, Pack, checksum
from hpctrain.data.partition import READ_BYTES
from hpctrain.data.scale import WIDE, divide, is_nodata, unit_values
from hpctrain.data.stored import File, OffsetRows, RowReader, Stored, as_bytes
from hpctrain.data.target_rows import ExternalTargets, TargetRows
from hpctrain.data.targets import HELD_BYTES
from hpctrain.errors import RunError, UsageError

if TYPE_CHECKING:
    from hpctrain.data.images import Crop

MOST_AHEAD = 1 << 30  # bytes of images that are requested before any is read
TARGET_BYTES = 8 << 20  # of targets that are read at a time from a whole split
PROBED = 16  # images of an external file by which it is recognised
TASK_FILES = 8  # JPEG files that a thread decodes at a time
CORRUPT = "is corrupt: its bytes or its target differ from its checksum"
CORRUPT_COPY = f"{CORRUPT}: remove this copy, and the next launch copies the pack again"
NOT_FINITE = (
    "holds NaN or infinite values: write finite ones, take it out of the file, or leave NaN out by"
    " --nodata nan"
)
TOO_LARGE = (
    "holds values that are too large for float32, as stored or once divided by --max-value: write"
    " smaller ones, or take it out of the file"
)
NO_DATA = "holds no data, only values of --nodata: take it out of the file"

Bad = dict[int, str]  # samples that cannot be used, and why


class HeldNumbers(NamedTuple):
    """Targets, checksums and offsets that are kept in memory, by the names in `SplitInfo`."""

    samples: range
    arrays: dict[str, np.ndarray]  # (n, ...) each; of offsets, (n + 1,)


class Split:
    """The samples of one split of a pack or an external HDF5 file. Reading is thread-safe.

    Images have the shape ``image_shape`` (H, W, C) and are stored values of the type ``dtype``.
    Those that are not ``nodata`` must be finite as float32, divided by ``divisor``. A sample's
    checksum is compared when it is first read.
    """

    def __init__(
        self,
        pack: Pack,
        name: str,
        threads: int | None = None,
        verify: bool = True,
        check_values: bool = True,
    ) -> None:
        """Open a split. JPEG files are decoded, and pixels cropped, by `threads` threads, by
        default one per usable core, at most 8; without `verify`, checksums are not compared, and
        without `check_values`, images may have values that are not finite, or no data.

        Raises UsageError if a file is missing or not the one that was checked.
        """
        if name not in pack.splits:
            raise UsageError(f"{pack.path} has no split {name!r}; it has {', '.join(pack.splits)}")
        info = pack.splits[name]
        self.pack = pack
        self.name = name
        self.info = info
        if not verify:
            self.info = info._replace(crc32=None)
        self.image_shape = pack.image_shape
        self.dtype = pack.dtype
        self.divisor = pack.scale.divisor
        self.nodata = pack.scale.nodata
        self.threads = threads
        self._checks_values = check_values
        self._threads: ThreadPoolExecutor | None = None  # decode JPEG files
        self._croppers: ThreadPoolExecutor | None = None  # crop stored pixels
        self._held = HeldNumbers(range(0), {})  # replaced as a whole: other threads read it
        self._is_read_ahead = False  # whether `gather` asks the kernel for images before it reads
        self._seen = np.zeros(len(self), bool)  # read, and nothing was wrong
        files = info.files
        if files is None:
            self._file = File(info.path, pack.sizes[info.path])
        else:
            self._file = File(files.path(0), int(files.sizes[0]))
        self._images: RowReader = OffsetRows(self._file, info.images)
        self._targets: TargetRows | None = None  # of an external file, if they are not held
        try:
            if files is not None:
                self._images = FileSetRows(files, info.images)
            elif info.offsets:
                self._start_decoder()
            elif not info.images.offset:
                from hpctrain.data.hdf5 import Hdf5Rows  # imports h5py

                self._images = Hdf5Rows(info.path, info.images, pack.sizes)
            if isinstance(info.targets, ExternalTargets):
                self._targets = TargetRows(info.targets, pack.sizes)
            self._check_identity()
        except BaseException:
            self.close()
            raise

    def _start_decoder(self) -> None:
        """Start the threads that decode JPEG files."""
        from hpctrain.data.images import Fit, decode_threads  # imports Pillow

        warnings.filterwarnings("ignore", module=r"PIL\.")  # about unusual metadata
        height, width, channels = self.image_shape
        self._fit = Fit(
            width=width,
            height=height,
            channels=channels,
            crop=self.pack.fit == "crop",
        )
        self._threads = decode_threads(self.threads)

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
        shape = (len(indices), *self.image_shape)
        if out.dtype != self.dtype or out.shape != shape or not out.flags.c_contiguous:
            raise ValueError(
                f"out is {out.dtype} {out.shape}, not C-contiguous {(self.dtype, shape)}"
            )
        if self._threads:
            unusable = self._gather_files(self._threads, indices, out, crops)
        else:
            unusable = self._gather_rows(indices, out)
        self._report(unusable, bad)
        return out

    def crop(self, images: np.ndarray, crops: Sequence[Crop]) -> None:
        """Replace images of stored pixels (n, H, W, C) by crops (n) of them, in their size."""
        from hpctrain.data.crops import crop_images  # imports Pillow
        from hpctrain.data.images import decode_threads

        if self._croppers is None:
            self._croppers = decode_threads(self.threads)
        crop_images(images, crops, self.nodata, self._croppers)

    def _gather_files(
        self,
        threads: ThreadPoolExecutor,
        indices: np.ndarray,
        out: np.ndarray,
        crops: Sequence[Crop] | None,
    ) -> Bad:
        """Implement `gather` for JPEG files; return those that cannot be used."""
        order = np.argsort(indices, kind="stable")  # file order
        parts = np.split(order, range(TASK_FILES, len(order), TASK_FILES))
        unusable = Bad()
        for bad_files in threads.map(lambda part: self._decode(indices, part, out, crops), parts):
            unusable |= bad_files
        return unusable

    def _gather_rows(self, indices: np.ndarray, out: np.ndarray) -> Bad:
        """Implement `gather` for pixels; return the samples that cannot be used."""
        rows = self._rows_of(indices)
        is_any_new = not self._seen[indices].all()
        if self._is_read_ahead and is_any_new:
            self._images.read_ahead(rows)
        self._read_images(rows, out)
        unusable = self._compare(indices, out)
        if is_any_new and self._checks_values:
            for place, why in find_unusable(out, self.divisor, self.nodata).items():
                unusable[int(indices[place])] = why
            self._seen[[*unusable]] = False  # they are described whenever they are read
        return unusable

    def _rows_of(self, indices: np.ndarray) -> np.ndarray:
        """Return where these samples (n,) are in the stored images, (n,) int64."""
        if self.info.rows is None:
            return indices
        return self.info.rows[indices].astype(np.int64)

    def _read_target_rows(self, rows: np.ndarray) -> np.ndarray:
        """Return the targets of rows (n,) of an external file, (n, K). Raises RunError."""
        assert self._targets is not None
        return self._targets.read(rows)

    @cached_property
    def targets(self) -> np.ndarray:
        """The targets of all samples, (N, ...) as `read_targets` returns them.

        They are read on first access and kept: 8 bytes of a class, 1 of each of several classes, 4
        of each value.
        """
        return np.concatenate([*self.read_all_targets()])

    def read_targets(self, indices: np.ndarray, bad: Bad | None = None) -> np.ndarray:
        """Return the targets of the samples `indices` (n,).

        They are of the pack's kind: the class, (n,) int64; whether a sample has each class, (n, K)
        uint8, with 255 = unknown; or values, (n, T) float32, with NaN = unknown.

        A target with another entry is described in `bad`, and the entry returned as unknown, or as
        class 0: on a GPU, a target that is not a class ends the process. Raises RunError, for such
        a target, too, without `bad`.
        """
        self._check_indices(indices)
        kind = self.pack.targets
        targets = self._read_numbers("targets", indices).astype(kind.read_dtype)
        wrong = kind.replace_invalid(targets)
        if wrong:
            unusable = {int(indices[place]): f"is corrupt: {why}" for place, why in wrong.items()}
            self._report(unusable, bad)
        return targets

    def count_classes(self) -> np.ndarray:
        """Return the number of samples of each class, (K,) int64. Reads all targets, in parts.

        Of several classes, a sample counts for each that it is known to have.
        """
        counts = np.zeros(len(self.pack.classes), np.int64)
        for targets in self.read_all_targets():
            counts += self.pack.targets.count_known(targets)
        return counts

    def read_all_targets(self) -> Iterator[np.ndarray]:
        """Yield the targets of all samples in consecutive pieces; of no samples, one piece."""
        targets = self.pack.targets
        size = TARGET_BYTES // (targets.read_dtype.itemsize * math.prod(targets.shape))
        yield self.read_targets(np.arange(0))
        for piece in pieces(len(self), max(1, size)):
            yield self.read_targets(piece)

    def hold(self, samples: range) -> None:
        """Keep targets, checksums and offsets of `samples` in memory; others are read on demand.

        So are targets of more than HELD_BYTES a sample, always. The kernel is asked to read their
        images, too: at once if they take 1 GiB at most, else those of every call of `gather` when
        they are first read.
        """
        if samples == self._held.samples:
            return
        images = self.info.images
        if self.info.files is not None:
            self._is_read_ahead = True
        elif images.offset and not self.info.offsets:
            place = images.byte_range(samples.start, samples.stop)
            self._is_read_ahead = len(place) > MOST_AHEAD or self.info.rows is not None
            if not self._is_read_ahead:
                self._file.read_ahead(place.start, len(place))
        stops = {
            "targets": samples.stop,
            "crc32": samples.stop,
            "offsets": samples.stop + 1,
        }
        arrays: dict[str, np.ndarray] = {}
        for name, stop in stops.items():
            stored = getattr(self.info, name)
            if isinstance(stored, Stored) and stored.row_bytes <= HELD_BYTES:
                place = stored.byte_range(samples.start, stop)
                arrays[name] = np.empty((stop - samples.start, *stored.shape[1:]), stored.dtype)
                self._file.read(as_bytes(arrays[name]), place.start)
        self._held = HeldNumbers(samples, arrays)

    def _read_numbers(self, name: str, indices: np.ndarray) -> np.ndarray:
        """Return the targets, checksums or offsets of these samples, (n, ...). Raises RunError."""
        stored = getattr(self.info, name)
        if isinstance(stored, np.ndarray):
            return stored[indices]
        if isinstance(stored, ExternalTargets):
            return self._read_target_rows(self._rows_of(indices))
        samples, arrays = self._held
        if name in arrays:
            places = indices - samples.start
            if 0 <= places.min(initial=0) <= places.max(initial=0) < len(arrays[name]):
                return arrays[name][places]
        numbers = np.empty((len(indices), *stored.shape[1:]), stored.dtype)
        OffsetRows(self._file, stored).read(indices, numbers)
        return numbers

    @property
    def stored_bytes(self) -> int:
        """Bytes of a sample as it is stored: of a JPEG file, the mean."""
        images = self.info.images
        if self.info.offsets:
            return -(-images.shape[0] // len(self))
        return images.row_bytes

    def byte_range(self, samples: range) -> range:
        """Return where these JPEG files, n > 0, lie among the bytes of the split."""
        bounds = np.array([samples.start, samples.stop])
        return range(*self._read_numbers("offsets", bounds).tolist())

    def source_of(self, index: int) -> str:
        """Return where a sample came from: the name of a packed file relative to its source, a
        dataset and its row as "/x[5]", in a set of files "scans/a.h5:/x[5]", or "" if that is not
        known.
        """
        if self.info.rows is not None and self.info.files is not None:
            return self.info.files.place_of(int(self.info.rows[index]), self.info.images.dataset)
        if self.info.rows is not None:
            return f"{self.info.images.dataset}[{self.info.rows[index]}]"
        names = self.info.names
        if names is None:
            return ""
        bounds = self._read_numbers("name_offsets", np.array([index, index + 1]))
        start, stop = bounds.clip(0, names.shape[0]).tolist()  # no checksum covers them
        data = bytearray(max(0, stop - start))
        self._file.read(memoryview(data), names.offset + start)
        return data.decode("utf-8", "surrogateescape")

    @property
    def block_starts(self) -> np.ndarray | None:
        """The first sample of each block of a set of files, and N, (B + 1,).

        None: all blocks have ``pack.block_rows`` samples.
        """
        files = self.info.files
        if files is None or self.info.rows is None or not self.pack.block_rows:
            return None
        return block_starts(self.info.rows, files.block_bounds(self.pack.block_rows))

    def close(self) -> None:
        """Close the files and end the threads."""
        if self._threads:
            self._threads.shutdown(cancel_futures=True)
        if self._croppers:
            self._croppers.shutdown(cancel_futures=True)
        if self._targets:
            self._targets.close()
        self._images.close()
        self._file.close()

    def __len__(self) -> int:
        return self.info.samples

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: Any) -> None:
        self.close()

    def read_probe(self) -> tuple[np.ndarray, np.ndarray]:
        """Return some rows of an external file (n,), evenly spread, and their images."""
        rows = probe_rows(self.info.images.shape[0])
        images = np.empty((len(rows), *self.image_shape), self.dtype)
        self._read_images(rows, images)
        return rows, images

    def _check_identity(self) -> None:
        """Raise UsageError if the file is not the one that was opened before."""
        identity = self.pack.identity
        is_same = True
        if identity:
            uuid = bytearray(identity.shape[0])
            self._file.read(memoryview(uuid), identity.offset)
            is_same = uuid == self.pack.uuid.encode()
        elif self.info.probe is not None:
            rows, images = self.read_probe()
            is_same = probe_checksum(images, self.divisor) == self.info.probe
            if isinstance(self.info.targets, ExternalTargets):
                targets = self._read_target_rows(rows)
                is_same &= zlib.crc32(as_bytes(targets)) == self.info.targets.probe
        if not is_same:
            raise UsageError(
                f"{self.info.path} was replaced or overwritten since it was checked"
                f" (uuid {self.pack.uuid}){': remove it' if self.pack.staged else ''}"
            )

    def _check_indices(self, indices: np.ndarray) -> None:
        if len(indices) and not 0 <= indices.min() <= indices.max() < len(self):
            raise IndexError(f"samples {indices.min()} to {indices.max()} of only {len(self)}")

    def _report(self, unusable: Bad, bad: Bad | None) -> None:
        """Describe samples in `bad`, or raise RunError without it."""
        described = Bad()
        for index, why in unusable.items():
            sample = f"{self.info.path}: sample {index} of split {self.name!r}"
            source = self.source_of(index)
            if source:
                sample += f" ({source})"
            described[index] = f"{sample} {why}"
        if bad is not None:
            bad |= described
            return
        text = describe_first([described])
        if text:
            raise RunError(text)

    def _read_images(self, rows: np.ndarray, out: np.ndarray) -> None:
        """Read images (n, H, W, C), rearranged if they are stored in another order of axes."""
        pack = self.pack
        stored = self.info.images
        if pack.layout in ("NHWC", "NHW") and stored.dtype == self.dtype:
            self._images.read(rows, out.reshape(len(rows), *stored.shape[1:]))
            return
        step = max(1, READ_BYTES // stored.row_bytes)
        for first in range(0, len(rows), step):
            part = rows[first : first + step]
            values = np.empty((len(part), *stored.shape[1:]), stored.dtype)
            self._images.read(part, values)
            values = values.transpose(LAYOUTS[pack.layout]).reshape(len(part), *self.image_shape)
            out[first : first + step] = values

    def _decode(
        self,
        indices: np.ndarray,
        part: np.ndarray,
        out: np.ndarray,
        crops: Sequence[Crop] | None,
    ) -> Bad:
        """Read and decode the JPEG files `indices[part]`, or a crop of each, to `out[part]`."""
        from hpctrain.data.images import BadImage, decode_jpeg

        indices = indices[part]
        starts = self._read_numbers("offsets", indices).tolist()
        stops = self._read_numbers("offsets", indices + 1).tolist()
        files = [*map(self._read_file, starts, stops)]
        unusable = self._compare(indices, files)
        for place, index, file in zip(part.tolist(), indices.tolist(), files, strict=True):
            if index in unusable:
                continue
            crop = crops[place] if crops else None
            try:
                pixels = decode_jpeg(file, self._fit, crop)
                out[place] = np.frombuffer(pixels, np.uint8).reshape(self.image_shape)
            except BadImage as error:
                unusable[index] = f"cannot be decoded ({error})"
        return unusable

    def _read_file(self, start: int, stop: int) -> memoryview:
        """Return bytes `start` to `stop` of the JPEG files; none if these offsets are corrupt."""
        stored = self.info.images
        if not 0 <= start < stop <= stored.shape[0]:
            return memoryview(b"")
        file = memoryview(bytearray(stop - start))
        self._file.read(file, stored.offset + start)
        return file

    def _compare(self, indices: np.ndarray, images: Sequence[Any] | np.ndarray) -> Bad:
        """Return which of the samples (n,) that are read for the first time have other checksums.

        `images` (n,): their bytes, as stored.
        """
        seen = self._seen[indices]
        if seen.all():
            return Bad()
        new = indices[~seen]
        agrees = np.ones(len(new), bool)
        if self.info.crc32:
            if seen.any():
                images = [images[place] for place in np.flatnonzero(~seen).tolist()]
            seeds = self.pack.targets.seeds(self._read_numbers("targets", new))
            checksums = [*map(checksum, images, seeds)]
            agrees = np.array(checksums, np.uint32) == self._read_numbers("crc32", new)
        self._seen[new[agrees]] = True
        why = CORRUPT
        if self.pack.staged:
            why = CORRUPT_COPY
        return dict.fromkeys(new[~agrees].tolist(), why)


def find_unusable(images: np.ndarray, divisor: float, nodata: float | None) -> Bad:
    """Return which images (n, H, W, C) cannot be used, by their place, and why.

    Their values must be finite as float32, also divided, but for those that are no data, which must
    not be all.
    """
    unusable = Bad()
    missing = None
    if nodata is not None:
        missing = is_nodata(images, nodata)
        empty = missing.all(axis=(1, 2, 3))
        unusable |= dict.fromkeys(np.flatnonzero(empty).tolist(), NO_DATA)
    if images.dtype.kind == "f" or divisor < 1:
        if divisor < 1 or images.dtype.itemsize > 4:
            unusable |= _infinite_images(divide(images, divisor), missing, TOO_LARGE)
        unusable |= _infinite_images(images, missing, NOT_FINITE)
    return unusable


def _infinite_images(values: np.ndarray, missing: np.ndarray | None, why: str) -> Bad:
    """Return which images (n, H, W, C) hold NaN or infinity but for `missing` values, and `why`."""
    finite = np.isfinite(values)
    if missing is not None:
        finite |= missing
    return dict.fromkeys(np.flatnonzero(~finite.all(axis=(1, 2, 3))).tolist(), why)


def probe_rows(count: int) -> np.ndarray:
    """Return up to PROBED of so many rows, evenly spread."""
    rows = np.arange(PROBED) * (count - 1) // (PROBED - 1)
    return rows[np.diff(rows, prepend=-1) > 0]  # distinct: np.unique imports numpy.ma


def probe_checksum(images: np.ndarray, divisor: float) -> int:
    """Return the CRC-32 of images of `Split.read_probe`: divided, unless that rounds them."""
    values = images
    if images.dtype.name not in WIDE:
        values = unit_values(images, divisor)
    return zlib.crc32(as_bytes(values))


def describe_first(all_bad: Iterable[Bad]) -> str | None:
    """Describe in one sentence the samples that cannot be used, on all ranks; None = none."""
    texts = Bad()
    for bad in all_bad:
        texts |= bad
    if not texts:
        return None
    sentence = texts[min(texts)]
    is_corrupt = sentence.endswith(CORRUPT)
    if len(texts) > 1:
        sentence += f" ({len(texts)} such images)"
    if is_corrupt:
        sentence += "; 'hpctrain pack --check' lists all that are"
    return sentence


def held_bytes(column: Stored | np.ndarray | ExternalTargets) -> int:
    """Return the bytes that a rank keeps of one sample in a column, such as its targets."""
    if isinstance(column, ExternalTargets):
        return 0
    size = math.prod(column.shape[1:]) * np.dtype(column.dtype).itemsize
    return size if isinstance(column, np.ndarray) or size <= HELD_BYTES else 0


def pieces(samples: int, size: int) -> Iterator[np.ndarray]:
    """Yield 0 ... samples-1 in consecutive pieces, (n,) int64 with n <= `size`."""
    for start in range(0, samples, size):
        yield np.arange(start, min(samples, start + size))
