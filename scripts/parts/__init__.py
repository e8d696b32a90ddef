"""Judge the parts of other libraries: which hpctrain accepts, in hpctrain/config/parts.toml.

Each setting has a judge, a module beside this one (`JUDGES`), with

* ``candidates() -> dict[str, Any]``: classes by ``LIBRARY:Name``, all that a library has,
* ``judge(name) -> Verdict``: builds the class ``LIBRARY:Name`` with sample arguments, tries it, and
  says whether it is accepted.
* optionally ``sample(name)``: makes the part and calls it once, as a run would, for the test that
  no accepted part opens a file or a connection.
"""

from __future__ import annotations

import importlib
import json
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from hpctrain.config.parts import (
    MODULES,
    REGISTRIES,
    TABLE,
    NamesOfLibrary,
    Part,
    accepted_names,
    read_table,
)

JUDGES = {
    "augment": "transforms",
    "loss": "losses",
    "metric": "metrics",
    "optimizer": "optimizers",
    "model": "networks",
}
HEAD = """# Parts of other libraries, by setting and library: those that hpctrain accepts, a metric
# with the direction in which it is better, and those that it refuses, with the reason.
# Written by: python -m scripts.parts --update
"""


class Verdict(NamedTuple):
    """What a judge says of a name: accepted, unless there is a reason to refuse it."""

    refused: str = ""  # why, in a few words that follow "is refused: "
    direction: str = ""  # of an accepted metric: "max" or "min"; "" if it has none


Table = dict[tuple[str, str], NamesOfLibrary]  # by setting and library


def part_of(setting: str, name: str, kwargs: Mapping[str, Any], text: str = "") -> Part:
    """Return the part ``LIBRARY:Name`` with arguments, whatever the table says of it."""
    library, _, bare = name.partition(":")
    return Part(setting, text or name, library, bare, (), {**kwargs})


def accepted_parts(setting: str) -> list[str]:
    """Return the parts of a setting that the table accepts, as ``LIBRARY:Name``."""
    return [
        f"{library}:{name}"
        for library in MODULES[setting]
        for name in accepted_names(setting, library)
    ]


def judge_all(settings: Iterable[str] = JUDGES) -> Table:
    """Judge all candidates of some settings; other settings have the names of the file."""
    table = dict(read_table())
    for setting in settings:
        judge = importlib.import_module(f"{__name__}.{JUDGES[setting]}")
        for library in MODULES[setting]:
            if (setting, library) not in REGISTRIES:
                table[setting, library] = NamesOfLibrary({}, {})
        for name in judge.candidates():
            library, _, bare = name.partition(":")
            names = table[setting, library]
            verdict = judge.judge(name)
            if verdict.refused:
                names.refused[bare] = verdict.refused
            else:
                names.accepted[bare] = verdict.direction
    return table


def to_toml(table: Table) -> str:
    """Return the text of parts.toml."""
    text = HEAD
    for (setting, library), names in table.items():
        for kind, values in names._asdict().items():
            if values:
                text += f"\n[{setting}.{library}.{kind}]\n"
            for name in sorted(values, key=str.lower):
                text += f"{name} = {json.dumps(values[name])}\n"
    return text


def differences(table: Table) -> list[str]:
    """Return a line for each name of which a table and the file say something else."""
    lines = []
    for key, names in table.items():
        of_file = read_table()[key]
        for kind, judged, written in zip(names._fields, names, of_file, strict=True):
            for name in sorted({*judged, *written}, key=str.lower):
                if judged.get(name) != written.get(name):
                    was = f"{TABLE.name} {written.get(name)!r}, judged {judged.get(name)!r}"
                    lines.append(f"{':'.join(key)}:{name}, {kind}: {was}")
    return lines
