"""The fields of a run's record, ``progress.jsonl``: one JSON object a line (jsonlines.org).

Every line has ``kind`` and ``time`` (UTC, ISO 8601, milliseconds); `FIELDS` lists the others by
kind. Epochs and steps count from 1, steps over the whole run. A resumed run appends another line of
kind "run"; what came after its checkpoint is taken out first. JSON has no NaN and no infinity
(RFC 8259): such a number is null, and ``nonfinite`` lists the fields concerned.

**To add a field**, add a line to `FIELDS` and pass the value where the record is made (for steps
``Recorder.step`` in training/steps.py). `scalar` makes TensorBoard show it, `label` makes ``plot``
draw a panel of it, `deterministic` makes ``compare`` look at it. Nothing else has to know of it.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from typing import Any, NamedTuple

from hpctrain.text import brief
from hpctrain.typed import parse_json

Record = Mapping[str, Any]
MOST = 1 << 53  # a float64 holds all smaller whole numbers
MOST_PARTS = 32  # of a field that is an object


class Field(NamedTuple):
    """What a field of a record may hold (null is always allowed unless it is required), and who
    takes it besides the record.
    """

    is_valid: Callable[[Any], bool]
    required: bool = False
    deterministic: bool = False  # equal runs record equal values: ``compare`` looks at it
    scalar: bool = False  # shown by TensorBoard
    label: str = ""  # of the panel that ``plot`` draws of it


def is_count(value: Any) -> bool:
    """A whole number that is not negative."""
    return type(value) is int and 0 <= value < MOST


def is_number(value: Any) -> bool:
    """A finite number: the parser refuses all others."""
    return type(value) in (int, float)


def is_text(value: Any) -> bool:
    """A string."""
    return isinstance(value, str)


def is_seconds(value: Any) -> bool:
    """A duration."""
    return is_number(value) and value >= 0


def has_parts(check: Callable[[Any], bool]) -> Callable[[Any], bool]:
    """An object of such values: seconds by phase, rows by split."""

    def are_all(value: Any) -> bool:
        if not isinstance(value, dict) or len(value) > MOST_PARTS:
            return False
        return all(part is None or check(part) for part in value.values())

    return are_all


COUNT, NUMBER, TEXT, SECONDS = Field(is_count), Field(is_number), Field(is_text), Field(is_seconds)
LOSS = Field(is_number, deterministic=True, scalar=True, label="loss")
ACCURACY = Field(is_number, deterministic=True, scalar=True, label="accuracy (%)")
EXACT_COUNT = Field(is_count, deterministic=True)

FIELDS: dict[str, dict[str, Field]] = {  # by kind, then by name
    "run": {  # a launch; whatever else describes it is written as well
        **dict.fromkeys(("format", "epochs", "steps_per_epoch", "batch_size", "ranks"), COUNT),
        **dict.fromkeys(("shards", "threads", "parameters", "host_ranks", "host_cores"), COUNT),
        **dict.fromkeys(("name", "folder", "model", "device", "precision", "mpi"), TEXT),
        **dict.fromkeys(("pack", "plan", "rank_shares"), TEXT),
        "learning_rate": NUMBER,
        "rows": Field(has_parts(is_count)),  # images by split
    },
    "step": {
        "epoch": COUNT,
        "step": Field(is_count, required=True),
        "loss": LOSS,  # mean over the mini-batch of all ranks
        "accuracy": ACCURACY,
        "learning_rate": Field(is_number, deterministic=True, scalar=True),
        "images_per_second": Field(is_number, scalar=True),
        "slowest_rank": COUNT,
        "rows": EXACT_COUNT,  # images of the mini-batch
        "seconds": Field(has_parts(is_seconds)),  # data, compute, reduce, total; idle: a rank's
        # mean time of waiting for the slowest
    },
    "epoch": {  # means over all its images
        "epoch": Field(is_count, required=True),
        "loss": NUMBER,
        "accuracy": NUMBER,
        "images_per_second": NUMBER,
        "seconds": SECONDS,
    },
    "evaluation": {  # with the weights after `step`
        "epoch": COUNT,
        "step": Field(is_count, required=True),
        "split": Field(is_text, required=True, deterministic=True),
        "loss": LOSS,
        "noisy": Field(is_number, deterministic=True),  # denoising: the loss of the noisy images
        "accuracy": ACCURACY,
        "rows": EXACT_COUNT,
        "seconds": SECONDS,
    },
    "note": {"text": Field(is_text, required=True)},
    "digest": {
        "step": Field(is_count, required=True),
        "digest": Field(is_text, required=True, deterministic=True),
    },
    "end": {  # of a launch; figures of the test may follow
        "status": Field(is_text, required=True),  # done, stopped, preempted, failed
        "reason": TEXT,
        "seconds": SECONDS,  # since the line of kind "run"
        "steps": COUNT,
        "step_seconds": NUMBER,  # mean
        "shares": Field(has_parts(is_number)),  # of a step: data, compute, reduce, other
        "idle": NUMBER,  # share of a step that ranks wait for the slowest
        "slowest_rank": COUNT,  # most often
        "slowest_share": NUMBER,  # of the steps
        "digest": TEXT,
    },
}
REQUIRED = {
    kind: [name for name, field in fields.items() if field.required]
    for kind, fields in FIELDS.items()
}
LABELS = {name: field.label for name, field in FIELDS["step"].items() if field.label}  # of curves


def deterministic_fields(kind: str) -> list[str]:
    """The fields that equal runs record alike."""
    return [name for name, field in FIELDS.get(kind, {}).items() if field.deterministic]


def scalar_fields(kind: str) -> list[str]:
    """The fields that TensorBoard shows."""
    return [name for name, field in FIELDS.get(kind, {}).items() if field.scalar]


def parse_record(line: bytes | str) -> dict[str, Any]:
    """The record in one line. ValueError says what is wrong with it: no JSON object with a kind, a
    required field that is missing, a value that its field cannot hold.
    """
    record = parse_json(line)
    if not isinstance(record, dict) or not isinstance(kind := record.get("kind"), str):
        raise ValueError("no JSON object with a kind")
    for name in REQUIRED.get(kind, ()):
        if record.get(name) is None:
            raise ValueError(f"a record of kind {kind} without {name}")
    fields = FIELDS.get(kind, {})
    for name, value in record.items():
        field = TEXT if name == "time" else fields.get(name)
        if field and value is not None and not field.is_valid(value):
            shown = (
                type(value).__name__ if isinstance(value, dict | list) else brief(repr(value), 40)
            )
            raise ValueError(f"{name} cannot be {shown}")
    return record


def encode_record(record: Record) -> bytes:
    """One record, its time in seconds since 1970, as a line of strict JSON in ASCII, newline
    included.
    """
    moment = datetime.fromtimestamp(record["time"], UTC).isoformat(timespec="milliseconds")
    record = {**record, "time": moment.replace("+00:00", "Z")}
    try:
        text = _ENCODER.encode(record)
    except ValueError:  # a number that JSON cannot hold
        found: list[str] = []
        text = _ENCODER.encode({**_replace_nonfinite(record, "", found), "nonfinite": found})
    return text.encode("ascii") + b"\n"


def _replace_nonfinite(value: Any, name: str, found: list[str]) -> Any:
    """Copy `value` with None for NaN and infinity, whose dotted names are added to `found`."""
    if isinstance(value, Mapping):
        items = value.items()
        return {key: _replace_nonfinite(item, f"{name}.{key}", found) for key, item in items}
    if isinstance(value, list | tuple):
        return [_replace_nonfinite(v, f"{name}.{i}", found) for i, v in enumerate(value)]
    if isinstance(value, float) and not math.isfinite(value):
        found.append(name.removeprefix("."))
        return None
    if not isinstance(value, str | int | float | None):
        return _replace_nonfinite(_to_json_type(value), name, found)
    return value


def _to_json_type(value: Any) -> Any:
    """Numbers of NumPy and torch as Python's; paths, devices and the like as text."""
    return value.tolist() if hasattr(value, "tolist") else str(value)


_ENCODER = json.JSONEncoder(allow_nan=False, separators=(", ", ": "), default=_to_json_type)
