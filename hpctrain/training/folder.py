"""The folder of a run: its name, its configuration and plan, the facts that open its record."""

from __future__ import annotations

import dataclasses
import errno
import os
import shutil
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path

import torch

from hpctrain import __version__, heartbeats
from hpctrain.config import Config, to_toml
from hpctrain.errors import RunError, UsageError
from hpctrain.files import left_behind, sync, temporary_name, write_whole
from hpctrain.parallel.backend_flags import hardware_key
from hpctrain.parallel.memory import memory_of
from hpctrain.parallel.mpi import Comm, allgather, host_name, library
from hpctrain.report.find import evaluation_file
from hpctrain.report.record import FILE_NAME, truncate_record
from hpctrain.report.recorder import RecordFile
from hpctrain.training.checkpoint import make_ready
from hpctrain.training.control import RunLock
from hpctrain.training.progress import Progress
from hpctrain.training.resume import FREE, Earlier
from hpctrain.training.setup import Job


def make_run_folder(job: Job, lock: RunLock) -> Path:
    """Create the run's folder with its configuration and plan, locked, whole or not at all. A name
    is used once.
    """
    runs = Path(job.config.runs_dir)
    for name in [job.config.run] if job.config.run else names(job):
        folder = runs / name
        temporary = temporary_name(folder)
        try:
            with suppress(FileExistsError):  # if as a file, the next call says so
                runs.mkdir(parents=True)
            for left in left_behind(folder):
                shutil.rmtree(left, ignore_errors=True)
            temporary.mkdir()
            write_settings(job, temporary)
            make_ready(temporary, 0)
            lock.take(temporary)  # another launch must not come between
            os.rename(temporary, folder)
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


def write_settings(job: Job, folder: Path) -> None:
    """Write the configuration and the plan. OSError."""
    for name, text in (("config.toml", to_toml(job.config)), ("plan.json", job.plan.to_json())):
        write_whole(folder / name, text.rstrip() + "\n")


def open_run_folder(job: Job, earlier: Earlier, state: Progress) -> Path:
    """Make an earlier launch's folder ready to go on after the steps that `state` has done; a crash
    becomes the end of its record.
    """
    folder = earlier.folder
    try:
        truncate_record(folder, state.step, state.epoch, state.validated)
        if earlier.crash:
            record = RecordFile(folder / FILE_NAME)
            record.write({"kind": "end", **earlier.crash._asdict()})
            record.close()
        write_settings(job, folder)
        heartbeats.remove_all(folder / heartbeats.FOLDER)  # there may be fewer ranks now
        for file in folder.glob(evaluation_file(folder, "*").name):  # of a network that goes on
            file.unlink()
        make_ready(folder, state.step)
    except OSError as error:
        where = error.filename or folder
        raise RunError(f"cannot write {where}: {error.strerror}") from error
    return folder


def names(job: Job) -> Iterator[str]:
    """Time and model, then with numbers, for runs that began in the same second."""
    model = Path(job.plan.model).name.replace(":", ".")
    base = f"{time.strftime('%Y%m%d-%H%M%S')}-{model}"
    yield base
    yield from (f"{base}-{number}" for number in range(2, 1000))


def run_facts(job: Job, folder: Path, comm: Comm) -> dict[str, object]:
    """The first line of the record. Collective."""
    places = allgather(comm, (host_name(), sorted(os.sched_getaffinity(0))))
    host_ranks, host_cores = most_crowded(places)
    memory = memory_of(job.trainer.message.device)
    return {
        "name": folder.name,
        "folder": str(folder),
        "model": job.plan.model,
        "parameters": sum(p.numel() for p in job.trainer.model.parameters()),
        "ranks": comm.size,
        "hosts": sorted({host for host, _ in places}),
        "host_ranks": host_ranks,
        "host_cores": host_cores,
        "shards": job.plan.shards,
        "device": job.plan.device,
        "transport": job.transport.name,
        "transport_reason": job.transport.reason,
        "memory": memory.name,
        "memory_reason": memory.reason,
        "overlap": "auto" if job.config.overlap == "auto" else job.trainer.segments,
        "threads": job.plan.threads,
        "precision": job.plan.precision,
        "wire": job.plan.wire,
        "staged": bool(job.config.stage),
        "deterministic": job.plan.deterministic,
        "batch_size": job.plan.batch_size,
        "rank_shares": job.plan.rank_shares(),
        "epochs": job.plan.epochs,
        "steps_per_epoch": job.plan.steps_per_epoch,
        "learning_rate": job.plan.learning_rate,
        "rows": {name: split.rows for name, split in job.pack.splits.items()},
        "settings": chosen(job),
        "pack": job.pack.path,
        "pack_uuid": job.pack.uuid,
        "plan": job.plan.digest(),
        "key": hardware_key(job.trainer.message.device),
        "fresh": list(job.kept_fresh),
        "mpi": library(),
        "torch": torch.__version__,
        "hpctrain": __version__,
    }


def most_crowded(places: Sequence[tuple[str, list[int]]]) -> tuple[int, int]:
    """Of hosts and cores that ranks may use, by rank: how many ranks and cores the host has that
    has the fewest cores for each rank.
    """
    masks: dict[str, list[list[int]]] = {}
    for host, cores in places:
        masks.setdefault(host, []).append(cores)
    counts = [(len(found), len(set().union(*found))) for found in masks.values()]
    return max(counts, key=lambda count: count[0] / count[1], default=(0, 0))


def chosen(job: Job) -> dict[str, object]:
    """The hyper-parameters: those that always count, and all settings that change what is computed
    and are not at their defaults.
    """
    plan, default = job.plan, Config()
    always = {
        "model": plan.model,
        "optimizer": plan.optimizer,
        "lr": plan.learning_rate,
        "batch_size": plan.batch_size,
        "seed": plan.seed,
    }
    given = {
        name: value
        for name, value in dataclasses.asdict(job.config).items()
        if value != getattr(default, name) and (name not in FREE or name in ("data", "epochs"))
    }
    return {**given, **always}
