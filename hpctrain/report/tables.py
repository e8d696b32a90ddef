"""Output of evaluate and predict: tables on the terminal, metrics as JSON, predictions as CSV."""

from __future__ import annotations

import csv
import io
import json
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

import numpy as np

from hpctrain.files import as_text, remove_left_behind, whole_file, write_whole, writing
from hpctrain.report.confusion import Confusion
from hpctrain.report.fields import without_nonfinite
from hpctrain.text import say, told_apart

if TYPE_CHECKING:
    from rich.table import Table

WIDEST = 12  # classes of the largest confusion matrix that fits a terminal


def write_json(path: Path, metrics: dict[str, Any]) -> None:
    """Write metrics as one JSON object, atomically; NaN and infinity as null. Raises RunError."""
    with writing(path):
        write_whole(path, json.dumps(without_nonfinite(metrics), indent=1) + "\n")


def print_evaluation(
    metrics: dict[str, Any],
    confusion: Confusion | None,
    classes: tuple[str, ...],
    split: str,
    loss: str = "mean squared error",
) -> None:
    """Print the metrics of a split; with a confusion matrix, also the tables by class.

    `loss` is the name of the loss of a network that restores images.
    """
    from hpctrain.report.console import make_console  # imports rich, which most ranks do not need

    console, classes = make_console(), told_apart(classes)
    if confusion is None:
        errors = [metrics["loss"], metrics["noisy"]]
        squared = loss == "mean squared error"
        after, before = (f"{e:.5f}" + f" ({psnr(e):.1f} dB)" * squared for e in errors)
        text = f"{loss} {after}, of the noisy images {before}"
    else:
        console.print(_class_table(confusion, classes))
        few = len(classes) <= WIDEST
        console.print((_confusion_table if few else _mistakes_table)(confusion, classes))
        names = ("loss", "unweighted_loss", "accuracy", "balanced_accuracy")
        text = ", ".join(f"{n.replace('_', ' ')} {metrics[n]:.4f}" for n in names if n in metrics)
    own = "".join(f", {name} {value:.4f}" for name, value in metrics.get("metrics", {}).items())
    console.print(f"{split}: {metrics['rows']:,} images, {text}{own}", soft_wrap=True)


def psnr(error: float) -> float:
    """Return the peak signal-to-noise ratio in dB of a mean squared error on [0, 1].

    PSNR = -10 log10(error); infinity for 0.
    """
    return -10 * math.log10(error) if error else math.inf


def _class_table(confusion: Confusion, classes: tuple[str, ...]) -> Table:
    """Return images, recall (right / true), precision (right / predicted) and F1 by class."""
    from rich.table import Table

    table = Table(title="By class")
    for name in ("class", "images", "recall", "precision", "F1"):
        table.add_column(name, justify="left" if name == "class" else "right")
    columns = confusion.diagonal(), confusion.by_true(), confusion.by_predicted()
    for name, *counts in zip(classes, *(each.tolist() for each in columns), strict=True):
        right, true, predicted = counts
        recall, precision = _ratio(right, true), _ratio(right, predicted)
        f1 = _ratio(2 * right, true + predicted)
        table.add_row(name, f"{true:,}", recall, precision, f1)
    return table


def _ratio(part: int, whole: int) -> str:
    return f"{part / whole:.4f}" if whole else "-"


def _confusion_table(confusion: Confusion, classes: tuple[str, ...]) -> Table:
    from rich.table import Table

    from hpctrain.report.console import styled

    table = Table(title="Confusion matrix: true class by row, predicted class by column")
    table.add_column("")
    for name in classes:
        table.add_column(name, justify="right")
    matrix = confusion.dense().tolist()
    for k, name in enumerate(classes):
        cells = [
            styled(f"{n}", "bold") if j == k else (f"{n}" if n else "·")
            for j, n in enumerate(matrix[k])
        ]
        table.add_row(name, *cells)
    return table


def _mistakes_table(confusion: Confusion, classes: tuple[str, ...], most: int = 10) -> Table:
    """Return the most frequent mistakes, for more classes than a printed matrix can have."""
    from rich.table import Table

    table = Table(title="Most frequent mistakes (the whole matrix: --output FILE.json)")
    for name in ("true class", "predicted", "images"):
        table.add_column(name, justify="right" if name == "images" else "left")
    true, predicted, counts = confusion.coordinates()
    wrong = np.flatnonzero(true != predicted)
    for cell in wrong[np.argsort(-counts[wrong], kind="stable")][:most].tolist():
        table.add_row(classes[true[cell]], classes[predicted[cell]], f"{counts[cell]:,}")
    return table


def answer_columns(classes: Sequence[str]) -> tuple[str, ...]:
    """Return the columns of the classes' probabilities, distinct from all others of a table."""
    return told_apart(classes, ("file", "row", "class", "label", "prediction", "probability"))


@contextmanager
def open_predictions(
    output: str, classes: Sequence[str], first: Sequence[str]
) -> Iterator[Callable[[Sequence[tuple[str, ...]], np.ndarray | None, np.ndarray], None]]:
    """Yield a function that writes predictions to a CSV file, or to standard output for "-".

    The function takes the names (n) of some images, of one text or several each, their labels (n,)
    or None, and their class probabilities (n, K). The columns are the names and the true class if
    there are labels, headed by `first`, the predicted class, its probability, and all
    probabilities. The file is renamed into place when the
    block ends without an error. Raises RunError if it cannot be written.
    """
    columns, written = answer_columns(classes), 0
    header = [*first, "prediction", "probability", *columns]
    with ExitStack() as stack:
        file: TextIO | None = None
        if output != "-":
            stack.enter_context(writing(output))  # closing the file may fail, even after an error
            remove_left_behind(Path(output))
            file = stack.enter_context(as_text(stack.enter_context(whole_file(Path(output)))))

        def write(
            names: Sequence[tuple[str, ...]], labels: np.ndarray | None, probabilities: np.ndarray
        ) -> None:
            nonlocal written
            written += len(names)
            if len(names):
                _put(_prediction_lines(names, labels, probabilities, columns), file, output)

        _put([header], file, output)
        yield write
        if file is not None:
            stack.close()
            say(f"{output}: {written:,} images classified")


def _put(lines: Iterable[Sequence[str]], file: TextIO | None, output: str) -> None:
    """Write lines to a CSV file, whose name is `output`, or to standard output for None."""
    if file is None:
        text = io.StringIO()
        csv.writer(text, lineterminator="\n").writerows(lines)
        say(text.getvalue().removesuffix("\n"))
        return
    with writing(output):
        csv.writer(file, lineterminator="\n").writerows(lines)


def _prediction_lines(
    names: Sequence[tuple[str, ...]],
    labels: np.ndarray | None,
    probabilities: np.ndarray,
    classes: tuple[str, ...],
) -> Iterator[list[str]]:
    for number, (name, found) in enumerate(zip(names, probabilities, strict=True)):
        true = [] if labels is None else [classes[labels[number]]]
        best = int(found[: len(classes)].argmax())
        texts = [f"{p:.6f}" for p in found[: len(classes)]]
        yield [*name, *true, classes[best], texts[best], *texts]
