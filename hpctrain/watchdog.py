"""A watchdog for each rank: no run hangs forever, and the log names the ranks that hung.

Every rank reports its activity; a thread writes it to the rank's heartbeat every few seconds. If a
rank has reported nothing new for the timeout, one rank reads all heartbeats; if none is newer, it
names the ranks that did not arrive and aborts all. Stacks are written to files. A rank that cannot
run its thread either (stopped, or stuck in native code) is ended by faulthandler's own timer or by
the others. The kernel kills ranks whose mpirun died.

A heartbeat is ``N.json`` in a folder that all ranks see: one JSON object with rank, host, pid,
doing, seconds (since that activity began), time (since 1970), limit (seconds) and, for a rank that
ended before the others, failed (the reason). ``N.stack`` beside it holds the stacks of a rank that
hung, crashed or was terminated by its launcher. Ages are differences of modification times, which
one file server sets, so the clocks of the hosts do not matter.

Without a folder for heartbeats (before a run has one; evaluate and predict) each rank reports its
own hang. If MPI_Init takes long, one rank of each host reports it: a host without such a line has
not started all of its ranks.
"""

from __future__ import annotations

import faulthandler
import json
import os
import re
import signal
import socket
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from types import TracebackType
from typing import Any

from hpctrain.cluster import (
    end_with_launcher,
    launched_local_rank,
    local_size,
    under_mpirun,
)
from hpctrain.errors import UsageError
from hpctrain.files import write_whole
from hpctrain.text import ranges, say
from hpctrain.typed import from_fields, parse_json

HEARTBEATS = "ranks"  # in the folder of a run
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


def remove_heartbeats(folder: Path) -> None:
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
