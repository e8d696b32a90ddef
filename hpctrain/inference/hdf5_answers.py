"""Answers of ``predict`` as an HDF5 file, with a row for each image, in their order.

dataset             shape       type
probabilities       (N, K)      float32; of classes
values              (N, T)      float32; of a network that measures images
prediction          (N,)        int32, number of the most probable class
                    (N, K)      uint8, 1 = present; of a network that finds several classes
targets             as stored in a pack, if they are known
file, split, ...    (N,)        string, and row int64: the columns of a CSV that name an image
names               (K,), (T,)  string, of the classes or columns

A row without an answer, as of an unusable image, has NaN, -1 as class, and 255 as one of several.
Other tasks have the datasets of `Task.arrays`. Bytes of answers are written at their offsets.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

import h5py
import numpy as np

from hpctrain.data.stored import as_bytes
from hpctrain.data.targets import UNKNOWN
from hpctrain.files import check_room, remove_left_behind, whole_file, write_at
from hpctrain.packing.write import LIBRARY, allocate, encoded, writing_file
from hpctrain.tasks.tally import Block
from hpctrain.tasks.task import Task

NO_ANSWER = {"f": math.nan, "i": -1, "u": UNKNOWN}  # by kind of type
MOST_AT_A_TIME = 1 << 16  # rows of names that are written at a time


class AnswerRows:
    """Writes the answers to N images into a new HDF5 file, by blocks of consecutive rows."""

    def __init__(
        self,
        file: BinaryIO,
        task: Task,
        total: int,
        arrays: Mapping[str, np.ndarray],
        columns: Mapping[str, Callable[[int], str]],
        names: Sequence[str],
    ) -> None:
        """Create the file, and write all but answers and targets.

        total: N; arrays: these without a row, (0, ...); columns: what tells of a row; names: of
        classes or columns of values. Raises OSError and RunError.
        """
        self._descriptor = file.fileno()
        self._task = task
        self._total = total
        self._arrays = dict(arrays)
        self._offsets: dict[str, int] = {}
        texts = {name: text for name, text in columns.items() if name != "row"}
        widths = {
            name: max((len(encoded(text(row))) for row in range(total)), default=1) or 1
            for name, text in texts.items()
        }
        row_bytes = np.dtype(np.int64).itemsize + sum(widths.values())
        row_bytes += sum(a.itemsize * math.prod(a.shape[1:]) for a in arrays.values())
        check_room(Path(file.name).parent, total * row_bytes, "the answers")
        with h5py.File(file.name, "w", libver=LIBRARY, locking=False) as root:
            for name, array in arrays.items():
                shape = (total, *array.shape[1:])
                little = array.dtype.newbyteorder("<").str
                self._offsets[name] = allocate(root, name, little, shape)
            for name, width in widths.items():
                kind = h5py.string_dtype("utf-8", width)
                self._offsets[name] = allocate(root, name, kind, (total,))
            if "row" in columns:
                self._offsets["row"] = allocate(root, "row", "<i8", (total,))
            root["names"] = np.array([*map(encoded, names)], h5py.string_dtype("utf-8"))
        for name, text in columns.items():
            kind = "<i8" if name == "row" else f"S{widths[name]}"
            for first in range(0, total, MOST_AT_A_TIME):
                rows = range(first, min(total, first + MOST_AT_A_TIME))
                cells = [text(row) for row in rows]
                values = [*map(int, cells)] if name == "row" else [*map(encoded, cells)]
                self._write(name, first, np.array(values, kind))

    def write(self, block: Block, answers: np.ndarray) -> None:
        """Write the answers (n, ...) to the usable rows of a block; others have none."""
        rows = np.sort(np.concatenate([block.rows, [*block.bad]]).astype(np.int64))
        arrays = self._task.arrays(answers)
        if block.targets is not None and "targets" in self._arrays:
            arrays["targets"] = block.targets
        for name, values in arrays.items():
            array = self._arrays[name]
            fill = NO_ANSWER[array.dtype.kind]
            whole = np.full((len(rows), *array.shape[1:]), fill, array.dtype.newbyteorder("<"))
            whole[np.searchsorted(rows, block.rows)] = values
            self._write(name, int(rows[0]), whole)

    def _write(self, name: str, first: int, values: np.ndarray) -> None:
        """Write consecutive rows (n, ...) of a dataset, from row `first` on. Raises OSError."""
        if not values.size:
            return
        row_bytes = values.nbytes // len(values)
        write_at(self._descriptor, as_bytes(values), self._offsets[name] + first * row_bytes)


@contextmanager
def open_hdf5(
    output: str,
    task: Task,
    total: int,
    arrays: Mapping[str, np.ndarray],
    columns: Mapping[str, Callable[[int], str]],
    names: Sequence[str],
) -> Iterator[Callable[[Block, np.ndarray], None]]:
    """Yield a function that writes the answers to a block; see `AnswerRows`.

    The file is renamed into place when the block ends without an error. Raises RunError or
    UsageError if it cannot be written.
    """
    path = Path(output)
    with writing_file(path):
        remove_left_behind(path)
        with whole_file(path) as file:
            yield AnswerRows(file, task, total, arrays, columns, names).write
