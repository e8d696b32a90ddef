"""Resume a run: find its earlier launch, keep its settings, restore its state.

A run is resumed by the same command, if its settings allow it. Its plan is read from the folder and
never resolved again, so partitions, batches and random numbers are those of its first launch. Only
the number of ranks, the shards that each carries, and the settings in `plan.FREE` may differ.
"""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path
from typing import Any, NamedTuple

from hpctrain.config import Config, from_table
from hpctrain.config.functions import own_functions
from hpctrain.config.option import as_given, flag_of
from hpctrain.errors import UsageError
from hpctrain.outcome import Outcome, Status
from hpctrain.parallel.mpi import agreed, on_root
from hpctrain.plan import FREE, Plan, check_version
from hpctrain.report.find import CHECKPOINTS, SETTINGS_FILE
from hpctrain.report.history import History
from hpctrain.report.settings import UnreadableFile, read_plan_of, read_settings
from hpctrain.text import counted, ranges
from hpctrain.training.checkpoint import Checkpoint, find_best, has_best, newest
from hpctrain.training.control import RunLock
from hpctrain.training.optimizer import learning_rate
from hpctrain.training.state import START, Progress, Run, read_on_all


class PreviousLaunch(NamedTuple):
    """The state in which an earlier launch left this run."""

    folder: Path
    config: Config  # the settings to go on with
    plan: Plan
    finished: bool  # all epochs are done, or validation ended the run
    idle: bool  # it was preempted before its first step
    checkpoint: Checkpoint | None  # the newest intact one; None: the run starts over
    problems: list[str]  # describe newer checkpoints, which are skipped, and faults of the record
    crash: Outcome | None  # how the last launch ended, if it could not record it


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
    check_version(plan)
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
    steps = range(1, checkpoint.step + 1) if checkpoint else ()
    if missing := set(steps).difference(history.steps.get("step", ())):
        problems.append(f"the record has lost steps that were done: {ranges(sorted(missing))}")
    elif checkpoint and (
        checkpoint.state["epoch"] > history.completed
        or checkpoint.state["validated"] > history.evaluated.get("validation", {}).get("step", 0)
    ):
        problems.append("the record has lost the last epoch or validation that was done")
    outcome = history.outcome(over=True)
    recorded = history.launch.outcome
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
    settings: dict[str, Any] = {}
    for field in dataclasses.fields(Config):
        name = field.name
        if name in FREE:
            continue
        new = getattr(config, name)
        old = getattr(before, name)
        settings[name] = old
        is_named_by_file = new != old and bool(own_functions({name: old}))
        of_init = config.init and name in ("model", "small_stem") and new == field.default
        if of_init and not is_named_by_file:
            continue  # those of the network of --init
        if name == "precision":
            old = plan.precision  # as resolved
        is_chosen = new != field.default or name in plan.chosen or is_named_by_file
        if new != old and is_chosen:
            flag = flag_of(name)
            was, now = (
                f"without {flag}" if v in (None, ()) else f"with {as_given(flag, v)}"
                for v in (old, new)
            )
            raise UsageError(
                f"the run {folder} was begun {was}, not {now}: give the same settings to continue"
                " it, or another name with --run"
            )
    return dataclasses.replace(config, **settings)


def restore(run: Run, earlier: PreviousLaunch) -> list[str]:
    """Restore the state that an earlier launch saved, which rank 0 reads. Collective.

    Returns notes for the record.
    """
    trainer = run.trainer
    checkpoint = earlier.checkpoint
    if checkpoint is None:
        return [*earlier.problems, "no checkpoint was left: from the first step"]
    layout = trainer.message.layout.digest()
    saved = checkpoint.state
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
    state = Progress.from_json(saved)
    run.progress = state
    if run.plan.epochs > saved["epochs"]:
        if state.ended:  # by --patience, which the extension counts anew
            state.waited = 0
        state.ended = ""
        state.reason = None
    notes = [*earlier.problems, f"going on after step {state.step}"]
    notes += filter(None, [stretched(run, saved["epochs"])])
    key = run.key
    if saved["key"] != key:
        note = f"begun on {saved['key']}, now on {key}"
        notes.append(f"{note}: the bits may differ" if run.config.deterministic else note)
    best = find_best(earlier.folder, state.best.step)
    if state.best.step and not on_root(run.comm, has_best, best, checkpoint.best):
        notes.append(f"{best} is gone: the best of what follows is kept")
        state.best = START
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
