"""Requests to stop (a STOP file in the run's folder, Ctrl-C without a launcher) and preemption (a
signal of the scheduler, a time limit).

A request sets a flag in the message of this rank's next step, so all ranks end after the same step.
After a stop the exit code is 0, after preemption 75: the same command resumes the run.

A lock lets only one job at a time work in a run's folder, also while an earlier one still ends.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import signal
import time
from pathlib import Path
from types import FrameType, TracebackType
from typing import TYPE_CHECKING, Any, NamedTuple

from hpctrain.config import duration
from hpctrain.errors import RunError, UsageError
from hpctrain.files import open_itself
from hpctrain.launcher import job_end, received_signal

if TYPE_CHECKING:  # watching and sweeping stop runs without it
    import torch

STOP_FILE = "STOP"
LOOK_EVERY = 0.5  # seconds between looks at the file system
SPARE = 5.0  # seconds, besides what is measured


class StepFlags(NamedTuple):
    """What a rank sends to all others in a step's message."""

    waited: float = 0.0  # seconds for data
    stop: bool = False
    preempted: bool = False
    save: bool = False  # a checkpoint
    digest: torch.Tensor | None = None  # part of the digest of its state, below 2^24


class Control:
    """What this rank has been asked to do. Only the rank given a folder looks there, and at the
    clock.
    """

    def __init__(self, folder: Path | None, ends: float | None = None) -> None:
        """`ends` is when the run must have ended, in seconds since 1970."""
        self._file = folder / STOP_FILE if folder else None
        self._interrupted = self._stop_seen = False
        self._looked = 0.0
        self._before: Any = signal.SIG_DFL  # handler of SIGINT
        self._deadline = ends if folder else None
        self.slowest_step = self.slowest_evaluation = self.saving = 0.0  # seconds, measured

    def __enter__(self) -> Control:
        self._before = signal.signal(signal.SIGINT, self._on_interrupt)
        return self

    def __exit__(
        self, kind: type | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        signal.signal(signal.SIGINT, self._before)

    def _on_interrupt(self, number: int, frame: FrameType | None) -> None:
        if self._interrupted:  # a second Ctrl-C means it
            raise KeyboardInterrupt
        self._interrupted = True

    def flags(self, waited: float, save: bool, digest: torch.Tensor | None) -> StepFlags:
        """What this rank sends to all others in its next step."""
        return StepFlags(waited, self.asked(), self.preempted_by() is not None, save, digest)

    def margin(self, evaluating: bool = False) -> float:
        """Seconds before the deadline at which to end: for a step, an evaluation (one that is
        `evaluating` looks at the clock itself) and a save.
        """
        evaluation = 0.0 if evaluating else self.slowest_evaluation
        return SPARE + 2 * self.slowest_step + evaluation + 2 * self.saving

    def asked(self) -> bool:
        """Whether the run is to stop. Looks for the file at most twice a second."""
        now = time.monotonic()
        if self._file and not self._stop_seen and now - self._looked > LOOK_EVERY:
            self._looked = now
            self._stop_seen = self._file.is_file()
        return self._stop_seen or self._interrupted

    def ended(self) -> None:
        """The run has ended: take away the STOP file, what it asked for is done."""
        if self._file:
            with contextlib.suppress(OSError):
                self._file.unlink()

    def preempted_by(self, evaluating: bool = False) -> str | None:
        """The signal or time limit that preempts the run, if there is one."""
        if self._deadline is not None and time.time() > self._deadline - self.margin(evaluating):
            return "the time is up"
        return received_signal()


def deadline(limit: str | None) -> tuple[float | None, str | None]:
    """When the run must have ended, in seconds since 1970: by --time-limit from now, or by the
    end of the Slurm job; the earlier of the two. And a note if Slurm does not give its end.
    """
    ends, note = [time.time() + duration(limit, "--time-limit")] if limit else [], None
    try:
        if (job := job_end()) is not None:
            ends.append(job)
    except RunError as error:
        note = (
            f"the end of this Slurm job is unknown ({error}): without --time-limit, the run leaves"
            " in time only on a signal (sbatch --signal)"
        )
    return min(ends, default=None), note


def request_stop(folder: Path) -> None:
    """Ask the run in this folder to stop after its next step. RunError where that cannot be."""
    try:
        os.close(open_itself(folder / STOP_FILE, os.O_WRONLY | os.O_CREAT))
    except OSError as error:
        raise RunError(f"cannot write {folder / STOP_FILE}: {error.strerror}") from error


LOCK_FILE = "lock"
NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP, errno.EINVAL)


class RunLock:
    """A lock of the kernel on a file in the folder; gone with the process that holds it (rank 0).

    Where the file system has no locks, nothing is locked.
    """

    def __init__(self) -> None:
        self._descriptor = -1

    def take(self, folder: Path) -> None:
        """Lock the folder. UsageError where another process holds it, RunError where nothing can
        be written there.
        """
        try:
            self._descriptor = open_itself(folder / LOCK_FILE, os.O_RDWR | os.O_CREAT)
        except OSError as error:
            raise RunError(f"cannot write {folder / LOCK_FILE}: {error.strerror}") from error
        try:
            fcntl.lockf(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except (BlockingIOError, PermissionError) as error:
            self.release()
            raise UsageError(
                f"another job works in {folder}: wait for it to end, or choose another --run"
            ) from error
        except OSError as error:
            if error.errno not in NO_LOCKS:
                raise RunError(f"cannot lock {folder / LOCK_FILE}: {error.strerror}") from error

    def release(self) -> None:
        """Give the folder free."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1


def is_locked(folder: Path) -> bool:
    """Whether another process works in the folder. RunError where nothing can be written there."""
    lock = RunLock()
    try:
        lock.take(folder)
    except UsageError:
        return True
    lock.release()
    return False
