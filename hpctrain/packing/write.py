"""Write a pack (``data/pack.py``): allocate the file, fill it, finish it.

HDF5 creates the file with room for all samples and closes it. Then bytes are written at their
offsets, by many processes (``make.py``), and HDF5 adds the attributes: on a full disk, HDF5 may end
the process, so it writes little. The datasets are contiguous and aligned to 4,096 bytes. Nothing in
the file depends on time, path or the number of processes, so equal rows give equal bytes. Mean and
standard deviation are computed from exact integer sums.
"""

from __future__ import annotations

import errno
import json
import math
import os
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

import h5py
import numpy as np
from PIL import Image

from hpctrain.data.pack import FORMAT, VERSION, checksum, make_uuid, ordered, read_facts
from hpctrain.errors import RunError, UsageError
from hpctrain.files import whole_file, write_at
from hpctrain.text import brief

PAGE = 4096  # bytes
LIBRARY = ("v110", "v110")  # metadata checksums, a mark while being written, long attributes
FORBIDDEN = (errno.EACCES, errno.EPERM, errno.EROFS)
SLAB_BYTES = 8 << 20  # of arrays that are written at a time


class PackWriter:
    """Writes a pack into a new file, with room for all samples.

    Write the samples of each split at its offset in `images`, then call `finish`.
    """

    def __init__(
        self,
        file: BinaryIO,
        labels: Mapping[str, np.ndarray],
        image_shape: tuple[int, int, int],
        offsets: Mapping[str, np.ndarray] | None = None,
        names: Mapping[str, Sequence[str]] | None = None,
    ) -> None:
        """Create the file, and write what is known about the samples.

        labels: by split, (n,); image_shape: (H, W, C); offsets: of JPEG files, by split (n + 1,);
        names: where the samples come from, by split, n of them.
        """
        self.path, self._file, self._shape = os.path.abspath(file.name), file, image_shape
        self._labels, self.images, self._crc32 = labels, dict[str, int](), dict[str, int]()
        known: list[tuple[int, np.ndarray]] = []  # byte offsets, and what to write there

        def add(group: h5py.Group, name: str, values: np.ndarray) -> None:
            known.append((_allocate(group, name, values.dtype.str, values.shape), values))

        with self._open("w") as pack:
            for split in ordered(labels):
                group, rows = pack.create_group(split), len(labels[split])
                if offsets is None:
                    self.images[split] = _allocate(group, "images", "u1", (rows, *image_shape))
                else:
                    self.images[split] = _allocate(group, "bytes", "u1", (offsets[split][-1],))
                    add(group, "offsets", offsets[split].astype("<i8"))
                add(group, "labels", labels[split].astype("<i4"))
                self._crc32[split] = _allocate(group, "crc32", "<u4", (rows,))
                if names is not None:
                    ends = np.cumsum([0, *(len(_encoded(name)) for name in names[split])])
                    add(group, "names", np.frombuffer(_encoded("".join(names[split])), np.uint8))
                    add(group, "name_offsets", ends.astype("<i8"))
        self._write(known)

    def finish(
        self,
        crc32: Mapping[str, np.ndarray],
        sums: np.ndarray,
        classes: Sequence[str],
        provenance: Mapping[str, Any],
        fit: str = "",
    ) -> None:
        """Write the checksums and attributes, after all samples.

        crc32: by split, (n,) uint32; sums (2, C): of train's pixels and of their squares.
        """
        self._write((self._crc32[name], crc32[name].astype("<u4")) for name in self._crc32)
        height, width, _ = self._shape
        mean, std = _mean_std(sums, len(self._labels["train"]) * height * width)
        with self._open("r+") as file:
            file.attrs["format"] = np.bytes_(FORMAT)
            file.attrs["version"] = VERSION
            file.attrs["classes"] = _texts(classes)
            file.attrs["image_shape"] = np.array(self._shape, "<i8")
            file.attrs["fit"] = np.array(fit.encode(), "S8")
            file.attrs["mean"], file.attrs["std"] = mean, std
            file.attrs["provenance"] = np.bytes_(json.dumps(provenance))
            uuid = make_uuid(read_facts(file), ((name, crc32[name]) for name in self.images))
            file["identity"] = np.frombuffer(uuid.encode(), np.uint8)

    def _write(self, arrays: Iterable[tuple[int, np.ndarray]]) -> None:
        for offset, values in arrays:
            write_at(self._file.fileno(), values.data.cast("B"), offset)

    def _open(self, mode: str) -> h5py.File:
        return h5py.File(
            self.path,
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
    made = group.create_dataset(name, shape, dtype, dcpl=properties)
    return int(made.id.get_offset())


def _mean_std(sums: np.ndarray, pixels: int) -> tuple[np.ndarray, np.ndarray]:
    """Return mean and population standard deviation in [0, 1], (C,) float64 each.

    `sums` (2, C) are those of each channel's values and of their squares.
    """
    mean, std = [], []
    for value, square in sums.T.tolist():
        mean.append(value / (255 * pixels))
        std.append(math.sqrt(pixels * square - value**2) / (255 * pixels))  # integers: exact
    return np.array(mean), np.array(std)


def _encoded(text: str) -> bytes:
    return text.encode("utf-8", "surrogateescape")


def _texts(names: Sequence[str]) -> np.ndarray:
    encoded = [*map(_encoded, names)]
    return np.array(encoded, h5py.string_dtype("utf-8", max(len(name) for name in encoded)))


@contextmanager
def writing(output: Path) -> Iterator[None]:
    """Raise a system error in the block that writes a pack as a RunError or UsageError."""
    try:
        yield
    except (OSError, RuntimeError) as error:
        # HDF5 reports errno in its text; closing a file raises RuntimeError
        inner = re.search(r"errno = (\d+)", str(error))
        number = int(inner[1]) if inner else getattr(error, "errno", None)
        if number is None:
            raise
        kind = UsageError if number in FORBIDDEN else RunError
        raise kind(f"{output} cannot be written: {os.strerror(number)}; nothing is kept") from None


def channel_sums(pixels: bytes | memoryview, channels: int) -> np.ndarray:
    """Return the exact sums of each channel's values and of their squares, (2, C) uint64."""
    counts: Any
    if mode := {1: "L", 3: "RGB"}.get(channels):  # the fastest
        counts = Image.frombytes(mode, (len(pixels) // channels, 1), pixels).histogram()
    else:
        planes = np.frombuffer(pixels, np.uint8).reshape(-1, channels).T
        counts = [np.bincount(plane, minlength=256) for plane in planes]
    by_channel = np.array(counts, np.uint64).reshape(channels, 256)
    values = np.arange(256, dtype=np.uint64)
    return np.stack([by_channel @ values, by_channel @ values**2])


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
    images: uint8, (N, H, W, C) or (N, H, W), of one shape in all splits: an array or an h5py data
        set, which is read about 8 MiB at a time.
    labels: (N,) integers 0 ... K-1, the indices of `classes`.
    classes: K different names.
    provenance: what the images are, a dictionary that can be written as JSON.

    The pack gets its name when it is complete; with `overwrite`, it replaces an existing file.
    Call this function in one process only. Raises UsageError if the arrays do not fit together or
    the file exists or cannot be written, RunError if the disk is full.
    """
    output, provenance = Path(path), dict(provenance or {})
    if output.exists() and not overwrite:
        raise UsageError(f"{output} exists: give another path, or replace it with overwrite=True")
    if "train" not in splits:
        raise UsageError(f"the splits are {[*splits]}: one must be named train")
    _check_classes(classes)
    labels = {name: _checked_labels(name, *splits[name], len(classes)) for name in splits}
    shapes = {name: (*images.shape[1:], 1)[:3] for name, (images, _) in splits.items()}
    shape = shapes["train"]
    if len(set(shapes.values())) > 1:
        raise UsageError(f"the splits differ in image shape: {shapes}")
    try:
        json.dumps(provenance, allow_nan=False)
    except (TypeError, ValueError) as error:
        raise UsageError(f"the provenance cannot be written as JSON: {error}") from None
    size = math.prod(shape)
    step = max(1, SLAB_BYTES // size)
    sums = np.zeros((2, shape[2]), np.uint64)
    with writing(output), whole_file(output) as file:
        writer = PackWriter(file, labels, shape)
        crc32 = {name: np.zeros(len(values), np.uint32) for name, values in labels.items()}
        for name, values in labels.items():
            for start in range(0, len(values), step):
                part = values[start : start + step]
                slab = np.ascontiguousarray(splits[name][0][start : start + len(part)], np.uint8)
                data = slab.reshape(len(part), *shape).data.cast("B")
                write_at(file.fileno(), data, writer.images[name] + start * size)
                crc32[name][start : start + len(part)] = [
                    checksum(data[row * size : (row + 1) * size], label)
                    for row, label in enumerate(part.tolist())
                ]
                if name == "train":
                    sums += channel_sums(data, shape[2])
        writer.finish(crc32, sums, classes, provenance)


def _check_classes(classes: Sequence[str]) -> None:
    """Raise UsageError unless the names of the classes are different texts."""
    names = list(classes)
    if not names or not all(isinstance(name, str) and name for name in names):
        raise UsageError(f"classes {brief(names)}: give the name of each class")
    if twice := [name for name, count in Counter(names).items() if count > 1]:
        raise UsageError(f"two classes have the name {twice[0]!r}: rename one")


def _checked_labels(split: str, images: Any, labels: Any, classes: int) -> np.ndarray:
    """Return the labels (N,) int32 of a split. Raises UsageError unless they fit to its images."""
    if not split or "/" in split or split in (".", "identity"):
        raise UsageError(f"a split cannot have the name {split!r}")
    kind: Any = getattr(images, "dtype", type(images).__name__)
    shape: tuple[int, ...] = tuple(getattr(images, "shape", ()))
    if kind != np.uint8 or len(shape) not in (3, 4) or 0 in shape:
        raise UsageError(
            f"images of {split} are {kind} of shape {shape}: expected uint8, (N, H, W, C) or"
            " (N, H, W), none of them 0"
        )
    values = np.asarray(labels)
    if values.dtype.kind not in "iu" or values.shape != shape[:1]:
        raise UsageError(
            f"labels of {split} are {values.dtype} of shape {values.shape}: expected {shape[0]:,}"
            " integers, one per image"
        )
    lowest, highest = int(values.min()), int(values.max())
    if lowest < 0 or highest >= classes:
        raise UsageError(
            f"labels of {split} are {lowest} to {highest}, but {classes:,} classes are numbered 0"
            f" to {classes - 1}"
        )
    return values.astype(np.int32)
