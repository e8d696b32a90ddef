"""The folder of a run: its name, its configuration and plan, and the first line of its record."""

from __future__ import annotations

import dataclasses
import errno
import json
import os
import shutil
import time
from pathlib import Path

import torch

from hpctrain import __version__
from hpctrain.config import to_toml
from hpctrain.config.metrics import metric_directions
from hpctrain.errors import RunError, UsageError
from hpctrain.fault import fault
from hpctrain.files import remove_left_behind, sync, temporary_name, write_whole, writing
from hpctrain.heartbeat import HEARTBEATS
from hpctrain.parallel.device import memory_of
from hpctrain.parallel.mpi import library
from hpctrain.plan import FREE, describe_shares
from hpctrain.report.find import SETTINGS_FILE, evaluation_file
from hpctrain.report.record import Recorder, truncate_record
from hpctrain.report.settings import DATA_FILE, PLAN_FILE
from hpctrain.tasks.facts import DIRECTIONS, Direction
from hpctrain.training.checkpoint import make_ready
from hpctrain.training.control import RunLock
from hpctrain.training.resume import PreviousLaunch
from hpctrain.training.state import Run


def make_run_folder(run: Run, lock: RunLock) -> Path:
    """Create the run's folder with its configuration and plan, and lock it.

    Without --run, its name is time and model, with a number for runs begun in the same second. The
    folder is created atomically; an existing one is never reused.
    """
    runs = Path(run.config.runs_dir)
    model = Path(run.plan.model.partition("(")[0]).name.replace(":", ".")  # without arguments
    base = run.config.run or f"{time.strftime('%Y%m%d-%H%M%S')}-{model}"
    with writing(runs):
        runs.mkdir(parents=True, exist_ok=True)
    for number in range(1, 2 if run.config.run else 1000):
        folder = runs / (base if number == 1 else f"{base}-{number}")
        temporary = temporary_name(folder)
        try:
            remove_left_behind(folder)
            temporary.mkdir()
            write_settings(run, temporary)
            make_ready(temporary, 0, 0)
            (temporary / HEARTBEATS).mkdir()  # by rank 0 only
            lock.take(temporary)  # before the rename: another launch must not lock it first
            os.rename(temporary, folder)
            fault("folder.renamed")
            sync(runs)
            return folder
        except OSError as error:
            lock.release()
            shutil.rmtree(temporary, ignore_errors=True)
            if error.errno not in (errno.EEXIST, errno.ENOTEMPTY):
                raise RunError(f"cannot make {folder}: {error.strerror}") from error
    raise UsageError(
        f"another launch has just begun the run {folder}: wait for it to end, or choose another"
        " name with --run"
    )


def write_settings(run: Run, folder: Path) -> None:
    """Write the configuration, the plan, and what identifies a set of files. Raises OSError."""
    texts = {SETTINGS_FILE: to_toml(run.config.table()), PLAN_FILE: run.plan.to_json()}
    files = run.pack.splits["train"].files
    if files is not None:
        texts[DATA_FILE] = json.dumps(files.table(), indent=0)
    for name, text in texts.items():
        write_whole(folder / name, text.rstrip() + "\n")


def open_run_folder(run: Run, earlier: PreviousLaunch) -> Path:
    """Prepare the folder of an earlier launch to resume after the step that was restored.

    If that launch crashed, the crash is recorded as its end.
    """
    folder = earlier.folder
    state = run.progress
    try:
        truncate_record(folder, state.step, state.epoch, state.validated)
        if earlier.crash:
            with Recorder(folder) as recorder:
                recorder.write("end", **earlier.crash._asdict())
        write_settings(run, folder)
        (folder / HEARTBEATS).mkdir(exist_ok=True)  # a copy may lack it: it is empty after a run
        for heartbeat in (folder / HEARTBEATS).iterdir():  # there may be fewer ranks now
            heartbeat.unlink(missing_ok=True)
        for file in folder.glob(evaluation_file(folder, "*").name):  # training resumes
            file.unlink()
        make_ready(folder, state.step, state.best.step)
    except OSError as error:
        where = error.filename or folder
        raise RunError(f"cannot write {where}: {error.strerror}") from error
    return folder


def ranking_figures(run: Run) -> dict[str, Direction]:
    """Return the figures that the record lists, with their directions: the first one ranks runs."""
    figures = {**run.task.facts.recorded, **directions_of_metrics(run)}
    if not run.task.best_by:
        return figures
    return {run.best_by.figure: run.best_by.direction, **figures}


def directions_of_metrics(run: Run) -> dict[str, Direction]:
    """Return the figures of metrics of libraries, one of each, with their directions."""
    named = metric_directions(run.config.metric)
    return {
        metric.name: DIRECTIONS[named[metric.name]]
        for metric in run.task.library_metrics
        if metric.name in metric.figures and named[metric.name]
    }


def run_facts(run: Run) -> dict[str, object]:
    """Return the first line of the record.

    Its settings are a fixed set, and all that affect the results and are not at their defaults.
    """
    settings = {
        name: value
        for name, value in run.config.changed().items()
        if name not in FREE - {"data", "epochs"}
    }
    settings |= {
        "model": run.plan.model,
        "optimizer": run.plan.optimizer,
        "lr": run.plan.learning_rate,
        "batch_size": run.plan.batch_size,
        "seed": run.config.seed,
    }
    memory, memory_reason = memory_of(run.trainer.message.device)
    transport = run.trainer.reduce.transport
    return {
        "name": run.folder.name,
        "folder": str(run.folder),
        "model": run.plan.model,
        "parameters": sum(p.numel() for p in run.trainer.model.parameters()),
        "ranks": run.comm.size,
        "hosts": list(run.host.hosts),
        "host_ranks": run.host.ranks,  # on the host with the fewest cores per rank
        "host_cores": run.host.cores,
        "shards": run.plan.shards,
        "device": run.facts.device,
        "transport": transport.name,
        "transport_reason": transport.reason,
        "init": dataclasses.asdict(run.init) if run.init else None,
        "memory": memory,
        "memory_reason": memory_reason,
        "overlap": run.config.overlap,
        "threads": run.facts.threads,
        "precision": run.plan.precision,
        "comm_dtype": run.config.comm_dtype,
        "staged": bool(run.config.stage),
        "deterministic": run.config.deterministic,
        "batch_size": run.plan.batch_size,
        "rank_shares": describe_shares(run.plan, run.shards),
        "epochs": run.plan.epochs,
        "steps_per_epoch": run.plan.steps_per_epoch,
        "learning_rate": run.plan.learning_rate,
        "rows": {name: split.samples for name, split in run.pack.splits.items()},
        "settings": settings,
        "figures": ranking_figures(run),
        "pack": run.pack.path,
        "pack_uuid": run.pack.uuid,
        "plan": run.plan.digest(),
        "key": run.key,
        "mpi": library(),
        "torch": torch.__version__,
        "hpctrain": __version__,
    }
