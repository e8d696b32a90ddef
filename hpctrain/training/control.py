"""Requests to stop, and preemption.

A stop is requested by a STOP file in the run's folder, or by Ctrl-C without a launcher; a run is
preempted by a signal of the scheduler or a time limit. Either sets a flag in the message of this
rank's next step, so all ranks end after the same step. The exit code is 0 after a stop and 75 after
preemption; the same command then resumes the run.

A lock allows only one job at a time in a run's folder, even while an earlier one is still ending.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

from hpctrain.cluster import job_end, received_signal
from hpctrain.config import Config
from hpctrain.errors import RunError
from hpctrain.fault import fault
from hpctrain.files import writing
from hpctrain.report.record import encode_record, parse_record
from hpctrain.watchdog import CALLBACK, doing, running_time

STOP_FILE = "STOP"
LOOK_EVERY = 0.5  # seconds between checks of the file system
SPARE = 5.0  # seconds added to the measured times
#: A user's function of the record of a validation; a true result stops the run.
OnEvaluation = Callable[[dict[str, Any]], object]


class Control:
    """Stop requests and preemption as this rank sees them.

    Only the rank that is given a folder checks for the STOP file there, and the deadline.
    """

    def __init__(
        self,
        folder: Path | None,
        ends: float | None = None,
        on_evaluation: OnEvaluation | None = None,
    ) -> None:
        """`ends` is the deadline of the run, in seconds since 1970."""
        self._file = folder / STOP_FILE if folder else None
        self._interrupted = False
        self._stop_seen = False
        self._looked = 0.0
        self._before: Any = None  # handler of SIGINT
        # By a clock of which the time in which a job is suspended does not count.
        self._deadline = ends - time.time() + running_time() if folder and ends else None
        self._on_evaluation = on_evaluation if folder else None
        # Seconds, as measured
        self.slowest_step = 0.0
        self.slowest_evaluation = 0.0
        self.saving = 0.0

    def __enter__(self) -> Control:
        if threading.current_thread() is threading.main_thread():  # others cannot set a handler
            self._before = signal.signal(signal.SIGINT, self._on_interrupt)
        return self

    def __exit__(self, *error: object) -> None:
        if self._before is not None:
            signal.signal(signal.SIGINT, self._before)

    def _on_interrupt(self, number: int, frame: FrameType | None) -> None:
        if self._interrupted:  # a second Ctrl-C ends the run at once
            raise KeyboardInterrupt
        self._interrupted = True

    def requests(self, save: bool) -> list[str]:
        """Return what this rank requests in its next step; see `Message.request`."""
        flags = {
            "stop": self.stop_requested(),
            "preempted": self.preempted_by() is not None,
            "save": save,
        }
        return [name for name, is_set in flags.items() if is_set]

    def stop_requested(self) -> bool:
        """Whether the run is to stop. Checks for the STOP file at most twice a second."""
        now = time.monotonic()
        if self._file and not self._stop_seen and now - self._looked > LOOK_EVERY:
            self._looked = now
            self._stop_seen = self._file.is_file()
        return self._stop_seen or self._interrupted

    def evaluated(self, record: dict[str, Any]) -> None:
        """Call the user's function with the record of a validation, as in the file; it may ask to
        stop.
        """
        if self._on_evaluation:
            doing(CALLBACK)
            self._stop_seen |= bool(self._on_evaluation(parse_record(encode_record(record))))

    def ended(self) -> None:
        """Remove the STOP file after the end of the run, when the request is fulfilled."""
        if self._file:
            with contextlib.suppress(OSError):
                self._file.unlink()

    def preempted_by(self, evaluating: bool = False) -> str | None:
        """Return the signal or time limit that preempts the run, if any.

        The run ends early enough before the deadline for steps, an evaluation and saves at their
        slowest so far; with `evaluating` for no evaluation, since the one in progress calls this.
        """
        if self._deadline is not None:
            evaluation = 0.0 if evaluating else self.slowest_evaluation
            needed = SPARE + 2 * self.slowest_step + evaluation + 2 * self.saving
            if running_time() > self._deadline - needed:
                return "the time is up"
        return received_signal()


def find_deadline(config: Config) -> tuple[float | None, str]:
    """Return the deadline in seconds since 1970, if any, and a note if the job's end is unknown.

    It is that of --time-limit, from now, or the end of the job, for which the scheduler is asked
    (rank 0).
    """
    ends = [time.time() + config.time_limit] if config.time_limit else []
    note = ""
    try:
        if (job := job_end()) is not None:
            ends.append(job)
    except RunError as error:
        note = (
            f"the end of this job is unknown ({error}): without --time-limit, the run leaves in"
            " time only on a signal (see docs/cluster.md)"
        )
    return min(ends, default=None), note


def request_stop(folder: Path) -> None:
    """Ask the run in this folder to stop after its next step.

    Raises RunError if the STOP file cannot be written.
    """
    with writing(folder / STOP_FILE):
        (folder / STOP_FILE).touch()


LOCK_FILE = "lock"
NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP, errno.EINVAL)


class RunLock:
    """A kernel lock on a file in the folder, released when its process ends (rank 0).

    On a file system without locks, nothing is locked.
    """

    def __init__(self) -> None:
        self._descriptor = -1

    def take(self, folder: Path) -> bool:
        """Lock the folder, and return True; False if another process has locked it.

        Raises RunError if the folder is not writable.
        """
        with writing(folder / LOCK_FILE):
            self._descriptor = os.open(folder / LOCK_FILE, os.O_RDWR | os.O_CREAT, 0o666)
            try:
                fcntl.lockf(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except (BlockingIOError, PermissionError):
                self.release()
                return False
            except OSError as error:
                if error.errno not in NO_LOCKS:
                    raise
        fault("lock.taken")
        return True

    def release(self) -> None:
        """Release the lock."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1


def is_locked(folder: Path) -> bool:
    """Whether another process has locked the folder. Raises RunError if it is not writable."""
    lock = RunLock()
    is_free = lock.take(folder)
    lock.release()
    return not is_free
