"""The watched runs: the state, the curves and the stopping of each.

A thread reads the records, as long ones take seconds; displays show what has been read so far.
"""

from __future__ import annotations

import math
import os
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

from hpctrain.errors import Failure, UsageError
from hpctrain.heartbeat import BEAT_EVERY, HEARTBEATS, beat_file, is_gone, read_beat
from hpctrain.outcome import Status
from hpctrain.report import find
from hpctrain.report.display import state_lines
from hpctrain.report.history import History, Point
from hpctrain.report.metrics import Metrics, metrics_of
from hpctrain.stop import stop_run
from hpctrain.text import duration, percent, rate, rough_duration
from hpctrain.training.control import STOP_FILE

GRACE = 10.0  # seconds without change that are always tolerated
OVERDUE = 3.0  # times the longest usual interval, in addition
IN_STEP = ("waiting for all", "step ", "recording step", "reading for step")  # in heartbeats
POLL_EVERY = 2.0  # seconds: 100 runs take 4 % of a core
CAN_BE_STOPPED = (Status.WAITING, Status.RUNNING, Status.SILENT)
COLUMNS = ("run", "status", "done", "validation", "best", "test", "images/s")

State = dict[str, Any]  # all that is shown of a run but its curves, see `WatchedRun`
Cell = tuple[str, Any]  # of a table: a text, and the value by which rows are sorted
Shown = tuple[list[str], list[State]]  # the columns and the rows of the table
Curves = dict[str, dict[str, list[Point]]]  # by metric and split


class Condition(NamedTuple):
    """How a run is doing."""

    status: str  # a `Status`, or the text of a record
    text: str  # a line for the user


class WatchedRun:
    """One run: its history, and its state; the cells in it are those of `COLUMNS`."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.name = folder.name
        self.history = History(folder, "sampled")
        self._lock = threading.RLock()  # of the history
        self._seen: dict[str, tuple[Any, float]] = {}  # states, and since when
        self._curves: tuple[int, Curves] = -1, {}
        self.state = self._describe(Condition(Status.WAITING, "not read yet"))

    def poll(self) -> None:
        """Read new lines of the record and update the state."""
        with self._lock:
            self.history.follow()
            self.state = self._describe(self._find_status(self.history))

    def _describe(self, condition: Condition) -> State:
        history = self.history
        costs = history.costs()
        done = None
        if history.total_steps:
            done = history.step.get("step", 0) / history.total_steps
        last = metrics_of(history.evaluated.get("validation", {}), history.figures)
        best = history.best(last.first_known.name)
        return {
            "key": str(self.folder),
            "name": self.name,
            "status": condition.status,
            "text": condition.text,
            "can_be_stopped": condition.status in CAN_BE_STOPPED,
            "version": history.version,
            "cells": [
                cell(self.name, str),
                cell(condition.status, str),
                cell(done, percent),
                *map(metrics_cell, (last, best, history.test)),
                cell(costs.get("images_per_second"), rate),
            ],
            "facts": list(state_lines(history, costs)),
            "notes": list(history.recent_notes),
            "settings": history.facts.get("settings") or {},
        }

    def _idle(self, what: str, state: Any, written: float | None) -> float:
        """Return the seconds since the state of `what` changed, by the clock of this process.

        Only the first one counts from the time `written` in it, perhaps by another machine's clock.
        """
        now = time.monotonic()
        if what not in self._seen:
            age = max(time.time() - (written or math.inf), 0.0)
            self._seen[what] = (state, now - age)
        before, since = self._seen[what]
        if before == state:
            return now - since
        self._seen[what] = (state, now)
        return 0.0

    def _find_status(self, history: History) -> Condition:
        """Return how the run is doing, by its folder, its record and the heartbeat of rank 0."""
        if history.problem and not history.lost:
            return Condition(Status.FAILED, history.problem)
        if not os.path.isdir(self.folder):  # False if the file system does not answer
            proposal = find.propose_run(self.folder.name, str(self.folder.parent))
            return Condition(Status.PENDING, f"waiting for {self.folder}{proposal}")
        silence = self._idle("record", history.version, history.launch.latest)
        outcome = history.launch.outcome
        if outcome.status:
            return Condition(outcome.status, outcome.line)
        return self._find_status_without_end(history, silence)

    def _find_status_without_end(self, history: History, silence: float) -> Condition:
        """Return how the run is doing whose record has no end, and is unchanged for `silence` s."""
        overdue = GRACE + OVERDUE * history.longest_interval()
        testing = history.step.get("step") == history.total_steps  # all steps are completed
        beat = None
        beaten = math.inf
        if silence > overdue / 2 or testing or not history.step:
            beat = read_beat(beat_file(self.folder / HEARTBEATS, 0))
        if beat:
            beaten = self._idle("heartbeat", beat.time, beat.time)
            if is_gone(beat) or beaten > overdue:
                outcome = history.outcome()
                if outcome.status:
                    return Condition(outcome.status, outcome.line)
        if beaten > GRACE + OVERDUE * max(BEAT_EVERY, (history.facts.get("ranks") or 1) / 20):
            beat = None
        if silence > overdue and (beat is None or beat.doing.startswith(IN_STEP)):
            where = f", rank 0 is in: {beat.doing}" if beat else ""
            return Condition(Status.SILENT, f"silent for {rough_duration(silence)}{where}")
        if os.path.isfile(self.folder / STOP_FILE):
            return Condition(Status.STOPPING, "asked to stop")
        status = Status.RUNNING if history.facts or history.step else Status.WAITING
        if beat and (silence > overdue or (testing and "evaluation" in beat.doing)):
            text = f"running: {beat.doing} for {duration(beat.seconds + beaten)}"
        elif not history.step:
            text = "starting" if history.facts else "not begun yet"
        else:
            left = history.seconds_left()
            text = f"running, {duration(left)} left" if left else "running"
        return Condition(status, text)

    def stop(self) -> str:
        """Ask the run to stop, unless it has ended. Return a message for the user."""
        self.poll()
        if not self.state["can_be_stopped"]:
            return f"{self.name}: {self.state['text']}"
        try:
            return stop_run(self.folder)
        except Failure as error:
            return str(error)

    def curves(self) -> tuple[int, Curves]:
        """Return the curves of the run's figures, and their version; in a poll the last ones."""
        if self._lock.acquire(timeout=0.1):
            try:
                version, _ = self._curves
                if version != self.history.version:
                    names = dict.fromkeys(["loss", *self.history.figures])
                    curves = {name: self._curves_of(name) for name in names}
                    self._curves = (self.history.version, curves)
            finally:
                self._lock.release()
        return self._curves

    def _curves_of(self, name: str) -> dict[str, list[Point]]:
        """Return the curve of a figure in each split that has one."""
        splits = ("training", *self.history.evaluated)
        curves = {split: self.history.curve(name, split) for split in splits}
        return {split: points for split, points in curves.items() if points}


def cell(value: Any, text_of: Callable[[Any], str]) -> Cell:
    """Return a cell: large numbers come first, then texts, then what is unknown and thus empty."""
    if value is None:
        return "", (2, 0)
    if isinstance(value, int | float):
        return text_of(value), (0, -value)
    return text_of(value), (1, str(value))


def metrics_cell(metrics: Metrics) -> Cell:
    """Return the cell of the first figure that is known: the best ones come first."""
    figure = metrics.first_known
    if figure.value is None:
        return cell(None, str)
    return figure.text, (0, -figure.score)


class WatchedRuns:
    """All runs that `targets` name, including those that begin later, alone or in a sweep."""

    def __init__(self, targets: Sequence[str], runs_dir: str) -> None:
        """Find the runs. Raises UsageError if a folder is neither a run nor a sweep."""
        self._targets = targets
        self._runs_dir = runs_dir
        self.all: dict[str, WatchedRun] = {}  # by folder, in the order of the targets
        self._find()

    def table(self, sort: int = -1) -> Shown:
        """Return the table as last polled, sorted by the column of this number, if there is one.

        The settings that differ between the runs are columns, too; at their default they are empty.
        """
        states = [run.state for run in self.all.values()]
        recorded = [state["settings"] for state in states if state["settings"]]
        names = dict.fromkeys(name for settings in recorded for name in settings)
        differing = [
            name for name in names if len({str(settings.get(name)) for settings in recorded}) > 1
        ]
        rows = []
        for state in states:
            more = [cell(state["settings"].get(name), str) for name in differing]
            rows.append(state | {"cells": [*state["cells"], *more]})
        columns = [*COLUMNS, *differing]
        if 0 <= sort < len(columns):
            rows.sort(key=lambda row: row["cells"][sort][1])
            columns[sort] += " ↓"
        return columns, rows

    def follow(self) -> None:
        """Poll every `POLL_EVERY` seconds: what a thread does."""
        while True:
            self.poll()
            time.sleep(POLL_EVERY)

    def poll(self) -> None:
        """Look for new runs, and poll all runs."""
        with suppress(UsageError, OSError):  # a folder is gone: the status of its run shows it
            self._find()
        for run in self.all.values():
            run.poll()

    def _find(self) -> None:
        folders: list[Path] = []
        for target in self._targets:
            try:
                folder = find.find_folder(target, self._runs_dir)
            except UsageError:
                folder = Path(self._runs_dir) / target  # it is waited for
                if os.path.exists(folder) or os.path.exists(target):
                    raise
            folders += find.sweep_runs(folder)
        self.all = {str(path): self.all.get(str(path)) or WatchedRun(path) for path in folders}
        places = [Path(key).absolute() for key in self.all]  # a link keeps its name
        names = find.distinct_names(places)
        for run, name in zip(self.all.values(), names, strict=True):
            run.name = name
