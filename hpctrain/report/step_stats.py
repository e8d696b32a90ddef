"""Sums over steps: the time of each phase, and advice on speed."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping
from typing import Any

# Thresholds for advice: shares of a step's time; OFTEN is a share of the steps.
DATA, REDUCE, IDLE, OFTEN = 0.1, 0.2, 0.1, 0.5
ENOUGH = 5  # steps, without which there is none: the first ones are slower
WORTH_NARROWING = 1_000_000  # parameters; fewer take longer to round than to send


class Costs:
    """Sums of times over the steps of one launch."""

    def __init__(self) -> None:
        self.may_narrow = self.may_stage = True  # whether to advise --comm-dtype bf16, --stage
        self.crowd = (1, 1)  # ranks and cores of the host with the fewest cores for its ranks
        self._steps = 0
        self._seconds: defaultdict[str, float] = defaultdict(float)
        self._slowest: Counter[int] = Counter()

    def describe(self, facts: Mapping[str, Any]) -> None:
        """Store the facts from the description of a run that the advice depends on."""
        large = facts.get("parameters", 0) >= WORTH_NARROWING
        narrow = facts.get("comm_dtype") == "fp32" and not facts.get("deterministic")
        self.may_narrow = large and narrow
        self.may_stage = not facts.get("staged")
        self.crowd = facts.get("host_ranks", 1), facts.get("host_cores", 1)

    def add(self, seconds: Mapping[str, float], slowest: int | None) -> None:
        """Add one step.

        `seconds` are those of the slowest rank by phase, of the whole step as "total", and as
        "idle" the mean time that a rank waited for the slowest. `slowest` is that rank.
        """
        self._steps += 1
        for phase, value in seconds.items():
            self._seconds[phase] += value
        if slowest is not None:
            self._slowest[slowest] += 1

    def facts(self) -> dict[str, Any]:
        """Return the facts for the record's end; empty if there were no steps.

        These are the mean seconds of a step, the shares of its phases, the rank that was slowest
        most often and in what share of the steps, and lines of advice.
        """
        total = self._seconds["total"]
        if not self._steps or not total > 0:
            return {}
        idle = self._seconds["idle"] / total
        parts = {n: value for n, value in self._seconds.items() if n not in ("idle", "total")}
        whole = max(total, sum(parts.values()))  # times of several ranks may add up to more
        shares = {phase: value / whole for phase, value in parts.items()}
        shares["other"] = max(1 - sum(shares.values()), 0.0)
        found: dict[str, Any] = {"step_seconds": total / self._steps}
        found |= {"shares": shares, "idle": idle}
        if len(self._slowest) > 1:
            rank, times = self._slowest.most_common(1)[0]
            found |= {"slowest_rank": rank, "slowest_share": times / self._steps}
        advice = crowding(*self.crowd)
        if self._steps >= ENOUGH:
            advice += bottleneck(found, self.may_narrow, self.may_stage)
        return {**found, "advice": advice}


def whole_percents(shares: Mapping[str, float]) -> dict[str, int]:
    """Round shares of one whole to integer percentages that add up to 100.

    The largest remainders are rounded up.

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
    """Return advice for a host with more ranks than cores: all times measured there mean little."""
    text = f"{ranks} ranks share {cores} core{'s' if cores > 1 else ''} of a host: start"
    return [f"{text} at most {cores} there"] if ranks > cores else []


def bottleneck(facts: Mapping[str, Any], may_narrow: bool, may_stage: bool) -> list[str]:
    """Return advice on the worst bottleneck of the steps; empty if none exceeds its threshold."""
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
            f"rank {facts.get('slowest_rank')} holds up the others: --worker-load gives it"
            " fewer shards",
        ),
    ]
    weight, text = max(found, key=lambda item: item[0])
    return [text] if weight >= 1 else []
