"""Values of settings that are given as texts, such as "30m" or "256M".

A text is parsed once, where it is given: ``Seconds("30m")`` is the number 1800.0. `str` returns it
as it was given, which is what config.toml holds. Values are equal if they mean the same, as
``Seconds("600s") == Seconds("10m")``.
"""

from __future__ import annotations

import math
import re
from fractions import Fraction
from typing import Any, Self

LONGEST_DURATION = 10 * 365 * 86400.0  # seconds that timers accept
MOST_DIGITS = 15  # of a number of steps, hours or folds
MAX_SIDE = 2**14  # pixels, of a decoded image


class Value:
    """Base class of numbers and tuples that are parsed from a text."""

    text: str  # as it was given

    def __new__(cls, text: str) -> Self:
        """Parse a text. Raises ValueError, whose text says what to give instead."""
        value = super().__new__(cls, cls.parse(text))  # type: ignore[call-arg]
        value.text = text
        return value

    @staticmethod
    def parse(text: str) -> Any:
        """Return the number or the tuple that a text stands for. Raises ValueError."""
        raise NotImplementedError

    def __str__(self) -> str:
        return self.text

    def __repr__(self) -> str:
        return repr(self.text)

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle the text: ranks send each other settings."""
        return type(self), (self.text,)


class List(Value, tuple[Any, ...]):
    """Base class of values of several parts, separated by commas."""


class Seconds(Value, float):
    """A time: "90s", "10m", "2h", "H:MM:SS", or minutes without unit."""

    @staticmethod
    def parse(text: str) -> float:
        unit = re.fullmatch(r"(\d+(?:\.\d+)?)([smh]?)", text)
        clock = re.fullmatch(rf"(\d{{1,{MOST_DIGITS}}}):(\d\d):(\d\d)", text)
        seconds = 0.0
        if unit:
            seconds = float(unit[1]) * {"s": 1, "m": 60, "": 60, "h": 3600}[unit[2]]
        elif clock:
            seconds = 3600.0 * int(clock[1]) + 60 * int(clock[2]) + int(clock[3])
        if not 0 < seconds <= LONGEST_DURATION:
            raise ValueError("give a time, such as 30m, 90s or 2:30:00")
        return seconds


class Bytes(Value, int):
    """A size: "256M", "1.5G", "64KiB" or "4096" bytes. K, M, G and T are 2^10 to 2^40."""

    @staticmethod
    def parse(text: str) -> int:
        found = re.fullmatch(r"(\d{1,9}(?:\.\d{1,3})?)([KMGT]?)(?:i?B)?", text, re.IGNORECASE)
        size = int(float(found[1]) * 1024 ** " KMGT".find(found[2].upper() or " ")) if found else 0
        if size < 1:
            raise ValueError("give a size, such as 256M or 1.5G")
        return size


class Every(Value, tuple[float, str]):
    """The interval between two validations or checkpoints, a number with its unit.

    It is "2epochs", "500steps", a time such as "10m", or "0": nothing is due before the end.
    """

    @staticmethod
    def parse(text: str) -> tuple[float, str]:
        counted = re.fullmatch(rf"([0-9]{{1,{MOST_DIGITS}}})(epoch|step)s?", text)
        if counted and int(counted[1]):
            return int(counted[1]), counted[2]
        if re.fullmatch(r"\d+(\.\d+)?[smh]|\d+:\d\d:\d\d", text):
            return Seconds.parse(text), "second"
        if text == "0":
            return math.inf, "second"
        raise ValueError(
            "give a number with its unit, as in 2epochs, 500steps or a time (90s, 10m, 1h); 0 ="
            " only at the end"
        )

    @property
    def seconds(self) -> float:
        """The interval if it is a time, else infinity."""
        return self[0] if self[1] == "second" else math.inf

    def follows(self, step: int, steps_per_epoch: int) -> bool:
        """Whether something is due after this step, regardless of the time."""
        number, unit = self
        return (
            unit != "second" and step % (number * (steps_per_epoch if unit == "epoch" else 1)) == 0
        )


class Shares(Value, tuple[Fraction, Fraction, Fraction]):
    """Exact shares of train, validation and test: "0.9,0.1" of train and test, "0.8,0.1,0.1"."""

    @staticmethod
    def parse(text: str) -> tuple[Fraction, Fraction, Fraction]:
        parts = [] if "e" in text.lower() else text.split(",")  # 1e99999999 would take minutes
        try:
            shares = [Fraction(part.strip()) for part in parts]
        except (ValueError, ZeroDivisionError):
            shares = []
        if len(shares) not in (1, 2, 3) or min(shares) < 0 or shares[0] == 0 or sum(shares) != 1:
            raise ValueError(
                "give shares that sum to 1, of train,test (0.9,0.1) or of train,validation,test"
                " (0.8,0.1,0.1), train not 0"
            )
        validation = shares[1] if len(shares) == 3 else Fraction(0)
        return shares[0], validation, 1 - shares[0] - validation


class Loads(List):
    """Positive numbers, such as "3,1"."""

    @staticmethod
    def parse(text: str) -> tuple[float, ...]:
        try:
            numbers = tuple(float(part) for part in text.split(","))
        except ValueError:
            numbers = (0.0,)
        if not all(0 < number < math.inf for number in numbers):
            raise ValueError("give numbers above 0, as in 3,1")
        return numbers


class ClassWeights(List):
    """The weight of each class, such as "0.2,1"; () for "balanced"."""

    @staticmethod
    def parse(text: str) -> tuple[float, ...]:
        try:
            return () if text == "balanced" else Loads.parse(text)
        except ValueError:
            raise ValueError(
                "give balanced, or a number above 0 for each class, as in 0.2,1: without weight, a"
                " mini-batch of one class alone would have no mean loss"
            ) from None


class Patterns(List):
    """Patterns of parameter names, such as "conv1,layer1.*"."""

    @staticmethod
    def parse(text: str) -> tuple[str, ...]:
        found = tuple(part.strip() for part in text.split(","))
        if not all(found):
            raise ValueError("give patterns of parameter names, as in conv1,layer1.*")
        return found


class Factors(List):
    """Patterns of parameter names with a factor each, such as "layer*=0.1,fc=1"."""

    @staticmethod
    def parse(text: str) -> tuple[tuple[str, float], ...]:
        found = []
        for part in text.split(","):
            pattern, _, number = (word.strip() for word in part.partition("="))
            try:
                factor = float(number)
            except ValueError:
                factor = 0.0
            if not pattern or not 0 < factor < math.inf:
                raise ValueError(
                    "give patterns of parameter names with factors above 0, as in layer*=0.1,fc=1"
                )
            found.append((pattern, factor))
        return tuple(found)


class Size(Value, tuple[int, int]):
    """Width and height of images in pixels, such as "100x80"."""

    @staticmethod
    def parse(text: str) -> tuple[int, int]:
        found = re.fullmatch(r"([0-9]{1,5})x([0-9]{1,5})", text)
        size = (int(found[1]), int(found[2])) if found else (0, 0)
        if not 1 <= min(size) <= max(size) <= MAX_SIDE:
            raise ValueError(f"give WIDTHxHEIGHT in pixels, 1 to {MAX_SIDE:,}, as in 100x100")
        return size


class Fold(Value, tuple[int, int]):
    """The number of a fold, from 1, and the number of folds, such as "2/5"."""

    @staticmethod
    def parse(text: str) -> tuple[int, int]:
        found = re.fullmatch(rf"([0-9]{{1,{MOST_DIGITS}}})/([0-9]{{1,{MOST_DIGITS}}})", text)
        fold, count = (int(found[1]), int(found[2])) if found else (0, 0)
        if count < 2 or not 1 <= fold <= count:
            raise ValueError("give K/N, fold K = 1 ... N of N >= 2 folds, as in 1/5")
        return fold, count
