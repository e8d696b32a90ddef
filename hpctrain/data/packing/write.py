"""Write a pack (``pack_format.py``): allocate the file, fill it, finish it.

HDF5 creates the file with room for all rows and closes it. Then bytes are written at their offsets,
by many processes (``decode.py``), and HDF5 adds checksums and attributes. The datasets are
contiguous, allocated early and aligned to 4,096 bytes. Nothing in the file depends on time, path or
the number of processes, so equal rows give equal bytes. Mean and standard deviation are computed
from exact integer sums.
"""

from __future__ import annotations

import errno
import json
import math
import os
import re
import shutil
import zlib
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import h5py
import numpy as np

from hpctrain.data.pack_format import (
    ENCODED_VERSION,
    FORMAT,
    JPEG,
    VERSION,
    content_uuid,
    facts_sha256,
    ordered,
    rows_per_block,
)
from hpctrain.data.packing.decode import Span, Written
from hpctrain.errors import RunError, UsageError
from hpctrain.files import write_at

PAGE = 4096  # bytes
LIBRARY = ("v110", "v110")  # metadata checksums, a mark while being written, long attributes
NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
KINDS = {"u1": h5py.h5t.STD_U8LE, "<i8": h5py.h5t.STD_I64LE}


class PackFacts(NamedTuple):
    """The attributes of a pack; `fit` is set for JPEG files only."""

    image_shape: tuple[int, int, int]
    classes: tuple[str, ...]
    provenance: dict[str, Any]
    fit: str = ""


class DatasetLayout(NamedTuple):
    """A dataset to write: `dtype` is a key of KINDS, `offset` its first byte in the file."""

    split: str
    name: str
    dtype: str
    shape: tuple[int, ...]
    offset: int = -1

    @property
    def row_bytes(self) -> int:
        """Number of bytes of one row."""
        return math.prod(self.shape[1:]) * np.dtype(self.dtype).itemsize

    @property
    def block_rows(self) -> int:
        """Number of rows that share a checksum."""
        return rows_per_block(self.row_bytes)


class PackWriter:
    """Writes a pack into a new `file`, with room for all datasets.

    Write the datasets of images span by span and `add` the results, then call `finish`.
    """

    def __init__(self, file: BinaryIO, datasets: Iterable[DatasetLayout]) -> None:
        self._file, self.path = file, os.path.abspath(file.name)
        with self._open("w") as pack:
            self.datasets = [
                d._replace(offset=_allocate(pack.require_group(d.split), d)) for d in datasets
            ]
        self._checksums = {
            (d.split, d.name): np.zeros(-(-d.shape[0] // d.block_rows), "<u4")
            for d in self.datasets
        }
        self._sums: Any = np.uint64(0)  # (2, C), of train's pixels and of their squares

    def images(self) -> list[DatasetLayout]:
        """Return the datasets of pixels, or of the bytes of JPEG files."""
        return [dataset for dataset in self.datasets if dataset.dtype == "u1"]

    def write_numbers(self, split: str, name: str, values: np.ndarray) -> None:
        """Write a whole dataset of numbers."""
        dataset = next(d for d in self.datasets if (d.split, d.name) == (split, name))
        data = np.ascontiguousarray(values, dataset.dtype).data.cast("B")
        write_at(self._file.fileno(), data, dataset.offset)
        step = dataset.block_rows * dataset.row_bytes
        found = [zlib.crc32(data[at : at + step]) for at in range(0, len(data), step)]
        self._checksums[split, name][:] = found

    def spans(self, blocks: int) -> Iterator[Span]:
        """Yield the datasets of images in parts of `blocks` blocks."""
        for data in self.images():
            step, channels = blocks * data.block_rows, (*data.shape, 0, 0, 0)[3]
            for start in range(0, data.shape[0], step):
                where = data.offset + start * data.row_bytes, data.block_rows * data.row_bytes
                stop = min(data.shape[0], start + step)
                yield Span(self.path, data.split, start, stop, *where, channels)

    def add(self, part: Written) -> None:
        """Keep the checksums and sums of a span."""
        span = part.span
        data = next(d for d in self.images() if d.split == span.split)
        first = span.start // data.block_rows
        self._checksums[data.split, data.name][first : first + len(part.checksums)] = part.checksums
        if span.split == "train":
            self._sums = self._sums + part.sums

    def finish(
        self,
        facts: PackFacts,
        labels: Mapping[str, np.ndarray],
        sums: np.ndarray | None = None,
    ) -> None:
        """Write the labels, checksums and attributes, after all spans.

        `sums` (2, C) are those of train's pixels and of their squares; None = of the spans.
        """
        image_shape, classes, provenance, fit = facts
        for split, values in labels.items():
            self.write_numbers(split, "labels", values)
        sums = self._sums if sums is None else sums
        by_split: dict[str, tuple[int, list[np.ndarray]]] = {}
        with self._open("r+") as file:
            for dataset in self.datasets:
                own = self._checksums[dataset.split, dataset.name]
                stored = file[dataset.split].create_dataset(f"{dataset.name}_crc32", data=own)
                stored.attrs["rows_per_block"] = dataset.block_rows
                by_split.setdefault(dataset.split, (len(labels[dataset.split]), []))[1].append(own)
            mean, std = _mean_std(sums, len(labels["train"]) * image_shape[0] * image_shape[1])
            file.attrs["mean"], file.attrs["std"] = mean, std
            file.attrs["format"] = np.bytes_(FORMAT)
            file.attrs["version"] = ENCODED_VERSION if fit else VERSION
            uuid = content_uuid(image_shape, classes, by_split, fit)
            file.attrs["uuid"] = np.bytes_(uuid)
            file.attrs["classes"] = _texts(classes)
            text = json.dumps(provenance)
            file.attrs["provenance"] = np.bytes_(text)
            sha256 = facts_sha256(uuid, mean.tolist(), std.tolist(), json.loads(text))
            file.attrs["sha256"] = np.bytes_(sha256)
            if fit:
                file.attrs["encoding"] = np.bytes_(JPEG)
                file.attrs["image_shape"] = np.array(image_shape, "<i8")
                file.attrs["fit"] = np.bytes_(fit)

    def _open(self, mode: str) -> h5py.File:
        return h5py.File(
            self.path,
            mode,
            libver=LIBRARY,
            locking=False,
            alignment_threshold=PAGE,
            alignment_interval=PAGE,
        )


def lay_out(
    rows: Mapping[str, int], shape: tuple[int, ...], file_bytes: Mapping[str, int] | None = None
) -> list[DatasetLayout]:
    """Return the datasets of a pack of images of `shape` (H, W, C), given `rows` by split.

    With `file_bytes`, the total size by split, the pack holds JPEG files.
    """
    datasets: list[DatasetLayout] = []
    for split in ordered(rows):
        if file_bytes is None:
            datasets.append(DatasetLayout(split, "images", "u1", (rows[split], *shape)))
        else:
            datasets.append(DatasetLayout(split, "bytes", "u1", (file_bytes[split],)))
            datasets.append(DatasetLayout(split, "offsets", "<i8", (rows[split] + 1,)))
        datasets.append(DatasetLayout(split, "labels", "<i8", (rows[split],)))
    return datasets


def _allocate(group: h5py.Group, dataset: DatasetLayout) -> int:
    """Create a contiguous dataset, allocated but not written; return its offset in the file."""
    properties = h5py.h5p.create(h5py.h5p.DATASET_CREATE)
    properties.set_layout(h5py.h5d.CONTIGUOUS)
    properties.set_alloc_time(h5py.h5d.ALLOC_TIME_EARLY)
    properties.set_fill_time(h5py.h5d.FILL_TIME_NEVER)
    properties.set_obj_track_times(False)
    space = h5py.h5s.create_simple(dataset.shape)
    name, kind = dataset.name.encode(), KINDS[dataset.dtype]
    return h5py.h5d.create(group.id, name, kind, space, properties).get_offset()


def _mean_std(sums: np.ndarray, pixels: int) -> tuple[np.ndarray, np.ndarray]:
    """Return mean and population standard deviation in [0, 1], (C,) float64 each.

    `sums` (2, C) are those of each channel's values and of their squares.
    """
    mean, std = [], []
    for value, square in sums.T.tolist():
        mean.append(value / (255 * pixels))
        std.append(math.sqrt(pixels * square - value**2) / (255 * pixels))  # integers: exact
    return np.array(mean), np.array(std)


def _texts(names: tuple[str, ...]) -> np.ndarray:
    encoded = [name.encode("utf-8", "surrogateescape") for name in names]
    return np.array(encoded, h5py.string_dtype("utf-8", max(len(name) for name in encoded)))


def check_room(output: Path, needed: int) -> None:
    """Raise RunError if fewer than `needed` bytes are free on the disk of the pack."""
    free = shutil.disk_usage(output.parent).free
    if needed > free:
        raise RunError(
            f"{output.parent} has {free / 2**20:,.0f} MiB free, packing needs"
            f" {needed / 2**20:,.0f} MiB there"
        )


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
        if number in NO_ROOM:
            raise RunError(
                f"no room left in {output.parent} for {output.name}: nothing kept"
            ) from None
        if number in (errno.EACCES, errno.EPERM, errno.EROFS):
            raise UsageError(f"{output} cannot be written: {os.strerror(number)}") from None
        raise RunError(f"writing {output} failed: {os.strerror(number)}") from None
