"""What the fields of a record may hold: everything that reads records relies on it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from hpctrain.strictjson import parse_json

NEEDS: dict[str, tuple[str, ...]] = {  # by kind
    "step": ("step",),
    "epoch": ("epoch",),
    "evaluation": ("step", "split"),
    "digest": ("step", "digest"),
    "note": ("text",),
    "end": ("status",),
}
# By name, whatever the kind, where they are there and not null.
COUNTS = (
    "format step epoch epochs steps_per_epoch ranks shards threads parameters batch_size host_ranks"
    " host_cores"
)
NUMBERS = "loss accuracy noisy learning_rate images_per_second step_seconds idle slowest_share"
TEXTS = (
    "time name folder model device precision mpi pack plan rank_shares split text digest status"
    " reason"
)
MOST = 1 << 53  # a float64 holds all smaller whole numbers
MOST_PARTS = 32  # of a field that is an object


def parse_record(line: bytes | str) -> dict[str, Any]:
    """The record in one line. ValueError says why it is none: no object with a kind, without what
    its kind needs, or with a field that cannot hold what it does.
    """
    record = parse_json(line)
    if not isinstance(record, dict) or not isinstance(kind := record.get("kind"), str):
        raise ValueError("no JSON object with a kind")
    for name in NEEDS.get(kind, ()):
        if record.get(name) is None:
            raise ValueError(f"a record of kind {kind} without {name}")
    for name, value in record.items():
        if value is not None and name in FIELDS and not FIELDS[name](value):
            shown = type(value).__name__ if isinstance(value, dict | list) else repr(value)[:40]
            raise ValueError(f"{name} cannot be {shown}")
    return record


def _is_count(value: Any) -> bool:
    return type(value) is int and 0 <= value < MOST


def _is_number(value: Any) -> bool:
    return type(value) in (int, float)


def _is_text(value: Any) -> bool:
    return isinstance(value, str)


def _is_seconds(value: Any) -> bool:
    return _is_number(value) and value >= 0


def _or_parts(check: Callable[[Any], bool]) -> Callable[[Any], bool]:
    """One value, or an object of some: seconds by phase, rows by split."""

    def are_all(value: Any) -> bool:
        if not isinstance(value, dict):
            return check(value)
        return len(value) <= MOST_PARTS and all(v is None or check(v) for v in value.values())

    return are_all


FIELDS: dict[str, Callable[[Any], bool]] = {
    **dict.fromkeys(COUNTS.split(), _is_count),
    **dict.fromkeys(NUMBERS.split(), _is_number),
    **dict.fromkeys(TEXTS.split(), _is_text),
    "slowest_rank": _is_count,
    "rows": _or_parts(_is_count),
    "seconds": _or_parts(_is_seconds),
    "shares": _or_parts(_is_number),
}
