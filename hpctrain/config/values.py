"""Values of settings that are given as texts, such as "30m" or "256M".

A text is parsed once, where it is given: ``Seconds("30m")`` is the number 1800.0. `str` returns it
as it was given, which is what config.toml holds. Values are equal if they mean the same, as
``Seconds("600s") == Seconds("10m")``.
"""

from __future__ import annotations

import math
import re
import unicodedata
from fractions import Fraction
from typing import Any, ClassVar, Literal, Self

LONGEST_DURATION = 10 * 365 * 86400.0  # seconds that timers accept
UNITS = {"s": 1, "m": 60, "h": 3600, "d": 86400}  # seconds
CLOCK = re.compile(r"((?P<h>\d+):(?=\d\d:))?(?P<m>\d+):(?P<s>\d\d)")
DAYS = re.compile(r"(?P<d>\d+)-(?P<h>\d\d?)(:(?P<m>\d\d)(:(?P<s>\d\d))?)?")
ShapesTask = Literal["classify", "multilabel", "regress"]  # those that learn of the shapes
MAX_SIDE = 2**14  # pixels, of a decoded image
#: Range of --max-value: images are multiplied by 1 / it, which float32 must have.
LEAST_DIVISOR = 1e-37
LARGEST_DIVISOR = 1e37
DIVISORS = f"[{LEAST_DIVISOR:g}, {LARGEST_DIVISOR:g}]"


class Value:
    """Base class of numbers and tuples that are parsed from a text."""

    advice: ClassVar[str]  # values that can be given, for errors
    parse: ClassVar[Any]  # a function that returns the number or the tuple, or raises ValueError
    text: str  # as it was given

    def __new__(cls, text: str) -> Self:
        """Parse a text. Raises ValueError, whose text is the advice."""
        try:
            value = super().__new__(cls, cls.parse(text))  # type: ignore[call-arg]
        except (ValueError, ArithmeticError):
            raise ValueError(f"give {cls.advice}") from None
        value.text = text
        return value

    def __str__(self) -> str:
        return self.text

    def __repr__(self) -> str:
        return repr(self.text)

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle the text: ranks send each other settings."""
        return type(self), (self.text,)


class Seconds(Value, float):
    """A time: "90s", "10m", "2h", "1d", or as in Slurm (sbatch(1), --time).

    Its formats are minutes, minutes:seconds, hours:minutes:seconds, days-hours,
    days-hours:minutes and days-hours:minutes:seconds.
    """

    advice = "a time, such as 30m, 90s, 2:30:00 or 1-12:00:00"

    @staticmethod
    def parse(text: str) -> float:
        unit = text[-1:]
        if clock := CLOCK.fullmatch(text) or DAYS.fullmatch(text):
            seconds = sum(float(count) * UNITS[u] for u, count in clock.groupdict("0").items())
        elif unit in UNITS:
            seconds = float(text.removesuffix(unit)) * UNITS[unit]
        else:
            seconds = float(text) * UNITS["m"]
        return require(0 < seconds <= LONGEST_DURATION, seconds)


class NoData(Value, float):
    """A number, or "nan", as it stands for no data. NaN equals NaN."""

    advice = "a number that float64 holds exactly, or nan"

    @staticmethod
    def parse(text: str) -> float:
        number = float(text)
        is_kept = not re.fullmatch(r"[+-]?\d+", text) or int(text) == number
        return require(is_kept and not math.isinf(number), number)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, float):
            return False
        return float(self) == float(other) or (math.isnan(self) and math.isnan(other))

    def __ne__(self, other: object) -> bool:
        return not self == other  # float has one of its own

    def __hash__(self) -> int:
        return hash("nan") if math.isnan(self) else hash(float(self))


class Threshold(Value, float):
    """A probability, such as "0.5"; 0 for "best"."""

    advice = "best, or a probability above 0 and below 1"

    @staticmethod
    def parse(text: str) -> float:
        if text == "best":
            return 0.0
        number = float(text)
        return require(0 < number < 1, number)


class Bytes(Value, int):
    """A size: "256M", "1.5G", "64KiB" or "4096" bytes. K, M, G and T are 2^10 to 2^40."""

    advice = "a size, such as 256M or 1.5G"

    @staticmethod
    def parse(text: str) -> int:
        match = re.fullmatch(r"(\d{1,9}(?:\.\d{1,3})?)([KMGT]?)(?:i?B)?", text, re.IGNORECASE)
        if match is None:
            raise ValueError
        size = int(float(match[1]) * 1024 ** " KMGT".find(match[2].upper() or " "))
        return require(size > 0, size)


class Every(Value, tuple[float, str]):
    """An interval: a number and its unit, as in "2epochs", "500steps" or "10m"; "0" is endless."""

    advice = "epochs, steps or a time, as in 2epochs, 500steps or 10m; 0 = only at the end"

    @staticmethod
    def parse(text: str) -> tuple[float, str]:
        if counted := re.fullmatch(r"(\d{1,15})(epoch|step)s?", text):
            return require(int(counted[1]) > 0, (int(counted[1]), counted[2]))
        if text == "0":
            return math.inf, "second"
        has_unit = text[-1:] in UNITS or CLOCK.fullmatch(text) or DAYS.fullmatch(text)
        return require(bool(has_unit), (Seconds(text), "second"))

    @property
    def seconds(self) -> float:
        """The interval if it is a time, else infinity."""
        return self[0] if self[1] == "second" else math.inf

    def follows(self, step: int, steps_per_epoch: int) -> bool:
        """Whether something is due after this step, regardless of the time."""
        number, unit = self
        steps = number * (steps_per_epoch if unit == "epoch" else 1)
        return unit != "second" and step % steps == 0


class List(Value, tuple[Any, ...]):
    """Base class of values of several parts, separated by commas."""

    part: ClassVar[Any]  # a function that returns the value of a part, or raises ValueError

    @classmethod
    def parse(cls, text: str) -> tuple[Any, ...]:
        return tuple(cls.part(part.strip()) for part in text.split(","))


class Shares(List):
    """Exact shares of train, validation and test: "0.9,0.1" of train and test, "0.8,0.1,0.1"."""

    advice = "shares, train above 0, sum 1: train,test or train,validation,test, as in 0.8,0.1,0.1"
    part = Fraction

    @classmethod
    def parse(cls, text: str) -> tuple[Fraction, Fraction, Fraction]:
        require("e" not in text.lower(), text)  # 1e99999999 takes hours
        train, *held_out = super().parse(text)
        require(len(held_out) < 3 and min(held_out, default=0) >= 0, text)
        require(train > 0 and train + sum(held_out) == 1, text)
        validation = held_out[0] if len(held_out) == 2 else Fraction(0)
        return train, validation, 1 - train - validation


class Loads(List):
    """Positive numbers, such as "3,1"."""

    advice = "numbers above 0, as in 3,1"

    @staticmethod
    def part(text: str) -> float:
        return require(0 < float(text) < math.inf, float(text))


class ClassWeights(Loads):
    """The weight of each class, such as "0.2,1"; () for "balanced".

    With a weight of 0, a mini-batch of one class alone would have no mean loss.
    """

    advice = "balanced, or a number above 0 for each class, as in 0.2,1"

    @classmethod
    def parse(cls, text: str) -> tuple[float, ...]:
        return () if text == "balanced" else super().parse(text)


class Patterns(List):
    """Patterns of parameter names, such as "conv1,layer1.*"."""

    advice = "patterns of parameter names, as in conv1,layer1.*"

    @staticmethod
    def part(text: str) -> str:
        return require(bool(text), text)


class Names(List):
    """Different names, such as "age,mass"."""

    advice = "different names, as in age,mass"

    @classmethod
    def parse(cls, text: str) -> tuple[str, ...]:
        names = super().parse(unicodedata.normalize("NFC", text))
        return require(all(names) and len({*names}) == len(names), names)

    @staticmethod
    def part(text: str) -> str:
        return text


class Factors(List):
    """Patterns of parameter names with a factor each, such as "layer*=0.1,fc=1"."""

    advice = "patterns of parameter names with factors above 0, as in layer*=0.1,fc=1"

    @staticmethod
    def part(text: str) -> tuple[str, float]:
        pattern, _, factor = text.partition("=")
        return Patterns.part(pattern.strip()), Loads.part(factor)


class Size(Value, tuple[int, int]):
    """Width and height of images in pixels, such as "100x80"."""

    advice = f"WIDTHxHEIGHT in pixels, 1 to {MAX_SIDE:,}, as in 100x100"

    @staticmethod
    def parse(text: str) -> tuple[int, int]:
        width, height = (int(number) for number in text.split("x"))
        return require(0 < width <= MAX_SIDE >= height > 0, (width, height))


class Fold(Value, tuple[int, int]):
    """The number of a fold, from 1, and the number of folds, such as "2/5"."""

    advice = "K/N, fold K = 1 ... N of N >= 2 folds, as in 1/5"

    @staticmethod
    def parse(text: str) -> tuple[int, int]:
        fold, count = (int(number) for number in text.split("/"))
        return require(1 <= fold <= count >= 2, (fold, count))


def require(fine: bool, value: Any) -> Any:
    """Return the value. Raises ValueError unless it is fine."""
    if not fine:
        raise ValueError
    return value
