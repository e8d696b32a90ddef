"""Sources that are arrays of pixels: idx files (MNIST) and .npz.

idx: two zero bytes, type (8 = unsigned byte), number of dimensions, each dimension as big-endian
uint32, then the elements in C order. Images are (N, H, W) or (N, H, W, C), their labels (N,) are in
a second file with ``labels`` and ``idx1`` in its name; ``t10k`` or ``test`` in it means test split.
npz: arrays with the names in NPZ_NAMES; ``classes`` may hold the names of the classes.
Pixels stay in files (decompressed ones in a scratch file), never in memory. Sizes in a header are
compared with the limits before anything is allocated.
"""

from __future__ import annotations

import errno
import gzip
import io
import math
import struct
import zipfile
from collections import Counter
from pathlib import Path
from typing import IO, NamedTuple, cast

import numpy as np

from hpctrain.data.pack_format import SPLITS
from hpctrain.data.packing.layout import NO_SPLIT, ImageSource, image_table
from hpctrain.data.packing.names import Names
from hpctrain.data.packing.scratch import (
    UNZIP_ERRORS,
    ZIP_ERRORS,
    NewFile,
    ZipArchive,
    check_count,
    check_growth,
    copy_exactly,
    path_of,
)
from hpctrain.errors import UsageError
from hpctrain.text import brief

MAX_CLASSES, MAX_BYTES = 1_000_000, 1024  # class names, and bytes of one label or name
MAX_HEADER = 10_000  # bytes, NumPy's own limit
NPZ_NAMES = (
    ("", "images", "labels"),
    *(("train", "x_train", "y_train"), ("train", "train_images", "train_labels")),
    *(("validation", "x_val", "y_val"), ("validation", "val_images", "val_labels")),
    *(("test", "x_test", "y_test"), ("test", "test_images", "test_labels")),
)


class IdxPair(NamedTuple):
    """An idx file of images, the idx file of its labels, and the split that the name implies."""

    images: Path
    labels: Path
    split: str


class PixelArray(NamedTuple):
    """Pixels in a file and their labels (N,), of any type that can be sorted."""

    what: str
    split: str
    file: str  # its path
    offset: int
    shape: tuple[int, int, int, int]  # (N, H, W, C)
    labels: np.ndarray


def is_idx(path: Path) -> bool:
    """Whether the file, decompressed if it is a .gz, begins like an idx file of images."""
    try:
        with _stream(path) as stream:
            return stream.read(4) in (b"\0\0\x08\x03", b"\0\0\x08\x04")
    except (OSError, *UNZIP_ERRORS):
        return False


def find_idx(folder: Path) -> list[IdxPair]:
    """Find all pairs in a folder; of NAME and NAME.gz, NAME is preferred. Raises UsageError."""
    found: dict[str, Path] = {}
    for path in sorted(folder.iterdir(), reverse=True):  # .gz first
        name = path.name.lower()
        if "images" in name and "idx" in name and path.is_file() and is_idx(path):
            found[path.name.removesuffix(".gz")] = path
    pairs = [find_labels(path) for path in found.values()]
    pairs.sort(key=lambda pair: pair.split == "test")  # train first
    splits = [pair.split for pair in pairs]
    if len(set(splits)) < len(splits):
        names = ", ".join(pair.images.name for pair in pairs)
        raise UsageError(
            f"source {folder} holds several idx sets ({names}): name the images file of one"
        )
    return pairs


def find_labels(images: Path) -> IdxPair:
    """Find the labels of an idx file of images. Raises UsageError if they are missing."""
    stem = images.name.removesuffix(".gz").replace("images", "labels")
    stem = stem.replace("idx3", "idx1").replace("idx4", "idx1")
    for name in (stem, f"{stem}.gz"):
        labels = images.with_name(name)
        if labels != images and labels.is_file():
            test = "t10k" in stem or "test" in stem
            return IdxPair(images, labels, "test" if test else "train")
    raise UsageError(f"source {images} has no labels beside it: expected {stem} or {stem}.gz")


def idx_source(name: str, pairs: list[IdxPair], new_file: NewFile) -> ImageSource:
    """List the images and labels of idx files. Raises UsageError if they do not fit together."""
    try:
        parts = [_idx_part(pair, new_file) for pair in pairs]
    except UNZIP_ERRORS as error:
        raise UsageError(f"source {name} is cut short or corrupt ({error})") from None
    return make_source(name, parts, None)


def _idx_part(pair: IdxPair, new_file: NewFile) -> PixelArray:
    images, _, split = pair
    with _stream(images) as stream:
        shape = image_shape(_dimensions(stream, images), str(images))
        offset, length = stream.tell(), math.prod(shape)
        where, there = str(images.resolve()), images.stat().st_size - offset
        if _zipped(images):
            check_growth(images, length)
            file = new_file()
            copy_exactly(stream, file, length, f"source {images}")
            where, offset = path_of(file), 0
        elif there != length:
            raise UsageError(f"source {images} says {length:,} bytes of pixels but has {there:,}")
    return PixelArray(images.name, split, where, offset, shape, _idx_labels(pair, shape[0]))


def _idx_labels(pair: IdxPair, images: int) -> np.ndarray:
    """Read the labels (N,), which must be as many as `images`. Raises UsageError."""
    labels = pair.labels
    with _stream(labels) as stream:
        dimensions = _dimensions(stream, labels)
        if len(dimensions) != 1:
            raise UsageError(f"source {labels} has {len(dimensions)} dimensions, not 1")
        if (count := dimensions[0]) != images:
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
    """Return the shape (N, H, W, C) of an array of these dimensions. Raises UsageError."""
    if len(dimensions) == 3:
        dimensions = (*dimensions, 1)
    if len(dimensions) != 4 or dimensions[3] not in (1, 3) or min(dimensions) < 1:
        raise UsageError(
            f"{what} has shape {dimensions}: expected (N, H, W) or (N, H, W, C) with C 1 or 3"
        )
    check_count(what, dimensions[0])
    return dimensions[0], dimensions[1], dimensions[2], dimensions[3]


def make_source(name: str, parts: list[PixelArray], classes: tuple[str, ...] | None) -> ImageSource:
    """Join all parts to one source. Without names in `classes`, classes are the distinct labels."""
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
    if twice := [name for name, count in Counter(classes).items() if count > 1]:
        raise UsageError(f"source {name}: two classes have the name {twice[0]!r}: rename one")
    counts, row = [part.shape[0] for part in parts], math.prod(parts[0].shape[1:])
    splits = [SPLITS.index(part.split) if part.split else NO_SPLIT for part in parts]
    names = Names(f"{part.what}[{i}]" for part in parts for i in range(part.shape[0]))
    images = image_table("pixels", names, np.arange(len(values)), label=numbers, size=row)
    images["split"], images["file"] = np.repeat([splits, range(len(parts))], counts, axis=1)
    offsets = [part.offset + row * np.arange(part.shape[0]) for part in parts]
    images["offset"] = np.concatenate(offsets)
    files, shape = [part.file for part in parts], parts[0].shape[1:]
    return ImageSource(name, "pixels", "", classes, images, names.encoded, files=files, shape=shape)


def npz_source(path: Path, new_file: NewFile) -> ImageSource:
    """List the arrays of a .npz file. Raises UsageError if it has no usable ones."""
    try:
        with ZipArchive(path) as file, zipfile.ZipFile(file) as archive:
            names = {name[:-4] for name in archive.namelist() if name.endswith(".npy")}
            parts = [
                _npz_part(archive, path, names_of_part, new_file)
                for names_of_part in NPZ_NAMES
                if set(names_of_part[1:]) <= names
            ]
            named = None
            if "classes" in names:
                named = _npz_array(archive, path, "classes", MAX_CLASSES).tolist()
    except (*ZIP_ERRORS, *UNZIP_ERRORS, OSError) as error:
        if isinstance(error, OSError) and error.errno not in (None, errno.EINVAL):
            raise  # such as a full disk; EINVAL comes from false offsets in the archive's directory
        raise UsageError(f"source {path} is no whole .npz file: {brief(error)}") from None
    if not parts:
        usual = ", ".join(f"{images} and {labels}" for _, images, labels in NPZ_NAMES)
        there = ", ".join(sorted(names)) or "nothing"
        raise UsageError(f"source {path} holds {there}; known are {usual}")
    return make_source(path.name, parts, tuple(map(str, named)) if named else None)


def _npz_part(
    archive: zipfile.ZipFile, path: Path, names: tuple[str, str, str], new_file: NewFile
) -> PixelArray:
    split, images, labels = names
    what = f"{path}: {images}"
    with archive.open(f"{images}.npy") as stream:
        dimensions, fortran, kind = _npy_header(stream, what)
        if kind != np.uint8:
            raise UsageError(f"{what} is {kind}, not uint8: scale the pixels to 0 to 255 first")
        shape = image_shape(dimensions, what)
        check_growth(path, math.prod(shape))
        file = new_file()
        copy_exactly(stream, file, math.prod(shape), what)
    if fortran:
        columns = np.memmap(file, np.uint8, "r", 0, dimensions, "F")
        file = new_file()
        for row in columns:
            file.write(row.tobytes())  # C order
        file.flush()
    given = _npz_array(archive, path, labels, shape[0])
    return PixelArray(images, split, path_of(file), 0, shape, given)


def _npz_array(archive: zipfile.ZipFile, path: Path, name: str, limit: int) -> np.ndarray:
    """Read an array (N,) or (N, 1) of at most `limit` entries. Raises UsageError."""
    what = f"{path}: {name}"
    with archive.open(f"{name}.npy") as stream:
        dimensions, _, kind = _npy_header(stream, what)
        flat = len(dimensions) == 1 or (len(dimensions) == 2 and dimensions[1] == 1)
        if not flat or kind.kind not in "iuUS":
            raise UsageError(f"{what} is {kind} of shape {dimensions}: one number or name each")
        if not 0 < dimensions[0] <= limit or kind.itemsize > MAX_BYTES:
            raise UsageError(
                f"{what} says {dimensions[0]:,} entries of {kind.itemsize:,} bytes; the limits are"
                f" {limit:,} and {MAX_BYTES:,}"
            )
        length = math.prod(dimensions) * kind.itemsize
        values = np.frombuffer(stream.read(length), kind)
        if len(values) != math.prod(dimensions):
            raise UsageError(f"{what} is cut short")
    return np.char.decode(values, "utf-8") if kind.kind == "S" else values


def _npy_header(stream: IO[bytes], what: str) -> tuple[tuple[int, ...], bool, np.dtype]:
    """Read shape, Fortran order and dtype of a .npy header. The stream is then at the data."""
    start = stream.read(12)
    first = 12 if start[6:7] == b"\2" else 10  # offset of the header's text, after its length
    length = int.from_bytes(start[8:first], "little")
    if length > MAX_HEADER:
        raise UsageError(f"{what} has a header of {length:,} bytes; the limit is {MAX_HEADER:,}")
    header = io.BytesIO(start + stream.read(max(0, first + length - len(start))))
    try:
        version = np.lib.format.read_magic(header)
        if version == (1, 0):
            return np.lib.format.read_array_header_1_0(header)
        if version == (2, 0):
            return np.lib.format.read_array_header_2_0(header)
    except ValueError as error:
        raise UsageError(f"{what} is no whole array: {brief(error)}") from None
    raise UsageError(f"{what} is of .npy format version {version}, known are (1, 0) and (2, 0)")
