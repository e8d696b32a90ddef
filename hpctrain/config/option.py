"""An option: a field of a frozen dataclass that is both a flag and a TOML key.

The field holds everything about the option: default, help, group, choices and the check of its
value. ``parse.py`` builds the parser from it and runs the checks.
"""

from __future__ import annotations

import dataclasses
import json
import math
import re
from collections.abc import Callable
from fractions import Fraction
from typing import Any

from hpctrain.errors import UsageError
from hpctrain.text import brief

LONGEST_NAME = 200  # bytes
LONGEST_DURATION = 10 * 365 * 86400.0  # seconds that timers accept
MOST_DIGITS = 15  # of a number of steps, hours or folds
MAX_SIDE = 2**14  # pixels, of a decoded image
TRUST_CODE = "import functions of your own, package.module:function, that a file names"


def option(
    default: Any,
    help: str,
    group: str,
    check: Callable[[Any, str], object] | None = None,
    choices: tuple[str, ...] = (),
    positional: bool = False,
) -> Any:
    """Return a dataclass field that is also an option.

    `check` is called with the value, unless it is None, and the flag. It raises UsageError for an
    invalid value.
    """
    metadata = dict(help=help, group=group, check=check, choices=choices, positional=positional)
    return dataclasses.field(default=default, metadata=metadata)


def flag_of(name: str) -> str:
    """Return the flag of a setting."""
    return "--" + name.replace("_", "-")


@dataclasses.dataclass(frozen=True)
class Bounds:
    """Check that a number is in an interval; `ends` are its brackets, "[)" as in "[0, 1)"."""

    least: float
    most: float = math.inf
    ends: str = "[)"

    def __call__(self, value: float, flag: str) -> None:
        above = value >= self.least if self.ends[0] == "[" else value > self.least
        below = value <= self.most if self.ends[1] == "]" else value < self.most
        if not (above and below):
            raise UsageError(f"{flag} {brief(value)}: give {self}")

    def __str__(self) -> str:
        if self.most < math.inf:
            return f"a number in {self.ends[0]}{self.least:g}, {self.most:g}{self.ends[1]}"
        return (
            f"{self.least:g} or more" if self.ends[0] == "[" else f"a number above {self.least:g}"
        )


AT_LEAST_0, AT_LEAST_1, POSITIVE = Bounds(0), Bounds(1), Bounds(0, ends="()")


def check_folder_name(name: str, flag: str) -> None:
    """Raise UsageError if `name` cannot be the name of a folder in --runs-dir."""
    if (
        name in ("", ".", "..")
        or "/" in name
        or not name.isprintable()
        or len(name.encode()) > LONGEST_NAME
    ):
        raise UsageError(
            f"{flag} {name!r}: give the name of a folder in --runs-dir, of at most"
            f" {LONGEST_NAME} bytes and without /"
        )


def check_file_name(name: str, flag: str) -> None:
    """Raise UsageError if the name is empty."""
    if not name:
        raise UsageError(f"{flag} '': name a file")


def duration(text: str, flag: str) -> float:
    """Parse "90s", "10m", "2h", "H:MM:SS" or minutes without unit to seconds. Raises UsageError."""
    unit = re.fullmatch(r"(\d+(?:\.\d+)?)([smh]?)", text)
    clock = re.fullmatch(rf"(\d{{1,{MOST_DIGITS}}}):(\d\d):(\d\d)", text)
    if unit:
        seconds = float(unit[1]) * {"s": 1, "m": 60, "": 60, "h": 3600}[unit[2]]
    elif clock:
        seconds = 3600.0 * int(clock[1]) + 60 * int(clock[2]) + int(clock[3])
    else:
        seconds = 0.0
    if not 0 < seconds <= LONGEST_DURATION:
        raise UsageError(f"{flag} {text}: give a time, such as 30m, 90s or 2:30:00")
    return seconds


def byte_count(text: str, flag: str) -> int:
    """Parse "256M", "1.5G", "64KiB" or "4096" to bytes. K, M, G and T are 2^10 to 2^40.

    Raises UsageError.
    """
    found = re.fullmatch(r"(\d{1,9}(?:\.\d{1,3})?)([KMGT]?)(?:i?B)?", text, re.IGNORECASE)
    size = int(float(found[1]) * 1024 ** " KMGT".find(found[2].upper() or " ")) if found else 0
    if size < 1:
        raise UsageError(f"{flag} {text}: give a size, such as 256M or 1.5G")
    return size


def worker_loads(text: str | None, flag: str = "--worker-load") -> tuple[float, ...]:
    """Parse --worker-load: positive numbers, one per rank; () for None. Raises UsageError."""
    if text is None:
        return ()
    try:
        loads = tuple(float(part) for part in text.split(","))
    except ValueError:
        loads = (0.0,)
    if not all(0 < load < math.inf for load in loads):
        raise UsageError(f"{flag} {text}: give a positive number for every rank, as in 3,1")
    return loads


def class_weights(text: str, flag: str = "--class-weights") -> tuple[float, ...]:
    """Parse --class-weights: positive numbers, one per class; () for "balanced".

    Raises UsageError.
    """
    if text == "balanced":
        return ()
    try:
        weights = tuple(float(part) for part in text.split(","))
    except ValueError:
        raise UsageError(
            f"{flag} {brief(text)}: give balanced, or a number for each class such as 0.2,1"
        ) from None
    if not all(0 < weight < math.inf for weight in weights):
        raise UsageError(
            f"{flag} {brief(text)}: give a number above 0 for every class, as in 0.2,1: without"
            " weight, a mini-batch of one class alone would have no mean loss"
        )
    return weights


def check_channels(channels: int, flag: str) -> None:
    """Raise UsageError unless images have 1 channel (gray) or 3 (colour)."""
    if channels not in (1, 3):
        raise UsageError(f"{flag} {channels}: 1 is gray, 3 is colour")


def image_size(text: str, flag: str = "--size") -> tuple[int, int]:
    """Parse "100x80" to width and height. Raises UsageError."""
    numbers = re.fullmatch(r"([0-9]{1,5})x([0-9]{1,5})", text)
    size = (int(numbers[1]), int(numbers[2])) if numbers else (0, 0)
    if not 1 <= min(size) <= max(size) <= MAX_SIDE:
        raise UsageError(
            f"{flag} {text}: give WIDTHxHEIGHT in pixels, 1 to {MAX_SIDE:,}, as in 100x100"
        )
    return size


def split_shares(text: str, flag: str = "--split") -> tuple[Fraction, Fraction, Fraction]:
    """Parse "0.9,0.1" or "0.8,0.1,0.1" to exact shares of train, validation and test.

    Raises UsageError.
    """
    parts = [] if "e" in text.lower() else text.split(",")  # 1e99999999 would take minutes
    try:
        shares = [Fraction(part.strip()) for part in parts]
    except (ValueError, ZeroDivisionError):
        shares = []
    if len(shares) not in (1, 2, 3) or min(shares) < 0 or shares[0] == 0 or sum(shares) != 1:
        raise UsageError(
            f"{flag} {text}: give shares that sum to 1, of train,test (0.9,0.1) or of"
            " train,validation,test (0.8,0.1,0.1), train not 0"
        )
    if len(shares) == 3:
        return shares[0], shares[1], shares[2]
    return shares[0], Fraction(0), Fraction(1) - shares[0]


def fold_number(text: str, flag: str = "--fold") -> tuple[int, int]:
    """Parse "2/5" to the number of a fold, from 1, and the number of folds. Raises UsageError."""
    found = re.fullmatch(rf"([0-9]{{1,{MOST_DIGITS}}})/([0-9]{{1,{MOST_DIGITS}}})", text)
    fold, count = (int(found[1]), int(found[2])) if found else (0, 0)
    if count < 2 or not 1 <= fold <= count:
        raise UsageError(f"{flag} {text}: give K/N, fold K = 1 ... N of N >= 2 folds, as in 1/5")
    return fold, count


def to_toml(config: Any) -> str:
    """Return all settings as TOML; those left to the plan are comments."""
    lines = []
    for field in dataclasses.fields(config):
        value = getattr(config, field.name)
        if value is None:
            lines.append(f"# {field.name}: not set, decided by the plan")
        else:
            lines.append(f"{field.name} = {toml_value(value)}")
    return "\n".join(lines) + "\n"


def toml_value(value: Any) -> str:
    """Return a bool, a number, a string or a list of these as TOML.

    Strings are written as in JSON, except for surrogates and DEL.
    """
    if isinstance(value, float):
        return repr(value)  # valid TOML, also for inf and nan
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
