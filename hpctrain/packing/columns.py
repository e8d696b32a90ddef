"""The columns of a table that hold the targets of its images.

    columns                     targets   cells
    label                       class     the class
    labels, optionally unknown  classes   classes, separated by semicolons: "a;b", empty = none of
                                          them; "?a" = unknown whether it has class a. Or `unknown`
                                          lists these classes
    those of --targets          values    numbers; empty, NA, N/A, NaN, null and None are unknown

Each class here collects the cells line by line, and then makes the targets of all N images.
"""

from __future__ import annotations

import math
import re
import sys
import unicodedata
from array import array
from collections.abc import Sequence
from typing import NamedTuple, Protocol

import numpy as np

from hpctrain.data.outliers import target_notes
from hpctrain.data.targets import UNKNOWN, Targets
from hpctrain.errors import UsageError, did_you_mean
from hpctrain.packing.names import class_notes, class_order, number_names
from hpctrain.text import MOST_NAMED, brief, bytes_text, counted, listed, listed_names

LABEL = "label"
LABELS = "labels"
UNKNOWN_CLASSES = "unknown"
LISTS = (LABELS, UNKNOWN_CLASSES)  # columns with several names a cell
SEPARATOR = ";"
UNKNOWN_MARK = "?"
OTHER_SEPARATORS = (",", "|", "/")
MISSING = ("", "na", "n/a", "<na>", "#n/a", "nan", "null", "none")  # in lower case
#: Names that may stand for an image without any class, as may those of `MISSING`; in lower case.
WITHOUT_CLASS = ("no finding", "no findings", "no class", "normal", "negative", "nothing")
NUMBER = re.compile(r"[+-]?(\d+\.?\d*|\.\d+)(e[+-]?\d+)?", re.IGNORECASE | re.ASCII)
SMALLEST = float(np.finfo(np.float32).tiny)  # smaller ones lose digits
LARGEST = float(np.finfo(np.float32).max)
LARGEST_WHOLE = 1 << 24  # float32 has all whole numbers up to it
PRESENCE = (0, 1, -1)  # often stand for absent, present and unknown classes
MOST_CLASSES = 1000  # more are noted
MOST_BYTES = 1 << 32  # of the targets of classes
ADVICE = (
    "give label (a class), labels (several, as a;b), or numbers in columns that --targets names"
)


class TableTargets(NamedTuple):
    """The targets of the N images of a table."""

    targets: Targets
    rows: np.ndarray  # (N, ...), as they are stored
    notes: list[str]


class CellCollector(Protocol):
    """Collects the cells of the columns with the targets."""

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the columns."""

    def add(self, line: int, cells: Sequence[str]) -> None:
        """Add the cells of a line, one of each column. Raises UsageError."""

    def make(self) -> TableTargets:
        """Return the targets of all lines. Raises UsageError."""


def choose_columns(
    path: str, header: Sequence[str], named: Sequence[str] | None
) -> tuple[CellCollector, list[str]]:
    """Return what collects the targets of a table, and notes on columns that are not read.

    header: its columns; named: those of --targets. Raises UsageError if it has no such columns.
    """
    plain = [name.lower() for name in header]
    labelled = [name for name in (LABEL, LABELS) if name in plain]
    for name in named or (LABEL, LABELS, UNKNOWN_CLASSES):
        if (header if named else plain).count(name) > 1:
            raise UsageError(f"{path} has several columns {brief(name)}: rename all but one")
    if named:
        missing = [name for name in named if name not in header]
        if missing:
            hint = did_you_mean(missing[0], header)
            raise UsageError(
                f"--targets: {path} has no column {listed_names(missing)}; it has"
                f" {listed_names(header)}{hint}"
            )
        notes = list[str]()
        ignored = [name for name in labelled if name not in map(str.lower, named)]
        if ignored:
            notes.append(f"not read, since --targets names others: {listed(ignored)} of {path}")
        return ValueCells(path, tuple(named)), notes
    if len(labelled) > 1:
        raise UsageError(
            f"{path} has the columns label, for one class of each image, and labels, for several:"
            " rename the one that is not the target"
        )
    if not labelled:
        raise UsageError(f"{path} has the columns {listed_names(header)}: {ADVICE}")
    if labelled == [LABEL]:
        return ClassCells(path), []
    return ClassesCells(path, has_unknown=UNKNOWN_CLASSES in plain), []


class ClassCells:
    """The column ``label``: one class of each image."""

    names: tuple[str, ...] = (LABEL,)

    def __init__(self, path: str) -> None:
        self._path = path
        self._labels = list[str]()
        self._spellings: dict[str, set[str]] = {}  # of each class

    def add(self, line: int, cells: Sequence[str]) -> None:
        """Add the class of an image."""
        (cell,) = cells
        if not cell.strip():
            raise UsageError(f"{self._path}: line {line} has no {LABEL}")
        label = sys.intern(class_name(cell))
        self._labels.append(label)
        self._spellings.setdefault(label, set()).add(cell)

    def make(self) -> TableTargets:
        """Return the classes, (N,) int32."""
        classes, rows = number_names(self._labels)
        notes = class_notes(self._spellings)
        strange = [name for name in classes if name.lower() in MISSING]
        if strange:
            notes.append(
                f"classes like any others: {listed_names(strange)}; leave out the lines of images"
                " whose class is unknown"
            )
        return TableTargets(Targets("class", classes), rows, notes)


class ClassesCells:
    """The columns ``labels`` and ``unknown``: any number of classes of each image."""

    def __init__(self, path: str, has_unknown: bool) -> None:
        self.names: tuple[str, ...] = LISTS if has_unknown else (LABELS,)
        self._path = path
        self._numbers: dict[str, int] = {}  # of the classes, in the order in which they occur
        self._lines = dict[str, int]()  # where a class is unknown for the first time
        self._present = set[str]()  # classes that an image has
        self._spellings: dict[str, set[str]] = {}
        self._rows = 0
        self._entries = array("q")  # row, class and value of each, one after the other

    def add(self, line: int, cells: Sequence[str]) -> None:
        """Add the classes of an image, and those of which it is unknown whether it has them."""
        present = list[str]()
        unknown = list[str]()
        for cell in cells[:1]:
            for text in split_cell(cell):
                if text.startswith(UNKNOWN_MARK):
                    unknown.append(text[1:].strip())
                else:
                    present.append(text)
        for cell in cells[1:]:
            unknown += [text.removeprefix(UNKNOWN_MARK).strip() for text in split_cell(cell)]
        where = f"{self._path}: line {line}"
        if "" in unknown:
            raise UsageError(f'{where} has "?" without a class: write ?a where class a is unknown')
        both = {*map(class_name, present)} & {*map(class_name, unknown)}
        if both:
            raise UsageError(f"{where} has {brief(min(both))} as a class, and as unknown")
        for texts, value in ((present, 1), (unknown, UNKNOWN)):
            for text in texts:
                self._enter(text, value, line)
        self._rows += 1

    def _enter(self, text: str, value: int, line: int) -> None:
        name = class_name(text)
        number = self._numbers.setdefault(name, len(self._numbers))
        self._entries.extend((self._rows, number, value))
        if value == UNKNOWN:
            self._lines.setdefault(name, line)
        else:
            self._present.add(name)
            self._spellings.setdefault(name, set()).add(text)

    def make(self) -> TableTargets:
        """Return which classes the images have, (N, K) uint8."""
        strange = [name for name in self._numbers if name not in self._present]
        if strange:
            lines = listed((self._lines[name] for name in strange), MOST_NAMED)
            raise UsageError(
                f"{self._path} names {listed_names(strange)} as unknown, and no image has"
                f" {'it' if len(strange) == 1 else 'them'}: line {lines}"
            )
        classes = class_order(self._numbers)
        if not classes:
            raise UsageError(f"{self._path}: no cell of the column labels names a class")
        place = {name: number for number, name in enumerate(classes)}
        places = np.array([place[name] for name in self._numbers])
        if self._rows * len(classes) > MOST_BYTES:
            raise UsageError(
                f"{self._path} names {len(classes):,} classes of {self._rows:,} images, which take"
                f" {bytes_text(self._rows * len(classes))} as targets: are they separated by"
                f" {SEPARATOR!r}?"
            )
        rows = np.zeros((self._rows, len(classes)), np.uint8)
        entries = np.frombuffer(self._entries, np.int64).reshape(-1, 3)
        rows[entries[:, 0], places[entries[:, 1]]] = entries[:, 2]
        return TableTargets(
            targets=Targets("classes", classes),
            rows=rows,
            notes=[*class_notes(self._spellings), *self._notes(classes, rows)],
        )

    def _notes(self, classes: Sequence[str], rows: np.ndarray) -> list[str]:
        """Return notes on targets, (N, K), and names of classes that may not be meant."""
        notes = list[str]()
        if (rows.sum(axis=1) == 1).all():
            notes.append(
                "each image has exactly one class: to classify images, name the column label"
            )
        strange = [name for name in classes if name.lower() in (*MISSING, *WITHOUT_CLASS)]
        if strange:
            notes.append(
                f"classes like any others: {listed_names(strange)}; for an image that has none of"
                " the classes, leave the cell empty"
            )
        for separator in OTHER_SEPARATORS:
            joined = [name for name in classes if separator in name]
            if joined:
                notes.append(
                    f"classes are separated by {SEPARATOR!r}: names with {separator!r} are one"
                    f" class each: {listed_names(joined)}"
                )
        if len(classes) > MOST_CLASSES:
            size = bytes_text(self._rows * len(classes))
            notes.append(f"{len(classes):,} classes: the targets of all images take {size}")
        return notes


class ValueCells:
    """The columns of --targets: numbers."""

    def __init__(self, path: str, names: tuple[str, ...]) -> None:
        self.names = names
        self._path = path
        self._values = array("d")
        self._wrong = list[str]()  # cells that are no numbers, with line and column
        self._has_comma = False
        self._rounded = dict.fromkeys(names, 0)

    def add(self, line: int, cells: Sequence[str]) -> None:
        """Add the numbers of an image, one of each column."""
        for name, cell in zip(self.names, cells, strict=True):
            text = cell.strip()
            value = math.nan
            if text.lower() not in MISSING:
                value = read_number(text)
                if math.isinf(value):
                    self._wrong.append(f"line {line} {brief(name)} {brief(repr(text), 40)}")
                    self._has_comma |= bool(re.fullmatch(r"[+-]?\d+,\d+", text))
                elif value.is_integer() and abs(value) > LARGEST_WHOLE:
                    self._rounded[name] += float(np.float32(value)) != value
            self._values.append(value)

    def make(self) -> TableTargets:
        """Return the numbers, (N, T) float32."""
        if self._wrong:
            shown = listed(self._wrong, MOST_NAMED)
            advice = "give finite numbers in the range of float32, or nothing where it is unknown"
            if self._has_comma:
                advice += "; a decimal point, no comma"
            count = counted(len(self._wrong), "cell")
            raise UsageError(f"{self._path} has {count} that cannot be a target: {shown}: {advice}")
        rows = np.array(self._values).reshape(-1, len(self.names)).astype(np.float32)
        targets = Targets("values", self.names)
        counts = np.count_nonzero(~np.isnan(rows), axis=0)
        targets.check_known(self._path, counts, counted(len(rows), "image"))
        rounded = [
            f"{brief(name)} ({counted(count, 'value')})"
            for name, count in self._rounded.items()
            if count
        ]
        notes = list[str]()
        if rounded:
            notes.append(
                f"rounded to float32, which has whole numbers up to {LARGEST_WHOLE:,}:"
                f" {listed(rounded)}"
            )
        notes += target_notes(self.names, rows, "leave its cells empty")
        binary = [
            name for name, column in zip(self.names, rows.T, strict=True) if is_binary(column)
        ]
        if binary:
            notes.append(
                f"packed as values, with no others than {listed(PRESENCE)}: {listed_names(binary)};"
                " if they say which classes an image has, list these in a column labels, as a;b,"
                " and ?a where it is unknown"
            )
        return TableTargets(targets, rows, notes)


def split_cell(cell: str) -> list[str]:
    """Return the names that a cell lists."""
    return [text.strip() for text in cell.split(SEPARATOR) if text.strip()]


def class_name(text: str) -> str:
    """Return the name of a class as it is kept."""
    return unicodedata.normalize("NFC", text.strip())


def read_number(text: str) -> float:
    """Return the number of a text, infinity if it is none, or none that float32 can hold."""
    if not NUMBER.fullmatch(text):
        return math.inf
    value = float(text)
    if abs(value) > LARGEST or 0 < abs(value) < SMALLEST:
        return math.inf
    return value


def is_binary(column: np.ndarray) -> bool:
    """Whether the known values (N,) may say which images have a class."""
    return bool(np.isin(column[~np.isnan(column)], PRESENCE).all())
