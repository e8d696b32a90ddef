"""The interval between two validations or two checkpoints, with its unit."""

from __future__ import annotations

import math
import re
from typing import NamedTuple

from hpctrain.config.option import MOST_DIGITS, duration
from hpctrain.errors import UsageError
from hpctrain.text import brief

TIME = r"\d+(\.\d+)?[smh]|\d+:\d\d:\d\d"


class Interval(NamedTuple):
    """An interval in epochs, steps or seconds; nothing is due before the end without any."""

    epochs: int = 0
    steps: int = 0
    seconds: float = math.inf

    def follows(self, step: int, steps_per_epoch: int) -> bool:
        """Whether something is due after this step, regardless of the time."""
        every = self.steps or self.epochs * steps_per_epoch
        return every > 0 and step % every == 0


def checkpoint_interval(text: str, flag: str = "--checkpoint-every") -> Interval:
    """Parse "2epochs", "500steps", a time such as "10m", or "0". Raises UsageError."""
    if re.fullmatch(TIME, text):
        return Interval(seconds=duration(text, flag))
    return _count(text, flag, ", 500steps or a time (90s, 10m, 1h)")


def validation_interval(text: str, flag: str = "--validate-every") -> Interval:
    """Parse "2epochs", "500steps" or "0". Raises UsageError."""
    return _count(text, flag, " or 500steps")


def _count(text: str, flag: str, others: str) -> Interval:
    if text == "0":
        return Interval()
    found = re.fullmatch(rf"([0-9]{{1,{MOST_DIGITS}}})(epoch|step)s?", text)
    if not found or int(found[1]) == 0:
        raise UsageError(
            f"{flag} {brief(text, 50)}: give a number with its unit, as in 2epochs{others};"
            " 0 = only at the end"
        )
    number = int(found[1])
    return Interval(epochs=number) if found[2] == "epoch" else Interval(steps=number)
