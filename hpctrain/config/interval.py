"""The interval between two checkpoints: given, or computed from their cost and the MTTF."""

from __future__ import annotations

import math
from typing import NamedTuple

from hpctrain.config.option import MOST_DIGITS, duration
from hpctrain.errors import UsageError
from hpctrain.text import brief

FIRST = 60.0  # seconds before the first checkpoint of an automatic interval


class Interval(NamedTuple):
    """The interval between two checkpoints: a number of steps, or seconds."""

    steps: int = 0
    seconds: float = math.inf
    auto: bool = False
    mttf: float = math.inf  # mean time to failure of the job, in seconds, for an automatic interval

    def follows(self, step: int) -> bool:
        """Whether a checkpoint is due after this step, regardless of the time."""
        return bool(self.steps) and step % self.steps == 0

    def length(self, cost: float, writing: float) -> float:
        """Return the interval in seconds; infinity if it is a number of steps.

        An automatic interval is sqrt(2 cost mttf), which minimizes the time that is lost to
        checkpoints and to steps repeated after failures (Young, "A first order approximation to the
        optimum checkpoint interval", 1974). `cost` is the time in seconds that a checkpoint blocks
        training. `writing` is the time until it is complete, 0 before the first one; the interval
        is never shorter.
        """
        if not self.auto or not writing:
            return self.seconds
        return max(math.sqrt(2 * cost * self.mttf), writing)

    @staticmethod
    def parse(text: str, flag: str = "--checkpoint-every") -> Interval:
        """Parse "500" (steps), a time such as "10m", or "auto". Raises UsageError."""
        if text == "auto":
            return Interval(seconds=FIRST, auto=True)
        if not text.isdecimal():
            return Interval(seconds=duration(text, flag))
        if len(text) > MOST_DIGITS or int(text) < 1:
            raise UsageError(f"{flag} {brief(text, 50)}: give 1 step or more, a time, or auto")
        return Interval(steps=int(text))
