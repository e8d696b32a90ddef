"""The loop: epochs of steps, each with its record, its digest, its validation, its checkpoint."""

from __future__ import annotations

import time
from typing import Any

from hpctrain.errors import RunError
from hpctrain.parallel.message import Totals
from hpctrain.parallel.mpi import agreed
from hpctrain.training.digest import check_digests, rank_digest, slot_value
from hpctrain.training.optim import learning_rate, set_learning_rate, warm_up
from hpctrain.training.outcome import check, time_shares
from hpctrain.training.progress import Run, Why
from hpctrain.training.resume import gather
from hpctrain.training.setup import carry
from hpctrain.training.step import train_step
from hpctrain.training.validate import validate, validation_due


def run_epochs(run: Run) -> None:
    """All epochs from where the run stands, until something ends them. Collective."""
    state = run.state
    if state.step and validation_due(run) and state.validated < state.step:
        validate(run)  # the launch before had to leave in the middle of it
    while state.epoch < run.job.plan.epochs and not state.ended:
        run_epoch(run)


def run_epoch(run: Run) -> None:
    """The steps of one epoch that are still to be done, until something ends them. Collective."""
    job, state, per_epoch = run.job, run.state, run.job.plan.steps_per_epoch
    first = state.step - state.epoch * per_epoch
    before = time.perf_counter()
    for number, batches in enumerate(job.loader.epoch(state.epoch, first), start=first):
        run.watchdog.doing(f"step {state.step + 1}")
        waited = time.perf_counter() - before
        total, rate = job.plan.partition.total(number), rate_now(run)
        set_learning_rate(job.trainer.optimizer, rate)
        digest = digest_due(run)
        news = run.control.news(waited, slot_value(digest) if digest else 0)
        reducing = train_step(job.trainer, batches, total, news, lambda: wait_for_all(run))
        run.watchdog.doing(f"recording step {state.step + 1}")
        totals = job.trainer.message.totals()
        check(totals, total, state.step + 1, state.epoch + 1, job.trainer.skips_rows)
        if digest:
            compare_digests(run, totals, digest)
        state.step += 1
        tell_step(run, totals, rate, reducing, time.perf_counter() - before)
        if totals.stop or totals.leave:
            state.ended = Why.STOP if totals.stop else Why.LEAVE
        if number + 1 == per_epoch:
            break
        if not state.ended and validation_due(run):
            validate(run)
        if state.ended:
            return
        checkpoint_if_due(run)
        run.watchdog.doing(f"reading for step {state.step + 1}")
        before = time.perf_counter()
    end_epoch(run)


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
    if not state.ended and validation_due(run):
        validate(run)
    if not state.ended:
        checkpoint_if_due(run)
        if state.epoch < run.job.plan.epochs:
            move_shards(run)


def move_shards(run: Run) -> None:
    """Let fast ranks carry more of the shards, where that is wanted and saves time."""
    if run.balance and (runs := run.balance.better()):
        carry(run.job, runs, run.comm)
        counts = ", ".join(str(len(each)) for each in runs)
        run.recorder.note(f"shards by rank from epoch {run.state.epoch + 1} on: {counts}")


def wait_for_all(run: Run) -> None:
    """Say that this rank has done its part of the step."""
    run.watchdog.doing(f"waiting for all in step {run.state.step + 1}")


def rate_now(run: Run) -> float:
    """The learning rate of the step that comes now."""
    plan = run.job.plan
    step = run.state.step
    scheduled = learning_rate(
        run.job.config, plan.learning_rate, step, plan.steps_per_epoch, plan.epochs
    )
    return scheduled * warm_up(step, plan.warmup_steps, plan.warmup_from)


def digest_due(run: Run) -> str | None:
    """This rank's digest, where the steps done call for a comparison."""
    every, step = run.job.config.digest_every, run.state.step
    return rank_digest(run.job.trainer) if every and step and step % every == 0 else None


def compare_digests(run: Run, totals: Totals, digest: str) -> None:
    """Compare what all ranks sent, raise the same on all where one differs, record rank 0's."""
    try:
        check_digests(totals.digests, run.state.step)
    except RunError as error:
        raise agreed(error) from None
    run.recorder.digest(run.state.step, digest)


def tell_step(run: Run, totals: Totals, rate: float, reducing: float, seconds: float) -> None:
    """What a step gave: for the record, the chain of figures, the epoch's sums, the clock."""
    state = run.state
    shares, slowest = time_shares(totals, reducing)
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
    run.control.slowest_step = max(run.control.slowest_step, seconds)
    run.recorder.step(
        **figures,
        images_per_second=totals.rows / seconds,
        seconds={**shares, "total": seconds},
        slowest_rank=slowest,
        rows=totals.rows,
    )


def checkpoint_if_due(run: Run) -> None:
    """Save what the run needs to go on, where steps or time since the last one call for it."""
    if run.writer is None:
        return
    run.control.saving = max(run.writer.seconds, run.writer.stall) or run.control.saving
    if run.writer.due(run.state.step):
        save_checkpoint(run)


def save_checkpoint(run: Run) -> None:
    """Save what the run needs to go on, behind training's back (rank 0)."""
    if run.writer is None:
        return
    run.watchdog.doing(f"saving step {run.state.step}")
    run.recorder.flush()
    tensors, state = gather(run.job.trainer, run.state)
    run.writer.save(run.state.step, tensors, state)
