"""Read the settings and the plan of a run from their files, and adapt the plan to another launch.

The plan is checked, because steps and memory depend on its numbers.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hpctrain.config import Config, renamed, worker_loads
from hpctrain.errors import UsageError
from hpctrain.parallel.placement import assign_shards
from hpctrain.plan import VERSION, Facts, Plan, cpu_threads, model_name
from hpctrain.text import brief
from hpctrain.typed import from_fields, parse_toml

MOST_CORES = 1 << 16  # of any machine
POSITIVE = ("epochs", "rows", "classes", "block_rows", "window_blocks", "evaluation_rows")


def read_config(text: bytes) -> Config:
    """Return the settings of a run from the text of its config.toml, also an earlier version's.

    Raises ValueError that names the field if one is of another type.
    """
    known = Config.__dataclass_fields__
    given = {name: value for name, value in renamed(parse_toml(text)).items() if name in known}
    return from_fields(Config, given)


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
        "class_weights": len(plan.class_weights) in (0, plan.classes)
        and all(0 < weight < math.inf for weight in plan.class_weights),
        "batch_size": plan.batch_size == sum(plan.shares),
        "last": len(plan.last) == plan.shards and all(0 <= r <= b for r, b in pairs),
        "steps_per_epoch": plan.rows - (plan.steps_per_epoch - 1) * plan.batch_size
        == sum(plan.last)
        > 0,
    }
    for name, fine in fits.items():
        if not fine:
            raise ValueError(
                f"{name} is {getattr(plan, name)}, which does not fit the rest of the plan"
            )
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


def go_on(plan: Plan, config: Config, facts: Facts) -> Plan:
    """Adapt the plan of a run's first launch to the ranks, threads and larger --epochs of this one.

    Raises UsageError, with the difference, if the data, the device, the model or the version of
    the plan has changed.
    """
    if plan.version != VERSION:
        raise UsageError(
            f"the run was begun by an hpctrain that reads the rows in another order (its plan has"
            f" version {plan.version}, this hpctrain's {VERSION}): finish it with the one that"
            " began it, or begin a new run with another --run"
        )
    for what, old, new in (
        ("pack", plan.pack_uuid, facts.pack_uuid),
        ("device", plan.device, facts.device),
        ("training images", plan.rows, facts.rows),
        ("image shape", plan.image_shape, facts.image_shape),
        ("model", plan.model, model_name(config, facts.image_shape)),
        ("class weights", plan.class_weights, facts.class_weights),
    ):
        if old != new:
            raise UsageError(
                f"the run was begun with {what} {brief(old)}, not {brief(new)}: it cannot go on"
            )
    runs = assign_shards(plan.shards, facts.ranks, worker_loads(config.worker_load))
    epochs = max(plan.epochs, config.epochs or 0)
    return dataclasses.replace(
        plan,
        ranks=facts.ranks,
        runs=tuple((run.start, run.stop) for run in runs),
        threads=cpu_threads(config, facts.threads, plan),
        epochs=epochs,
    )
