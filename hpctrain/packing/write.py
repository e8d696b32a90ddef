"""Write a pack (``data/pack.py``): allocate the file, fill it, finish it.

HDF5 creates the file with room for all samples and closes it. Then bytes are written at their
offsets, by many processes (``make.py``), and HDF5 adds the attributes: on a full disk it may end
the process, so it writes little. The datasets are contiguous and aligned to 4,096 bytes. Nothing in
the file depends on time, path or the number of processes: equal rows give equal bytes.
"""

from __future__ import annotations

import errno
import json
import math
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import accumulate
from pathlib import Path
from typing import Any, BinaryIO

import h5py
import numpy as np

from hpctrain.data.hdf5 import Unusable, locate_dataset
from hpctrain.data.pack import (
    FORMAT,
    MOST_CHANNELS,
    VERSION,
    checksum,
    make_uuid,
    ordered,
    read_facts,
)
from hpctrain.errors import RunError, UsageError, first_line
from hpctrain.files import check_room, whole_file, write_at
from hpctrain.packing.workers import channel_sums
from hpctrain.text import brief

PAGE = 4096  # bytes
LIBRARY = ("v110", "v110")  # metadata checksums, a mark while being written, long attributes
FORBIDDEN = (errno.EACCES, errno.EPERM, errno.EROFS)
RESERVED = 1 << 20  # bytes for what HDF5 adds at the end: on a full disk it may crash
SLAB_BYTES = 8 << 20  # of arrays that are written at a time


class PackWriter:
    """Writes a pack into a new file, with room for all N samples, one split after the other.

    Write every sample at its offset in `places` (N,), then call `finish`. Raises RunError.
    """

    def __init__(
        self,
        file: BinaryIO,
        counts: Mapping[str, int],
        labels: np.ndarray,
        image_shape: tuple[int, int, int],
        sizes: np.ndarray | None = None,
        names: Sequence[str] | None = None,
    ) -> None:
        """Create the file, and write what is known about the samples.

        counts: number of samples by split, as `ordered`; labels: (N,); image_shape: (H, W, C);
        sizes: of JPEG files in bytes, (N,); names: where the samples come from, N of them.
        """
        self._file = file
        self._shape = image_shape
        stops = dict(zip(counts, accumulate(counts.values()), strict=True))
        self._rows = {split: slice(stop - counts[split], stop) for split, stop in stops.items()}
        self.places = np.zeros(len(labels), np.int64)
        needed = len(labels) * math.prod(image_shape)
        if sizes is not None:
            needed = int(sizes.sum())
        check_room(Path(file.name).parent, needed, "packing")

        def add(group: h5py.Group, name: str, values: np.ndarray) -> None:
            offset = _allocate(group, name, values.dtype.str, values.shape)
            write_at(file.fileno(), values.data.cast("B"), offset)

        with self._open("w") as pack:
            for split, rows in self._rows.items():
                group = pack.create_group(split)
                count = counts[split]
                if sizes is None:
                    ends = np.arange(count + 1) * math.prod(image_shape)
                    first = _allocate(group, "images", "u1", (count, *image_shape))
                else:
                    ends = _ends(sizes[rows])
                    first = _allocate(group, "bytes", "u1", (ends[-1],))
                    add(group, "offsets", ends)
                self.places[rows] = first + ends[:-1]
                add(group, "labels", labels[rows].astype("<i4"))
                _allocate(group, "crc32", "<u4", (count,))
                if names is not None:
                    lengths = np.fromiter((len(_encoded(name)) for name in names[rows]), np.int64)
                    add(group, "names", np.frombuffer(_encoded("".join(names[rows])), np.uint8))
                    add(group, "name_offsets", _ends(lengths))

    def finish(
        self,
        crc32: np.ndarray,
        sums: np.ndarray,
        classes: Sequence[str],
        provenance: Mapping[str, Any],
        fit: str = "",
    ) -> None:
        """Write the checksums and attributes, after all samples.

        crc32: (N,) uint32; sums: of train's pixels and of their squares, (2, C), exact integers.
        """
        pixels = self._rows["train"].stop * self._shape[0] * self._shape[1]  # it is the first
        mean = []
        std = []
        for value, square in sums.T.tolist():
            mean.append(value / (255 * pixels))
            std.append(math.sqrt(pixels * square - value**2) / (255 * pixels))  # integers: exact
        number = self._file.fileno()
        os.posix_fallocate(number, os.fstat(number).st_size, RESERVED)  # HDF5 cuts off the rest
        with self._open("r+") as file:
            encoded = [_encoded(name) for name in classes]
            text = h5py.string_dtype("utf-8", max(len(name) for name in encoded))
            attributes = {
                "format": np.bytes_(FORMAT),
                "version": VERSION,
                "classes": np.array(encoded, text),
                "image_shape": np.array(self._shape, "<i8"),
                "fit": np.array(fit.encode(), "S8"),
                "mean": np.array(mean),
                "std": np.array(std),
                "provenance": np.bytes_(json.dumps(provenance)),
            }
            for name, value in attributes.items():
                file.attrs[name] = value
            checksums = {split: crc32[rows] for split, rows in self._rows.items()}
            for split, values in checksums.items():
                offset = file[f"{split}/crc32"].id.get_offset()
                write_at(number, values.astype("<u4").data.cast("B"), offset)
            uuid = make_uuid(read_facts(file), checksums)
            file["identity"] = np.frombuffer(uuid.encode(), np.uint8)

    def _open(self, mode: str) -> h5py.File:
        return h5py.File(
            self._file.name,
            mode,
            libver=LIBRARY,
            locking=False,
            alignment_threshold=PAGE,
            alignment_interval=PAGE,
        )


def _allocate(group: h5py.Group, name: str, dtype: str, shape: tuple[int, ...]) -> int:
    """Create a contiguous dataset, allocated but not written; return its offset in the file."""
    properties = h5py.h5p.create(h5py.h5p.DATASET_CREATE)
    properties.set_alloc_time(h5py.h5d.ALLOC_TIME_EARLY)
    properties.set_fill_time(h5py.h5d.FILL_TIME_NEVER)
    dataset = group.create_dataset(name, shape, dtype, dcpl=properties)
    return int(dataset.id.get_offset())


def _ends(sizes: np.ndarray) -> np.ndarray:
    """Return where items of these sizes (n,) begin and end, one after the other: (n + 1,) int64."""
    return np.concatenate([[0], np.cumsum(sizes)]).astype("<i8")


def _encoded(text: str) -> bytes:
    return text.encode("utf-8", "surrogateescape")


@contextmanager
def writing_pack(output: Path) -> Iterator[None]:
    """Raise a system error in the block that writes a pack as a RunError or UsageError."""
    try:
        yield
    except (OSError, RuntimeError) as error:  # HDF5 reports errno in its text
        number = getattr(error, "errno", None)
        inner = re.search(r"errno = (\d+)", str(error))
        if inner:
            number = int(inner[1])
        if number is None:
            raise
        text = f"{output} cannot be written: {os.strerror(number)}; nothing is kept"
        if number in FORBIDDEN:
            raise UsageError(text) from None
        raise RunError(text) from None


def write_pack(
    path: str | os.PathLike[str],
    splits: Mapping[str, tuple[Any, Any]],
    classes: Sequence[str],
    provenance: Mapping[str, Any] | None = None,
    overwrite: bool = False,
) -> None:
    """Write arrays of images and labels as a pack, in the order given.

    splits: by name, (images, labels). One split is named train; validation and test are those that
        training knows, others can be evaluated by name.
    images: uint8, (N, H, W, C) or (N, H, W), of one shape in all splits: an array or a dataset of
        h5py, which is read about 8 MiB at a time.
    labels: (N,) integers 0 ... K-1 or truth values, the indices of `classes`.
    classes: K different names.
    provenance: what the images are, a dictionary that can be written as JSON.

    The pack gets its name when it is complete; with `overwrite`, it replaces an existing file.
    Call this function in one process only. Raises UsageError if the arrays do not fit together or
    the file exists or cannot be written, RunError if the disk is full.
    """
    output = Path(path)
    classes = [*classes]
    provenance = dict(provenance or {})
    if output.exists() and not overwrite:
        raise UsageError(f"{output} exists: give another path, or replace it with overwrite=True")
    if "train" not in splits:
        raise UsageError(f"the splits are {[*splits]}: one must be named train")
    named = all(isinstance(name, str) and name for name in classes)
    if not classes or not named or len({*classes}) < len(classes):
        raise UsageError(f"classes {brief(classes)}: give each class a name of its own")
    by_split = {name: _check_arrays(name, *splits[name], len(classes)) for name in ordered(splits)}
    shapes = {name: (*images.shape[1:], 1)[:3] for name, (images, _) in splits.items()}
    if len({*shapes.values()}) > 1:
        raise UsageError(f"the splits differ in image shape: {shapes}")
    try:
        json.dumps(provenance, allow_nan=False)
    except (TypeError, ValueError) as error:
        raise UsageError(f"the provenance cannot be written as JSON: {error}") from None
    shape = shapes["train"]
    labels = np.concatenate([*by_split.values()])
    size = math.prod(shape)
    step = max(1, SLAB_BYTES // size)
    counts = {name: len(values) for name, values in by_split.items()}
    sums = np.zeros((2, shape[2]), np.uint64)
    crc32 = np.zeros(len(labels), np.uint32)
    row = 0
    with writing_pack(output), whole_file(output) as file:
        writer = PackWriter(file, counts, labels, shape)
        for name, count in counts.items():
            for start in range(0, count, step):
                stop = min(start + step, count)
                slab = np.ascontiguousarray(splits[name][0][start:stop], np.uint8)
                data = slab.reshape(stop - start, *shape).data.cast("B")
                write_at(file.fileno(), data, int(writer.places[row]))
                for at in range(0, len(data), size):
                    crc32[row] = checksum(data[at : at + size], int(labels[row]))
                    row += 1
                if name == "train":
                    sums += channel_sums(data, shape[2])
        writer.finish(
            crc32=crc32,
            sums=sums,
            classes=classes,
            provenance=provenance,
        )


def _check_arrays(split: str, images: Any, labels: Any, classes: int) -> np.ndarray:
    """Return the labels (N,) int32 of a split. Raises UsageError unless they fit to its images."""
    if not split or "/" in split or split in (".", "identity"):
        raise UsageError(f"a split cannot have the name {split!r}")
    for what, values in (("images", images), ("labels", labels)):
        if isinstance(values, np.ma.MaskedArray):
            raise UsageError(f"{what} of {split} are a masked array: fill it, as in .filled(0)")
    shape = _check_images(f"images of {split}", images)
    try:
        values = np.asarray(labels)
    except ValueError as error:  # of lists of different lengths
        raise UsageError(f"labels of {split} are no array: {first_line(error)}") from None
    is_whole = values.dtype.kind in "biu" and values.size > 0
    is_valid = False
    numbers = ""
    if is_whole:
        low = int(values.min())
        high = int(values.max())
        is_valid = 0 <= low <= high < classes
        numbers = f" from {low} to {high}"
    if values.shape != shape[:1] or not is_valid:
        advice = ""
        if values.size == shape[0] and values.ndim > 1:
            advice = "; labels.reshape(-1) has this shape"
        elif values.ndim == 2:
            advice = "; of one-hot ones, labels.argmax(1)"
        elif values.dtype.kind in "USO":
            advice = "; of names, numpy.unique(labels, return_inverse=True) gives classes and these"
        raise UsageError(
            f"labels of {split} are {values.dtype} of shape {values.shape}{numbers}: expected"
            f" {shape[0]:,} integers from 0 to {classes - 1}{advice}"
        )
    return values.astype(np.int32)


def _check_images(name: str, images: Any) -> tuple[int, ...]:
    """Return the shape of the images of a split. Raises UsageError if they cannot be packed."""
    dtype: Any = getattr(images, "dtype", type(images).__name__)
    shape = tuple(getattr(images, "shape", ()))
    what = f"{name} are {dtype} of shape {shape}"
    if dtype != np.uint8:
        advice = ""
        if str(dtype).startswith("torch."):
            advice = "; of a tensor, images.numpy()"
        elif getattr(dtype, "kind", "") == "f":
            advice = "; of floats in [0, 1], (255 * images).round().astype('uint8')"
        elif getattr(dtype, "kind", "") in "biu":
            advice = "; training reads others from an HDF5 file (--images)"
        raise UsageError(f"{what}: expected an array of uint8{advice}")
    if len(shape) not in (3, 4) or 0 in shape:
        raise UsageError(f"{what}: expected (N, H, W, C) or (N, H, W), none of them 0")
    if len(shape) == 4 and shape[1] <= MOST_CHANNELS < shape[3] and shape[1] != shape[2]:
        raise UsageError(f"{what}, which is (N, C, H, W): give images.transpose(0, 2, 3, 1)")
    if isinstance(images, h5py.Dataset) and os.path.isfile(images.file.filename):
        try:
            locate_dataset(images, {})  # HDF5 reads what was never written as zeros
        except Unusable as error:
            raise UsageError(f"{name}: {error}") from None
    return shape
