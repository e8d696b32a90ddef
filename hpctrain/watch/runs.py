"""The watched runs: the summary of each, common to all displays, and whether it is alive.

Whether a run is alive is judged by its record, the heartbeats of its ranks, and how long neither
has changed.
"""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

from hpctrain.errors import UsageError
from hpctrain.report.find import SETTINGS_FILE, distinct_names, find_runs, propose_run
from hpctrain.report.history import History, Outcome, number, time_of
from hpctrain.stop import ask
from hpctrain.text import counted, duration, printable, rough_duration, whole_percents
from hpctrain.training.control import STOP_FILE
from hpctrain.watchdog import BEAT_EVERY, HEARTBEATS, is_gone, read_beat

GRACE = 10.0  # seconds without change that are always tolerated
OVERDUE = 3.0  # times the longest usual interval, in addition
FIND_CAUSE_EVERY = 10.0  # seconds between searches for the reason why a run ended
FIND_RUNS_EVERY = 5.0  # seconds between searches for new runs of a sweep
IN_STEP = ("waiting for all", "step ", "recording step", "reading for step")  # in heartbeats
LONGEST_TEXT = 500  # characters

Summary = dict[str, Any]


class Status(NamedTuple):
    """The state of a run: one word, and a line for the user."""

    kind: str  # pending, waiting, running, stopping, silent, done, stopped, preempted, failed
    text: str

    @property
    def can_be_stopped(self) -> bool:
        """Whether the run can be asked to stop."""
        return self.kind in ("waiting", "running", "silent")


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


def _beat_interval(history: History) -> float:
    """Return the longest time in seconds between two heartbeats (``Watchdog.interval``)."""
    return max(BEAT_EVERY, (number(history.facts.get("ranks")) or 1) / 20)


class WatchedRun:
    """One run: its history and its status."""

    def __init__(self, key: int, folder: Path, proposal: str = "") -> None:
        """`proposal` is a text ", did you mean X?" to show while there is no such folder."""
        self.key, self.folder, self.name = key, folder, folder.name
        self._proposal = proposal
        self.history = History(folder, "sampled")
        self.status = Status("waiting", "not begun yet")
        self._record, self._beat = IdleTimer(), IdleTimer()
        self._outcome = Outcome()  # by the last search for the reason
        self._looked = -math.inf

    @property
    def is_absent(self) -> bool:
        """Whether the folder of the run does not exist."""
        return not self.folder.is_dir()

    def poll(self) -> None:
        """Read new lines of the record and update the status."""
        self.history.follow()
        if self.history.problem and not self.history.lost:
            self.status = Status("failed", self.history.problem)
        elif self.is_absent:
            self.status = Status("pending", f"waiting for {self.folder}{self._proposal}")
        else:
            self.status = self._find_status(self.history)
        self.status = self.status._replace(text=clean(self.status.text))

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
        if beat and beaten < GRACE + OVERDUE * _beat_interval(history):
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

    def stop(self) -> str:
        """Ask the run to stop, unless it has ended. Return a message for the user.

        Raises RunError or UsageError as ``hpctrain stop`` does.
        """
        self.poll()
        if self.history.launch.outcome.status:
            return f"{self.name} has already ended"
        text = ask(self.folder)
        self.poll()
        return text

    def summary(self) -> Summary:
        """Return all that is displayed of the run except its curves; unknown numbers are None.

        All texts are `clean`.
        """
        history, facts, step = self.history, self.history.facts, self.history.step
        done, steps, end = step.get("step", 0), history.total_steps, history.launch.end
        costs = end if "shares" in end else history.costs()
        corrupt = counted(history.lost, "line") if history.lost else ""
        corrupt += f" of the record cannot be read: {history.problem}" if corrupt else ""
        found = {
            "key": self.key,
            "name": self.name,
            "folder": str(self.folder),
            "status": self.status.kind,
            "text": self.status.text,
            "can_be_stopped": self.status.can_be_stopped,
            "version": history.version,
            "model": facts.get("model") or "",
            "device": facts.get("device") or "",
            "ranks": number(facts.get("ranks")),
            "epoch": number(step.get("epoch")),
            "epochs": number(facts.get("epochs")),
            "step": done,
            "steps": steps,
            "share": min(done / steps, 1.0) if steps else None,
            "seconds_left": self._seconds_left(),
            "loss": number(step.get("loss")),
            "accuracy": number(step.get("accuracy")),
            "images_per_second": history.images_per_second(),
            "evaluations": {split: _metrics(e) for split, e in history.evaluated.items()},
            "step_seconds": number(costs.get("step_seconds")),
            "percents": whole_percents(_shares(costs.get("shares"))),
            "slowest_rank": number(costs.get("slowest_rank")),
            "slowest_share": number(costs.get("slowest_share")),
            "corrupt": corrupt,
            "notes": [*history.notes, *filter(None, [corrupt])],
        }
        return {name: clean(value) for name, value in found.items()}

    def _seconds_left(self) -> float | None:
        left, came = self.history.seconds_left(), time_of(self.history.step)
        if left is None or came is None or self.status.kind not in ("running", "stopping"):
            return None
        return max(left - max(time.time() - came, 0.0), 0.0)


class WatchedRuns:
    """All runs that `targets` name, including those that begin later, alone or in a sweep."""

    def __init__(self, targets: Sequence[str], runs_dir: str) -> None:
        """Find the runs. Raises UsageError if a folder is neither a run nor a sweep."""
        self._targets, self._runs_dir = targets, runs_dir
        self._known: dict[Path, WatchedRun] = {}
        self._looked = 0.0
        self._look()

    def all(self) -> list[WatchedRun]:
        """Return all runs in the order of the targets."""
        return [self._known[folder] for folder in self._order]

    def get(self, key: int) -> WatchedRun | None:
        """Return the run with this key; None if there is none."""
        return next((run for run in self._known.values() if run.key == key), None)

    def poll(self) -> None:
        """Look for new runs, and poll all runs."""
        is_waiting = any(run.is_absent for run in self.all())
        if is_waiting or time.monotonic() - self._looked > FIND_RUNS_EVERY:
            with suppress(UsageError):  # a folder was moved away: the status of its run shows it
                self._look()
        for run in self.all():
            run.poll()

    def _look(self) -> None:
        self._looked = time.monotonic()
        found = [path for target in self._targets for path in self._folders(target)]
        self._order = list(dict.fromkeys(found))
        for folder in self._order:
            if folder not in self._known:
                proposal = "" if folder.is_dir() else propose_run(folder.name, str(folder.parent))
                self._known[folder] = WatchedRun(len(self._known), folder, proposal)
        names = distinct_names([folder.absolute() for folder in self._order])  # links: their own
        for run, name in zip(self.all(), names, strict=True):
            run.name = clean(name)

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
    """Return texts, also those in lists and dicts, in one line with control characters escaped."""
    match value:
        case str():
            shown = printable(value.replace("\n", " "), newlines=False)
            return shown if len(shown) <= LONGEST_TEXT else f"{shown[:LONGEST_TEXT]}…"
        case list():
            return [clean(each) for each in value]
        case dict():
            return {clean(name): clean(each) for name, each in value.items()}
    return value


def _metrics(evaluation: Mapping[str, Any]) -> dict[str, float | None]:
    return {name: number(evaluation.get(name)) for name in ("loss", "accuracy", "epoch", "step")}


def _shares(values: Any) -> dict[str, float]:
    values = values if isinstance(values, Mapping) else {}
    numbers = {name: number(value) for name, value in values.items()}
    return {name: max(value, 0.0) for name, value in numbers.items() if value is not None}
