"""The loop: epochs of steps, and what stands between steps: validation, checkpoint, the end."""

from __future__ import annotations

import time

from hpctrain.parallel.mpi import allgather
from hpctrain.parallel.overlap import OverlapTrial
from hpctrain.training.progress import Run
from hpctrain.training.resume import gather
from hpctrain.training.setup import carry, renew_reduction
from hpctrain.training.step import Trainer
from hpctrain.training.steps import Steps
from hpctrain.training.validate import validate, validation_due
from hpctrain.watchdog import doing


def run_epochs(run: Run) -> None:
    """All epochs from where the run stands, until something ends them. Collective."""
    state = run.state
    if state.step and validation_due(run, state.step) and state.validated < state.step:
        validate(run)  # the launch before had to leave in the middle of it
    try:
        while state.epoch < run.job.plan.epochs and not state.ended:
            run_epoch(run)
    finally:
        run.job.loader.close()


def run_epoch(run: Run) -> None:
    """The steps of one epoch that are still to be done, until something ends them. Collective.

    Where something follows that needs the totals of a step, such as a validation or a checkpoint,
    they are read first. All ranks read them at the same place, so all come to the same end.
    """
    job, state, per_epoch = run.job, run.state, run.job.plan.steps_per_epoch
    first = state.step - state.epoch * per_epoch
    steps, before = Steps(run), time.perf_counter()
    for number, batches in enumerate(job.loader.epoch(state.epoch, first), start=first):
        steps.begin(number, batches, waited=time.perf_counter() - before)
        last = number + 1 == per_epoch
        steps.settle(0 if last or pause_after(run, steps.newest) else job.trainer.late)
        if state.ended or state.save:
            steps.settle()
        if run.overlap and run.overlap.follows(state.step) and steps.settled:
            choose_overlap(run, run.overlap)
        if last:
            break
        if steps.settled:
            if not state.ended and validation_due(run, state.step):
                validate(run)
            if state.ended:
                return
            save_if_due(run)
            steps.start_clock()
        doing(f"reading for step {steps.newest + 1}")
        before = time.perf_counter()
    end_epoch(run)


def pause_after(run: Run, step: int) -> bool:
    """Whether this step is followed by what needs its totals, as all ranks know beforehand."""
    measured = run.overlap is not None and run.overlap.follows(step)
    return measured or validation_due(run, step) or run.checkpoints.follows(step)


def choose_overlap(run: Run, trial: OverlapTrial) -> None:
    """Sum gradients in as many segments as the steps so far speak for. Collective."""
    doing("choosing --overlap")
    text = trial.decide(allgather(run.comm, trial.times()))
    runs = run.balance.runs if run.balance else [range(*each) for each in run.job.plan.runs]
    if trial.segments != run.job.trainer.segments:
        renew_reduction(run.job, runs, trial.segments)
    if text:
        run.recorder.note(text)


def end_epoch(run: Run) -> None:
    """After the last step of an epoch: its record, validation, checkpoint. Collective."""
    state = run.state
    loss, correct, rows, seconds = state.sums
    accuracy = correct / rows if run.job.task.classes else None
    state.epoch += 1
    if missing := run.job.plan.partition.rows - round(rows):
        run.recorder.note(f"epoch {state.epoch}: {missing:,} rows could not be used")
    if state.epoch == 1 and (unused := run.job.trainer.unused.names()):
        run.recorder.note(unused_note(unused, run.job.trainer))
    state.sums = (0.0, 0.0, 0.0, 0.0)
    state.figures.update(loss=loss / rows, accuracy=accuracy)
    run.recorder.epoch(
        epoch=state.epoch,
        loss=loss / rows,
        accuracy=accuracy,
        images_per_second=rows / seconds,
        seconds=seconds,
    )
    if not state.ended and validation_due(run, state.step):
        validate(run)
    if not state.ended:
        save_if_due(run)
        if state.epoch < run.job.plan.epochs:
            move_shards(run)


def unused_note(names: list[str], trainer: Trainer) -> str:
    """What is said of parameters that no gradient reached in an epoch."""
    shown = ", ".join(names[:5]) + (", ..." if len(names) > 5 else "")
    return (
        f"no gradient reached {len(names)} of {len(trainer.message.layout.segments)} parameters"
        f" ({shown}): they are left as they were, by --weight-decay too"
    )


def move_shards(run: Run) -> None:
    """Let fast ranks carry more of the shards, where that is wanted and saves time."""
    if run.balance and (runs := run.balance.better()):
        carry(run.job, runs, run.comm)
        counts = ", ".join(str(len(each)) for each in runs)
        run.recorder.note(f"shards by rank from epoch {run.state.epoch + 1} on: {counts}")


def save_if_due(run: Run) -> None:
    """Save what the run needs to go on, where steps or time since the last one call for it."""
    if run.state.save or run.checkpoints.follows(run.state.step):
        save_checkpoint(run)


def save_checkpoint(run: Run) -> None:
    """Save what the run needs to go on, behind training's back (rank 0)."""
    run.state.save = False
    if run.writer is None:
        return
    doing(f"saving step {run.state.step}")
    run.recorder.flush()
    tensors, state = gather(run.job.trainer, run.state)
    run.writer.save(run.state.step, tensors, state)
