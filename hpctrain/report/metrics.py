"""Figures over a split, and which of two is the better one."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from hpctrain.report.record import fields_marked, value_in
from hpctrain.tasks.facts import Direction
from hpctrain.text import short_number

#: Figures from 0 to 1, which are shown in percent.
PERCENT = fields_marked("step", "is_share")


class Figure(NamedTuple):
    """A figure over a split."""

    name: str
    value: float | None = None  # None: unknown or not finite
    direction: Direction = "min"  # in which it is better

    @property
    def score(self) -> float:
        """A score, larger is better; minus infinity if the value is unknown."""
        if self.value is None:
            return -math.inf
        return self.value if self.direction == "max" else -self.value

    @property
    def text(self) -> str:
        """The value as text; empty if it is unknown."""
        if self.value is not None and self.name in PERCENT:
            return f"{100 * self.value:.2f} %"
        return short_number(self.value)


@dataclass(frozen=True)
class Metrics:
    """The figures of a run over a split; the first one ranks runs."""

    by_name: Mapping[str, Figure] = field(default_factory=dict)

    def __getitem__(self, name: str) -> Figure:
        """Return a figure; its value is None if it is unknown."""
        return self.by_name.get(name, Figure(name))

    @property
    def loss(self) -> float | None:
        """The mean loss; None if it is unknown or not finite."""
        return self["loss"].value

    @property
    def accuracy(self) -> float | None:
        """The share of correct answers; None if it is unknown."""
        return self["accuracy"].value

    @property
    def values(self) -> dict[str, float | None]:
        """The values by name."""
        return {name: figure.value for name, figure in self.by_name.items()}

    @property
    def first_known(self) -> Figure:
        """The first figure that is known; if none is, the loss."""
        for figure in self.by_name.values():
            if figure.value is not None:
                return figure
        return self["loss"]


UNKNOWN = Metrics()


def metrics_of(record: Mapping[str, Any], directions: Mapping[str, Direction]) -> Metrics:
    """Return the figures that `directions` names, with their values in a record."""
    return Metrics(
        {name: Figure(name, value_in(record, name), better) for name, better in directions.items()}
    )
