"""Heartbeats: the latest report of each rank, ``N.json`` in a folder that all ranks see.

Each file holds one JSON object: rank, host, pid, doing, seconds (since that activity began), time
(since 1970), limit (seconds) and, for a rank that ended before the others, failed (the reason).
``N.stack`` beside it holds the stacks of a rank that hung, crashed or was terminated by its
launcher. Ages are differences of modification times, which one file server sets, so the clocks of
the hosts do not matter.
"""

from __future__ import annotations

import json
import os
import re
import socket
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from hpctrain.files import write_whole
from hpctrain.text import ranges
from hpctrain.typed import from_fields, parse_json

FOLDER = "ranks"  # in the folder of a run
BEAT_EVERY = 5.0  # seconds
WAITING = "waiting for "  # prefix of the activity of a rank that waits for others
MOST_NAMED = 8  # ranks in a message
CRASH = re.compile(rb"Fatal Python error: ([ -~]{1,80})")  # first line written by faulthandler


@dataclass(frozen=True, order=True)
class Beat:
    """One heartbeat of a rank."""

    rank: int
    host: str
    pid: int
    doing: str
    seconds: float  # since `doing` began, when the heartbeat was written
    time: float  # when it was written, by the clock of its host, in seconds since 1970
    limit: float = 0.0  # seconds that `doing` may take
    failed: str = ""  # why the rank ended, if it could record the reason
    written: float = 0.0  # modification time of the file


def beat_interval(timeout: float, size: int) -> float:
    """Return the seconds between heartbeats; longer for many ranks, to spare the file system."""
    return min(max(BEAT_EVERY, size / 20), timeout / 6)


def phase_of(doing: str) -> str:
    """Return the phase of an activity: "step", "setting", "block" (of an evaluation).

    It is the same while the rank waits for others, and for all parts of a step.
    """
    word = re.sub(f"^{WAITING}\\w+ in ", "", doing).partition(" ")[0]
    return "step" if word in ("recording", "reading") else word


def write_beat(folder: Path, beat: Beat) -> None:
    """Replace this rank's heartbeat file atomically. Raises OSError."""
    fields = asdict(beat)
    del fields["written"]
    write_whole(folder / f"{beat.rank}.json", json.dumps(fields) + "\n", durable=False)


def read_beat(path: Path) -> Beat | None:
    """Read a heartbeat file; return None if it holds no valid heartbeat."""
    try:
        with open(path, "rb") as file:
            written, content = os.fstat(file.fileno()).st_mtime, file.read()
        beat = from_fields(Beat, parse_json(content))
    except (OSError, ValueError):
        return None
    return replace(beat, written=written)


def read_beats(folder: Path) -> list[Beat]:
    """Return the heartbeats of all ranks that have one, in the order of ranks."""
    with suppress(OSError):
        beats = [read_beat(path) for path in folder.glob("[0-9]*.json")]
        return sorted(beat for beat in beats if beat)
    return []


def is_gone(beat: Beat) -> bool:
    """Whether the process of a heartbeat ran on this host and no longer exists."""
    if beat.host != socket.gethostname() or not os.path.isdir("/proc/self"):
        return False
    with suppress(OSError), open(f"/proc/{beat.pid}/stat", "rb") as file:
        return file.read().rpartition(b")")[2].split()[0] == b"Z"  # a zombie: ended, not yet reaped
    return True


def remove_all(folder: Path) -> None:
    """Remove the heartbeats and stacks that an earlier launch left. Raises OSError."""
    for pattern in ("[0-9]*.json", "[0-9]*.stack", ".*.tmp", Turn.FILE):
        for path in folder.glob(pattern):
            path.unlink(missing_ok=True)


def name_ranks(ranks: Sequence[int]) -> str:
    """Return "rank 3" or "ranks 1, 3-7"; `ranks` must be sorted."""
    return f"rank{'s' if len(ranks) != 1 else ''} {ranges(ranks)}"


def blame(beats: Sequence[Beat], size: int, now: float, silence: float) -> list[str]:
    """Return a line for each rank for which others wait.

    These are the ranks without any heartbeat, those without a new one for `silence` seconds
    before `now`, and those that are not waiting themselves.
    """
    missing = sorted(set(range(size)) - {beat.rank for beat in beats})
    lines = [f"{name_ranks(missing)} gave no sign at all"] if missing else []
    for beat in beats:
        age = now - beat.written
        who = f"rank {beat.rank} (process {beat.pid} on {beat.host})"
        if age > silence:
            lines.append(f"{who} gave no sign for {age:.0f} s, last in: {beat.doing}")
        elif not beat.doing.startswith(WAITING):
            lines.append(f"{who} did not arrive, it is in: {beat.doing}")
    more = len(lines) - MOST_NAMED
    return [*lines[:MOST_NAMED], f"and {more} ranks more"] if more > 0 else lines


def find_cause(folder: Path, is_over: bool) -> tuple[str, float] | None:
    """Return why a launch ended, if it did not record it, and the time of its last heartbeat.

    The time is in seconds since 1970. Returns None if there are no heartbeats, and, unless the
    launch `is_over`, if no rank recorded a failure and all processes on this host still exist.

    A reason that a rank recorded comes first, then a crash noted by faulthandler. Otherwise the
    ranks without a stack ended first: launchers send SIGTERM to the remaining ranks, which then
    write their stacks.
    """
    beats = read_beats(folder)
    if not beats or not (is_over or any(beat.failed or is_gone(beat) for beat in beats)):
        return None
    last = max(beat.time for beat in beats)
    if failed := [beat for beat in beats if beat.failed]:
        beat = min(failed, key=lambda beat: beat.time)
        return f"rank {beat.rank}: {beat.failed}", last
    stacks = {beat.rank: _head(folder / f"{beat.rank}.stack") for beat in beats}
    for beat in beats:
        if crash := CRASH.match(stacks[beat.rank]):
            text = f"rank {beat.rank} crashed ({crash[1].decode()}), last heartbeat: {beat.doing}"
            return text, last
    silent = [beat for beat in beats if not stacks[beat.rank]]
    each = (f"rank {b.rank} on {b.host}, last heartbeat: {b.doing}" for b in silent[:MOST_NAMED])
    where = "; ".join(each)
    if not silent:
        text = f"ended from outside (SIGTERM), rank 0 was in: {beats[0].doing}"
    elif len(silent) < len(beats):
        text = f"killed, reason unknown: {where} (the others were then ended by the launcher)"
    else:
        text = f"all ranks were killed, reason unknown: {where}"
    return text, last


class Turn:
    """Decides which rank reads the heartbeats of all ranks: the one that could create a file.

    It keeps the turn until it removes the file or no longer touches it.
    """

    FILE = "reading"

    def __init__(self, folder: Path, patience: float) -> None:
        self._path, self._patience = folder / self.FILE, patience
        self.mine = self.over = False  # over: a hang was found and all ranks exit
        self._seen, self._since = 0, 0.0  # last touch by another rank, and when it was first seen

    def take(self) -> bool:
        """Take or keep the turn; return whether this rank has it. To be called repeatedly."""
        try:
            if self.mine:
                os.utime(self._path)
                return True
            self._path.touch(exist_ok=False)
            self.mine = True
        except FileExistsError:
            self._look()
        except OSError:
            self.mine = True  # no space, or the folder is gone: every rank acts alone
        return self.mine

    def _look(self) -> None:
        with suppress(OSError):
            found, now = os.lstat(self._path), time.monotonic()
            self.over = found.st_size > 0
            if found.st_mtime_ns != self._seen:
                self._seen, self._since = found.st_mtime_ns, now
            elif now - self._since > self._patience:
                self._path.unlink()

    def now(self) -> float:
        """Return the time by the clock that stamps the heartbeat files."""
        with suppress(OSError):
            return os.lstat(self._path).st_mtime
        return time.time()

    def announce(self) -> None:
        """Signal to the other ranks that all ranks exit."""
        with suppress(OSError), open(self._path, "w") as file:
            file.write("hang\n")

    def give_back(self) -> None:
        """Release the turn, so that another rank can take it."""
        if self.mine:
            self.mine = False
            self._path.unlink(missing_ok=True)


def _head(path: Path) -> bytes:
    with suppress(OSError), open(path, "rb") as file:
        return file.read(200)
    return b""
