"""A watch over each rank: nothing hangs for ever, and the log says who hung in what.

Every rank's loop says what it is about to do; a thread writes that to the rank's heartbeat file
every few seconds. Where nothing new is said for the timeout, the thread of some rank ends all:
it names the ranks that did not arrive, from their heartbeats, and leaves everybody's stack. A rank
that cannot run its thread either (stopped, or stuck in native code) is ended by faulthandler's own
timer, or by the others. The kernel ends ranks whose mpirun died.
"""

from __future__ import annotations

import faulthandler
import json
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any

from hpctrain.errors import UsageError
from hpctrain.launcher import end_with_launcher

FOLDER = "ranks"
BEAT_EVERY = 5.0  # seconds
LAST_WORDS = 5.0  # seconds between asking MPI to abort and exiting without it


def beat_interval(timeout: float, size: int) -> float:
    """Seconds between two heartbeats; many ranks write more rarely, for the file system's sake."""
    return min(max(BEAT_EVERY, size / 20), timeout / 6)


class Watchdog:
    """Watches one rank from when it is entered until it is left."""

    def __init__(
        self, rank: int, size: int, host: str, timeout: float, abort: Callable[[int], Any]
    ) -> None:
        self.rank, self.size, self.host, self.timeout = rank, size, host, timeout
        self._abort = abort
        self._folder: Path | None = None
        self._doing, self._since = "start", time.monotonic()
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="watchdog", daemon=True)

    def __enter__(self) -> Watchdog:
        end_with_launcher()
        self._arm()
        self._thread.start()
        return self

    def __exit__(
        self, kind: type | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._over.set()
        self._thread.join(LAST_WORDS)  # it may be stuck on a file system
        faulthandler.cancel_dump_traceback_later()  # the thread arms it

    def _arm(self) -> None:
        """The second line: a C timer that needs no interpreter. Later than the thread."""
        faulthandler.dump_traceback_later(2 * self.timeout + LAST_WORDS, exit=True, file=2)

    def keep_in(self, run: Path) -> None:
        """Write heartbeats into this run's folder from now on. UsageError where that cannot be."""
        folder = run / FOLDER
        try:
            folder.mkdir(exist_ok=True)
        except OSError as error:
            raise UsageError(
                f"cannot make {folder} on {self.host}: {error.strerror}; --runs-dir must be a"
                " folder that all ranks see"
            ) from error
        self._folder = folder
        self._beat()

    def doing(self, what: str) -> None:
        """Say what comes now; the time starts anew."""
        self._doing, self._since = what, time.monotonic()

    @contextmanager
    def phase(self, what: str) -> Iterator[None]:
        """Say what the block does."""
        self.doing(what)
        yield
        self.doing(f"after {what}")

    def _watch(self) -> None:
        armed = beaten = time.monotonic()
        while not self._over.wait(min(1.0, beat_interval(self.timeout, self.size))):
            now = time.monotonic()
            if now - beaten >= beat_interval(self.timeout, self.size):
                beaten = now
                self._beat()
            if self._since > armed:
                armed = now
                self._arm()
            if now - self._since > self.timeout:
                self._end()

    def _beat(self) -> None:
        if self._folder is None:
            return
        beat = {
            "rank": self.rank,
            "host": self.host,
            "pid": os.getpid(),
            "doing": self._doing,
            "seconds": round(time.monotonic() - self._since, 1),
            "time": round(time.time(), 1),
        }
        path = self._folder / f"{self.rank}.json"
        try:
            temporary = path.with_name(f".{path.name}.tmp")
            temporary.write_text(json.dumps(beat) + "\n")
            os.replace(temporary, path)
        except OSError:
            pass  # no room, or the folder is gone: the loop says so itself

    def _end(self) -> None:
        """Say who hung, leave the stacks, end all ranks."""
        self._beat()
        where = f"[rank {self.rank} of {self.size} @{self.host}]"
        lines = [f"nothing new for {self.timeout:.0f} s while in: {self._doing}"]
        lines += hung(self._folder, self.rank, 2 * beat_interval(self.timeout, self.size))
        print("".join(f"{where} {line}\n" for line in lines), file=sys.stderr, end="", flush=True)
        self._dump()
        time.sleep(min(2.0, self.timeout / 5))  # the others leave their stacks too
        threading.Thread(target=self._abort, args=(1,), daemon=True).start()
        time.sleep(LAST_WORDS)
        os._exit(1)

    def _dump(self) -> None:
        try:
            if self._folder is None:
                faulthandler.dump_traceback(sys.stderr, all_threads=True)
                return
            with (self._folder / f"{self.rank}.stack").open("w") as file:
                faulthandler.dump_traceback(file, all_threads=True)
        except (OSError, ValueError):
            pass


def hung(folder: Path | None, own: int, silence: float) -> list[str]:
    """A line for each other rank that gave no sign for `silence` seconds, or did not arrive where
    the others wait.
    """
    beats = []
    for path in sorted(folder.glob("[0-9]*.json")) if folder else []:
        try:
            beats.append(json.loads(path.read_text()))
        except (OSError, ValueError):
            continue
    lines = []
    for beat in beats:
        silent = time.time() - beat["time"]
        who = f"rank {beat['rank']} (process {beat['pid']} on {beat['host']})"
        if beat["rank"] != own and silent > silence:
            lines.append(f"{who} gave no sign for {silent:.0f} s, last in: {beat['doing']}")
        elif beat["rank"] != own and not beat["doing"].startswith("waiting for all"):
            lines.append(f"{who} did not arrive, it is in: {beat['doing']}")
    return lines
