"""Open packs: read and check them once, on rank 0, and verify all their bytes.

``read_pack`` uses HDF5 to check everything that reading by byte offset relies on: every dataset
must be contiguous bytes of the file (``hdf5.py``). It returns a small picklable ``Pack``, with
which ``Split`` reads without HDF5. Import this module only in code that runs on rank 0 alone,
because it imports h5py. The format is described in ``pack_format.py``, its writers are in
``packing/``.
"""

from __future__ import annotations

import math
import os
import uuid
from functools import partial
from typing import Any

import h5py
import numpy as np

from hpctrain.data.checks import BlockChecksums, Sums, open_file, read_exactly
from hpctrain.data.external import read_external
from hpctrain.data.hdf5 import Unusable, check_storage, find_dataset, open_hdf5
from hpctrain.data.pack_format import (
    ENCODED_VERSION,
    FORMAT,
    VERSION,
    Pack,
    SplitLayout,
    content_uuid,
    facts_sha256,
    ordered,
)
from hpctrain.data.split import Split
from hpctrain.errors import UsageError
from hpctrain.typed import parse_json

UUID_WITHIN = 1 << 20  # bytes that are searched at the beginning and the end of the file
NOT_OF_UUID = "shape, classes or checksums are not those that the uuid was made from"
NOT_OF_SHA256 = "mean, std or provenance are not those that its SHA-256 was made from"


def read_pack(path: str | os.PathLike[str]) -> Pack:
    """Open a pack and check everything except the checksums.

    Raises UsageError (one line that names the file and the cause) if the file is missing, not a
    pack, truncated, corrupt, incomplete, of a newer format, or refers to other files.
    """
    pack = _read_attributes(os.path.abspath(path))
    for name in pack.splits:
        with Split(pack, name, threads=1) as split:
            split.check_columns()
    return pack


def is_pack(path: str | os.PathLike[str]) -> bool:
    """Whether this is an HDF5 file with the format attribute of a pack; nothing else is checked."""
    try:
        with h5py.File(path, "r", locking=False) as file:
            return _is_marked(file)
    except Exception:  # of many types, for corrupt metadata
        return False


def read_again(path: str | os.PathLike[str], external: dict[str, Any] | None) -> Pack:
    """Open the pack or external file that a saved network names. Raises UsageError.

    If `path` is not a pack, `read_external` is called with the arguments `external`, if given.
    """
    if external is None or is_pack(path):
        return read_pack(path)
    return read_external(path, **external)


def read_sums(pack: Pack) -> Sums:
    """Read the checksums of all blocks of a pack.

    Raises UsageError if they or the attributes of the pack have been altered.
    """
    sums = _stored_sums(pack)
    if altered := _find_altered(pack, sums):
        raise UsageError(f"{pack.path} is corrupt: {altered}; copy or pack it again")
    return sums


def verify(pack: Pack) -> list[str]:
    """Recompute all checksums; return one line per fault, none if the pack is intact."""
    sums = _stored_sums(pack)
    found: list[str] = []
    with open(open_file(pack.path), "rb", buffering=0) as file:
        read = partial(read_exactly, pack.path, file.fileno())
        for (name, kind), of in sums.items():
            checksums = BlockChecksums(f"{name}/{kind}", pack.columns(name)[kind], *of)
            found += [checksums.describe(block) for block in checksums.corrupt_blocks(read)]
    if not found and (altered := _find_altered(pack, sums)):
        found.append(altered)
    return found


def _read_attributes(path: str) -> Pack:
    """Read the attributes and the layout of a pack, not its labels. Raises UsageError.

    Wrong values of attributes are found by `read_sums`.
    """
    with open_hdf5(path) as file:
        encoded = _check_format(path, file) == ENCODED_VERSION
        names = np.atleast_1d(_attribute(file, "classes")).tolist()
        classes = tuple(name.decode("utf-8", "surrogateescape") for name in names)
        size = os.path.getsize(path)
        found = [_read_split(file, name, size, encoded) for name in ordered(file)]
        if not found:
            raise Unusable("it holds no images")
        shapes = {shape for _, shape in found}
        if encoded:
            shapes = {tuple(map(int, _attribute(file, "image_shape")))}
        if len(shapes) > 1:
            raise Unusable(f"its splits differ in image shape: {sorted(shapes)}")
        height, width, channels = shapes.pop()
        mean, std = (tuple(map(float, _attribute(file, name))) for name in ("mean", "std"))
        identity = str(uuid.UUID(_attribute(file, "uuid").decode()))
        return Pack(
            path,
            identity,
            size,
            (height, width, channels),
            classes,
            {split.name: split for split, _ in found},
            mean,
            std,
            parse_json(_attribute(file, "provenance")),
            uuid_offset=_find_uuid(path, size, identity.encode()),
            fit=_attribute(file, "fit").decode() if encoded else "",
            sha256=_attribute(file, "sha256").decode(),
        )


def _read_split(
    file: h5py.File, name: str, size: int, encoded: bool
) -> tuple[SplitLayout, tuple[int, ...]]:
    """Read the layout of a split and the shape of its images, () for JPEG files."""
    kind, dimensions = ("bytes", 1) if encoded else ("images", 4)
    images = _dataset(file, f"{name}/{kind}", h5py.h5t.STD_U8LE, dimensions, size)
    labels = _dataset(file, f"{name}/labels", h5py.h5t.STD_I64LE, 1, size)
    rows, at = labels.shape[0], (images.id.get_offset(), labels.id.get_offset())
    if not encoded:
        if images.shape[0] != rows:
            raise Unusable(f"{name} has {images.shape[0]} images but {rows} labels")
        return SplitLayout(name, rows, *at), images.shape[1:]
    offsets = _dataset(file, f"{name}/offsets", h5py.h5t.STD_I64LE, 1, size)
    if offsets.shape[0] != rows + 1:
        raise Unusable(f"{name} has {rows} labels but {offsets.shape[0]} offsets, not {rows + 1}")
    return SplitLayout(name, rows, *at, images.shape[0], offsets.id.get_offset()), ()


def _find_uuid(path: str, size: int, identity: bytes) -> int:
    """Return the offset of the uuid in the first or last MiB of the file, or -1."""
    with open(path, "rb") as file:
        for start in (0, max(0, size - UUID_WITHIN)):
            file.seek(start)
            if (place := file.read(UUID_WITHIN).find(identity)) >= 0:
                return start + place
    return -1


def _stored_sums(pack: Pack) -> Sums:
    """Read, by split and column, the CRC-32 of every block and the rows per block."""
    sums: Sums = {}
    with open_hdf5(pack.path) as file:
        for name in pack.splits:
            for kind, column in pack.columns(name).items():
                data = _dataset(file, f"{name}/{kind}_crc32", h5py.h5t.STD_U32LE, 1, pack.file_size)
                block_rows = int(data.attrs["rows_per_block"])
                if block_rows < 1 or data.shape[0] != math.ceil(column.rows / block_rows):
                    raise Unusable(f"{name}/{kind}_crc32 does not cover the {column.rows} rows")
                sums[name, kind] = (data[:], block_rows)
    return sums


def _is_marked(file: h5py.File) -> bool:
    mark = file.attrs.get("format")
    return isinstance(mark, bytes | np.bytes_) and mark == FORMAT.encode()


def _check_format(path: str, file: h5py.File) -> int:
    """Check the format attribute, without which no other has a meaning; return the version."""
    if not _is_marked(file):
        raise UsageError(
            f"{path} is an HDF5 file but not a pack (no attribute format = {FORMAT!r}); make one"
            " with 'hpctrain pack', or train on it as it is with --images and --labels"
        )
    version = int(file.attrs["version"])
    if version not in (VERSION, ENCODED_VERSION):
        raise UsageError(
            f"{path} is a pack of format version {version}, this hpctrain reads versions {VERSION}"
            f" and {ENCODED_VERSION}: use the hpctrain that made it, or pack again"
        )
    return version


def _dataset(
    file: h5py.File, name: str, kind: h5py.h5t.TypeID, dimensions: int, file_size: int
) -> h5py.Dataset:
    """Return a dataset that is contiguous bytes of this file, readable by its offset."""
    data = find_dataset(file, name)
    if not data.id.get_type().equal(kind) or data.ndim != dimensions or 0 in data.shape:
        raise Unusable(f"{data.name} is {data.dtype} of shape {data.shape}")
    if check_storage(data, file_size):
        raise Unusable(f"{data.name} is stored in chunks, which those of a pack never are")
    return data


def _attribute(file: h5py.File, name: str) -> Any:
    if name not in file.attrs:
        raise Unusable(f"attribute {name!r} is missing")
    return file.attrs[name]


def _find_altered(pack: Pack, sums: Sums) -> str | None:
    """Describe which of shape, classes, checksums and attributes were altered, or return None."""
    stored = {
        name: (split.samples, [sums[name, kind][0] for kind in pack.columns(name)])
        for name, split in pack.splits.items()
    }
    if content_uuid(pack.image_shape, pack.classes, stored, pack.fit) != pack.uuid:
        return NOT_OF_UUID
    made = facts_sha256(pack.uuid, pack.mean, pack.std, pack.provenance)
    return NOT_OF_SHA256 if pack.sha256 != made else None
