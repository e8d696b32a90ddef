"""How the time of the steps of a launch is spent, and advice on what would make them faster."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from typing import Any

ENOUGH = 5  # steps, without which there is no advice, nor a slow rank: the first are slower
# Shares of a step from which there is advice; from WAIT on, a slow rank is named.
DATA = 0.2
REDUCE = 0.2
IDLE = 0.1
WAIT = 0.05
WORTH_NARROWING = 1_000_000  # parameters; fewer take longer to round than to send


def shares_text(shares: Mapping[str, float]) -> str:
    """List shares of one whole as integer percentages that add up to 100.

    The largest remainders are rounded up.

    >>> shares_text({"data": 1 / 3, "compute": 1 / 3, "other": 1 / 3})
    'data 34 %, compute 33 %, other 33 %'
    """
    whole = sum(shares.values()) or 1.0
    exact = {name: 100 * share / whole for name, share in shares.items()}
    percentages = {name: int(value) for name, value in exact.items()}
    rest = round(sum(exact.values())) - sum(percentages.values())
    by_remainder = sorted(exact, key=lambda name: percentages[name] - exact[name])
    for name in by_remainder[:rest]:
        percentages[name] += 1
    return ", ".join(f"{name} {value} %" for name, value in percentages.items())


def seconds_left(seconds: float, steps: int, left: int) -> float:
    """Return the seconds that `left` steps take at the pace of `steps` in `seconds`; at least 0.

    >>> seconds_left(6.0, 3, 10)
    20.0
    """
    pace = seconds / steps
    return max(left * pace, 0.0)  # clocks may be set back


class Costs:
    """Sums of times over the steps of one launch, and advice on what would make them faster."""

    def __init__(self, facts: Mapping[str, Any] | None = None) -> None:
        """The advice depends on `facts`, the description of the run."""
        self._run: Mapping[str, Any] = facts or {}
        self._steps = 0
        self._rows = 0
        self._seconds: Counter[str] = Counter()
        self._slowest: Counter[int] = Counter()

    def add(self, step: Mapping[str, Any]) -> None:
        """Add one step, by its record."""
        self._steps += 1
        self._rows += step.get("rows") or 0
        seconds = step.get("seconds") or {}
        self._seconds.update({phase: value or 0.0 for phase, value in seconds.items()})
        rank = step.get("slowest_rank")
        if rank is not None:
            self._slowest[rank] += 1

    def facts(self) -> dict[str, Any]:
        """Return the facts for the record's end; empty if there were no steps.

        These are the mean seconds of a step, the speed, the shares of the phases, lines of advice,
        and the slowest rank with its share of the steps, if the others wait for it `WAIT` of the
        time, and in all of at least `ENOUGH` steps, or in more than for one of two equal ranks by
        chance (one half plus three standard deviations, 0.5 / sqrt(steps) each).
        """
        total = self._seconds["total"]
        steps = self._steps
        if not 0 < total < math.inf:
            return {}
        shares = self._shares()
        facts: dict[str, Any] = {
            "step_seconds": total / steps,
            "shares": shares,
            "idle": self._seconds["idle"] / total,
            "images_per_second": self._rows / total,
        }
        if self._is_one_slow():
            [(rank, times)] = self._slowest.most_common(1)
            facts["slowest_rank"] = rank
            facts["slowest_share"] = times / steps
        facts["advice"] = self._advice(shares)
        return facts

    def _shares(self) -> dict[str, float]:
        """Return the share of each phase; what is left is that of "other"."""
        phases = dict(self._seconds)
        total = phases.pop("total")
        phases.pop("idle", None)
        whole = max(total, sum(phases.values()))  # times of several ranks may add up to more
        shares = {phase: value / whole for phase, value in phases.items()}
        shares["other"] = max(1 - sum(shares.values()), 0.0)
        return shares

    def _is_one_slow(self) -> bool:
        """Whether one rank is the slowest more often than by chance, and the others wait for it."""
        steps = self._steps
        if not self._slowest or steps < ENOUGH:
            return False
        times = max(self._slowest.values())
        often = min(0.5 + 1.5 / steps**0.5, 1.0)
        idle = self._seconds["idle"] / self._seconds["total"]
        return idle >= WAIT and times / steps >= often

    def _advice(self, shares: Mapping[str, float]) -> list[str]:
        """Return a line of advice on what costs most, if it costs enough."""
        if self._steps < ENOUGH:
            return []
        run = self._run
        data = "data-bound: keep the pack on a local disk (--stage) or use more cores"
        if run.get("staged"):
            data = "data-bound: use more cores"
        reduce = "communication-bound: raise --batch-per-rank"
        is_large = run.get("parameters", 0) >= WORTH_NARROWING
        if is_large and run.get("comm_dtype") == "fp32" and not run.get("deterministic"):
            reduce += " or use --comm-dtype bf16"
        costs = [
            (shares.get("data", 0) / DATA, data),
            (shares.get("reduce", 0) / REDUCE, reduce),
        ]
        if self._is_one_slow():
            [(rank, _)] = self._slowest.most_common(1)
            text = f"rank {rank} holds up the others: --worker-load gives it fewer shards"
            idle = self._seconds["idle"] / self._seconds["total"]
            costs.append((idle / IDLE, text))
        weight, advice = max(costs)
        return [advice] if weight >= 1 else []
