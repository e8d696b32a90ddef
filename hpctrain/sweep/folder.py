"""The folder of a sweep: which one, and what lies in it.

sweep.toml              a copy of the file; marks the folder as a sweep's
01-lr=0.1.toml          the settings of a network, as train --config takes them
01-lr=0.1.log           what its ranks printed
01-lr=0.1/              its run
results.csv             how all of them stand
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Iterator
from pathlib import Path

from hpctrain.config import Config, SweepConfig, toml_value
from hpctrain.errors import RunError, UsageError
from hpctrain.files import write_whole
from hpctrain.report.find import SWEEP_FILE, find_run_or_sweep
from hpctrain.sweep.drive import not_ended, read_rows
from hpctrain.sweep.file import Network, Networks


def sweep_file(settings: SweepConfig) -> tuple[Path, Path | None]:
    """The file of the networks, and the sweep's folder where one was named. UsageError."""
    if settings.file is None:
        raise UsageError("sweep what? Name a TOML file of networks")
    path = Path(settings.file)
    if path.is_file():
        return path, None
    if path.suffix == ".toml":
        raise UsageError(f"there is no file {path}")
    folder = find_run_or_sweep(settings.file, settings.runs_dir)
    if not (folder / SWEEP_FILE).is_file():
        raise UsageError(f"{folder} is a run, not a sweep")
    if settings.name is not None:
        raise UsageError(f"--name goes with a file of networks; {folder} has its name")
    return folder / SWEEP_FILE, folder


def choose_folder(settings: SweepConfig, file: Path, networks: Networks) -> tuple[Path, bool]:
    """The folder of the sweep, and whether it is there: by --name; else the newest of the same file
    that has not ended; else a new one, named by the time. UsageError for a name of another sweep.
    """
    runs, text = Path(settings.runs_dir), file.read_bytes()
    if settings.name is None:
        for folder in sorted(runs.glob("*-sweep*"), reverse=True):
            same = (folder / SWEEP_FILE).is_file() and (folder / SWEEP_FILE).read_bytes() == text
            if same and not_ended(read_rows(folder, networks, settings.retry)):
                return folder, True
        return next(folder for folder in _new(runs) if not folder.exists()), False
    folder = runs / settings.name
    if not folder.exists():
        return folder, False
    if not (folder / SWEEP_FILE).is_file():
        raise UsageError(f"{folder} exists and is no sweep: choose another --name")
    if (folder / SWEEP_FILE).read_bytes() != text:
        raise UsageError(
            f"the sweep {folder} was begun with another file than {file}: choose another --name"
        )
    return folder, True


def _new(runs: Path) -> Iterator[Path]:
    base = f"{time.strftime('%Y%m%d-%H%M%S')}-sweep"
    yield runs / base
    yield from (runs / f"{base}-{number}" for number in range(2, 1000))


def make_folder(folder: Path, file: Path, networks: Networks, runs_dir: str) -> None:
    """Write what the runs need; sweep.toml comes last, and once. RunError."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for network in networks.all:
            path = settings_file(folder, network)
            text = network_toml(network, folder, runs_dir)
            if not path.exists() or path.read_text() != text:
                write_whole(path, text)
        if not (folder / SWEEP_FILE).exists():
            write_whole(folder / SWEEP_FILE, file.read_bytes())
    except OSError as error:
        raise RunError(f"cannot write {folder}: {error.strerror}") from error


def settings_file(folder: Path, network: Network) -> Path:
    """What train --config gets of a network."""
    return folder / f"{network.name}.toml"


def network_toml(network: Network, folder: Path, runs_dir: str) -> str:
    """The settings of a network as TOML. A run that --init names is one of `runs_dir`."""
    own: dict[str, object] = {"run": network.name, "runs_dir": str(folder), "progress": "plain"}
    init = network.config.init
    if init is not None and (Path(runs_dir) / init).exists():
        own["init"] = str(Path(runs_dir) / init)
    defaults = Config()
    for field in dataclasses.fields(Config):
        value = getattr(network.config, field.name)
        if value != getattr(defaults, field.name):
            own.setdefault(field.name, value)
    return "".join(f"{name} = {toml_value(value)}\n" for name, value in own.items())
