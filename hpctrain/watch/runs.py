"""The watched runs: what is displayed of each, its curves, and whether it is alive.

Whether a run is alive is judged by its record, the heartbeats of its ranks, and how long neither
has changed. `WatchedRuns.follow` reads the records in a thread, because long ones take seconds: the
displays show what has been read so far.
"""

from __future__ import annotations

import math
import threading
import time
import tomllib
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

from hpctrain.errors import UsageError
from hpctrain.report.find import SETTINGS_FILE, distinct_names, find_runs, propose_run
from hpctrain.report.history import History, Outcome, number, time_of
from hpctrain.stop import ask
from hpctrain.text import duration, printable, rough_duration
from hpctrain.training.control import STOP_FILE
from hpctrain.watch.table import Summary, cells, facts, notes, progress
from hpctrain.watchdog import BEAT_EVERY, HEARTBEATS, is_gone, read_beat

GRACE = 10.0  # seconds without change that are always tolerated
OVERDUE = 3.0  # times the longest usual interval, in addition
FIND_CAUSE_EVERY = 10.0  # seconds between searches for the reason why a run ended
FIND_RUNS_EVERY = 5.0  # seconds between searches for new runs of a sweep
IN_STEP = ("waiting for all", "step ", "recording step", "reading for step")  # in heartbeats
LONGEST_TEXT = 500  # characters
POLL_EVERY = 1.0  # seconds
OWN = {
    "run",
    "runs_dir",
    "cache_dir",
    "resume",
    "progress",
    "dry_run",
    "time_limit",
    "hang_timeout",
}


class Status(NamedTuple):
    """The state of a run: one word, and a line for the user."""

    kind: str  # pending, waiting, running, stopping, silent, done, stopped, preempted, failed
    text: str


class IdleTimer:
    """Measures how long a state has not changed, by the clock of this process.

    Only for the first state seen, it starts from the time written in the state, which may be from
    another machine's clock.
    """

    def __init__(self) -> None:
        self._state: Any = None
        self._since = 0.0

    def seconds(self, state: Any, written: float | None) -> float:
        """Return the seconds since `state` changed; for the first one, since `written`."""
        now = time.monotonic()
        if self._state is None:
            self._since = now - max(time.time() - written, 0.0) if written else now
        elif state != self._state:
            self._since = now
        self._state = state
        return now - self._since


def ended(outcome: Outcome) -> Status:
    """Return the status of a run that has ended."""
    reason = (outcome.reason or "").partition("\n")[0]
    return Status(outcome.status, f"{outcome.status}: {reason}" if reason else outcome.status)


class WatchedRun:
    """One run: its history, its status, and `summary`, all that is displayed but its curves."""

    def __init__(self, key: int, folder: Path, proposal: str = "") -> None:
        """`proposal` is a text ", did you mean X?" to show while there is no such folder."""
        self.key, self.folder, self.name = key, folder, folder.name
        self._proposal = proposal
        self.history = History(folder, "sampled")
        self.status = Status("waiting", "not read yet")
        self.lock = threading.RLock()  # of the history
        self._record, self._beat = IdleTimer(), IdleTimer()
        self._outcome = Outcome()  # by the last search for the reason
        self._looked = -math.inf
        self._settings: dict[str, Any] = {}
        self.summary = self._summarize()

    @property
    def is_absent(self) -> bool:
        """Whether the folder of the run does not exist."""
        return not self.folder.is_dir()

    def poll(self) -> None:
        """Read new lines of the record and update the status and the summary."""
        with self.lock:
            self.history.follow()
            if self.history.problem and not self.history.lost:
                self.status = Status("failed", self.history.problem)
            elif self.is_absent:
                self.status = Status("pending", f"waiting for {self.folder}{self._proposal}")
            else:
                self.status = self._find_status(self.history)
            self.summary = self._summarize()

    def _find_status(self, history: History) -> Status:
        """Return the status by the record, the heartbeats and how long neither has changed."""
        record = self._record.seconds((history.version, history.last), time_of(history.last))
        if history.launch.outcome.status:
            return ended(history.launch.outcome)
        overdue = GRACE + OVERDUE * history.longest_interval()
        testing = history.step.get("step") == history.total_steps  # all steps are completed
        look = record > overdue / 2 or testing or not history.step
        beat = read_beat(self.folder / HEARTBEATS / "0.json") if look else None
        beaten = self._beat.seconds(beat.time, beat.time) if beat else math.inf
        is_suspect = beat and (is_gone(beat) or beaten > overdue)
        if is_suspect and (outcome := self._find_outcome(history)).status:
            return ended(outcome)
        beat_every = max(BEAT_EVERY, (number(history.facts.get("ranks")) or 1) / 20)
        if beat and beaten < GRACE + OVERDUE * beat_every:
            if record > overdue and beat.doing.startswith(IN_STEP):
                return Status(
                    "silent", f"silent for {rough_duration(record)}, rank 0 is in: {beat.doing}"
                )
            words = f"running: {beat.doing} for {duration(beat.seconds + beaten)}"
            words = words if record > overdue or (testing and "evaluation" in beat.doing) else ""
        elif record > overdue:
            return Status("silent", f"silent for {rough_duration(record)}")
        else:
            words = ""
        if (self.folder / STOP_FILE).is_file():
            return Status("stopping", "asked to stop")
        if not history.facts:
            return Status("waiting", words or "not begun yet")
        return Status("running", words or ("running" if history.step else "starting"))

    def _find_outcome(self, history: History) -> Outcome:
        """Return the outcome of a run without an end record.

        Its heartbeats are not read at every poll, because there may be many ranks.
        """
        if time.monotonic() - self._looked > FIND_CAUSE_EVERY:
            self._looked = time.monotonic()
            self._outcome = history.outcome()
        return self._outcome

    def stop(self) -> Any:
        """Ask the run to stop, unless it has ended. Return a message for the user.

        Raises RunError or UsageError as ``hpctrain stop`` does.
        """
        self.poll()
        if self.history.launch.outcome.status:
            return clean(f"{self.name} has already ended")
        text = ask(self.folder)
        self.poll()
        return clean(text)

    def curves(self, name: str) -> dict[str, list[tuple[float, float]]]:
        """Return the curves of "loss" or "accuracy": steps and means by split, not empty ones."""
        with self.lock:
            splits = ("training", *self.history.evaluated)
            found = {split: self.history.curve(name, split) for split in splits}
        return {clean(split): [p[:2] for p in points] for split, points in found.items() if points}

    def _summarize(self) -> Summary:
        history, done, steps = self.history, self.history.last_step, self.history.total_steps
        share = min(done / steps, 1.0) if steps else None
        left, came = history.seconds_left(), time_of(history.step)
        is_running = self.status.kind in ("running", "stopping")
        left = max(left - max(time.time() - came, 0), 0) if left and came and is_running else None
        if history.facts and not self._settings:
            with suppress(OSError, ValueError):
                self._settings = tomllib.loads((self.folder / SETTINGS_FILE).read_text())
        settings = self._settings | (history.facts.get("settings") or {})
        summary = {
            "key": self.key,
            "name": self.name,
            "status": self.status.kind,
            "text": self.status.text,
            "can_be_stopped": self.status.kind in ("waiting", "running", "silent"),
            "version": history.version,
            "share": share,
            "progress": progress(history, share, left),
            "facts": [*facts(history), ("folder", str(self.folder))],
            "notes": notes(history),
            "cells": cells(history, self.name, self.status.kind, share, left),
            "settings": {name: each for name, each in settings.items() if name not in OWN},
        }
        return {name: clean(value) for name, value in summary.items()}


class WatchedRuns:
    """All runs that `targets` name, including those that begin later, alone or in a sweep."""

    def __init__(self, targets: Sequence[str], runs_dir: str) -> None:
        """Find the runs. Raises UsageError if a folder is neither a run nor a sweep."""
        self._targets, self._runs_dir = targets, runs_dir
        self._known: dict[Path, WatchedRun] = {}
        self._looked = 0.0
        self.all: list[WatchedRun] = []  # in the order of the targets
        self.wanted = threading.Event()  # whether to poll once more
        self._look()

    def get(self, key: str) -> WatchedRun | None:
        """Return the run with this key; None if there is none."""
        return next((run for run in self.all if str(run.key) == key), None)

    def summaries(self) -> list[Summary]:
        """Return the summaries of all runs as last polled, and ask `follow` to poll again."""
        self.wanted.set()
        return [run.summary for run in self.all]

    def follow(self) -> None:
        """Start a thread that polls, at most every `POLL_EVERY` seconds, while it is wanted."""

        def poll() -> None:
            while self.wanted.wait():
                self.wanted.clear()
                self.poll()
                time.sleep(POLL_EVERY)

        self.wanted.set()
        threading.Thread(target=poll, daemon=True).start()

    def poll(self) -> None:
        """Look for new runs, and poll all runs."""
        is_waiting = any(run.is_absent for run in self.all)
        if is_waiting or time.monotonic() - self._looked > FIND_RUNS_EVERY:
            with suppress(UsageError):  # a folder was moved away: the status of its run shows it
                self._look()
        for run in self.all:
            run.poll()

    def _look(self) -> None:
        self._looked = time.monotonic()
        found = [path for target in self._targets for path in self._folders(target)]
        folders = list(dict.fromkeys(found))
        names = distinct_names([folder.absolute() for folder in folders])  # links: their own
        for folder, name in zip(folders, names, strict=True):
            if folder not in self._known:
                proposal = "" if folder.is_dir() else propose_run(folder.name, str(folder.parent))
                self._known[folder] = WatchedRun(len(self._known), folder, proposal)
            self._known[folder].name = name
        self.all = [self._known[folder] for folder in folders]

    def _folders(self, target: str) -> list[Path]:
        """Return the folders of one target.

        A run without a record is recognized by its settings file. A run whose folder does not
        exist is waited for.
        """
        try:
            return find_runs([target], self._runs_dir)
        except UsageError:
            folders = [Path(self._runs_dir) / target, Path(target)]
            for folder in folders:
                if (folder / SETTINGS_FILE).is_file():
                    return [folder]
            if any(folder.exists() for folder in folders):
                raise
            return folders[:1]


def clean(value: Any) -> Any:
    """Return texts, also those in lists and dicts, in one line, control characters escaped."""
    match value:
        case str():
            shown = printable(value.replace("\n", " "), newlines=False)
            return shown if len(shown) <= LONGEST_TEXT else f"{shown[:LONGEST_TEXT]}…"
        case list() | tuple():
            return [clean(each) for each in value]
        case dict():
            return {clean(name): clean(each) for name, each in value.items()}
    return value
