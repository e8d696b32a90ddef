"""``sweep.toml`` -> the networks of a sweep, every one of them checked.

[base]                         # settings of train that all networks share
data = "digits"
[grid]                         # every combination of these is a network
optimizer = ["sgdm", "adam"]
lr = [0.01, 0.001]
[[variant]]                    # and each of these is one
name = "wide"                  # may be left out
model = "mynets:wide"
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hpctrain.config import Config, check_settings, load_toml, read_table, toml_value
from hpctrain.errors import UsageError, did_you_mean
from hpctrain.sweep.names import folder_name

MOST = 10_000
TABLES = ("base", "grid", "variant")
OWNED = ("run", "runs_dir", "resume", "progress", "dry_run")  # settings that a sweep makes itself


@dataclass(frozen=True)
class Network:
    """One network of a sweep: an ordinary run, named `name` in the sweep's folder."""

    number: int  # 1, 2, ...
    name: str
    config: Config
    toml: str  # its settings, but for run and runs_dir

    @property
    def imported(self) -> str | None:
        """The function that its model is, if it is none of hpctrain's own."""
        model = self.config.model
        return model if model and ":" in model else None


@dataclass(frozen=True)
class Networks:
    """All networks of a sweep, in order."""

    all: tuple[Network, ...]
    differing: tuple[str, ...]  # settings in which they may differ

    def imported(self) -> list[str]:
        """The functions that models are, each once."""
        return list(dict.fromkeys(n.imported for n in self.all if n.imported))

    def with_names(self) -> dict[str, Network]:
        """The networks by their names."""
        return {network.name: network for network in self.all}


def read_networks(path: Path) -> Networks:
    """The networks that a file asks for. Raises UsageError, one line that names the file, for
    anything that train would refuse whatever the data and the ranks, and for too many.
    """
    tables = load_toml(str(path))
    for key, content in tables.items():
        if key not in TABLES:
            raise UsageError(f"{path}: there is no table {key!r}{did_you_mean(key, TABLES)}")
        if not isinstance(content, list if key == "variant" else dict):
            header = "[[variant]]" if key == "variant" else f"[{key}]"
            raise UsageError(f"{path}: {key} must be a table, {header}")
    base = _settings(tables.get("base", {}), path, "[base]")
    grid = _grid(tables.get("grid"), path)
    variants = [_split(v, path) for v in tables.get("variant", [])]
    given: list[tuple[str | None, dict[str, Any]]] = [(None, point) for point in grid]
    for number, (name, table) in enumerate(variants, start=1):
        given.append((name, _settings(table, path, f"[[variant]] {name or number}")))
    if not given:
        raise UsageError(f"{path}: there is no network: give a [grid] or at least one [[variant]]")
    if len(given) > MOST:
        raise UsageError(f"{path}: {len(given):,} networks are more than {MOST:,}")
    names = [name for name, _ in given if name]
    if twice := next((name for name in names if names.count(name) > 1), None):
        raise UsageError(f"{path}: two variants have the name {twice!r}")
    keys = tuple(dict.fromkeys(key for _, point in given for key in point))
    networks = tuple(
        _network(number, len(given), name, point, base, path)
        for number, (name, point) in enumerate(given, start=1)
    )
    _refuse_equal(networks, path)
    return Networks(networks, keys)


def _split(variant: Any, path: Path) -> tuple[str | None, dict[str, Any]]:
    """A variant's name and its settings."""
    if not isinstance(variant, dict):
        raise UsageError(f"{path}: each variant must be a table, [[variant]]")
    name = variant.get("name")
    if name is not None and (not isinstance(name, str) or not name.strip()):
        raise UsageError(f"{path}: the name of a variant must be a text, not {name!r}")
    return name, {key: value for key, value in variant.items() if key != "name"}


def _settings(table: dict[str, Any], path: Path, where: str) -> dict[str, Any]:
    """The settings of a table, each of its type. UsageError."""
    place = f"{path}, {where}"
    if owned := [key for key in table if key in OWNED]:
        raise UsageError(f"{place}: {owned[0]} is set by the sweep itself")
    return read_table(table, Config, place)


def _grid(table: dict[str, Any] | None, path: Path) -> list[dict[str, Any]]:
    """All combinations, the last setting running fastest; none without a grid."""
    if table is None:
        return []
    if not table:
        raise UsageError(f"{path}: the [grid] is empty: give lists of settings")
    for key, values in table.items():
        if not isinstance(values, list) or not values:
            raise UsageError(f"{path}, [grid]: {key} must be a list of values, not {values}")
    if (count := math.prod(map(len, table.values()))) > MOST:
        raise UsageError(f"{path}: {count:,} combinations are more than {MOST:,}")
    axes = [
        [_settings({key: value}, path, "[grid]")[key] for value in values]
        for key, values in table.items()
    ]
    return [dict(zip(table, point, strict=True)) for point in itertools.product(*axes)]


def _network(
    number: int,
    count: int,
    name: str | None,
    given: dict[str, Any],
    base: dict[str, Any],
    path: Path,
) -> Network:
    settings = {**base, **given}
    config = dataclasses.replace(Config(), **settings)
    folder = folder_name(number, count, given, name)
    try:
        check_settings(config)
    except UsageError as error:
        raise UsageError(f"{path}, network {folder}: {error}") from error
    return Network(number, folder, config, _toml(settings))


def _toml(settings: dict[str, Any]) -> str:
    return "".join(f"{key} = {toml_value(value)}\n" for key, value in settings.items())


def _refuse_equal(networks: tuple[Network, ...], path: Path) -> None:
    seen: dict[Config, str] = {}
    for network in networks:
        if network.config in seen:
            other = seen[network.config]
            raise UsageError(f"{path}: {other} and {network.name} have the same settings")
        seen[network.config] = network.name
