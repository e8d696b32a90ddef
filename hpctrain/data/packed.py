"""A pack, and the rows of one that holds pixels, read by byte offset.

``read_pack`` opens the HDF5 file once (on rank 0), checks everything that a reader relies on, and
returns a small picklable ``Pack``: where the bytes of every split begin. From then on ``Rows``
reads pixels, and ``encoded.Encoded`` JPEG files, through ``pack_file.py``, without HDF5.

The format stands in ``pack_format.py``, its writers in ``packing/``.
"""

from __future__ import annotations

import dataclasses
import os

import numpy as np

from hpctrain.data.checks import Checks, Seals, Sums
from hpctrain.data.offsets import read_offsets
from hpctrain.data.pack_file import (
    PackFile,
    as_bytes,
    check_out,
    check_rows,
    find_uuid,
    open_file,
    read_exactly,
)
from hpctrain.data.pack_format import Pack, content_uuid, facts_sha256
from hpctrain.errors import UsageError

NOT_OF_UUID = "shape, classes or checksums are not those that the uuid was made from"
NOT_OF_SHA256 = "mean, std or provenance are not those that its SHA-256 was made from"


def read_pack(path: str | os.PathLike[str]) -> Pack:
    """Open a pack and check everything but the checksums.

    Raises UsageError, one line naming the file and the cause: missing, foreign, cut short,
    damaged, not written to its end, of a newer format, or made to read other files.
    """
    from hpctrain.data import pack_check  # brings h5py, which the other ranks never need

    pack = pack_check.read_pack(os.path.abspath(path))
    pack = dataclasses.replace(pack, uuid_offset=find_uuid(pack))
    for name in pack.splits:
        file = PackFile(pack, name)  # reads and checks the labels
        try:
            if pack.encoded:
                read_offsets(file)
        finally:
            file.close()
    return pack


def is_pack(path: str | os.PathLike[str]) -> bool:
    """Whether this is an HDF5 file that calls itself a pack."""
    from hpctrain.data import pack_check

    return pack_check.is_pack(os.path.abspath(path))


def read_sums(pack: Pack) -> Sums:
    """The checksums of all blocks of a pack. Raises UsageError where they or its attributes are
    not those that were written.
    """
    sums = _stored_sums(pack)
    if altered := _altered(pack, sums):
        raise UsageError(f"{pack.path} is damaged: {altered}; copy or pack it again")
    return sums


def _stored_sums(pack: Pack) -> Sums:
    from hpctrain.data import pack_check

    return pack_check.read_checksums(pack)


def _altered(pack: Pack, sums: Sums) -> str | None:
    """What of a pack's shape, classes, checksums and other attributes is not as it was written."""
    stored = {
        name: (split.rows, [sums[name, kind][0] for kind in pack.columns(name)])
        for name, split in pack.splits.items()
    }
    if content_uuid(pack.image_shape, pack.classes, stored, pack.fit) != pack.uuid:
        return NOT_OF_UUID
    made = facts_sha256(pack.uuid, pack.mean, pack.std, pack.provenance)
    return NOT_OF_SHA256 if pack.sha256 not in ("", made) else None


def verify(pack: Pack) -> list[str]:
    """Recompute all checksums: one line per damaged block. None: all is as it was written."""
    sums = _stored_sums(pack)
    damage: list[str] = []
    descriptor = open_file(pack.path)
    try:
        for name in pack.splits:
            for kind, column in pack.columns(name).items():
                seals = Seals(f"{name}/{kind}", column, *sums[name, kind])
                damage += _damaged_blocks(pack.path, descriptor, seals)
    finally:
        os.close(descriptor)
    if not damage and (altered := _altered(pack, sums)):
        damage.append(altered)
    return damage


def library_versions() -> str:
    """Versions of what reads packs, such as "h5py 3.16.0, HDF5 2.0.0"."""
    from hpctrain.data import pack_check

    return pack_check.library_versions()


class Rows(PackFile):
    """The rows of one split. Reading is thread-safe and knows nothing of HDF5.

    ``labels`` is an (N,) int64 array, images are of ``dtype`` uint8. Opening raises UsageError
    where the file is missing, is not the one that was checked, holds JPEG files or has labels
    beyond its classes, RunError where it cannot be read.
    """

    dtype = np.dtype(np.uint8)

    def __init__(self, pack: Pack, split_name: str, checks: Checks | None = None) -> None:
        if pack.encoded:
            raise UsageError(f"{pack.path} holds JPEG files, not pixels: pack without --encoding")
        super().__init__(pack, split_name, checks)

    def gather(self, indices: np.ndarray, out: np.ndarray) -> np.ndarray:
        """Read the rows `indices` (n,), in that order, into `out` (n, H, W, C) uint8; returns it.

        Consecutive rows are read together. Raises RunError where the file has become shorter.
        """
        check_out(out, (len(indices), *self.image_shape), self.dtype)
        check_rows(indices, len(self))
        row_bytes, offset = self.pack.row_bytes, self.split.images_offset
        self.touch("images", indices, indices * row_bytes, (indices + 1) * row_bytes)
        gather_rows(self.pack.path, self.descriptor, offset, indices, as_bytes(out))
        return out

    def extent(self, rows: range) -> tuple[int, int]:
        """The bytes of the images column, first and after the last, that hold these rows."""
        return rows.start * self.pack.row_bytes, rows.stop * self.pack.row_bytes

    def __enter__(self) -> Rows:
        return self


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
    places, starts = order.tolist(), (offset + rows * row_bytes).tolist()
    cuts = (np.flatnonzero(np.diff(rows) != 1) + 1).tolist()
    for start, stop in zip([0, *cuts], [*cuts, len(places)], strict=True):
        first, count, at = places[start], stop - start, starts[start]
        if count == 1 or places[start:stop] == list(range(first, first + count)):
            part = out[first * row_bytes : (first + count) * row_bytes]
            try:
                if os.preadv(descriptor, (part,), at) == len(part):
                    continue  # nearly always
            except OSError:
                pass  # read_exactly says why
            buffers = [part]
        else:
            buffers = [out[i * row_bytes : (i + 1) * row_bytes] for i in places[start:stop]]
        read_exactly(path, descriptor, buffers, at)


def _damaged_blocks(path: str, descriptor: int, seals: Seals) -> list[str]:
    """What to say of each damaged block of a column."""
    found = seals.damaged(lambda buffers, offset: read_exactly(path, descriptor, buffers, offset))
    return [seals.describe(block) for block in found]
