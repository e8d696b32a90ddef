"""Read a plan back from its file and check it, because steps and memory depend on its numbers."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hpctrain.config import Config, renamed
from hpctrain.errors import UsageError
from hpctrain.plan import Plan
from hpctrain.typed import from_fields

MOST_CORES = 1 << 16  # of any machine
POSITIVE = ("epochs", "rows", "classes", "block_rows", "window_blocks", "evaluation_rows")


def read_plan(fields: Any) -> Plan:
    """Return the plan with the fields that `Plan.to_json` wrote.

    Raises ValueError that names the field if one is missing, unknown, of another type or
    inconsistent with the others, and ValueError if the digest is not that of the fields.
    """
    digest = None  # not stored in earlier plans
    if isinstance(fields, dict):
        fields = {"version": 1, **renamed(fields)}  # not stored in the first plans
        digest = fields.pop("digest", None)
    plan = from_fields(Plan, fields)
    choices = {f.name: f.metadata["choices"] for f in dataclasses.fields(Config)}
    pairs = list(zip(plan.last, plan.shares, strict=False))
    fits = {name: value in choices[name] for name, value in fields.items() if choices.get(name)}
    fits |= {name: fields[name] > 0 for name in POSITIVE}
    fits |= {
        "threads": 0 < plan.threads <= MOST_CORES,
        "image_shape": min(plan.image_shape) > 0,
        "shares": len(plan.shares) == plan.shards and min(plan.shares, default=0) > 0,
        "batch_size": plan.batch_size == sum(plan.shares),
        "last": len(plan.last) == plan.shards and all(0 <= r <= b for r, b in pairs),
        "steps_per_epoch": plan.rows - (plan.steps_per_epoch - 1) * plan.batch_size
        == sum(plan.last)
        > 0,
    }
    for name, fine in fits.items():
        if not fine:
            raise ValueError(f"{name} is {fields[name]}, which does not fit the rest of the plan")
    if digest not in (None, plan.digest()):
        raise ValueError(f"its digest is {plan.digest()}, and not {str(digest)[:16]} as it says")
    return plan


def check_recorded(plan: Plan, path: Path, launch: Mapping[str, Any]) -> None:
    """Raise UsageError if the plan in the file `path` is not that of the last recorded `launch`.

    A launch with more epochs or other threads may have died before it was recorded.
    """
    own = {name: launch[name] for name in ("epochs", "threads") if launch.get(name)}
    recorded = launch.get("plan")
    if recorded not in (None, plan.digest(), dataclasses.replace(plan, **own).digest()):
        raise UsageError(
            f"{path} is not the plan that the run was begun with: its digest is {plan.digest()}, in"
            f" the record it is {recorded}. Put the file of this run back; or, where the record is"
            ' wrong, take its lines of kind "run" out'
        )
