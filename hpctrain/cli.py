"""The command line: parse ``python -m hpctrain [SUBCOMMAND] ...`` and run the subcommand.

``config/option.py`` parses the settings; nothing heavy (torch, MPI, HDF5) is imported before they
have been accepted. A subcommand that runs on all ranks is started under a watchdog.
"""

from __future__ import annotations

import gc
import importlib
import inspect
import os
import socket
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType, ModuleType
from typing import Any, NamedTuple

from hpctrain import __version__, config
from hpctrain.cluster import (
    foreign_launcher,
    launched_rank,
    launched_size,
    launcher_name,
    require_mpi_launcher,
    under_mpirun,
)
from hpctrain.errors import Failure, UsageError, did_you_mean
from hpctrain.fault import fault
from hpctrain.text import counted, say
from hpctrain.watchdog import Watchdog

# How a subcommand uses the processes that a launcher started.
RANKS = "all are ranks"
ALONE = "refused: several would do the same thing several times"
LAUNCHER = "refused: it starts ranks with a launcher itself, and launchers do not nest"
ANY = "each decides for itself"


class Command(NamedTuple):
    """One subcommand: its processes, the module whose `main` runs it, its settings, a summary."""

    processes: str
    module: str
    settings: type
    summary: str


COMMANDS = {
    "train": Command(RANKS, "training.session", config.Config, "train a network (the default)"),
    "pack": Command(ALONE, "packing.make", config.PackConfig, "put image files in one HDF5 pack"),
    "sweep": Command(LAUNCHER, "sweep.driver", config.SweepConfig, "train many networks"),
    "supervise": Command(LAUNCHER, "supervise", config.SuperviseConfig, "restart a failed run"),
    "stop": Command(ALONE, "stop", config.StopConfig, "save and stop a run or a sweep"),
    "evaluate": Command(
        RANKS, "inference.evaluate", config.EvaluateConfig, "test a trained network on a split"
    ),
    "predict": Command(
        RANKS, "inference.predict", config.PredictConfig, "answer images, or a split, into a table"
    ),
    "export": Command(
        ALONE, "inference.export", config.ExportConfig, "write a network for other programs"
    ),
    "compare": Command(ALONE, "compare", config.CompareConfig, "compare two runs bit by bit"),
    "plot": Command(ALONE, "report.figures", config.PlotConfig, "plot figures and loss by epoch"),
    "doctor": Command(ANY, "doctor", config.Settings, "check this machine"),
    "watch": Command(ALONE, "watch.terminal", config.WatchConfig, "show runs as they train"),
}
# What other programs call the subcommands.
ELSEWHERE = {
    **dict.fromkeys(("test", "val", "validate"), "evaluate"),
    **dict.fromkeys(("status", "list"), "watch"),
    "cancel": "stop",
    "diff": "compare",
}


def main(argv: list[str] | None = None) -> int:
    """Run the command line; return the exit code: 0 done, 1 failed, 2 wrong usage, 75 to resume."""
    name = ""
    settings = None
    failure = None
    try:
        try:
            name, settings = parse(sys.argv[1:] if argv is None else argv)
        except Failure as error:
            if (launched_size() or 1) == 1 or foreign_launcher():
                raise
            failure = error  # all ranks agree on it and print it once
        if failure or COMMANDS[name].processes == RANKS:
            return start(name, settings, failure)
        with quick_imports():
            run = importlib.import_module(f"hpctrain.{COMMANDS[name].module}").main
        return int(run(settings))
    except Failure as error:  # one process, or several without MPI
        rank = launched_rank()
        where = ""
        if rank:
            where = f"[rank {rank}] "
            time.sleep(1.0)  # if the first process failed alike, the launcher ends this one
            if foreign_launcher():  # slow to end it: the first has printed this
                return error.exit_code
        print(f"{where}hpctrain: {error}", file=sys.stderr, flush=True)
        return error.exit_code
    except KeyboardInterrupt:
        return 1


def parse(argv: list[str]) -> tuple[str, Any]:
    """Return the subcommand's name and settings. Raises UsageError; exits for --help, --version."""
    if argv and argv[0] in ("-h", "--help"):
        print(f"hpctrain {__version__}: train image networks with MPI, one Allreduce a step.\n")
        print(*(f"  {name:<10}{command.summary}" for name, command in COMMANDS.items()), sep="\n")
        print("\nhpctrain SUBCOMMAND --help lists its options. Without a subcommand it trains.")
        raise SystemExit(0)
    if argv == ["--version"]:
        print(__version__)
        raise SystemExit(0)
    name = "train"
    words = argv
    if argv and not argv[0].startswith("-"):
        name, *words = argv
    if name not in COMMANDS:
        hint = did_you_mean(name, COMMANDS, ELSEWHERE)
        raise UsageError(f"there is no subcommand {name!r}{hint}")
    command = COMMANDS[name]
    ranks = launched_size() or 1
    launcher = launcher_name()
    without = f"call it without {launcher if foreign_launcher() else 'mpirun or srun'}"
    if command.processes == LAUNCHER and (under_mpirun() or ranks > 1):
        raise UsageError(f"{name} starts its own ranks: {without}")
    if command.processes == ALONE and ranks > 1:
        raise UsageError(f"{name} needs one process, not {ranks}: {without}")
    if command.processes in (ALONE, LAUNCHER) and launched_size() is None and launcher != "none":
        raise UsageError(f"{name} needs one process: call it without {launcher}")
    if command.processes == RANKS:
        require_mpi_launcher()
    try:
        os.getcwd()
    except FileNotFoundError:
        raise UsageError("the current folder was removed: change to one that exists") from None
    return name, config.parse_settings(name, command.summary, command.settings, words)


def start(name: str, settings: Any, failure: Failure | None = None) -> int:
    """Run a subcommand on all ranks and return the exit code.

    An error on one rank, also during its imports, aborts all ranks. `failure` is an error of the
    command line: the ranks agree on it and raise it instead.
    """
    rank = launched_rank()
    size = launched_size() or 1
    timeout = getattr(settings, "hang_timeout", config.Config.hang_timeout)
    with Watchdog(rank, size, socket.gethostname(), timeout, whole=True) as watchdog:
        watchdog.doing("importing MPI")
        if rank == 0 and failure is None and getattr(settings, "progress", "") != "none":
            ranks = "ranks"
            if launched_size() or launcher_name() == "none":
                ranks = counted(size, "rank")
            say(f"hpctrain {name}: starting on {ranks} ...", sys.stderr)
        from hpctrain.parallel.mpi import MPI, check_call, conclude, on_all, start_mpi

        watchdog.abort = MPI.COMM_WORLD.Abort
        try:
            fault("mpi.starting")
            comm = start_mpi()
            watchdog.set_rank(comm.rank, comm.size)  # not all launchers tell it
            fault("mpi.started")
            with on_all(comm):
                if failure is not None:
                    raise failure
            watchdog.doing(f"importing {name}")
            with quick_imports():
                main = importlib.import_module(f"hpctrain.{COMMANDS[name].module}").main
            watchdog.doing("starting")
            check_call(comm, f"hpctrain {name}", vars(settings))
            return int(main(settings, comm))
        except BaseException as error:
            return conclude(error)


@contextmanager
def quick_imports() -> Iterator[None]:
    """Import in the block without searching for the modules of calling frames, and keep garbage.

    torch's modules register operators and ask `inspect` from which module each time. It would
    resolve the path of every module imported so far, 12,000 file operations in all on every rank;
    here it takes the module's name from the frame. Garbage collection during imports finds nothing.
    """
    find_module = inspect.getmodule

    def module_of(thing: Any, filename: str | None = None) -> ModuleType | None:
        if isinstance(thing, FrameType):
            return sys.modules.get(thing.f_globals.get("__name__", ""))
        return find_module(thing, filename)

    gc.disable()
    inspect.getmodule = module_of  # type: ignore[assignment]
    try:
        yield
    finally:
        inspect.getmodule = find_module
        gc.enable()
