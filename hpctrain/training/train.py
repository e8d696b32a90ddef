"""The training loop: epochs of steps, validation, the record, the saved network.

mpirun -n 4 python -m hpctrain --data flowers.h5
"""

from __future__ import annotations

import itertools
import time
from dataclasses import dataclass, field
from pathlib import Path

import torch

from hpctrain import __version__
from hpctrain.config import Config, to_toml
from hpctrain.data.packed import Rows
from hpctrain.errors import RunError, UsageError
from hpctrain.files import whole_file
from hpctrain.parallel.message import Totals
from hpctrain.parallel.mpi import Comm, agreed, everywhere, from_root, host_name, library, start_mpi
from hpctrain.parallel.reduce import broadcast
from hpctrain.report.record import Recorder
from hpctrain.training import saved
from hpctrain.training.control import Control
from hpctrain.training.evaluate import Evaluation, evaluate
from hpctrain.training.optim import learning_rate, set_learning_rate
from hpctrain.training.setup import Job, set_up
from hpctrain.training.step import Classification, train_step


def main(config: Config) -> int:
    """``hpctrain train``: start MPI, train, give the exit code. Collective."""
    comm = start_mpi()
    return train(config, comm)


def train(config: Config, comm: Comm) -> int:
    """Train to the end, or until a stop is asked for. Collective.

    Raises UsageError or RunError, the same on all ranks unless one rank alone fails.
    """
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
        state = Progress()
        try:
            stopped = run_epochs(job, state, recorder, control, comm)
        except NonFinite as error:
            if mine:
                save(job, folder, state)
            recorder.end("failed", str(error))
            raise
        if "validation" in job.pack.splits and state.validated < state.step:
            evaluation(job, state, "validation", recorder, comm)
        tests = test(job, state, recorder, comm)
        if mine:
            save(job, folder, state)
        recorder.end(
            "stopped" if stopped else "done",
            "asked to stop" if stopped else None,
            steps=state.step,
            seconds=time.perf_counter() - began,
            **tests,
        )
    return 0


@dataclass
class Progress:
    """How far the run has come, and the figures it reached."""

    step: int = 0  # steps done
    epoch: int = 0  # epochs done
    validated: int = 0  # step of the last validation
    figures: dict[str, float] = field(default_factory=dict)


class NonFinite(RunError):
    """Loss or gradient became NaN or infinite; the weights are those of the step before."""


def run_epochs(job: Job, state: Progress, recorder: Recorder, control: Control, comm: Comm) -> bool:
    """All epochs from where `state` stands. Returns whether a stop ended them. Collective."""
    while state.epoch < job.plan.epochs:
        if run_epoch(job, state, recorder, control, comm):
            return True
        state.epoch += 1
        every = job.config.evaluate_every
        if "validation" in job.pack.splits and every and state.epoch % every == 0:
            evaluation(job, state, "validation", recorder, comm)
    return False


def run_epoch(job: Job, state: Progress, recorder: Recorder, control: Control, comm: Comm) -> bool:
    """The steps of one epoch. Returns whether a stop was asked for. Collective."""
    plan, trainer = job.plan, job.trainer
    loss = correct = rows = 0.0
    began = before = time.perf_counter()
    for number, batches in enumerate(job.loader.epoch(state.epoch)):
        waited = time.perf_counter() - before
        rate = learning_rate(
            job.config, plan.learning_rate, state.step, plan.steps_per_epoch, plan.epochs
        )
        set_learning_rate(trainer.optimizer, rate)
        total = plan.partition.total(number)
        reducing = train_step(trainer, batches, total, waited, control.asked())
        totals = trainer.message.totals()
        check(totals, total, state)
        state.step += 1
        now = time.perf_counter()
        shares, slowest = time_shares(totals, reducing)
        recorder.step(
            epoch=state.epoch + 1,
            step=state.step,
            loss=totals.loss / totals.rows,
            accuracy=totals.correct / totals.rows,
            learning_rate=rate,
            images_per_second=totals.rows / (now - before),
            seconds={**shares, "total": now - before},
            slowest_rank=slowest,
            rows=totals.rows,
        )
        loss, correct, rows = loss + totals.loss, correct + totals.correct, rows + totals.rows
        before = now
        if totals.stop:
            return True
    seconds = time.perf_counter() - began
    state.figures.update(loss=loss / rows, accuracy=correct / rows)
    recorder.epoch(state.epoch + 1, loss / rows, correct / rows, rows / seconds, seconds)
    return False


def time_shares(totals: Totals, reducing: float) -> tuple[dict[str, float], int]:
    """Where the seconds of a step went on its slowest rank, and which rank that was.

    What rank 0 spent in the reduction waiting for the slowest rank is that rank's computation.
    """
    busy = [data + compute for data, compute in zip(totals.data, totals.compute, strict=True)]
    slowest = busy.index(max(busy))
    return {
        "data": totals.data[slowest],
        "compute": totals.compute[slowest],
        "reduce": max(0.0, reducing - (busy[slowest] - busy[0])),
    }, slowest


def check(totals: Totals, rows: int, state: Progress) -> None:
    """Look at what a step reported; all ranks see the same and raise the same."""
    step, epoch = state.step + 1, state.epoch + 1
    if not totals.finite:
        what = "the loss" if totals.nonfinite else "the gradient"
        ranks = ", ".join(map(str, totals.nonfinite))
        where = f" on rank {ranks}" if totals.nonfinite else ""
        raise agreed(
            NonFinite(
                f"{what} of step {step} (epoch {epoch}) is not finite{where}; the weights of step"
                f" {step - 1} are kept. A lower --lr or --clip-norm may help"
            )
        )
    if totals.irregular:
        raise agreed(
            RunError(f"a batch-norm layer did not run exactly once in step {step} (epoch {epoch})")
        )
    if totals.rows != rows:
        raise agreed(RunError(f"step {step} summed {totals.rows} rows, but the plan has {rows}"))


def evaluation(job: Job, state: Progress, split: str, recorder: Recorder, comm: Comm) -> Evaluation:
    """Evaluate one split and record it. Collective."""
    began = time.perf_counter()
    source = everywhere(comm, lambda: Rows(job.pack, split))
    with source:
        result = evaluate(
            job.trainer.model,
            source,
            len(job.pack.classes),
            job.prepare,
            Classification(job.plan.precision),
            comm,
            job.plan.evaluation_rows,
        )
    if split == "validation":
        state.validated = state.step
    state.figures[f"{split}_accuracy"] = result.accuracy
    state.figures[f"{split}_loss"] = result.loss
    recorder.evaluation(
        epoch=state.epoch,
        step=state.step,
        split=split,
        loss=result.loss,
        accuracy=result.accuracy,
        rows=result.rows,
        seconds=time.perf_counter() - began,
    )
    return result


def test(job: Job, state: Progress, recorder: Recorder, comm: Comm) -> dict[str, float]:
    """Evaluate every split that was not used in training; their accuracies. Collective.

    Under --batch-norm local all ranks take the statistics of rank 0: those are saved.
    """
    if job.plan.batch_norm == "local":
        broadcast(comm, job.trainer.norms.running)
        job.trainer.norms.restore()
    splits = [name for name in job.pack.splits if name not in ("train", "validation")]
    return {
        f"{split}_accuracy": evaluation(job, state, split, recorder, comm).accuracy
        for split in splits
        if job.pack.splits[split].rows
    }


def free_name(job: Job) -> str:
    """Time and model, with a number where another run began in the same second."""
    model = Path(job.plan.model).name.replace(":", ".")
    base = f"{time.strftime('%Y%m%d-%H%M%S')}-{model}"
    names = (base if number == 1 else f"{base}-{number}" for number in itertools.count(1))
    return next(name for name in names if not (Path(job.config.runs_dir) / name).exists())


def make_run_folder(job: Job) -> Path:
    """Create the run's folder with its configuration and plan. A name is used once."""
    folder = Path(job.config.runs_dir) / (job.config.run or free_name(job))
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        folder.mkdir()
        with whole_file(folder / "config.toml") as path:
            path.write_text(to_toml(job.config))
        with whole_file(folder / "plan.json") as path:
            path.write_text(job.plan.to_json() + "\n")
    except FileExistsError as error:
        raise UsageError(f"the run {folder} exists: choose another name with --run") from error
    except OSError as error:
        raise RunError(f"cannot write {folder}: {error.strerror}") from error
    return folder


def run_facts(job: Job, folder: Path, comm: Comm) -> dict[str, object]:
    """The first line of the record. Collective."""
    hosts = comm.gather(host_name()) or []
    return {
        "name": folder.name,
        "folder": str(folder),
        "model": job.plan.model,
        "parameters": sum(p.numel() for p in job.trainer.model.parameters()),
        "ranks": comm.size,
        "hosts": sorted(set(hosts)),
        "shards": job.plan.shards,
        "device": job.plan.device,
        "threads": job.plan.threads,
        "precision": job.plan.precision,
        "batch_size": job.plan.batch_size,
        "epochs": job.plan.epochs,
        "steps_per_epoch": job.plan.steps_per_epoch,
        "learning_rate": job.plan.learning_rate,
        "rows": {name: split.rows for name, split in job.pack.splits.items()},
        "pack": job.pack.path,
        "pack_uuid": job.pack.uuid,
        "plan": job.plan.digest(),
        "fresh": list(job.kept_fresh),
        "mpi": library(),
        "torch": torch.__version__,
        "hpctrain": __version__,
    }


def save(job: Job, folder: Path, state: Progress) -> None:
    """Write model.safetensors (rank 0)."""
    figures = {"run": folder.name, "step": state.step, "epoch": state.epoch, **state.figures}
    saved.save(folder / saved.FILE, job.trainer.model, job.config, job.plan, job.pack, figures)
