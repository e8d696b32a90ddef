"""What is aggregated over steps: curves of bounded size; where the time of a run's steps went, and
what would help.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

# Shares of a step from which on something is reported.
DATA, REDUCE, IDLE, OFTEN = 0.1, 0.2, 0.1, 0.5
WORTH_NARROWING = 1_000_000  # parameters: fewer are sent faster than they are rounded
MOST_POINTS = 800  # of a curve; where there are more, two neighbours become one


@dataclass(frozen=True, slots=True)
class CurvePoint:
    """Some neighbouring steps: the mean of their numbers and values, and the values' range."""

    step: float
    mean: float
    min: float
    max: float
    count: int  # of values

    def merged(self, other: CurvePoint) -> CurvePoint:
        """Both in one."""
        count = self.count + other.count
        return CurvePoint(
            (self.step * self.count + other.step * other.count) / count,
            (self.mean * self.count + other.mean * other.count) / count,
            min(self.min, other.min),
            max(self.max, other.max),
            count,
        )


class Curve:
    """Values by step, added in any number and kept as at most `MOST_POINTS` points, in order."""

    def __init__(self) -> None:
        self.points: list[CurvePoint] = []  # in order of steps
        self._width = 1  # steps that share a point

    def add(self, step: int, value: float) -> None:
        """Add one value. Later steps are dropped: a run that went back records them again."""
        while self.points and self.points[-1].step > step:
            self.points.pop()
        _append(self.points, CurvePoint(step, value, value, value, 1), self._width)
        while len(self.points) > MOST_POINTS:
            self._width *= 2
            merged: list[CurvePoint] = []
            for point in self.points:
                _append(merged, point, self._width)
            self.points = merged


def _append(points: list[CurvePoint], new: CurvePoint, width: int) -> None:
    """Add a point behind others, or merge it into the last where both share their interval."""
    if points and points[-1].step // width == new.step // width:
        points[-1] = points[-1].merged(new)
    else:
        points.append(new)


class Costs:
    """Sums over the steps of one launch."""

    def __init__(self) -> None:
        self.may_narrow = self.may_stage = True  # whether these are left to be tried
        self.crowd = (1, 1)  # ranks and cores of the host with the fewest cores for its ranks
        self._steps = 0
        self._seconds: defaultdict[str, float] = defaultdict(float)
        self._slowest: Counter[int] = Counter()

    def describe(self, facts: Mapping[str, Any]) -> None:
        """Take what the advice depends on from the description of a run."""
        large = facts.get("parameters", 0) >= WORTH_NARROWING
        self.may_narrow = (
            large
            and facts.get("comm_dtype", facts.get("wire")) == "fp32"
            and not facts.get("deterministic")
        )
        self.may_stage = not facts.get("staged")
        self.crowd = facts.get("host_ranks", 1), facts.get("host_cores", 1)

    def add(self, seconds: Mapping[str, float], slowest: int | None) -> None:
        """One step: seconds of the slowest rank by phase, of the whole step as "total", and as
        "idle" those that ranks waited for the slowest, in the mean.
        """
        self._steps += 1
        for phase, value in seconds.items():
            self._seconds[phase] += value
        if slowest is not None:
            self._slowest[slowest] += 1

    def facts(self) -> dict[str, Any]:
        """For the end of the record: mean seconds of a step, shares by phase, the rank that was
        slowest most often and how often, lines of advice. Empty without steps.
        """
        total = self._seconds["total"]
        if not self._steps or not total > 0:
            return {}
        idle = self._seconds["idle"] / total
        parts = {n: value for n, value in self._seconds.items() if n not in ("idle", "total")}
        whole = max(total, sum(parts.values()))  # clocks of several ranks: they may exceed it
        shares = {phase: value / whole for phase, value in parts.items()}
        shares["other"] = max(1 - sum(shares.values()), 0.0)
        found: dict[str, Any] = {"step_seconds": total / self._steps}
        found |= {"shares": shares, "idle": idle}
        if len(self._slowest) > 1:
            rank, times = self._slowest.most_common(1)[0]
            found |= {"slowest_rank": rank, "slowest_share": times / self._steps}
        crowded = crowding(*self.crowd)
        return {**found, "advice": crowded + bottleneck(found, self.may_narrow, self.may_stage)}


def whole_percents(shares: Mapping[str, float]) -> dict[str, int]:
    """Shares of one whole in per cent: whole numbers that add up to 100 (the largest remainders
    are rounded up).

    >>> whole_percents({"data": 1 / 3, "compute": 1 / 3, "other": 1 / 3})
    {'data': 34, 'compute': 33, 'other': 33}
    """
    whole = sum(shares.values())
    exact = {name: 100 * share / whole if whole > 0 else 0.0 for name, share in shares.items()}
    found = {name: int(value) for name, value in exact.items()}
    rest = 100 - sum(found.values()) if whole > 0 else 0
    for name in sorted(exact, key=lambda name: found[name] - exact[name])[:rest]:
        found[name] += 1
    return found


def crowding(ranks: int, cores: int) -> list[str]:
    """What to say of more ranks than cores: then all other times tell little."""
    text = f"{ranks} ranks share {cores} core{'s' if cores > 1 else ''} of a host: start"
    return [f"{text} at most {cores} there"] if ranks > cores else []


def bottleneck(facts: Mapping[str, Any], may_narrow: bool, may_stage: bool) -> list[str]:
    """What holds up the steps most, and what to do about it; nothing where that is computing."""
    shares, idle = facts["shares"], facts["idle"]
    often = facts.get("slowest_share", 0.0) >= OFTEN
    found = [
        (
            shares.get("data", 0.0) / DATA,
            "data-bound: "
            + ("keep the pack on a local disk (--stage) or " if may_stage else "")
            + "use more cores",
        ),
        (
            shares.get("reduce", 0.0) / REDUCE,
            "communication-bound: raise --batch-per-rank"
            + (" or use --comm-dtype bf16" if may_narrow else ""),
        ),
        (
            idle / IDLE if often else 0.0,
            f"rank {facts.get('slowest_rank')} holds up the others: --worker-load auto gives it"
            " fewer shards",
        ),
    ]
    weight, text = max(found, key=lambda item: item[0])
    return [text] if weight >= 1 else []
