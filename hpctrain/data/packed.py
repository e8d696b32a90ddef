"""Packs as they are opened: read and checked once, on rank 0, and what verifies all their bytes.

``read_pack`` opens the HDF5 file, checks everything that a reader relies on, and returns a small
picklable ``Pack``: where the bytes of every split begin. From then on ``Split`` reads without HDF5.
The format is described in ``pack_format.py``, its writers are in ``packing/``.
"""

from __future__ import annotations

import dataclasses
import os
from typing import Any

from hpctrain.data.checks import BlockChecksums, Sums
from hpctrain.data.external import read_external
from hpctrain.data.pack_format import Pack, content_uuid, facts_sha256
from hpctrain.data.pread import open_file, read_exactly
from hpctrain.data.split import Split
from hpctrain.errors import UsageError

UUID_WITHIN = 1 << 20  # bytes at the file's beginning or end
NOT_OF_UUID = "shape, classes or checksums are not those that the uuid was made from"
NOT_OF_SHA256 = "mean, std or provenance are not those that its SHA-256 was made from"


def read_pack(path: str | os.PathLike[str]) -> Pack:
    """Open a pack and check everything but the checksums.

    Raises UsageError, one line naming the file and the cause: missing, no pack, cut short,
    damaged, not written to its end, of a newer format, or made to read other files.
    """
    from hpctrain.data import pack_check  # brings h5py, which the other ranks never need

    pack = pack_check.read_pack(os.path.abspath(path))
    pack = dataclasses.replace(pack, uuid_offset=_find_uuid(pack))
    for name in pack.splits:
        Split(pack, name).close()  # reads and checks labels and offsets
    return pack


def is_pack(path: str | os.PathLike[str]) -> bool:
    """Whether this is an HDF5 file that calls itself a pack."""
    from hpctrain.data import pack_check

    return pack_check.is_pack(os.path.abspath(path))


def read_again(path: str | os.PathLike[str], external: dict[str, Any] | None) -> Pack:
    """The pack of this path; or, where it is none, the external file that `read_external` finds
    with these arguments, as a saved network names them. Raises UsageError.
    """
    if external is None or is_pack(path):
        return read_pack(path)
    return read_external(path, **external)


def read_sums(pack: Pack) -> Sums:
    """The checksums of all blocks of a pack. Raises UsageError where they or its attributes are
    not those that were written.
    """
    sums = _stored_sums(pack)
    if altered := _altered(pack, sums):
        raise UsageError(f"{pack.path} is damaged: {altered}; copy or pack it again")
    return sums


def verify(pack: Pack) -> list[str]:
    """Recompute all checksums: one line per damaged block. None: all is as it was written."""
    sums = _stored_sums(pack)
    damage: list[str] = []
    descriptor = open_file(pack.path)

    def read(buffers: list[memoryview], offset: int) -> None:
        read_exactly(pack.path, descriptor, buffers, offset)

    try:
        for name in pack.splits:
            for kind, column in pack.columns(name).items():
                checksums = BlockChecksums(f"{name}/{kind}", column, *sums[name, kind])
                damage += [checksums.describe(block) for block in checksums.damaged_blocks(read)]
    finally:
        os.close(descriptor)
    if not damage and (altered := _altered(pack, sums)):
        damage.append(altered)
    return damage


def library_versions() -> str:
    """Versions of what reads packs, such as "h5py 3.16.0, HDF5 2.0.0"."""
    from hpctrain.data import hdf5

    return hdf5.library_versions()


def _find_uuid(pack: Pack) -> int:
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
