"""A training run from launch to end: begin or resume, train, stop, or end when preempted.

mpirun -n 4 python -m hpctrain --data flowers.h5 --run first
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from hpctrain.cluster import LEFT
from hpctrain.config import Config
from hpctrain.config.functions import tracebacks_in
from hpctrain.errors import Failure, RunError
from hpctrain.heartbeat import HEARTBEATS
from hpctrain.models import read_model
from hpctrain.numerics import torch_flags
from hpctrain.outcome import Status
from hpctrain.parallel.mpi import Comm, agreed, allgather, on_all, on_root
from hpctrain.plan import check_unchanged, describe_plan
from hpctrain.report.find import NETWORK_FILE
from hpctrain.report.sinks import open_recorder
from hpctrain.text import counted, say
from hpctrain.torch_errors import explain_errors
from hpctrain.training.checkpoint import Writer
from hpctrain.training.control import Control, OnEvaluation, RunLock, find_deadline
from hpctrain.training.data import open_pack, require_validation
from hpctrain.training.folder import make_run_folder, open_run_folder, run_facts
from hpctrain.training.loop import save_checkpoint, train_epochs
from hpctrain.training.network import use_network_of_init
from hpctrain.training.resume import PreviousLaunch, find_previous_launch, restore
from hpctrain.training.setup import set_up
from hpctrain.training.state import CannotContinue, NonFinite, Run, Undefined
from hpctrain.training.validate import choose_network, save_network, test_network, validate
from hpctrain.watchdog import current, doing, started, waiting

SLOW_DISK = 100e6  # bytes/s, assumed until the first checkpoint is timed


@dataclass(frozen=True)
class TrainingResult:
    """How a launch of a run ended, the same on all ranks.

    `status` is "done", "stopped" (on request), "preempted" (the same call resumes the run) or
    "planned" (``dry_run``). `exit_code` is that of the command line: 0, or 75 if preempted.
    """

    folder: Path | None  # the run's folder; None with --dry-run
    status: str
    exit_code: int = 0
    step: int = 0  # steps and epochs after which the network was saved
    epoch: int = 0
    figures: dict[str, float | None] = field(default_factory=dict)  # loss, test_accuracy, ...


def main(config: Config, comm: Comm) -> int:
    """``hpctrain train``: train a run and return the exit code. Collective."""
    return run_training(config, comm).exit_code


def run_training(
    config: Config, comm: Comm, on_evaluation: OnEvaluation | None = None
) -> TrainingResult:
    """Train a run, from where its last launch ended, if any. Collective.

    Rank 0 calls `on_evaluation` with the record of each validation; a true result stops the run
    after its next step. If training cannot continue, its state is saved, unless it is final, and
    the reason is recorded. torch's settings are restored. Raises UsageError or RunError, the same
    on all ranks unless a single rank fails.
    """
    config = on_root(comm, lambda: config)
    on_root(comm, config.check_conflicts)
    lock = RunLock()
    deadline, note = on_root(comm, find_deadline, config)
    with ExitStack() as stack:
        stack.callback(lock.release)
        stack.enter_context(explain_errors(RunError))
        started("setting up")
        earlier = on_root(comm, find_previous_launch, config, lock)
        if earlier and earlier.finished and earlier.plan.epochs >= (config.epochs or 0):
            return on_root(comm, say_finished, earlier)
        config = earlier.config if earlier else on_root(comm, use_network_of_init, config)
        precision = earlier.plan.precision if earlier else config.precision
        stack.enter_context(torch_flags(precision, config.deterministic))
        run = stack.enter_context(closing(set_up(config, comm, earlier)))
        run.notes += filter(None, [note])
        if config.dry_run:
            on_root(comm, say_plan, run)
            return TrainingResult(None, Status.PLANNED)
        on_root(comm, require_validation, "on_evaluation", on_evaluation is not None, run.pack)
        if earlier:
            run.notes[:0] = restore(run, earlier)
            run.folder = on_root(comm, open_run_folder, run, earlier)
        else:
            run.folder = on_root(comm, make_run_folder, run, lock)
        folder_of_root = run.folder if comm.rank == 0 else None
        first = run.progress.step
        best = earlier.checkpoint.best if earlier and earlier.checkpoint else ""
        with on_all(comm):
            if watchdog := current():
                watchdog.keep_in(run.folder / HEARTBEATS)
        file = f"traceback-{comm.rank}.txt"  # one per rank: code of the user's own may fail on one
        stack.enter_context(tracebacks_in(run.folder / file))
        stack.enter_context(together(comm))
        record = open_recorder(folder_of_root, config.progress, config.tensorboard, first)
        run.recorder = stack.enter_context(record)
        run.control = stack.enter_context(Control(folder_of_root, deadline, on_evaluation))
        writer = Writer(folder_of_root, config.checkpoint_every, config.keep_checkpoints, best)
        run.writer = stack.enter_context(writer)
        describe_run(run)
        try:
            train_epochs(run)
            return finish(run, first, earlier is not None and earlier.idle)
        except CannotContinue as error:
            raise give_up(run, error) from error


def say_plan(run: Run) -> None:
    """Print the plan of --dry-run (rank 0)."""
    of_targets = run.task.describe_measured(run.plan.measured)
    lines = describe_plan(run.config, run.facts, run.plan, run.shards, of_targets)
    say("\n".join([*lines, *(f"note           {note}" for note in run.notes)]))


def say_finished(earlier: PreviousLaunch) -> TrainingResult:
    """Print that nothing is left to do, and return how the run has ended (rank 0).

    Raises UsageError if its data has changed, or its network is missing or corrupt.
    """
    pack, _ = open_pack(earlier.config, earlier)
    check_unchanged("pack", earlier.plan.pack_uuid, pack.uuid)
    _, metadata = read_model(earlier.folder / NETWORK_FILE)
    epochs = counted(earlier.plan.epochs, "epoch")
    say(f"The run {earlier.folder} is finished, {epochs}: a larger --epochs extends it")
    return TrainingResult(
        earlier.folder,
        Status.DONE,
        step=metadata.get("step", 0),
        epoch=metadata.get("epoch", 0),
        figures=metadata.get("figures", {}),
    )


def describe_run(run: Run) -> None:
    """Record what is known before the first step of a launch."""
    facts = run_facts(run)
    run.recorder.write("run", **facts)
    for note in run.notes:
        run.recorder.note(note)
    tensors = run.trainer.state().values()
    run.control.saving = sum(tensor.nbytes for tensor in tensors) / SLOW_DISK


@contextmanager
def together(comm: Comm) -> Iterator[None]:
    """Wait for all ranks at the end, unless one fails alone: rank 0 may be writing. Collective."""
    try:
        yield
    finally:
        error = sys.exc_info()[1]
        if error is None or getattr(error, "agreed", False):
            doing("ending")
            with waiting():
                comm.Barrier()


def give_up(run: Run, error: CannotContinue) -> Failure:
    """Save the state of a run that cannot continue; return the error, with why not. Collective."""
    text = str(error)
    if not run.progress.final:
        doing("saving")
        try:
            with on_all(run.comm):
                save_checkpoint(run)
                if run.comm.rank == 0:
                    save_network(run)
                run.writer.wait()
        except RunError as second:
            text = f"{error}; not saved: {second}"
    run.recorder.end(Status.FAILED, text, repeats=isinstance(error, NonFinite | Undefined))
    return agreed(type(error)(text))


def finish(run: Run, first: int, again: bool) -> TrainingResult:
    """Finish a launch that began after step `first`, and return how it ended. Collective.

    Saves a checkpoint, validates, chooses the final network, saves and tests it, and closes the
    record. A launch that was preempted before its first step has lost nothing, and exits with 75
    like any other, unless that happened in the launch before too (`again`): then with 1.
    """
    state = run.progress
    comm = run.comm
    save_checkpoint(run)
    on_root(comm, run.writer.wait)
    validates = "validation" in run.pack.splits and state.validated < state.step
    if validates and state.ended not in (Status.STOPPED, Status.PREEMPTED):
        validate(run)
        on_root(comm, run.writer.wait)
    tests: dict[str, float | None] = {}
    if state.ended != Status.PREEMPTED:
        choose_network(run)
        on_root(comm, save_network, run)  # before anything else can fail
        tests = test_network(run) if run.config.test else {}
    if state.ended == Status.PREEMPTED:
        signals = filter(None, allgather(comm, run.control.preempted_by()))
        why = f"{next(signals, 'a signal')}; saved"
        if state.step == first:
            why += ", before the first step of this launch: nothing is lost"
        run.recorder.end(Status.PREEMPTED, why, steps=state.step)
        code = 1 if again and state.step == first else LEFT
        return TrainingResult(run.folder, Status.PREEMPTED, code, *state.network)
    on_root(comm, save_network, run)
    status = state.ended or Status.DONE
    run.recorder.end(
        status,
        state.reason,
        steps=state.step,
        digest=run.trainer.digest(state.chain) if comm.rank == 0 else None,
        checkpoint_stall=run.writer.stall,
        **tests,
    )
    run.control.ended()
    return TrainingResult(run.folder, status, 0, *state.network)
