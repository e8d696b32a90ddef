"""A pack and its rows, read by byte offset.

``read_pack`` opens the HDF5 file once (on rank 0), checks everything that a reader relies on, and
returns a small picklable ``Pack``: where the bytes of every split begin. From then on ``Rows``
reads with preadv(2), which needs no HDF5, holds no lock of the library, costs 1 to 2 microseconds
a row instead of 30, and turns a file that was cut short into an error instead of a signal.

The format stands in ``pack_format.py``, its writer in ``packing/write.py``.
"""

from __future__ import annotations

import dataclasses
import os
import zlib
from types import TracebackType

import numpy as np

from hpctrain.data.pack_format import LABEL_BYTES, Pack, content_uuid
from hpctrain.errors import RunError, UsageError

UUID_WITHIN = 1 << 20  # bytes at the file's beginning or end
IOV_MAX = 1024  # buffers that one preadv(2) takes


def read_pack(path: str | os.PathLike[str]) -> Pack:
    """Open a pack and check everything but the checksums.

    Raises UsageError, one line naming the file and the cause: missing, foreign, cut short,
    damaged, not written to its end, of a newer format, or made to read other files.
    """
    from hpctrain.data import pack_check  # brings h5py, which the other ranks never need

    pack = pack_check.read_pack(os.path.abspath(path))
    pack = dataclasses.replace(pack, uuid_offset=_find_uuid(pack))
    for name in pack.splits:
        Rows(pack, name).close()  # reads and checks the labels
    return pack


def is_pack(path: str | os.PathLike[str]) -> bool:
    """Whether this is an HDF5 file that calls itself a pack."""
    from hpctrain.data import pack_check

    return pack_check.is_pack(os.path.abspath(path))


def verify(pack: Pack) -> list[str]:
    """Recompute all checksums: one line per damaged block. None: all is as it was written."""
    from hpctrain.data import pack_check

    sums = pack_check.read_checksums(pack)
    damage: list[str] = []
    descriptor = _open(pack.path)
    try:
        for (name, kind), (expected, block_rows) in sums.items():
            damage += _damaged_blocks(pack, descriptor, name, kind, expected, block_rows)
    finally:
        os.close(descriptor)
    stored = {
        name: (split.rows, sums[name, "images"][0], sums[name, "labels"][0])
        for name, split in pack.splits.items()
    }
    if not damage and content_uuid(pack.image_shape, pack.classes, stored) != pack.uuid:
        damage.append("shape, classes or checksums are not those that the uuid was made from")
    return damage


def library_versions() -> str:
    """Versions of what reads packs, such as "h5py 3.16.0, HDF5 2.0.0"."""
    from hpctrain.data import pack_check

    return pack_check.library_versions()


class Rows:
    """The rows of one split. Reading is thread-safe and knows nothing of HDF5.

    ``labels`` is an (N,) int64 array, images are of ``dtype`` uint8. Opening raises UsageError
    where the file is missing, is not the one that was checked or has labels beyond its classes,
    RunError where it cannot be read.
    """

    dtype = np.dtype(np.uint8)

    def __init__(self, pack: Pack, split_name: str) -> None:
        if split_name not in pack.splits:
            there = ", ".join(pack.splits)
            raise UsageError(f"{pack.path} has no split {split_name!r}; it has {there}")
        self.pack = pack
        self.split = pack.splits[split_name]
        self._descriptor = _open(pack.path)
        try:
            size = os.fstat(self._descriptor).st_size
            if size != pack.file_size:
                raise UsageError(
                    f"{pack.path} has {size:,} bytes here, but {pack.file_size:,} when it was"
                    " checked: give every rank the same finished file"
                )
            if _uuid_there(pack, self._descriptor) != pack.uuid:
                raise UsageError(
                    f"{pack.path} is not the file that was checked (uuid {pack.uuid}): it was"
                    " replaced or overwritten meanwhile"
                )
            self.labels = np.empty(self.split.rows, np.int64)  # (N,)
            _read(pack.path, self._descriptor, [_bytes(self.labels)], self.split.labels_offset)
            _check_labels(pack, split_name, self.labels)
        except BaseException:
            self.close()
            raise

    @property
    def image_shape(self) -> tuple[int, int, int]:
        """(H, W, C) of every row."""
        return self.pack.image_shape

    def gather(self, indices: np.ndarray, out: np.ndarray) -> np.ndarray:
        """Read the rows `indices` (n,), in that order, into `out` (n, H, W, C) uint8; returns it.

        Consecutive rows are read together. Raises RunError where the file has become shorter.
        """
        shape = (len(indices), *self.pack.image_shape)
        if out.shape != shape or out.dtype != np.uint8 or not out.flags.c_contiguous:
            raise ValueError(f"out is {out.dtype} {out.shape}, not C-contiguous uint8 {shape}")
        if len(indices) and not 0 <= indices.min() <= indices.max() < self.split.rows:
            raise IndexError(
                f"rows {indices.min()} to {indices.max()} asked of split {self.split.name!r},"
                f" which has {self.split.rows}"
            )
        offset = self.split.images_offset
        gather_rows(self.pack.path, self._descriptor, offset, indices, _bytes(out))
        return out

    def close(self) -> None:
        """Close the file; rows can no longer be read, labels stay."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1

    def __len__(self) -> int:
        return self.split.rows

    def __enter__(self) -> Rows:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()


def gather_rows(
    path: str, descriptor: int, offset: int, indices: np.ndarray, out: memoryview
) -> None:
    """Rows `indices` (n,) of the row store that begins at byte `offset`, into n equal parts of out.

    In the order of the file, consecutive rows by one preadv, scattered where their places in
    `out` are apart. Raises RunError.
    """
    if len(indices) == 0:
        return
    row_bytes = len(out) // len(indices)
    order = np.argsort(indices, kind="stable")
    rows = indices[order]
    places = order.tolist()
    cuts = (np.flatnonzero(np.diff(rows) != 1) + 1).tolist()
    for start, stop in zip([0, *cuts], [*cuts, len(places)], strict=True):
        first, last = places[start], places[stop - 1]
        if places[start:stop] == list(range(first, last + 1)):
            buffers = [out[first * row_bytes : (last + 1) * row_bytes]]
        else:
            buffers = [out[i * row_bytes : (i + 1) * row_bytes] for i in places[start:stop]]
        _read(path, descriptor, buffers, offset + int(rows[start]) * row_bytes)


def _read(path: str, descriptor: int, buffers: list[memoryview], offset: int) -> None:
    """Fill all buffers from consecutive bytes of the file, or raise RunError."""
    while buffers:
        try:
            count = os.preadv(descriptor, buffers[:IOV_MAX], offset)
        except OSError as error:
            raise RunError(f"{path}: reading at byte {offset:,} failed: {error.strerror}") from None
        if count == 0 and any(len(buffer) for buffer in buffers):
            missing = sum(len(buffer) for buffer in buffers)
            raise RunError(
                f"{path} ends at byte {offset:,}, {missing:,} bytes before the end of the rows"
                " asked for: it was cut short while in use"
            )
        offset += count
        while buffers and count >= len(buffers[0]):
            count -= len(buffers.pop(0))
        if buffers:
            buffers[0] = buffers[0][count:]


def _open(path: str) -> int:
    try:
        return os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError as error:
        raise UsageError(f"{path} cannot be opened: {error.strerror}") from None


def _find_uuid(pack: Pack) -> int:
    """The byte at which the uuid stands, in the first or last MiB of the file; -1 if in neither."""
    descriptor = _open(pack.path)
    try:
        for start in (0, max(0, pack.file_size - UUID_WITHIN)):
            place = os.pread(descriptor, UUID_WITHIN, start).find(pack.uuid.encode())
            if place >= 0:
                return start + place
    finally:
        os.close(descriptor)
    return -1


def _uuid_there(pack: Pack, descriptor: int) -> str:
    if pack.uuid_offset < 0:
        return pack.uuid
    found = os.pread(descriptor, len(pack.uuid), pack.uuid_offset)
    return found.decode("ascii", "replace")


def _bytes(array: np.ndarray) -> memoryview:
    if array.size == 0:
        return memoryview(bytearray())
    return array.data.cast("B")


def _check_labels(pack: Pack, split_name: str, labels: np.ndarray) -> None:
    if len(labels) and not 0 <= labels.min() <= labels.max() < len(pack.classes):
        raise UsageError(
            f"{pack.path}: labels of split {split_name!r} go from {labels.min()} to"
            f" {labels.max()}, but there are {len(pack.classes)} classes, 0 to"
            f" {len(pack.classes) - 1}: the file is damaged, pack it again"
        )


def _damaged_blocks(
    pack: Pack, descriptor: int, name: str, kind: str, expected: np.ndarray, block_rows: int
) -> list[str]:
    """One line per block of `kind` ("images" or "labels") whose CRC-32 is not `expected`."""
    split = pack.splits[name]
    images = kind == "images"
    row_bytes = pack.row_bytes if images else LABEL_BYTES
    offset = split.images_offset if images else split.labels_offset
    buffer = memoryview(bytearray(min(block_rows, split.rows) * row_bytes))
    damage = []
    for block, checksum in enumerate(expected.tolist()):
        start = block * block_rows
        stop = min(split.rows, start + block_rows)
        part = buffer[: (stop - start) * row_bytes]
        _read(pack.path, descriptor, [part], offset + start * row_bytes)
        if zlib.crc32(part) != checksum:
            damage.append(f"{name}/{kind}: rows {start} to {stop - 1} (block {block}) are damaged")
    return damage
