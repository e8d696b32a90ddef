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
from importlib import import_module
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import numpy as np

from hpctrain.data.checks import Checks, as_bytes, gather_rows, open_file, read_exactly
from hpctrain.data.pack_format import Pack, SplitLayout
from hpctrain.data.partition import READ_BYTES
from hpctrain.errors import RunError, UsageError

if TYPE_CHECKING:
    from hpctrain.data.hdf5_chunks import Chunks
    from hpctrain.data.jpeg import Crop

WHOLE_FILE = ""  # the name of the split of all samples of an external file


class Split:
    """The samples of one split of a pack or an external HDF5 file. Reading is thread-safe.

    ``labels`` is an (N,) int64 array. Images have the shape ``image_shape`` (H, W, C) and the type
    ``dtype``: uint8, or the floats of an external file, which are used unchanged. ``bad`` are the
    unusable samples found so far; for these, ``gather`` returns undefined values.
    """

    def __init__(
        self, pack: Pack, name: str, threads: int | None = None, checks: Checks | None = None
    ) -> None:
        """Open a split. JPEG files are decoded by `threads` threads; default: one per usable core,
        at most 8. `checks` are applied while a pack is read.

        Raises UsageError if the file is missing, is not the one that was checked or has labels
        beyond its classes, and RunError if it cannot be read.
        """
        if name not in pack.splits and not (name == WHOLE_FILE and pack.external):
            there = ", ".join(pack.splits)
            raise UsageError(f"{pack.path} has no split {name!r}; it has {there}")
        self.pack, self.name = pack, name
        self.image_shape, self.dtype = pack.image_shape, pack.dtype
        self._checks = checks or Checks()
        self.bad = self._checks.bad_samples(name)
        self._source = pack.external_splits.get(name, pack.external)
        self._index: np.ndarray | None = None  # (N,) samples of the file
        self._offsets: np.ndarray | None = None  # (N + 1,) of JPEG files
        self._threads: ThreadPoolExecutor | None = None  # that decode them
        self._chunks: Chunks | None = None
        self._descriptor = -1
        try:
            if self._source:
                self._open_external()
            else:
                self._open_pack(pack.splits[name])
            if pack.encoded:
                self._open_files(pack.splits[name], threads)
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
        Raises RunError if the file is truncated, or a sample is bad and may not be skipped.
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

    def file_bytes(self) -> int:
        """Return the mean size in bytes of the split's JPEG files."""
        layout = self.pack.splits[self.name]
        return -(-layout.files_bytes // layout.samples)

    def byte_range(self, samples: range) -> tuple[int, int]:
        """Return the range of these samples among the bytes of the images of a pack's split."""
        if self._offsets is not None:
            return int(self._offsets[samples.start]), int(self._offsets[samples.stop])
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
        return len(self.labels)

    def __enter__(self) -> Split:
        return self

    def __exit__(self, *error: Any) -> None:
        self.close()

    def _open_pack(self, layout: SplitLayout) -> None:
        pack = self.pack
        self._descriptor = open_file(pack.path, pack.file_size)
        if pack.uuid_offset >= 0:
            there = os.pread(self._descriptor, len(pack.uuid), pack.uuid_offset)
            if there != pack.uuid.encode():
                raise UsageError(
                    f"{pack.path} is not the file that was checked (uuid {pack.uuid}): it was"
                    " replaced or overwritten meanwhile"
                )
        self.labels = self._read_numbers("labels", layout.labels_offset, layout.samples)  # (N,)
        low, high = self.labels.min(), self.labels.max()
        if not 0 <= low <= high < len(pack.classes):
            raise UsageError(
                f"{pack.path}: labels of split {self.name!r} go from {low} to {high}, but there are"
                f" {len(pack.classes)} classes, 0 to {len(pack.classes) - 1}: the file is corrupt,"
                " pack it again"
            )

    def _open_external(self) -> None:
        from hpctrain.data import external, external_file  # import h5py

        source = self._source
        assert source
        if source.chunk_rows:
            self._chunks = external_file.open_chunks(source)
        else:
            external_file.check_unchanged(source)
            self._descriptor = open_file(source.path, source.file_size)
        self.labels, splits = external.split_labels(source)
        if self.name != WHOLE_FILE:
            self._index = splits[self.name]
            self.labels = self.labels[self._index]

    def _open_files(self, layout: SplitLayout, threads: int | None) -> None:
        offsets = self._read_numbers("offsets", layout.offsets_offset, layout.samples + 1)
        in_order = offsets[0] == 0 and (offsets[1:] > offsets[:-1]).all()
        if not in_order or offsets[-1] != layout.files_bytes:
            raise UsageError(
                f"{self.pack.path}: offsets of split {self.name!r} do not cut its"
                f" {layout.files_bytes:,} bytes into {layout.samples:,} files: the file is corrupt,"
                " pack it again"
            )
        warnings.filterwarnings("ignore", module=r"PIL\.")  # about unusual metadata
        self._jpeg = jpeg = import_module("hpctrain.data.jpeg")  # which imports Pillow
        (height, width, channels), crop = self.image_shape, self.pack.fit == "crop"
        self._fit = jpeg.Fit(width, height, channels, crop=crop)
        self._offsets, self._threads = offsets, jpeg.decode_threads(threads)

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
        if len(indices) == 0:
            return
        assert self._offsets is not None
        starts, stops = self._offsets[indices], self._offsets[indices + 1]
        self._verify("bytes", indices, starts, stops)
        apart = (np.diff(indices) != 1) | (np.diff(starts // READ_BYTES) != 0)
        cuts = (np.flatnonzero(apart) + 1).tolist()
        for first, last in zip([0, *cuts], [*cuts, len(indices)], strict=True):
            ends = self._offsets[int(indices[first]) : int(indices[last - 1]) + 2]
            data = memoryview(bytearray(int(ends[-1] - ends[0])))
            self._read([data], self.pack.splits[self.name].images_offset + int(ends[0]))
            yield from (data[a:b] for a, b in pairwise((ends - ends[0]).tolist()))

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
                    self.bad.add([int(indices[place])], f"{where} cannot be decoded ({error})")
                    out[place] = 0

        jpeg.map_parts(threads, decode_part, len(indices))

    def _read_numbers(self, kind: str, offset: int, count: int) -> np.ndarray:
        """Read (count,) int64 of the column `kind`, which begin at byte `offset`.

        Raises RunError if they cannot be read or are corrupt: samples are useless without them.
        """
        path, column = self.pack.path, self.pack.columns(self.name)[kind]
        if checksums := self._checks.checksums(self.name, kind, column):
            for block in checksums.corrupt_blocks(self._read):
                raise RunError(f"{path}: {checksums.describe(block)}; copy or pack it again")
        values = np.empty(count, np.int64)
        self._read([as_bytes(values)], offset)
        return values

    def _verify(
        self, kind: str, indices: np.ndarray, starts: np.ndarray, stops: np.ndarray
    ) -> None:
        """Verify the blocks of a column that hold the samples `indices` (n,), if requested.

        They are at bytes `starts` to `stops`. Samples in a corrupt block are bad samples.
        """
        staged = self._checks.staged if self.name == "train" else None
        if len(indices) and staged and (starts.min() < staged[0] or stops.max() > staged[1]):
            raise RuntimeError(f"{self.pack.path} has bytes {staged}, not all of {indices}")
        column = self.pack.columns(self.name)[kind]
        checksums = self._checks.checksums(self.name, kind, column)
        if checksums is None or not len(indices):
            return
        blocks = checksums.find_corrupt(starts, stops, self._read)
        for place in np.flatnonzero(blocks >= 0).tolist():
            index, cause = int(indices[place]), checksums.describe(int(blocks[place]))
            text = f"{self.describe(index)} cannot be used ({cause})"
            self.bad.add([index], text, f"{self.pack.path}: {cause}")

    def _read(self, buffers: list[memoryview], offset: int) -> None:
        read_exactly(self.pack.path, self._descriptor, buffers, offset)
