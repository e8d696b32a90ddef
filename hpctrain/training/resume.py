"""Going on: what a run left in its folder, whether this launch may continue it, and the state of a
run as tensors and JSON.

A run is continued by the same command. Its plan is read, never resolved anew, so partitions,
batches and random numbers are those of its first launch; only the ranks, and what they carry, are
this launch's. Nothing in the state depends on ranks.
"""

from __future__ import annotations

import dataclasses
import json
import tomllib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from hpctrain.config import Config
from hpctrain.errors import UsageError
from hpctrain.parallel.determinism import hardware_key
from hpctrain.parallel.mpi import Comm, from_root
from hpctrain.parallel.reduce import broadcast
from hpctrain.plan import Plan
from hpctrain.report.folders import is_finished, last_step
from hpctrain.training.checkpoint import FOLDER, Checkpoint, newest, read
from hpctrain.training.lock import RunLock
from hpctrain.training.progress import Progress
from hpctrain.training.step import Trainer

# Settings that may change from launch to launch: they do not change what is computed.
FREE = {
    *("run", "runs_dir", "data", "data_dir", "init", "epochs", "worker_load", "device", "threads"),
    *("checkpoint_every", "keep", "resume", "time_limit", "timeout", "digest_every", "test"),
    *("progress", "tensorboard", "dry_run"),
}


Shapes = dict[str, tuple[torch.Size, torch.dtype]]


@dataclass(frozen=True)
class Earlier:
    """What an earlier launch of this run left."""

    folder: Path
    plan: Plan
    finished: bool  # it did all its epochs, or validation ended it
    step: int  # of the newest whole checkpoint; 0: the run is to begin again
    damage: list[str]  # newer ones, passed over


def find_earlier(config: Config, lock: RunLock) -> Earlier | None:
    """The run of this name, if there is one, locked (rank 0). UsageError where --resume forbids
    it, its settings are others, or another job works in it.
    """
    folder = Path(config.runs_dir) / (config.run or "")
    if config.run is None or not folder.exists():
        if config.resume == "must":
            raise UsageError(f"--resume must, but there is no run {folder}")
        return None
    if config.resume == "never":
        raise UsageError(f"the run {folder} exists: choose another name with --run")
    before, plan = read_settings(folder)
    check_same(config, before, folder)
    lock.take(folder)
    step, damage = newest(folder, last_step(folder))
    if step == 0 and config.resume == "must":
        raise UsageError(f"--resume must, but {folder / FOLDER} holds no whole checkpoint")
    return Earlier(folder, plan, is_finished(folder), step, damage)


def read_settings(folder: Path) -> tuple[Config, Plan]:
    """The configuration and the plan of a run. UsageError where this is no run's folder."""
    try:
        given = tomllib.loads((folder / "config.toml").read_text())
        plan = json.loads((folder / "plan.json").read_text())
        config = Config(**{n: v for n, v in given.items() if n in Config.__dataclass_fields__})
        return config, Plan.from_json(plan)
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise UsageError(
            f"{folder} exists but is no run to continue ({error}): choose another name with --run"
        ) from error


def check_same(config: Config, before: Config, folder: Path) -> None:
    """UsageError that names the first setting with which the run was not begun."""
    for field in dataclasses.fields(Config):
        old, new = getattr(before, field.name), getattr(config, field.name)
        if field.name not in FREE and old != new:
            flag = "--" + field.name.replace("_", "-")
            raise UsageError(
                f"the run {folder} was begun with {flag} {_said(old)}, not {_said(new)}: give the"
                " same settings to continue it, or another name with --run"
            )


def _said(value: object) -> str:
    return "not set" if value is None else str(value)


def gather(trainer: Trainer, state: Progress) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    """The state of a run: tensors, and what JSON can hold."""
    tensors = {"weights": trainer.message.weights.data}
    for name, value in trainer.optimizer.state[trainer.message.weights].items():
        if isinstance(value, torch.Tensor):
            tensors[f"optimizer.{name}"] = value
    norms = trainer.norms
    tensors |= {"norms.running": norms.running, "norms.shift": norms.shift}
    tensors["norms.updates"] = norms.updates
    tensors |= {f"model.{name}": value for name, value in untrained(trainer).items()}
    tensors |= {f"best.{number}": tensor for number, tensor in enumerate(state.best or ())}
    known = {
        "layout": trainer.message.layout.digest(),
        "key": hardware_key(trainer.message.device),
    }
    return tensors, {**known, **state.to_json()}


def untrained(trainer: Trainer) -> dict[str, torch.Tensor]:
    """Frozen parameters, and buffers that are not batch norm's running statistics."""
    own = {id(b) for layer in trainer.norms.layers.values() for b in layer.buffers()}
    found = {name: b for name, b in trainer.model.named_buffers() if id(b) not in own}
    return found | {n: p.data for n, p in trainer.model.named_parameters() if not p.requires_grad}


def restore(earlier: Earlier | None, trainer: Trainer, state: Progress, comm: Comm) -> list[str]:
    """Put a run into the state that an earlier launch saved; rank 0 reads it. Lines worth a note
    in the record. Collective.
    """
    if earlier is None:
        return []
    if earlier.step == 0:
        return earlier.damage
    mine: list[Checkpoint] = []

    def look() -> tuple[dict[str, Any], Shapes]:
        mine.append(read(earlier.folder, earlier.step))
        shapes = {name: (t.shape, t.dtype) for name, t in mine[0].tensors.items()}
        layout = trainer.message.layout.digest()
        if mine[0].state["layout"] != layout:
            raise UsageError(
                f"the checkpoint of {earlier.folder} holds parameters laid out as"
                f" {mine[0].state['layout']}, the model's are {layout}: it is another model"
            )
        return mine[0].state, shapes

    saved, shapes = from_root(comm, look)
    state.from_json(saved)
    tensors = {}
    for name, (shape, dtype) in shapes.items():
        tensors[name] = mine[0].tensors[name] if mine else torch.empty(shape, dtype=dtype)
        broadcast(comm, tensors[name])
    with torch.no_grad():
        _put(trainer, state, tensors, trainer.message.device)
    notes = [*earlier.damage, f"going on after step {state.step}"]
    if earlier.plan.deterministic and saved["key"] != (
        here := hardware_key(trainer.message.device)
    ):
        notes.append(f"begun on {saved['key']}, now on {here}: the bits may differ")
    return notes


def _put(
    trainer: Trainer, state: Progress, tensors: dict[str, torch.Tensor], device: torch.device
) -> None:
    weights, norms, buffers = trainer.message.weights, trainer.norms, untrained(trainer)
    weights.data.copy_(tensors["weights"])
    for name, tensor in tensors.items():
        kind, _, rest = name.partition(".")
        if kind == "optimizer":
            # Adam's counter lies beside the weights, like everything else of the fused optimizers.
            trainer.optimizer.state[weights][rest] = tensor.to(device)
        elif kind == "model":
            buffers[rest].copy_(tensor)
    norms.running.copy_(tensors["norms.running"])
    norms.shift.copy_(tensors["norms.shift"])
    norms.updates.copy_(tensors["norms.updates"])
    norms.restore()
    best = [name for name in tensors if name.startswith("best.")]
    state.best = [tensors[f"best.{i}"].to(device) for i in range(len(best))] or None
