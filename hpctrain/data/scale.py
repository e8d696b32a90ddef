"""The scale of images: what number a stored value becomes, wherever a network is used.

Stored values are divided by one number: 255 for uint8, 65,535 for uint16, 1 for floats, or by
--max-value for any of them. A network's file keeps this divisor with the stored type and the range
of the values that it was trained on. Images of another type are scaled by them if that leaves no
doubt, and otherwise refused.
"""

from __future__ import annotations

from typing import NamedTuple

from hpctrain.errors import UsageError

FULL = {"uint8": 255.0, "uint16": 65535.0}  # largest value of a type
FLOATS = ("float16", "float32", "float64")
DARK = 16.0  # with larger values in training, floats in [0, 1] were scaled by something else
ROUNDING = 1e-3
UNLIKE = 4.0  # ratio of largest values that is noted
SPARE = 2.0  # how many times larger than in training the values of integers may be


def is_unit(low: float, high: float) -> bool:
    """Whether values from `low` to `high` are in [0, 1], but for the rounding of float16."""
    return -ROUNDING <= low <= high <= 1 + ROUNDING


class Scale(NamedTuple):
    """How the images of a training were scaled. It is saved with networks."""

    dtype: str = "uint8"  # stored
    divisor: float = 255.0
    low: float = 0.0  # smallest and largest stored value of the images that were probed
    high: float = 255.0

    @property
    def is_bytes(self) -> bool:
        """Whether images are bytes until they are on the device, as those of packs."""
        return (self.dtype, self.divisor) == ("uint8", 255)

    @property
    def is_full(self) -> bool:
        """Whether 1.0 stands for the largest value of the type; of floats, all are in [0, 1]."""
        if self.dtype in FULL:
            return self.divisor == FULL[self.dtype]
        return self.divisor == 1 and is_unit(self.low, self.high)

    @property
    def reach(self) -> float:
        """The largest absolute value of the network's input."""
        return max(-self.low, self.high) / self.divisor

    def is_like(self, other: Scale) -> bool:
        """Whether both networks have inputs of one scale."""
        if self.is_full and other.is_full:
            return True
        return (self.is_full, self.divisor) == (other.is_full, other.divisor)

    def is_unlike(self, other: Scale) -> bool:
        """Whether the values of one input are much larger than those of the other."""
        return max(self.reach, other.reach) > UNLIKE * min(self.reach, other.reach)

    def __str__(self) -> str:
        values = f"{self.dtype} values from {self.low:g} to {self.high:g}"
        return values if self.divisor == 1 else f"{values}, divided by {self.divisor:g}"

    def divisor_for(self, dtype: str, low: float, high: float, is_whole: bool = False) -> float:
        """Return what images of `dtype` with values from `low` to `high` are divided by.

        `is_whole`: whether floats are known to be whole numbers. Raises UsageError if the divisor
        cannot be known.
        """
        is_same = dtype == self.dtype or {dtype, self.dtype} <= {*FLOATS}
        if not is_same and not self._takes(dtype):
            here = f"{dtype} images do not say what 1.0 was in the training, on {self}"
            raise UsageError(f"{here}: give {self._wanted()}")
        if not self.is_full:
            self._check_range(dtype, low, high)
            if dtype in FLOATS and self.dtype in FULL and not is_whole:
                here = f"{dtype} images that are not whole numbers, and the training was on {self}"
                raise UsageError(f"{here}: give {self._wanted()}")
            return self.divisor
        if dtype in FULL:
            return FULL[dtype]
        if not is_unit(low, high):
            raise UsageError(f"values from {low:g} to {high:g}: give {self._wanted()}")
        return 1.0

    def _takes(self, dtype: str) -> bool:
        """Whether images of a type that is not the stored one have a meaning."""
        if self.is_full:  # 8 bits and floats in [0, 1], if the training did not leave them dark
            return dtype != "uint16" and self.high > self.divisor / 2
        if dtype in FLOATS:
            return True
        # Integers are stored values if no smaller type has room for those of the training.
        least = 127 if dtype == "uint8" else FULL["uint8"]
        return self.low >= 0 and least < self.high <= FULL[dtype]

    def _check_range(self, dtype: str, low: float, high: float) -> None:
        """Raise UsageError for values that are not of the scale on which the training was."""
        is_scaled = dtype in FLOATS and 0 < high <= 1 and self.high > self._darkest()
        is_open = self.divisor == 1 and self.dtype in FLOATS
        most = SPARE * max(self.high, self.divisor)
        if is_scaled or low < -ROUNDING * self.high <= self.low or (high > most and not is_open):
            here = f"values from {low:g} to {high:g}, and the training was on {self}"
            raise UsageError(f"{here}: give {self._wanted()}")

    def _darkest(self) -> float:
        """Return the largest value in training up to which floats in [0, 1] may be stored ones."""
        return 1.0 if self.dtype in FULL else DARK

    def _wanted(self) -> str:
        """Return what can be given to this network."""
        if self.dtype not in FULL:
            return "floats in [0, 1]" if self.is_full else "such floats, not scaled"
        if not self.is_full:
            return f"such {self.dtype} values, not scaled"
        floats = ", or floats in [0, 1]" if self.high > self.divisor / 2 else ""
        return f"{self.dtype}{floats}"


BYTES = Scale()  # of a pack
