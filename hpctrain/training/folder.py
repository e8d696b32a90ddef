"""The folder of a run: name, configuration and plan, the first line of its record, and resuming.

A run is resumed by the same command, if its settings allow it. Its plan is read from the folder and
never resolved again, so partitions, batches and random numbers are those of its first launch. Only
the number of ranks, the shards that each carries, and the settings in `plan.FREE` may differ.
"""

from __future__ import annotations

import dataclasses
import errno
import math
import os
import shutil
import time
from pathlib import Path
from typing import Any, NamedTuple

import torch

from hpctrain import __version__
from hpctrain.config import Config, from_table, to_toml
from hpctrain.config.functions import is_own
from hpctrain.config.option import flag_of
from hpctrain.errors import RunError, UsageError
from hpctrain.fault import fault
from hpctrain.files import remove_left_behind, sync, temporary_name, write_whole, writing
from hpctrain.heartbeat import HEARTBEATS
from hpctrain.outcome import Outcome, Status
from hpctrain.parallel.device import hardware_key, memory_of
from hpctrain.parallel.mpi import agreed, library, on_root
from hpctrain.plan import FREE, Plan, describe_shares
from hpctrain.report.find import CHECKPOINTS, SETTINGS_FILE, evaluation_file
from hpctrain.report.history import History
from hpctrain.report.record import Recorder, truncate_record
from hpctrain.report.settings import PLAN_FILE, UnreadableFile, read_plan_of, read_settings
from hpctrain.text import counted, ranges
from hpctrain.training.checkpoint import Checkpoint, find_best, has_best, make_ready, newest
from hpctrain.training.control import RunLock
from hpctrain.training.optimizer import learning_rate
from hpctrain.training.run import NOTHING, Progress, Run, read_on_all


class PreviousLaunch(NamedTuple):
    """The state in which an earlier launch left this run."""

    folder: Path
    config: Config  # the settings to go on with
    plan: Plan
    finished: bool  # all epochs are done, or validation ended the run
    idle: bool  # it was preempted before its first step
    checkpoint: Checkpoint | None  # the newest intact one; None: the run starts over
    problems: list[str]  # with newer checkpoints, which are skipped, and with the record
    crash: Outcome | None  # of the last launch, which could not record it


def make_run_folder(run: Run, lock: RunLock) -> Path:
    """Create the run's folder with its configuration and plan, and lock it.

    Without --run, its name is time and model, with a number for runs begun in the same second. The
    folder is created atomically; an existing one is never reused.
    """
    runs, model = Path(run.config.runs_dir), Path(run.plan.model).name.replace(":", ".")
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
    """Write the configuration and the plan. Raises OSError."""
    texts = {
        SETTINGS_FILE: to_toml(run.config.table()),
        PLAN_FILE: run.plan.to_json(),
    }
    for name, text in texts.items():
        write_whole(folder / name, text.rstrip() + "\n")


def restore(run: Run, earlier: PreviousLaunch) -> list[str]:
    """Restore the state that an earlier launch saved, which rank 0 reads. Collective.

    Returns notes for the record.
    """
    trainer, checkpoint = run.trainer, earlier.checkpoint
    if checkpoint is None:
        return [*earlier.problems, "no checkpoint was left: from the first step"]
    layout, saved = trainer.message.layout.digest(), checkpoint.state
    try:
        if saved["layout"] != layout:
            raise ValueError(
                f"its parameters are laid out as {saved['layout']}, the model's as {layout}: it is"
                " another model"
            )
        trainer.load(read_on_all(run.comm, checkpoint.tensors))
    except ValueError as error:
        text = f"checkpoint {checkpoint.path} cannot be resumed from: {error}"
        raise agreed(UsageError(text)) from error
    run.progress = state = Progress.from_json(saved)
    if run.plan.epochs > saved["epochs"]:
        if state.ended:  # by --patience, of which the extension has all again
            state.waited = 0
        state.ended = ""
        state.reason = None
    notes = [*earlier.problems, f"going on after step {state.step}"]
    notes += filter(None, [stretched(run, saved["epochs"])])
    here = hardware_key(trainer.message.device)
    if saved["key"] != here:
        note = f"begun on {saved['key']}, now on {here}"
        notes.append(f"{note}: the bits may differ" if run.config.deterministic else note)
    best = find_best(earlier.folder, state.best.step)
    if state.best.step and not on_root(run.comm, has_best, best, checkpoint.best):
        notes.append(f"{best} is gone: the best of what follows is kept")
        state.best = NOTHING
    return notes


def stretched(run: Run, epochs: int) -> str:
    """Return a note if the learning rate is another one than with `epochs`; "" if it is not."""
    config = run.config
    plan = run.plan
    step = run.progress.step
    if not step:
        return ""
    last = learning_rate(config, dataclasses.replace(plan, epochs=epochs), step - 1)
    if math.isclose(last, learning_rate(config, plan, step - 1), rel_tol=1e-3):
        return ""
    following = learning_rate(config, plan, step)
    return (
        f"the {config.schedule} schedule is stretched from {epochs} to {plan.epochs} epochs: the"
        f" learning rate goes from {last:.3g} to {following:.3g}; to train on at a low rate, begin"
        f" another run with --init {config.run} --schedule constant --lr RATE"
    )


def open_run_folder(run: Run, earlier: PreviousLaunch) -> Path:
    """Prepare the folder of an earlier launch to resume after the step that was restored.

    If that launch crashed, the crash is recorded as its end.
    """
    folder, state = earlier.folder, run.progress
    try:
        truncate_record(folder, state.step, state.epoch, state.validated)
        if earlier.crash:
            with Recorder(folder) as recorder:
                recorder.write("end", **earlier.crash._asdict())
        write_settings(run, folder)
        (folder / HEARTBEATS).mkdir(exist_ok=True)  # a copy may lack it: it is empty after a run
        for left in (folder / HEARTBEATS).iterdir():  # there may be fewer ranks now
            left.unlink(missing_ok=True)
        for file in folder.glob(evaluation_file(folder, "*").name):  # training resumes
            file.unlink()
        make_ready(folder, state.step, state.best.step)
    except OSError as error:
        where = error.filename or folder
        raise RunError(f"cannot write {where}: {error.strerror}") from error
    return folder


def run_facts(run: Run) -> dict[str, object]:
    """Return the first line of the record.

    Its settings are a fixed set, and all that affect the results and are not at their defaults.
    """
    given = {
        name: value
        for name, value in run.config.changed().items()
        if name not in FREE - {"data", "epochs"}
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
        "host_ranks": run.host.ranks,  # of the host with the fewest cores per rank
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
        "settings": given
        | {
            "model": run.plan.model,
            "optimizer": run.plan.optimizer,
            "lr": run.plan.learning_rate,
            "batch_size": run.plan.batch_size,
            "seed": run.config.seed,
        },
        "pack": run.pack.path,
        "pack_uuid": run.pack.uuid,
        "plan": run.plan.digest(),
        "key": hardware_key(run.trainer.message.device),
        "mpi": library(),
        "torch": torch.__version__,
        "hpctrain": __version__,
    }


def find_previous_launch(config: Config, lock: RunLock) -> PreviousLaunch | None:
    """Return the earlier launch of the run of this name, if any, and lock its folder (rank 0).

    Raises UsageError if --resume forbids it, its settings differ, or another job works in it.
    """
    folder = Path(config.runs_dir) / (config.run or "")
    if config.run is None or not folder.exists():
        if config.resume == "must":
            raise UsageError(f"--resume must, but there is no run {folder}")
        return None
    if config.resume == "never":
        raise UsageError(f"the run {folder} exists: choose another name with --run")
    before, plan = read_begun(folder)
    config = keep_settings(config, before, plan, folder)
    if not lock.take(folder):
        raise UsageError(
            f"another job works in {folder}: wait for it to end, or choose another --run"
        )
    history = History(folder)
    history.follow()
    finished = history.launch.outcome.status == Status.DONE
    if config.epochs and config.epochs < plan.epochs and not finished:
        raise UsageError(
            f"the run {folder} was begun with {counted(plan.epochs, 'epoch')}, which --epochs"
            f" {config.epochs} cannot take back: ask it to stop, or choose another name with --run"
        )
    checkpoint, problems = newest(folder)
    if checkpoint is None and config.resume == "must":
        raise UsageError(f"--resume must, but {folder / CHECKPOINTS} holds no whole checkpoint")
    if history.problem:
        problems.insert(0, f"{history.problem}: the record is cut off there")
    done = range(1, checkpoint.step + 1) if checkpoint else ()
    if missing := set(done).difference(history.steps.get("step", ())):
        problems.append(f"the record has lost steps that were done: {ranges(sorted(missing))}")
    elif checkpoint and (
        checkpoint.state["epoch"] > history.completed
        or checkpoint.state["validated"] > history.evaluated.get("validation", {}).get("step", 0)
    ):
        problems.append("the record has lost the last epoch or validation that was done")
    outcome, recorded = history.outcome(over=True), history.launch.outcome
    unrecorded = outcome.status and history.facts and not recorded.status
    crash = outcome if unrecorded and not history.problem else None
    if crash:
        problems.insert(0, f"the launch before did not record its end: {crash.reason}")
    idle = recorded.status == Status.PREEMPTED and not history.launch.first_step
    return PreviousLaunch(folder, config, plan, finished, idle, checkpoint, problems, crash)


def read_begun(folder: Path) -> tuple[Config, Plan]:
    """Read the configuration and the plan with which a run was begun.

    Raises UsageError if one is missing or corrupt.
    """
    name = SETTINGS_FILE
    cause: Exception
    try:
        config = from_table(read_settings(folder), Config())
        return config, read_plan_of(folder)
    except UnreadableFile as error:
        name = error.path.name
        cause = error.cause
    except (UsageError, ValueError, RecursionError) as error:  # a setting that is refused
        cause = error
    if isinstance(cause, FileNotFoundError):
        raise UsageError(
            f"{folder} exists but is no run to continue, it has no {name}: choose another name with"
            f" --run. If {name} was removed, the same command on as many ranks writes it anew in"
            " the folder of that name: copy it back"
        ) from cause
    raise UsageError(
        f"{folder} cannot be continued, its {name} is corrupt ({cause}): choose another name with"
        " --run"
    ) from cause


def keep_settings(config: Config, before: Config, plan: Plan, folder: Path) -> Config:
    """Return the settings with which a run goes on: `before` those of its first launch, but `FREE`.

    Raises UsageError with the first other setting that differs, unless both are defaults: a default
    that has changed since stays as it was. A function of the user's own is always given again: no
    file of the run can make this launch import it.
    """
    kept: dict[str, Any] = {}
    for field in dataclasses.fields(Config):
        name, new = field.name, getattr(config, field.name)
        if name in FREE:
            continue
        kept[name] = getattr(before, name)
        is_named_by_file = new != kept[name] and is_own(name, kept[name])
        of_init = config.init and name in ("model", "small_stem") and new == field.default
        if of_init and not is_named_by_file:
            continue  # those of the network of --init
        old = plan.precision if name == "precision" else kept[name]  # as resolved
        is_chosen = new != field.default or name in plan.chosen or is_named_by_file
        if new != old and is_chosen:
            flag = flag_of(name)
            was, now = (
                f"with {flag} {v}" if v is not None else f"without {flag}" for v in (old, new)
            )
            raise UsageError(
                f"the run {folder} was begun {was}, not {now}: give the same settings to continue"
                " it, or another name with --run"
            )
    return dataclasses.replace(config, **kept)
