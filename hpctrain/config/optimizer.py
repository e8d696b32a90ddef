"""What is wrong with the settings of optimizer, schedule and loss."""

from __future__ import annotations

import math

from hpctrain.config.train import DEFAULT_LEARNING_RATES, Config
from hpctrain.errors import UsageError

SCHEDULES = ("constant", "cosine", "step")


def validate_optimizer(config: Config) -> None:
    """UsageError in one line for a setting of optimizer, schedule or loss out of its range."""
    if config.optimizer and config.optimizer not in DEFAULT_LEARNING_RATES:
        raise UsageError(
            f"--optimizer {config.optimizer}: there are {', '.join(DEFAULT_LEARNING_RATES)}"
        )
    if config.schedule not in SCHEDULES:
        raise UsageError(f"--schedule {config.schedule}: there are {', '.join(SCHEDULES)}")
    infinity = math.inf
    ranges = (  # flag, value, whether it is good, what is good
        ("--lr", config.lr, config.lr is None or 0 < config.lr < infinity, "above 0"),
        ("--momentum", config.momentum, 0 <= config.momentum < 1, "in [0, 1)"),
        ("--weight-decay", config.weight_decay, 0 <= config.weight_decay < infinity, "0 or more"),
        ("--label-smoothing", config.label_smoothing, 0 <= config.label_smoothing < 1, "in [0, 1)"),
        (
            "--clip-norm",
            config.clip_norm,
            config.clip_norm is None or 0 < config.clip_norm < infinity,
            "above 0",
        ),
        (
            "--warmup-epochs",
            config.warmup_epochs,
            config.warmup_epochs is None or 0 <= config.warmup_epochs < infinity,
            "0 or more",
        ),
        ("--step-epochs", config.step_epochs, config.step_epochs >= 1, "1 or more"),
        ("--step-factor", config.step_factor, 0 < config.step_factor <= 1, "in (0, 1]"),
    )
    for flag, value, good, wanted in ranges:
        if not good:
            raise UsageError(f"{flag} is {value}; it must be a finite number {wanted}")
