"""Sources that are arrays of pixels: idx files (MNIST) and .npz.

idx: two zero bytes, type (8 = unsigned byte), number of dimensions, each dimension as big-endian
uint32, then the elements in C order. Images are (N, H, W) or (N, H, W, C), their labels (N,) in a
second file whose name says ``labels`` and ``idx1``; ``t10k`` or ``test`` in the name make the test
split. npz: ``npz.py``.

Pixels stay in files (compressed ones in a scratch file), never in memory.
"""

from __future__ import annotations

import gzip
import math
import struct
from collections import Counter
from contextlib import ExitStack
from pathlib import Path
from typing import IO, BinaryIO, NamedTuple, cast

import numpy as np

from hpctrain.data.packing.layout import Item, Source
from hpctrain.data.packing.scratch import (
    UNZIP_ERRORS,
    Place,
    check_count,
    check_growth,
    copy_exactly,
    scratch_file,
)
from hpctrain.errors import UsageError


class Pair(NamedTuple):
    """An idx file of images, that of its labels, and the split their name gives."""

    images: Path
    labels: Path
    split: str


class Part(NamedTuple):
    """Pixels in a file and their labels (N,) of any kind that sorts."""

    what: str
    split: str
    file: BinaryIO
    offset: int
    shape: tuple[int, int, int, int]  # (N, H, W, C)
    labels: np.ndarray


def is_idx(path: Path) -> bool:
    """Whether the file, unzipped where it is a .gz, begins as an idx file of images does."""
    try:
        with _stream(path) as stream:
            return stream.read(4) in (b"\0\0\x08\x03", b"\0\0\x08\x04")
    except (OSError, *UNZIP_ERRORS):
        return False


def find_idx(folder: Path) -> list[Pair]:
    """All pairs in a folder, of each name the unzipped one if both are there. Raises UsageError."""
    found: dict[str, Path] = {}
    for path in sorted(folder.iterdir(), reverse=True):  # .gz first
        name = path.name.lower()
        if "images" in name and "idx" in name and path.is_file() and is_idx(path):
            found[path.name.removesuffix(".gz")] = path
    pairs = sorted((pair for path in found.values() for pair in idx_pair(path)), key=_split_of)
    splits = [pair.split for pair in pairs]
    if len(set(splits)) < len(splits):
        names = ", ".join(pair.images.name for pair in pairs)
        raise UsageError(
            f"source {folder} holds several idx sets ({names}): name the images file of one"
        )
    return pairs


def _split_of(pair: Pair) -> bool:
    return pair.split == "test"  # train first


def idx_pair(images: Path) -> list[Pair]:
    """The pair of an images file, as a list of one. Raises UsageError without its labels."""
    stem = images.name.removesuffix(".gz").replace("images", "labels")
    stem = stem.replace("idx3", "idx1").replace("idx4", "idx1")
    for name in (stem, f"{stem}.gz"):
        labels = images.with_name(name)
        if labels != images and labels.is_file():
            test = "t10k" in stem or "test" in stem
            return [Pair(images, labels, "test" if test else "train")]
    raise UsageError(f"source {images} has no labels beside it: expected {stem} or {stem}.gz")


def idx_source(name: str, pairs: list[Pair], scratch: Place, stack: ExitStack) -> Source:
    """The images and labels of idx files. Raises UsageError where they do not fit together."""
    try:
        parts = [_idx_part(pair, scratch, stack) for pair in pairs]
    except UNZIP_ERRORS as error:
        raise UsageError(f"source {name} is cut short or damaged ({error})") from None
    return make_source(name, parts, None)


def _idx_part(pair: Pair, scratch: Place, stack: ExitStack) -> Part:
    images, _, split = pair
    with _stream(images) as stream:
        shape = image_shape(_dimensions(stream, images), str(images))
        offset, length = stream.tell(), math.prod(shape)
        if _zipped(images):
            check_growth(images, length)
            file = stack.enter_context(scratch_file(scratch))
            copy_exactly(stream, file, length, f"source {images}")
            return Part(images.name, split, file, 0, shape, _idx_labels(pair, shape[0]))
    there = images.stat().st_size - offset
    if there != length:
        raise UsageError(f"source {images} says {length:,} bytes of pixels but has {there:,}")
    file = stack.enter_context(images.open("rb"))
    return Part(images.name, split, file, offset, shape, _idx_labels(pair, shape[0]))


def _idx_labels(pair: Pair, images: int) -> np.ndarray:
    """The labels (N,) of as many images, which are there. UsageError."""
    labels = pair.labels
    with _stream(labels) as stream:
        dimensions = _dimensions(stream, labels)
        if len(dimensions) != 1:
            raise UsageError(f"source {labels} has {len(dimensions)} dimensions, not 1")
        count = dimensions[0]
        if count != images:
            name = pair.images.name
            raise UsageError(f"source {labels}: {name} has {images:,} images but {count:,} labels")
        values = np.frombuffer(stream.read(count + 1), np.uint8)
    if len(values) != count:
        raise UsageError(f"source {labels} does not hold the {count:,} labels it says")
    return values


def _zipped(path: Path) -> bool:
    with path.open("rb") as file:
        return file.read(2) == b"\x1f\x8b"


def _stream(path: Path) -> IO[bytes]:
    return cast(IO[bytes], gzip.open(path)) if _zipped(path) else path.open("rb")


def _dimensions(stream: IO[bytes], path: Path) -> tuple[int, ...]:
    try:
        zero, kind, count = struct.unpack(">HBB", stream.read(4))
        dimensions = struct.unpack(f">{count}I", stream.read(4 * count))
    except struct.error:
        raise UsageError(f"source {path} is cut short within its header") from None
    if zero != 0 or kind != 8:
        raise UsageError(f"source {path} is no idx file of unsigned bytes")
    return dimensions


def image_shape(dimensions: tuple[int, ...], what: str) -> tuple[int, int, int, int]:
    """(N, H, W, C) of an array of these dimensions. Raises UsageError."""
    if len(dimensions) == 3:
        dimensions = (*dimensions, 1)
    if len(dimensions) != 4 or dimensions[3] not in (1, 3) or min(dimensions) < 1:
        raise UsageError(
            f"{what} has shape {dimensions}: expected (N, H, W) or (N, H, W, C) with C 1 or 3"
        )
    check_count(what, dimensions[0])
    return dimensions[0], dimensions[1], dimensions[2], dimensions[3]


def make_source(name: str, parts: list[Part], classes: tuple[str, ...] | None) -> Source:
    """All parts as one source; classes are the distinct labels unless they are named."""
    shapes = {part.shape[1:] for part in parts}
    if len(shapes) > 1:
        raise UsageError(f"source {name} has images of several shapes: {sorted(shapes)}")
    for part in parts:
        if part.shape[0] != len(part.labels):
            raise UsageError(
                f"source {name}: {part.what} has {part.shape[0]:,} images but"
                f" {len(part.labels):,} labels"
            )
    values = np.concatenate([part.labels for part in parts])
    if classes is None:
        distinct, numbers = np.unique(values, return_inverse=True)
        classes = tuple(str(value) for value in distinct.tolist())
    elif values.dtype.kind not in "iu" or not 0 <= values.min() <= values.max() < len(classes):
        raise UsageError(f"source {name}: labels are not numbers 0 to {len(classes) - 1}")
    else:
        numbers = values
    if twice := next((name for name, count in Counter(classes).items() if count > 1), None):
        raise UsageError(
            f"source {name}: two classes have the name {twice!r}: give each a name of its own"
        )
    row = math.prod(parts[0].shape[1:])
    items: list[Item] = []
    for slot, part in enumerate(parts):
        first = len(items)
        items.extend(
            Item(f"{part.what}[{i}]", label, part.split, slot, part.offset + i * row, row)
            for i, label in enumerate(numbers[first : first + part.shape[0]].tolist())
        )
    files = [part.file for part in parts]
    shape = parts[0].shape[1:]
    return Source(name, "pixels", "", classes, items, files=files, shape=shape)
