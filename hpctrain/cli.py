"""The command line: ``python -m hpctrain [SUBCOMMAND] ...``.

Settings are parsed by ``config/parse.py``; nothing heavy (torch, MPI, HDF5) is imported before they
are accepted.
"""

from __future__ import annotations

import importlib
import sys
import time
import typing
from typing import Any

from hpctrain import __version__, config
from hpctrain.errors import Failure, UsageError, did_you_mean
from hpctrain.launcher import launched_rank, launched_size, under_mpirun
from hpctrain.start import start


class Command(typing.NamedTuple):
    """One subcommand: its settings, what it is for, and the module whose `main` does it."""

    settings: type
    summary: str
    module: str
    collective: bool = False  # all ranks of a launcher take part
    alone: bool = False  # one process does it without MPI
    one_process: bool = False  # several would do the same thing several times
    starts_ranks: bool = False  # of its own, with a launcher: launchers do not nest


COMMANDS = {
    "train": Command(
        config.Config, "train a network on all ranks (the default)", "hpctrain.training.train", True
    ),
    "pack": Command(
        config.PackConfig,
        "turn image files into one HDF5 pack, on one or all ranks",
        "hpctrain.pack",
        collective=True,
        alone=True,
    ),
    "sweep": Command(
        config.SweepConfig,
        "train many networks at once",
        "hpctrain.sweep.command",
        starts_ranks=True,
    ),
    "stop": Command(
        config.StopConfig,
        "ask a run or a sweep to stop after its next step",
        "hpctrain.stop",
        one_process=True,
    ),
    "evaluate": Command(
        config.EvaluateConfig,
        "test a trained network on a split",
        "hpctrain.inference.evaluate",
        True,
    ),
    "predict": Command(
        config.PredictConfig,
        "classify image files or a split into CSV",
        "hpctrain.inference.predict",
        True,
    ),
    "compare": Command(
        config.CompareConfig, "two runs, bit by bit", "hpctrain.compare", one_process=True
    ),
    "plot": Command(
        config.PlotConfig,
        "accuracy and loss of runs by epoch, as a figure",
        "hpctrain.plot",
        one_process=True,
    ),
    "doctor": Command(
        config.DoctorConfig, "say what was found on this machine", "hpctrain.doctor.command"
    ),
    "bench": Command(
        config.BenchConfig,
        "measure training against its limit",
        "hpctrain.bench.command",
        starts_ranks=True,
    ),
    "watch": Command(
        config.WatchConfig, "see runs learn, live", "hpctrain.watch.command", one_process=True
    ),
}


def main(argv: list[str] | None = None) -> int:
    """Run the command line; give its exit code (0 done, 1 failed, 2 wrong usage)."""
    arguments = sys.argv[1:] if argv is None else argv
    try:
        try:
            name, settings = parse(arguments)
        except Failure as error:
            if (launched_size() or 1) == 1:
                raise
            return start("", "", failure=error)  # the ranks agree on it, and say it once
        command = COMMANDS[name]  # nothing heavy is imported before
        if command.collective and ((launched_size() or 1) > 1 or not command.alone):
            return start(name, command.module, settings)
        return int(importlib.import_module(command.module).main(settings))
    except Failure as error:
        _say_once(f"hpctrain: {error}")
        return error.exit_code
    except KeyboardInterrupt:
        return 1


def parse(argv: list[str]) -> tuple[str, Any]:
    """The subcommand's name and its settings. UsageError; exits for --help."""
    if argv and argv[0] in ("-h", "--help"):
        print(_overview())
        raise SystemExit(0)
    if argv == ["--version"]:
        print(__version__)
        raise SystemExit(0)
    name, words = ("train", argv) if not argv or argv[0].startswith("-") else (argv[0], argv[1:])
    if name not in COMMANDS:
        raise UsageError(f"there is no subcommand {name!r}{did_you_mean(name, COMMANDS)}")
    command, ranks = COMMANDS[name], launched_size() or 1
    if command.starts_ranks and (under_mpirun() or ranks > 1):
        raise UsageError(f"{name} starts its own ranks: call it without mpirun or srun")
    if command.one_process and ranks > 1:
        raise UsageError(f"{name} needs one process, not {ranks}: call it without mpirun or srun")
    return name, config.parse_settings(name, command.summary, command.settings, words)


def _overview() -> str:
    lines = [f"hpctrain {__version__}: train image networks with MPI, one Allreduce a step.", ""]
    lines += [f"  {name:<10}{command.summary}" for name, command in COMMANDS.items()]
    lines += ["", "hpctrain SUBCOMMAND --help lists its options. Without a subcommand it trains."]
    return "\n".join(lines)


def _say_once(text: str) -> None:
    """Print a mistake that mostly all processes of a launcher meet alike: the first one prints.

    The others wait a second, in which the launcher ends them; one that is still there met a
    mistake of its own (a file missing on its host) and says so.
    """
    if rank := launched_rank():
        time.sleep(1.0)
        text = f"[rank {rank}] {text}"
    print(text, file=sys.stderr, flush=True)
