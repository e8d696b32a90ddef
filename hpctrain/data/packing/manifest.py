"""Read a manifest: a table of images and their labels in a CSV or Parquet file.

Columns, in any order and case: ``path`` (relative to the source, or absolute for files of a
folder), ``label``, and optionally ``split`` (train, val, test, … as for folders) and ``group``
(images of one group, such as one patient, are never divided between splits). Other columns are
ignored. A CSV file has a header and is separated by commas, semicolons or tabs. Parquet requires
pyarrow.
"""

from __future__ import annotations

import csv
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from hpctrain.data.pack_format import SPLITS
from hpctrain.data.packing.layout import NO_SPLIT, split_number
from hpctrain.data.packing.scratch import check_count
from hpctrain.errors import UsageError
from hpctrain.text import brief

NEEDED, OPTIONAL = ("path", "label"), ("split", "group")
Row = Mapping[str, str]


class Manifest(NamedTuple):
    """The content of a manifest; classes are in numerical order if all labels are whole numbers."""

    file: str
    paths: list[str]
    classes: tuple[str, ...]
    labels: np.ndarray  # (N,) int64
    splits: np.ndarray  # (N,) int64: indices into SPLITS, or NO_SPLIT
    groups: np.ndarray  # (N,) int64; -1 without groups


def read_manifest(path: Path) -> Manifest:
    """Read a CSV or Parquet table of images. Raises UsageError with the row in its message."""
    is_parquet = path.suffix == ".parquet"
    rows = _parquet_rows(path) if is_parquet else _csv_rows(path)
    paths: dict[str, int] = {}
    values: dict[str, list[str]] = {name: [] for name in ("label", *OPTIONAL)}
    for number, row in enumerate(rows, 1 if is_parquet else 2):
        cells = {name: (row.get(name) or "").strip() for name in (*NEEDED, *OPTIONAL)}
        for name in NEEDED:
            if not cells[name]:
                raise UsageError(f"{path}: row {number} has no {name}")
        if paths.setdefault(cells["path"], number) != number:
            raise UsageError(
                f"{path}: rows {paths[cells['path']]} and {number} both name {cells['path']}"
            )
        for name, column in values.items():
            column.append(cells[name])
        check_count(f"manifest {path}", len(paths))
    if not paths:
        raise UsageError(f"{path} names no images")
    for name in OPTIONAL:
        if not all(values[name]) and any(values[name]):
            number = list(paths.values())[values[name].index("")]
            raise UsageError(f"{path}: row {number} has no {name}, other rows have one")
    classes, labels = _numbered(values["label"])
    groups = _numbered(values["group"])[1] if values["group"][0] else np.full(len(labels), -1)
    return Manifest(str(path), list(paths), classes, labels, _splits(path, values, paths), groups)


def find_images(manifest: Manifest, files: Sequence[str]) -> np.ndarray:
    """Return the indices (N,) of the manifest's images in `files` of an archive.

    Raises UsageError if one is missing.
    """
    rows = {name: row for row, name in enumerate(files)}
    if missing := [path for path in manifest.paths if path not in rows]:
        raise UsageError(
            f"{manifest.file} names {len(missing):,} images that the archive does not hold, such"
            f" as {missing[0]}"
        )
    return np.array([rows[path] for path in manifest.paths], np.int64)


def _numbered(values: list[str]) -> tuple[tuple[str, ...], np.ndarray]:
    """Return the distinct values in order, and the index (N,) of each value among them."""
    distinct = sorted(set(values))
    if all(value.isdecimal() for value in distinct):
        distinct.sort(key=lambda value: (int(value), value))
    numbers = {value: number for number, value in enumerate(distinct)}
    return tuple(distinct), np.array([numbers[value] for value in values], np.int64)


def _splits(path: Path, values: Mapping[str, list[str]], rows: Mapping[str, int]) -> np.ndarray:
    """Return the given splits (N,). Raises UsageError if one is unknown or a group is divided."""
    known = {name: split_number(name) for name in {*values["split"], ""}}
    splits = [NO_SPLIT if not name else known[name] for name in values["split"]]
    of_group: dict[str, int] = {}
    for number, name, split, group in zip(
        rows.values(), values["split"], splits, values["group"], strict=True
    ):
        if split is None:
            raise UsageError(
                f"{path}: row {number} has the split {name!r}: give {', '.join(SPLITS)}"
            )
        if group and of_group.setdefault(group, split) != split:
            both = f"{SPLITS[of_group[group]]} and {SPLITS[split]}"
            raise UsageError(f"{path}: row {number}: group {group!r} is in both {both}")
    return np.array(splits, np.int64)


def _check_columns(path: Path, names: Sequence[str]) -> None:
    if missing := [name for name in NEEDED if name not in names]:
        raise UsageError(
            f"{path} has no column {' and no column '.join(missing)}, only"
            f" {', '.join(names) or 'none'}: name its columns path, label, split, group"
        )


def _csv_rows(path: Path) -> Iterator[Row]:
    try:
        with path.open(newline="", encoding="utf-8-sig", errors="surrogateescape") as file:
            header = file.readline()
            separator = max(",;\t", key=header.count)
            names = [
                name.strip().lower() for name in next(csv.reader([header], delimiter=separator), [])
            ]
            _check_columns(path, names)
            for cells in csv.reader(file, delimiter=separator):
                if cells:
                    yield dict(zip(names, cells, strict=False))
    except OSError as error:
        raise UsageError(f"manifest {path} cannot be read: {error.strerror}") from None
    except csv.Error as error:
        raise UsageError(f"manifest {path} is no CSV file: {brief(error)}") from None


def _parquet_rows(path: Path) -> Iterator[Row]:
    try:
        import pyarrow
        from pyarrow import parquet
    except ImportError:
        raise UsageError(
            f"manifest {path}: reading Parquet needs pyarrow: pip install 'hpctrain[parquet]', or"
            " save the table as CSV"
        ) from None
    try:
        with parquet.ParquetFile(path) as file:
            names = {name.strip().lower(): name for name in file.schema_arrow.names}
            _check_columns(path, list(names))
            wanted = {name: names[name] for name in (*NEEDED, *OPTIONAL) if name in names}
            for batch in file.iter_batches(columns=list(wanted.values())):
                columns = [batch.column(name).to_pylist() for name in wanted.values()]
                for cells in zip(*columns, strict=True):
                    texts = ("" if cell is None else str(cell) for cell in cells)
                    yield dict(zip(wanted, texts, strict=True))
    except (OSError, pyarrow.ArrowException) as error:
        raise UsageError(f"manifest {path} cannot be read: {brief(error)}") from None
