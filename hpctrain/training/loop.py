"""The training loop: epochs of steps, what their totals say, and the work between two steps.

On GPUs the host starts a step before it reads the totals of the previous one (`Trainer.in_flight`):
then they are checked, recorded and acted upon.
"""

from __future__ import annotations

import math
import time
from collections import deque
from contextlib import closing
from typing import Any, NamedTuple

import torch

from hpctrain.cluster import received_signal
from hpctrain.data.split import Bad, describe_first
from hpctrain.errors import RunError
from hpctrain.fault import fault
from hpctrain.outcome import Status
from hpctrain.parallel.message import Totals
from hpctrain.parallel.mpi import agreed, allgather, minimum
from hpctrain.streams import Event, Snapshot, record_event
from hpctrain.text import listed
from hpctrain.training.optimizer import learning_rate
from hpctrain.training.state import MOST_LISTED, NonFinite, Run
from hpctrain.training.validate import validate, validation_due
from hpctrain.watchdog import doing, running_time


class PendingStep(NamedTuple):
    """A step that was started and whose totals have not been read yet."""

    step: int
    rows: int
    rate: float
    since: Event  # the end of the step before, or of the work that followed it
    began: float  # by running_time
    reported: Snapshot  # a copy of the reduced message
    bad: Bad  # samples of this rank that cannot be used, up to this step of the epoch


def train_epochs(run: Run) -> None:
    """Train from the current step to the last epoch, or until the run ends early. Collective."""
    plan = run.plan
    per_epoch = plan.steps_per_epoch
    state = run.progress
    pending: deque[PendingStep] = deque()  # oldest first
    if minimum(run.comm, received_signal() is None) == [0]:
        state.ended = Status.PREEMPTED  # before the first step
        return
    if state.step and validation_due(run, state.step) and state.validated < state.step:
        validate(run)  # the previous launch was preempted during it
    with closing(run.loader) as loader:
        while state.epoch < plan.epochs and not state.ended:
            first = state.step - state.epoch * per_epoch
            bad = Bad()
            steps = loader.epoch(state.epoch, first, bad)
            for number in range(first, per_epoch):
                if not pending:
                    since = record_event(run.trainer.message.device, timing=True)
                step = state.epoch * per_epoch + number + 1
                doing(f"reading for step {step}")
                start = running_time()
                began = time.perf_counter()
                batches = next(steps)
                waited = time.perf_counter() - began
                doing(f"step {step}")
                if bad:  # then this step does not count, on any rank: `check` names the images
                    for batch in batches:
                        batch.images.fill_(torch.nan)
                rows = plan.partition.total(number)
                rate = learning_rate(run.config, plan, step - 1)
                requests = run.control.requests(run.writer.overdue())
                reported = run.trainer.step(batches, rows, rate, waited, requests)
                pending.append(PendingStep(step, rows, rate, since, start, reported, bad))
                since = reported.copied
                finish_step(run, pending)
                fault("step.done")
                if run.progress.ended:
                    break


def finish_step(run: Run, pending: deque[PendingStep]) -> None:
    """Read the totals that are due, then do the work that follows a step. Collective.

    That may be to end the epoch, validate, save a checkpoint, or end the run (`Progress.ended`). On
    GPUs a step is started before the totals of the previous one are read (`Trainer.in_flight`);
    they are read first if the work needs them. All ranks read them at the same point, so all
    decide alike.
    """
    state = run.progress
    plan = run.plan
    step = pending[-1].step
    last = step % plan.steps_per_epoch == 0
    validates = validation_due(run, step)
    saves = run.writer.interval.follows(step, plan.steps_per_epoch)
    needed = last or validates or saves  # known to all ranks in advance
    while pending and (needed or saves or state.ended or len(pending) > run.trainer.in_flight):
        saves |= record_step(run, pending.popleft())
    if pending:
        return
    if last:
        end_epoch(run)
    if not state.ended and validates:
        validate(run)
    if not state.ended and saves:
        save_checkpoint(run)


def end_epoch(run: Run) -> None:
    """Record an epoch after its last step."""
    state = run.progress
    sums = state.sums
    loss = sums["loss"] / (sums["weight"] or sums["rows"])
    figures = run.task.step_figures(sums, sums["rows"])
    state.epoch += 1
    if state.epoch == 1:
        note_unused(run)
    state.sums = {}
    state.figures.update(loss=loss, **figures)
    run.recorder.write(
        "epoch",
        epoch=state.epoch,
        loss=loss,
        **figures,
        images_per_second=sums["rows"] / sums["seconds"],
        seconds=sums["seconds"],
    )


def note_unused(run: Run) -> None:
    """Note the parameters whose gradient was zero in the last step, if any."""
    message = run.trainer.message
    if run.task.has_unknown and not message.weight():
        return  # no entry was known
    segments = message.layout.segments
    gradients = [segment.of(message.gradients) for segment in segments]
    reached = torch.stack([gradient.any() for gradient in gradients]).tolist()
    names = [segment.name for segment, used in zip(segments, reached, strict=True) if not used]
    if names:
        run.recorder.note(
            f"no gradient reached {len(names)} of {len(segments)} parameters in the last step of"
            f" the first epoch ({listed(names, 5)}): if no output depends on them, they change by"
            " --weight-decay alone"
        )


def save_checkpoint(run: Run) -> None:
    """Write a checkpoint in the background (rank 0), of a state that all ranks hold. Collective."""
    run.compare_ranks()
    doing(f"saving step {run.progress.step}")
    run.recorder.flush()
    state = {
        "layout": run.trainer.message.layout.digest(),
        "key": run.key,
        "epochs": run.plan.epochs,
        **run.progress.to_json(),
    }
    run.writer.save(run.trainer.state(), state)


def check(run: Run, totals: Totals, pending: PendingStep) -> None:
    """Check the totals of a step. Collective if one is wrong.

    Raises NonFinite, or RunError for totals that must not occur; all ranks see the same totals and
    raise the same error.
    """
    step = pending.step
    rows = pending.rows
    where = f"step {step} (epoch {run.progress.epoch + 1})"
    if totals.skipped:
        if bad := describe_first(allgather(run.comm, pending.bad)):
            raise agreed(NonFinite(f"{bad}; the weights of step {step - 1}, before it, are kept"))
        text = f"the gradient of {where} is not finite"
        finite = allgather(run.comm, math.isfinite(totals.own))
        if nonfinite := [rank for rank, is_finite in enumerate(finite) if not is_finite]:
            ranks = listed(nonfinite, MOST_LISTED)
            text = f"the loss of {where} is not finite on rank {ranks}"
        raise agreed(
            NonFinite(
                f"{text}; the weights of step {step - 1} are kept. A lower --lr or --clip-norm may"
                " help"
            )
        )
    if totals.irregular:
        raise agreed(RunError(f"a batch-norm layer did not run exactly once in {where}"))
    if totals.rows != rows:
        raise agreed(RunError(f"step {step} summed {totals.rows} rows, but the plan has {rows}"))


def record_step(run: Run, pending: PendingStep) -> bool:
    """Read, check and record the totals of a step; return whether a checkpoint was requested.

    They enter the chain of figures, the sums of the epoch and the clocks, and may end the run. The
    time of a step is measured on the device, from the end of the previous one to its own end; it
    does not depend on when the host reads the totals. Raises as `check` does.
    """
    state = run.progress
    doing(f"recording step {pending.step}")
    totals = run.trainer.message.read(pending.reported)
    check(run, totals, pending)
    state.step = pending.step
    seconds = pending.since.elapsed_time(pending.reported.copied) / 1000
    figures: dict[str, Any] = {
        "epoch": state.epoch + 1,
        "step": state.step,
        "loss": totals.mean_loss,
        **run.task.step_figures(totals.named, totals.rows),
        "learning_rate": pending.rate,
    }
    state.chain_figures(figures)
    state.add_sums(
        {
            "loss": totals.loss,
            "weight": totals.weight,
            "rows": totals.rows,
            "seconds": seconds,
            **totals.named,
        }
    )
    run.control.saving = max(run.writer.seconds, run.writer.stall) or run.control.saving
    ran = min(seconds, running_time() - pending.began)  # without a suspension of the job
    run.control.slowest_step = max(run.control.slowest_step, ran)
    busy = totals.data + totals.compute
    slowest = int(busy.argmax())
    waited = float(busy[slowest] - busy[0])  # by rank 0 in its reduction
    run.recorder.write(
        "step",
        **figures,
        images_per_second=totals.rows / seconds,
        seconds={
            "data": float(totals.data[slowest]),
            "compute": float(totals.compute[slowest]),
            "reduce": max(0.0, run.trainer.clock.reduce - waited),
            "idle": float(busy[slowest] - busy.mean()),
            "total": seconds,
        },
        slowest_rank=slowest,
        rows=totals.rows,
    )
    if totals.stop:  # even if also preempted in the same step
        state.ended = Status.STOPPED
        state.reason = "asked to stop"
    elif totals.preempted and not state.ended:
        state.ended = Status.PREEMPTED
    return totals.save > 0
