"""Settings of a subcommand: a frozen dataclass, each of whose fields is a flag and a TOML key.

A field holds everything about its option: type, choices, default, help, check and the option that
it needs. From these, `parse_settings` makes a parser; flags take precedence over the files named by
--config, and files over defaults. Where an object of the class is made, texts become values, and
values are checked, whether from flags, TOML or Python. Nothing heavy is imported: --help is fast.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import textwrap
import tomllib
import typing
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import pairwise
from types import NoneType
from typing import Any, ClassVar, Literal, TypeVar, cast

from hpctrain.config.functions import check_parts, require_trust
from hpctrain.config.values import List, Value
from hpctrain.errors import UsageError, did_you_mean
from hpctrain.text import brief

LONGEST_NAME = 200  # bytes
LARGEST = 2**63 - 1  # integer of TOML
TRUST_CODE = "import your functions, package.module:function, that a file names"
EXPECTED = {bool: "true or false", int: "an integer", float: "a number"}
ALIKE = 0.75  # how similar to an unknown option one must be: less would be another option
METAVARS = {int: "N", float: "X"}


def option(
    help: str,
    default: Any = None,
    check: str | Callable[[Any], object] = "",
    *,
    positional: bool = False,
    needs: str = "",
    group: str = "",
    shared: bool = False,
) -> Any:
    """Return a dataclass field that is also an option; its type, or Literal choices, are hints.

    An option whose default is ``...`` is a word that the command line must give. `check` is the
    interval of a number, such as "[0, 1)", or a function that raises ValueError for a wrong value.
    `needs` is another option, such as "--images" or "--final ema", without which this one has no
    meaning. `group` is the heading, in the help, of this option and those after it. Options that
    several subcommands share (`shared`) come last.
    """
    required = default is ...
    metadata = dict(help=help, check=check, needs=needs, group=group, required=required)
    metadata |= {"positional": positional or required, "shared": shared}
    return dataclasses.field(default=None if required else default, metadata=metadata)


@typing.dataclass_transform(frozen_default=True)
@dataclasses.dataclass(frozen=True)
class Settings:
    """Base class of the settings of all subcommands, each of which becomes a frozen dataclass."""

    usage: ClassVar[str] = ""  # arguments in the first line of the help
    elsewhere: ClassVar[Mapping[str, str]] = {}  # options by their names in other programs
    trust_flag: ClassVar[bool] = False  # whether --trust-code is a flag and not a setting
    exclude: ClassVar[tuple[tuple[str, str, str], ...]] = ()  # pairs of options, and why
    #: By name: bool, int, float, str, a subclass of Value, or tuple (of texts), and the choices
    types: ClassVar[dict[str, tuple[Any, tuple[Any, ...]]]] = {}

    def __init_subclass__(cls) -> None:
        dataclasses.dataclass(frozen=True)(cls)
        cls.types = {}
        for name, hint in typing.get_type_hints(cls).items():
            inner = typing.get_args(hint)[0] if NoneType in typing.get_args(hint) else hint
            choices = typing.get_args(inner) if typing.get_origin(inner) is Literal else ()
            kind = type(choices[0]) if choices else typing.get_origin(inner) or inner
            cls.types[name] = kind, choices

    def __post_init__(self) -> None:
        """Convert texts to values. Raises UsageError for a value that an option cannot have."""
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if value is field.default:
                continue
            try:
                value = _read(value, field.metadata["check"], *self.types[field.name])
            except ValueError as error:
                text = f"{flag_of(field.name)} {brief(value) or repr(value)}: {error}"
                raise UsageError(text) from None
            object.__setattr__(self, field.name, value)

    @classmethod
    def options(cls) -> list[dataclasses.Field[Any]]:
        """Return the fields in the order of the help."""
        return sorted(dataclasses.fields(cls), key=lambda field: bool(field.metadata["shared"]))

    def table(self) -> dict[str, Any]:
        """Return the settings as TOML and JSON have them, with texts as they were given."""
        return {name: _plain(value) for name, value in vars(self).items()}

    def changed(self) -> dict[str, Any]:
        """Return those settings of `table` that are not at their defaults."""
        return {n: v for n, v in self.table().items() if getattr(self, n) != getattr(type(self), n)}

    def given(self, option: str) -> str:
        """Return an option, "--lr" or "--schedule cosine/step", with its value; "" if not given.

        An option is not given at its default or, if values are named, at any other.
        """
        flag, _, values = option.partition(" ")
        name = flag.strip("-").replace("-", "_")
        value = getattr(self, name)
        if values:
            is_given = str(value) in values.split("/")
        else:
            is_given = value != getattr(type(self), name)
        if not is_given:
            return ""
        return as_given(flag, value)

    def check_conflicts(self) -> None:
        """Raise UsageError if options conflict with each other, or with this machine.

        Also for parts of other libraries that are none, or refused.
        """
        check_parts(vars(self))
        for field in dataclasses.fields(self):
            given = self.given(flag_of(field.name))
            needs = field.metadata["needs"]
            if given and needs and not self.given(needs):
                raise UsageError(f"{given} needs {needs}")
        for first, second, why in self.exclude:
            pair = (self.given(first), self.given(second))
            if all(pair):
                raise UsageError(f"{' and '.join(pair)} exclude each other: {why}")


S = TypeVar("S", bound=Settings)


def _read(value: Any, check: Any, kind: Any, choices: tuple[Any, ...]) -> Any:
    """Return the value of a setting, given as a text, as in TOML, or in Python.

    In Python a list may stand for "0.2,1", and a function or class for "module:function". Of a
    setting that may have several texts (tuple), a list is these. Raises ValueError.
    """
    if kind is tuple:
        return _read_texts(value, check)
    if hasattr(value, "tolist"):  # of NumPy
        value = value.tolist()
    if isinstance(value, list | tuple) and not isinstance(value, Value):
        value = ",".join(map(str, value))
    value = _name_of_function(value)
    expected = f"expected {EXPECTED.get(kind, 'a text')}"
    if isinstance(value, bool) != (kind is bool) or isinstance(value, dict | None):
        raise ValueError(expected)
    if not isinstance(value, kind):
        try:
            value = kind(str(value))
        except ValueError as error:
            raise error if issubclass(kind, Value) else ValueError(expected) from None
    if value == "":
        raise ValueError("the text is empty")
    str(value).encode()  # config.toml is UTF-8
    if kind is int and abs(value) > LARGEST:
        raise ValueError(f"give at most {LARGEST}")
    if choices and value not in choices:
        texts = [str(choice) for choice in choices]
        raise ValueError(f"there are {', '.join(texts)}{did_you_mean(str(value), texts)}")
    if callable(check):
        check(value)
    elif check:
        least, most = (float(end) for end in check[1:-1].split(","))
        ends = {least: check[0] == "[", most: check[-1] == "]"}
        if not (least < value < most or ends.get(value, False)):
            raise ValueError(f"give a number in {check}")
    return value


def _read_texts(value: Any, check: Any) -> tuple[str, ...]:
    """Return the texts of a setting that may have several. Raises ValueError."""
    value = _name_of_function(value)
    if isinstance(value, str):
        value = (value,)
    elif isinstance(value, dict) or not isinstance(value, Iterable):
        raise ValueError("expected a text, or a list of texts")
    texts = []
    for item in value:
        text = _name_of_function(item)
        if not isinstance(text, str | os.PathLike):
            raise ValueError(f"expected texts, not {brief(item, 40)}")
        texts.append(os.fspath(text))
        texts[-1].encode()  # config.toml is UTF-8
    if callable(check):
        check(texts)
    return tuple(texts)


def _name_of_function(value: Any) -> Any:
    """Return "module:function" for a function or a class, and any other value as it is."""
    if hasattr(value, "__qualname__"):
        return f"{value.__module__}:{value.__qualname__}"
    return value


def _plain(value: Any) -> Any:
    """Return the value of a setting as TOML and JSON have it.

    Of a setting that may have several texts it is None, a text or a list of them.
    """
    if isinstance(value, Value):
        return str(value)
    if isinstance(value, tuple):
        texts = [*value, None]
        return texts[0] if len(value) < 2 else list(value)
    return value


def as_given(flag: str, value: object) -> str:
    """Return a flag with its value, one that is repeated with each."""
    if value is True:
        return flag
    values = value if type(value) is tuple else (value,)
    return " ".join(f"{flag} {item}" for item in values)


def flag_of(name: str) -> str:
    """Return the flag of a setting."""
    return "--" + name.replace("_", "-")


def check_folder_name(name: str) -> None:
    """Raise ValueError if `name` cannot be the name of a folder in --runs-dir."""
    printable = name.isprintable() and len(name.encode()) <= LONGEST_NAME
    if name in (".", "..") or "/" in name or not printable:
        raise ValueError(f"give the name of a folder, at most {LONGEST_NAME} bytes, without /")


def from_table(table: Mapping[str, Any], config: S, place: str = "") -> S:
    """Return `config` with the values of a table: of TOML, of flags, or given in Python.

    Raises UsageError that names the `place` if a name is unknown or a value is wrong.
    """
    names = [field.name for field in dataclasses.fields(config)]
    for name in table:
        if name == "trust_code" and place:
            raise UsageError(f"{place}: trust_code can be given on the command line only")
        if name not in names:
            hint = did_you_mean(name, names, config.elsewhere, ALIKE)
            raise UsageError(f"{place}: unknown setting {name!r}{hint}")
    try:
        return dataclasses.replace(config, **table)
    except UsageError as error:
        raise UsageError(f"{place}: {error}" if place else str(error)) from None


def load_toml(path: str, flag: str = "") -> dict[str, Any]:
    """Read a TOML file. Raises UsageError that names the `flag` by which the file was given."""
    try:
        with open(path, "rb") as file:
            return tomllib.load(file)
    except OSError as error:
        raise UsageError(f"{flag}{path} cannot be read: {error.strerror}") from error
    except (ValueError, RecursionError) as error:  # neither UTF-8 nor TOML, or too deep
        raise UsageError(f"{path} is no TOML: {error}") from error


def to_toml(table: Mapping[str, Any]) -> str:
    """Return a table of bools, numbers and texts as TOML, which writes them as JSON does."""
    texts = {n: json.dumps(v, ensure_ascii=False) for n, v in table.items() if v is not None}
    lines = (f"{name} = {text}\n" for name, text in texts.items())
    return "".join(lines).replace("\x7f", "\\u007f")  # which TOML, unlike JSON, does not allow


def parse_settings(name: str, summary: str, kind: type[S], words: Sequence[str]) -> S:
    """Parse and check the settings of a subcommand. Raises UsageError; exits for --help."""
    try:
        parser = make_parser(name, summary, kind)
        parse = parser.parse_known_args
        if not kind.usage:  # no command follows
            parse = parser.parse_known_intermixed_args
        parsed, unknown = parse(words)
    except argparse.ArgumentError as error:
        raise UsageError(str(error).removeprefix("argument ")) from None
    if unknown:
        raise _unknown(name, kind, words, unknown[0])
    flags = vars(parsed)
    config = kind()
    trust_code = (flags.pop if kind.trust_flag else flags.get)("trust_code", False)
    for path in flags.pop("config", []):
        table = load_toml(path, "--config ")
        config = from_table(table, config, path)
        require_trust({n: v for n, v in table.items() if n not in flags}, path, trust_code)
    config = from_table(flags, config)
    for field in dataclasses.fields(config):
        if field.metadata["required"] and not getattr(config, field.name):
            raise UsageError(f"{name} needs {field.name.upper()}: {field.metadata['help']}")
    config.check_conflicts()
    return config


def _unknown(name: str, kind: type[Settings], words: Sequence[str], stray: str) -> UsageError:
    """Return the error to raise for a word that no option of a subcommand takes."""
    option, _, value = stray.partition("=")
    names = [field.name for field in dataclasses.fields(kind)]
    if option.startswith("-"):
        value = value or dict(pairwise(words)).get(stray, "")
        is_listed = f"{option.strip('-')}_{value}" in kind.elsewhere  # such as --output last
        word = f"{option}_{value}" if is_listed else option
        hint = did_you_mean(word, map(flag_of, names), kind.elsewhere, ALIKE)
        if kind.usage and "--" not in words:
            hint = f": options of the command come after --, as in {name} {kind.usage}"
        return UsageError(f"unknown option {option!r}{hint}")
    flag, before = ["", "", *words][words.index(stray) :][:2]
    lists = [flag_of(name) for name in names if issubclass(kind.types[name][0], List)]
    hint = ""
    if flag in lists:
        hint = f"; separate by commas: {flag} '{before},{stray}'"
    elif flag == "--data":
        hint = f"; put a pattern of files in quotes: {flag} 'scans/*.h5'"
    return UsageError(f"unexpected argument {brief(option)!r} for hpctrain {name}{hint}")


class Formatter(argparse.HelpFormatter):
    """Help formatter that breaks no line within a flag."""

    def _split_lines(self, text: str, width: int) -> list[str]:
        return textwrap.wrap(text, width, break_on_hyphens=False)


def make_parser(name: str, summary: str, kind: type[Settings]) -> argparse.ArgumentParser:
    """Build the parser of one subcommand, whose result holds the texts that are given."""
    parser = argparse.ArgumentParser(
        prog=f"hpctrain {name}",
        description=f"{summary[0].upper()}{summary[1:]}.",
        allow_abbrev=False,
        argument_default=argparse.SUPPRESS,
        exit_on_error=False,
        formatter_class=Formatter,
    )
    parser.add_argument(
        "--config",
        metavar="FILE",
        action="append",
        help="read options such as batch_size = 64 from a TOML file; flags win",
    )
    if kind.trust_flag:
        parser.add_argument("--trust-code", action="store_true", help=TRUST_CODE)
    group = cast(Any, parser)
    words = []
    for field in kind.options():
        if heading := field.metadata["group"]:
            group = parser.add_argument_group(heading)
        name_or_flag = flag_of(field.name)
        value, choices = kind.types[field.name]
        arguments: dict[str, Any] = {"help": help_of(field).replace("%", "%%")}
        if value is bool:
            arguments["action"] = argparse.BooleanOptionalAction
        elif field.metadata["positional"]:
            name_or_flag = field.name
            word = field.name.upper()
            words.append(word if field.metadata["required"] else f"[{word}]")
            arguments |= {"nargs": "*" if value is tuple else "?", "metavar": word}
        elif choices:
            arguments["metavar"] = f"{{{','.join(map(str, choices))}}}"
        else:
            arguments["metavar"] = METAVARS.get(value, "TEXT")
            if value is tuple:
                arguments["action"] = "append"
        group.add_argument(name_or_flag, **arguments)
    parser.usage = f"hpctrain {name} {kind.usage or ' '.join([*words, '[options]'])}"
    return parser


def help_of(field: dataclasses.Field[Any]) -> str:
    """Return the help of an option with its default, if that says something."""
    text: str = field.metadata["help"]
    default = "on" if field.default is True else field.default
    if default is False or default in (None, ()):
        return text
    return f"{text} (default: {default})"
