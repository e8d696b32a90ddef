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

from hpctrain.typed import parse_json, typed

Record = Mapping[str, Any]


class Field(NamedTuple):
    """The values that a field of a record may hold, and the commands that use them.

    null is allowed, unless the field is required.
    """

    type: type  # int, float, str or bool
    is_object: bool = False  # an object of such values by name: seconds by phase, rows by split
    required: bool = False
    deterministic: bool = False  # equal runs record equal values: ``compare`` compares them
    scalar: bool = False  # shown by TensorBoard

    def check(self, value: Any, name: str) -> None:
        """Raise ValueError if the field cannot hold `value`."""
        for each in typed(value, dict[str, Any], name).values() if self.is_object else (value,):
            if each is not None and type(each) is not self.type:
                typed(each, self.type, name)


COUNT, NUMBER, TEXT = Field(int), Field(float), Field(str)
PHASES = Field(float, is_object=True)  # seconds by phase
METRIC = Field(float, deterministic=True, scalar=True)
EXACT_COUNT = Field(int, deterministic=True)

FIELDS: dict[str, dict[str, Field]] = {  # by kind, then by name
    "run": {  # a launch; other facts that describe it are recorded, too
        **dict.fromkeys(("format", "epochs", "steps_per_epoch", "batch_size", "ranks"), COUNT),
        **dict.fromkeys(("shards", "threads", "parameters", "host_ranks", "host_cores"), COUNT),
        **dict.fromkeys(("name", "folder", "model", "device", "precision", "mpi"), TEXT),
        **dict.fromkeys(("pack", "plan", "rank_shares"), TEXT),
        "learning_rate": NUMBER,
        "rows": Field(int, is_object=True),  # images by split
    },
    "step": {
        "epoch": COUNT,
        "step": Field(int, required=True),
        "loss": METRIC,  # mean over the mini-batch of all ranks
        "accuracy": METRIC,
        "learning_rate": Field(float, deterministic=True, scalar=True),
        "images_per_second": Field(float, scalar=True),
        "slowest_rank": COUNT,
        "rows": EXACT_COUNT,  # images of the mini-batch
        "seconds": PHASES,  # data, compute, reduce, total; idle: the mean time
        # that a rank waits for the slowest
    },
    "epoch": {  # means over all its images
        "epoch": Field(int, required=True),
        "loss": NUMBER,
        "accuracy": NUMBER,
        "images_per_second": NUMBER,
        "seconds": NUMBER,
    },
    "evaluation": {  # with the weights after `step`
        "epoch": COUNT,
        "step": Field(int, required=True),
        "split": Field(str, required=True, deterministic=True),
        "loss": METRIC,
        "unweighted_loss": Field(float, deterministic=True, scalar=True),  # with --class-weights
        "noisy": Field(float, deterministic=True),  # denoising: the loss of the noisy images
        "accuracy": METRIC,
        "balanced_accuracy": Field(float, deterministic=True, scalar=True),  # mean recall, where
        # classes are weighted or sampled alike
        "metrics": Field(float, is_object=True, deterministic=True, scalar=True),  # of --metric
        "rows": EXACT_COUNT,
        "seconds": NUMBER,
    },
    "note": {"text": Field(str, required=True)},
    "digest": {
        "step": Field(int, required=True),
        "digest": Field(str, required=True, deterministic=True),
    },
    "end": {  # of a launch; metrics of the test may follow
        "status": Field(str, required=True),  # done, stopped, preempted, failed
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
    """Return the fields of a kind for which `mark`, a flag of `Field`, is set.

    `mark` is "deterministic" (equal runs record equal values) or "scalar" (shown by TensorBoard).
    """
    return [name for name, field in FIELDS.get(kind, {}).items() if getattr(field, mark)]


def parse_record(line: bytes | str) -> dict[str, Any]:
    """Parse the record in one line.

    Raises ValueError if the line is not a JSON object with a kind, if a required field is missing,
    or if a field cannot hold its value.
    """
    record = parse_json(line)
    if not isinstance(record, dict) or not isinstance(kind := record.get("kind"), str):
        raise ValueError("no JSON object with a kind")
    for name, field in {"time": TEXT, **FIELDS.get(kind, {})}.items():
        if (value := record.get(name)) is not None:
            field.check(value, name)
        elif field.required:
            raise ValueError(f"a record of kind {kind} without {name}")
    return record


def encode_record(record: Record) -> bytes:
    """Encode one record as a line of strict JSON in ASCII, newline included.

    ``record["time"]`` is in seconds since 1970.
    """
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
        parts = value.items()
        return {key: without_nonfinite(each, found, f"{name}.{key}") for key, each in parts}
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
