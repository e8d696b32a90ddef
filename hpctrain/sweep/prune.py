"""``--prune``: successive halving by Optuna over the validations of the networks.

At 1, 2, 4, 8, ... validations a network is compared with all that came so far; it goes on if it is
in the better half (asynchronous successive halving, Li et al. 2020, arXiv:1810.05934).
"""

from __future__ import annotations

import importlib.util
import math
from collections.abc import Sequence
from typing import Any

from hpctrain.errors import UsageError
from hpctrain.report.history import Metrics


def require_optuna() -> None:
    """Raise UsageError where Optuna is missing."""
    if importlib.util.find_spec("optuna") is None:
        raise UsageError("--prune needs its package: pip install 'hpctrain[sweep]'")


class Pruner:
    """Knows the validations of all networks of a sweep, and which network is weak."""

    def __init__(self, accurate: bool) -> None:
        """Networks are compared by accuracy, else by loss."""
        import optuna

        optuna.logging.set_verbosity(optuna.logging.WARNING)
        halving = optuna.pruners.SuccessiveHalvingPruner(min_resource=1, reduction_factor=2)
        self._accurate = accurate
        self._study = optuna.create_study(direction="maximize", pruner=halving)
        self._trials: dict[str, Any] = {}
        self._told: dict[str, int] = {}

    def weak(self, name: str, validations: Sequence[Metrics]) -> bool:
        """Tell all validations of a network so far; whether it should end."""
        trial = self._trials.setdefault(name, None) or self._study.ask()
        self._trials[name] = trial
        verdict = False
        for number in range(self._told.get(name, 0), len(validations)):
            score = validations[number].score(self._accurate)
            if math.isfinite(score):
                trial.report(score, number + 1)
                verdict = bool(trial.should_prune()) or verdict
        self._told[name] = len(validations)
        return verdict
