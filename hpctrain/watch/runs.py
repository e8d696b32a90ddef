"""The watched runs: whether each is alive, its curves, and how the user stops it.

Whether a run is alive is judged by its record, the heartbeats of its ranks, and how long neither
has changed. `WatchedRuns.follow` reads the records in a thread, because long ones take seconds: the
displays show what has been read so far.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from itertools import product
from pathlib import Path
from typing import Any

from hpctrain.errors import UsageError
from hpctrain.report.find import distinct_names, find_folder, propose_run, sweep_runs
from hpctrain.report.history import History, Outcome, Point
from hpctrain.stop import ask
from hpctrain.text import duration, rough_duration
from hpctrain.training.control import STOP_FILE
from hpctrain.watch.table import Row, describe, table
from hpctrain.watchdog import BEAT_EVERY, HEARTBEATS, is_gone, read_beat

GRACE = 10.0  # seconds without change that are always tolerated
OVERDUE = 3.0  # times the longest usual interval, in addition
FIND_CAUSE_EVERY = 10.0  # seconds between searches for the reason why a run ended
IN_STEP = ("waiting for all", "step ", "recording step", "reading for step")  # in heartbeats
POLL_EVERY = 1.0  # seconds


class WatchedRun:
    """One run: its history, and `row`, all that is displayed of it but its curves."""

    def __init__(self, key: int, folder: Path) -> None:
        self.key, self.folder, self.name = key, folder, folder.name
        self.history = History(folder, "sampled")
        self.lock = threading.RLock()  # of the history
        self._seen: dict[str, tuple[Any, float]] = {}  # states, and since when
        self._outcome, self._looked = Outcome(), -math.inf  # the last search for the reason
        self.row = self._describe("waiting", "not read yet")

    def poll(self) -> None:
        """Read new lines of the record and update the row."""
        with self.lock:
            self.history.follow()
            self.row = self._describe(*self._find_status(self.history))

    def _describe(self, status: str, text: str) -> Row:
        own = {"key": self.key, "name": self.name, "status": status, "text": text}
        return own | {"folder": str(self.folder)} | describe(self.history, status)

    def _idle(self, what: str, state: Any, written: float | None) -> float:
        """Return the seconds since the state of `what` changed, by the clock of this process.

        Only the first one counts from the time `written` in it, perhaps by another machine's clock.
        """
        now = time.monotonic()
        if what not in self._seen:
            self._seen[what] = state, now - (max(time.time() - written, 0.0) if written else 0.0)
        elif self._seen[what][0] != state:
            self._seen[what] = state, now
        return now - self._seen[what][1]

    def _find_status(self, history: History) -> tuple[str, str]:
        """Return the status in one word, and in a line for the user."""
        if history.problem and not history.lost:
            return "failed", history.problem
        if not self.folder.is_dir():
            proposal = propose_run(self.folder.name, str(self.folder.parent))
            return "pending", f"waiting for {self.folder}{proposal}"
        record = self._idle("record", history.version, history.launch.latest)
        if history.launch.outcome.status:
            return ended(history.launch.outcome)
        overdue = GRACE + OVERDUE * history.longest_interval()
        testing = history.step.get("step") == history.total_steps  # all steps are completed
        look = record > overdue / 2 or testing or not history.step
        beat = read_beat(self.folder / HEARTBEATS / "0.json") if look else None
        beaten = self._idle("heartbeat", beat.time, beat.time) if beat else math.inf
        if beat and (is_gone(beat) or beaten > overdue):
            if time.monotonic() - self._looked > FIND_CAUSE_EVERY:  # there may be many heartbeats
                self._looked, self._outcome = time.monotonic(), history.outcome()
            if self._outcome.status:
                return ended(self._outcome)
        if beaten > GRACE + OVERDUE * max(BEAT_EVERY, (history.facts.get("ranks") or 1) / 20):
            beat = None
        if record > overdue and (beat is None or beat.doing.startswith(IN_STEP)):
            where = f", rank 0 is in: {beat.doing}" if beat else ""
            return "silent", f"silent for {rough_duration(record)}{where}"
        if (self.folder / STOP_FILE).is_file():
            return "stopping", "asked to stop"
        words = ""
        if beat and (record > overdue or (testing and "evaluation" in beat.doing)):
            words = f"running: {beat.doing} for {duration(beat.seconds + beaten)}"
        if not history.facts:
            return "waiting", words or "not begun yet"
        return "running", words or ("running" if history.step else "starting")

    def stop(self) -> str:
        """Ask the run to stop, unless it has ended. Return a message for the user.

        Raises RunError or UsageError as ``hpctrain stop`` does.
        """
        self.poll()
        if self.history.launch.outcome.status:
            return f"{self.name} has already ended"
        return ask(self.folder)

    def curves(self) -> dict[str, dict[str, list[Point]]]:
        """Return "loss" and "accuracy", each by split: pairs of step and mean, to 5 digits."""
        found: dict[str, dict[str, list[Point]]] = {"loss": {}, "accuracy": {}}
        with self.lock:
            for name, split in product(found, ("training", *self.history.evaluated)):
                if points := self.history.curve(name, split):
                    found[name][split] = [(round(x), float(f"{y:.5g}")) for x, y in points]
        return found


def ended(outcome: Outcome) -> tuple[str, str]:
    """Return the status of a run that has ended, and a line with the reason."""
    reason = (outcome.reason or "").partition("\n")[0]
    return outcome.status, f"{outcome.status}: {reason}" if reason else outcome.status


class WatchedRuns:
    """All runs that `targets` name, including those that begin later, alone or in a sweep."""

    def __init__(self, targets: Sequence[str], runs_dir: str) -> None:
        """Find the runs. Raises UsageError if a folder is neither a run nor a sweep."""
        self._targets, self._runs_dir = targets, runs_dir
        self._known: dict[Path, WatchedRun] = {}
        self._wanted = threading.Event()  # whether to poll once more
        self.all: list[WatchedRun] = []  # in the order of the targets
        self._find()

    def get(self, key: str) -> WatchedRun | None:
        """Return the run with this key; None if there is none."""
        return next((run for run in self.all if str(run.key) == key), None)

    def table(self) -> tuple[list[str], list[Row]]:
        """Return the columns and the rows as last polled, and ask `follow` to poll again."""
        self._wanted.set()
        return table([run.row for run in self.all])

    def follow(self) -> None:
        """Start a thread that polls, at most every `POLL_EVERY` seconds, while it is wanted."""

        def poll() -> None:
            while self._wanted.wait():
                self._wanted.clear()
                self.poll()
                time.sleep(POLL_EVERY)

        self._wanted.set()
        threading.Thread(target=poll, daemon=True).start()

    def poll(self) -> None:
        """Look for new runs, and poll all runs."""
        with suppress(UsageError):  # a folder was moved away: the status of its run shows it
            self._find()
        for run in self.all:
            run.poll()

    def _find(self) -> None:
        found = [path for target in self._targets for path in self._folders(target)]
        folders = list(dict.fromkeys(found))
        names = distinct_names([folder.absolute() for folder in folders])  # links: their own
        for folder, name in zip(folders, names, strict=True):
            if folder not in self._known:
                self._known[folder] = WatchedRun(len(self._known), folder)
            self._known[folder].name = name
        self.all = [self._known[folder] for folder in folders]

    def _folders(self, target: str) -> list[Path]:
        """Return the folders of one target; a run whose folder does not exist is waited for."""
        try:
            folder = find_folder(target, self._runs_dir)
        except UsageError:
            folder = Path(self._runs_dir) / target
            if folder.exists() or Path(target).exists():
                raise
        return sweep_runs(folder)
