"""The steps of an epoch: each is begun, and what it came to is read, told and acted upon.

On GPUs the host begins a step before it reads what the one before came to (`Trainer.late`).
"""

from __future__ import annotations

from collections import deque
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch

from hpctrain.data.checks import describe_first, find_nonfinite
from hpctrain.data.loader import Batch
from hpctrain.errors import Failure, RunError
from hpctrain.parallel.late import Snapshot
from hpctrain.parallel.message import Report, Totals
from hpctrain.parallel.mpi import agreed, allgather, call_on_all
from hpctrain.streams import Event, current_stream, record_event
from hpctrain.training.digest import (
    CHANGED,
    as_hex,
    check_digests,
    rank_digest,
    slot_value,
    tensor_digests,
)
from hpctrain.training.optim import learning_rate, set_learning_rate, warm_up
from hpctrain.training.outcome import check, time_shares
from hpctrain.training.progress import EndReason, Progress, Run
from hpctrain.training.reading import order_of
from hpctrain.training.replay import Found, changed_error
from hpctrain.training.step import train_step
from hpctrain.watchdog import doing


class Begun(NamedTuple):
    """A step that was begun, and whose totals are still to be read."""

    step: int
    rows: int
    rate: float
    digest: Snapshot | None  # of the state before it
    found: Found | None  # by the replay before it
    ended: Event
    report: Report


class Steps:
    """The steps of a run from where it stands, and their seconds: from the end of one to the end of
    the next, by the device, whenever the host reads what they came to.
    """

    def __init__(self, run: Run) -> None:
        self._run, self._device = run, run.job.trainer.message.device
        self._begun: deque[Begun] = deque()
        self.start_clock()

    @property
    def newest(self) -> int:
        """The step that was begun last."""
        return self._run.state.step + len(self._begun)

    @property
    def settled(self) -> bool:
        """Whether it is known what all steps came to."""
        return not self._begun

    def start_clock(self) -> None:
        """The next step is timed from now on: what came before is not its."""
        self._since = record_event(self._device, timing=True)

    def begin(self, number: int, batches: list[Batch], waited: float) -> None:
        """Do the next step, which has this number in its epoch and for whose batches this rank
        waited so many seconds; on a GPU it is queued. Collective.
        """
        run, job, step = self._run, self._run.job, self.newest + 1
        doing(f"step {step}")
        rows, rate = job.plan.partition.total(number), rate_of(run, step)
        set_learning_rate(job.trainer.optimizer, rate)
        digest = digest_due(run, step)
        found = None
        if run.replay:
            run.replay.take(batches)
            found = None if digest is None else run.replay()
        save = run.writer is not None and run.writer.overdue()
        slot = None if digest is None else slot_value(digest, found.any() if found else None)
        news = run.control.news(waited, save, slot)
        train_step(job.trainer, batches, rows, news, lambda: wait_for_all(run, step))
        told = None if digest is None else Snapshot(digest)
        ended = record_event(self._device, timing=True)  # done when the report has arrived
        report = job.trainer.message.report()
        self._begun.append(Begun(step, rows, rate, told, found, ended, report))

    def settle(self, left: int = 0) -> None:
        """Read what steps came to, oldest first, until `left` of them are not read."""
        run = self._run
        while len(self._begun) > left:
            step, rows, rate, digest, found, ended, report = self._begun.popleft()
            doing(f"recording step {step}")
            totals = report.totals()
            skips, bad_image = run.job.trainer.skips_rows, partial(find_bad_image, run, step)
            check(totals, rows, step, run.state.epoch + 1, skips, bad_image)
            if digest:
                check_alike(run, totals.digests, found)
                run.recorder.digest(run.state.step, as_hex(digest.numbers()))
            run.state.step = step
            seconds, self._since = self._since.elapsed_time(ended) / 1000, ended
            tell_step(run, totals, rate, seconds)
            note_votes(run.state, totals)


def wait_for_all(run: Run, step: int) -> None:
    """Say that this rank has done its part of the step."""
    doing(f"waiting for all in step {step}")


def find_bad_image(run: Run, step: int) -> str | None:
    """The first image of a step of this epoch that holds NaN or infinite values, as the file has
    it, or why they cannot be read; None where all are finite. Collective.
    """
    job, partition, epoch = run.job, run.job.plan.partition, run.state.epoch
    doing(f"reading the images of step {step} again")
    current_stream(job.trainer.message.device).synchronize()  # no other communication is under way
    order = order_of(job.plan)  # the loader's own is in use
    number = step - 1 - epoch * partition.steps
    indices = [
        order.samples(
            epoch, shard, number * partition.shares[shard], partition.count(number, shard)
        )
        for shard in job.loader.shards
    ]
    split = job.loader.split
    try:
        found = call_on_all(run.comm, lambda: find_nonfinite(split, np.concatenate(indices)))
    except Failure as error:
        return f"Its images cannot be read again: {error}"
    return describe_first(allgather(run.comm, found))


def rate_of(run: Run, step: int) -> float:
    """The learning rate of step 1, 2, ..."""
    plan, done = run.job.plan, step - 1
    scheduled = learning_rate(
        run.job.config, plan.learning_rate, done, plan.steps_per_epoch, plan.epochs
    )
    return scheduled * warm_up(done, plan.warmup_steps, plan.warmup_from)


def digest_due(run: Run, step: int) -> torch.Tensor | None:
    """This rank's digest, where the steps done before this one call for a comparison."""
    every, done = run.job.config.digest_every, step - 1
    return rank_digest(run.job.trainer) if every and done and done % every == 0 else None


def compare_at_end(run: Run) -> None:
    """Compare digests, and replay, after the last step of a launch, which no message follows.
    Collective.
    """
    if run.job.config.digest_every:
        found = run.replay() if run.replay else None
        own = slot_value(rank_digest(run.job.trainer), found.any() if found else None).item()
        check_alike(run, allgather(run.comm, int(own)), found)


def check_alike(run: Run, digests: list[int], found: Found | None) -> None:
    """Raise the same on all ranks where the digest of one differs, or its replay `found` something.
    Collective where they do.
    """
    step = run.state.step
    if CHANGED in digests:
        names = allgather(run.comm, found.names() if found else [])
        rank = next(rank for rank, changed in enumerate(names) if changed)
        where = f" (after step {step} on rank {rank} of {run.comm.size})"
        raise agreed(changed_error(names[rank], where))
    try:
        check_digests(digests, step)
    except RunError as error:
        held = allgather(run.comm, tensor_digests(run.job.trainer))
        differ = [
            name.removeprefix("model.")
            for name in held[0]
            if len({each.get(name) for each in held}) > 1
        ]
        more = f" and {len(differ) - 3} more" if len(differ) > 3 else ""
        raise agreed(RunError(f"{error}; they differ in {', '.join(differ[:3])}{more}")) from None


def tell_step(run: Run, totals: Totals, rate: float, seconds: float) -> None:
    """What a step gave: for the record, the chain of figures, the epoch's sums, the clock."""
    state = run.state
    shares, slowest = time_shares(totals, run.job.trainer.clock.reduce)
    figures: dict[str, Any] = {
        "epoch": state.epoch + 1,
        "step": state.step,
        "loss": totals.loss / totals.rows,
        "accuracy": totals.correct / totals.rows if run.job.task.classes else None,
        "learning_rate": rate,
    }
    state.add(figures)
    loss, correct, rows, spent = state.sums
    state.sums = (
        loss + totals.loss,
        correct + totals.correct,
        rows + totals.rows,
        spent + seconds,
    )
    if run.balance:
        run.balance.add(totals.compute)
    if run.overlap:
        run.overlap.add(seconds, max(totals.compute), run.job.trainer.clock.reduce)
    if run.writer:
        run.control.saving = max(run.writer.seconds, run.writer.stall) or run.control.saving
    run.control.slowest_step = max(run.control.slowest_step, seconds)
    run.recorder.step(
        **figures,
        images_per_second=totals.rows / seconds,
        seconds={**shares, "total": seconds},
        slowest_rank=slowest,
        rows=totals.rows,
    )


def note_votes(state: Progress, totals: Totals) -> None:
    """What ranks asked for in a step; a stop that was asked for before a notice remains one."""
    if totals.stop:
        state.ended = EndReason.STOP
    elif totals.leave and not state.ended:
        state.ended = EndReason.PREEMPTED
    state.save |= totals.save > 0
