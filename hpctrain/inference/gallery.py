"""Pictures of images with their answers, for ``predict --figure`` and ``evaluate --mistakes``."""

from __future__ import annotations

import heapq
import random
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from hpctrain.data.split import Split

TABLES = (".csv", ".json")  # suffixes of --output that a picture beside it replaces


class Answer(NamedTuple):
    """The network's answer to one image."""

    row: int  # of the split, or of the list of files
    label: int | None  # true class, if known
    prediction: int  # class with the largest probability
    probability: float


def most_confident(answers: Iterable[Answer], count: int) -> list[Answer]:
    """Return the `count` answers of the largest probability; of equal ones the first rows."""
    return heapq.nsmallest(count, answers, lambda each: (-each.probability, each.row))


def draw_rows(rows: Sequence[int], count: int) -> list[int]:
    """Draw at most `count` of these rows at random, in their order: the same ones every time."""
    return sorted(random.Random(0).sample(rows, min(count, len(rows))))


def read_rows(source: Split, answers: Sequence[Answer]) -> np.ndarray:
    """Read the images of these answers from a split, (n, H, W, C)."""
    rows = np.array([each.row for each in answers], np.int64)
    return source.gather(rows, np.empty((len(rows), *source.image_shape), source.dtype))


def name_rows(source: Split, answers: Sequence[Answer]) -> list[str]:
    """Return where these samples of a split came from, or their numbers if that is not known."""
    return [source.source_of(each.row) or f"row {each.row}" for each in answers]


def draw_answers(
    images: np.ndarray,
    answers: Sequence[Answer],
    classes: Sequence[str],
    names: Sequence[str],
) -> np.ndarray:
    """Draw images (n, H, W, C), as they are stored, each above its answer; (h, w, 3) uint8.

    A caption is the image's name of `names` (n,), the true class if it is known, and the predicted
    class and its probability; these two are red if the answer is wrong.
    """
    from hpctrain.report.pictures import draw_captioned, shown_values  # imports Pillow

    captions, wrong = [], []
    for number, (_, label, prediction, probability) in enumerate(answers):
        true = () if label is None else (f"true: {classes[label]}",)
        answer = f"answer: {classes[prediction]}", f"{100 * probability:.1f} %"
        captions.append((names[number], *true, *answer))
        if label not in (None, prediction):
            wrong.append(number)
    return draw_captioned(shown_values(images), captions, wrong)


def picture_path(output: str | None, default: Path) -> Path:
    """Return the name of the picture beside the file --output, or `default` if there is none."""
    if output in (None, "-"):
        return default
    path = Path(str(output))
    return path.with_suffix(".png") if path.suffix.lower() in TABLES else Path(f"{path}.png")
