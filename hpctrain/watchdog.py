"""A watchdog for each rank: no run hangs forever, and the log names the ranks that hung.

Every rank reports its activity; a thread writes it to the rank's heartbeat file every few seconds
(``heartbeats.py``). If a rank has reported nothing new for the timeout, one rank reads all
heartbeats; if none is newer, it names the ranks that did not arrive and aborts all. Stacks are
written to files. A rank that cannot run its thread either (stopped, or stuck in native code) is
ended by faulthandler's own timer or by the others. The kernel kills ranks whose mpirun died.

Without a folder for heartbeats (before a run has one; evaluate and predict) each rank reports its
own hang. If MPI_Init takes long, one rank of each host reports it: a host without such a line has
not started all of its ranks.
"""

from __future__ import annotations

import faulthandler
import os
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import TracebackType
from typing import Any

from hpctrain.errors import UsageError
from hpctrain.heartbeats import (
    BEAT_EVERY,
    WAITING,
    Beat,
    Turn,
    beat_interval,
    blame,
    phase_of,
    read_beats,
    write_beat,
)
from hpctrain.launcher import (
    end_with_launcher,
    launched_local_rank,
    local_size,
    under_mpirun,
)
from hpctrain.text import say

LAST_WORDS = 5.0  # seconds between asking MPI to abort and exiting without it
IMPORTS = 30.0  # seconds that the start may take in addition to --hang-timeout
MPI_INIT = f"{WAITING}all in MPI_Init"
PATIENCE = 3  # times the limit, for a rank that waits where no heartbeats tell who works
SLOW_INIT = 60.0  # seconds in MPI_Init after which one rank of each host reports it
STDERR = 2  # file descriptor

_current: list[Watchdog] = []  # the last one is that of this process


def current() -> Watchdog | None:
    """Return the watchdog of this process, if it has one."""
    return _current[-1] if _current else None


def doing(what: str) -> None:
    """Report the next activity to the watchdog of this process, if it has one."""
    if _current:
        _current[-1].doing(what)


def started(what: str) -> None:
    """Report the next activity after all imports: from now on --hang-timeout alone applies."""
    if _current:
        _current[-1].limit = _current[-1].timeout
    doing(what)


def keep_in(folder: Path) -> None:
    """Write the heartbeats of this process to `folder` from now on.

    Raises UsageError if that is not possible.
    """
    if _current:
        _current[-1].keep_in(folder)


@contextmanager
def waiting(whom: str = "all") -> Iterator[None]:
    """Report that the block waits for other ranks."""
    before = _current[-1].activity if _current else ""
    if not before.startswith(WAITING):
        doing(f"{WAITING}{whom} in {before}")
    yield
    doing(before)


class Watchdog:
    """Watches one rank within a ``with`` block.

    If it watches a `whole` process, imports get `IMPORTS` seconds more, and crashes and the SIGTERM
    of mpirun write stacks too. `abort` ends all ranks with an exit code; None = MPI is not
    initialized yet.
    """

    def __init__(
        self,
        rank: int,
        size: int,
        host: str,
        timeout: float,
        abort: Callable[[int], Any] | None = None,
        whole: bool = False,
    ) -> None:
        self.rank, self.size, self.host, self.timeout = rank, size, host, timeout
        self.abort = abort
        #: Seconds without a new report after which this rank counts as hung.
        self.limit = timeout + IMPORTS if whole else timeout
        self._whole = whole
        self._folder: Path | None = None
        self._failed = False
        self._stack: int | None = None  # descriptor of the open stack file
        self._turn: Turn | None = None
        self.activity, self._since = "start", time.monotonic()
        self._init_reported = False
        self._beaten, self._phase = time.monotonic(), ""  # of the last heartbeat that `look` wrote
        self._looked = 0.0  # when the time was up, and it looked at the heartbeats of others
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="watchdog", daemon=True)

    @property
    def _allowed(self) -> float:
        """Seconds that the current activity may take."""
        alone = self._folder is None and self.activity != MPI_INIT
        return self.limit * (PATIENCE if alone and self.activity.startswith(WAITING) else 1)

    @property
    def interval(self) -> float:
        """Seconds between two heartbeats."""
        return beat_interval(self.timeout, self.size)

    def __enter__(self) -> Watchdog:
        end_with_launcher()
        _current.append(self)
        self._arm()
        self._thread.start()
        return self

    def __exit__(
        self, kind: type | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._failed = self._failed or error is not None
        self._over.set()
        self._thread.join(LAST_WORDS)  # it may be stuck on a file system
        faulthandler.cancel_dump_traceback_later()  # after the join: the thread arms it
        _current.remove(self)
        self._leave_folder()

    def _arm(self) -> None:
        """Start faulthandler's timer, which needs no interpreter, as a second line of defence. Its
        limit is longer than the thread's, which restarts it with each heartbeat."""
        limit = 2 * self.limit + LAST_WORDS
        stacks = STDERR if self._stack is None else self._stack
        faulthandler.dump_traceback_later(limit, exit=True, file=stacks)

    def keep_in(self, folder: Path) -> None:
        """Write heartbeats and stacks to `folder` from now on. Raises UsageError if that fails."""
        try:
            self._folder, self._turn = folder, Turn(folder, 3 * self.interval)
            self._open_stack(folder)
            self.beat()
        except OSError as error:
            raise UsageError(
                f"cannot write into {folder} on {self.host}: {error.strerror}; it must be a folder"
                " that all ranks see"
            ) from error

    def _open_stack(self, folder: Path) -> None:
        flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC
        self._stack = os.open(folder / f"{self.rank}.stack", flags, 0o666)
        if self._whole:
            faulthandler.enable(self._stack)
            if under_mpirun():  # elsewhere SIGTERM is a notice
                faulthandler.register(signal.SIGTERM, self._stack, all_threads=False, chain=True)
        self._arm()

    def _leave_folder(self) -> None:
        """Close the files in the folder and remove those that are not needed any more."""
        folder, stack, turn = self._folder, self._stack, self._turn
        self._folder = self._stack = self._turn = None
        if folder is None or stack is None or turn is None:
            return
        faulthandler.cancel_dump_traceback_later()
        if self._whole:
            faulthandler.disable()
            faulthandler.unregister(signal.SIGTERM)
        os.close(stack)
        with suppress(OSError):
            turn.give_back()
            path = folder / f"{self.rank}.stack"
            if not path.stat().st_size:
                path.unlink()
            if not self._failed:  # a heartbeat that remains indicates a crash
                (folder / f"{self.rank}.json").unlink(missing_ok=True)

    def doing(self, what: str) -> None:
        """Report the next activity, and restart the time."""
        self.activity, self._since = what, time.monotonic()

    def fail(self, why: str) -> None:
        """Record why this rank is about to abort all ranks."""
        self._failed = True
        self.beat(why)

    def beat(self, failed: str = "") -> None:
        """Write a heartbeat."""
        if self._folder is None:
            return
        since = round(time.monotonic() - self._since, 1)
        now, limit = round(time.time(), 1), round(self.limit, 1)
        who = self.rank, self.host, os.getpid()
        beat = Beat(*who, self.activity, since, now, limit, failed)
        with suppress(OSError):  # no space, or the folder is gone: the training loop reports it
            write_beat(self._folder, beat)

    def _watch(self) -> None:
        while not self._over.wait(min(1.0, self.interval)):
            self.look()

    def look(self) -> None:
        """Write a heartbeat if one is due, and end all ranks if this one has hung."""
        now = time.monotonic()
        self.report_slow_init(now)
        if now - self._beaten >= self.interval or phase_of(self.activity) != self._phase:
            self._beaten, self._phase = now, phase_of(self.activity)
            self.beat()
            self._arm()
        turn = self._turn
        if now - self._since <= self._allowed:
            if turn:
                turn.give_back()
        elif turn is None or not turn.mine or now - self._looked >= self.interval:
            self._looked = now
            self._time_is_up()

    def _time_is_up(self) -> None:
        """End all ranks, unless another rank has the turn or some rank has made progress since."""
        turn, folder = self._turn, self._folder
        if turn is None or folder is None:
            self._end([])
        elif turn.take():
            beats, now = read_beats(folder), turn.now()
            others = [beat for beat in beats if beat.rank != self.rank]
            if all(now - beat.written + beat.seconds > beat.limit for beat in others):
                turn.announce()
                self._end(blame(beats, self.size, now, 2 * self.interval))
        elif turn.over:
            self._dump()
            time.sleep(2 * LAST_WORDS)
            os._exit(1)

    def report_slow_init(self, now: float) -> None:
        """Print once, on one rank of each host, that MPI_Init still waits at this time."""
        waited = now - self._since if self.activity == MPI_INIT else 0.0
        if waited > SLOW_INIT and launched_local_rank() == 0 and not self._init_reported:
            self._init_reported = True
            say(
                f"{self._where} still in MPI_Init after {SLOW_INIT:.0f} s; the launcher started"
                f" {local_size()} of {self.size} ranks here: a host without such a line is missing",
                sys.stderr,
            )

    @property
    def _where(self) -> str:
        return f"[rank {self.rank} of {self.size} @{self.host}]"

    def _end(self, lines: list[str]) -> None:
        """Report which ranks hung, write the stacks and end all ranks."""
        lines = [f"nothing new for {self._allowed:.0f} s while in: {self.activity}", *lines]
        lines.append(f"stacks are in {self._dump()}")
        say("\n".join(f"{self._where} {line}" for line in lines), sys.stderr)
        self.fail("; ".join(lines))
        time.sleep(min(BEAT_EVERY, self.timeout / 5))  # the others write their stacks too
        if self.abort:
            threading.Thread(target=self.abort, args=(1,), daemon=True).start()
            time.sleep(LAST_WORDS)
        os._exit(1)

    def _dump(self) -> str:
        """Write the stacks of all threads to a file; return its folder, or its name if none."""
        try:
            if self._stack is None:
                descriptor, name = tempfile.mkstemp(".stack", "hpctrain-")
                faulthandler.dump_traceback(descriptor, all_threads=True)
                return name
            faulthandler.dump_traceback(self._stack, all_threads=True)
            return str(self._folder)
        except (OSError, ValueError) as error:
            return f"no file ({error})"
