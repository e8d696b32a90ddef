"""The command line: parse ``python -m hpctrain [SUBCOMMAND] ...`` and run the subcommand.

``config/parse.py`` parses the settings; nothing heavy (torch, MPI, HDF5) is imported before they
have been accepted. A subcommand that runs on all ranks is started under a watchdog.
"""

from __future__ import annotations

import importlib
import socket
import sys
import time
from typing import Any, NamedTuple

from hpctrain import __version__, config
from hpctrain.cluster import launched_rank, launched_size, under_mpirun
from hpctrain.errors import Failure, UsageError, did_you_mean
from hpctrain.fault import fault
from hpctrain.quick_imports import quick_imports
from hpctrain.text import say
from hpctrain.watchdog import Watchdog

# How a subcommand uses the processes that a launcher started.
RANKS = "all are ranks"
ONE_PROCESS = "refused: several would do the same thing several times"
NO_LAUNCHER = "refused: it starts ranks with a launcher itself, and launchers do not nest"
ANY = "each decides for itself"


class Command(NamedTuple):
    """One subcommand: its processes, the module whose `main` runs it, its settings, a summary."""

    processes: str
    module: str
    settings: type
    summary: str


COMMANDS = {
    "train": Command(
        RANKS, "training.train", config.Config, "train a network on all ranks (the default)"
    ),
    "pack": Command(
        ONE_PROCESS, "packing.make", config.PackConfig, "convert image files to one HDF5 pack"
    ),
    "sweep": Command(NO_LAUNCHER, "sweep", config.SweepConfig, "train many networks"),
    "supervise": Command(
        NO_LAUNCHER, "supervise", config.SuperviseConfig, "restart a run after failures"
    ),
    "stop": Command(
        ONE_PROCESS, "stop", config.StopConfig, "stop a run or a sweep after its next step, saved"
    ),
    "evaluate": Command(
        RANKS, "inference.evaluate", config.EvaluateConfig, "test a trained network on a split"
    ),
    "predict": Command(
        RANKS, "inference.predict", config.PredictConfig, "classify images, or a split, into CSV"
    ),
    "export": Command(
        ONE_PROCESS, "inference.export", config.ExportConfig, "write a network for other programs"
    ),
    "compare": Command(ONE_PROCESS, "compare", config.CompareConfig, "compare two runs bit by bit"),
    "plot": Command(ONE_PROCESS, "plot", config.PlotConfig, "plot accuracy and loss by epoch"),
    "doctor": Command(ANY, "doctor", config.DoctorConfig, "check this machine"),
    "watch": Command(ONE_PROCESS, "watch", config.WatchConfig, "show runs as they train"),
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
    ranks = launched_size() or 1
    try:
        try:
            name, settings = parse(sys.argv[1:] if argv is None else argv)
        except Failure as error:
            if ranks == 1:
                raise
            return start("", "", failure=error)  # all ranks agree on the error and print it once
        processes, module = COMMANDS[name].processes, f"hpctrain.{COMMANDS[name].module}"
        if processes == RANKS:
            return start(name, module, settings)
        return int(importlib.import_module(module).main(settings))
    except Failure as error:
        _say_once(f"hpctrain: {error}")
        return error.exit_code
    except KeyboardInterrupt:
        return 1


def parse(argv: list[str]) -> tuple[str, Any]:
    """Return the subcommand's name and settings. Raises UsageError; exits for --help, --version."""
    if argv and argv[0] in ("-h", "--help"):
        print(_overview())
        raise SystemExit(0)
    if argv == ["--version"]:
        print(__version__)
        raise SystemExit(0)
    name, words = ("train", argv) if not argv or argv[0].startswith("-") else (argv[0], argv[1:])
    if name not in COMMANDS:
        raise UsageError(
            f"there is no subcommand {name!r}{did_you_mean(name, COMMANDS, ELSEWHERE)}"
        )
    command, ranks = COMMANDS[name], launched_size() or 1
    if command.processes == NO_LAUNCHER and (under_mpirun() or ranks > 1):
        raise UsageError(f"{name} starts its own ranks: call it without mpirun or srun")
    if command.processes == ONE_PROCESS and ranks > 1:
        raise UsageError(f"{name} needs one process, not {ranks}: call it without mpirun or srun")
    return name, config.parse_settings(name, command.summary, command.settings, words)


def _overview() -> str:
    lines = [f"hpctrain {__version__}: train image networks with MPI, one Allreduce a step.", ""]
    lines += [f"  {name:<10}{command.summary}" for name, command in COMMANDS.items()]
    lines += ["", "hpctrain SUBCOMMAND --help lists its options. Without a subcommand it trains."]
    return "\n".join(lines)


def _say_once(text: str) -> None:
    """Print an error once, if all processes of a launcher raise the same one, as they mostly do.

    The first process prints it. The others wait for a second, in which the launcher terminates
    them. One that is still running then has an error of its own (such as a file missing on its
    host) and prints it.
    """
    if rank := launched_rank():
        time.sleep(1.0)
        text = f"[rank {rank}] {text}"
    print(text, file=sys.stderr, flush=True)


def start(name: str, module: str, settings: Any = None, failure: Failure | None = None) -> int:
    """Run a module's `main` on all ranks and return the exit code.

    An error on one rank, also during its imports, aborts all ranks. `failure` is an error of the
    command line: the ranks agree on it and raise it instead.
    """
    rank, size = launched_rank(), launched_size() or 1
    timeout = config.duration(
        getattr(settings, "hang_timeout", config.Config.hang_timeout), "--hang-timeout"
    )

    with Watchdog(rank, size, socket.gethostname(), timeout, whole=True) as watchdog:
        watchdog.doing("importing MPI")
        if rank == 0 and failure is None and getattr(settings, "progress", "") != "none":
            ranks = f"{size} ranks" if size > 1 else "1 rank"
            say(f"hpctrain {name}: starting on {ranks} ...", sys.stderr)
        from hpctrain.parallel.mpi import MPI, conclude, on_all, start_mpi

        watchdog.abort = MPI.COMM_WORLD.Abort
        try:
            fault("mpi.starting")
            comm = start_mpi()
            fault("mpi.started")
            with on_all(comm):
                if failure is not None:
                    raise failure
            comm.Free()
            watchdog.doing(f"importing {module}")
            with quick_imports():
                main = importlib.import_module(module).main
            watchdog.doing("starting")
            return int(main(settings))
        except BaseException as error:
            return conclude(error)
