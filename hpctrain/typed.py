"""JSON (RFC 8259) and TOML, checked against the types that the reader expects.

Their content becomes values of these types, or a ValueError that names the field is raised.
"""

from __future__ import annotations

import dataclasses
import enum
import functools
import json
import math
import reprlib
import tomllib
import typing
from types import NoneType, UnionType
from typing import Any, NoReturn, TypeVar, cast

T = TypeVar("T")
LARGEST = 2**63 - 1  # int64
_hints = functools.cache(typing.get_type_hints)
_short = reprlib.Repr()
_short.maxother = _short.maxstring = _short.maxlong = 50


def parse_json(content: bytes | str) -> Any:
    """Parse a JSON text.

    Raises ValueError if it is not JSON or holds NaN, infinity or a number beyond float64.
    """
    try:
        return _DECODER.decode(content if isinstance(content, str) else content.decode())
    except json.JSONDecodeError as error:
        raise ValueError(f"no JSON: {error.msg} at character {error.pos}") from None


def parse_toml(text: str | bytes) -> dict[str, Any]:
    """Parse a TOML text and return its top-level table. Raises ValueError if it is not TOML."""
    return tomllib.loads(text if isinstance(text, str) else text.decode())


def from_fields(kind: type[T], fields: Any) -> T:
    """Return the dataclass `kind` with the fields of a JSON object.

    Raises ValueError that names the field if one is missing, unknown or of another type.
    """
    if not isinstance(fields, dict):
        raise ValueError(f"{_short.repr(fields)} is no object")
    known, types = dataclasses.fields(cast(Any, kind)), _hints(cast(Any, kind))
    absent = (dataclasses.MISSING, dataclasses.MISSING)
    for field in known:
        if field.name not in fields and (field.default, field.default_factory) == absent:
            raise ValueError(f"{field.name} is missing")
    if unknown := [name for name in fields if name not in types]:
        raise ValueError(f"{_short.repr(unknown[0])} is no field")
    return kind(**{name: typed(value, types[name], name) for name, value in fields.items()})


def typed(value: Any, wanted: Any, name: str) -> Any:
    """Return `value` as the type `wanted`. Raises ValueError that names the field.

    `wanted` is bool, int, float, str, StrEnum, Any, X | None, or a tuple or dict of these.
    """
    kind, inner = typing.get_origin(wanted), typing.get_args(wanted)
    if wanted is Any:
        return value
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
    elif kind is None and issubclass(wanted, enum.Enum):
        if value in list(wanted):
            return wanted(value)
    elif type(value) is int:
        if wanted in (int, float) and abs(value) <= LARGEST:
            return wanted(value)
    elif type(value) is wanted:
        return value
    expected = wanted if kind or wanted is enum.Enum else wanted.__name__
    raise ValueError(f"{name} is {_short.repr(value)}, not {expected}")


def _real(digits: str) -> float:
    if not math.isfinite(number := float(digits)):
        raise ValueError(f"the number {digits[:20]} is too large")
    return number


def _constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is no number of JSON")


_DECODER = json.JSONDecoder(parse_float=_real, parse_constant=_constant)
