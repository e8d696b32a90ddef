"""The status of a run, and how a launch of it ended: one set of words for all commands.

Records, ``results.csv``, the table of ``watch`` and the results of ``hp.train`` hold them as text.
"""

from __future__ import annotations

from enum import StrEnum
from typing import NamedTuple


class Status(StrEnum):
    """The status of a run, or of a network of a sweep. It is equal to its text, and shown as it."""

    # A launch that has ended
    DONE = "done"
    STOPPED = "stopped"  # on request
    PREEMPTED = "preempted"  # the same command resumes the run
    FAILED = "failed"
    PLANNED = "planned"  # --dry-run: nothing was trained
    # One that has not
    PENDING = "pending"  # its folder is not there yet
    WAITING = "waiting"  # it has recorded nothing yet
    RUNNING = "running"
    SILENT = "silent"  # nothing was recorded for longer than usual
    STOPPING = "stopping"  # it is asked to stop
    UNFINISHED = "unfinished"  # a network of a sweep, which the same command resumes

    __repr__ = str.__repr__  # in the repr of a result, too


class Outcome(NamedTuple):
    """How a launch ended."""

    status: str = ""  # a `Status`, or the text of a record; empty if unknown
    reason: str | None = None
    time: float = 0.0  # in seconds since 1970

    @property
    def line(self) -> str:
        """Status and reason in one line."""
        reason = (self.reason or "").partition("\n")[0]
        return f"{self.status}: {reason}" if reason else self.status
