"""JSON from files that anybody may have written: RFC 8259, with bounds, never a traceback."""

from __future__ import annotations

import json
import math
from typing import Any, NoReturn

LONGEST = 300  # digits of a whole number: a float64 can hold about as large ones


def parse_json(content: bytes | str) -> Any:
    """The value that `content` holds. ValueError for what is no JSON, for NaN and infinity, for
    numbers beyond float64, and for nesting deeper than the parser goes.
    """
    try:
        return _DECODER.decode(content if isinstance(content, str) else content.decode())
    except json.JSONDecodeError as error:
        raise ValueError(f"no JSON: {error.msg} at character {error.pos}") from None
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


def _whole(digits: str) -> int:
    if len(digits) > LONGEST:
        raise ValueError(f"a whole number of {len(digits)} digits is too large")
    return int(digits)


def _real(digits: str) -> float:
    if not math.isfinite(number := float(digits)):
        raise ValueError(f"the number {digits[:20]} is too large")
    return number


def _constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is no number of JSON")


_DECODER = json.JSONDecoder(parse_int=_whole, parse_float=_real, parse_constant=_constant)
