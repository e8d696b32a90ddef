"""Tables for a reader: what an evaluation found, by class."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

from hpctrain.errors import RunError
from hpctrain.files import whole_file

WIDEST = 12  # classes of a confusion matrix that still fits a terminal


def write_json(path: Path, figures: dict[str, Any]) -> None:
    """Write figures as one JSON object, whole or not at all."""
    try:
        with whole_file(path) as temporary:
            temporary.write_text(json.dumps(figures, indent=1) + "\n")
    except OSError as error:
        raise RunError(f"cannot write {path}: {error.strerror}") from error


def print_evaluation(
    loss: float, confusion: np.ndarray, classes: tuple[str, ...], split: str
) -> None:
    """Print loss, accuracy, the per-class table and the confusion matrix (K, K)."""
    console = Console(width=None if Console().is_terminal else 100, highlight=False)
    console.print(_class_table(confusion, classes))
    if len(classes) <= WIDEST:
        console.print(_confusion_table(confusion, classes))
    else:
        console.print(_mistakes_table(confusion, classes))
    rows, right = int(confusion.sum()), int(np.trace(confusion))
    console.print(f"{split}: {rows:,} images, loss {loss:.4f}, accuracy {right / rows:.4f}")


def _class_table(confusion: np.ndarray, classes: tuple[str, ...]) -> Table:
    """Images, recall (right / true), precision (right / answered) and F1 by class."""
    table = Table(title="By class")
    for name in ("class", "images", "recall", "precision", "F1"):
        table.add_column(name, justify="left" if name == "class" else "right")
    for k, name in enumerate(classes):
        right, true, answered = confusion[k, k], confusion[k].sum(), confusion[:, k].sum()
        figures = (_ratio(right, true), _ratio(right, answered), _ratio(2 * right, true + answered))
        table.add_row(name, f"{true:,}", *figures)
    return table


def _ratio(part: int, whole: int) -> str:
    return f"{part / whole:.4f}" if whole else "-"


def _confusion_table(confusion: np.ndarray, classes: tuple[str, ...]) -> Table:
    table = Table(title="Confusion matrix: true class by row, answer by column")
    table.add_column("")
    for name in classes:
        table.add_column(name, justify="right")
    for k, name in enumerate(classes):
        cells = [
            f"[bold]{n}[/]" if j == k else (f"{n}" if n else "·")
            for j, n in _numbered(k, confusion)
        ]
        table.add_row(name, *cells)
    return table


def _numbered(k: int, confusion: np.ndarray) -> list[tuple[int, int]]:
    return list(enumerate(confusion[k].tolist()))


def _mistakes_table(confusion: np.ndarray, classes: tuple[str, ...], most: int = 10) -> Table:
    """The most frequent mistakes, where a whole matrix would not fit."""
    table = Table(title="Most frequent mistakes (the whole matrix: --output FILE.json)")
    for name in ("true class", "answer", "images"):
        table.add_column(name, justify="right" if name == "images" else "left")
    off = confusion - np.diag(np.diag(confusion))
    for flat in np.argsort(-off, axis=None, kind="stable")[:most]:
        i, j = divmod(int(flat), len(classes))
        if off[i, j]:
            table.add_row(classes[i], classes[j], f"{off[i, j]:,}")
    return table
