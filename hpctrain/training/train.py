"""A training run from launch to end: begin or go on, train, stop, or leave in time.

mpirun -n 4 python -m hpctrain --data flowers.h5 --run first
"""

from __future__ import annotations

import dataclasses
import signal
from collections.abc import Iterator
from contextlib import AbstractContextManager, closing, contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from hpctrain.config import Config, check_settings, duration
from hpctrain.data.external import reading_note
from hpctrain.data.staging import remove_copies
from hpctrain.errors import Failure, RunError, UsageError
from hpctrain.heartbeats import FOLDER as HEARTBEATS
from hpctrain.inference.network import FILE as MODEL_FILE
from hpctrain.launcher import LEFT
from hpctrain.models import read_model, save_model
from hpctrain.parallel.backend_flags import refusal, torch_settings
from hpctrain.parallel.mpi import (
    Comm,
    abort_all,
    agreed,
    allgather,
    call_on_all,
    call_on_root,
    host_name,
    limit_finalize,
    start_mpi,
)
from hpctrain.parallel.overlap import OverlapTrial
from hpctrain.parallel.shards import Balance
from hpctrain.report.recorder import Recorder
from hpctrain.text import say
from hpctrain.training.checkpoint import Interval, Writer
from hpctrain.training.control import Control, RunLock, deadline
from hpctrain.training.digest import run_digest
from hpctrain.training.folder import make_run_folder, open_run_folder, run_facts
from hpctrain.training.loop import run_epochs, save_checkpoint
from hpctrain.training.outcome import CannotContinue
from hpctrain.training.progress import EndReason, Progress, Run
from hpctrain.training.replay import Replay
from hpctrain.training.resume import Earlier, find_earlier, restore
from hpctrain.training.setup import set_up
from hpctrain.training.step import Trainer
from hpctrain.training.steps import compare_at_end
from hpctrain.training.validate import describe_network, show_work, test, validate
from hpctrain.watchdog import Watchdog, current, doing, keep_in, started, waiting

SLOW_DISK = 100e6  # bytes/s


class Times(NamedTuple):
    """What a run is told about time."""

    timeout: float  # seconds without anything new after which a rank counts as hung
    ends: float | None  # when the run must have ended, in seconds since 1970
    checkpoints: Interval
    note: str | None = None  # what is not known of them


def main(config: Config) -> int:
    """``hpctrain train``: start MPI, train, give the exit code. Collective."""
    comm = start_mpi()
    return train(config, comm)


def train(config: Config, comm: Comm) -> int:
    """Train to the end or until a stop is asked for (0), or until the run has to leave (75), from
    where an earlier launch of the same run ended; torch's settings are put back. Collective.

    Raises UsageError or RunError, the same on all ranks unless one rank alone fails.
    """
    config = call_on_root(comm, lambda: config)
    call_on_root(comm, lambda: check_settings(config))
    times = call_on_root(comm, lambda: read_times(config))
    limit_finalize(min(60.0, times.timeout))
    watched: AbstractContextManager[Any] = nullcontext()
    if not current():  # called by a program of the user's own
        watched = Watchdog(comm.rank, comm.size, host_name(), times.timeout, abort_all)
    lock = RunLock()
    try:
        with watched:
            return _train(config, comm, lock, times)
    except RuntimeError as error:
        if text := refusal(error):
            raise RunError(text) from error
        raise
    finally:
        lock.release()


def read_times(config: Config) -> Times:
    """The times that the settings tell. UsageError for those that are none."""
    timeout = duration(config.timeout, "--timeout")
    ends, note = deadline(config.time_limit)
    return Times(timeout, ends, Interval.parse(config.checkpoint_every), note)


def _train(config: Config, comm: Comm, lock: RunLock, times: Times) -> int:
    started("setting up")
    earlier = call_on_root(comm, lambda: find_earlier(config, lock))
    if earlier and earlier.finished and earlier.plan.epochs >= (config.epochs or 0):
        text = f"The run {earlier.folder} is finished, {earlier.plan.epochs} epochs"
        call_on_root(comm, partial(check_network, earlier.folder / MODEL_FILE, text))
        if comm.rank == 0:
            say(f"{text}: a larger --epochs extends it")
        return 0
    precision = earlier.plan.precision if earlier else config.precision
    if earlier:
        config = dataclasses.replace(config, precision=earlier.precision)
    with torch_settings(precision, config.deterministic):
        return _launch(config, comm, lock, times, earlier)


def _launch(
    config: Config, comm: Comm, lock: RunLock, times: Times, earlier: Earlier | None
) -> int:
    job = set_up(
        config,
        comm,
        earlier.plan if earlier else None,
        first_weights=earlier is None or earlier.checkpoint is None,
    )
    if config.dry_run:
        if comm.rank == 0:
            say("\n".join(job.plan.lines()))
            for note in job.notes:
                say(f"note           {note}")
        return 0
    state = Progress(planned=job.plan.epochs)
    notes = restore(earlier, job.trainer, state, comm)

    def open_folder() -> Path:
        if earlier:
            return open_run_folder(job, earlier, state)
        return make_run_folder(job, lock)

    folder = call_on_root(comm, open_folder)
    call_on_all(comm, lambda: keep_in(folder / HEARTBEATS))
    mine = folder if comm.rank == 0 else None
    with (
        closing(job.trainer),
        together(comm),
        Recorder(mine, config.progress, config.tensorboard, state.step) as recorder,
        Control(mine, times.ends) as control,
        Writer(mine, times.checkpoints, config.keep) if mine else nullcontext() as writer,
    ):
        recorder.run(run_facts(job, folder, comm))
        reading = reading_note(job.pack, job.plan.shuffle, job.plan.window_blocks)
        for line in (*notes, *job.notes, *filter(None, (times.note, reading))):
            recorder.note(line)
        control.saving = saving_seconds(job.trainer)
        auto = config.worker_load == "auto"
        balance = Balance([range(*run) for run in job.plan.runs]) if auto else None
        replays = config.digest_every and not config.local_buffers
        replay = Replay(job.trainer, job.task, job.plan) if replays else None
        interval = times.checkpoints
        trial = make_trial(config, comm, state.step)
        run = Run(job, comm, recorder, control, state, interval, writer, balance, trial, replay)
        return train_in(run, folder)


def check_network(path: Path, text: str) -> None:
    """RunError that begins with `text` where a finished run's network is not what was written."""
    try:
        read_model(path)
    except UsageError as error:
        advice = "bring that file back, or train anew under another --run"
        raise RunError(f"{text}, but {error}: {advice}") from error


def make_trial(config: Config, comm: Comm, first: int) -> OverlapTrial | None:
    """What measures for --overlap auto after `first` steps, where it is asked for and ranks have
    something to sum.
    """
    return OverlapTrial(first) if config.overlap == "auto" and comm.size > 1 else None


@contextmanager
def together(comm: Comm) -> Iterator[None]:
    """Let all ranks end when the last has: rank 0 may still be writing. Collective."""
    failure = None
    try:
        yield
    except Failure as error:
        if not error.agreed:
            raise
        failure = error
    doing("ending")
    with waiting():
        comm.Barrier()
    if failure is not None:
        raise failure


def saving_seconds(trainer: Trainer) -> float:
    """What a checkpoint may take, before the first was written."""
    return sum(tensor.nbytes for tensor in trainer.tensors().values()) / SLOW_DISK


def train_in(run: Run, folder: Path) -> int:
    """All steps that are left, and what follows the last one; the exit code. Collective."""
    first = run.state.step
    with keeping_progress(run, folder):
        run_epochs(run)
    doing("comparing digests")
    compare_at_end(run)
    doing("saving")
    save_checkpoint(run)
    call_on_root(run.comm, lambda: run.writer.wait() if run.writer else None)
    if run.state.ended is EndReason.PREEMPTED:
        return leave(run, run.state.step - first)
    return finish(run, folder, first)


@contextmanager
def keeping_progress(run: Run, folder: Path) -> Iterator[None]:
    """Save where the run stands if the block finds that it cannot go on. Collective then."""
    try:
        yield
    except CannotContinue as error:
        doing("saving")
        try:
            call_on_root(run.comm, lambda: save_all(run, folder))
        except RunError as second:
            run.recorder.end("failed", f"{error}; not saved: {second}")
            raise agreed(CannotContinue(f"{error}; not saved: {second}")) from error
        run.recorder.end("failed", str(error))
        raise


def save_all(run: Run, folder: Path) -> None:
    """Save a checkpoint and the network, and wait until both are there (rank 0). RunError."""
    save_checkpoint(run)
    save(run, folder)
    if run.writer:
        run.writer.wait()


def leave(run: Run, done: int) -> int:
    """End a launch that has to leave: 75 if it did and saved any step, else 1. Collective."""
    why = next(filter(None, allgather(run.comm, run.control.leaving())), "a signal")
    run.recorder.end("preempted", f"{why}; saved", steps=run.state.step)
    if why == signal.SIGTERM.name:  # what scancel sends
        remove_copies(run.job.config.stage)
    return LEFT if done > 0 else 1


def finish(run: Run, folder: Path, first: int) -> int:
    """After the last step: validate, choose the network, save it, test it, close the record; the
    exit code. Collective.
    """
    state, trainer, stopped = run.state, run.job.trainer, run.state.ended is EndReason.STOP
    if not stopped and "validation" in run.job.pack.splits and state.validated < state.step:
        with keeping_progress(run, folder):
            validate(run)
        if state.ended is EndReason.PREEMPTED:
            return leave(run, state.step - first)
        call_on_root(run.comm, lambda: run.writer.wait() if run.writer else None)
    state.restore_best(trainer)
    call_on_root(run.comm, lambda: save(run, folder))  # before anything else may fail
    try:
        tests = test(run, folder) if run.job.config.test else {}
    except CannotContinue as error:
        run.recorder.end("failed", str(error))
        raise
    if state.ended is EndReason.PREEMPTED:
        return leave(run, state.step - first)
    call_on_root(run.comm, lambda: save(run, folder))
    call_on_root(run.comm, lambda: show_work(run, folder))
    run.recorder.end(
        "stopped" if stopped else "done",
        state.ended if stopped else state.reason,
        steps=state.step,
        digest=run_digest(trainer, state.chain) if run.comm.rank == 0 else None,
        checkpoint_stall=run.writer.stall if run.writer else None,
        **tests,
    )
    run.control.ended()
    return 0


def save(run: Run, folder: Path) -> None:
    """Write model.safetensors (rank 0)."""
    save_model(folder / MODEL_FILE, run.job.trainer.model, describe_network(run, folder.name))
