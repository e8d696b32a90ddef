"""Read the networks of a sweep from ``sweep.toml`` and check their settings.

[base]                         # settings of train that are common to all networks
data = "digits"
[grid]                         # every combination of these values is a network
optimizer = ["sgdm", "adam"]
lr = [0.01, 0.001]
[[variant]]                    # each variant is a network, too
name = "wide"                  # optional
model = "mynets:wide"
"""

from __future__ import annotations

import itertools
import math
import re
from pathlib import Path
from types import NoneType
from typing import Any, NamedTuple

from hpctrain.config import Config, from_table, load_toml
from hpctrain.errors import UsageError

MOST = 10_000  # networks
LONGEST_NAME = 80  # characters
TABLES = {
    "base": dict,
    "grid": dict,
    "variant": list,
}
SET_BY_SWEEP = (
    "run",
    "runs_dir",
    "resume",
    "progress",
    "dry_run",
)


class SweepNetwork(NamedTuple):
    """One network of a sweep: an ordinary run, named `name` in the sweep's folder."""

    number: int  # 1, 2, ...
    name: str
    config: Config


class GivenNetwork(NamedTuple):
    """One network as the file gives it."""

    place: str  # in the file
    name: str  # empty without one
    settings: dict[str, Any]  # besides those of [base]


def read_sweep(path: Path) -> list[SweepNetwork]:
    """Read the networks of a sweep: first those of the grid, whose last setting varies fastest.

    Raises UsageError, one line that names the file, for settings that train would refuse with any
    data and any number of ranks, and for more than `MOST` networks.
    """
    tables = load_toml(str(path))
    for key, content in tables.items():
        is_table = isinstance(content, TABLES.get(key, NoneType))
        if not is_table or (key == "variant" and not all(isinstance(t, dict) for t in content)):
            raise UsageError(f"{path}: {key}: write tables [base] and [grid], and [[variant]]")
    grid = tables.get("grid", {})
    variants = tables.get("variant", [])
    for key, values in grid.items():
        if not isinstance(values, list) or not values:
            raise UsageError(f"{path}, [grid]: {key} must be a list of values, not {values}")
    count = len(variants)
    if grid:
        count += math.prod(map(len, grid.values()))
    if not 0 < count <= MOST:
        limits = f"there must be one, in a [grid] or a [[variant]], and at most {MOST:,}"
        raise UsageError(f"{path}: {count:,} networks; {limits}")
    given: list[GivenNetwork] = []
    if grid:
        for point in itertools.product(*grid.values()):
            settings = dict(zip(grid, point, strict=True))
            given.append(GivenNetwork("[grid]", "", settings))
    names: set[str] = set()
    for table in variants:
        name = table.pop("name", "")
        if not isinstance(name, str) or (name and name in names):
            raise UsageError(f"{path}: the name of a variant must be a text of its own: {name!r}")
        names.add(name)
        given.append(GivenNetwork("[[variant]]", name, table))
    base = apply_settings(tables.get("base", {}), Config(), f"{path}, [base]")
    networks: dict[Config, SweepNetwork] = {}
    digits = max(2, len(str(count)))
    for number, network in enumerate(given, start=1):
        config = apply_settings(network.settings, base, f"{path}, {network.place}")
        table = config.table()
        settings = {key: table[key] for key in network.settings}
        folder = f"{number:0{digits}}-{folder_name(settings, network.name)}"
        try:
            config.check_conflicts()
        except UsageError as error:
            raise UsageError(f"{path}, network {folder}: {error}") from error
        if config in networks:
            raise UsageError(f"{path}: {networks[config].name} and {folder} have the same settings")
        networks[config] = SweepNetwork(number, folder, config)
    return list(networks.values())


def apply_settings(table: dict[str, Any], base: Config, place: str) -> Config:
    """Return `base` with the settings of a table. Raises UsageError if one is unknown or wrong."""
    for key in table:
        if key in SET_BY_SWEEP:
            raise UsageError(f"{place}: {key} is set by the sweep itself")
    return from_table(table, base, place)


def folder_name(settings: dict[str, Any], name: str) -> str:
    """Return the name of a network, else its settings as "optimizer=adam,lr=0.01".

    The result has only characters that need no quoting in a shell.
    """
    texts = []
    for key, value in settings.items():
        if isinstance(value, bool):
            text = "yes" if value else "no"
        elif isinstance(value, float):
            text = f"{value:g}"
        elif isinstance(value, list):
            text = "+".join(value)
        else:
            text = str(value)
        texts.append(f"{key}={text.rstrip('/').rpartition('/')[2]}")
    text = name or ",".join(texts) or "base"
    return re.sub(r"[^A-Za-z0-9._=,+:@-]+", "_", text)[:LONGEST_NAME].rstrip(".,=")
