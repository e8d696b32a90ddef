"""``hpctrain plot RUN…|SWEEP``: accuracy and loss of one or many runs by epoch, as a figure.

Reads records only: no MPI, no torch, no display. A run may still be under way.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import TypeVar

from hpctrain.config import PlotConfig
from hpctrain.errors import UsageError
from hpctrain.report.figures import (
    check_name,
    distinct_names,
    plot_confusion,
    read_confusion,
    save,
)
from hpctrain.report.find import find_run_or_sweep, find_runs
from hpctrain.report.plot_training import RunCurves, plot_training, read_curves, summary
from hpctrain.text import say

FILE = "training.png"
CONFUSION = "-confusion"  # what the name of that figure has before its suffix
T = TypeVar("T")
Found = TypeVar("Found")


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
    found = read_each(lambda pair: (pair[0], read_curves(*pair)), pairs)
    shown = [(folder, curves) for folder, curves in found if curves.panels]
    if not shown:
        verb = "has" if len(names) == 1 else "have"
        raise UsageError(f"{', '.join(names)} {verb} recorded nothing to plot yet")
    matrices = []
    if settings.confusion:
        matrices = read_each(
            lambda each: read_confusion(each[0], each[1].name, settings.split), shown
        )
    say_what_is_not_done([curves for _, curves in found])
    save(plot_training([curves for _, curves in shown]), path)
    accurate = any("accuracy" in curves.panels for _, curves in shown)
    say(f"{path}: {'accuracy and loss' if accurate else 'loss'} by epoch")
    if matrices:
        second = path.with_stem(path.stem + CONFUSION)
        save(plot_confusion(matrices), second)
        say(f"{second}: confusion matrix of the split {settings.split}")
    return 0


def read_each(read: Callable[[T], Found], items: Iterable[T]) -> list[Found]:
    """What `read` makes of each item; a line for each that it cannot read. UsageError where it can
    read none.
    """
    found: list[Found] = []
    unreadable: list[UsageError] = []
    for item in items:
        try:
            found.append(read(item))
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
        return find_run_or_sweep(settings.targets[0], settings.runs_dir) / FILE
    return Path(settings.runs_dir) / FILE


def say_what_is_not_done(networks: Sequence[RunCurves]) -> None:
    """A line for each network whose run is not simply done."""
    for network in networks:
        if not network.panels:
            say(f"{network.name}: left out, it has recorded nothing to plot yet")
        elif network.status != "done":
            say(f"{network.name}: {network.reason or summary(network)}")
