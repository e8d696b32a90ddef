"""Sources that are .npz files: the arrays ``images`` and ``labels``, or ``x_train``, ``y_train``,
``x_test``, ``y_test`` and others of NPZ_NAMES; ``classes`` may name the classes.

Pixels go to a scratch file, never to memory. What a header says is compared with the limits before
room is made for it.
"""

from __future__ import annotations

import errno
import io
import math
import zipfile
from contextlib import ExitStack
from pathlib import Path
from typing import IO

import numpy as np

from hpctrain.data.packing.arrays import Part, image_shape, make_source
from hpctrain.data.packing.layout import Source
from hpctrain.data.packing.scratch import (
    UNZIP_ERRORS,
    ZIP_ERRORS,
    Archive,
    Place,
    check_growth,
    copy_exactly,
    scratch_file,
)
from hpctrain.errors import UsageError, brief

MOST_CLASSES, MOST_BYTES = 1_000_000, 1024  # named, and of one label or name
MOST_HEADER = 10_000  # bytes, as numpy has it
NPZ_NAMES = (
    ("", "images", "labels"),
    ("train", "x_train", "y_train"),
    ("train", "train_images", "train_labels"),
    ("validation", "x_val", "y_val"),
    ("validation", "val_images", "val_labels"),
    ("test", "x_test", "y_test"),
    ("test", "test_images", "test_labels"),
)


def npz_source(path: Path, scratch: Place, stack: ExitStack) -> Source:
    """The arrays of a .npz file. Raises UsageError where there are none that can be used."""
    try:
        with Archive(path) as file, zipfile.ZipFile(file) as archive:
            names = {name[:-4] for name in archive.namelist() if name.endswith(".npy")}
            parts = [
                _npz_part(archive, path, names_of_part, scratch, stack)
                for names_of_part in NPZ_NAMES
                if set(names_of_part[1:]) <= names
            ]
            given = "classes" in names
            named = _npz_array(archive, path, "classes", MOST_CLASSES) if given else None
    except (*ZIP_ERRORS, *UNZIP_ERRORS, OSError) as error:
        if isinstance(error, OSError) and error.errno not in (None, errno.EINVAL):
            raise  # not of a place that the archive's directory invents: a full disk, say
        raise UsageError(f"source {path} is no whole .npz file: {brief(error)}") from None
    if not parts:
        known = ", ".join(f"{images} and {labels}" for _, images, labels in NPZ_NAMES)
        raise UsageError(
            f"source {path} holds {', '.join(sorted(names)) or 'nothing'}; known are {known}"
        )
    classes = None if named is None else tuple(str(value) for value in named.tolist())
    return make_source(path.name, parts, classes)


def _npz_part(
    archive: zipfile.ZipFile,
    path: Path,
    names: tuple[str, str, str],
    scratch: Place,
    stack: ExitStack,
) -> Part:
    split, images, labels = names
    what = f"{path}: {images}"
    with archive.open(f"{images}.npy") as stream:
        dimensions, fortran, kind = _npy_header(stream, what)
        if kind != np.uint8:
            raise UsageError(f"{what} is {kind}, not uint8: scale the pixels to 0 to 255 first")
        shape = image_shape(dimensions, what)
        check_growth(path, math.prod(shape))
        file = stack.enter_context(scratch_file(scratch))
        copy_exactly(stream, file, math.prod(shape), what)
    if fortran:
        columns = np.memmap(file, np.uint8, "r", 0, dimensions, "F")
        file = stack.enter_context(scratch_file(scratch))
        for row in columns:
            file.write(row.tobytes())  # C order
        file.flush()
    return Part(images, split, file, 0, shape, _npz_array(archive, path, labels, shape[0]))


def _npz_array(archive: zipfile.ZipFile, path: Path, name: str, most: int) -> np.ndarray:
    """A small array of at most so many, of one dimension or a column of one. Raises UsageError."""
    what = f"{path}: {name}"
    with archive.open(f"{name}.npy") as stream:
        dimensions, _, kind = _npy_header(stream, what)
        flat = len(dimensions) == 1 or (len(dimensions) == 2 and dimensions[1] == 1)
        if not flat or kind.kind not in "iuUS":
            raise UsageError(f"{what} is {kind} of shape {dimensions}: one number or name each")
        if not 0 < dimensions[0] <= most or kind.itemsize > MOST_BYTES:
            raise UsageError(
                f"{what} says {dimensions[0]:,} entries of {kind.itemsize:,} bytes; the limits are"
                f" {most:,} and {MOST_BYTES:,}"
            )
        length = math.prod(dimensions) * kind.itemsize
        values = np.frombuffer(stream.read(length), kind)
        if len(values) != math.prod(dimensions):
            raise UsageError(f"{what} is cut short")
    return np.char.decode(values, "utf-8") if kind.kind == "S" else values


def _npy_header(stream: IO[bytes], what: str) -> tuple[tuple[int, ...], bool, np.dtype]:
    """Shape, whether in Fortran order, and kind of number; the stream then stands at the data."""
    start = stream.read(12)
    first = 12 if start[6:7] == b"\2" else 10  # byte of the header's text; its length stands before
    length = int.from_bytes(start[8:first], "little")
    if length > MOST_HEADER:
        raise UsageError(f"{what} has a header of {length:,} bytes; the limit is {MOST_HEADER:,}")
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
