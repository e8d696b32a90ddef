"""The pack file format, versions 1 and 2: names, blocks and the uuid. Used by writer and reader.

Root attributes: ``format``, ``version``, ``uuid``, ``classes`` (UTF-8 strings), ``mean`` and
``std`` (per channel of train, in [0, 1]), ``provenance`` (JSON) and ``sha256`` (of uuid, mean, std
and provenance). One group per split. Version 1 holds pixels, in each group

    images          (N, H, W, C) uint8, contiguous     images_crc32   (blocks,) uint32
    labels          (N,) int64, contiguous             labels_crc32   (blocks,) uint32

Version 2 holds JPEG files, gray or YCbCr and upright, which are decoded when they are read. It has
three more root attributes: ``encoding`` ("jpeg"), ``image_shape`` (H, W, C: (3,) int64), the shape
of the decoded images, and ``fit``: "stretch" to that size, or first "crop" to its proportions,
centred. In each group

    bytes           (B,) uint8, contiguous: the files, bytes_crc32    (blocks,) uint32
                    concatenated
    offsets         (N + 1,) int64, contiguous: file i offsets_crc32  (blocks,) uint32
                    is bytes[offsets[i]:offsets[i + 1]]
    labels          as above                           labels_crc32   as above

A block is ``rows_per_block`` whole rows (an attribute of the checksums), about 1 MiB; a row of
``bytes`` is one byte.
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
SPLITS = ("train", "validation", "test")  # others are allowed and follow, sorted by name
BLOCK_BYTES = 2**20
HASHED = 1 << 16  # checksums that are converted to text at a time
LABEL_BYTES = OFFSET_BYTES = 8


class StoredColumn(NamedTuple):
    """A dataset of a split: the absolute byte offset of its first row, and the number of rows."""

    offset: int
    rows: int
    row_bytes: int


@dataclass(frozen=True)
class SplitLayout:
    """The location of a split's samples in the file; offsets are absolute, in bytes."""

    name: str
    samples: int
    images_offset: int  # of the pixels, or of the bytes of the JPEG files
    labels_offset: int
    files_bytes: int = 0  # of all JPEG files together
    offsets_offset: int = -1  # of the dataset of the files' offsets, (samples + 1,) int64


class Part(NamedTuple):
    """The part of the training split that an incomplete copy of a pack has."""

    samples: range
    files: range  # bytes of their images among those of the split

    def rows(self, kind: str) -> range:
        """Return the rows of a column that belong to the part: n samples have n + 1 offsets."""
        if kind == "bytes":
            return self.files
        return range(self.samples.start, self.samples.stop + (kind == "offsets"))


LAYOUTS = {  # of the images of an external file -> stored axes of (N, H, W, C) or (N, H, W)
    "NHWC": (0, 1, 2, 3),
    "NCHW": (0, 2, 3, 1),
    "NHW": (0, 1, 2),
    "NCWH": (0, 3, 2, 1),  # (H, W, C, N) and (H, W, N) in MATLAB, which is column-major
    "NWH": (0, 2, 1),
}


@dataclass(frozen=True)
class ExternalFile:
    """The location of the samples in an HDF5 file that is not a pack, and how they are split."""

    path: str
    file_size: int
    images: str  # path of the dataset within the file
    labels_path: str  # of the file that holds the labels
    labels: str
    layout: str  # of the images: one of LAYOUTS
    dtype: str  # as stored: uint8, uint16, float16, float32 or float64
    rows: int  # samples of the file
    image_shape: tuple[int, int, int]  # (H, W, C)
    offset: int  # byte offset of the first image; -1 for a chunked dataset
    chunk_rows: int  # samples per chunk; 0 for a contiguous dataset
    labels_crc32: int = 0  # of all labels as int64, to recognise the file
    scale: float = 0.0  # divisor of the values; 0 = not divided
    label_values: tuple[int, ...] = ()  # stored labels of classes 0 ... K-1; () = 0 ... K-1
    block_rows: int = 0  # samples per block when splitting; 0 = one by one, stratified by class
    split: str = "1"  # shares, as for the packer, or the name of the split of all samples
    seed: int = 0

    @property
    def image_dtype(self) -> np.dtype:
        """Type of the images that are read: as stored, or floats if values are divided."""
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
        """Return a view (n, H, W, C) of images as stored, (n, ...)."""
        return stored.transpose(LAYOUTS[self.layout]).reshape(len(stored), *self.image_shape)

    def scaled(self, images: np.ndarray) -> np.ndarray:
        """Return images (n, H, W, C) divided by the scale, if there is one.

        With a scale of 255 the result is bitwise equal to scaled bytes of a pack.
        """
        if not self.scale:
            return images
        dtype = self.image_dtype
        return images.astype(dtype) * dtype.type(1 / self.scale)


EXTERNAL_ARGUMENTS = {  # of read_external, saved to find the same samples again
    "images": str,
    "labels": str,
    "layout": str,
    "split": str,
    "seed": int,
    "block_rows": int,
    "scale": float,
}


@dataclass(frozen=True)
class Pack:
    """All that is needed to read a pack by byte offset; small and picklable.

    An HDF5 file that is not a pack is described by `external`; its splits have no offsets, and its
    mean and std are not known.
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
    uuid_offset: int = -1  # byte offset of the uuid, to recognise the file; -1 = not found
    fit: str = ""  # of a pack of JPEG files: one of FITS
    sha256: str = ""  # from `facts_sha256`
    external: ExternalFile | None = None  # of train
    external_splits: dict[str, ExternalFile] = field(default_factory=dict)  # if each has its own
    external_arguments: dict[str, Any] = field(default_factory=dict)  # of `read_external`
    part: Part | None = None  # of train, if the file is an incomplete copy

    @property
    def encoded(self) -> bool:
        """Whether the pack holds JPEG files instead of pixels."""
        return self.fit != ""

    @property
    def dtype(self) -> np.dtype:
        """Type of the images: uint8, or the type of an external file's images."""
        return self.external.image_dtype if self.external else np.dtype(np.uint8)

    @property
    def image_bytes(self) -> int:
        """Bytes of one image."""
        return math.prod(self.image_shape) * self.dtype.itemsize

    def columns(self, split_name: str) -> dict[str, StoredColumn]:
        """Return the datasets of a split by name, in the order in which the uuid hashes them."""
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

    def check_held(self, split_name: str, kind: str, start: int, stop: int) -> None:
        """Raise RuntimeError if the file lacks any of the bytes `start` to `stop` of a column.

        They would be read as zeros from the holes of an incomplete copy, which is a sparse file.
        """
        if self.part is None or split_name != "train":
            return
        rows, size = self.part.rows(kind), self.columns(split_name)[kind].row_bytes
        if start < rows.start * size or stop > rows.stop * size:
            raise RuntimeError(
                f"{self.path} has bytes {rows.start * size:,} to {rows.stop * size:,} of train's"
                f" {kind}, not all of {start:,} to {stop:,}"
            )


def rows_per_block(row_bytes: int) -> int:
    """Return the rows that share one checksum: whole rows of at most 1 MiB, at least one."""
    return max(1, BLOCK_BYTES // row_bytes)


def ordered(names: Iterable[str]) -> list[str]:
    """Return split names in order of use: train, validation, test, then others by name."""
    return sorted(names, key=lambda name: (SPLITS.index(name) if name in SPLITS else 3, name))


def content_uuid(
    image_shape: tuple[int, int, int],
    classes: tuple[str, ...],
    splits: dict[str, tuple[int, list[np.ndarray]]],
    fit: str = "",
) -> str:
    """Return the uuid of a pack of this content: packs of equal rows have equal uuids.

    `splits` holds, for each split, the number of rows and for every column the CRC-32 of its
    blocks. `fit` is given for a pack of JPEG files.
    """
    parts: list[Any] = [FORMAT, ENCODED_VERSION if fit else VERSION]
    parts += [list(image_shape), list(classes), *((JPEG, fit) if fit else ())]
    digest = hashlib.sha1(uuid.NAMESPACE_OID.bytes, usedforsecurity=False)  # as uuid.uuid5 does,
    digest.update(json.dumps(parts)[:-1].encode())  # but of JSON in pieces
    for name in ordered(splits):
        rows, checksums = splits[name]
        digest.update(f", {json.dumps([name, rows])[:-1]}".encode())
        for sums in checksums:
            digest.update(b", [")
            for start in range(0, len(sums), HASHED):
                numbers = json.dumps(sums[start : start + HASHED].tolist())[1:-1]
                digest.update(f"{', ' if start else ''}{numbers}".encode())
            digest.update(b"]")
        digest.update(b"]")
    digest.update(b"]")
    return str(uuid.UUID(bytes=digest.digest()[:16], version=5))


def facts_sha256(
    identity: str, mean: Iterable[float], std: Iterable[float], provenance: dict[str, Any]
) -> str:
    """Return the SHA-256 of the uuid and of the attributes that the uuid does not cover."""
    facts = [identity, [*mean], [*std], provenance]
    return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()
