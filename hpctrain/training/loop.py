"""The loop: epochs of steps, each with its record, its digest, its validation, its checkpoint."""

from __future__ import annotations

import time
from collections import deque
from typing import Any, NamedTuple

import torch

from hpctrain.data.loader import Batch
from hpctrain.errors import RunError
from hpctrain.parallel.late import Snapshot
from hpctrain.parallel.message import Report, Totals
from hpctrain.parallel.mpi import agreed
from hpctrain.training.digest import as_hex, check_digests, rank_digest, slot_value
from hpctrain.training.optim import learning_rate, set_learning_rate, warm_up
from hpctrain.training.outcome import check, time_shares
from hpctrain.training.progress import Progress, Run, Why
from hpctrain.training.resume import gather
from hpctrain.training.setup import carry
from hpctrain.training.step import train_step
from hpctrain.training.validate import validate, validation_due


class Sent(NamedTuple):
    """A step that was begun, and whose totals are still to be read."""

    step: int
    rows: int
    rate: float
    digest: Snapshot | None  # of the state before it
    report: Report


def run_epochs(run: Run) -> None:
    """All epochs from where the run stands, until something ends them. Collective."""
    state = run.state
    if state.step and validation_due(run, state.step) and state.validated < state.step:
        validate(run)  # the launch before had to leave in the middle of it
    while state.epoch < run.job.plan.epochs and not state.ended:
        run_epoch(run)


def run_epoch(run: Run) -> None:
    """The steps of one epoch that are still to be done, until something ends them. Collective.

    On GPUs the host queues a step before it reads what the step before came to; where something
    else needs that, such as a validation or a checkpoint, it is read first. All ranks read the
    totals of a step at the same place, so they all come to the same end.
    """
    job, state, per_epoch = run.job, run.state, run.job.plan.steps_per_epoch
    first = state.step - state.epoch * per_epoch
    sent: deque[Sent] = deque()
    since = time.perf_counter()  # the last moment at which anything was known
    before = since
    for number, batches in enumerate(job.loader.epoch(state.epoch, first), start=first):
        waited = time.perf_counter() - before
        sent.append(send(run, number, batches, waited, state.step + len(sent) + 1))
        last = number + 1 == per_epoch
        pause = last or pause_after(run, sent[-1].step)
        since = settle(run, sent, since, 0 if pause else job.trainer.late)
        if state.ended or state.save:
            since = settle(run, sent, since)
        if last:
            break
        if not sent:
            if not state.ended and validation_due(run, state.step):
                validate(run)
            if state.ended:
                return
            save_if_due(run)
            since = time.perf_counter()
        run.watchdog.doing(f"reading for step {state.step + len(sent) + 1}")
        before = time.perf_counter()
    end_epoch(run)


def pause_after(run: Run, step: int) -> bool:
    """Whether this step is followed by what needs its totals, as all ranks know beforehand."""
    return validation_due(run, step) or run.checkpoints.follows(step)


def send(run: Run, number: int, batches: list[Batch], waited: float, step: int) -> Sent:
    """Do `step`, which has this number in its epoch; on a GPU it is queued. Collective."""
    job = run.job
    run.watchdog.doing(f"step {step}")
    rows, rate = job.plan.partition.total(number), rate_of(run, step)
    set_learning_rate(job.trainer.optimizer, rate)
    digest = digest_due(run, step)
    save = run.writer is not None and run.writer.overdue()
    news = run.control.news(waited, save, None if digest is None else slot_value(digest))
    train_step(job.trainer, batches, rows, news, lambda: wait_for_all(run, step))
    told = None if digest is None else Snapshot(digest)
    return Sent(step, rows, rate, told, job.trainer.message.report())


def settle(run: Run, sent: deque[Sent], since: float, left: int = 0) -> float:
    """Read what steps came to, oldest first, until `left` of them are `sent` and not read; the
    moment at which the last one was known, `since` that of the one before.
    """
    while len(sent) > left:
        step, rows, rate, digest, report = sent.popleft()
        run.watchdog.doing(f"recording step {step}")
        totals = report.totals()
        check(totals, rows, step, run.state.epoch + 1, run.job.trainer.skips_rows)
        if digest:
            compare_digests(run, totals, as_hex(digest.numbers()))
        run.state.step = step
        now = time.perf_counter()
        tell_step(run, totals, rate, now - since)
        since = now
        note_votes(run.state, totals)
    return since


def note_votes(state: Progress, totals: Totals) -> None:
    """What ranks asked for in a step; a stop that was asked for before a notice remains one."""
    if totals.stop:
        state.ended = Why.STOP
    elif totals.leave and not state.ended:
        state.ended = Why.LEAVE
    state.save |= totals.save > 0


def end_epoch(run: Run) -> None:
    """After the last step of an epoch: its record, validation, checkpoint. Collective."""
    state = run.state
    loss, correct, rows, seconds = state.sums
    accuracy = correct / rows if run.job.task.classes else None
    state.epoch += 1
    if missing := run.job.plan.partition.rows - round(rows):
        run.recorder.note(f"epoch {state.epoch}: {missing:,} rows could not be used")
    state.sums = (0.0, 0.0, 0.0, 0.0)
    state.figures.update(loss=loss / rows, accuracy=accuracy)
    run.recorder.epoch(state.epoch, loss / rows, accuracy, rows / seconds, seconds)
    if not state.ended and validation_due(run, state.step):
        validate(run)
    if not state.ended:
        save_if_due(run)
        if state.epoch < run.job.plan.epochs:
            move_shards(run)


def move_shards(run: Run) -> None:
    """Let fast ranks carry more of the shards, where that is wanted and saves time."""
    if run.balance and (runs := run.balance.better()):
        carry(run.job, runs, run.comm)
        counts = ", ".join(str(len(each)) for each in runs)
        run.recorder.note(f"shards by rank from epoch {run.state.epoch + 1} on: {counts}")


def wait_for_all(run: Run, step: int) -> None:
    """Say that this rank has done its part of the step."""
    run.watchdog.doing(f"waiting for all in step {step}")


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


def compare_digests(run: Run, totals: Totals, digest: str) -> None:
    """Compare what all ranks sent of the state before a step, raise the same on all where one
    differs, record rank 0's.
    """
    check_alike(totals.digests, run.state.step)
    run.recorder.digest(run.state.step, digest)


def compare_at_end(run: Run) -> None:
    """The same after the last step of a launch, which no message follows. Collective."""
    if run.job.config.digest_every:
        own = slot_value(rank_digest(run.job.trainer)).item()
        check_alike(run.comm.allgather(int(own)), run.state.step)


def check_alike(digests: list[int], step: int) -> None:
    """Raise the same on all ranks where one differs."""
    try:
        check_digests(digests, step)
    except RunError as error:
        raise agreed(error) from None


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


def save_if_due(run: Run) -> None:
    """Save what the run needs to go on, where steps or time since the last one call for it."""
    if run.state.save or run.checkpoints.follows(run.state.step):
        save_checkpoint(run)


def save_checkpoint(run: Run) -> None:
    """Save what the run needs to go on, behind training's back (rank 0)."""
    run.state.save = False
    if run.writer is None:
        return
    run.watchdog.doing(f"saving step {run.state.step}")
    run.recorder.flush()
    tensors, state = gather(run.job.trainer, run.state)
    run.writer.save(run.state.step, tensors, state)
