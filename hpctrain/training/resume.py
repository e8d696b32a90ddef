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
from operator import itemgetter
from pathlib import Path
from typing import Any

import torch

from hpctrain.config import Config
from hpctrain.errors import UsageError
from hpctrain.parallel.determinism import hardware_key
from hpctrain.parallel.mpi import Comm, agreed, from_root
from hpctrain.parallel.reduce import broadcast
from hpctrain.plan import Plan
from hpctrain.report.folders import is_finished, scan_record
from hpctrain.report.jsonlines import FILE_NAME
from hpctrain.training.checkpoint import FOLDER, Checkpoint, newest
from hpctrain.training.lock import RunLock
from hpctrain.training.progress import Progress
from hpctrain.training.step import Trainer

# Settings that may change from launch to launch: they do not change what is computed.
FREE = {
    *("run", "runs_dir", "data", "data_dir", "read_buffer", "epochs", "worker_load"),
    *("stage", "verify", "skip_bad", "reduce", "overlap"),
    *("device", "threads", "checkpoint_every", "keep", "resume", "time_limit", "timeout"),
    *("digest_every", "test", "progress", "tensorboard", "dry_run"),
}


Shapes = dict[str, tuple[torch.Size, torch.dtype]]


@dataclass(frozen=True)
class Earlier:
    """What an earlier launch of this run left."""

    folder: Path
    plan: Plan
    finished: bool  # it did all its epochs, or validation ended it
    checkpoint: Checkpoint | None  # the newest whole one; without one the run is to begin again
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
    if config.epochs and config.epochs < plan.epochs and not is_finished(folder):
        raise UsageError(
            f"the run {folder} was begun with {plan.epochs} epochs, which --epochs {config.epochs}"
            " cannot take back: ask it to stop, or choose another name with --run"
        )
    lock.take(folder)
    recorded, unreadable = scan_record(folder)
    checkpoint, damage = newest(folder, recorded)
    if unreadable and (folder / FILE_NAME).exists():
        damage.insert(0, f"{unreadable}: the record is cut off there")
    if checkpoint is None and config.resume == "must":
        raise UsageError(f"--resume must, but {folder / FOLDER} holds no whole checkpoint")
    return Earlier(folder, plan, is_finished(folder), checkpoint, damage)


def read_settings(folder: Path) -> tuple[Config, Plan]:
    """The configuration and the plan of a run. UsageError where this is no run's folder."""
    try:
        given = tomllib.loads((folder / "config.toml").read_text())
        plan = json.loads((folder / "plan.json").read_text())
        config = Config(**{n: v for n, v in given.items() if n in Config.__dataclass_fields__})
        return config, Plan.from_json(plan)
    except FileNotFoundError as error:
        raise UsageError(
            f"{folder} exists but is no run to continue, it has no {Path(error.filename).name}:"
            " choose another name with --run"
        ) from error
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise UsageError(
            f"{folder} cannot be continued, its config.toml or plan.json is damaged ({error}):"
            " choose another name with --run"
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
    tensors = trainer.tensors()
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
    if earlier is None or (checkpoint := earlier.checkpoint) is None:
        return [*earlier.damage, "no checkpoint was left: from the first step"] if earlier else []
    layout, saved = trainer.message.layout.digest(), checkpoint.state
    if saved["layout"] != layout:
        raise agreed(
            UsageError(
                f"the checkpoint of {earlier.folder} holds parameters laid out as"
                f" {saved['layout']}, the model's are {layout}: it is another model"
            )
        )
    state.from_json(saved)
    _put(trainer, state, _on_all(comm, checkpoint))
    notes = [*earlier.damage, f"going on after step {state.step}"]
    here = hardware_key(trainer.message.device)
    if earlier.plan.deterministic and saved["key"] != here:
        notes.append(f"begun on {saved['key']}, now on {here}: the bits may differ")
    return notes


def _on_all(comm: Comm, checkpoint: Checkpoint) -> dict[str, torch.Tensor]:
    """The tensors of a checkpoint, read by rank 0, on all ranks. Collective."""
    mine: dict[str, torch.Tensor] = {}

    def shapes() -> Shapes:
        mine.update(checkpoint.tensors())
        return {name: (tensor.shape, tensor.dtype) for name, tensor in mine.items()}

    for name, (shape, dtype) in from_root(comm, shapes).items():
        broadcast(comm, mine.setdefault(name, torch.empty(shape, dtype=dtype)))
    return mine


@torch.no_grad()
def _put(trainer: Trainer, state: Progress, tensors: dict[str, torch.Tensor]) -> None:
    """Give the tensors that `gather` took to their places."""
    device, memory = trainer.message.device, trainer.optimizer.state[trainer.message.weights]
    own, buffers, best = trainer.tensors(), untrained(trainer), []
    for name, tensor in tensors.items():
        kind, _, rest = name.partition(".")
        if kind == "optimizer":  # some make their memory in the first step
            memory[rest] = tensor.to(device)
        elif kind == "model":
            buffers[rest].copy_(tensor)
        elif kind == "best":
            best.append((int(rest), tensor.to(device)))
        else:
            own[name].copy_(tensor)
    state.best = [tensor for _, tensor in sorted(best, key=itemgetter(0))] or None
    trainer.norms.restore()
