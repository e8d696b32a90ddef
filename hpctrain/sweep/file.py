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
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hpctrain.config import Config, check_settings, from_table, load_toml
from hpctrain.errors import UsageError, did_you_mean

MOST = 10_000  # networks
LONGEST_NAME = 80  # characters
TABLES = ("base", "grid", "variant")
OWNED = ("run", "runs_dir", "resume", "progress", "dry_run")  # set by the sweep itself
Table = dict[str, Any]


@dataclass(frozen=True)
class SweepNetwork:
    """One network of a sweep: an ordinary run, named `name` in the sweep's folder."""

    number: int  # 1, 2, ...
    name: str
    config: Config


@dataclass(frozen=True)
class Sweep:
    """All networks of a sweep, in order."""

    networks: tuple[SweepNetwork, ...]
    differing: tuple[str, ...]  # settings in which they may differ


def read_sweep(path: Path) -> Sweep:
    """Read the networks of a sweep from its file.

    Raises UsageError, one line that names the file, for settings that train would refuse with any
    data and any number of ranks, and for more than `MOST` networks.
    """
    tables = load_toml(str(path))
    for key, content in tables.items():
        if key not in TABLES:
            raise UsageError(f"{path}: there is no table {key!r}{did_you_mean(key, TABLES)}")
        if not isinstance(content, list if key == "variant" else dict):
            header = "[[variant]]" if key == "variant" else f"[{key}]"
            raise UsageError(f"{path}: {key} must be a table, {header}")
    base = _settings(tables.get("base", {}), Config(), f"{path}, [base]")
    points = _grid(tables.get("grid"), path)
    given: list[tuple[str, str, Table]] = [("", "[grid]", point) for point in points]
    for number, (name, table) in enumerate(_variants(tables.get("variant", []), path), start=1):
        given.append((name or "", f"[[variant]] {name or number}", table))
    if not given:
        raise UsageError(f"{path}: there is no network: give a [grid] or at least one [[variant]]")
    if len(given) > MOST:
        raise UsageError(f"{path}: {len(given):,} networks are more than {MOST:,}")
    networks: dict[Config, SweepNetwork] = {}
    digits = max(2, len(str(len(given))))
    for number, (name, where, table) in enumerate(given, start=1):
        config = _settings(table, base, f"{path}, {where}")
        settings = {key: config.table()[key] for key in table}
        folder = f"{number:0{digits}}-{folder_name(settings, name)}"
        try:
            check_settings(config)
        except UsageError as error:
            raise UsageError(f"{path}, network {folder}: {error}") from error
        if config in networks:
            raise UsageError(f"{path}: {networks[config].name} and {folder} have the same settings")
        networks[config] = SweepNetwork(number, folder, config)
    differing = dict.fromkeys(key for _, _, table in given for key in table)
    return Sweep(tuple(networks.values()), tuple(differing))


def _variants(tables: list[Any], path: Path) -> list[tuple[str | None, Table]]:
    """Return the name (or None) and the settings of each variant."""
    found: list[tuple[str | None, Table]] = []
    for table in tables:
        if not isinstance(table, dict):
            raise UsageError(f"{path}: each variant must be a table, [[variant]]")
        name = table.get("name")
        if name is not None and (not isinstance(name, str) or not name.strip()):
            raise UsageError(f"{path}: the name of a variant must be a text, not {name!r}")
        if name in [other for other, _ in found if other]:
            raise UsageError(f"{path}: two variants have the name {name!r}")
        found.append((name, {key: value for key, value in table.items() if key != "name"}))
    return found


def _settings(table: Table, base: Config, place: str) -> Config:
    """Return `base` with the settings of a table. Raises UsageError if one is unknown or wrong."""
    if owned := [key for key in table if key in OWNED]:
        raise UsageError(f"{place}: {owned[0]} is set by the sweep itself")
    return from_table(table, base, place)


def _grid(table: Table | None, path: Path) -> list[Table]:
    """Return all combinations, in which the last setting varies fastest; empty without a grid."""
    if table is None:
        return []
    if not table:
        raise UsageError(f"{path}: the [grid] is empty: give lists of settings")
    for key, values in table.items():
        if not isinstance(values, list) or not values:
            raise UsageError(f"{path}, [grid]: {key} must be a list of values, not {values}")
    if (count := math.prod(map(len, table.values()))) > MOST:
        raise UsageError(f"{path}: {count:,} combinations are more than {MOST:,}")
    points = itertools.product(*table.values())
    return [dict(zip(table, point, strict=True)) for point in points]


def folder_name(settings: Table, name: str) -> str:
    """Return the name of a network, else its settings as "optimizer=adam,lr=0.01".

    The result has only characters that need no quoting in a shell.
    """
    text = name or ",".join(f"{key}={_short(value)}" for key, value in settings.items()) or "base"
    return re.sub(r"[^A-Za-z0-9._=,+:@-]+", "_", text)[:LONGEST_NAME].rstrip(".,=")


def _short(value: Any) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    text = f"{value:g}" if isinstance(value, float) else str(value)
    return text.rstrip("/").rpartition("/")[2]
