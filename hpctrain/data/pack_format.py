"""The pack file format, versions 1 and 2: names, blocks and the uuid. Used by writer and reader.

Root attributes: ``format``, ``version``, ``uuid``, ``classes`` (UTF-8 strings), ``mean`` and
``std`` (per channel of train, in [0, 1]), ``provenance`` (JSON) and ``sha256`` (of the uuid and
these three; packs of earlier versions have none). One group per split. Version 1 holds pixels, in
each group

    images          (N, H, W, C) uint8, contiguous     images_crc32   (blocks,) uint32
    labels          (N,) int64, contiguous             labels_crc32   (blocks,) uint32

Version 2 holds JPEG files, gray or YCbCr and upright, which are decoded when they are read. Three
more root attributes: ``encoding`` ("jpeg"), ``image_shape`` (H, W, C: (3,) int64) that they are
decoded to, and ``fit``: "stretch" to that size, or "crop" to its proportions first, centred.
In each group

    bytes           (B,) uint8, contiguous: files one  bytes_crc32    (blocks,) uint32
                    after the other
    offsets         (N + 1,) int64, contiguous: file i offsets_crc32  (blocks,) uint32
                    is bytes[offsets[i]:offsets[i + 1]]
    labels          as above                           labels_crc32   as above

where a block is ``rows_per_block`` whole rows (an attribute of the checksums), about 1 MiB; a row
of ``bytes`` is one byte.
"""

from __future__ import annotations

import hashlib
import json
import math
import uuid
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

FORMAT = "hpctrain-pack"
VERSION, ENCODED_VERSION = 1, 2
JPEG = "jpeg"
FITS = ("stretch", "crop")
SPLITS = ("train", "validation", "test")  # others are allowed and follow by name
BLOCK_BYTES = 2**20
LABEL_BYTES = OFFSET_BYTES = 8


class StoredColumn(NamedTuple):
    """A dataset of a split: where its rows begin, absolute, and how many there are."""

    offset: int
    rows: int
    row_bytes: int


@dataclass(frozen=True)
class SplitLayout:
    """Where one split's samples lie: absolute byte offsets in the file."""

    name: str
    samples: int
    images_offset: int  # of the pixels, or of the files' bytes
    labels_offset: int
    files_bytes: int = 0  # of all JPEG files together
    offsets_offset: int = -1  # of the (samples + 1,) int64 that say where each file begins


LAYOUTS = {  # of the images of an external file -> where (N, H, W, C) or (N, H, W) are stored
    "NHWC": (0, 1, 2, 3),
    "NCHW": (0, 2, 3, 1),
    "NHW": (0, 1, 2),
    "NCWH": (0, 3, 2, 1),  # (H, W, C, N) and (H, W, N) in MATLAB, which counts columns first
    "NWH": (0, 2, 1),
}


@dataclass(frozen=True)
class ExternalFile:
    """Where an HDF5 file that is no pack keeps its samples, and how they are split."""

    path: str
    file_size: int
    images: str  # path of the dataset within the file
    labels_path: str  # of the file that holds the labels
    labels: str
    layout: str  # of the images: one of LAYOUTS
    dtype: str  # as stored: uint8, uint16, float16, float32 or float64
    rows: int  # samples of the file
    image_shape: tuple[int, int, int]  # (H, W, C)
    offset: int  # byte of the first image; -1 where they are stored in chunks
    chunk_rows: int  # samples that a chunk spans; 0 for a contiguous dataset
    labels_crc32: int = 0  # of all labels as int64, to know the file again
    scale: float = 0.0  # by which values are divided; 0 = they are taken as they are
    label_values: tuple[int, ...] = ()  # of classes 0 ... K-1; () = these numbers
    block_rows: int = 0  # samples are split in blocks of so many; 0 = one by one, class by class
    split: str = "1"  # shares, as for the packer, or the one split that all samples are
    seed: int = 0

    @property
    def image_dtype(self) -> np.dtype:
        """Of the images that are read: as stored, or floats where values are divided."""
        if not self.scale:
            return np.dtype(self.dtype)
        return np.dtype("float64" if self.dtype == "float64" else "float32")

    @property
    def image_bytes(self) -> int:
        """Bytes of one image as it is stored."""
        return math.prod(self.image_shape) * np.dtype(self.dtype).itemsize

    @property
    def stored_shape(self) -> tuple[int, ...]:
        """The shape of one image as it is stored."""
        axes = LAYOUTS[self.layout]
        return tuple(self.image_shape[axes.index(stored) - 1] for stored in range(1, len(axes)))

    def to_images(self, stored: np.ndarray) -> np.ndarray:
        """Images as stored, (n, ...) -> a view of them, (n, H, W, C)."""
        return stored.transpose(LAYOUTS[self.layout]).reshape(len(stored), *self.image_shape)

    def scaled(self, images: np.ndarray) -> np.ndarray:
        """Images (n, H, W, C), divided by the scale where there is one: with 255, the same bits as
        the bytes of a pack become.
        """
        if not self.scale:
            return images
        dtype = self.image_dtype
        return images.astype(dtype) * dtype.type(1 / self.scale)


EXTERNAL_ARGUMENTS = {  # of read_external, with which the same samples are found again
    "images": str,
    "labels": str,
    "layout": str,
    "split": str,
    "seed": int,
    "block_rows": int,
    "scale": float,
    "label_gaps": str,
}


def earlier_external_arguments(earlier: dict[str, Any]) -> dict[str, Any]:
    """The same, from the metadata of earlier networks, which call them `foreign`."""
    renamed = {("block_rows" if n == "run_rows" else n): value for n, value in earlier.items()}
    return {**renamed, "scale": 1.0, "label_gaps": "keep"}


def valid_external_arguments(value: Any) -> bool:
    """Whether this is what `Pack.external_arguments` holds, or None."""
    if not isinstance(value, dict):
        return value is None
    return {name: type(entry) for name, entry in value.items()} == EXTERNAL_ARGUMENTS


@dataclass(frozen=True)
class Pack:
    """All that is needed to read a pack by byte offset; small and picklable. Of an HDF5 file that
    is no pack `external` says it; its splits then have no offsets, and no mean or std is known.
    """

    path: str
    uuid: str
    file_size: int
    image_shape: tuple[int, int, int]  # (H, W, C)
    classes: tuple[str, ...]
    splits: dict[str, SplitLayout]
    mean: tuple[float, ...]  # (C,) of train, in [0, 1]
    std: tuple[float, ...]  # (C,)
    provenance: dict[str, Any]
    uuid_offset: int = -1  # where the uuid stands in the file, to know it again; -1 = not found
    fit: str = ""  # of a pack of JPEG files: one of FITS
    sha256: str = ""  # as `facts_sha256` gave it; empty where the pack has none
    external: ExternalFile | None = None  # of train
    external_splits: dict[str, ExternalFile] = field(default_factory=dict)  # where each has its own
    external_arguments: dict[str, Any] = field(default_factory=dict)  # of `read_external`

    @property
    def encoded(self) -> bool:
        """Whether it holds JPEG files, not pixels."""
        return self.fit != ""

    @property
    def dtype(self) -> np.dtype:
        """Of the images: uint8, or the floats of an external file."""
        return self.external.image_dtype if self.external else np.dtype(np.uint8)

    @property
    def image_bytes(self) -> int:
        """Bytes of one image."""
        return math.prod(self.image_shape) * self.dtype.itemsize

    def columns(self, split_name: str) -> dict[str, StoredColumn]:
        """The datasets of a split by their names, in the order in which the uuid takes them."""
        split = self.splits[split_name]
        labels = StoredColumn(split.labels_offset, split.samples, LABEL_BYTES)
        if not self.encoded:
            images = StoredColumn(split.images_offset, split.samples, self.image_bytes)
            return {"images": images, "labels": labels}
        return {
            "bytes": StoredColumn(split.images_offset, split.files_bytes, 1),
            "offsets": StoredColumn(split.offsets_offset, split.samples + 1, OFFSET_BYTES),
            "labels": labels,
        }


def rows_per_block(row_bytes: int) -> int:
    """Rows whose bytes share one checksum: whole rows, 1 MiB or the next below, at least one."""
    return max(1, BLOCK_BYTES // row_bytes)


def ordered(names: Iterable[str]) -> list[str]:
    """Split names in the order of use: train, validation, test, then others by name."""
    return sorted(names, key=lambda name: (SPLITS.index(name) if name in SPLITS else 3, name))


def content_uuid(
    image_shape: tuple[int, int, int],
    classes: tuple[str, ...],
    splits: dict[str, tuple[int, list[np.ndarray]]],
    fit: str = "",
) -> str:
    """The uuid of a pack of this content: equal rows in equal order have equal uuids anywhere.

    `splits`: per split the number of rows, and of every column the CRC-32 of its blocks. `fit` is
    that of a pack of JPEG files.
    """
    parts: list[Any] = [FORMAT, ENCODED_VERSION if fit else VERSION]
    parts += [list(image_shape), list(classes), *((JPEG, fit) if fit else ())]
    for name in ordered(splits):
        rows, checksums = splits[name]
        parts.append([name, rows, *(sums.tolist() for sums in checksums)])
    return str(uuid.uuid5(uuid.NAMESPACE_OID, json.dumps(parts)))


def facts_sha256(
    identity: str, mean: Iterable[float], std: Iterable[float], provenance: dict[str, Any]
) -> str:
    """The SHA-256 over what the uuid of a pack does not cover, together with the uuid."""
    facts = [identity, [*mean], [*std], provenance]
    return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()
