"""A watchdog for each rank: no run hangs forever, and the log names the ranks that hung.

Every rank reports its activity; a thread writes it to the rank's heartbeat (``heartbeat.py``)
every few seconds. If a rank has reported nothing new for the timeout, one rank reads all
heartbeats; if none is newer, it names the ranks that did not arrive and aborts all. Stacks are
written to files. A rank that cannot run its thread either (stopped, or stuck in native code) is
ended by a timer of the kernel or by the others. The kernel kills ranks whose mpirun died.

A whole job may be suspended: by Slurm, by Ctrl-Z or SIGSTOP, with its virtual machine. Clocks go
on meanwhile. So the time in which the watchdog's own thread did not run does not count, and the
kernel's timer gives the thread 14 seconds to restart it (`limit_time`).

Without a folder for heartbeats (before a run has one; evaluate and predict) each rank reports its
own hang. If MPI_Init takes long, one rank of each host reports it: a host without such a line has
not started all of its ranks.
"""

from __future__ import annotations

import ctypes
import faulthandler
import json
import os
import re
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

from hpctrain.cluster import end_with_parent, launched_local_rank, local_size, under_mpirun
from hpctrain.errors import UsageError
from hpctrain.heartbeat import (
    BEAT_EVERY,
    HANG,
    WAITING,
    Beat,
    beat_file,
    blame,
    is_overdue,
    read_beat,
    read_beats,
    stack_file,
)
from hpctrain.text import say

MPI_INIT = f"{WAITING}all in MPI_Init"
CALLBACK = "calling on_evaluation"  # on rank 0 alone
SLOW_INIT = 60.0  # seconds in MPI_Init after which one rank of each host reports it
IMPORTS = 30.0  # seconds that the start may take in addition to --hang-timeout
PATIENCE = 3  # times the limit, for a rank that waits where no heartbeats tell who works
TICK = 1.0  # seconds between two looks at the time; what is longer than twice that is no tick
LAST_WORDS = 5.0  # seconds between asking MPI to abort and exiting without it
#: What comes before the phase of an activity; recording and reading are parts of a step.
PHASE = re.compile(f"^({WAITING}.+? in )?((recording|reading) )?")

_current: list[Watchdog] = []  # the last one is that of this process


def current() -> Watchdog | None:
    """Return the watchdog of this process, if it has one."""
    if not _current:
        return None
    return _current[-1]


def running_time() -> float:
    """Return the seconds of a clock that stands still while this process is suspended.

    Without a watchdog it is the monotonic clock.
    """
    watchdog = current()
    if watchdog is None:
        return time.monotonic()
    return watchdog.running_time()


def limit_time(seconds: float) -> None:
    """Let the kernel kill this process in 14 s more than so many seconds; 0 withdraws that.

    The first SIGALRM calls alarm(SIGALRM), libc's function, by a handler that is removed when it is
    called: the second one, 14 seconds later, ends the process. No Python runs for that, so it also
    works while native code holds the interpreter's lock. A process that was suspended until after
    the time gets the first one when it continues, and can restart the timer before the second.
    A program that handles SIGALRM itself keeps it.
    """
    if signal.getsignal(signal.SIGALRM) is not signal.SIG_DFL:
        return
    libc = ctypes.CDLL(None)
    handler = ctypes.c_void_p()  # the default
    if seconds:
        handler = ctypes.cast(libc.alarm, ctypes.c_void_p)
    signal.setitimer(signal.ITIMER_REAL, 0)
    libc.sysv_signal(signal.SIGALRM, handler)
    signal.setitimer(signal.ITIMER_REAL, seconds)


def doing(what: str) -> None:
    """Report the next activity to the watchdog of this process, if it has one."""
    watchdog = current()
    if watchdog:
        watchdog.doing(what)


def started(what: str) -> None:
    """Report the next activity after all imports: from now on --hang-timeout alone applies."""
    watchdog = current()
    if watchdog:
        watchdog.limit = watchdog.timeout
        watchdog.doing(what)


@contextmanager
def waiting(whom: str = "all") -> Iterator[None]:
    """Report that the block waits for other ranks."""
    watchdog = current()
    if watchdog is None:
        yield
        return
    before = watchdog.activity
    if not before.startswith(WAITING):
        watchdog.doing(f"{WAITING}{whom} in {before}")
    yield
    watchdog.doing(before)


class Watchdog:
    """Watches one rank within a ``with`` block.

    If it watches a `whole` process, imports get `IMPORTS` seconds more, and crashes and the SIGTERM
    of mpirun write stacks too. `abort` ends all ranks with an exit code, once MPI is initialized.
    """

    def __init__(
        self,
        rank: int,
        size: int,
        host: str,
        timeout: float,
        whole: bool = False,
    ) -> None:
        self.host = host
        self.timeout = timeout
        self.set_rank(rank, size)
        self.abort: Callable[[int], Any] | None = None
        #: Seconds without a new report after which this rank counts as hung.
        self.limit = timeout
        if whole:
            self.limit += IMPORTS
        self._whole = whole
        self._failed = False
        self._init_reported = False
        self._folder: Path | None = None  # of heartbeats
        self._stack = 2  # descriptor of the file for stacks; stderr before there is a folder
        now = time.monotonic()
        self.activity = "start"
        self._since = now  # it began
        self._beaten = now  # when `look` wrote the last heartbeat
        self._phase = ""  # of that heartbeat's activity
        self._looked = 0.0  # when the time was up, and it looked at the heartbeats of others
        self._ticked = now  # last tick
        self._idle = now  # end of its work
        self._suspended = 0.0  # seconds in all
        #: Whether the kernel's timer is free: a program may have set it for itself.
        self._limits = signal.getitimer(signal.ITIMER_REAL) == (0.0, 0.0)
        self._over = threading.Event()
        self._thread = threading.Thread(
            target=self._watch,
            name="watchdog",
            daemon=True,
        )

    def set_rank(self, rank: int, size: int) -> None:
        """Watch this rank of so many."""
        self.rank = rank
        self.size = size
        self._where = f"[rank {rank} of {size} @{self.host}]"
        #: Seconds between two heartbeats; longer for many ranks, to spare the file system.
        self.interval = min(max(BEAT_EVERY, size / 20), self.timeout / 6)

    def __enter__(self) -> Watchdog:
        if under_mpirun():
            end_with_parent(os.getppid())
        _current.append(self)
        self._arm()
        self._thread.start()
        return self

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        self._failed = self._failed or error is not None
        self._over.set()
        self._thread.join(LAST_WORDS)  # it may be stuck on a file system
        faulthandler.cancel_dump_traceback_later()  # after the join: the thread arms them
        if self._limits:
            limit_time(0)
        _current.remove(self)
        if self._folder is None:
            return
        if self._whole:
            faulthandler.disable()
            faulthandler.unregister(signal.SIGTERM)
        os.close(self._stack)
        stacks = stack_file(self._folder, self.rank)
        with suppress(OSError):
            if stacks.stat().st_size == 0:
                stacks.unlink()
            if not self._failed:  # a heartbeat that remains indicates a crash
                beat_file(self._folder, self.rank).unlink(missing_ok=True)

    def _arm(self) -> None:
        """Start the timers that need no interpreter; the thread restarts them."""
        limit = 2 * self.limit + LAST_WORDS
        if self._limits:
            limit_time(limit)
        if self._folder:
            faulthandler.dump_traceback_later(limit, file=self._stack)

    def keep_in(self, folder: Path) -> None:
        """Write heartbeats and stacks to `folder` from now on. Raises UsageError if that fails."""
        try:
            self._stack = os.open(stack_file(folder, self.rank), os.O_WRONLY | os.O_CREAT)
        except OSError as error:
            raise UsageError(
                f"cannot write into {folder} on {self.host}: {error.strerror};"
                " it must be a folder that all ranks see"
            ) from error
        self._folder = folder
        if self._whole:
            faulthandler.enable(self._stack)
            if under_mpirun():  # elsewhere SIGTERM is a notice
                faulthandler.register(
                    signal.SIGTERM,
                    self._stack,
                    all_threads=False,
                    chain=True,
                )
        self._arm()
        self.beat()

    def doing(self, what: str) -> None:
        """Report the next activity, and restart the time."""
        self.activity = what
        self._since = time.monotonic()

    def fail(self, why: str) -> None:
        """Record why this rank is about to abort all ranks."""
        self._failed = True
        self.beat(why)

    def beat(self, failed: str = "") -> None:
        """Write a heartbeat."""
        if self._folder is None:
            return
        beat = Beat(
            rank=self.rank,
            host=self.host,
            pid=os.getpid(),
            doing=self.activity,
            seconds=time.monotonic() - self._since,
            time=time.time(),
            limit=self.limit,
            failed=failed,
        )
        file = beat_file(self._folder, self.rank)
        new = file.with_name(f".{file.name}")
        with suppress(OSError):  # no space, or the folder is gone: the training loop reports it
            new.write_text(json.dumps(asdict(beat)) + "\n")
            new.replace(file)

    def _watch(self) -> None:
        while not self._over.wait(min(TICK, self.interval)):
            self.tick()
            self.look()
            self._idle = time.monotonic()

    def tick(self) -> None:
        """Leave out the time since the last tick if this process was suspended meanwhile.

        Work that took long, as on a slow file system, was no suspension for `running_time`.
        """
        now = time.monotonic()
        if now - self._idle > 2 * TICK:
            self._suspended += now - self._idle - TICK
        missed = now - self._ticked - TICK
        self._ticked = now
        self._idle = now
        if missed <= TICK:
            return
        self._since = min(now, self._since + missed)
        self._looked = now  # the other ranks need time to write a heartbeat
        faulthandler.cancel_dump_traceback_later()
        if self._folder and not self._failed:  # else the stacks are meant
            os.lseek(self._stack, 0, os.SEEK_SET)
            os.ftruncate(self._stack, 0)

    def running_time(self) -> float:
        """Return the seconds of a clock that stands still while this process is suspended."""
        idle = self._idle
        return idle - self._suspended + min(time.monotonic() - idle, 2 * TICK)

    def look(self) -> None:
        """Write a heartbeat if one is due, and end all ranks if this one has hung."""
        now = time.monotonic()
        waited = now - self._since
        phase = PHASE.sub("", self.activity).partition(" ")[0]
        if now - self._beaten >= self.interval or phase != self._phase:
            self._beaten = now
            self._phase = phase
            self.beat()
            self._arm()
        if self.activity == MPI_INIT and waited > SLOW_INIT and not self._init_reported:
            self._init_reported = True
            if launched_local_rank() == 0:
                say(
                    f"{self._where} still in MPI_Init after {SLOW_INIT:.0f} s;"
                    f" the launcher started {local_size()} of {self.size} ranks here:"
                    " a host without such a line is missing",
                    sys.stderr,
                )
        if waited > self._allowed:
            self._time_is_up(now)

    @property
    def _allowed(self) -> float:
        """Seconds that the current activity may take."""
        is_waiting = self.activity.startswith(WAITING) and self.activity != MPI_INIT
        if is_waiting and self._folder is None:
            return PATIENCE * self.limit
        return self.limit

    def _time_is_up(self, now: float) -> None:
        """End all ranks, unless another rank is to decide or some rank has made progress since.

        The lowest of the ranks that still write heartbeats and whose time is up decides: it alone
        reads the heartbeats of all ranks, again and again.
        """
        folder = self._folder
        if folder is None:
            self._end([])
        elif os.path.exists(folder / HANG):  # another rank ends all
            self._dump()
            time.sleep(2 * LAST_WORDS)
            os._exit(1)
        elif now - self._looked >= self.interval:
            self._looked = now
            self._judge(folder)

    def _judge(self, folder: Path) -> None:
        """End all ranks if none has reported anything new, and no lower rank is to do that."""
        silence = 2 * self.interval
        clock = self._file_clock()
        for rank in reversed(range(self.rank)):
            beat = read_beat(beat_file(folder, rank))
            if beat and clock - beat.time <= silence and is_overdue(beat, clock):
                return
        beats = read_beats(folder)
        if all(is_overdue(beat, clock) for beat in beats if beat.rank != self.rank):
            with suppress(OSError):
                (folder / HANG).touch()
            self._end(blame(beats, self.size, clock, silence))

    def _file_clock(self) -> float:
        """Return the time of the clock that stamps the heartbeats, also on a full disk."""
        with suppress(OSError):
            os.utime(self._stack)
            return os.fstat(self._stack).st_mtime
        return time.time()

    def _end(self, lines: list[str]) -> None:
        """Report which ranks hung, write the stacks and end all ranks."""
        lines = [
            f"nothing new for {self._allowed:.0f} s while in: {self.activity}",
            *lines,
            f"stacks are in {self._dump()}",
        ]
        say("\n".join(f"{self._where} {line}" for line in lines), sys.stderr)
        self.fail("; ".join(lines))
        time.sleep(min(BEAT_EVERY, self.timeout / 5))  # the others write their stacks too
        if self.abort:
            thread = threading.Thread(target=self.abort, args=(1,), daemon=True)
            thread.start()
            time.sleep(LAST_WORDS)
        os._exit(1)

    def _dump(self) -> str:
        """Write the stacks of all threads to a file; return its folder, or its name if none."""
        descriptor = self._stack
        name = str(self._folder)
        if self._folder is None:
            descriptor, name = tempfile.mkstemp(".stack", "hpctrain-")
        faulthandler.dump_traceback(descriptor, all_threads=True)
        return name
