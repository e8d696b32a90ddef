"""The runs that are watched, and what is shown of each: one summary for all displays."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from hpctrain.errors import UsageError
from hpctrain.report.costs import whole_percents
from hpctrain.report.find import SETTINGS_FILE, find_runs, propose_run
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

    def __init__(self, key: int, folder: Path, proposal: str = "") -> None:
        """`proposal` is what may have been meant where there is no such folder."""
        self.key, self.folder, self.name = key, folder, clean(folder.name)
        self._proposal = proposal
        self.follower = Follower(folder, Story)
        self._pulse = Pulse(folder)
        self.status = Status("waiting", "not begun yet")

    @property
    def story(self) -> Story:
        return self.follower.taken

    @property
    def is_absent(self) -> bool:
        """Whether there is no such run yet."""
        return not self.folder.is_dir()

    def poll(self) -> None:
        """Read what is new."""
        self.follower.poll()
        self.status = self._pulse.status(self.story, self.follower.version)
        if self.follower.problem:
            self.status = Status("failed", self.follower.problem)
        elif self.is_absent:
            self.status = Status("awaited", f"waiting for {self.folder}{self._proposal}")

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
        shares = {name: max(share, 0.0) for name, share in _numbers(costs.get("shares")).items()}
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
            "shares": shares,
            "percents": whole_percents(shares),
            "idle": number(costs.get("idle")),
            "slowest_rank": number(costs.get("slowest_rank")),
            "slowest_share": number(costs.get("slowest_share")),
            "damage": (damage := self._damage()),
            "notes": [clean(note) for note in story.notes] + ([damage] if damage else []),
        }

    def _left(self) -> float | None:
        left, came = self.story.left(), moment(self.story.step)
        if left is None or came is None or self.status.kind not in ("running", "stopping"):
            return None
        return max(left - max(time.time() - came, 0.0), 0.0)

    def _damage(self) -> str:
        count, damage = self.follower.unreadable, self.follower.damage
        lines = "line" if count == 1 else "lines"
        return clean(f"{count} {lines} of the record cannot be read: {damage}") if count else ""


class Runs:
    """All runs that targets name, those too that begin later, of a sweep or by themselves."""

    def __init__(self, targets: Sequence[str], runs_dir: str) -> None:
        """Raises UsageError for a folder that is neither a run nor a sweep."""
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
        is_waiting = any(run.is_absent for run in self.all())
        if is_waiting or time.monotonic() - self._looked > LOOK_EVERY:
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
                proposal = "" if folder.is_dir() else propose_run(folder.name, str(folder.parent))
                self._known[folder] = Watched(len(self._known), folder, proposal)
        names = Counter(folder.name for folder in self._order)
        for run in self.all():
            twice = names[run.folder.name] > 1
            whole = f"{run.folder.parent.name}/{run.folder.name}" if twice else run.folder.name
            run.name = clean(whole)

    def _folders(self, target: str) -> list[Path]:
        """Of one target; a run that has not begun its record is known by its settings, and one that
        is not there is waited for.
        """
        try:
            return find_runs([target], self._runs_dir)
        except UsageError:
            places = [Path(self._runs_dir) / target, Path(target)]
            for folder in places:
                if (folder / SETTINGS_FILE).is_file():
                    return [folder]
            if any(folder.exists() for folder in places):
                raise
            return places[:1]


def clean(text: object) -> str:
    """Text of a record or a folder's name in one line, without what could steer a terminal."""
    shown = printable(str(text).replace("\n", " "), newlines=False)
    return shown if len(shown) <= LONGEST_TEXT else f"{shown[:LONGEST_TEXT]}…"


def _figures(evaluation: Mapping[str, Any]) -> dict[str, float | None]:
    return {name: number(evaluation.get(name)) for name in ("loss", "accuracy", "epoch", "step")}


def _numbers(values: Any) -> dict[str, float]:
    values = values if isinstance(values, Mapping) else {}
    return {clean(k): found for k, v in values.items() if (found := number(v)) is not None}
