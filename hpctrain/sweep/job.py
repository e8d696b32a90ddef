"""One network that runs: its launcher, its log, its record."""

from __future__ import annotations

import shutil
import signal
import tempfile
import time
from pathlib import Path

from hpctrain import launch
from hpctrain.errors import RunError
from hpctrain.launcher import LEFT
from hpctrain.report.history import RunHistory
from hpctrain.report.record import HistoryReader
from hpctrain.sweep.file import Network
from hpctrain.sweep.results import DONE, FAILED, STOPPED, UNFINISHED
from hpctrain.sweep.slots import Slot
from hpctrain.training.control import STOP_FILE, request_stop

MOST_READ = 1 << 16  # bytes of a log that are looked at for a reason
LAST_WAIT = 10.0  # seconds from SIGTERM to SIGKILL


class Job:
    """A launcher at work on a network; the caller polls it."""

    def __init__(self, folder: Path, network: Network, slot: Slot, command: list[str]) -> None:
        """Start it. RunError where that cannot be."""
        self.network, self.slot = network, slot
        self.folder = folder / network.name
        self.log = folder / f"{network.name}.log"
        self.asked: str | None = None  # what was asked of it: leave, stop or kill
        self._reader = HistoryReader(self.folder, "none")
        self._ended_before = self.look().outcome.time
        self._killed_at = 0.0
        (self.folder / STOP_FILE).unlink(missing_ok=True)  # of an earlier sweep
        self._printed = self.log.stat().st_size if self.log.exists() else 0
        self._sessions = tempfile.mkdtemp(prefix="hpctrain-")
        own = {**slot.environment(), **launch.own_sessions(self._sessions)}
        try:
            self._process = launch.start(command, self.log, launch.environment(own), slot.cores)
        except OSError as error:
            shutil.rmtree(self._sessions, ignore_errors=True)
            raise RunError(f"cannot start {command[0]}: {error.strerror}") from error

    def look(self) -> RunHistory:
        """What its record tells by now."""
        self._reader.poll()
        return self._reader.history

    def leave(self) -> None:
        """Ask it to save and to leave with exit code 75: launchers hand SIGUSR2 to all ranks."""
        if self.asked in (None, "stop"):
            self.asked = "leave"
            self._process.send_signal(signal.SIGUSR2)

    def stop(self) -> None:
        """Ask it to stop after its next step; to be repeated until it has a folder."""
        if self.asked is None and self.folder.is_dir():
            self.asked = "stop"
            request_stop(self.folder)

    def kill(self) -> None:
        """End it: SIGTERM, so that the launcher ends its ranks; SIGKILL if it does not go."""
        if self.asked != "kill":
            self.asked, self._killed_at = "kill", time.monotonic()
            self._process.terminate()
        elif time.monotonic() > self._killed_at + LAST_WAIT:
            self._process.kill()

    def outcome(self) -> tuple[str, str | None] | None:
        """Status and reason once it has ended, None before. It left by itself: "left"."""
        code = self._process.poll()
        if code is None:
            return None
        shutil.rmtree(self._sessions, ignore_errors=True)
        (self.folder / STOP_FILE).unlink(missing_ok=True)  # it may have come too late
        outcome = self.look().outcome
        own = outcome.status if outcome.time != self._ended_before else ""
        if own == "done" or (code == 0 and outcome.status == "done"):
            return DONE, outcome.reason
        if own == "stopped":
            return STOPPED, outcome.reason
        if own == "failed" and self.asked != "kill":
            return FAILED, outcome.reason or self._last_words()
        if self.asked in ("leave", "kill"):
            return UNFINISHED, None
        if code == LEFT:
            return "left", outcome.reason
        if code < 0:
            return FAILED, f"ended by signal {-code} ({signal.Signals(-code).name})"
        return FAILED, self._last_words() if code else "it ended without a record"

    def _last_words(self) -> str:
        with open(self.log, "rb") as file:
            file.seek(max(self._printed, self.log.stat().st_size - MOST_READ))
            text = file.read().decode(errors="replace")
        return launch.last_words(text).removeprefix("hpctrain: ")
