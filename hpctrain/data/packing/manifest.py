"""Read a manifest: a table of images and their labels in a CSV file.

Columns, in any order and case: ``path`` (relative to the source, or absolute for files of a
folder), ``label``, and optionally ``split`` (train, val, test, … as for folders) and ``group``
(images of one group, such as one patient, are never divided between splits). Other columns are
ignored. The file has a header and is separated by commas, semicolons or tabs.
"""

from __future__ import annotations

import csv
from array import array
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from hpctrain.data.pack_format import SPLITS
from hpctrain.data.packing.layout import NO_SPLIT, split_number
from hpctrain.errors import UsageError
from hpctrain.text import brief

FIRST_ROW = 2  # below the header
NEEDED, OPTIONAL = ("path", "label"), ("split", "group")
Row = Mapping[str, str]


class Manifest(NamedTuple):
    """The content of a manifest; classes are in numerical order if all labels are whole numbers."""

    file: str
    paths: list[str]
    classes: tuple[str, ...]
    labels: np.ndarray  # (N,) int32
    splits: np.ndarray  # (N,) int8: indices into SPLITS, or NO_SPLIT
    groups: np.ndarray  # (N,) int32; -1 without groups


class DistinctValues:
    """The values of a column of text: each distinct one once, and their numbers (N,)."""

    def __init__(self) -> None:
        self.distinct: dict[str, int] = {}
        self._numbers = array("i")

    def append(self, value: str) -> None:
        """Add the value of the next row."""
        self._numbers.append(self.distinct.setdefault(value, len(self.distinct)))

    def mapped(self, values: Mapping[str, int], dtype: type[np.generic]) -> np.ndarray:
        """Return `values` of each row, (N,) `dtype`."""
        chosen = np.array([values[text] for text in self.distinct], dtype)
        return chosen[np.frombuffer(self._numbers, np.int32)]

    def first(self, value: str) -> int:
        """Return the index of the first row with this value."""
        return self._numbers.index(self.distinct[value])


def read_manifest(path: Path) -> Manifest:
    """Read a table of images. Raises UsageError with the row in its message."""
    rows: dict[str, int] = {}  # of each path
    columns = {name: DistinctValues() for name in ("label", *OPTIONAL)}
    for number, row in enumerate(_csv_rows(path), FIRST_ROW):
        cells = {name: (row.get(name) or "").strip() for name in (*NEEDED, *OPTIONAL)}
        for name in NEEDED:
            if not cells[name]:
                raise UsageError(f"{path}: row {number} has no {name}")
        name = shortest(cells["path"])
        if (first := rows.setdefault(name, number)) != number:
            raise UsageError(f"{path}: rows {first} and {number} both name {name}")
        for name, column in columns.items():
            column.append(cells[name])
    if not rows:
        raise UsageError(f"{path} names no images")
    for name in OPTIONAL:
        if "" in columns[name].distinct and len(columns[name].distinct) > 1:
            number = FIRST_ROW + columns[name].first("")
            raise UsageError(f"{path}: row {number} has no {name}, other rows have one")
    classes, labels = _numbered(columns["label"])
    names, groups = _numbered(columns["group"])
    groups = groups if names[0] else np.full(len(rows), -1, np.int32)
    splits = _splits(path, columns["split"])
    _check_groups(path, names, groups, splits)
    return Manifest(str(path), list(rows), classes, labels, splits, groups)


def shortest(path: str) -> str:
    """Return a path without "." and empty parts, as members of archives are listed."""
    parts = (part for part in path.split("/") if part not in ("", "."))
    return "/" * path.startswith("/") + "/".join(parts)


def find_images(manifest: Manifest, names: Sequence[str], is_folder: np.ndarray) -> np.ndarray:
    """Return the indices (N,) of the manifest's images in `names`, members of an archive.

    is_folder (n,) bool: the other names are files; of equal names the last one counts. Raises
    UsageError if an image is missing.
    """
    members = {name: row for row, name in enumerate(names)}
    found = [members.get(path, -1) for path in manifest.paths]
    missing = [
        path for path, row in zip(manifest.paths, found, strict=True) if row < 0 or is_folder[row]
    ]
    if missing:
        raise UsageError(
            f"{manifest.file} names {len(missing):,} images that the archive does not hold, such"
            f" as {missing[0]}"
        )
    return np.array(found)


def _numbered(column: DistinctValues) -> tuple[tuple[str, ...], np.ndarray]:
    """Return the distinct values in order, and the index (N,) int32 of each value among them."""
    distinct = sorted(column.distinct)
    if all(value.isdecimal() for value in distinct):
        distinct.sort(key=lambda value: (int(value), value))
    numbers = {value: number for number, value in enumerate(distinct)}
    return tuple(distinct), column.mapped(numbers, np.int32)


def _splits(path: Path, column: DistinctValues) -> np.ndarray:
    """Return the given splits (N,) int8. Raises UsageError if one is unknown."""
    known: dict[str, int] = {}
    for name in column.distinct:
        split = split_number(name) if name else NO_SPLIT
        if split is None:
            number = FIRST_ROW + column.first(name)
            raise UsageError(
                f"{path}: row {number} has the split {name!r}: give {', '.join(SPLITS)}"
            )
        known[name] = split
    return column.mapped(known, np.int8)


def _check_groups(path: Path, names: Sequence[str], groups: np.ndarray, splits: np.ndarray) -> None:
    """Raise UsageError if a group, an index into `names`, is divided between splits."""
    if groups[0] < 0:
        return
    _, first = np.unique(groups, return_index=True)
    if len(divided := np.flatnonzero(splits != splits[first[groups]])):
        row = int(divided[0])
        group = groups[row]
        both = f"{SPLITS[splits[first[group]]]} and {SPLITS[splits[row]]}"
        raise UsageError(f"{path}: row {FIRST_ROW + row}: group {names[group]!r} is in both {both}")


def _check_columns(path: Path, names: Sequence[str]) -> None:
    if missing := [name for name in NEEDED if name not in names]:
        raise UsageError(
            f"{path} has no column {' and no column '.join(missing)}, only"
            f" {', '.join(names) or 'none'}: name its columns path, label, split, group"
        )
    if twice := [name for name in (*NEEDED, *OPTIONAL) if names.count(name) > 1]:
        raise UsageError(f"{path} has {names.count(twice[0])} columns {twice[0]}: leave one")


def _csv_rows(path: Path) -> Iterator[Row]:
    try:
        with open(path, newline="", encoding="utf-8-sig", errors="surrogateescape") as file:
            header = file.readline()
            separator = max(",;\t", key=header.count)
            names = [
                name.strip().lower() for name in next(csv.reader([header], delimiter=separator), [])
            ]
            _check_columns(path, names)
            rows = filter(None, csv.reader(file, delimiter=separator))
            for number, cells in enumerate(rows, FIRST_ROW):
                if any(cells[len(names) :]):
                    raise UsageError(
                        f"{path}: row {number} has {len(cells)} cells, the header {len(names)}"
                    )
                yield dict(zip(names, cells, strict=False))
    except OSError as error:
        raise UsageError(f"manifest {path} cannot be read: {error.strerror}") from None
    except csv.Error as error:
        raise UsageError(f"manifest {path} is no CSV file: {brief(error)}") from None
