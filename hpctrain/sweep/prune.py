"""``--prune``: successive halving by Optuna over the validations of the networks.

At 1, 2, 4, 8, ... validations a network is compared with all that came so far; it continues if it
is in the better half (asynchronous successive halving, Li et al. 2020, arXiv:1810.05934).
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

    def __init__(self, by_accuracy: bool) -> None:
        """Networks are compared by accuracy, else by loss."""
        import optuna

        optuna.logging.set_verbosity(optuna.logging.WARNING)
        halving = optuna.pruners.SuccessiveHalvingPruner(min_resource=1, reduction_factor=2)
        self._by_accuracy = by_accuracy
        self._study = optuna.create_study(direction="maximize", pruner=halving)
        self._trials: dict[str, Any] = {}  # by network
        self._reported: dict[str, int] = {}  # validations

    def is_weak(self, name: str, validations: Sequence[Metrics]) -> bool:
        """Report all validations of a network so far; whether it should end because of one that was
        not reported before.
        """
        if name not in self._trials:
            self._trials[name] = self._study.ask()
        trial, is_weak = self._trials[name], False
        for number in range(self._reported.get(name, 0), len(validations)):
            score = validations[number].score(self._by_accuracy)
            if math.isfinite(score):
                trial.report(score, number + 1)
                is_weak |= bool(trial.should_prune())
        self._reported[name] = len(validations)
        return is_weak
