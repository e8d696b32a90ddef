"""A run: all that the loop works with, its progress, and why it ends; restored from a checkpoint.

What a checkpoint holds does not depend on ranks.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from hpctrain.config import Config, Interval
from hpctrain.data.loader import Loader, Prepare
from hpctrain.data.pack import Pack
from hpctrain.errors import RunError, UsageError
from hpctrain.inference.tasks import Task
from hpctrain.models import InitialWeights
from hpctrain.parallel.device import hardware_key
from hpctrain.parallel.mpi import Comm, agreed, on_root
from hpctrain.parallel.nccl import Choice
from hpctrain.parallel.reduce import broadcast
from hpctrain.plan import Facts, Plan
from hpctrain.report.find import best_file
from hpctrain.report.recorder import Recorder
from hpctrain.training.checkpoint import Tensors, Writer, has_best
from hpctrain.training.control import Control
from hpctrain.training.input import Input
from hpctrain.training.trainer import Trainer

if TYPE_CHECKING:
    from hpctrain.training.folder import PreviousLaunch


class CannotContinue(RunError):
    """Training cannot continue; all ranks hold the valid state of the last recorded step."""


class NonFinite(CannotContinue):
    """Loss or gradient became NaN or infinite; the weights are those of the previous step."""


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


NOTHING = Reached(0, 0, {})


class Sums(NamedTuple):
    """Sums over the samples of an epoch, and the seconds of its steps."""

    loss: float = 0.0
    correct: float = 0.0
    rows: float = 0.0
    seconds: float = 0.0
    weight: float = 0.0  # of the samples' classes, with --class-weights


NO_SUMS = Sums()


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
    best: Reached = NOTHING  # the smallest loss of all validations
    best_loss: float = math.inf
    waited: int = 0  # validations since the best one
    went_back: bool = False  # the model holds the best network again
    chosen: bool = False  # the final network is chosen: no more checkpoints are written
    sums: Sums = NO_SUMS  # of the current epoch

    @property
    def network(self) -> Reached:
        """Step, epoch and figures of the network that the model holds."""
        return self.best if self.went_back else Reached(self.step, self.epoch, self.figures)

    def to_json(self) -> dict[str, Any]:
        """Return what the next launch needs besides the tensors.

        `ended` is saved only if the run ended by itself; otherwise the next launch resumes it.
        """
        fields = dataclasses.asdict(self)
        del fields["went_back"], fields["chosen"], fields["save"]
        if self.ended is not EndReason.PATIENCE:
            fields["ended"] = fields["reason"] = None
        return fields | {"best_loss": repr(self.best_loss)}  # JSON has no infinity

    def from_json(self, saved: Mapping[str, Any]) -> None:
        """Restore what `to_json` returned. If more epochs are planned now, the run continues."""
        planned = self.planned
        for name in self.to_json():
            setattr(self, name, saved[name])
        self.best, self.best_loss = Reached(*saved["best"]), float(self.best_loss)
        self.sums = Sums(*saved["sums"])
        self.ended = EndReason(self.ended) if self.ended and planned <= self.planned else None
        self.planned = planned

    def add(self, figures: Mapping[str, Any]) -> None:
        """Add figures to the hash chain."""
        link = f"{self.chain}{json.dumps(figures, sort_keys=True)}"
        self.chain = hashlib.sha256(link.encode()).hexdigest()

    def is_best(self, loss: float) -> bool:
        """Note a validation's loss and return whether it is the smallest so far."""
        if not loss < self.best_loss:
            self.waited += 1
            return False
        self.best_loss, self.waited = loss, 0
        self.best = Reached(self.step, self.epoch, dict(self.figures))
        return True


@dataclass
class Run:
    """Everything that the training loop works with, on one rank."""

    # Made by `set_up`
    config: Config
    facts: Facts
    plan: Plan
    comm: Comm
    shards: list[range]  # of each rank
    pack: Pack  # that of --data; with --stage, `input` reads a copy
    input: Input
    task: Task
    trainer: Trainer
    loader: Loader
    prepare: Prepare  # without augmentation, for evaluation
    validations: Interval
    checkpoints: Interval
    transport: Choice
    init: InitialWeights | None  # what this launch took from --init
    notes: tuple[str, ...]  # on these choices, for the user
    progress: Progress
    # Opened by `open_run`, after `restore`
    folder: Path = field(init=False)
    recorder: Recorder = field(init=False)
    control: Control = field(init=False)
    writer: Writer = field(init=False)

    def close(self) -> None:
        """Release the hooks and the threads, and close all splits, after the last step."""
        self.trainer.reduce.close()
        self.loader.close()
        self.input.close()


def restore(run: Run, earlier: PreviousLaunch | None) -> list[str]:
    """Restore the state that an earlier launch saved, which rank 0 reads. Collective.

    Returns notes for the record.
    """
    trainer, state, comm = run.trainer, run.progress, run.comm
    if earlier is None or (checkpoint := earlier.checkpoint) is None:
        return [*earlier.problems, "no checkpoint was left: from the first step"] if earlier else []
    layout, saved = trainer.message.layout.digest(), checkpoint.state
    try:
        if saved["layout"] != layout:
            raise ValueError(
                f"its parameters are laid out as {saved['layout']}, the model's as {layout}: it is"
                " another model"
            )
        state.from_json(saved)
        trainer.load(read_on_all(comm, checkpoint.tensors))
    except ValueError as error:
        text = f"checkpoint {checkpoint.path} cannot be resumed from: {error}"
        raise agreed(UsageError(text)) from error
    notes = [*earlier.problems, f"going on after step {state.step}"]
    here = hardware_key(trainer.message.device)
    if saved["key"] != here:
        note = f"begun on {saved['key']}, now on {here}"
        notes.append(f"{note}: the bits may differ" if run.config.deterministic else note)
    best = best_file(earlier.folder, state.best.step)
    if state.best.step and not on_root(comm, has_best, best, checkpoint.best):
        notes.append(f"{best} is gone: the best of what follows is kept")
        state.best, state.best_loss = NOTHING, math.inf
    return notes


def read_on_all(comm: Comm, read: Callable[[], Tensors]) -> Tensors:
    """Read tensors on rank 0 and broadcast them. Collective. Raises as `read` does."""
    mine: Tensors = {}

    def shapes() -> dict[str, tuple[torch.Size, torch.dtype]]:
        mine.update(read())
        return {name: (tensor.shape, tensor.dtype) for name, tensor in mine.items()}

    for name, (shape, dtype) in on_root(comm, shapes).items():
        broadcast(comm, mine.setdefault(name, torch.empty(shape, dtype=dtype)))
    return mine
