"""Classes of unequal size: the weights that they get in the loss."""

from __future__ import annotations

import csv
import math
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from hpctrain.config.option import class_weights
from hpctrain.errors import UsageError, did_you_mean
from hpctrain.text import brief, listed

HEADER = ["class", "weight"]  # allowed as the first line of a file


def find_class_weights(given: str, classes: Sequence[str], labels: np.ndarray) -> tuple[float, ...]:
    """Return the weight of each class that --class-weights asks for.

    `given` is "balanced", for n / (K n_c) with n_c of the n `labels` in class c of K (as
    scikit-learn defines it), numbers in the order of `classes`, or a CSV file with a line "class
    name,weight" for each class. Raises UsageError.
    """
    setting = f"--class-weights {brief(given)}"
    if given == "balanced":
        counts = np.bincount(labels, minlength=len(classes))
        if empty := [name for name, count in zip(classes, counts, strict=True) if not count]:
            raise UsageError(
                f"{setting}: no training image is of class {listed(empty, 3)}, so its weight would"
                " be infinite: give a number for each class"
            )
        return tuple((len(labels) / (len(classes) * counts)).tolist())
    weights = class_weights(given) or _read_weights(given, setting, classes)
    if len(weights) != len(classes):
        raise UsageError(
            f"{setting}: these are {len(weights)} weights, and the data has {len(classes)} classes:"
            f" {listed(classes)}"
        )
    return weights


def _read_weights(path: str, setting: str, classes: Sequence[str]) -> tuple[float, ...]:
    """Read the weights of a CSV file, in the order of `classes`."""
    found: dict[str, float] = {}
    try:
        with Path(path).open(encoding="utf-8", newline="") as file:
            lines = [[cell.strip() for cell in line] for line in csv.reader(file) if line]
    except FileNotFoundError as error:
        raise UsageError(
            f"{setting}: there is no such file: give balanced, a number for each class such as"
            " 0.2,1, or a CSV file of lines class,weight"
        ) from error
    except OSError as error:
        raise UsageError(f"{setting} cannot be read: {error.strerror}") from error
    except (UnicodeDecodeError, csv.Error) as error:
        raise UsageError(f"{setting} is no CSV file: {error}") from error
    for number, cells in enumerate(lines[lines[:1] == [HEADER] :], start=1):
        if len(cells) != 2 or not 0 < _number(cells[1]) < math.inf:
            raise UsageError(
                f"{setting}: {brief(','.join(cells), 50)!r} (line {number} of the weights) is no"
                " class name,weight with a number above 0"
            )
        if cells[0] not in classes or cells[0] in found:
            what = "stands there twice" if cells[0] in found else "is no class of the data"
            raise UsageError(f"{setting}: {cells[0]!r} {what}{did_you_mean(cells[0], classes)}")
        found[cells[0]] = _number(cells[1])
    if missing := [name for name in classes if name not in found]:
        raise UsageError(f"{setting}: there is no weight for class {listed(missing, 3)}")
    return tuple(found[name] for name in classes)


def _number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        return math.nan
