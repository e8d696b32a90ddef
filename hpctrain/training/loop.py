"""The training loop: epochs of steps, and the work between two steps."""

from __future__ import annotations

import time
from contextlib import closing
from functools import partial

import torch

from hpctrain.data.split import Bad
from hpctrain.fault import fault
from hpctrain.parallel.device import hardware_key
from hpctrain.text import listed
from hpctrain.training.optimizer import learning_rate
from hpctrain.training.state import Run
from hpctrain.training.steps import PendingStep, PendingSteps, compare_ranks
from hpctrain.training.validate import validate, validation_due
from hpctrain.watchdog import doing


def train_epochs(run: Run) -> None:
    """Train from the current step to the last epoch, or until the run ends early. Collective."""
    job, state, per_epoch = run.job, run.state, run.job.plan.steps_per_epoch
    pending = PendingSteps(run)
    if state.step and validation_due(run, state.step) and state.validated < state.step:
        compare_ranks(run)
        validate(run)  # the previous launch was preempted during it
    with closing(job.loader) as loader:
        while state.epoch < job.plan.epochs and not state.ended:
            first = state.step - state.epoch * per_epoch
            pending.restart_clock()
            doing(f"reading for step {state.step + 1}")
            began = time.perf_counter()
            bad = Bad()
            for number, batches in enumerate(loader.epoch(state.epoch, first, bad), start=first):
                waited = time.perf_counter() - began
                step = state.epoch * per_epoch + number + 1
                doing(f"step {step}")
                if bad:  # then this step does not count, on any rank: `check` names the images
                    for batch in batches:
                        batch.images.fill_(torch.nan)
                rows = job.plan.partition.total(number)
                rate = learning_rate(job.config, job.plan, step - 1)
                flags = run.control.flags(waited, run.writer is not None and run.writer.overdue())
                wait = partial(doing, f"waiting for all in step {step}")
                report = job.trainer.step(batches, rows, flags, wait, rate)
                pending.append(PendingStep(step, rows, rate, report))
                finish_step(run, pending)
                fault("step.done")
                if state.ended or number + 1 == per_epoch:
                    break
                doing(f"reading for step {step + 1}")
                began = time.perf_counter()


def finish_step(run: Run, pending: PendingSteps) -> None:
    """Read the totals that are due, then do the work that follows a step. Collective.

    That may be to end the epoch, validate, save a checkpoint, or end the run (`Progress.ended`). On
    GPUs a step is started before the totals of the previous one are read (`Trainer.in_flight`);
    they are read first if the work needs them. All ranks read them at the same point, so all
    decide alike.
    """
    state, plan, step = run.state, run.job.plan, pending.newest
    last = step % plan.steps_per_epoch == 0
    validates = validation_due(run, step)
    saves = run.checkpoints.follows(step, plan.steps_per_epoch)
    needed = last or validates or saves  # known to all ranks in advance
    pending.drain(0 if needed else run.job.trainer.in_flight)
    if state.ended or state.save:
        pending.drain()
    if pending:
        return
    if last:
        end_epoch(run)
    if not state.ended and validates:
        compare_ranks(run)
        validate(run)
    if not state.ended and (state.save or saves):
        compare_ranks(run)
        save_checkpoint(run)
    pending.restart_clock()


def end_epoch(run: Run) -> None:
    """Record an epoch after its last step."""
    state = run.state
    loss, correct, rows, seconds = state.sums
    loss /= state.weight or rows
    accuracy = correct / rows if run.job.task.classes else None
    state.epoch += 1
    if state.epoch == 1:
        note_unused(run)
    state.sums, state.weight = (0.0, 0.0, 0.0, 0.0), 0.0
    state.figures.update(loss=loss, accuracy=accuracy)
    run.recorder.epoch(
        epoch=state.epoch,
        loss=loss,
        accuracy=accuracy,
        images_per_second=rows / seconds,
        seconds=seconds,
    )


def note_unused(run: Run) -> None:
    """Note the parameters whose gradient was zero in the last step, if any."""
    message = run.job.trainer.message
    segments = message.layout.segments
    reached = torch.stack([message.gradients[each.span].any() for each in segments]).tolist()
    names = [each.name for each, used in zip(segments, reached, strict=True) if not used]
    if names:
        run.recorder.note(
            f"no gradient reached {len(names)} of {len(segments)} parameters in the last step of"
            f" the first epoch ({listed(names, 5)}): if no output depends on them, they change by"
            " --weight-decay alone"
        )


def save_checkpoint(run: Run) -> None:
    """Write a checkpoint in the background (rank 0)."""
    run.state.save = False
    if run.writer is None:
        return
    doing(f"saving step {run.state.step}")
    run.recorder.flush()
    trainer = run.job.trainer
    known = {
        "layout": trainer.message.layout.digest(),
        "key": hardware_key(trainer.message.device),
    }
    run.writer.save(run.state.step, trainer.state(), {**known, **run.state.to_json()})
