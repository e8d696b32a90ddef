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

from hpctrain.data.pack import (
    FORMAT,
    VERSION,
    make_uuid,
    read_facts,
)
from hpctrain.data.scale import FULL
from hpctrain.data.statistics import ChannelStatistics
from hpctrain.data.targets import Targets
from hpctrain.errors import RunError, UsageError
from hpctrain.files import check_room, write_at

PAGE = 4096  # bytes
LIBRARY = ("v110", "v110")  # metadata checksums, a mark while being written, long attributes
FORBIDDEN = (errno.EACCES, errno.EPERM, errno.EROFS)
RESERVED = 1 << 20  # bytes for what HDF5 adds at the end: on a full disk it may crash


class PackWriter:
    """Writes a pack into a new file, with room for all N samples, one split after the other.

    Write every sample at its offset in `places` (N,), then call `finish`. Raises RunError.
    """

    def __init__(
        self,
        file: BinaryIO,
        counts: Mapping[str, int],
        targets: np.ndarray,
        image_shape: tuple[int, int, int],
        dtype: np.dtype | str = "uint8",
        sizes: np.ndarray | None = None,
        names: Sequence[str] | None = None,
    ) -> None:
        """Create the file, and write what is known about the samples.

        counts: number of samples by split, as `ordered`; targets: (N, ...), of the type in which
        they are stored; image_shape: (H, W, C); dtype: one of `TYPES` of ``data/pack.py``; sizes:
        of JPEG files in bytes, (N,); names: where the samples come from, N of them.
        """
        self._file = file
        self._shape = image_shape
        self._dtype = np.dtype(dtype)
        image_bytes = math.prod(image_shape) * self._dtype.itemsize
        stops = dict(zip(counts, accumulate(counts.values()), strict=True))
        self._rows = {split: slice(stop - counts[split], stop) for split, stop in stops.items()}
        self.places = np.zeros(len(targets), np.int64)
        needed = len(targets) * image_bytes
        if sizes is not None:
            needed = int(sizes.sum())
        needed += targets.nbytes
        check_room(Path(file.name).parent, needed, "packing")

        def add(group: h5py.Group, name: str, values: np.ndarray) -> None:
            offset = allocate(group, name, values.dtype.str, values.shape)
            write_at(file.fileno(), values.data.cast("B"), offset)

        with self._open("w") as pack:
            for split, rows in self._rows.items():
                group = pack.create_group(split)
                count = counts[split]
                if sizes is None:
                    ends = np.arange(count + 1) * image_bytes
                    little = self._dtype.newbyteorder("<").str
                    first = allocate(group, "images", little, (count, *image_shape))
                else:
                    ends = _ends(sizes[rows])
                    first = allocate(group, "bytes", "u1", (ends[-1],))
                    add(group, "offsets", ends)
                self.places[rows] = first + ends[:-1]
                add(group, "targets", targets[rows].astype(targets.dtype.newbyteorder("<")))
                allocate(group, "crc32", "<u4", (count,))
                if names is not None:
                    lengths = np.fromiter((len(encoded(name)) for name in names[rows]), np.int64)
                    add(group, "names", np.frombuffer(encoded("".join(names[rows])), np.uint8))
                    add(group, "name_offsets", _ends(lengths))

    def finish(
        self,
        crc32: np.ndarray,
        statistics: ChannelStatistics,
        targets: Targets,
        provenance: Mapping[str, Any],
        fit: str = "",
        max_value: float | None = None,
    ) -> None:
        """Write the checksums and attributes, after all samples.

        crc32: (N,) uint32; targets: their kind and names; statistics: of train, with the value
        that marks missing data; max_value: what becomes 1.0; None = the largest value of uint8 and
        uint16, and 1 for others.
        """
        mean, std = statistics.mean_and_std(max_value or FULL.get(self._dtype.name, 1.0))
        scale = {
            "dtype": self._dtype.name,
            "max_value": max_value,
            "nodata": statistics.nodata,
            **statistics.as_json(),
        }
        if statistics.nodata is not None and math.isnan(statistics.nodata):
            scale["nodata"] = "nan"  # JSON has no NaN
        number = self._file.fileno()
        os.posix_fallocate(number, os.fstat(number).st_size, RESERVED)  # HDF5 cuts off the rest
        with self._open("r+") as file:
            names = [encoded(name) for name in targets.classes]
            text = h5py.string_dtype("utf-8", max(map(len, names), default=1))
            attributes = {
                "format": np.bytes_(FORMAT),
                "version": VERSION,
                "classes": np.array(names, text),
                "image_shape": np.array(self._shape, "<i8"),
                "fit": np.array(fit.encode(), "S8"),
                "mean": np.array(mean),
                "std": np.array(std),
                "provenance": np.bytes_(json.dumps(provenance)),
                "targets": np.bytes_(json.dumps(targets.as_json())),
                "scale": np.bytes_(json.dumps(scale)),
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


def allocate(group: h5py.Group, name: str, dtype: str | np.dtype, shape: tuple[int, ...]) -> int:
    """Create a contiguous dataset, allocated but not written; return its offset in the file."""
    properties = h5py.h5p.create(h5py.h5p.DATASET_CREATE)
    properties.set_alloc_time(h5py.h5d.ALLOC_TIME_EARLY)
    properties.set_fill_time(h5py.h5d.FILL_TIME_NEVER)
    dataset = group.create_dataset(name, shape, dtype, dcpl=properties)
    return int(dataset.id.get_offset())


def _ends(sizes: np.ndarray) -> np.ndarray:
    """Return where items of these sizes (n,) begin and end, one after the other: (n + 1,) int64."""
    return np.concatenate([[0], np.cumsum(sizes)]).astype("<i8")


def encoded(text: str) -> bytes:
    """Return the bytes of a text, also of a file's name that is not UTF-8."""
    return text.encode("utf-8", "surrogateescape")


@contextmanager
def writing_file(output: Path) -> Iterator[None]:
    """Raise a system error in the block that writes an HDF5 file as a RunError or UsageError."""
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
