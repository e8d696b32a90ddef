"""Parse settings from the command line and from TOML files, and check them.

The parser is built from the dataclass of a subcommand. Flags take precedence over the files named
by --config, and files over defaults. Each option is checked by the check of its field; then options
that exclude or require each other are checked. Nothing heavy is imported, so that --help is fast.
"""

from __future__ import annotations

import argparse
import dataclasses
import os
import tomllib
import typing
from collections.abc import Sequence
from typing import Any, NoReturn

from hpctrain.config.conflicts import conflicts
from hpctrain.config.imports import own_functions, require_trust
from hpctrain.config.option import TRUST_CODE, class_weights, flag_of
from hpctrain.config.patterns import learning_rate_factors, patterns
from hpctrain.config.train import Config
from hpctrain.errors import UsageError, did_you_mean
from hpctrain.text import brief
from hpctrain.typed import LARGEST

KINDS = {int: "an integer", float: "a number", str: "a string"}
METAVARS = {int: "N", float: "X", str: "TEXT"}
SUPPRESS = argparse.SUPPRESS
# What other programs call the options of train.
ELSEWHERE = {
    "learning_rate": "--lr",
    "gpus": "mpirun -n N, one rank for each GPU",
    "workers": "mpirun -n N, or --threads of each rank",
    "backend": "--reduce",
    "accumulate": "--shards",
}
LISTS = (patterns, learning_rate_factors, class_weights)  # checks of options that take lists


class Formatter(argparse.HelpFormatter):
    """Help formatter with room for the flags and a fixed width."""

    def __init__(self, prog: str) -> None:
        super().__init__(prog, max_help_position=26, width=100)


class Parser(argparse.ArgumentParser):
    """Argument parser that reports errors in one line."""

    def error(self, message: str) -> NoReturn:
        """Raise UsageError instead of printing the usage and exiting."""
        raise UsageError(message.removeprefix("argument "))


def parse_settings(name: str, summary: str, settings: type, words: Sequence[str]) -> Any:
    """Parse and check the settings of a subcommand. Raises UsageError; exits for --help."""
    known = [field.name for field in dataclasses.fields(settings)]
    found, rest = make_parser(name, summary, settings).parse_known_args(words)
    flags = {
        n: tuple(v) if isinstance(v, list) and n in known else v for n, v in vars(found).items()
    }
    if rest:
        given, _, _ = rest[0].partition("=")
        if not given.startswith("-"):
            hint = _comma_hint(words, rest[0], settings)
            raise UsageError(f"unexpected argument {brief(given)!r} for hpctrain {name}{hint}")
        hint = did_you_mean(given, map(flag_of, known), ELSEWHERE if settings is Config else {})
        if hasattr(settings, "usage") and "--" not in words:
            hint = f": options of the command come after --, as in {name} {settings.usage}"
        raise UsageError(f"unknown option {given!r}{hint}")
    given_in_files: dict[str, Any] = {}
    trust_code = bool(flags.get("trust_code"))
    if settings is Config:
        flags.pop("trust_code", None)  # of this launch, not of the run
    for path in flags.pop("config", []):
        table = read_table(load_toml(path, "--config "), settings, path)
        named = [own for n, own in own_functions(table).items() if n not in flags]
        require_trust(named, path, trust_code)
        given_in_files |= table
    found_settings = settings(**given_in_files | flags)
    check_settings(found_settings)
    return found_settings


def _comma_hint(words: Sequence[str], stray: str, settings: type) -> str:
    """Return how to write a list, if a stray word follows an option that takes one, or ""."""
    flag, value = ["", "", *words][words.index(stray) :][:2]
    lists = [flag_of(f.name) for f in dataclasses.fields(settings) if f.metadata["check"] in LISTS]
    return f"; separate by commas: {flag} '{value},{stray}'" if flag in lists else ""


def make_parser(name: str, summary: str, settings: type) -> Parser:
    """Build the parser of one subcommand; options that are not given are not in its result."""
    fields, hints = dataclasses.fields(settings), typing.get_type_hints(settings)
    positional = [f"[{f.name.upper()}] " for f in fields if f.metadata["positional"]]
    usage = getattr(settings, "usage", f"{''.join(positional)}[options]")
    parser = Parser(
        prog=f"hpctrain {name}",
        usage=f"hpctrain {name} {usage}",
        description=f"{summary[0].upper()}{summary[1:]}.",
        allow_abbrev=False,
        formatter_class=Formatter,
    )
    groups: dict[str, Any] = {}
    for field in fields:
        group = field.metadata["group"]
        if group not in groups:
            groups[group] = parser.add_argument_group(group)
        _add_option(groups[group], field, hints[field.name])
    if settings is Config:
        parser.add_argument("--trust-code", action="store_true", default=SUPPRESS, help=TRUST_CODE)
    parser.add_argument(
        "--config",
        metavar="FILE",
        action="append",
        default=SUPPRESS,
        help="read options from a TOML file of keys such as batch_size = 64; flags win",
    )
    return parser


def _add_option(group: Any, field: dataclasses.Field, hint: Any) -> None:
    meta, flag, kind = field.metadata, flag_of(field.name), _kind(hint)
    text = meta["help"]
    if field.default is True:
        text += " (default: on)"
    elif field.default not in (None, (), "") and field.default is not False:
        text += f" (default: {field.default})"
    arguments: dict[str, Any] = {"help": text.replace("%", "%%"), "default": SUPPRESS}
    if kind is bool:
        group.add_argument(flag, action=argparse.BooleanOptionalAction, **arguments)
        return
    name = field.name if meta["positional"] else flag
    choices = f"{{{','.join(meta['choices'])}}}" if meta["choices"] else None
    if meta["positional"]:
        many = typing.get_origin(hint) is tuple
        arguments |= {"nargs": "*" if many else "?", "metavar": choices or field.name.upper()}
    else:
        arguments["metavar"] = choices or METAVARS[kind]
    group.add_argument(name, type=lambda text: convert(text, kind, flag), **arguments)


def _kind(hint: Any) -> type:
    """Return X of the hints X, X | None and tuple[X, ...]: bool, int, float or str."""
    return next((a for a in typing.get_args(hint) if a not in (type(None), ...)), hint)


def convert(text: str, kind: type, flag: str) -> Any:
    """Convert a text to a value. Raises UsageError."""
    try:
        return kind(text)
    except ValueError:
        raise UsageError(f"{flag} {brief(text)}: expected {KINDS[kind]}") from None


def read_table(table: dict[str, Any], settings: type, place: str) -> dict[str, Any]:
    """Return the values of a TOML table of settings, each of its type.

    Raises UsageError that names the `place`.
    """
    fields = {field.name: field for field in dataclasses.fields(settings)}
    hints, found = typing.get_type_hints(settings), {}
    for name, value in table.items():
        if name == "trust_code":
            raise UsageError(f"{place}: trust_code can be given on the command line only")
        if name not in fields:
            hint = did_you_mean(name, fields)
            if isinstance(value, dict):
                hint = ": settings are top-level keys, not tables"
            raise UsageError(f"{place}: unknown setting {name!r}{hint}")
        kind, many = _kind(hints[name]), typing.get_origin(hints[name]) is tuple
        values = value if many and isinstance(value, list) else [value]
        for each in values:
            if isinstance(each, dict | list):
                raise UsageError(f"{place}: {name} must be one value, not {brief(each)}")
            if isinstance(each, bool) != (kind is bool):
                wanted = "true or false" if kind is bool else KINDS[kind]
                raise UsageError(f"{place}: {name} must be {wanted}, not {brief(each)}")
        try:
            typed = [
                each if kind is bool else convert(str(each), kind, flag_of(name)) for each in values
            ]
        except UsageError as error:
            raise UsageError(f"{place}: {error}") from None
        found[name] = tuple(typed) if many else typed[0]
    return found


def load_toml(path: str, flag: str = "") -> dict[str, Any]:
    """Read a TOML file. Raises UsageError that names the `flag` by which the file was given."""
    if os.path.isdir(path):
        raise UsageError(f"{flag}{path} is a folder: name a TOML file")
    try:
        with open(path, "rb") as file:
            return tomllib.load(file)
    except OSError as error:
        raise UsageError(f"{flag}{path} cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise UsageError(f"{path} is no text: byte {error.start} is not UTF-8") from error
    except ValueError as error:
        raise UsageError(f"{path} is no TOML: {error}") from error


def check_settings(settings: Any) -> None:
    """Raise UsageError if an option of a subcommand is invalid."""
    for field in dataclasses.fields(settings):
        value, flag = getattr(settings, field.name), flag_of(field.name)
        choices, check = field.metadata["choices"], field.metadata["check"]
        if value is None:
            continue
        if choices and value not in choices:
            hint = did_you_mean(value, choices)
            raise UsageError(f"{flag} {value}: there are {', '.join(choices)}{hint}")
        if isinstance(value, int) and abs(value) > LARGEST:
            raise UsageError(f"{flag} {brief(value)}: give at most {LARGEST}")
        if check is not None:
            check(value, flag)
    if isinstance(settings, Config):
        for conflict in conflicts(settings):
            raise UsageError(conflict)
