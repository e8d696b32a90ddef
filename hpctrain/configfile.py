"""A TOML file of settings, read as the flags that it stands for: one parser checks both."""

from __future__ import annotations

import dataclasses
import os
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from hpctrain.errors import UsageError, did_you_mean
from hpctrain.typed import parse_toml


def take_files(words: list[str]) -> tuple[list[str], list[str]]:
    """The files that `--config FILE` or `--config=FILE` name, and all other words.

    Wherever they stand, flags come after them and win.
    """
    files, others = [], []
    rest = iter(words)
    for word in rest:
        if word == "--config":
            file = next(rest, None)
            if file is None:
                raise UsageError("--config: name a TOML file")
            files.append(file)
        elif word.startswith("--config="):
            files.append(word.partition("=")[2])
        else:
            others.append(word)
    return files, others


def read_settings(path: str, settings: type) -> tuple[list[str], dict[str, Any]]:
    """The flags that a file stands for, and the values of what are no flags (positional words).

    Raises UsageError, which names the file, for what is no TOML or no setting.
    """
    return as_flags(load_toml(path, "--config "), settings, path)


def require_typed(path: str, flags: Sequence[str], words: Sequence[str]) -> None:
    """UsageError where a file in the folder of a run or a sweep, which others may have made, names
    a network to import that `words`, the rest of the command line, do not.
    """
    named = [flag for flag in flags if flag.startswith("--model=") and ":" in flag]
    typed = any(word.partition("=")[0] == "--model" for word in words)
    of_a_run = any(Path(path).with_name(name).is_file() for name in ("plan.json", "sweep.toml"))
    if named and of_a_run and not typed:
        model = named[-1].partition("=")[2]
        raise UsageError(
            f"{path} lies in the folder of a run and names the network {model!r}, and no module is"
            f" imported because a file says so: if you trust it, add --model {shlex.quote(model)}"
        )


def as_flags(given: dict[str, Any], settings: type, path: str) -> tuple[list[str], dict[str, Any]]:
    """The flags, and the positional values, that a table of settings stands for. UsageError, which
    names the place `path`.
    """
    fields = {field.name: field for field in dataclasses.fields(settings)}
    flags, words = [], {}
    for name, value in given.items():
        if name not in fields:
            hint = did_you_mean(name, fields)
            if isinstance(value, dict):
                hint = ": settings stand at the top, not in tables"
            raise UsageError(f"{path}: there is no setting {name!r}{hint}")
        flag = "--" + name.replace("_", "-")
        if isinstance(value, dict | list) and not fields[name].metadata["positional"]:
            raise UsageError(f"{path}: {name} must be one value, not {value}")
        if fields[name].metadata["positional"]:
            words[name] = tuple(value) if isinstance(value, list) else value
        elif isinstance(value, bool):
            flags.append(flag if value else flag.replace("--", "--no-", 1))
        else:
            flags.append(f"{flag}={value}")
    return flags, words


def load_toml(path: str, flag: str = "") -> dict[str, Any]:
    """What a TOML file holds. UsageError, which names the `flag` that named the file."""
    if os.path.isdir(path):
        raise UsageError(f"{flag}{path} is a folder: name a TOML file")
    try:
        with open(path, "rb") as file:
            return parse_toml(file.read())
    except OSError as error:
        raise UsageError(f"{flag}{path} cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise UsageError(f"{path} is no text: byte {error.start} is not UTF-8") from error
    except ValueError as error:
        raise UsageError(f"{path} is no TOML: {error}") from error
