"""Where the time of a run's steps went, and what would help."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping
from typing import Any

# Shares of a step from which on something is worth a word.
DATA, REDUCE, IDLE, OFTEN = 0.1, 0.2, 0.1, 0.5
WORTH_NARROWING = 1_000_000  # parameters: less is sent faster than it is rounded


class Costs:
    """Sums over the steps of one launch."""

    def __init__(self) -> None:
        self.may_narrow = self.may_stage = True  # whether these are left to be tried
        self._steps = 0
        self._seconds: defaultdict[str, float] = defaultdict(float)
        self._slowest: Counter[int] = Counter()

    def know(self, facts: Mapping[str, Any]) -> None:
        """Of the run, for the advice."""
        large = facts.get("parameters", 0) >= WORTH_NARROWING
        self.may_narrow = large and facts.get("wire") == "fp32" and not facts.get("deterministic")
        self.may_stage = not facts.get("staged")

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
        shares = {phase: value / total for phase, value in self._seconds.items()}
        idle = shares.pop("idle", 0.0)
        del shares["total"]
        shares["other"] = max(1 - sum(shares.values()), 0.0)
        found: dict[str, Any] = {"step_seconds": total / self._steps}
        found |= {"shares": shares, "idle": idle}
        if len(self._slowest) > 1:
            rank, times = self._slowest.most_common(1)[0]
            found |= {"slowest_rank": rank, "slowest_share": times / self._steps}
        return {**found, "advice": advice(found, self.may_narrow, self.may_stage)}


def advice(facts: Mapping[str, Any], may_narrow: bool = True, may_stage: bool = True) -> list[str]:
    """What would make steps faster, most first."""
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
            + (" or use --wire bf16" if may_narrow else ""),
        ),
        (
            idle / IDLE if often else 0.0,
            f"rank {facts.get('slowest_rank')} holds up the others: --worker-load auto gives it"
            " fewer shards",
        ),
    ]
    return [text for weight, text in sorted(found, key=lambda item: -item[0]) if weight >= 1]
