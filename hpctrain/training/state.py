"""The state of a run: its progress, figures and best network, in memory and in a checkpoint.

Nothing in it depends on ranks.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from hpctrain.config import Interval
from hpctrain.errors import UsageError
from hpctrain.parallel.device import hardware_key
from hpctrain.parallel.mpi import Comm, agreed, call_on_root
from hpctrain.parallel.reduce import broadcast
from hpctrain.report.recorder import Recorder
from hpctrain.training.checkpoint import Checkpoint, Writer
from hpctrain.training.control import Control
from hpctrain.training.setup import Job
from hpctrain.training.step import Trainer, chain

if TYPE_CHECKING:
    from hpctrain.training.folder import PreviousLaunch


class EndReason(StrEnum):
    """Why a run ends before its last epoch."""

    STOP = "asked to stop"  # on request: save, test, exit code 0
    PREEMPTED = "preempted"  # forced from outside: save, exit code 75
    PATIENCE = "no better validation"  # the run ends by itself


class Reached(NamedTuple):
    """A point in a run, and the figures known there."""

    step: int
    epoch: int
    figures: dict[str, float | None]


@dataclass
class Progress:
    """Progress of a run."""

    planned: int = 0  # epochs
    step: int = 0  # steps done
    epoch: int = 0  # epochs done
    validated: int = 0  # step of the last validation
    compared: int = 0  # step after which the ranks' digests were last compared
    ended: EndReason | None = None
    save: bool = False  # a checkpoint was requested
    reason: str | None = None  # for `ended`, as text
    figures: dict[str, float | None] = field(default_factory=dict)
    chain: str = ""  # hash over the figures of all steps and evaluations
    best_loss: float = float("inf")  # smallest of all validations
    best_step: int = 0
    best_epoch: int = 0
    best_figures: dict[str, float | None] = field(default_factory=dict)
    waited: int = 0  # validations since the best one
    best: dict[str, torch.Tensor] | None = None  # network of `best_step`, if it is to be kept
    went_back: bool = False  # the model holds the best network again
    chosen: bool = False  # the final network is chosen: no more checkpoints are written
    sums: tuple[float, float, float, float] = (0.0, 0.0, 0.0, 0.0)  # of the current epoch: loss,
    # correct, samples, seconds
    weight: float = 0.0  # of the current epoch: sum of the samples' class weights

    def is_preempted(self) -> bool:
        """Whether the run has been preempted."""
        return self.ended is EndReason.PREEMPTED

    @property
    def network(self) -> Reached:
        """Step, epoch and figures of the network that the model holds."""
        if self.went_back:
            return Reached(self.best_step, self.best_epoch, self.best_figures)
        return Reached(self.step, self.epoch, self.figures)

    def to_json(self) -> dict[str, Any]:
        """Return what the next launch needs besides the tensors.

        `ended` is saved only if the run ended by itself; otherwise the next launch resumes it.
        """
        fields = {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}
        del fields["best"], fields["went_back"], fields["chosen"], fields["save"]
        if self.ended is not EndReason.PATIENCE:
            fields["ended"] = fields["reason"] = None
        return fields | {"best_loss": repr(self.best_loss)}  # JSON has no infinity

    def from_json(self, saved: Mapping[str, Any]) -> None:
        """Restore what `to_json` returned. If more epochs are planned now, the run continues."""
        planned = self.planned
        for name in self.to_json():
            setattr(self, name, saved[name])
        self.best_loss, self.sums = float(self.best_loss), tuple(saved["sums"])
        self.ended = EndReason(self.ended) if self.ended and planned <= self.planned else None
        self.planned = planned

    def add(self, figures: Mapping[str, Any]) -> None:
        """Add figures to the hash chain."""
        self.chain = chain(self.chain, figures)

    def keep_best(self, loss: float, trainer: Trainer, copy: bool) -> bool:
        """Note a validation's loss and return whether it is the smallest so far.

        With `copy`, keep a copy of that network.
        """
        if not loss < self.best_loss:
            self.waited += 1
            return False
        self.best_loss, self.best_step, self.waited = loss, self.step, 0
        self.best_epoch, self.best_figures = self.epoch, dict(self.figures)
        if copy:
            self.best = _copy_network(trainer)
        return True

    def restore_best(self, trainer: Trainer) -> None:
        """Choose the final network of the run: the average, the best one if kept, or the last."""
        self.chosen = True
        if trainer.average is not None:
            trainer.average.swap()
        if self.best is not None:
            tensors = trainer.model.state_dict()
            for name, kept in self.best.items():
                tensors[name].copy_(kept)
            trainer.norms.read()
            self.went_back = True


def _copy_network(trainer: Trainer) -> dict[str, torch.Tensor]:
    """Copy the tensors that define a network, by name: they do not depend on the layout."""
    return {name: tensor.clone() for name, tensor in trainer.model.state_dict().items()}


@dataclass
class Run:
    """Everything that the training loop works with, on one rank."""

    job: Job
    comm: Comm
    recorder: Recorder
    control: Control
    state: Progress
    validations: Interval
    checkpoints: Interval
    writer: Writer | None  # on rank 0 only
    folder: Path = Path()


Shapes = dict[str, tuple[torch.Size, torch.dtype]]


def gather(trainer: Trainer, state: Progress) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    """Return the state of a run: its tensors, and the other values for JSON."""
    tensors = trainer.state()
    tensors |= {f"best.{name}": tensor for name, tensor in (state.best or {}).items()}
    known = {
        "layout": trainer.message.layout.digest(),
        "key": hardware_key(trainer.message.device),
    }
    return tensors, {**known, **state.to_json()}


def restore(
    earlier: PreviousLaunch | None, trainer: Trainer, state: Progress, comm: Comm
) -> list[str]:
    """Restore the state that an earlier launch saved, which rank 0 reads. Collective.

    Returns notes for the record.
    """
    if earlier is None or (checkpoint := earlier.checkpoint) is None:
        return [*earlier.problems, "no checkpoint was left: from the first step"] if earlier else []
    layout, saved = trainer.message.layout.digest(), checkpoint.state
    if saved.get("layout") != layout:
        raise agreed(
            UsageError(
                f"the checkpoint of {earlier.folder} holds parameters laid out as"
                f" {saved.get('layout')}, the model's are {layout}: it is another model"
            )
        )
    state.from_json(saved)
    try:
        _put(trainer, state, _on_all(comm, checkpoint))
    except ValueError as error:
        text = f"checkpoint {checkpoint.path} cannot be resumed from: {error}"
        raise agreed(UsageError(text)) from error
    notes = [*earlier.problems, f"going on after step {state.step}"]
    here = hardware_key(trainer.message.device)
    if earlier.plan.deterministic and saved.get("key") != here:
        notes.append(f"begun on {saved.get('key')}, now on {here}: the bits may differ")
    return notes


def _on_all(comm: Comm, checkpoint: Checkpoint) -> dict[str, torch.Tensor]:
    """Read the tensors of a checkpoint on rank 0 and broadcast them. Collective."""
    mine: dict[str, torch.Tensor] = {}

    def shapes() -> Shapes:
        mine.update(checkpoint.tensors())
        return {name: (tensor.shape, tensor.dtype) for name, tensor in mine.items()}

    for name, (shape, dtype) in call_on_root(comm, shapes).items():
        broadcast(comm, mine.setdefault(name, torch.empty(shape, dtype=dtype)))
    return mine


@torch.no_grad()
def _put(trainer: Trainer, state: Progress, tensors: dict[str, torch.Tensor]) -> None:
    """Copy the tensors of `gather` into those of the run, in place.

    Raises ValueError if one is missing, unknown, or of another shape or type.
    """
    own, groups = trainer.state(), trainer.message.groups
    homes = {str(n) if len(groups) > 1 else "": group for n, (group, _) in enumerate(groups)}
    places = {name: own[name] for name in own if not name.startswith("optimizer.")}
    kept = {f"best.{name}": tensor for name, tensor in trainer.model.state_dict().items()}
    for name, tensor in tensors.items():
        kind, _, rest = name.partition(".")
        if kind == "optimizer":  # some create their state in the first step
            number, _, entry = rest.rpartition(".")
            weights = homes.get(number)
            expected = weights if tensor.ndim or weights is None else tensor
        else:
            expected = places.get(name, kept.get(name))
        if expected is None or (expected.shape, expected.dtype) != (tensor.shape, tensor.dtype):
            has = f"{tuple(tensor.shape)} of {tensor.dtype}"
            raise ValueError(f"the model has no place for the tensor {name!r}, {has}")
        if kind == "optimizer" and weights is not None:
            trainer.optimizer.state[weights][entry] = tensor.to(trainer.message.device)
        elif name in places:
            places[name].copy_(tensor)
    best = {name: tensor for name, tensor in tensors.items() if name.startswith("best.")}
    if missing := [name for name in (*places, *(kept if best else ())) if name not in tensors]:
        raise ValueError(f"it lacks the tensor {missing[0]!r}")
    device = trainer.message.device
    state.best = {n.removeprefix("best."): t.to(device) for n, t in best.items()} or None
    trainer.norms.restore()
