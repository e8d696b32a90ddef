"""The fields of a run's record, ``progress.jsonl``: one JSON object per line (jsonlines.org).

Every line has ``kind`` and ``time`` (UTC, ISO 8601, milliseconds); `FIELDS` lists the others by
kind. Epochs and steps count from 1, steps over the whole run. A resumed run first removes the lines
after its checkpoint, then appends another line of kind "run". JSON has no NaN and no infinity (RFC
8259): such a number is recorded as null, and ``nonfinite`` lists the names of these fields.

**To add a field**, add a line to `FIELDS` and pass the value where the record is made (for steps
``Recorder.write`` in training/loop.py). `scalar` makes TensorBoard show it, `deterministic` makes
``compare`` compare it. No other change is needed.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any, NamedTuple

from hpctrain.typed import parse_json

Record = Mapping[str, Any]


class Field(NamedTuple):
    """The values of a field, each of which may be null, and the commands that use them."""

    type: type  # int, float, str or bool
    is_object: bool = False  # an object of such values by name: seconds by phase, rows by split
    deterministic: bool = False  # equal runs record equal values: ``compare`` compares them
    scalar: bool = False  # shown by TensorBoard


COUNT, NUMBER, TEXT = Field(int), Field(float), Field(str)
EXACT_COUNT, EXACT_TEXT = Field(int, deterministic=True), Field(str, deterministic=True)
METRIC = Field(float, deterministic=True, scalar=True)

FIELDS: dict[str, dict[str, Field]] = {  # by kind, then by name
    "run": {},  # a launch: all facts of training/folder.py: run_facts
    "step": {  # means over the mini-batch of all ranks
        **dict.fromkeys(("epoch", "step", "slowest_rank"), COUNT),
        **dict.fromkeys(("loss", "accuracy", "learning_rate"), METRIC),
        "images_per_second": Field(float, scalar=True),
        "rows": EXACT_COUNT,  # images of the mini-batch
        "seconds": Field(float, is_object=True),  # data, compute, reduce, total; idle: the mean
        # time that a rank waits for the slowest
    },
    "epoch": {  # means over all its images
        "epoch": COUNT,
        **dict.fromkeys(("loss", "accuracy", "images_per_second", "seconds"), NUMBER),
    },
    "evaluation": {  # with the weights after `step`
        **dict.fromkeys(("epoch", "step"), COUNT),
        "split": EXACT_TEXT,
        **dict.fromkeys(("loss", "accuracy"), METRIC),
        "unweighted_loss": METRIC,  # with --class-weights
        "noisy": Field(float, deterministic=True),  # denoising: the loss of the noisy images
        "balanced_accuracy": METRIC,  # mean recall, where classes are weighted or sampled alike
        "metrics": Field(float, is_object=True, deterministic=True, scalar=True),  # of --metric
        "rows": EXACT_COUNT,
        "seconds": NUMBER,
    },
    "note": {"text": TEXT},
    "digest": {"step": COUNT, "digest": EXACT_TEXT},
    "end": {  # of a launch; metrics of the test may follow
        "status": TEXT,  # done, stopped, preempted, failed
        "reason": TEXT,
        "repeats": Field(bool),  # whether another launch would fail in the same way
        "seconds": NUMBER,  # since the line of kind "run"
        "steps": COUNT,
        "step_seconds": NUMBER,  # mean
        "shares": Field(float, is_object=True),  # of a step: data, compute, reduce, other
        "idle": NUMBER,  # share of a step that ranks wait for the slowest
        "slowest_rank": COUNT,  # most often
        "slowest_share": NUMBER,  # of the steps
        "digest": TEXT,
    },
}


def fields_marked(kind: str, mark: str) -> list[str]:
    """Return the fields of a kind for which `mark`, a flag of `Field`, is set."""
    return [name for name, field in FIELDS.get(kind, {}).items() if getattr(field, mark)]


def parse_record(line: bytes | str) -> dict[str, Any]:
    """Parse the record in one line. Raises ValueError if it is no JSON object with a kind."""
    record = parse_json(line)
    if not isinstance(record, dict) or "kind" not in record:
        raise ValueError("no JSON object with a kind")
    return record


def encode_record(record: Record) -> bytes:
    """Encode a record, its time in seconds since 1970, as a line of strict JSON in ASCII."""
    moment = datetime.fromtimestamp(record["time"], UTC).isoformat(timespec="milliseconds")
    record = {**record, "time": moment.replace("+00:00", "Z")}
    try:
        text = _ENCODER.encode(record)
    except ValueError:  # a number that JSON cannot hold
        found: list[str] = []
        text = _ENCODER.encode({**without_nonfinite(record, found), "nonfinite": found})
    return text.encode("ascii") + b"\n"


def without_nonfinite(value: Any, found: list[str] | None = None, name: str = "") -> Any:
    """Copy a value for JSON, with None for NaN and infinity.

    Their dotted names are appended to `found`; `name` is that of the value itself. Numbers of NumPy
    and torch become Python's; paths, devices and the like str.
    """
    if isinstance(value, Mapping):
        return {key: without_nonfinite(v, found, f"{name}.{key}") for key, v in value.items()}
    if isinstance(value, list | tuple):
        return [without_nonfinite(v, found, f"{name}.{i}") for i, v in enumerate(value)]
    if isinstance(value, float) and not math.isfinite(value):
        if found is not None:
            found.append(name.removeprefix("."))
        return None
    known = isinstance(value, str | int | float | None)
    return value if known else without_nonfinite(_to_json_type(value), found, name)


def _to_json_type(value: Any) -> Any:
    return value.tolist() if hasattr(value, "tolist") else str(value)


_ENCODER = json.JSONEncoder(allow_nan=False, default=_to_json_type)
