"""Sweeps for tests: of a text, in a folder, with a fake train command."""

from __future__ import annotations

import csv
import sys
from pathlib import Path

from hpctrain.sweep.display import SweepDisplay
from hpctrain.sweep.driver import Driver
from hpctrain.sweep.file import read_sweep
from hpctrain.sweep.folder import make_folder, settings_file
from hpctrain.sweep.machine import Slot

FAKE = Path(__file__).with_name("fake_train.py")


def make_driver(folder: Path, text: str, slots: int = 2, retry: bool = False) -> Driver:
    """A driver of the networks of `text` that launches the fake command."""
    file = folder.parent / "file.toml"
    file.write_text(text)
    sweep = read_sweep(file)
    make_folder(folder, file, sweep, str(folder.parent))

    def command(network):
        return [sys.executable, str(FAKE), str(settings_file(folder, network))]

    places = tuple(Slot(number, (), (f"g{number}",)) for number in range(1, slots + 1))
    return Driver(folder, sweep, places, command, SweepDisplay("plain"), retry)


def statuses(folder: Path) -> dict[str, str]:
    """Status by number, as results.csv tells."""
    with open(folder / "results.csv", newline="") as file:
        return {row["name"][:2]: row["status"] for row in csv.DictReader(file)}


def events(folder: Path) -> list[list[str]]:
    """What the fake command did: begin, notice or end, number, GPU."""
    path = folder / "events"
    return [line.split() for line in path.read_text().splitlines()] if path.exists() else []


def begun(folder: Path) -> list[str]:
    """Numbers of the networks that began, in order."""
    return [number for what, number, _ in events(folder) if what == "begin"]


if __name__ == "__main__":  # a driver of its own, to be killed: FOLDER SLOTS
    place = Path(sys.argv[1])
    sys.exit(make_driver(place, (place.parent / "file.toml").read_text(), int(sys.argv[2])).run())
