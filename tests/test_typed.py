"""Text from files becomes values of the types that are asked for, or one ValueError."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum

import pytest

from hpctrain.typed import from_fields, parse_toml


class Kind(StrEnum):
    ONE = "first"


@dataclass
class Facts:
    count: int
    rate: float
    name: str | None = None
    kind: Kind | None = None
    runs: tuple[tuple[int, int], ...] = ()
    shape: tuple[int, int] = (2, 3)
    figures: dict[str, float | None] = field(default_factory=dict)
    on: bool = False


SOUND = {
    "count": 5,
    "rate": 0.5,
    "name": "n",
    "kind": "first",
    "runs": [[0, 1], [1, 3]],
    "shape": [7, 11],
    "figures": {"loss": 1.5, "accuracy": None},
    "on": True,
}


def test_sound_fields_become_their_types():
    facts = from_fields(Facts, SOUND)
    assert facts.kind is Kind.ONE and facts.runs == ((0, 1), (1, 3)) and facts.shape == (7, 11)
    assert from_fields(Facts, {"count": 1, "rate": 2}) == Facts(1, 2.0)


@pytest.mark.parametrize(
    "name, value, said",
    [
        ("count", True, "count is True, not int"),
        ("count", 1.0, "count is 1.0, not int"),
        ("rate", "1", "rate is '1', not float"),
        ("rate", False, "rate is False, not float"),
        ("name", 3, "name is 3, not str"),
        ("kind", "second", "kind is 'second', not Kind"),
        ("kind", [], r"kind is \[\], not Kind"),
        ("runs", [[0, 1], [1]], r"runs\[1\] is \[1\], not tuple\[int, int\]"),
        ("runs", {"a": 1}, "runs is "),
        ("shape", [1, 2, 3], r"shape is \[1, 2, 3\], not tuple\[int, int\]"),
        ("figures", {"loss": "x"}, "figures.loss is 'x', not float"),
        ("figures", [1], r"figures is \[1\], not dict"),
        ("on", 1, "on is 1, not bool"),
        ("more", 1, "'more' is no field"),
    ],
)
def test_a_field_of_another_type_is_named(name, value, said):
    with pytest.raises(ValueError, match=f"^{said}"):
        from_fields(Facts, {**SOUND, name: value})


def test_a_missing_field_and_what_is_no_object_are_named():
    with pytest.raises(ValueError, match="^rate is missing$"):
        from_fields(Facts, {"count": 1})
    for value in ([], None, 3, "text"):
        with pytest.raises(ValueError, match=" is no object$"):
            from_fields(Facts, value)


@pytest.mark.parametrize("digits", [19, 300])
def test_whole_numbers_beyond_int64_are_refused(digits):
    with pytest.raises(ValueError, match="count is 9"):
        from_fields(Facts, {"count": int("9" * digits), "rate": 1.0})


def test_what_is_no_toml_is_refused():
    for text in (b"\xff\xfe", "a", "a = " + "9" * 5000):
        with pytest.raises(ValueError):
            parse_toml(text)
