"""The training loop: epochs of steps, validation, the record, the saved network.

mpirun -n 4 python -m hpctrain --data flowers.h5
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

from hpctrain.config import Config
from hpctrain.errors import RunError
from hpctrain.parallel.determinism import refusal, torch_settings
from hpctrain.parallel.message import Totals
from hpctrain.parallel.mpi import Comm, agreed, from_root, start_mpi
from hpctrain.report.record import Recorder
from hpctrain.training import saved
from hpctrain.training.control import Control
from hpctrain.training.digest import check_digests, rank_digest, run_digest, slot_value
from hpctrain.training.folder import make_run_folder, run_facts
from hpctrain.training.optim import learning_rate, set_learning_rate
from hpctrain.training.outcome import NonFinite, check, time_shares
from hpctrain.training.progress import Progress, Run
from hpctrain.training.setup import set_up
from hpctrain.training.step import train_step
from hpctrain.training.validate import show_work, test, validate, validation_due


def main(config: Config) -> int:
    """``hpctrain train``: start MPI, train, give the exit code. Collective."""
    comm = start_mpi()
    return train(config, comm)


def train(config: Config, comm: Comm) -> int:
    """Train to the end, or until a stop is asked for; torch's settings are put back. Collective.

    Raises UsageError or RunError, the same on all ranks unless one rank alone fails.
    """
    config = comm.bcast(config)
    try:
        with torch_settings(config.deterministic):
            return _train(config, comm)
    except RuntimeError as error:
        if text := refusal(error):
            raise RunError(text) from error
        raise


def _train(config: Config, comm: Comm) -> int:
    began = time.perf_counter()
    job = set_up(config, comm)
    if config.dry_run:
        if comm.rank == 0:
            print("\n".join(job.plan.lines()))
        return 0
    folder = from_root(comm, lambda: make_run_folder(job))
    mine = folder if comm.rank == 0 else None
    with Recorder(mine, config.progress, config.tensorboard) as recorder, Control(mine) as control:
        recorder.run(run_facts(job, folder, comm))
        run = Run(job, comm, recorder, control, Progress())
        try:
            run_epochs(run)
        except NonFinite as error:
            if mine:
                save(run, folder)
            recorder.end("failed", str(error))
            raise
        finish(run, folder, began)
    return 0


def run_epochs(run: Run) -> None:
    """All epochs from where the run stands, until something ends them. Collective."""
    while run.state.epoch < run.job.plan.epochs and not run.state.ended:
        run_epoch(run)


def run_epoch(run: Run) -> None:
    """The steps of one epoch, until something ends them. Collective."""
    job, state, trainer = run.job, run.state, run.job.trainer
    loss = correct = rows = 0.0
    began = before = time.perf_counter()
    for number, batches in enumerate(job.loader.epoch(state.epoch)):
        waited = time.perf_counter() - before
        rate = learning_rate(
            job.config,
            job.plan.learning_rate,
            state.step,
            job.plan.steps_per_epoch,
            job.plan.epochs,
        )
        set_learning_rate(trainer.optimizer, rate)
        total, digest = job.plan.partition.total(number), digest_due(run)
        part = slot_value(digest) if digest else 0
        reducing = train_step(trainer, batches, total, waited, run.control.asked(), part)
        totals = trainer.message.totals()
        check(totals, total, state.step + 1, state.epoch + 1)
        if digest:
            compare_digests(run, totals, digest)
        state.step += 1
        record_step(run, totals, rate, reducing, time.perf_counter() - before)
        loss, correct, rows = loss + totals.loss, correct + totals.correct, rows + totals.rows
        if totals.stop:
            state.ended = "asked to stop"
        elif number + 1 < job.plan.steps_per_epoch and validation_due(run):
            validate(run)
        if state.ended and number + 1 < job.plan.steps_per_epoch:
            return
        before = time.perf_counter()
    seconds = time.perf_counter() - began
    accuracy = correct / rows if job.task.classes else None
    state.epoch += 1
    state.figures.update(loss=loss / rows, accuracy=accuracy)
    run.recorder.epoch(state.epoch, loss / rows, accuracy, rows / seconds, seconds)
    if not state.ended and validation_due(run):
        validate(run)


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


def record_step(run: Run, totals: Totals, rate: float, reducing: float, seconds: float) -> None:
    """Write what a step gave; its figures become a link of the chain."""
    shares, slowest = time_shares(totals, reducing)
    figures: dict[str, Any] = {
        "epoch": run.state.epoch + 1,
        "step": run.state.step,
        "loss": totals.loss / totals.rows,
        "accuracy": totals.correct / totals.rows if run.job.task.classes else None,
        "learning_rate": rate,
    }
    run.state.add(figures)
    run.recorder.step(
        **figures,
        images_per_second=totals.rows / seconds,
        seconds={**shares, "total": seconds},
        slowest_rank=slowest,
        rows=totals.rows,
    )


def finish(run: Run, folder: Path, began: float) -> None:
    """After the last step: validate, choose the network, test it, save it, close the record."""
    state, trainer = run.state, run.job.trainer
    if "validation" in run.job.pack.splits and state.validated < state.step:
        validate(run)
    state.restore_best(trainer)
    from_root(run.comm, lambda: save(run, folder))  # before anything else may fail
    tests = test(run)
    from_root(run.comm, lambda: save(run, folder))
    from_root(run.comm, lambda: show_work(run, folder))
    stopped = state.ended == "asked to stop"
    run.recorder.end(
        "stopped" if stopped else "done",
        state.ended,
        steps=state.step,
        digest=run_digest(trainer, state.chain) if run.comm.rank == 0 else None,
        seconds=time.perf_counter() - began,
        **tests,
    )


def save(run: Run, folder: Path) -> None:
    """Write model.safetensors (rank 0)."""
    job, state = run.job, run.state
    figures = {"run": folder.name, "step": state.step, "epoch": state.epoch, **state.figures}
    saved.save(folder / saved.FILE, job.trainer.model, job.config, job.plan, job.pack, figures)
