"""The rows of an HDF5 file of somebody else, used where it lies.

Such a file has one set of rows and no splits: ``foreign_split.py`` deals them from a seed, and a
split is a list of row numbers, nothing is copied.

Data sets of one piece are read by byte offset as in ``packed.py``, chunks in ``foreign_chunks.py``.
"""

from __future__ import annotations

import dataclasses
import json
import os
import uuid
import zlib
from functools import lru_cache
from typing import Any, Protocol

import numpy as np

from hpctrain.data.bad_rows import BadRows
from hpctrain.data.finite import NOT_FINITE
from hpctrain.data.foreign_split import deal, run_rows_of
from hpctrain.data.pack_file import check_out, check_rows
from hpctrain.data.pack_format import Foreign, Pack, Split
from hpctrain.data.packed import gather_rows
from hpctrain.data.packing.split import parse_split
from hpctrain.data.partition import RUN_BYTES
from hpctrain.errors import RunError, UsageError

FEW_RUNS = 32  # in a window: too few to mix the classes of an ordered file
DEFAULT_SPLIT = "0.9,0.1"
SAMPLE = 64  # images that tell one file from another


def read_foreign(
    path: str | os.PathLike[str],
    images: str,
    labels: str,
    layout: str | None = None,
    split: str | None = None,
    seed: int = 0,
    run_rows: int | None = None,
) -> Pack:
    """The file as a pack: checked, identified and dealt to splits.

    `images` and `labels` are paths of data sets within the file, `split` the shares as for the
    packer. Rows are dealt in runs of `run_rows`: 0 = one by one, class by class; None = in runs
    that suit the file. Where it has chunks these are whole ones in any case. Raises UsageError.
    """
    from hpctrain.data import foreign_check  # brings h5py

    parse_split(split or DEFAULT_SPLIT)  # before anything is opened
    found, shape, values = foreign_check.inspect(os.path.abspath(path), images, labels, layout)
    foreign = dataclasses.replace(
        found,
        run_rows=run_rows_of(found, int(values.max()) + 1, run_rows),
        split=split or DEFAULT_SPLIT,
        seed=seed,
    )
    rows = deal(foreign, values)
    return Pack(
        foreign.path,
        _identity(foreign, shape),
        foreign.file_size,
        foreign.image_shape,
        tuple(str(k) for k in range(int(values.max()) + 1)),
        {name: Split(name, len(of), -1, -1) for name, of in rows.items()},
        mean=(0.0,) * foreign.image_shape[2],
        std=(0.0,) * foreign.image_shape[2],
        provenance={"source": os.path.basename(foreign.path), "images": foreign.images},
        foreign=foreign,
    )


class Store(Protocol):
    """Reads rows of the file, wherever they lie."""

    def read(self, rows: np.ndarray, out: np.ndarray) -> None:
        """The rows (n,), in that order, into `out` (n, H, W, C). Thread-safe. RunError."""

    def close(self) -> None:
        """Close the file."""


class OnePiece:
    """Rows that lie one after the other in the file, read by byte offset."""

    def __init__(self, foreign: Foreign) -> None:
        self.foreign = foreign
        try:
            self._descriptor = os.open(foreign.path, os.O_RDONLY | os.O_CLOEXEC)
        except OSError as error:
            raise UsageError(f"{foreign.path} cannot be opened: {error.strerror}") from None
        if os.fstat(self._descriptor).st_size != foreign.file_size:
            self.close()
            raise UsageError(f"{foreign.path} was replaced while it was opened")

    def read(self, rows: np.ndarray, out: np.ndarray) -> None:
        """The rows (n,), in that order, into `out` (n, H, W, C). Raises RunError."""
        if self.foreign.layout != "NCHW":
            self._read(rows, out)
            return
        height, width, channels = self.foreign.image_shape
        step = max(1, RUN_BYTES // self.foreign.row_bytes)
        for first in range(0, len(rows), step):
            part = rows[first : first + step]
            images = np.empty((len(part), channels, height, width), out.dtype)
            self._read(part, images)
            out[first : first + step] = images.transpose(0, 2, 3, 1)

    def _read(self, rows: np.ndarray, out: np.ndarray) -> None:
        found = self.foreign
        buffer = out.reshape(-1).view(np.uint8).data
        gather_rows(found.path, self._descriptor, found.offset, rows, buffer)

    def close(self) -> None:
        """Close the file."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1


class ForeignRows:
    """The rows of one split of such a file. Reading is thread-safe.

    ``labels`` is an (N,) int64 array; images are of the file's ``dtype``, (H, W, C). Opening raises
    UsageError where the file is missing or is not the one that was checked.
    """

    def __init__(self, pack: Pack, split_name: str) -> None:
        foreign = pack.foreign
        if foreign is None or split_name not in pack.splits:
            there = ", ".join(pack.splits)
            raise UsageError(f"{pack.path} has no split {split_name!r}; it has {there}")
        self.bad, self._foreign, self._split = BadRows(), foreign, split_name
        self._store = _open(foreign)  # first: that the file is still the one is found out here
        labels, rows = _dealt(foreign)
        self._rows = rows[split_name]
        self.labels = labels[self._rows]  # (N,)
        self.dtype, self.image_shape = np.dtype(foreign.dtype), foreign.image_shape

    def gather(self, indices: np.ndarray, out: np.ndarray) -> np.ndarray:
        """Read the rows `indices` (n,) of the split, in that order, into `out` (n, H, W, C) of
        `dtype`; returns it. Raises RunError where they cannot be read.
        """
        check_out(out, (len(indices), *self.image_shape), self.dtype)
        check_rows(indices, len(self))
        self._store.read(self._rows[indices], out)
        return out

    def place(self, row: int) -> str:
        """Where a row of the split is in the file, for a reader."""
        found = self._foreign
        return f"{found.path}: row {self._rows[row]} of {found.images} (row {row} of {self._split})"

    def extent(self, rows: range) -> tuple[int, int]:
        """Rows of such a file may lie anywhere in it."""
        return 0, self._foreign.file_size

    def close(self) -> None:
        """Close the file; rows can no longer be read, labels stay."""
        self._store.close()

    def __len__(self) -> int:
        return len(self.labels)

    def __enter__(self) -> ForeignRows:
        return self

    def __exit__(self, *error: Any) -> None:
        self.close()


def _open(foreign: Foreign) -> Store:
    from hpctrain.data import foreign_check, foreign_chunks

    if foreign.chunk_rows:
        return foreign_chunks.Chunks(foreign)
    with foreign_check.told(foreign.path), foreign_check.open_file(foreign.path) as file:
        foreign_check.check_same(file, foreign)
    return OnePiece(foreign)


@lru_cache(maxsize=1)
def _dealt(foreign: Foreign) -> tuple[np.ndarray, dict[str, np.ndarray]]:
    """All labels (N,) and the rows of every split, kept for the next split that is opened."""
    from hpctrain.data import foreign_check

    labels = foreign_check.read_labels(foreign)
    return labels, deal(foreign, labels)


def _identity(foreign: Foreign, shape: tuple[int, ...]) -> str:
    """The uuid of what the file holds: the same wherever it lies. Raises UsageError."""
    count = min(SAMPLE, foreign.rows)
    rows = np.unique(np.arange(count) * (foreign.rows - 1) // max(1, count - 1))
    images = np.empty((len(rows), *foreign.image_shape), foreign.dtype)
    try:
        store = _open(foreign)
        try:
            store.read(rows, images)
        finally:
            store.close()
    except RunError as error:
        raise UsageError(str(error)) from None
    finite = np.isfinite(images).reshape(len(rows), -1).all(axis=1)
    if not finite.all():
        row = rows[~finite][0]
        raise UsageError(f"{foreign.path}: row {row} of {foreign.images} {NOT_FINITE}")
    sample = zlib.crc32(images.reshape(-1).view(np.uint8).data)
    known: list[Any] = [foreign.dtype, list(shape), foreign.layout, foreign.images, foreign.labels]
    text = json.dumps([*known, foreign.labels_crc32, sample])
    return str(uuid.uuid5(uuid.NAMESPACE_OID, text))


def reading_note(pack: Pack, shuffle: str, window_runs: int) -> str | None:
    """What is worth a note in the record where such a file is read in an order that does not suit
    it: chunks row by row, or windows of few runs.
    """
    foreign = pack.foreign
    if foreign is None:
        return None
    if shuffle == "blocks":
        if window_runs >= FEW_RUNS:
            return None
        return (
            f"a window of --shuffle blocks holds {window_runs} runs of {foreign.run_rows:,} images:"
            f" if {foreign.images} is ordered by class, batches are too; a larger --read-buffer"
            " helps"
        )
    if not foreign.chunk_rows:
        return None
    size = foreign.chunk_rows * foreign.row_bytes
    return (
        f"{foreign.images} is stored in chunks of {foreign.chunk_rows:,} images ({size:,} bytes):"
        f" --shuffle {shuffle} reads a whole chunk for nearly every image that is not kept in"
        " --read-buffer; --shuffle blocks reads each once an epoch"
    )
