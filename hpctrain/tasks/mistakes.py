"""The most confident wrong answers of a classifier."""

from __future__ import annotations

import heapq
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from torch import Tensor

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


class Mistakes(Tally):
    """The wrong answers of the largest probability, largest first; of equal ones the first rows."""

    def __init__(self, most: int) -> None:
        self._most = most
        self.worst: list[Answer] = []
        self.total = 0  # wrong answers, of which `worst` are the most confident

    def measure(self, outputs: Tensor, inputs: Tensor, targets: Tensor) -> dict[str, Tensor]:
        predicted = outputs.argmax(1)
        probabilities = outputs.softmax(1).gather(1, predicted[:, None]).squeeze(1)
        return {"predicted": predicted, "probabilities": probabilities.double()}

    def add(self, block: Block, measured: Mapping[str, np.ndarray]) -> None:
        wrong = measured["predicted"] != block.targets
        self.total += int(wrong.sum())
        self._keep(answers_of(block, measured["predicted"], measured["probabilities"], wrong))

    def part(self) -> tuple[int, list[Answer]]:
        return self.total, self.worst

    def merge(self, parts: Sequence[Any], comm: Comm) -> None:
        self.total = sum(total for total, _ in parts)
        self.worst = []
        self._keep([answer for _, answers in parts for answer in answers])

    def _keep(self, answers: list[Answer]) -> None:
        def order(answer: Answer) -> tuple[float, int]:
            return -answer.probability, answer.row

        self.worst = heapq.nsmallest(self._most, [*self.worst, *answers], key=order)
