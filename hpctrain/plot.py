"""``hpctrain plot RUN…|SWEEP``: accuracy and loss of one or many runs by epoch, as a figure.

Reads records only: no MPI, no torch, no display. A run may still be under way.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import TypeVar

from hpctrain.config import PlotConfig
from hpctrain.errors import UsageError
from hpctrain.report.figures import check_name, distinct_names, save
from hpctrain.report.find import find_folder, find_runs
from hpctrain.report.plot_confusion import Confusion, plot_confusion, read_confusion
from hpctrain.report.plot_data import Curves, read_curves
from hpctrain.report.plot_training import outcome, plot_training
from hpctrain.text import say

FILE = "training.png"
Found = TypeVar("Found")
CONFUSION = "-confusion"  # what the name of that figure has before its suffix


def main(settings: PlotConfig) -> int:
    """Write the figure, say where it is and what it shows."""
    if not settings.targets:
        raise UsageError("plot what? Name runs or a sweep")
    path = output_path(settings)
    check_name(path, "--output")
    folders = find_runs(settings.targets, settings.runs_dir)
    if not folders:
        raise UsageError(f"{settings.targets[0]}: none of its runs has begun yet")
    names = distinct_names(folders)
    pairs = zip(folders, names, strict=True)
    found = read_each([partial(read_run, folder, name) for folder, name in pairs])
    shown = [(folder, curves) for folder, curves in found if curves.shown]
    if not shown:
        verb = "has" if len(names) == 1 else "have"
        raise UsageError(f"{', '.join(names)} {verb} recorded nothing to plot yet")
    matrices: list[Confusion] = []
    if settings.confusion:
        named = [(folder, curves.name) for folder, curves in shown]
        matrices = read_each([partial(read_confusion, *each, settings.split) for each in named])
    tell([curves for _, curves in found])
    save(plot_training([curves for _, curves in shown]), path)
    accurate = any(curves.has_accuracy for _, curves in shown)
    say(f"{path}: {'accuracy and loss' if accurate else 'loss'} by epoch")
    if matrices:
        second = path.with_stem(path.stem + CONFUSION)
        save(plot_confusion(matrices), second)
        say(f"{second}: confusion matrix of the split {settings.split}")
    return 0


def read_run(folder: Path, name: str) -> tuple[Path, Curves]:
    """The curves of a run, and its folder. UsageError."""
    return folder, read_curves(folder, name)


def read_each(readers: Sequence[Callable[[], Found]]) -> list[Found]:
    """What they give; a line for each that cannot read. UsageError where none can."""
    found: list[Found] = []
    unreadable: list[UsageError] = []
    for read in readers:
        try:
            found.append(read())
        except UsageError as error:
            unreadable.append(error)
    if not found:
        raise unreadable[0]
    for line in unreadable:
        say(f"left out: {line}")
    return found


def output_path(settings: PlotConfig) -> Path:
    """Where the figure goes: beside the record of one run, or into the folder of all."""
    if settings.output:
        return Path(settings.output)
    if len(settings.targets) == 1:
        return find_folder(settings.targets[0], settings.runs_dir) / FILE
    return Path(settings.runs_dir) / FILE


def tell(networks: Sequence[Curves]) -> None:
    """A line for each network that has not simply done its work."""
    for network in networks:
        if not network.shown:
            say(f"{network.name}: left out, it has recorded nothing to plot yet")
        elif network.status != "done":
            say(f"{network.name}: {network.reason or outcome(network)}")
