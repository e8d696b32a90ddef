"""One job at a time in a run's folder, also where the one before is not quite dead yet."""

from __future__ import annotations

import errno
import fcntl
import os
from pathlib import Path

from hpctrain.errors import RunError, UsageError
from hpctrain.files import open_itself

FILE = "lock"
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
            self._descriptor = open_itself(folder / FILE, os.O_RDWR | os.O_CREAT)
        except OSError as error:
            raise RunError(f"cannot write {folder / FILE}: {error.strerror}") from error
        try:
            fcntl.lockf(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except (BlockingIOError, PermissionError) as error:
            self.release()
            raise UsageError(
                f"another job works in {folder}: wait for it to end, or choose another --run"
            ) from error
        except OSError as error:
            if error.errno not in NO_LOCKS:
                raise RunError(f"cannot lock {folder / FILE}: {error.strerror}") from error

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
