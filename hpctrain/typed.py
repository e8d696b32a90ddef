"""JSON (RFC 8259), and values checked against the types that the reader expects."""

from __future__ import annotations

import json
import math
import typing
from types import NoneType, UnionType
from typing import Any

from hpctrain.text import brief

LARGEST = 2**63 - 1  # int64


def _finite(text: str) -> float:
    if not math.isfinite(number := float(text)):  # NaN, Infinity, 1e999
        raise ValueError(f"{text[:20]} is no number of JSON")
    return number


_DECODER = json.JSONDecoder(parse_float=_finite, parse_constant=_finite)


def parse_json(content: bytes | str) -> Any:
    """Parse a JSON text.

    Raises ValueError if it is not JSON or holds NaN, infinity or a number beyond float64.
    """
    try:
        return _DECODER.decode(content if isinstance(content, str) else content.decode())
    except json.JSONDecodeError as error:
        raise ValueError(f"no JSON: {error.msg} at character {error.pos}") from None


def typed(value: Any, wanted: Any, name: str) -> Any:
    """Return `value` as the type `wanted`. Raises ValueError that names the field.

    `wanted` is bool, int, float, str, Any, X | None, or a tuple or dict of these.
    """
    kind, inner = typing.get_origin(wanted), typing.get_args(wanted)
    if kind is UnionType:
        (other,) = (each for each in inner if each is not NoneType)
        return None if value is None else typed(value, other, name)
    if kind is tuple and isinstance(value, list):
        kinds = [inner[0]] * len(value) if inner[-1] is ... else inner
        if len(kinds) == len(value):
            pairs = enumerate(zip(value, kinds, strict=True))
            return tuple(typed(item, each, f"{name}[{i}]") for i, (item, each) in pairs)
    elif kind is dict and isinstance(value, dict):
        return {key: typed(item, inner[1], f"{name}.{key}") for key, item in value.items()}
    elif type(value) is int and wanted in (int, float) and abs(value) <= LARGEST:
        return wanted(value)
    elif wanted is Any or (type(value) is wanted and wanted is not int):
        return value
    expected = wanted if kind else wanted.__name__
    raise ValueError(f"{name} is {brief(repr(value), 50)}, not {expected}")
