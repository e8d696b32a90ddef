"""Going on: what a run left in its folder, whether this launch may continue it, and the state of a
run as tensors and JSON.

A run is continued by the same command. Its plan is read, never resolved anew, so partitions,
batches and random numbers are those of its first launch; only the ranks, and what they carry, are
this launch's. Nothing in the state depends on ranks.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from hpctrain.config import Config
from hpctrain.errors import UsageError
from hpctrain.parallel.backend_flags import hardware_key
from hpctrain.parallel.mpi import Comm, agreed, call_on_root
from hpctrain.parallel.reduce import broadcast
from hpctrain.plan import Plan
from hpctrain.plan_check import check_recorded, read_plan
from hpctrain.report.history import Outcome, find_outcome
from hpctrain.report.record import HistoryReader, is_done
from hpctrain.strictjson import parse_json
from hpctrain.training.checkpoint import FOLDER, Checkpoint, newest
from hpctrain.training.control import RunLock
from hpctrain.training.progress import Progress
from hpctrain.training.step import NETWORK, Trainer
from hpctrain.typed import from_fields, parse_toml

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
    precision: str  # --precision as it was asked for; the plan says what it came to
    finished: bool  # it did all its epochs, or validation ended it
    checkpoint: Checkpoint | None  # the newest whole one; without one the run is to begin again
    damage: list[str]  # newer ones, passed over
    crash: Outcome | None = None  # of its last launch, which could not record it


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
    check_same(config, before, plan, folder)
    if config.epochs and config.epochs < plan.epochs and not is_done(folder):
        raise UsageError(
            f"the run {folder} was begun with {plan.epochs} epochs, which --epochs {config.epochs}"
            " cannot take back: ask it to stop, or choose another name with --run"
        )
    lock.take(folder)
    reader = HistoryReader(folder, strict=True)
    reader.poll()
    history, wrong = reader.history, reader.problem or reader.history.damage
    check_recorded(plan, folder / "plan.json", history.facts)
    checkpoint, damage = newest(folder, history.last_step, history.epochs, history.validated)
    if wrong:
        damage.insert(0, f"{wrong}: the record is cut off there")
    if checkpoint and (missing := history.missing_steps(checkpoint.step)):
        damage.append(f"the record has lost steps that were done: {missing}")
    elif checkpoint and not checkpoint.follows(history.epochs, history.validated):
        damage.append("the record has lost the last epoch or validation that was done")
    if checkpoint is None and config.resume == "must":
        raise UsageError(f"--resume must, but {folder / FOLDER} holds no whole checkpoint")
    outcome = find_outcome(folder, history, is_over=True)
    unrecorded = outcome.status and history.facts and not history.outcome.status
    crash = outcome if unrecorded and not wrong else None
    if crash:
        damage.insert(0, f"the launch before did not record its end: {crash.reason}")
    finished = is_done(folder)
    return Earlier(folder, plan, before.precision, finished, checkpoint, damage, crash)


def read_settings(folder: Path) -> tuple[Config, Plan]:
    """The configuration and the plan of a run. UsageError where this is no run's folder."""
    path = folder / "config.toml"
    try:
        known = Config.__dataclass_fields__
        given = {n: v for n, v in parse_toml(path.read_bytes()).items() if n in known}
        if type(given.get("overlap")) is int:  # as it was written before there was "auto"
            given["overlap"] = str(given["overlap"])
        config = from_fields(Config, given)
        path = folder / "plan.json"
        return config, read_plan(parse_json(path.read_bytes()))
    except FileNotFoundError as error:
        raise UsageError(
            f"{folder} exists but is no run to continue, it has no {Path(error.filename).name}:"
            " choose another name with --run"
        ) from error
    except (OSError, ValueError) as error:
        raise UsageError(
            f"{folder} cannot be continued, its {path.name} is damaged ({error}): choose another"
            " name with --run"
        ) from error


def check_same(config: Config, before: Config, plan: Plan, folder: Path) -> None:
    """UsageError that names the first setting with which the run was not begun."""
    for field in dataclasses.fields(Config):
        old, new = getattr(before, field.name), getattr(config, field.name)
        if field.name == "precision":
            old = new if new == field.default else plan.precision  # the default keeps the plan's
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
    tensors = trainer.state()
    tensors |= {f"best.{number}": tensor for number, tensor in enumerate(state.best or ())}
    known = {
        "layout": trainer.message.layout.digest(),
        "key": hardware_key(trainer.message.device),
    }
    return tensors, {**known, **state.to_json()}


def restore(earlier: Earlier | None, trainer: Trainer, state: Progress, comm: Comm) -> list[str]:
    """Put a run into the state that an earlier launch saved; rank 0 reads it. Lines worth a note
    in the record. Collective.
    """
    if earlier is None or (checkpoint := earlier.checkpoint) is None:
        return [*earlier.damage, "no checkpoint was left: from the first step"] if earlier else []
    layout, saved = trainer.message.layout.digest(), checkpoint.state
    if saved.get("layout") != layout:
        raise agreed(
            UsageError(
                f"the checkpoint of {earlier.folder} holds parameters laid out as"
                f" {saved.get('layout')}, the model's are {layout}: it is another model"
            )
        )
    try:
        state.from_json(saved)
        done = state.step - state.epoch * earlier.plan.steps_per_epoch
        if state.step != checkpoint.step or not 0 <= done <= earlier.plan.steps_per_epoch:
            raise ValueError(f"step {state.step} of epoch {state.epoch + 1} is no place in the run")
        _put(trainer, state, _on_all(comm, checkpoint))
    except ValueError as error:
        text = f"checkpoint {checkpoint.path} cannot be resumed from: {error}"
        raise agreed(UsageError(text)) from error
    notes = [*earlier.damage, f"going on after step {state.step}"]
    here = hardware_key(trainer.message.device)
    if earlier.plan.deterministic and saved.get("key") != here:
        notes.append(f"begun on {saved.get('key')}, now on {here}: the bits may differ")
    return notes


def _on_all(comm: Comm, checkpoint: Checkpoint) -> dict[str, torch.Tensor]:
    """The tensors of a checkpoint, read by rank 0, on all ranks. Collective."""
    mine: dict[str, torch.Tensor] = {}

    def shapes() -> Shapes:
        mine.update(checkpoint.tensors())
        return {name: (tensor.shape, tensor.dtype) for name, tensor in mine.items()}

    for name, (shape, dtype) in call_on_root(comm, shapes).items():
        broadcast(comm, mine.setdefault(name, torch.empty(shape, dtype=dtype)))
    return mine


@torch.no_grad()
def _put(trainer: Trainer, state: Progress, tensors: dict[str, torch.Tensor]) -> None:
    """Give the tensors that `gather` took to their places, which stay as they lie in memory.
    ValueError where one is missing, has no place or another shape.
    """
    weights, own = trainer.message.weights, trainer.state()
    places = {name: own[name] for name in own if not name.startswith("optimizer.")}
    tensors = {"used": torch.ones_like(own["used"]), **tensors}  # all were, before it was kept
    kept = {f"best.{number}": own[name] for number, name in enumerate(NETWORK)}
    for name, tensor in tensors.items():
        kind, _, rest = name.partition(".")
        if kind == "optimizer":  # some make their memory in the first step
            expected: torch.Tensor | None = weights if tensor.ndim else tensor
        else:
            expected = places.get(name, kept.get(name))
        if expected is None or (expected.shape, expected.dtype) != (tensor.shape, tensor.dtype):
            if kind == "model" and _replace_buffer(trainer.model, rest, tensor):
                continue
            has = f"{tuple(tensor.shape)} of {tensor.dtype}"
            raise ValueError(f"the model has no place for the tensor {name!r}, {has}")
        if kind == "optimizer":
            trainer.optimizer.state[weights][rest] = tensor.to(weights.device)
        elif name in places:
            places[name].copy_(tensor)
    best = [tensors[name].to(weights.device) for name in kept if name in tensors]
    if missing := [name for name in (*places, *(kept if best else ())) if name not in tensors]:
        raise ValueError(f"it lacks the tensor {missing[0]!r}")
    state.best = best or None
    trainer.norms.restore()


def _replace_buffer(model: torch.nn.Module, name: str, value: torch.Tensor) -> bool:
    """Give a buffer that forward makes, or replaces by one of another shape, its value; whether the
    model has one of this name.
    """
    owner, _, own = name.rpartition(".")
    module = dict(model.named_modules()).get(owner)
    if module is None or own not in module._buffers:
        return False
    setattr(module, own, value.to(next(model.parameters()).device))
    return True
