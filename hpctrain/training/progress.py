"""A run under way: how far it has come, the figures it reached, the best network it had."""

from __future__ import annotations

import dataclasses
import typing
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Any, NamedTuple

import torch

from hpctrain.config import Interval
from hpctrain.parallel.mpi import Comm
from hpctrain.parallel.overlap import OverlapTrial
from hpctrain.parallel.shards import Balance
from hpctrain.report.recorder import Recorder
from hpctrain.training.checkpoint import Writer
from hpctrain.training.control import Control
from hpctrain.training.digest import chain
from hpctrain.training.replay import Replay
from hpctrain.training.setup import Job
from hpctrain.training.step import NETWORK, Trainer
from hpctrain.typed import typed_fields

RESUMED = ("planned", "step", "epoch", "best_loss", "sums")  # every checkpoint holds these


class EndReason(StrEnum):
    """Why no further step is to be done, before the last epoch."""

    STOP = "asked to stop"  # a wish: save, test, exit code 0
    PREEMPTED = "asked to leave"  # forced from outside: save, exit code 75
    PATIENCE = "no better validation"  # the run's own end


class Reached(NamedTuple):
    """A place in a run, and the figures known there."""

    step: int
    epoch: int
    figures: dict[str, float | None]


@dataclass
class Progress:
    """How far a run has come."""

    planned: int = 0  # epochs
    step: int = 0  # steps done
    epoch: int = 0  # epochs done
    validated: int = 0  # step of the last validation
    ended: EndReason | None = None
    save: bool = False  # a checkpoint was asked for
    reason: str | None = None  # of that end, for the reader
    figures: dict[str, float | None] = field(default_factory=dict)
    chain: str = ""  # hash over the figures of all steps and evaluations
    best_loss: float = float("inf")  # of all validations
    best_step: int = 0
    best_epoch: int = 0
    best_figures: dict[str, float | None] = field(default_factory=dict)
    waited: int = 0  # validations since then
    best: list[torch.Tensor] | None = None  # the network of that step, where it is wanted
    went_back: bool = False  # to the best network
    chosen: bool = False  # the network to keep: no checkpoint is written any more
    sums: tuple[float, float, float, float] = (0.0, 0.0, 0.0, 0.0)  # of the epoch under way: loss,
    # correct, rows, seconds

    def is_preempted(self) -> bool:
        """Whether the run has to end before its time."""
        return self.ended is EndReason.PREEMPTED

    @property
    def network(self) -> Reached:
        """Where the network that the model holds comes from."""
        if self.went_back:
            return Reached(self.best_step, self.best_epoch, self.best_figures)
        return Reached(self.step, self.epoch, self.figures)

    def to_json(self) -> dict[str, Any]:
        """What the next launch needs, but for the tensors. It goes on after any end but the run's
        own.
        """
        fields = {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}
        del fields["best"], fields["went_back"], fields["chosen"], fields["save"]
        if self.ended is not EndReason.PATIENCE:
            fields["ended"] = fields["reason"] = None
        return fields | {"best_loss": repr(self.best_loss)}  # JSON has no infinity

    def from_json(self, saved: Mapping[str, Any]) -> None:
        """Take over what `to_json` gave. More epochs than were planned then go on after the end.
        ValueError that names a field which is missing or of another type.
        """
        planned, types = self.planned, {**typing.get_type_hints(Progress), "best_loss": str}
        known = {name: saved[name] for name in self.to_json() if name in saved}
        for name, value in typed_fields(known, types, RESUMED).items():
            setattr(self, name, value)
        try:
            self.best_loss = float(self.best_loss)
        except ValueError:
            raise ValueError(f"best_loss is {self.best_loss!r}, not a number") from None
        self.ended = self.ended if planned <= self.planned else None
        self.planned = planned

    def add(self, figures: Mapping[str, Any]) -> None:
        """Make figures a link of the chain."""
        self.chain = chain(self.chain, figures)

    def keep_best(self, loss: float, trainer: Trainer, copy: bool) -> bool:
        """Note a validation's loss; whether it is the smallest. With `copy` keep that network."""
        if not loss < self.best_loss:
            self.waited += 1
            return False
        self.best_loss, self.best_step, self.waited = loss, self.step, 0
        self.best_epoch, self.best_figures = self.epoch, dict(self.figures)
        if copy:
            self.best = [tensor.clone() for tensor in _network(trainer)]
        return True

    def restore_best(self, trainer: Trainer) -> None:
        """Choose the network of the run: the best one where it was kept, else the last."""
        self.chosen = True
        if self.best is not None:
            with torch.no_grad():
                for tensor, kept in zip(_network(trainer), self.best, strict=True):
                    tensor.copy_(kept)
            trainer.norms.restore()
            self.went_back = True


def _network(trainer: Trainer) -> list[torch.Tensor]:
    """What makes the network of a step: weights and running statistics."""
    tensors = trainer.tensors()
    return [tensors[name] for name in NETWORK]


@dataclass(frozen=True)
class Run:
    """Everything that the training loop works with, on one rank."""

    job: Job
    comm: Comm
    recorder: Recorder
    control: Control
    state: Progress
    checkpoints: Interval
    writer: Writer | None  # on rank 0
    balance: Balance | None = None  # where shards may move
    overlap: OverlapTrial | None = None  # where it is to be measured
    replay: Replay | None = None  # where digests are compared and no rank may have its own buffers
    folder: Path = Path()
