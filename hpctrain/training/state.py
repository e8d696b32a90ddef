"""A run: all that the loop works with, and its progress, of which checkpoints hold all but tensors.

What a checkpoint holds does not depend on ranks.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import torch

from hpctrain.config import Config
from hpctrain.config.functions import library_versions
from hpctrain.config.metrics import metric_directions
from hpctrain.data.loader import Loader
from hpctrain.data.pack import Pack
from hpctrain.data.pipeline import Pipeline
from hpctrain.data.split import Split
from hpctrain.errors import RunError
from hpctrain.models import InitialWeights
from hpctrain.models.weights import Tensors
from hpctrain.outcome import Status
from hpctrain.parallel.device import hardware_key
from hpctrain.parallel.hosts import HostCores
from hpctrain.parallel.mpi import Comm, agreed, allgather, is_equal_on_all, on_root
from hpctrain.parallel.reduce import broadcast
from hpctrain.plan import Facts, Plan
from hpctrain.report.metrics import Figure
from hpctrain.report.record import Recorder
from hpctrain.tasks.facts import BestBy, best_by
from hpctrain.tasks.task import Task
from hpctrain.text import listed
from hpctrain.training.checkpoint import Writer
from hpctrain.training.control import Control
from hpctrain.training.step import Trainer

MOST_LISTED = 16  # ranks in an error


class CannotContinue(RunError):
    """Training cannot continue; all ranks hold the valid state of the last recorded step."""


class NonFinite(CannotContinue):
    """Loss or gradient became NaN or infinite; the weights are those of the previous step."""


class Undefined(CannotContinue):
    """The figure that chooses the best network is NaN: another launch would find the same."""


class Reached(NamedTuple):
    """A point in a run, and the figures known there."""

    step: int
    epoch: int
    figures: dict[str, float | None]

    def validation(self, by: BestBy) -> Figure:
        """Return a figure of the validation; its value is None without one."""
        return Figure(by.figure, self.figures.get(f"validation_{by.figure}"), by.direction)


START = Reached(0, 0, {})


@dataclass
class Progress:
    """Progress of a run."""

    step: int = 0  # steps done
    epoch: int = 0  # epochs done
    validated: int = 0  # step of the last validation
    compared: int = 0  # step after which the ranks' digests were last compared
    ended: str = ""  # before the last epoch: STOPPED, PREEMPTED, or DONE by --patience
    reason: str | None = None  # for a run that was stopped or is done early
    figures: dict[str, float | None] = field(default_factory=dict)
    chain: str = ""  # hash over the figures of all steps and evaluations
    best: Reached = START  # the best of all validations
    waited: int = 0  # validations since the best one
    chosen: dict[str, Any] = field(default_factory=dict)  # by the last validation: `Task.choose`
    best_chosen: dict[str, Any] = field(default_factory=dict)  # by the best one
    sums: dict[str, float] = field(default_factory=dict)  # by name, over the steps of this epoch
    final: Reached | None = None  # the network that was chosen: no more checkpoints are written

    @property
    def network(self) -> Reached:
        """Step, epoch and figures of the network that the model holds."""
        return self.final or Reached(self.step, self.epoch, self.figures)

    @property
    def network_chosen(self) -> dict[str, Any]:
        """What a validation has chosen for the network that the model holds."""
        if self.final and self.final.step == self.best.step:
            return self.best_chosen
        return self.chosen

    def to_json(self) -> dict[str, Any]:
        """Return what the next launch needs besides the tensors.

        `ended` is saved only if the run ended by itself; otherwise the next launch resumes it.
        """
        fields = dataclasses.asdict(self)
        del fields["final"]
        return fields if self.ended == Status.DONE else {**fields, "ended": "", "reason": None}

    @classmethod
    def from_json(cls, saved: Mapping[str, Any]) -> Progress:
        """Return the progress of which `to_json` returned what is `saved`, among other things."""
        fields = {name: saved[name] for name in cls().to_json() if name in saved}
        return cls(**{**fields, "best": Reached(*saved["best"])})

    def chain_figures(self, figures: Mapping[str, Any]) -> None:
        """Add figures to the hash chain."""
        link = f"{self.chain}{json.dumps(figures, sort_keys=True)}"
        self.chain = hashlib.sha256(link.encode()).hexdigest()

    def add_sums(self, sums: Mapping[str, float]) -> None:
        """Add sums of a step to those of the epoch."""
        for name, value in sums.items():
            self.sums[name] = self.sums.get(name, 0.0) + value


@dataclass
class Run:
    """Everything that the training loop works with, on one rank."""

    # Made by `set_up`
    config: Config
    facts: Facts
    plan: Plan
    comm: Comm
    shards: list[range]  # by rank
    pack: Pack  # opened from --data; with --stage, `splits` read a copy
    splits: dict[str, Split]  # open splits by name
    task: Task
    trainer: Trainer
    loader: Loader
    pipeline: Pipeline  # for evaluations
    init: InitialWeights | None  # None without --init, and for a run that is resumed
    host: HostCores  # the host with the fewest cores per rank
    notes: list[str]  # tell the user what was chosen
    progress: Progress = field(default_factory=Progress)
    # Opened for training
    folder: Path = field(init=False)
    recorder: Recorder = field(init=False)
    control: Control = field(init=False)
    writer: Writer = field(init=False)

    @property
    def best_by(self) -> BestBy:
        """What chooses the best network."""
        return best_by(self.config.best_by, self.config.task, metric_directions(self.config.metric))

    @property
    def key(self) -> str:
        """What the bits of results depend on besides the plan: versions and hardware."""
        texts = [hardware_key(self.trainer.message.device)]
        for library, version in library_versions(vars(self.config)).items():
            if library != "torch":  # it is there
                texts.append(f"{library} {version}")
        return ", ".join(texts)

    def split(self, name: str) -> Split:
        """Open another split. It stays open: each of its samples is verified once."""
        if name not in self.splits:
            train = self.splits["train"]
            self.splits[name] = Split(train.pack, name, train.threads, self.config.verify)
        return self.splits[name]

    def compare_ranks(self) -> None:
        """Compare the digests of the state of all ranks, and record it once a step. Collective.

        The state is that after the last recorded step; nothing is saved or validated before this.
        Raises the same RunError on all ranks, with the ranks and tensors that differ.
        """
        state = self.progress
        checksums = self.trainer.checksums()
        if not is_equal_on_all(self.comm, checksums):
            difference = describe_difference(allgather(self.comm, checksums))
            raise agreed(RunError(f"after step {state.step} {difference}"))
        if state.compared < state.step:
            hashed = hashlib.sha256(repr(checksums).encode()).hexdigest()
            self.recorder.write("digest", step=state.step, digest=hashed[:16])
            state.compared = state.step

    def close(self) -> None:
        """Release the hooks and the threads, and close all splits, after the last step."""
        self.trainer.reduce.close()
        self.loader.close()
        for split in self.splits.values():
            split.close()


def describe_difference(by_rank: Sequence[Mapping[str, int]]) -> str:
    """Return which ranks hold other checksums than most, and of which tensors."""
    usual = max(by_rank, key=by_rank.count)
    odd = [rank for rank, checksums in enumerate(by_rank) if checksums != usual]
    names = [name for name in usual if any(by_rank[rank].get(name) != usual[name] for rank in odd)]
    ranks = "rank" if len(odd) == 1 else "ranks"
    who = f"{ranks} {listed(odd, MOST_LISTED)} of {len(by_rank)}"
    return (
        f"{who} held other weights than rank {by_rank.index(usual)}: a fault of memory or GPU, or"
        " something that changes the model outside the step; they differ in"
        f" {listed(names, 3)}"
    )


def read_on_all(comm: Comm, read: Callable[[], Tensors]) -> Tensors:
    """Read tensors on rank 0 and broadcast them. Collective. Raises as `read` does."""
    mine: Tensors = {}

    def shapes() -> dict[str, tuple[torch.Size, torch.dtype]]:
        mine.update(read())
        return {name: (tensor.shape, tensor.dtype) for name, tensor in mine.items()}

    for name, (shape, dtype) in on_root(comm, shapes).items():
        broadcast(comm, mine.setdefault(name, torch.empty(shape, dtype=dtype)))
    return mine
