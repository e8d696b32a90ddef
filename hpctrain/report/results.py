"""Output of evaluate and predict: tables, predictions as CSV, sheets of images."""

from __future__ import annotations

import csv
import math
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import numpy as np

from hpctrain.files import as_text, remove_left_behind, whole_file, writing
from hpctrain.text import brief, check_output, say

if TYPE_CHECKING:
    from rich.table import Table

DENSE = 2048  # most classes of a confusion matrix: 32 MiB
PRINTED = 12  # most classes of a confusion matrix that fits a terminal
SIDE = 84  # approximate pixels of the shorter side: images are enlarged by an integer factor
LARGEST = 240  # pixels of the longer side of an image with a caption
GAP, LINE = 4, 16  # pixels between images, and of a line of a caption
NARROWEST = 120  # pixels of a caption below a narrower image
IN_A_ROW = 8
COLUMNS = ("file", "row", "source", "class", "label", "prediction", "probability")  # of answers


class Confusion:
    """Counts of samples by true and by predicted class.

    `counts` (3 + K, K) int64 is what `by_class` returns, and below it the confusion matrix, true
    classes by row; (3, K) with more than `DENSE` classes. Counts of several ranks are added.
    """

    def __init__(self, classes: int) -> None:
        self.counts = np.zeros((3 + classes * (classes <= DENSE), classes), np.int64)

    def add(self, true: np.ndarray, predicted: np.ndarray) -> None:
        """Count samples of these true and predicted classes, (n,) integers each."""
        for row, classes in enumerate((true, predicted, true[true == predicted])):
            np.add.at(self.counts[row], classes, 1)
        if self.matrix is not None:
            np.add.at(self.matrix, (true, predicted), 1)

    @property
    def matrix(self) -> np.ndarray | None:
        """The confusion matrix; None if there are too many classes."""
        return self.counts[3:] if len(self.counts) > 3 else None

    def by_class(self) -> np.ndarray:
        """Return samples by true class, samples by predicted class, correct ones: (3, K) int64."""
        return self.counts[:3]

    def as_json(self) -> dict[str, Any]:
        """Return "confusion", the matrix; if there is none, also "by_class", its sums."""
        if self.matrix is not None:
            return {"confusion": self.matrix.tolist()}
        by_class = zip(("true", "predicted", "correct"), self.counts.tolist(), strict=True)
        return {"confusion": None, "by_class": dict(by_class)}


def print_evaluation(
    metrics: dict[str, Any],
    confusion: Confusion | None,
    classes: Sequence[str],
    split: str,
    loss: str = "mean squared error",
) -> None:
    """Print the metrics of a split; with a confusion matrix, also the tables by class.

    `loss` is the name of the loss of a network that restores images.
    """
    from hpctrain.report.console import make_console  # imports rich: most ranks do not need it

    console = make_console()
    if confusion is None:
        texts = []
        for error in (metrics["loss"], metrics["noisy"]):
            own = ""
            if loss == "mean squared error":  # on [0, 1]: the peak signal-to-noise ratio is known
                own = f" ({-10 * math.log10(error) if error else math.inf:.1f} dB)"
            texts.append(f"{error:.5f}{own}")
        text = f"{loss} {texts[0]}, of the noisy images {texts[1]}"
    else:
        for table in _tables(confusion, classes):
            console.print(table)
        names = ("loss", "unweighted_loss", "accuracy", "balanced_accuracy")
        text = ", ".join(f"{n.replace('_', ' ')} {metrics[n]:.4f}" for n in names if n in metrics)
    own = "".join(f", {name} {value:.4f}" for name, value in metrics.get("metrics", {}).items())
    console.print(f"{split}: {metrics['rows']:,} images, {text}{own}", soft_wrap=True)


def _tables(confusion: Confusion, classes: Sequence[str]) -> Iterator[Table]:
    """Yield the table by class, and the confusion matrix or, if it is large, its worst cells."""
    from rich.table import Table

    from hpctrain.report.console import styled

    table = Table("class", title="By class")
    for name in ("images", "recall", "precision", "F1"):
        table.add_column(name, justify="right")
    for name, (true, predicted, right) in zip(classes, confusion.by_class().T, strict=True):
        shares = (right, true), (right, predicted), (2 * right, true + predicted)
        ratios = [f"{part / whole:.4f}" if whole else "-" for part, whole in shares]
        table.add_row(name, f"{true:,}", *ratios)
    yield table
    if (matrix := confusion.matrix) is None:
        return
    if len(classes) <= PRINTED:
        table = Table("", title="Confusion matrix: true class by row, predicted class by column")
        for name in classes:
            table.add_column(name, justify="right")
        for k, (name, row) in enumerate(zip(classes, matrix.tolist(), strict=True)):
            cells = [str(count or "·") for count in row]
            table.add_row(name, *cells[:k], styled(str(row[k]), "bold"), *cells[k + 1 :])
    else:
        title = "Most frequent mistakes (the whole matrix: --output FILE.json)"
        table = Table("true class", "predicted", title=title)
        table.add_column("images", justify="right")
        wrong = matrix * ~np.eye(len(classes), dtype=bool)
        for cell in np.argsort(-wrong, axis=None, kind="stable")[:10].tolist():
            i, j = divmod(cell, len(classes))
            if wrong[i, j]:
                table.add_row(classes[i], classes[j], f"{wrong[i, j]:,}")
    yield table


def answer_columns(classes: Sequence[str]) -> tuple[str, ...]:
    """Return the columns of the classes' probabilities, distinct from all others of a table."""
    return tuple(f"{name} ({k})" if name in COLUMNS else name for k, name in enumerate(classes))


@contextmanager
def open_predictions(
    output: str, classes: Sequence[str], first: Sequence[str]
) -> Iterator[Callable[[Sequence[tuple[str, ...]], np.ndarray | None, np.ndarray], None]]:
    """Yield a function that writes predictions to a CSV file, or to standard output for "-".

    The function takes the names (n) of some images, of one text or several each, their labels (n,)
    or None, and their class probabilities (n, K). The columns are the names and the true class if
    there are labels, headed by `first`, the predicted class, its probability, and all
    probabilities. The file is renamed into place when the block ends without an error. Raises
    RunError if it cannot be written.
    """
    columns = answer_columns(classes)
    where = "standard output" if output == "-" else output
    with ExitStack() as stack:
        file: Any = SimpleNamespace(write=print_line)
        if output != "-":
            stack.enter_context(writing(output))  # closing the file may fail, even after an error
            remove_left_behind(Path(output))
            file = stack.enter_context(as_text(stack.enter_context(whole_file(Path(output)))))
        table = csv.writer(file, lineterminator="\n")

        def write(
            names: Sequence[tuple[str, ...]], labels: np.ndarray | None, probabilities: np.ndarray
        ) -> None:
            with writing(where):
                for number, (name, found) in enumerate(zip(names, probabilities, strict=True)):
                    true = [] if labels is None else [columns[labels[number]]]
                    best, texts = int(found.argmax()), [f"{p:.6f}" for p in found]
                    table.writerow([*name, *true, columns[best], texts[best], *texts])

        with writing(where):
            table.writerow([*first, "prediction", "probability", *columns])
        yield write


def print_line(line: str) -> None:
    """Print a line of a table. Raises OSError if standard output cannot be written."""
    say(line.removesuffix("\n"))
    check_output()


def draw_captioned(
    images: np.ndarray, captions: Sequence[tuple[str, ...]], marked: Collection[int] = ()
) -> np.ndarray:
    """Draw images (n, H, W, C) in rows, each above the lines of its caption.

    Returns an array (h, w, 3) of uint8. Images are enlarged or shrunk to a readable size; floats
    outside of [0, 1] are scaled by the range of their values. Lines wider than a column are
    shortened. The last two lines below the images with the numbers `marked` are red.
    """
    from PIL import Image, ImageDraw, ImageFont

    if images.dtype != np.uint8:
        images = np.nan_to_num(images.astype(np.float32))
        low, high = min(0.0, float(images.min())), max(1.0, float(images.max()))
        images = (images - low) / (high - low)
    scale = max(1, SIDE // min(images.shape[1:3]))
    tiles = [_image(each.repeat(scale, 0).repeat(scale, 1)) for each in images]
    for tile in tiles:
        tile.thumbnail((LARGEST, LARGEST))  # shrinks larger ones only
    high = tiles[0].height + LINE * len(captions[0]) + 3 * GAP
    wide = max(tiles[0].width, NARROWEST) + 2 * GAP
    columns = min(len(tiles), IN_A_ROW)
    sheet = Image.new("RGB", (columns * wide, -(-len(tiles) // columns) * high), "white")
    draw, font = ImageDraw.Draw(sheet), ImageFont.load_default(size=LINE - 3)
    for number, (tile, lines) in enumerate(zip(tiles, captions, strict=True)):
        left, top = GAP + number % columns * wide, GAP + number // columns * high
        sheet.paste(tile, (left, top))
        for place, line in enumerate(lines):
            ink = "crimson" if number in marked and place >= len(lines) - 2 else "black"
            shorter = (brief(line, most) for most in range(len(line), 2, -1))
            text = next((t for t in shorter if font.getlength(t) <= wide - 2 * GAP), line)
            below = top + tile.height + GAP + place * LINE
            draw.text((left, below), text, fill=ink, font=font)
    return np.asarray(sheet)


def write_image(path: Path, image: np.ndarray) -> None:
    """Write an image (H, W, C), uint8, gray uint16 or floats in [0, 1], as PNG. Raises RunError."""
    with writing(path), whole_file(path) as file:
        _image(image).save(file, format="PNG")


def _image(values: np.ndarray) -> Any:
    """Convert (H, W, C), uint8, gray uint16 or floats in [0, 1], to an image of Pillow."""
    from PIL import Image

    if values.dtype.kind == "f":
        values = (values.clip(0, 1) * 255).round().astype(np.uint8)
    return Image.fromarray(values if values.shape[2] == 3 else values[:, :, 0])
