"""The file of a pack as bytes: open it, know it again, read from byte offsets.

preadv(2) needs no HDF5, holds no lock of the library and no lock of the interpreter, costs 1 to 2
microseconds a row instead of 30, and turns a file that was cut short into an error instead of a
signal.
"""

from __future__ import annotations

import os
from types import TracebackType

import numpy as np

from hpctrain.data.checks import Checks, Seals, compare_whole
from hpctrain.data.pack_format import Pack
from hpctrain.errors import RunError, UsageError

UUID_WITHIN = 1 << 20  # bytes at the file's beginning or end
IOV_MAX = 1024  # buffers that one preadv(2) takes


class PackFile:
    """The open file of a pack, and the labels of one split.

    Opening raises UsageError where the file is missing, is not the one that was checked, has no
    such split or labels beyond its classes, RunError where it cannot be read.
    """

    def __init__(self, pack: Pack, split_name: str, checks: Checks | None = None) -> None:
        if split_name not in pack.splits:
            there = ", ".join(pack.splits)
            raise UsageError(f"{pack.path} has no split {split_name!r}; it has {there}")
        self.pack = pack
        self.split = pack.splits[split_name]
        self.checks = checks or Checks()
        self.bad = self.checks.bad(split_name)
        self.descriptor = open_file(pack.path)
        try:
            size = os.fstat(self.descriptor).st_size
            if size != pack.file_size:
                raise UsageError(
                    f"{pack.path} has {size:,} bytes here, but {pack.file_size:,} when it was"
                    " checked: give every rank the same finished file"
                )
            if _uuid_there(pack, self.descriptor) != pack.uuid:
                raise UsageError(
                    f"{pack.path} is not the file that was checked (uuid {pack.uuid}): it was"
                    " replaced or overwritten meanwhile"
                )
            self.labels = self.numbers("labels", self.split.labels_offset, self.split.rows)  # (N,)
            _check_labels(pack, split_name, self.labels)
        except BaseException:
            self.close()
            raise

    @property
    def image_shape(self) -> tuple[int, int, int]:
        """(H, W, C) of every row."""
        return self.pack.image_shape

    def numbers(self, kind: str, offset: int, count: int) -> np.ndarray:
        """The (count,) int64 of the column `kind`, which begin at byte `offset`. RunError where
        they cannot be read or are damaged."""
        if seals := self.seals(kind):
            compare_whole(self.pack.path, seals, self.read_into)
        values = np.empty(count, np.int64)
        self.read_into([as_bytes(values)], offset)
        return values

    def read_into(self, buffers: list[memoryview], offset: int) -> None:
        """Fill the buffers from byte `offset` of the file on. Raises RunError."""
        read_exactly(self.pack.path, self.descriptor, buffers, offset)

    def seals(self, kind: str) -> Seals | None:
        """The checksums of one of the split's columns, where they are to be compared."""
        return self.checks.seals(self.split.name, kind, self.pack.columns(self.split.name)[kind])

    def touch(self, kind: str, rows: np.ndarray, starts: np.ndarray, stops: np.ndarray) -> None:
        """Compare the blocks of a column in which `rows` (n,) lie, at bytes `starts` to `stops`,
        where that is wanted. A row of a damaged block is a bad row."""
        held, seals = self.checks.held, self.seals(kind)
        if not len(rows):
            return
        held = held if self.split.name == "train" else None
        if held and (starts.min() < held[0] or stops.max() > held[1]):
            raise RuntimeError(f"{self.pack.path} has bytes {held}, not all of {rows}")
        if seals is None:
            return
        broken = seals.broken(starts, stops, self.read_into)
        for place in np.flatnonzero(broken >= 0).tolist():
            row, cause = int(rows[place]), seals.describe(int(broken[place]))
            self.meet_bad(row, f"cannot be used ({cause})", f"{self.pack.path}: {cause}")

    def meet_bad(self, row: int, what: str, cause: str = "") -> None:
        """A row that is bad, as `what` says, by a `cause` that it may share with others. RunError
        where it may not be left out."""
        where = f"{self.pack.path}: row {row} of split {self.split.name!r}"
        self.bad.meet([row], f"{where} {what}", cause)

    def close(self) -> None:
        """Close the file; rows can no longer be read, labels stay."""
        if self.descriptor >= 0:
            os.close(self.descriptor)
            self.descriptor = -1

    def __len__(self) -> int:
        return self.split.rows

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()


def check_rows(indices: np.ndarray, rows: int) -> None:
    """IndexError unless `indices` are of `rows` rows."""
    if len(indices) and not 0 <= indices.min() <= indices.max() < rows:
        raise IndexError(
            f"rows {indices.min()} to {indices.max()} asked of a split that has {rows}"
        )


def check_out(out: np.ndarray, shape: tuple[int, ...], dtype: np.dtype) -> None:
    """ValueError unless `out` is C-contiguous of this shape and type."""
    if out.shape != shape or out.dtype != dtype or not out.flags.c_contiguous:
        raise ValueError(f"out is {out.dtype} {out.shape}, not C-contiguous {dtype} {shape}")


def read_exactly(path: str, descriptor: int, buffers: list[memoryview], offset: int) -> None:
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


def open_file(path: str) -> int:
    """A descriptor to read the file. UsageError where it cannot be opened."""
    try:
        return os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError as error:
        raise UsageError(f"{path} cannot be opened: {error.strerror}") from None


def find_uuid(pack: Pack) -> int:
    """The byte at which the uuid stands, in the first or last MiB of the file; -1 if in neither."""
    descriptor = open_file(pack.path)
    try:
        for start in (0, max(0, pack.file_size - UUID_WITHIN)):
            place = os.pread(descriptor, UUID_WITHIN, start).find(pack.uuid.encode())
            if place >= 0:
                return start + place
    finally:
        os.close(descriptor)
    return -1


def as_bytes(array: np.ndarray) -> memoryview:
    """The memory of a C-contiguous array, to be filled."""
    if array.size == 0:
        return memoryview(bytearray())
    return array.data.cast("B")


def _uuid_there(pack: Pack, descriptor: int) -> str:
    if pack.uuid_offset < 0:
        return pack.uuid
    found = os.pread(descriptor, len(pack.uuid), pack.uuid_offset)
    return found.decode("ascii", "replace")


def _check_labels(pack: Pack, split_name: str, labels: np.ndarray) -> None:
    if len(labels) and not 0 <= labels.min() <= labels.max() < len(pack.classes):
        raise UsageError(
            f"{pack.path}: labels of split {split_name!r} go from {labels.min()} to"
            f" {labels.max()}, but there are {len(pack.classes)} classes, 0 to"
            f" {len(pack.classes) - 1}: the file is damaged, pack it again"
        )
