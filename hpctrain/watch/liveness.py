"""Whether a run goes on: by its record, its ranks' heartbeats and how long both have been silent.

Silence is counted from when this process last saw something new; only at the beginning by the
times that are written, which come from another machine's clock.
"""

from __future__ import annotations

import math
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from hpctrain.heartbeats import BEAT_EVERY, FOLDER, cause_if_ended, is_gone, read_beat
from hpctrain.report.progress import duration
from hpctrain.report.story import Story, moment, number
from hpctrain.training.control import STOP_FILE

PATIENCE = 10.0  # seconds of silence that mean nothing
LATE = 3.0  # times the usual is late
LOOK_EVERY = 10.0  # seconds between two looks for why a run ended
IN_STEP = ("waiting for all", "step ", "recording step", "reading for step")  # by the heartbeats


class Status(NamedTuple):
    """How a run is doing: one word for it, and a line for the reader."""

    kind: str  # awaited, waiting, running, stopping, silent, done, stopped, left, failed
    text: str

    @property
    def goes_on(self) -> bool:
        """Whether it may still be asked to stop."""
        return self.kind in ("waiting", "running", "silent")


class Seen:
    """How long something has been as it is, from what is seen of it and when."""

    def __init__(self) -> None:
        self._what: Any = None
        self._since = 0.0

    def silence(self, what: Any, written: float | None) -> float:
        """Seconds since `what` changed; when seen first, since it was `written`, as it says."""
        now = time.monotonic()
        if self._what is None:
            self._since = now - max(time.time() - written, 0.0) if written else now
        elif what != self._what:
            self._since = now
        self._what = what
        return now - self._since


class Pulse:
    """Watches the signs of life of one run."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._record, self._beat = Seen(), Seen()
        self._cause: str | None = None  # by all heartbeats, when it looked last
        self._looked = -math.inf

    def status(self, story: Story, version: int) -> Status:
        """How the run is doing now."""
        record = self._record.silence((version, story.last), moment(story.last))
        if story.end:
            return ended(story.end)
        late = PATIENCE + LATE * story.usual()
        testing = story.step.get("step") == story.steps()  # all steps are done, not yet the end
        look = record > late / 2 or testing or not story.step
        beat = read_beat(self._folder / FOLDER / "0.json") if look else None
        beaten = self._beat.silence(beat.time, beat.time) if beat else math.inf
        asked = (self._folder / STOP_FILE).is_file()
        if beat and (is_gone(beat) or beaten > late) and (cause := self._find_cause()):
            return Status("failed", f"failed: {cause}")
        if beat and beaten < PATIENCE + LATE * _interval(story):
            if record > late and beat.doing.startswith(IN_STEP):
                return Status("silent", f"silent for {rough(record)}, rank 0 is in: {beat.doing}")
            words = f"running: {beat.doing} for {duration(beat.seconds + beaten)}"
            words = words if record > late or (testing and "evaluation" in beat.doing) else ""
        elif record > late:
            return Status("silent", f"silent for {rough(record)}")
        else:
            words = ""
        if asked:
            return Status("stopping", "asked to stop")
        if not story.facts:
            return Status("waiting", words or "not begun yet")
        return Status("running", words or ("running" if story.step else "starting"))

    def _find_cause(self) -> str | None:
        """Why the run ended without recording it; seldom read anew, there may be many ranks."""
        if time.monotonic() - self._looked > LOOK_EVERY:
            self._looked = time.monotonic()
            self._cause = cause_if_ended(self._folder / FOLDER)
        return self._cause


def ended(end: Mapping[str, Any]) -> Status:
    """How a run ended by its own account."""
    kind = end["status"] if end["status"] in ("done", "stopped", "left") else "failed"
    reason = str(end.get("reason") or "").partition("\n")[0]
    return Status(kind, f"{kind}: {reason}" if reason else kind)


def _interval(story: Story) -> float:
    """Seconds between two heartbeats, at most (``heartbeats.beat_interval``)."""
    return max(BEAT_EVERY, (number(story.facts.get("ranks")) or 1) / 20)


def rough(seconds: float) -> str:
    """ "45 s", "3 min", "2 h", "5 days"."""
    for unit, size in (("days", 172800), ("h", 7200), ("min", 120)):
        if seconds >= size:
            return f"{seconds / {'days': 86400, 'h': 3600, 'min': 60}[unit]:.0f} {unit}"
    return f"{seconds:.0f} s"
