"""Runs and trained networks in Python, by `import hpctrain as hp`; docs/python.md has examples.

`train` and `evaluate` use all ranks that a launcher started, or one. `load`
(``inference/trained.py``) and `history` work in a single process without MPI.
"""

from __future__ import annotations

import dataclasses
import os
import socket
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, TypeVar

from hpctrain.cluster import (
    launched_rank,
    launched_size,
    launcher_name,
    require_mpi_launcher,
    signals_caught,
)
from hpctrain.config import Config, EvaluateConfig, from_table
from hpctrain.errors import UsageError
from hpctrain.report.find import SWEEP_FILE, find_folder
from hpctrain.report.history import History
from hpctrain.text import brief
from hpctrain.watchdog import CALLBACK, Watchdog, current, doing

if TYPE_CHECKING:
    from hpctrain.inference.evaluate import Evaluation
    from hpctrain.parallel.mpi import Comm
    from hpctrain.training.control import OnEvaluation
    from hpctrain.training.session import TrainingResult

AnyConfig = TypeVar("AnyConfig", Config, EvaluateConfig)


def train(
    config: Config | None = None, *, on_evaluation: OnEvaluation | None = None, **settings: Any
) -> TrainingResult:
    """Train a run, or resume it, as ``python -m hpctrain`` does. Collective.

    The settings are those of the command line with underscores, such as ``batch_size=64``; they
    take precedence over those of `config`. ``python -m hpctrain train --help`` describes them. A
    list stands for "0.2,1", a function for "module:function". All ranks of an MPI launch must make
    the call, with the same settings, or all raise UsageError. A process without a launcher, such as
    a notebook, trains on one rank.

    Rank 0 calls ``on_evaluation(record)`` after each validation with its record, a dict as in the
    run's progress.jsonl. If the result is true, the run stops after its next step, saved, with
    status "stopped". An exception in the function ends the run on all ranks.

    Returns the run's folder, how it ended, its figures and the exit code of the command line.
    Raises UsageError for a mistake, RunError if the run fails. Ctrl-C or "interrupt the kernel"
    stops the run after its next step, saved; a second one raises KeyboardInterrupt at once.
    SIGTERM, SIGUSR1 and SIGUSR2 preempt it (status "preempted"). Signal handlers, torch's settings,
    threads and random generators are then as before the call.
    """
    base = Config() if config is None else config
    with _all_ranks("train", base, settings) as (chosen, comm):
        from hpctrain.parallel.mpi import check_on_root
        from hpctrain.training.session import run_training

        check_on_root(comm, "on_evaluation", on_evaluation)
        return run_training(chosen, comm, on_evaluation)


def evaluate(
    run: str | os.PathLike[str], *, trust_code: bool = False, **settings: Any
) -> Evaluation:
    """Evaluate a trained network on a split, as ``python -m hpctrain evaluate`` does. Collective.

    `run` is the name or the folder of a run, or a .safetensors file. The settings are those of the
    command line, such as ``split="validation"``, ``data="other.h5"`` or ``mistakes=32``. With
    `trust_code`, the functions of your own that the run's files name are imported: its network,
    loss and metric. All ranks of an MPI launch must make the call, with the same settings.

    Returns loss, accuracy, confusion matrix and so on, on all ranks; no tables are printed. Raises
    UsageError and RunError.
    """
    base = EvaluateConfig(run=os.fspath(run), trust_code=trust_code)
    with _all_ranks("evaluate", base, settings) as (chosen, comm):
        from hpctrain.inference.evaluate import evaluate_saved

        return evaluate_saved(chosen, comm)


def _change(base: AnyConfig, settings: dict[str, Any], name: str) -> AnyConfig:
    """Return `base` with other settings, checked; None leaves one as it is. Raises UsageError."""
    if not dataclasses.is_dataclass(base):
        advice = "name settings, such as data='a.h5'"
        raise UsageError(f"{brief(base)} is no hpctrain.Config: {advice}")
    names = {field.name for field in dataclasses.fields(base)}
    table = {key: v for key, v in settings.items() if v is not None or key not in names}
    config = from_table(table, base, f"hpctrain.{name}")
    config.check_conflicts()
    return config


@contextmanager
def _all_ranks(
    name: str, base: AnyConfig, settings: dict[str, Any]
) -> Iterator[tuple[AnyConfig, Comm]]:
    """Yield the settings for hpctrain.`name` and a communicator of all ranks, with signals caught.

    Collective. Raises UsageError on all ranks if settings are wrong or differ between ranks. A
    watchdog ends the ranks that make the call if others do not. An error that not all of several
    ranks have aborts all, as on the command line; others are raised.
    """
    require_mpi_launcher()
    outer = current()
    if outer and outer.size > 1 and outer.activity == CALLBACK:
        text = "all ranks must call it, and on_evaluation is called on rank 0 alone"
        raise UsageError(f"hpctrain.{name} in on_evaluation: {text}")
    config = base
    failure = None
    try:
        config = _change(base, settings, name)
    except UsageError as error:
        if launcher_name() == "none":
            raise
        failure = error  # all ranks agree on it
    import torch

    threads = torch.get_num_threads()
    watchdog = Watchdog(
        launched_rank(),
        launched_size() or 1,
        socket.gethostname(),
        getattr(config, "hang_timeout", Config.hang_timeout),
    )
    with signals_caught(), warnings.catch_warnings(), watchdog:
        doing(f"hpctrain.{name}")
        from hpctrain.parallel.mpi import MPI, check_call, conclude, on_all, start_mpi

        watchdog.abort = MPI.COMM_WORLD.Abort
        comm = start_mpi()
        watchdog.set_rank(comm.rank, comm.size)  # not all launchers tell it
        try:
            doing("starting")
            with on_all(comm):
                if failure is not None:
                    raise failure
            check_call(comm, f"hpctrain.{name}", vars(config))
            yield config, comm
        except BaseException as error:
            if comm.size > 1 and not getattr(error, "agreed", False):
                conclude(error)
            raise
        finally:
            torch.set_num_threads(threads)
            comm.Free()


def history(run: str | os.PathLike[str], runs_dir: str | os.PathLike[str] = "runs") -> History:
    """Read the record of a run, also while it trains. `run` is its name or its folder.

    Raises UsageError if there is no such run, or if its record is corrupt.
    """
    folder = find_folder(os.fspath(run), os.fspath(runs_dir))
    if (folder / SWEEP_FILE).is_file():
        raise UsageError(f"{folder} is a sweep: name one of its runs")
    return History.read(folder)
