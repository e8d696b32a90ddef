"""What a row of ``scripts/gpu_check`` found: one line of the table each."""

from __future__ import annotations

import traceback
from collections.abc import Callable
from typing import NamedTuple

from hpctrain.bench.harness import number_text
from hpctrain.errors import UsageError, first_line

OK, MISSED, FAILED, NOT_RUN = "ok", "MISSED", "FAILED", "not run"


class Result(NamedTuple):
    """One line: what was looked at, what was found, what was wanted."""

    what: str
    verdict: str  # OK, MISSED, FAILED (an error ended it) or NOT_RUN
    value: str = ""
    target: str = ""
    n: int | None = None  # measurements behind the value
    remark: str = ""  # why it was not run, or what one must know
    number: float | None = None  # the value unrounded, where it is one


def judged(
    what: str,
    number: float,
    unit: str = "",
    least: float | None = None,
    most: float | None = None,
    n: int | None = None,
    remark: str = "",
) -> Result:
    """A number between `least` and `most`, both inclusive; without them it is only told."""
    good = (least is None or number >= least) and (most is None or number <= most)
    bounds = [f">= {_text(least)}"] if least is not None else []
    bounds += [f"<= {_text(most)}"] if most is not None else []
    value = f"{_text(number)} {unit}".strip()
    return Result(what, OK if good else MISSED, value, ", ".join(bounds), n, remark, number)


def shown(
    what: str, good: bool, value: str, target: str, n: int | None = None, remark: str = ""
) -> Result:
    """A fact that is `good` or not."""
    return Result(what, OK if good else MISSED, value, target, n, remark)


def not_run(what: str, reason: str) -> Result:
    """A line that only says why there is none."""
    return Result(what, NOT_RUN, remark=reason)


def attempt(what: str, measure: Callable[[], Result]) -> Result:
    """What `measure` gives. What cannot be asked for here is not run; any other error has failed,
    and its traceback goes to the log.
    """
    try:
        return measure()
    except UsageError as error:
        return not_run(what, str(error))
    except Exception as error:
        traceback.print_exc()
        return Result(what, FAILED, remark=f"{type(error).__name__}: {first_line(error)}")


def _text(number: float) -> str:
    """As in the other benchmarks; small numbers with their exponent."""
    if number and abs(number) < 0.01:
        return f"{number:.1e}"
    return f"{number:.4f}".rstrip("0").rstrip(".") if abs(number) < 10 else number_text(number)
