"""The most confident wrong answers, for one class of an image or for several."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from torch import Tensor

from hpctrain.data.targets import UNKNOWN
from hpctrain.tasks.tally import Block, Tally

if TYPE_CHECKING:
    from hpctrain.parallel.mpi import Comm


class Answer(NamedTuple):
    """The network's answer to one image."""

    row: int  # in the split, or in the list of files
    label: int | None  # true class, if known
    prediction: int  # class with the largest probability
    probability: float


def answers_of(
    block: Block, predictions: np.ndarray, probabilities: np.ndarray, chosen: np.ndarray
) -> list[Answer]:
    """Return the answers to the `chosen` images of a block, of those to all, (n,) each."""
    labels = block.targets
    if labels is None:
        labels = np.full(len(block.rows), None)
    columns = block.rows, labels, predictions, probabilities
    return [*map(Answer, *(column[chosen].tolist() for column in columns))]


class Worst(Tally):
    """Wrong answers of the largest probability, largest first; of equal ones the first rows."""

    def __init__(self, most: int) -> None:
        self._most = most
        self.worst: list[Any] = []
        self.total = 0  # wrong answers, of which `worst` are the most confident

    def part(self) -> tuple[int, list[Any]]:
        return self.total, self.worst

    def merge(self, parts: Sequence[Any], comm: Comm) -> None:
        self.total = sum(total for total, _ in parts)
        self.worst = []
        self._keep([answer for _, answers in parts for answer in answers])

    def _keep(self, answers: Sequence[Any]) -> None:
        def order(answer: Any) -> tuple[float, int]:
            return -answer.probability, answer.row

        self.worst = heapq.nsmallest(self._most, [*self.worst, *answers], key=order)


class Mistakes(Worst):
    """The wrong answers, each a class: a list of `Answer`."""

    def measure(self, outputs: Tensor, inputs: Tensor, targets: Tensor) -> dict[str, Tensor]:
        predicted = outputs.argmax(1)
        probabilities = outputs.softmax(1).gather(1, predicted[:, None]).squeeze(1)
        return {"predicted": predicted, "probabilities": probabilities.double()}

    def add(self, block: Block, measured: Mapping[str, np.ndarray]) -> None:
        wrong = measured["predicted"] != block.targets
        self.total += int(wrong.sum())
        self._keep(answers_of(block, measured["predicted"], measured["probabilities"], wrong))


class Entry(NamedTuple):
    """The network's answer whether an image is of a class."""

    row: int
    number: int  # of the class
    is_present: bool  # answered; the truth is the contrary
    probability: float  # of the answer


class WrongEntries(Worst):
    """The wrong answers, each whether an image is of one of several classes: a list of `Entry`."""

    def __init__(self, is_present: Callable[[np.ndarray], np.ndarray], most: int) -> None:
        """`is_present` says which probabilities (n, K) are answers that a class is present."""
        super().__init__(most)
        self._is_present = is_present

    def measure(self, outputs: Tensor, inputs: Tensor, targets: Tensor) -> dict[str, Tensor]:
        return {"probabilities": outputs.sigmoid().float()}

    def add(self, block: Block, measured: Mapping[str, np.ndarray]) -> None:
        assert block.targets is not None
        probabilities = measured["probabilities"]
        answered = self._is_present(probabilities)
        wrong = (answered != block.targets) & (block.targets != UNKNOWN)
        self.total += int(wrong.sum())
        places, numbers = np.nonzero(wrong)
        chosen = answered[places, numbers]
        of_class = probabilities[places, numbers].astype(np.float64)
        confidence = np.where(chosen, of_class, 1 - of_class)
        order = np.argsort(-confidence, kind="stable")[: self._most]
        columns = block.rows[places], numbers, chosen, confidence
        self._keep([*map(Entry, *(column[order].tolist() for column in columns))])
