"""The runs that are watched, and what is shown of each: one summary for all displays."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from hpctrain.errors import UsageError
from hpctrain.report.find import find_runs
from hpctrain.report.folders import find_run
from hpctrain.report.follow import Follower
from hpctrain.report.story import Story, moment, number
from hpctrain.stop import ask
from hpctrain.text import printable
from hpctrain.watch.liveness import Pulse, Status

LONGEST_TEXT = 500  # characters
LOOK_EVERY = 5.0  # seconds between looks for runs of a sweep that began meanwhile

Summary = dict[str, Any]


class Watched:
    """One run: its record, its signs of life."""

    def __init__(self, key: int, folder: Path) -> None:
        self.key, self.folder, self.name = key, folder, clean(folder.name)
        self.follower = Follower(folder, Story)
        self._pulse = Pulse(folder)
        self.status = Status("waiting", "not begun yet")

    @property
    def story(self) -> Story:
        return self.follower.taken

    def poll(self) -> None:
        """Read what is new."""
        self.follower.poll()
        self.status = self._pulse.status(self.story, self.follower.version)
        if self.follower.problem:
            self.status = Status("failed", self.follower.problem)

    def stop(self) -> str:
        """Ask it to stop, unless it has ended; what to tell the user. RunError, UsageError."""
        self.poll()
        if self.story.end:
            return f"{self.name} has already ended"
        said = ask(self.folder)
        self.poll()
        return said

    def summary(self) -> Summary:
        """What is shown of the run but for its curves: numbers, None where they are not known."""
        story, facts = self.story, self.story.facts
        step, steps = story.step.get("step", 0), story.steps()
        costs = story.end if "shares" in story.end else story.costs()
        return {
            "key": self.key,
            "name": self.name,
            "folder": clean(self.folder),
            "status": self.status.kind,
            "text": clean(self.status.text),
            "goes_on": self.status.goes_on,
            "version": self.follower.version,
            "model": clean(facts.get("model") or ""),
            "device": clean(facts.get("device") or ""),
            "ranks": number(facts.get("ranks")),
            "epoch": number(story.step.get("epoch")),
            "epochs": number(facts.get("epochs")),
            "step": step,
            "steps": steps,
            "share": min(step / steps, 1.0) if steps else None,
            "left": self._left(),
            "loss": number(story.step.get("loss")),
            "accuracy": number(story.step.get("accuracy")),
            "images_per_second": story.speed(),
            "evaluations": {clean(split): _figures(e) for split, e in story.evaluations.items()},
            "step_seconds": number(costs.get("step_seconds")),
            "shares": _numbers(costs.get("shares")),
            "idle": number(costs.get("idle")),
            "slowest_rank": number(costs.get("slowest_rank")),
            "slowest_share": number(costs.get("slowest_share")),
            "notes": [clean(note) for note in story.notes] + self._own_notes(),
        }

    def _left(self) -> float | None:
        left, came = self.story.left(), moment(self.story.step)
        if left is None or came is None or self.status.kind not in ("running", "stopping"):
            return None
        return max(left - max(time.time() - came, 0.0), 0.0)

    def _own_notes(self) -> list[str]:
        count, damage = self.follower.unreadable, self.follower.damage
        return [clean(f"{count} lines of the record cannot be read: {damage}")] if count else []


class Runs:
    """All runs that targets name, those of a sweep that begin later too."""

    def __init__(self, targets: Sequence[str], runs_dir: str) -> None:
        """Raises UsageError for what is neither a run nor a sweep."""
        self._targets, self._runs_dir = targets, runs_dir
        self._known: dict[Path, Watched] = {}
        self._looked = 0.0
        self._look()

    def all(self) -> list[Watched]:
        """In the order of the targets."""
        return [self._known[folder] for folder in self._order]

    def get(self, key: int) -> Watched | None:
        """The run of that key, if there is one."""
        return next((run for run in self._known.values() if run.key == key), None)

    def poll(self) -> None:
        """Read what is new of all."""
        if time.monotonic() - self._looked > LOOK_EVERY:
            with suppress(UsageError):  # a folder was moved away: its run says so
                self._look()
        for run in self.all():
            run.poll()

    def _look(self) -> None:
        self._looked = time.monotonic()
        found = [path for target in self._targets for path in self._folders(target)]
        self._order = list(dict.fromkeys(found))
        for folder in self._order:
            if folder not in self._known:
                self._known[folder] = Watched(len(self._known), folder)
        names = Counter(folder.name for folder in self._order)
        for run in self.all():
            twice = names[run.folder.name] > 1
            whole = f"{run.folder.parent.name}/{run.folder.name}" if twice else run.folder.name
            run.name = clean(whole)

    def _folders(self, target: str) -> list[Path]:
        """Of one target; a run that has not begun its record is known by its config.toml."""
        try:
            return find_runs([target], self._runs_dir)
        except UsageError:
            try:
                folder = find_run(target, self._runs_dir)
            except UsageError:
                folder = None
            if folder is None or not (folder / "config.toml").is_file():
                raise
            return [folder]


def clean(text: object) -> str:
    """Text of a record or a folder's name in one line, without what could steer a terminal."""
    shown = printable(str(text).replace("\n", " "), newlines=False)
    return shown if len(shown) <= LONGEST_TEXT else f"{shown[:LONGEST_TEXT]}…"


def _figures(evaluation: Mapping[str, Any]) -> dict[str, float | None]:
    return {name: number(evaluation.get(name)) for name in ("loss", "accuracy", "epoch", "step")}


def _numbers(values: Any) -> dict[str, float]:
    values = values if isinstance(values, Mapping) else {}
    return {clean(k): found for k, v in values.items() if (found := number(v)) is not None}
