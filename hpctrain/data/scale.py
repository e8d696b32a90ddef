"""The scale of images: what number a stored value becomes, wherever a network is used.

Stored values are divided by one number: 255 for uint8, 65,535 for uint16, 1 for floats, or by
--max-value for any of them. A network's file keeps this divisor with the stored type and the range
of the values that it was trained on. Images of another type are scaled by them if that leaves no
doubt, and otherwise refused.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, NoReturn

import numpy as np

from hpctrain.errors import UsageError

FULL = {"uint8": 255.0, "uint16": 65535.0}  # largest value of a type
FLOATS = ("float16", "float32", "float64")
#: Types in which values are read that are stored in types which networks, or torch, cannot take.
READ_AS = {"bool": "uint8", "uint32": "int64", "uint64": "float64"}
#: Types that are read, in either byte order; others keep their name.
STORED = (
    *("bool", "uint8", "uint16", "uint32", "uint64", "int8", "int16", "int32", "int64"),
    *FLOATS,
)
WIDE = ("int32", "int64", "float64")  # types that are read with values that float32 rounds
LARGEST_WHOLE = 1 << 24  # up to which float32 has all whole numbers
LARGEST_OF_FLOAT64 = 1 << 53  # likewise float64
DARK = 16.0  # with larger floats in the training, those in [0, 1] were divided by something
ROUNDING = 1e-3  # allowed for float16
UNLIKE = 4.0  # ratio of largest values that is noted
FAR = 8.0  # how many times larger than in the training stored values may be; 16 bits of 12 are 16

#: Smallest and largest stored values of the channels, (C,) each.
Ranges = tuple[tuple[float, ...], tuple[float, ...]]


def read_type(stored: str) -> np.dtype:
    """Return the type, in native byte order, in which values stored as one of `STORED` are read."""
    name = np.dtype(stored).name
    return np.dtype(READ_AS.get(name, name))


def usual_divisor(stored: str) -> float:
    """Return what values are divided by without --max-value: 1 unless they are 8 or 16 bits."""
    return FULL.get(np.dtype(stored).name, 1.0)


def is_unit(low: float, high: float) -> bool:
    """Whether values from `low` to `high` are in [0, 1], but for the rounding of float16."""
    return -ROUNDING <= low <= high <= 1 + ROUNDING


def usual_maximum(largest: float) -> tuple[int, int]:
    """Return how many bits hold whole numbers up to `largest`, and the largest number they hold.

    Cameras and scanners store 10, 12 or 14 bits in 16.
    """
    bits = max(1, int(largest).bit_length())
    return bits, 2**bits - 1


def divide(values: np.ndarray, divisor: float) -> np.ndarray:
    """Return values as float32 multiplied by 1 / divisor: bytes, by 255, as those of a pack are.

    Values too large for float32 become infinite.
    """
    with np.errstate(over="ignore", invalid="ignore"):
        return values.astype(np.float32) * np.float32(1 / divisor)


def is_divided(dtype: str, divisor: float) -> bool:
    """Whether values of `dtype` have another divisor than bytes of a pack, and floats in [0, 1]."""
    if dtype in FLOATS:
        return divisor != 1
    return (dtype, divisor) != ("uint8", FULL["uint8"])


def unit_values(values: np.ndarray, divisor: float) -> np.ndarray:
    """Return stored values as float32, divided; bytes that are divided by 255, and floats by 1, as
    such.
    """
    if not is_divided(values.dtype.name, divisor):
        return values
    return divide(values, divisor)


def value_range(values: np.ndarray) -> tuple[float, float, bool]:
    """Return the smallest and the largest finite value, and whether all are whole numbers."""
    finite = values[np.isfinite(values)]
    if not finite.size:
        return 0.0, 0.0, True
    is_whole = bool((finite == np.round(finite)).all())
    return float(finite.min()), float(finite.max()), is_whole


def can_hold(dtype: np.dtype, value: float) -> bool:
    """Whether an integer or float type, or bool, has this value; of NaN, whether it has that."""
    if dtype.kind == "f":
        with np.errstate(over="ignore"):
            return bool(np.isnan(value) or np.isfinite(dtype.type(value)))
    if not float(value).is_integer():
        return False
    if dtype.kind == "b":
        return 0 <= value <= 1
    limits = np.iinfo(dtype)
    return bool(limits.min <= value <= limits.max)


def is_nodata(values: np.ndarray, nodata: float) -> np.ndarray:
    """Return where stored values are `nodata` in their own type, or NaN if it is NaN, as bool."""
    if not can_hold(values.dtype, nodata):
        return np.zeros(values.shape, bool)
    if np.isnan(nodata):
        return np.isnan(values)
    if values.dtype.kind != "f":
        nodata = int(nodata)
    return np.asarray(values == values.dtype.type(nodata))


def present_values(values: np.ndarray, nodata: float | None) -> np.ndarray:
    """Return stored values without those that are `nodata`, (n,); all as they are without any."""
    if nodata is None:
        return values
    return np.asarray(values[~is_nodata(values, nodata)])


def channel_ranges(images: np.ndarray, nodata: float | None) -> Ranges:
    """Return the smallest and the largest finite value of each channel of images (..., C), as two
    tuples (C,), without `nodata`. A channel without values has inf and -inf.
    """
    values = images.reshape(-1, images.shape[-1])
    is_left_out = ~np.isfinite(values) if values.dtype.kind == "f" else np.zeros((), bool)
    if nodata is not None:
        is_left_out = is_left_out | is_nodata(values, nodata)
    lows = values
    highs = values
    if is_left_out.any():
        lows = np.where(is_left_out, np.inf, values)
        highs = np.where(is_left_out, -np.inf, values)
    channels = range(
        values.shape[1]
    )  # one by one: NumPy is slow over the first axis of few columns
    return (
        tuple(float(lows[:, channel].min()) for channel in channels),
        tuple(float(highs[:, channel].max()) for channel in channels),
    )


def is_not_finite(values: np.ndarray, nodata: float | None) -> np.ndarray:
    """Return where floats are infinite, or NaN that is not `nodata`, as bool."""
    if nodata is not None and np.isnan(nodata):
        return np.isinf(values)
    return ~np.isfinite(values)


class Scale(NamedTuple):
    """How the images of a training were scaled. It is saved with networks."""

    dtype: str = "uint8"  # stored
    divisor: float = 255.0
    low: float = 0.0  # smallest and largest stored value of the images that were probed
    high: float = 255.0
    nodata: float | None = None  # stored value that marks missing data; NaN = NaN
    lows: Sequence[float] = ()  # likewise of each channel, (C,); () = not known
    highs: Sequence[float] = ()

    @property
    def is_bytes(self) -> bool:
        """Whether images are bytes until they are on the device, as those of packs."""
        return (self.dtype, self.divisor) == ("uint8", 255)

    @property
    def is_divided(self) -> bool:
        """Whether images have another divisor than bytes of a pack, and floats in [0, 1]."""
        return is_divided(self.dtype, self.divisor)

    @property
    def file_type(self) -> np.dtype:
        """The type in which values of files of any type are held, in units of the stored ones."""
        if self.is_converted and not self.is_bytes:
            return np.result_type(self.dtype, np.float32)
        return np.dtype(self.dtype)

    def array_type(self, dtype: np.dtype) -> np.dtype:
        """The type in which arrays of a type are held: that of the training, for stored values."""
        return dtype if self.is_converted else np.dtype(self.dtype)

    @property
    def is_converted(self) -> bool:
        """Whether values of another type, or in [0, 1], may stand for the stored ones."""
        return self.is_full and self.nodata is None

    @property
    def is_full(self) -> bool:
        """Whether 1.0 stands for the largest value of the type; of floats, all are in [0, 1]."""
        if self.dtype in FULL:
            return self.divisor == FULL[self.dtype]
        return not self.is_integer and self.divisor == 1 and is_unit(self.low, self.high)

    @property
    def is_integer(self) -> bool:
        """Whether stored values are integers."""
        return self.dtype not in FLOATS

    @property
    def extreme(self) -> float:
        """The largest absolute value that is stored."""
        return max(-self.low, self.high)

    @property
    def reach(self) -> float:
        """The largest absolute value of the network's input."""
        return self.extreme / self.divisor

    def is_like(self, other: Scale) -> bool:
        """Whether both networks have inputs of one scale."""
        if self.is_full and other.is_full:
            return True
        return (self.is_full, self.divisor) == (other.is_full, other.divisor)

    @property
    def is_signed(self) -> bool:
        """Whether there are values below 0, as in images that were standardized."""
        return self.low < -ROUNDING * self.high

    def is_unlike(self, other: Scale) -> bool:
        """Whether one input has much larger values than the other, or alone has negative ones.

        Images that are 0 everywhere are like all others, as are those of smaller values by channel.
        """
        if self.low == self.high == 0:
            return False
        if self.is_signed != other.is_signed:
            return True
        return max(self.reach, other.reach) > UNLIKE * min(self.reach, other.reach)

    def with_ranges(self, lows: Sequence[float], highs: Sequence[float]) -> Scale:
        """Return this scale with the range of each channel, (C,), and that of all.

        A channel without values has inf and -inf.
        """
        has_values = [low <= high for low, high in zip(lows, highs, strict=True)]
        if not any(has_values):
            return self
        return self._replace(
            low=min(lows),
            high=max(highs),
            lows=tuple(np.where(has_values, lows, 0.0).tolist()),
            highs=tuple(np.where(has_values, highs, 0.0).tolist()),
        )

    def unlike_channels(self, trained: Scale) -> list[str]:
        """Describe the channels whose values are unlike those of the same channels in a training.

        They are much larger, or alone negative, or no value is in the range of the training, as of
        temperatures in Celsius that were in kelvins. Smaller values are like those of the training.
        """
        if len(self.lows) != len(trained.lows):
            return []
        texts = []
        for number, channel in enumerate(self.channels):
            usual = trained.channels[number]
            margin = ROUNDING * usual.reach
            inputs = channel.low / channel.divisor, channel.high / channel.divisor
            is_above = inputs[0] > usual.high / usual.divisor + margin
            is_below = inputs[1] < usual.low / usual.divisor - margin
            is_larger = channel.reach > UNLIKE * usual.reach
            is_negative = channel.is_signed and not usual.is_signed
            if is_above or is_below or is_larger or is_negative:
                texts.append(f"channel {number} {channel.range_text}, not {usual.range_text}")
        return texts

    @property
    def channels(self) -> list[Scale]:
        """A scale for each channel, (C,), with its range; none if the ranges are not known."""
        ranges = zip(self.lows, self.highs, strict=True)
        return [self._replace(low=low, high=high, lows=(), highs=()) for low, high in ranges]

    def as_metadata(self) -> dict[str, Any]:
        """Return the fields as the file of a network holds them: without ranges not known."""
        return {name: value for name, value in self._asdict().items() if value != ()}

    @property
    def range_text(self) -> str:
        """The range of the values, as "from 0 to 4,095"."""
        return f"from {self.low:g} to {self.high:g}"

    def __str__(self) -> str:
        text = f"{self.dtype} values {self.range_text}"
        if self.divisor != 1:
            text += f", divided by {self.divisor:g}"
        if self.nodata is not None:
            text += f", without nodata ({self.nodata:g})"
        return text

    def as_stored(self, values: np.ndarray) -> np.ndarray:
        """Return images of any type as values in units of those that were stored for the training.

        Floats may hold NaN or infinity. Raises UsageError if their scale is another, or cannot be
        known.
        """
        divisor = self.divisor_of([values])
        if divisor == self.divisor:
            return values
        return divide(values, divisor / self.divisor)

    def divisor_of(self, arrays: Sequence[np.ndarray]) -> float:
        """Return what arrays of one type are divided by, by the range of all their values.

        Raises UsageError as `as_stored` does.
        """
        dtype = arrays[0].dtype
        if self.is_full and dtype.name in FULL:
            return self.divisor_of_type(dtype)
        ranges = [value_range(present_values(values, self.nodata)) for values in arrays]
        lows, highs, are_whole = zip(*ranges, strict=True)
        return self.divisor_for(
            dtype=dtype.name,
            low=min(lows),
            high=max(highs),
            is_whole=all(are_whole),
        )

    def require_room(self, values: np.ndarray) -> None:
        """Raise UsageError for values that would be cut off or rounded as stored ones."""
        if self.is_converted or not self.is_integer or values.dtype == self.dtype:
            return
        low, high, is_whole = value_range(present_values(values, self.nodata))
        if not self._has_room(low, high):
            self._refuse(f"values from {low:g} to {high:g}")
        if not is_whole:
            self._refuse("values that are not whole")

    def divisor_of_type(self, dtype: np.dtype) -> float:
        """Return what images of a type are divided by if their values can have this scale.

        Raises UsageError if they cannot, whatever the values.
        """
        return self.divisor_for(dtype.name, low=0.0, high=0.0, is_whole=True)

    def divisor_for(
        self,
        dtype: str,
        low: float,
        high: float,
        is_whole: bool = False,
    ) -> float:
        """Return what images of `dtype` with values from `low` to `high` are divided by.

        `is_whole`: whether floats are known to be whole numbers. Raises UsageError if the divisor
        cannot be known.
        """
        is_same = dtype == self.dtype or {dtype, self.dtype} <= {*FLOATS}
        if not is_same and not self._takes(dtype):
            self._refuse(f"{dtype} images do not say what 1.0 was in the training, on {self}")
        if self.is_full:
            if dtype in FULL:
                return FULL[dtype]
            if not is_unit(low, high):
                self._refuse(f"values from {low:g} to {high:g}")
            return 1.0
        if not self._has_range(dtype, low, high) or not self._has_room(low, high):
            self._refuse(f"values from {low:g} to {high:g}, and the training was on {self}")
        if self.is_integer and dtype in FLOATS and not is_whole:
            self._refuse(f"{dtype} values that are not whole, and the training was on {self}")
        return self.divisor

    def _takes(self, dtype: str) -> bool:
        """Whether images of a type that is not the stored one have a meaning."""
        if self.is_full:
            return self.is_converted and self.is_bright and dtype in ("uint8", *FLOATS)
        if dtype in FLOATS:
            return True
        # Unsigned integers are stored values if no smaller type has room for those of the training:
        # in pictures of 8 and 16 bits, values may be scaled to the range of the type.
        smaller = {"uint8": FULL["uint8"] / 2, "uint16": FULL["uint8"]}.get(dtype, 0)
        limits = np.iinfo(dtype)
        return limits.min <= self.low and smaller < self.extreme <= limits.max

    @property
    def is_bright(self) -> bool:
        """Whether values of the training reach into the upper half of their range."""
        return self.high > self.divisor / 2

    def _has_range(self, dtype: str, low: float, high: float) -> bool:
        """Whether stored values may have this range, by that of the training."""
        scale = self._replace(low=low, high=high)
        if scale.is_signed and not self.is_signed:
            return False
        least = DARK
        if self.is_integer:
            least = 1.0
        is_scaled = 0 < scale.extreme <= 1 and self.extreme > least
        if dtype in FLOATS and is_scaled:
            return False  # divided by something else before
        return scale.reach <= FAR * max(1.0, self.reach)

    def _has_room(self, low: float, high: float) -> bool:
        """Whether the type of the training can hold such values."""
        if not self.is_integer:
            return True
        limits = np.iinfo(self.dtype)
        return limits.min <= low <= high <= limits.max

    def _refuse(self, text: str) -> NoReturn:
        """Raise UsageError with what can be given to this network."""
        if not self.is_converted:
            usable = f"{self.dtype} values as stored (from {self.low:,g} to {self.high:,g}"
            if self.nodata is not None:
                usable += f", and {self.nodata:,g} where there are no data"
            usable += ")"
        elif self.is_integer:
            usable = self.dtype
            if self.is_bright:
                usable += ", or floats in [0, 1]"
        else:
            usable = "floats in [0, 1]"
        raise UsageError(f"{text}: give {usable}")


BYTES = Scale()  # the scale of a pack of bytes
