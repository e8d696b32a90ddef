"""Read the settings and the plan of a run from their files; adapt the plan to another launch."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hpctrain.config import Config, worker_loads
from hpctrain.errors import UsageError
from hpctrain.parallel.placement import assign_shards
from hpctrain.plan import VERSION, Facts, Plan, cpu_threads, model_name
from hpctrain.text import brief
from hpctrain.typed import from_fields, parse_toml


def read_config(text: bytes) -> Config:
    """Return the settings of a run from the text of its config.toml.

    Raises ValueError that names the field if one is unknown or of another type.
    """
    return from_fields(Config, parse_toml(text))


def read_plan(fields: Any) -> Plan:
    """Return the plan with the fields that `Plan.to_json` wrote.

    Raises ValueError that names the field if one is missing, unknown or of another type, and
    ValueError if the digest is not that of the fields.
    """
    digest = fields.pop("digest", None) if isinstance(fields, dict) else None
    plan = from_fields(Plan, fields)
    if digest != plan.digest():
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
