"""The command line: ``python -m hpctrain [train|pack|evaluate|predict|plot|doctor] ...``.

A parser is built from the subcommand's dataclass in config.py; nothing heavy (torch, MPI, HDF5)
is imported before the arguments are accepted, so that --help answers at once.
"""

from __future__ import annotations

import dataclasses
import importlib
import re
import sys
import time
import typing
from collections.abc import Sequence
from itertools import pairwise
from typing import Any, NoReturn

from hpctrain import __version__, config
from hpctrain.configfile import read_settings, require_typed, take_files
from hpctrain.errors import Failure, UsageError, brief, did_you_mean
from hpctrain.launcher import launched_rank, launched_size
from hpctrain.start import start


class Command(typing.NamedTuple):
    """One subcommand: its settings, what it is for, and the module whose `main` does it."""

    settings: type
    summary: str
    module: str
    collective: bool = False  # all ranks of a launcher take part
    alone: bool = False  # one process does it without MPI


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
    "sweep": Command(config.SweepConfig, "train many networks at once", "hpctrain.sweep.command"),
    "stop": Command(
        config.StopConfig, "ask a run or a sweep to stop after its next step", "hpctrain.stop"
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
    "compare": Command(config.CompareConfig, "two runs, bit by bit", "hpctrain.compare"),
    "plot": Command(
        config.PlotConfig, "accuracy and loss of runs by epoch, as a figure", "hpctrain.plot"
    ),
    "doctor": Command(
        config.DoctorConfig, "say what was found on this machine", "hpctrain.doctor.command"
    ),
    "bench": Command(
        config.BenchConfig, "measure training against its limit", "hpctrain.bench.command"
    ),
    "watch": Command(config.WatchConfig, "see runs learn, live", "hpctrain.watch.command"),
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
    """The subcommand's name and its settings. Raises UsageError; exits for --help."""
    name, rest = ("train", argv)
    if argv and not argv[0].startswith("-"):
        name, rest = argv[0], argv[1:]
        if name not in COMMANDS:
            raise UsageError(f"there is no subcommand {name!r}{did_you_mean(name, COMMANDS)}")
    elif argv and argv[0] in ("-h", "--help"):
        print(_overview())
    elif argv == ["--version"]:
        print(__version__)
        raise SystemExit(0)
    settings, parser = COMMANDS[name].settings, make_parser(name)
    files, rest = take_files(rest)
    flags: list[str] = []
    words: dict[str, Any] = {}
    for file in files:
        own, positional = read_settings(file, settings)
        try:
            parser.parse(own)
        except UsageError as error:
            raise UsageError(f"{file}: {error}") from error
        require_typed(file, own, rest)
        flags += own
        words |= positional
    parsed = vars(parser.parse(flags + rest))
    given = {f.name: parsed[f.name] for f in dataclasses.fields(settings)}
    given |= {name: value for name, value in words.items() if not given[name]}
    return name, settings(**given)


def make_parser(name: str) -> Any:
    """The parser of one subcommand, from its dataclass."""
    import jsonargparse

    command = COMMANDS[name]
    fields = dataclasses.fields(command.settings)
    known = [f.name for f in fields]

    class Parser(jsonargparse.ArgumentParser):
        """Mistakes become one line that names the nearest flag or key."""

        words: Sequence[str] = ()

        def parse(self, words: Sequence[str]) -> Any:
            """The settings in these words of the command line. UsageError."""
            self.words = words
            return self.parse_args(words)

        def error(self, message: str, ex: Exception | None = None) -> NoReturn:
            raise UsageError(_one_line(message, known, self.words))

    parser = Parser(
        prog=f"hpctrain {name}",
        usage=f"hpctrain {name} {_positionals(fields)}[settings]",
        description=f"{command.summary[0].upper()}{command.summary[1:]}.",
        print_config=None,
        default_env=False,
        allow_abbrev=False,
        add_help=True,
        formatter_class=_formatter(),
    )
    parser.add_argument(
        "--config", metavar="FILE", help="TOML file with any of these settings; flags win"
    )
    groups: dict[str, Any] = {}
    for field in fields:
        group = field.metadata["group"]
        if group not in groups:
            groups[group] = parser.add_argument_group(group)
        _add_option(groups[group], field, typing.get_type_hints(command.settings)[field.name])
    return parser


def _positionals(fields: tuple[dataclasses.Field, ...]) -> str:
    names = [f.name.upper() for f in fields if f.metadata["positional"]]
    return "".join(f"[{name}] " for name in names)


def _formatter() -> Any:
    import argparse

    class Formatter(argparse.HelpFormatter):
        """Room for the flags, and the same width everywhere."""

        def __init__(self, prog: str) -> None:
            super().__init__(prog, max_help_position=26, width=100)

    return Formatter


def _add_option(group: Any, field: dataclasses.Field, hint: Any) -> None:
    import jsonargparse

    meta = field.metadata
    flag = "--" + field.name.replace("_", "-")
    text = meta["help"]
    if field.default not in (None, False, True, (), ""):
        text += f" (default: {field.default})"
    arguments: dict[str, Any] = {"help": text, "default": field.default}
    if hint is bool:
        if field.default:
            arguments["help"] += " (default: yes)"
        group.add_argument(flag, action=jsonargparse.ActionYesNo(no_prefix="no-"), **arguments)
        return
    if meta["choices"]:
        arguments["choices"] = list(meta["choices"])
    base = next((a for a in typing.get_args(hint) if a not in (type(None), ...)), hint)
    if meta["positional"]:
        many = typing.get_origin(hint) is tuple
        group.add_argument(field.name, nargs="*" if many else "?", type=base, **arguments)
    else:
        metavar = None if meta["choices"] else {int: "N", float: "X"}.get(base, "TEXT")
        group.add_argument(flag, type=base, metavar=metavar, **arguments)


def _as_typed(flag: str, words: Sequence[str], value: str) -> str:
    """What was typed as the value of a flag that was read as `value`; the flag's last wins."""
    for word, following in pairwise([*words, ""]):
        if word == flag:
            value = following
        elif word.startswith(f"{flag}="):
            value = word.removeprefix(f"{flag}=")
    return brief(value)


def _one_line(message: str, known: list[str], words: Sequence[str]) -> str:
    text = " ".join(str(message).split()).removeprefix("Parser key ")
    number = re.fullmatch(r'"(\w+)": Expected a <class .(int|float|str).>. Got value: (.*)', text)
    if number:
        kind = {"int": "a whole number", "float": "a number", "str": "a text"}[number[2]]
        flag = f"--{number[1].replace('_', '-')}"
        return f"{flag} {_as_typed(flag, words, number[3])}: {kind} is expected"
    wrong = re.search(r"(?:unrecognized arguments: --|Option ')([\w-]+)", text)
    if wrong:
        return f"there is no setting {wrong[1]!r}{_flag_hint(did_you_mean(wrong[1], known))}"
    return text


def _flag_hint(hint: str) -> str:
    return re.sub(r"'(\w+)'", lambda m: "'--" + m[1].replace("_", "-") + "'", hint)


def _overview() -> str:
    lines = [f"hpctrain {__version__}: train image networks with MPI, one Allreduce a step.", ""]
    lines += [f"  {name:<10}{command.summary}" for name, command in COMMANDS.items()]
    lines += ["", "hpctrain SUBCOMMAND --help lists its settings; those of train follow.", ""]
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
