"""Runs for tests: one under way, without a folder; and what a whole one ends with."""

from __future__ import annotations

import contextlib
import dataclasses
from pathlib import Path
from unittest import mock

from hpctrain.config import Config, Interval, validation_interval
from hpctrain.report.record import read_records
from hpctrain.training.control import Control
from hpctrain.training.state import Progress, Run
from hpctrain.training.train import train

# with a frozen part and groups of parameters; and averaged
FINE_TUNING = {
    "freeze": {
        "optimizer": "adamw",
        "weight_decay": 0.1,
        "no_decay": "norm",
        "schedule": "cosine",
        "min_lr": 1e-4,
        "freeze": "conv1,bn1",
        "lr_factors": "fc=2",
        "validate_every": "3steps",
        "final": "best",
    },
    "ema": {
        "ema": 0.9,
        "lr_factors": "conv2=0.8,conv3=0.64",
        "schedule": "one-cycle",
        "final": "ema",
        "validate_every": "3steps",
        "freeze": "conv1,bn1",
    },
}


def short_run(folder, pack, **settings):
    """Settings of one epoch over a pack in this folder, which gets the runs too; prints nothing."""
    given = {"epochs": 1, "progress": "none"} | settings
    return Config(data=str(folder / pack), runs_dir=str(folder / "runs"), **given)


def make_run(job, comm, recorder, control=None):
    """What the training loop works with."""
    validations = validation_interval(job.config.validate_every)
    control = control or Control(None)
    return Run(job, comm, recorder, control, Progress(), validations, Interval(), None)


@contextlib.contextmanager
def leave_after(*steps, vote="preempted", votes=True):
    """Within this block, vote for leaving (or another `vote` of StepFlags) in these steps, as at a
    notice. Gives a list with an item for each step; cleared, steps count from 1 again. Ranks that
    are not to vote only count.
    """
    original, begun = Control.flags, []

    def flags(self, *told):
        begun.append(None)
        return original(self, *told)._replace(**{vote: votes and len(begun) in steps})

    with mock.patch.object(Control, "flags", flags):
        yield begun


def digest(config, comm, name):
    """The digest at the end of a run of this configuration. Collective."""
    train(dataclasses.replace(config, run=name), comm)
    end = list(read_records(Path(config.runs_dir) / name))[-1] if comm.rank == 0 else None
    return comm.bcast(end)["digest"]
