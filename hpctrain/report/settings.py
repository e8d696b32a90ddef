"""Read what a run was begun with: its settings, ``config.toml``, and its plan, ``plan.json``.

Of a run on a set of files, ``files.json`` has numbers by which each of them is recognized. Each
command words the error for what it was about to do.
"""

from __future__ import annotations

import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from hpctrain.errors import UsageError
from hpctrain.plan import Plan, read_plan
from hpctrain.report.find import SETTINGS_FILE
from hpctrain.text import parse_json

PLAN_FILE = "plan.json"
DATA_FILE = "files.json"  # of a run on a set of files
T = TypeVar("T")


class UnreadableFile(UsageError):
    """A file of a run is missing or corrupt; `cause` is the error of reading or parsing it."""

    def __init__(self, path: Path, cause: Exception) -> None:
        text = f"is no {path.suffix[1:].upper()}: {cause}"
        if isinstance(cause, OSError):
            text = f"cannot be read: {cause.strerror}"
        super().__init__(f"{path} {text}")
        self.path = path
        self.cause = cause


def read_settings(folder: Path) -> dict[str, Any]:
    """Return the settings of the run in `folder`, as texts and numbers. Raises UnreadableFile."""
    return _read(folder / SETTINGS_FILE, lambda content: tomllib.loads(content.decode()))


def read_plan_of(folder: Path) -> Plan:
    """Return the plan of the run in `folder`. Raises UnreadableFile."""
    return _read(folder / PLAN_FILE, lambda content: read_plan(parse_json(content)))


def read_files_of(folder: Path) -> dict[str, list[int]]:
    """Return the `FileSet.table` of the run in `folder`. Raises UnreadableFile."""
    return _read(folder / DATA_FILE, lambda content: dict(parse_json(content)))


def _read(path: Path, parse: Callable[[bytes], T]) -> T:
    try:
        return parse(path.read_bytes())
    except (OSError, ValueError, RecursionError) as error:
        raise UnreadableFile(path, error) from error
