"""The interval between two checkpoints."""

from __future__ import annotations

import math
from typing import NamedTuple

from hpctrain.config.option import MOST_DIGITS, duration
from hpctrain.errors import UsageError
from hpctrain.text import brief


class Interval(NamedTuple):
    """The interval between two checkpoints: a number of steps, or seconds."""

    steps: int = 0
    seconds: float = math.inf

    def follows(self, step: int) -> bool:
        """Whether a checkpoint is due after this step, regardless of the time."""
        return bool(self.steps) and step % self.steps == 0

    @staticmethod
    def parse(text: str, flag: str = "--checkpoint-every") -> Interval:
        """Parse "500" (steps) or a time such as "10m". Raises UsageError."""
        if not text.isdecimal():
            return Interval(seconds=duration(text, flag))
        if len(text) > MOST_DIGITS or int(text) < 1:
            raise UsageError(f"{flag} {brief(text, 50)}: give 1 step or more, or a time")
        return Interval(steps=int(text))
