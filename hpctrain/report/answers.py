"""The CSV of ``hpctrain predict``: a line for each image, with the class answered."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterator
from pathlib import Path
from typing import IO

import numpy as np

from hpctrain.errors import RunError
from hpctrain.files import as_text, whole_file
from hpctrain.text import csv_cell, say, told_apart


def write_csv(
    output: str,
    names: list[str],
    labels: np.ndarray | None,
    rows: list[int],
    chances: np.ndarray,
    classes: tuple[str, ...],
) -> None:
    """One line for each of `rows` (n): its name, true class of a split, answer, its probability,
    and all `chances` (n, K).
    """
    names = [names[row] for row in rows]
    labels = None if labels is None else labels[rows]
    try:
        if output == "-":
            lines = io.StringIO()
            _write_lines(lines, names, labels, chances, classes)
            say(lines.getvalue().removesuffix("\n"))
            return
        with (
            whole_file(Path(output)) as binary,
            as_text(binary) as file,
        ):
            _write_lines(file, names, labels, chances, classes)
    except OSError as error:
        raise RunError(f"cannot write {output}: {error.strerror}") from error
    say(f"{output}: {len(names):,} images classified")


def _write_lines(
    file: IO[str],
    names: list[str],
    labels: np.ndarray | None,
    chances: np.ndarray,
    classes: tuple[str, ...],
) -> None:
    writer = csv.writer(file, lineterminator="\n")
    true = [] if labels is None else ["class"]
    first = "file" if labels is None else "row"
    classes = told_apart(classes)
    writer.writerow(map(csv_cell, [first, *true, "answer", "probability", *classes]))
    writer.writerows(map(csv_cell, line) for line in _lines(names, labels, chances, classes))


def _lines(
    names: list[str], labels: np.ndarray | None, chances: np.ndarray, classes: tuple[str, ...]
) -> Iterator[list[str]]:
    for row, (name, chance) in enumerate(zip(names, chances, strict=True)):
        best = int(chance[: len(classes)].argmax())
        true = [] if labels is None else [classes[labels[row]]]
        figures = [f"{p:.6f}" for p in chance[: len(classes)]]
        yield [name, *true, classes[best], f"{chance[best]:.6f}", *figures]
