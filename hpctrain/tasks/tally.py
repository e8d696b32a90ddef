"""Tallies: what an evaluation accumulates over the blocks of a split.

A tally measures each block on the device, adds what it measured on the host, and is merged over
ranks at the end. It must be the same whichever rank computed which block: integers are added
exactly, and sums of floats are kept by block and added by math.fsum, in which the order has no
effect.

Only `Tally.merge` needs MPI, which it imports: networks are loaded and used without it.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple, TypeVar

import numpy as np
import torch
from torch import Tensor

from hpctrain.data.split import Bad
from hpctrain.errors import UsageError

if TYPE_CHECKING:
    from rich.table import Table

    from hpctrain.parallel.mpi import Comm

# outputs, inputs and targets of a block -> by figure, the sums of its values and weights
FigureSums = Callable[[Tensor, Tensor, Tensor], dict[str, Tensor]]


class Block(NamedTuple):
    """Samples that pass through the network at once."""

    number: int
    rows: np.ndarray  # (n,), of the split or of the list of files
    targets: np.ndarray | None  # (n, ...), as they are stored; None: not known
    bad: Bad  # rows that cannot be used, and why

    def of_rows(self, chosen: np.ndarray) -> Block:
        """Return the block with the `chosen` rows only, (n,) bool."""
        targets = None if self.targets is None else self.targets[chosen]
        return self._replace(rows=self.rows[chosen], targets=targets)


class Tally(ABC):
    """Something that is accumulated over the blocks of an evaluation."""

    #: Whether its figures are those of --metric.
    is_metric: ClassVar[bool] = False
    #: The worst answers that it keeps, the worst first.
    worst: Sequence[Any] = ()

    @abstractmethod
    def measure(self, outputs: Tensor, inputs: Tensor, targets: Tensor) -> dict[str, Tensor]:
        """Return what `add` needs of a block, computed on the device; it should be small.

        `outputs` are the network's answers to `inputs` (n, C, H, W).
        """

    @abstractmethod
    def add(self, block: Block, measured: Mapping[str, np.ndarray]) -> None:
        """Add what was measured of a block."""

    def part(self) -> Any:
        """Return what `merge` needs of this rank: it is pickled, and should be small."""
        return None

    @abstractmethod
    def merge(self, parts: Sequence[Any], comm: Comm) -> None:
        """Let the tally of each rank be that of all blocks, by the `part` of each. Collective."""

    def figures(self) -> dict[str, float | None]:
        """Return the figures that follow from it, by name."""
        return {}

    def tables(self) -> Iterator[Table]:
        """Yield tables for the user."""
        yield from ()

    def as_json(self) -> dict[str, Any]:
        """Return what --output holds of it, beside the figures."""
        return {}


AnyTally = TypeVar("AnyTally", bound=Tally)


def find_tally(tallies: Iterable[Tally], kind: type[AnyTally]) -> AnyTally | None:
    """Return the first tally of a class; None if there is none."""
    return next((tally for tally in tallies if isinstance(tally, kind)), None)


class Means(Tally):
    """Figures that are quotients of two sums over samples: of values, and of their weights."""

    def __init__(self, sums: FigureSums) -> None:
        """`sums` returns the two sums of a block by figure, (2,) float64."""
        self._sums = sums
        self._blocks: list[dict[str, list[float]]] = []

    def measure(self, outputs: Tensor, inputs: Tensor, targets: Tensor) -> dict[str, Tensor]:
        return self._sums(outputs, inputs, targets)

    def add(self, block: Block, measured: Mapping[str, np.ndarray]) -> None:
        self._blocks.append({name: sums.tolist() for name, sums in measured.items()})

    def part(self) -> list[dict[str, list[float]]]:
        return self._blocks

    def merge(self, parts: Sequence[Any], comm: Comm) -> None:
        self._blocks = [sums for blocks in parts for sums in blocks]

    def figures(self) -> dict[str, float | None]:
        figures: dict[str, float | None] = {}
        for name in self._blocks[0]:
            values = math.fsum(block[name][0] for block in self._blocks)
            weights = math.fsum(block[name][1] for block in self._blocks)
            figures[name] = values / weights if weights else math.nan
        return figures


class MetricFigures(Means):
    """The figures of a function of --metric."""

    is_metric = True

    def __init__(self, sums: FigureSums, name: str) -> None:
        """`name` is that of the setting, for errors."""
        super().__init__(sums)
        self._name = name

    def merge(self, parts: Sequence[Any], comm: Comm) -> None:
        """Raises UsageError on all ranks if a block has other figures than the first one."""
        from hpctrain.parallel.mpi import agreed

        super().merge(parts, comm)
        if any(block.keys() != self._blocks[0].keys() for block in self._blocks):
            text = "did not give the same figures for each part of the split"
            raise agreed(UsageError(f"{self._name} {text}"))


def two_sums(values: Tensor, weights: Tensor | int) -> Tensor:
    """Return sums of values and of weights as one tensor (2,) float64."""
    if isinstance(weights, int):
        weights = values.new_full((), weights)
    return torch.stack([values.double(), weights.double()])
