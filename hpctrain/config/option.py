"""A setting: a field of a frozen dataclass that is a flag and a TOML key at once."""

from __future__ import annotations

import dataclasses
import json
import shlex
from collections.abc import Sequence
from typing import Any


def option(
    default: Any, help: str, group: str, choices: tuple[str, ...] = (), positional: bool = False
) -> Any:
    """A dataclass field that is also a flag: its help, the group it is listed in, its choices."""
    metadata = {"help": help, "group": group, "choices": choices, "positional": positional}
    return dataclasses.field(default=default, metadata=metadata)


def to_toml(config: Any) -> str:
    """All settings as TOML; one that is left to the plan stands as a comment."""
    lines = []
    for field in dataclasses.fields(config):
        value = getattr(config, field.name)
        if value is None:
            lines.append(f"# {field.name}: not set, decided by the plan")
        else:
            lines.append(f"{field.name} = {toml_value(value)}")
    return "\n".join(lines) + "\n"


def as_words(settings: Any, without: Sequence[str] = ()) -> list[str]:
    """The words of a command line that give `settings`, but for the fields named in `without`."""
    words: list[str] = []
    flags: list[str] = []
    for field in dataclasses.fields(settings):
        value, flag = getattr(settings, field.name), "--" + field.name.replace("_", "-")
        if value == field.default or field.name in without:
            continue
        if field.metadata["positional"]:
            words += [value] if isinstance(value, str) else value  # argparse gives a list
        elif isinstance(value, bool):
            flags.append(flag if value else flag.replace("--", "--no-", 1))
        else:
            flags.append(f"{flag}={value}")
    return words + flags


def command_line(*words: str) -> str:
    """What to type for hpctrain to get these words."""
    return shlex.join(["python", "-m", "hpctrain", *words])


def toml_value(value: Any) -> str:
    """A bool, a number, a text or a list of these, as TOML has it: text as in JSON, but for
    surrogates and DEL.
    """
    if isinstance(value, float):
        return repr(value)  # inf and nan too
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
