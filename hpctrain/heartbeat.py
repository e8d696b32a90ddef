"""Heartbeats: files by which ranks tell each other, and those who watch a run, what they are doing.

A heartbeat is ``N.json`` in a folder that all ranks see: one JSON object, a `Beat`, which the
watchdog of rank N writes every few seconds. ``N.stack`` beside it holds the stacks of a rank that
hung, crashed or was terminated by its launcher. Ages are differences of modification times, which
one file server sets, so the clocks of the hosts do not matter.
"""

from __future__ import annotations

import os
import re
import socket
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

from hpctrain.text import listed, parse_json, ranges

HEARTBEATS = "ranks"  # in the folder of a run
HANG = "hang"  # in that folder: a hang was found and all ranks exit
BEAT_EVERY = 5.0  # seconds
WAITING = "waiting for "  # prefix of the activity of a rank that waits for others
MOST_RANKS = 8  # named in a message
CRASH = re.compile(r"Fatal Python error: ([ -~]{1,80})")  # first line written by faulthandler


@dataclass(frozen=True, order=True)
class Beat:
    """One heartbeat of a rank."""

    rank: int
    host: str
    pid: int
    doing: str
    seconds: float  # since `doing` began, when the heartbeat was written
    time: float  # when it was written, in seconds since 1970; once read, by the file server's clock
    limit: float = 0.0  # seconds that `doing` may take
    failed: str = ""  # why the rank ended, if it could record the reason


def beat_file(folder: Path, rank: int) -> Path:
    """Return the heartbeat file of a rank."""
    return folder / f"{rank}.json"


def stack_file(folder: Path, rank: int) -> Path:
    """Return the file of a rank's stacks."""
    return folder / f"{rank}.stack"


def read_beat(path: Path) -> Beat | None:
    """Read a heartbeat file; return None if it holds no valid heartbeat."""
    try:
        with open(path, "rb") as file:
            beat = Beat(**parse_json(file.read()))
            return replace(beat, time=os.fstat(file.fileno()).st_mtime)
    except (OSError, ValueError, TypeError):
        return None


def read_beats(folder: Path) -> list[Beat]:
    """Return the heartbeats of all ranks that have one, in the order of ranks."""
    with suppress(OSError):
        return sorted(filter(None, map(read_beat, folder.glob("[0-9]*.json"))))
    return []


def is_gone(beat: Beat) -> bool:
    """Whether the process of a heartbeat ran on this host and no longer exists."""
    if beat.host != socket.gethostname():
        return False
    with suppress(OSError), open(f"/proc/{beat.pid}/stat", "rb") as file:
        return file.read().rpartition(b")")[2].split()[0] == b"Z"  # a zombie: ended, not yet reaped
    return True


def is_overdue(beat: Beat, now: float) -> bool:
    """Whether the rank of a heartbeat has reported nothing new for longer than its limit."""
    return now - beat.time + beat.seconds > beat.limit


def name_ranks(ranks: Sequence[int]) -> str:
    """Return "rank 3" or "ranks 1, 3-7"; `ranks` must be sorted."""
    plural = "" if len(ranks) == 1 else "s"
    return f"rank{plural} {ranges(ranks)}"


def blame(beats: Sequence[Beat], size: int, now: float, silence: float) -> list[str]:
    """Return a line for each rank for which others wait.

    These are the ranks without a new heartbeat for `silence` seconds, and those that do not wait.
    """
    lines = []
    missing = sorted(set(range(size)) - {beat.rank for beat in beats})
    if missing:
        lines.append(f"{name_ranks(missing)} gave no sign at all")
    for beat in beats:
        age = now - beat.time
        who = f"rank {beat.rank} (process {beat.pid} on {beat.host})"
        if age > silence:
            lines.append(f"{who} gave no sign for {age:.0f} s, last in: {beat.doing}")
        elif not beat.doing.startswith(WAITING):
            lines.append(f"{who} did not arrive, it is in: {beat.doing}")
    more = len(lines) - MOST_RANKS
    if more > 0:
        return [*lines[:MOST_RANKS], f"and {more} ranks more"]
    return lines


def find_cause(folder: Path, is_over: bool) -> tuple[str, float] | None:
    """Return why a launch ended, if it did not record it, and the time of its last heartbeat.

    The time is in seconds since 1970. Returns None if there are no heartbeats, and, unless the
    launch `is_over`, if no rank recorded a failure and all processes on this host still exist.
    """
    beats = read_beats(folder)
    if not beats or not (is_over or any(beat.failed or is_gone(beat) for beat in beats)):
        return None
    return describe_cause(folder, beats), max(beat.time for beat in beats)


def describe_cause(folder: Path, beats: Sequence[Beat]) -> str:
    """Return why a launch with these last heartbeats ended.

    Unless a rank recorded the reason or crashed, the ranks without a stack ended first: launchers
    send SIGTERM to the others, which then write their stacks.
    """
    failed = [beat for beat in beats if beat.failed]
    if failed:
        first = min(failed, key=lambda beat: beat.time)
        return f"rank {first.rank}: {first.failed}"
    silent = []
    for beat in beats:
        stacks = ""
        with suppress(OSError):  # there is none, or it is being removed
            stacks = stack_file(folder, beat.rank).read_text(errors="replace")
        crash = CRASH.match(stacks)
        if crash:
            return f"rank {beat.rank} crashed ({crash[1]}), last heartbeat: {beat.doing}"
        if not stacks:
            silent.append(f"rank {beat.rank} on {beat.host}, last heartbeat: {beat.doing}")
    if not silent:
        return f"ended from outside (SIGTERM), rank 0 was in: {beats[0].doing}"
    text = f"killed, reason unknown: {listed(silent, MOST_RANKS, '; ')}"
    if len(silent) == len(beats):
        return f"all ranks were {text}"
    return f"{text} (the others were then ended by the launcher)"
