"""Read the samples of one split: bytes at offsets of a file, a codec and sometimes an index.

    stored in                        codec   location of sample i
    pack of pixels                   raw     offset + i * image bytes
    pack of JPEG files               jpeg    bytes offsets[i] to offsets[i + 1]
    external HDF5 file, contiguous   raw     offset + index[i] * image bytes
    external HDF5 file, in chunks    chunk   row index[i], read by h5py (``hdf5_chunks.py``)

So a contiguous dataset of any HDF5 file is read like a pack: at an offset, without HDF5. The path
of a batch is pack (file and offsets) -> split -> order (``orders.py``: order of the samples) ->
loader (``loader.py``: prefetching, augmentation) -> device (``streams.py``).
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cached_property
from importlib import import_module
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import numpy as np

from hpctrain.data.checks import Checks, as_bytes, gather_rows, open_file, open_pack, read_exactly
from hpctrain.data.columns import Column, LabelColumn, OffsetColumn, pieces
from hpctrain.data.pack_format import Pack
from hpctrain.data.partition import READ_BYTES
from hpctrain.errors import RunError, UsageError

if TYPE_CHECKING:
    from hpctrain.data.hdf5_chunks import Chunks
    from hpctrain.data.jpeg import Crop

ADVICE = "'hpctrain pack --check' finds what else is corrupt"
WHOLE_FILE = ""  # the name of the split of all samples of an external file


class Split:
    """The samples of one split of a pack or an external HDF5 file. Reading is thread-safe.

    Images have the shape ``image_shape`` (H, W, C) and the type ``dtype``: uint8, or the floats of
    an external file, which are used unchanged. Labels and JPEG file offsets are read on demand;
    ``hold`` keeps those of a range of samples in memory.
    """

    def __init__(
        self, pack: Pack, name: str, threads: int | None = None, checks: Checks | None = None
    ) -> None:
        """Open a split. JPEG files are decoded by `threads` threads; default: one per usable core,
        at most 8. `checks` are applied while a pack is read.

        Raises UsageError if the file is missing or not the one that was checked.
        """
        if name not in pack.splits and not (name == WHOLE_FILE and pack.external):
            there = ", ".join(pack.splits)
            raise UsageError(f"{pack.path} has no split {name!r}; it has {there}")
        self.pack, self.name = pack, name
        self.image_shape, self.dtype = pack.image_shape, pack.dtype
        self._checks = checks or Checks()
        self._source = pack.external_splits.get(name, pack.external)
        self._index: np.ndarray | None = None  # (N,) samples of the file
        self._labels: LabelColumn | np.ndarray  # (N,); an array of an external file
        self._offsets: OffsetColumn | None = None  # (N + 1,) of JPEG files
        self._threads: ThreadPoolExecutor | None = None  # that decode them
        self._chunks: Chunks | None = None
        self._descriptor = -1
        try:
            if self._source:
                self._open_external()
            else:
                self._descriptor = open_pack(pack)
                self._labels = LabelColumn(pack, name, self._checks, self._read)
            if pack.encoded:
                self._open_files(threads)
        except BaseException:
            self.close()
            raise

    def gather(
        self,
        indices: np.ndarray,
        out: np.ndarray,
        crops: Sequence[Crop] | None = None,
        files: np.ndarray | None = None,
    ) -> np.ndarray:
        """Read the samples `indices` (n,), in that order, into `out` and return it.

        `out` is (n, H, W, C) of ``dtype``. For JPEG files it may also be (n,) objects, which
        receive the undecoded files; in a later call, `files` are decoded instead of reading them
        again. With `crops` (n,), a crop of each JPEG file is decoded.
        Raises RunError if the file is truncated, or a sample is corrupt.
        """
        self._check_request(indices, out)
        if out.dtype == object:
            order = np.argsort(indices, kind="stable")
            for place, file in zip(order.tolist(), self._read_files(indices[order]), strict=True):
                out[place] = bytes(file)  # copy: a view keeps all the data read
        elif self._threads:
            self._decode(self._threads, indices, out, crops, files)
        elif self._chunks:
            self._chunks.read(self._in_file(indices), out)
        else:
            self._read_pixels(self._in_file(indices), out)
        return out

    @cached_property
    def labels(self) -> np.ndarray:
        """The labels of all samples, (N,) int64, read on first access and kept: 8 bytes each."""
        if isinstance(self._labels, Column) and self._descriptor < 0:  # closed
            with Split(self.pack, self.name, 1, self._checks) as again:
                return again.labels
        return self.read_labels(np.arange(len(self)))

    def read_labels(self, indices: np.ndarray) -> np.ndarray:
        """Return the labels of the samples `indices` (n,), (n,) int64.

        Raises UsageError if a label is no class, and RunError if labels cannot be read.
        """
        return self._labels.take(indices)

    def count_classes(self) -> np.ndarray:
        """Return the number of samples of each class, (K,) int64. Reads all labels, in parts."""
        counts = np.zeros(len(self.pack.classes), np.int64)
        for part in pieces(len(self)):
            counts += np.bincount(self.read_labels(part), minlength=len(counts))
        return counts

    def hold(self, samples: range) -> None:
        """Keep the labels and offsets of `samples` in memory."""
        for column in (self._labels, self._offsets):
            if isinstance(column, Column):
                column.hold(range(samples.start, samples.stop + column.more))

    def check_columns(self) -> None:
        """Check all labels and offsets. Raises Failure."""
        for part in pieces(len(self)):
            self.read_labels(part)
            if self._offsets:
                self._offsets.spans(part)

    def file_bytes(self) -> int:
        """Return the mean size in bytes of the split's JPEG files."""
        layout = self.pack.splits[self.name]
        return -(-layout.files_bytes // layout.samples)

    def byte_range(self, samples: range) -> tuple[int, int]:
        """Return the range of these samples, n > 0, in a pack's image bytes. Raises UsageError."""
        if self._offsets:
            starts, stops = self._offsets.spans(np.array([samples.start, samples.stop - 1]))
            return int(starts[0]), int(stops[1])
        return samples.start * self.pack.image_bytes, samples.stop * self.pack.image_bytes

    def describe(self, index: int) -> str:
        """Return the location of a sample for a message."""
        if self._source:
            row = index if self._index is None else self._index[index]
            where = f"row {row} of {self._source.images} (sample {index} of {self.name})"
            return f"{self._source.path}: {where}"
        return f"{self.pack.path}: sample {index} of split {self.name!r}"

    def close(self) -> None:
        """Close the file and end the threads; ``labels`` stay available."""
        if self._threads:
            self._threads.shutdown(cancel_futures=True)
        if self._chunks:
            self._chunks.close()
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1

    def __len__(self) -> int:
        return len(self._labels)

    def __enter__(self) -> Split:
        return self

    def __exit__(self, *error: Any) -> None:
        self.close()

    def _open_external(self) -> None:
        from hpctrain.data import external, external_file  # import h5py

        source = self._source
        assert source
        if source.chunk_rows:
            self._chunks = external_file.open_chunks(source)
        else:
            external_file.check_unchanged(source)
            self._descriptor = open_file(source.path, source.file_size)
        self._labels, splits = external.split_labels(source)
        if self.name != WHOLE_FILE:
            self._index = splits[self.name]
            self._labels = self._labels[self._index]

    def _open_files(self, threads: int | None) -> None:
        warnings.filterwarnings("ignore", module=r"PIL\.")  # about unusual metadata
        self._jpeg = jpeg = import_module("hpctrain.data.jpeg")  # which imports Pillow
        (height, width, channels), crop = self.image_shape, self.pack.fit == "crop"
        self._fit = jpeg.Fit(width, height, channels, crop=crop)
        self._threads = jpeg.decode_threads(threads)
        self._offsets = OffsetColumn(self.pack, self.name, self._checks, self._read)

    def _check_request(self, indices: np.ndarray, out: np.ndarray) -> None:
        """Raise IndexError if the split lacks a sample, ValueError if `out` does not fit."""
        if len(indices) and not 0 <= indices.min() <= indices.max() < len(self):
            raise IndexError(
                f"samples {indices.min()} to {indices.max()} asked of a split that has {len(self)}"
            )
        shape: tuple[int, ...] = (len(indices), *self.image_shape)
        dtype = self.dtype
        if out.dtype == object and self.pack.encoded:
            shape, dtype = (len(indices),), out.dtype
        if out.shape != shape or out.dtype != dtype or not out.flags.c_contiguous:
            raise ValueError(f"out is {out.dtype} {out.shape}, not C-contiguous {dtype} {shape}")

    def _in_file(self, indices: np.ndarray) -> np.ndarray:
        return indices if self._index is None else self._index[indices]

    def _read_pixels(self, rows: np.ndarray, out: np.ndarray) -> None:
        """Read rows of a contiguous array of images."""
        pack, source = self.pack, self._source
        if not source:
            offset, size = pack.splits[self.name].images_offset, pack.image_bytes
            self._verify("images", rows, rows * size, (rows + 1) * size)
            gather_rows(pack.path, self._descriptor, offset, rows, as_bytes(out))
            return
        if source.layout in ("NHWC", "NHW") and not source.scale:
            gather_rows(source.path, self._descriptor, source.offset, rows, as_bytes(out))
            return
        step = max(1, READ_BYTES // source.image_bytes)
        for first in range(0, len(rows), step):
            part = rows[first : first + step]
            stored = np.empty((len(part), *source.stored_shape), source.dtype)
            gather_rows(source.path, self._descriptor, source.offset, part, as_bytes(stored))
            out[first : first + step] = source.scaled(source.to_images(stored))

    def _read_files(self, indices: np.ndarray) -> Iterator[memoryview]:
        """Yield the JPEG files of `indices` (n,), in order; consecutive ones are read together."""
        if not (len(indices) and self._offsets):
            return
        starts, stops = self._offsets.spans(indices)
        self._verify("bytes", indices, starts, stops)
        apart = (np.diff(indices) != 1) | (np.diff(starts // READ_BYTES) != 0)
        cuts = (np.flatnonzero(apart) + 1).tolist()
        for first, last in zip([0, *cuts], [*cuts, len(indices)], strict=True):
            start, ends = int(starts[first]), (stops[first:last] - starts[first]).tolist()
            data = memoryview(bytearray(ends[-1]))
            self._read([data], self.pack.splits[self.name].images_offset + start)
            yield from (data[a:b] for a, b in pairwise([0, *ends]))

    def _decode(
        self,
        threads: ThreadPoolExecutor,
        indices: np.ndarray,
        out: np.ndarray,
        crops: Sequence[Crop] | None,
        files: np.ndarray | None,
    ) -> None:
        jpeg, order = self._jpeg, np.argsort(indices, kind="stable")  # file order

        def decode_part(part: slice) -> None:
            places = order[part]
            read = self._read_files(indices[places]) if files is None else files[places]
            for place, data in zip(places.tolist(), read, strict=True):
                try:
                    pixels = jpeg.decode_file(data, self._fit, crops[place] if crops else None)
                    out[place] = np.frombuffer(pixels, np.uint8).reshape(self.image_shape)
                except jpeg.BadImage as error:
                    where = self.describe(int(indices[place]))
                    raise RunError(f"{where} cannot be decoded ({error}): {ADVICE}") from None

        jpeg.map_parts(threads, decode_part, len(indices))

    def _verify(
        self, kind: str, indices: np.ndarray, starts: np.ndarray, stops: np.ndarray
    ) -> None:
        """Verify the blocks of a column that hold the samples `indices` (n,), if requested.

        They are at bytes `starts` to `stops`. Raises RunError for a sample in a corrupt block.
        """
        if not len(indices):
            return
        self.pack.check_held(self.name, kind, int(starts.min()), int(stops.max()))
        column = self.pack.columns(self.name)[kind]
        checksums = self._checks.checksums(self.name, kind, column)
        if checksums is None:
            return
        blocks = checksums.find_corrupt(starts, stops, self._read)
        if (corrupt := np.flatnonzero(blocks >= 0)).size:
            where = self.describe(int(indices[corrupt[0]]))
            cause = checksums.describe(int(blocks[corrupt[0]]))
            raise RunError(f"{where} cannot be used ({cause}): {ADVICE}")

    def _read(self, buffers: list[memoryview], offset: int) -> None:
        read_exactly(self.pack.path, self._descriptor, buffers, offset)
