"""Read a table of images: text, separated by commas, semicolons or tabs, with a header.

Columns are ``path`` (relative to the source, or absolute for files of a folder), those of the
targets (``columns.py``), and optionally ``split`` and ``group`` (images of one group, such as one
patient, are never divided between splits). Others are not read.
"""

from __future__ import annotations

import codecs
import csv
import io
import os
import re
import stat
import sys
import unicodedata
from array import array
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import chain
from pathlib import Path
from typing import NamedTuple, TextIO

import numpy as np

from hpctrain.data.listing import FileFinder, read_start
from hpctrain.data.pack import SPLITS
from hpctrain.data.targets import Targets
from hpctrain.errors import UsageError
from hpctrain.packing.columns import LISTS, SEPARATOR, choose_columns
from hpctrain.packing.names import NO_GROUP, NO_SPLIT, number_names, split_number
from hpctrain.text import brief, listed, listed_names

SUFFIXES = (".csv", ".tsv", ".txt")
MOST_CHARACTERS = 1000  # of a cell, or of a class in a list of them
PLACES = ("path", "split", "group")  # columns beside those of the targets
ENCODINGS = {  # by byte order mark
    codecs.BOM_UTF8: "utf-8-sig",
    codecs.BOM_UTF32_LE: "utf-32",
    codecs.BOM_UTF32_BE: "utf-32",
    codecs.BOM_UTF16_LE: "utf-16",  # with which that of UTF-32 begins
    codecs.BOM_UTF16_BE: "utf-16",
}


class Manifest(NamedTuple):
    """The N images that a table names."""

    names: list[str]
    targets: Targets
    target_rows: np.ndarray  # (N, ...), as they are stored
    splits: np.ndarray  # (N,) int8: indices into SPLITS, or NO_SPLIT
    groups: np.ndarray  # (N,) int32: equal numbers within a group, or all NO_GROUP
    notes: list[str]  # on what is merged or not read


class Table(NamedTuple):
    """An open table: its header, and the rows that follow."""

    path: str
    header: list[str]  # names of the columns
    delimiter: str
    rows: Iterator[tuple[int, list[str]]]  # line and cells of each row that is not blank


def is_table(path: Path, columns: Sequence[str] | None) -> bool:
    """Whether a source is a table of targets, by its suffix or its first line.

    `columns` are those of --targets: then it needs no column with labels.
    """
    if not path.is_file():
        return False
    if path.suffix.lower() in SUFFIXES:
        return True
    try:
        header = read_start(str(path)).partition(b"\n")[0].lower()
    except OSError:  # the listing as an archive reports it
        return False
    has_targets = b"label" in header or bool(columns)
    return b"path" in header and has_targets and b"\0" not in header


def read_manifest(path: str, files: FileFinder, columns: Sequence[str] | None) -> Manifest:
    """Read a table of images; `columns` are those of --targets. Raises UsageError."""
    lines = dict[str, int]()  # of each image
    split_of = dict[str, int]()  # of each group
    groups = list[str]()
    splits = array("b")
    with open_table(path) as table:
        targets, notes = choose_columns(path, table.header, columns)
        header = table.header
        if not columns:
            header = [name.lower() for name in header]
        places = [header.index(name) for name in targets.names]
        for line, cells, row in read_rows(table, places):
            where = f"{path}: line {line}"
            image = files.find(cells["path"].strip())
            check_cells(where, cells, image, files)
            for name, cell in zip(targets.names, row, strict=True):
                check_text(where, name, cell)
            if image in lines:
                raise UsageError(f"{where} names {brief(image)}, as line {lines[image]} does")
            number, group = place_row(where, cells, split_of)
            lines[image] = line
            groups.append(group)
            splits.append(number)
            targets.add(line, row)
    if not lines:
        raise UsageError(f"{path} names no images")
    made = targets.make()
    grouped = np.full(len(lines), NO_GROUP, np.int32)
    if any(groups):
        grouped = number_names(groups)[1]
    return Manifest(
        names=[*lines],
        targets=made.targets,
        target_rows=made.rows,
        splits=np.array(splits, np.int8),
        groups=grouped,
        notes=[*notes, *made.notes],
    )


def place_row(where: str, cells: Mapping[str, str], split_of: dict[str, int]) -> tuple[int, str]:
    """Return the split and the group of an image; `split_of` is that of each group so far."""
    texts = {name: unicodedata.normalize("NFC", cell.strip()) for name, cell in cells.items()}
    split = texts.get("split", "")
    group = sys.intern(texts.get("group", ""))  # equal texts are stored once
    number = split_number(split)
    if split and number == NO_SPLIT:
        raise UsageError(f"{where} has the split {brief(repr(split))}: give {listed(SPLITS)}")
    if group and split_of.setdefault(group, number) != number:
        raise UsageError(
            f"{where}: group {brief(repr(group))} is in both {SPLITS[split_of[group]]} and"
            f" {SPLITS[number]}"
        )
    return number, group


def read_rows(
    table: Table, targets: Sequence[int]
) -> Iterator[tuple[int, dict[str, str], list[str]]]:
    """Yield the line of each row, its cells of `PLACES` by name, and those at places `targets`.

    Raises UsageError for cells that are no text.
    """
    plain = [name.lower() for name in table.header]
    at = {name: plain.index(name) for name in PLACES if name in plain}
    for line, row in table.rows:
        if any(row[len(plain) :]):
            advice = ""
            if table.delimiter == SEPARATOR:
                advice = ': put a cell that holds semicolons into quotation marks, as "a;b"'
            raise UsageError(f"{table.path}: line {line} has more cells than the header{advice}")
        row += [""] * (len(plain) - len(row))
        cells = {name: row[place] for name, place in at.items()}
        yield line, cells, [row[place] for place in targets]


def check_cells(where: str, cells: Mapping[str, str], image: str, files: FileFinder) -> None:
    """Raise UsageError unless the cells of `PLACES` of a line are there, and text."""
    for name, cell in cells.items():
        if not cell.strip():
            raise UsageError(f"{where} has no {name}")
        if name != "path":
            check_text(where, name, cell)
        elif not is_unicode(cell) and not files.has(image):
            raise UsageError(f"{where} is not UTF-8: save the table as CSV in UTF-8")
        elif "\0" in cell:
            raise UsageError(f"{where} holds a NUL character: save the table as CSV in UTF-8")
    if "://" in cells["path"] and not files.has(image):
        raise UsageError(
            f"{where} has the path {brief(cells['path'])}: fetch it, and give the file"
        )


def check_text(where: str, name: str, cell: str) -> None:
    """Raise UsageError if a cell is no text of one line, or too long."""
    parts = [cell]
    if name in LISTS:
        parts = cell.split(SEPARATOR)
    if not is_unicode(cell):
        raise UsageError(f"{where} is not UTF-8: save the table as CSV in UTF-8")
    if len(cell.splitlines()) > 1 or max(map(len, parts)) > MOST_CHARACTERS:
        raise UsageError(
            f"{where} has a {brief(name)} of several lines, or of more than {MOST_CHARACTERS:,}"
            " characters: is a quotation mark missing?"
        )
    if "\0" in cell:
        raise UsageError(f"{where} holds a NUL character: save the table as CSV in UTF-8")


def is_unicode(text: str) -> bool:
    """Whether a decoded text has no bytes that were none (surrogates)."""
    return text.isascii() or not re.search("[\ud800-\udfff]", text)


@contextmanager
def open_table(path: str) -> Iterator[Table]:
    """Open a table and read its header. Raises UsageError, also while its rows are read."""
    try:
        mode = os.stat(path).st_mode
        if not (stat.S_ISREG(mode) or stat.S_ISFIFO(mode)):
            raise UsageError(f"manifest {path} is not a regular file")
        with open(path, "rb") as file:
            start = file.peek(4)
            if start.startswith(b"PK"):
                raise UsageError(f"{path} is a workbook or a .zip: save the table as CSV in UTF-8")
            marks = [name for mark, name in ENCODINGS.items() if start.startswith(mark)]
            encoding = [*marks, "utf-8"][0]
            with io.TextIOWrapper(file, encoding, "surrogateescape", newline="") as text:
                yield read_header(path, text)
    except (OSError, UnicodeError, csv.Error) as error:
        why = getattr(error, "strerror", None) or brief(error)
        raise UsageError(f"manifest {path} cannot be read: {why}") from None


def read_header(path: str, text: TextIO) -> Table:
    """Read the header of a table. Raises UsageError unless it is one of images."""
    line = text.readline()
    delimiter = max(",;\t", key=line.count)
    before = 0  # lines
    named = re.fullmatch("sep=(.)\\s*", line)  # as Excel writes it
    if named:
        delimiter = named[1]
        line = text.readline()
        before = 1
    if line.lstrip().startswith(("{", "[")):
        raise UsageError(f"{path} is JSON: give a CSV table with the columns path, label")
    rows = csv.reader(chain([line], text), delimiter=delimiter, strict=True)
    header = [unicodedata.normalize("NFC", name.strip()) for name in next(rows, [])]
    if "\0" in line or not is_unicode(line):
        raise UsageError(f"{path} is not UTF-8: save the table as CSV in UTF-8")
    plain = [name.lower() for name in header]
    if "path" not in plain or any(plain.count(name) > 1 for name in PLACES):
        raise UsageError(
            f"{path} has the columns {listed_names(header) or '(none)'}: give path and label (or"
            " labels, or columns for --targets), and optionally split and group, each once"
        )
    filled = (row for row in rows if any(cell.strip() for cell in row))
    return Table(
        path=path,
        header=header,
        delimiter=delimiter,
        rows=((rows.line_num + before, row) for row in filled),
    )
