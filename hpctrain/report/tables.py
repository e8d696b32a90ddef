"""Tables for a reader: what an evaluation found, by class."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from rich.table import Table

from hpctrain.console import Console, styled
from hpctrain.errors import RunError
from hpctrain.files import write_whole
from hpctrain.report.bar import terminal_columns
from hpctrain.report.differences import Difference
from hpctrain.text import told_apart

MOST_TENSORS, MOST_PROBLEMS = 30, 6  # lines of a comparison
WIDEST = 12  # classes of a confusion matrix that still fits a terminal


def write_json(path: Path, figures: dict[str, Any]) -> None:
    """Write figures as one JSON object, whole or not at all."""
    try:
        write_whole(path, json.dumps(figures, indent=1) + "\n")
    except OSError as error:
        raise RunError(f"cannot write {path}: {error.strerror}") from error


def _console() -> Console:
    """Plain text of a fixed width unless a person looks: mpirun gives ranks terminals anyway."""
    columns = terminal_columns()
    plain = columns is None
    return Console(width=columns or 120, no_color=plain, force_terminal=not plain)


def print_evaluation(
    figures: dict[str, Any], confusion: np.ndarray | None, classes: tuple[str, ...], split: str
) -> None:
    """Print the figures of a split; with a confusion matrix (K, K) that and the per-class table."""
    console, classes = _console(), told_apart(classes)
    if confusion is None:
        errors = [figures["loss"], figures["noisy"]]
        after, before = (f"{e:.5f} ({psnr(e):.1f} dB)" for e in errors)
        text = f"mean squared error {after}, of the noisy images {before}"
    else:
        console.print(_class_table(confusion, classes))
        few = len(classes) <= WIDEST
        console.print((_confusion_table if few else _mistakes_table)(confusion, classes))
        text = f"loss {figures['loss']:.4f}, accuracy {figures['accuracy']:.4f}"
    console.print(f"{split}: {figures['rows']:,} images, {text}")


def psnr(error: float) -> float:
    """Peak signal-to-noise ratio in dB of a mean squared error on [0, 1]: -10 log10(error)."""
    return -10 * math.log10(error) if error else math.inf


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


def print_differences(
    differences: Sequence[Difference],
    problems: Sequence[str],
    records: tuple[int, str] | None,
    notes: Sequence[str],
) -> None:
    """Print how two runs differ: tensors that do, then their records, then these lines."""
    console = _console()
    apart = [d for d in differences if d.differing]
    if apart:
        console.print(_difference_table(apart[:MOST_TENSORS]))
    if len(apart) > MOST_TENSORS:
        console.print(f"and {len(apart) - MOST_TENSORS} more tensors")
    console.print(f"tensors: {len(differences) - len(apart)} equal, {len(apart)} different")
    for line in problems[:MOST_PROBLEMS]:
        console.print(f"tensors: {line}")
    if len(problems) > MOST_PROBLEMS:
        console.print(f"tensors: and {len(problems) - MOST_PROBLEMS} more like that")
    console.print(
        f"records: {f'differ at step {records[0]}, {records[1]}' if records else 'equal'}"
    )
    for line in notes:
        console.print(line)


def _difference_table(differences: Sequence[Difference]) -> Table:
    table = Table(title="Tensors that differ")
    for name in ("tensor", "values", "differing", "largest", "relative", "ulp"):
        table.add_column(name, justify="left" if name == "tensor" else "right")
    for d in differences:
        cells = (f"{d.values:,}", f"{d.differing:,}", f"{d.largest:.3g}", f"{d.relative:.3g}")
        table.add_row(d.name, *cells, "" if d.ulps is None else f"{d.ulps:,}")
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
            styled(f"{n}", "bold") if j == k else (f"{n}" if n else "·")
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
