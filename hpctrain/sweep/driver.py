"""The driver: trains networks in slots until all have ended, each in its own process group.

Its state is in the sweep's folder only, so a new driver can replace one that was killed: done and
failed networks are skipped, all others are launched again and resume from their checkpoints. A
network whose folder is still locked by another job waits.
"""

from __future__ import annotations

import shutil
import signal
import tempfile
import time
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path

from hpctrain import launch
from hpctrain.cluster import LEFT
from hpctrain.errors import RunError
from hpctrain.report.history import History
from hpctrain.sweep.display import SweepDisplay
from hpctrain.sweep.file import Sweep, SweepNetwork
from hpctrain.sweep.folder import (
    DONE,
    FAILED,
    PREEMPTED,
    RUNNING,
    STOPPED,
    UNFINISHED,
    NetworkResult,
    read_results,
    write_csv,
)
from hpctrain.sweep.machine import Slot
from hpctrain.training.control import STOP_FILE, is_locked, request_stop

POLL_PROCESSES_EVERY = 0.1  # seconds
POLL_FILES_EVERY = 0.5  # seconds between checks of records, locks and the STOP file


class NetworkProcess:
    """A launcher process that trains one network; polled by the driver."""

    def __init__(self, folder: Path, network: SweepNetwork, slot: Slot, command: list[str]) -> None:
        """Start the process. Raises RunError if it cannot be started."""
        self.network, self.slot = network, slot
        self.folder, self.log = folder / network.name, folder / f"{network.name}.log"
        self.requested: str | None = None  # preempt, stop or kill
        (self.folder / STOP_FILE).unlink(missing_ok=True)  # of an earlier sweep
        self._log_start = self.log.stat().st_size if self.log.exists() else 0
        self._sessions = tempfile.mkdtemp(prefix="hpctrain-")
        env = launch.environment({**slot.environment(), **launch.own_sessions(self._sessions)})
        try:
            self._record = launch.LaunchRecord(self.folder)
            self.process = launch.start(command, self.log, env, slot.cores)
        except RunError:
            shutil.rmtree(self._sessions, ignore_errors=True)
            raise

    def preempt(self) -> None:
        """Ask the run to save and exit with 75: launchers forward SIGUSR2 to all ranks."""
        if self.requested in (None, "stop"):
            self.requested = "preempt"
            self.process.send_signal(signal.SIGUSR2)

    def stop(self) -> None:
        """Ask the run to stop after its next step. To be called again until its folder exists."""
        if self.requested is None and self.folder.is_dir():
            self.requested = "stop"
            request_stop(self.folder)

    def history(self) -> History:
        """Return the history of the run."""
        self._record.history.follow()
        return self._record.history

    def outcome(self) -> tuple[str, str | None] | None:
        """Return status and reason once it has ended, else None; "preempted" only by others."""
        code = self.process.poll()
        if code is None:
            return None
        shutil.rmtree(self._sessions, ignore_errors=True)
        (self.folder / STOP_FILE).unlink(missing_ok=True)  # a request may have come too late
        own = self._record.outcome().status
        outcome = self._record.history.launch.outcome
        if own == DONE or (code == 0 and outcome.status == DONE):
            return DONE, outcome.reason
        if own == STOPPED:
            return STOPPED, outcome.reason
        if own == FAILED and self.requested != "kill":
            return FAILED, outcome.reason or self._last_error_line()
        if self.requested in ("preempt", "kill"):
            return UNFINISHED, None
        if code == LEFT:
            return PREEMPTED, outcome.reason
        if code < 0:
            return FAILED, f"ended by signal {-code} ({signal.Signals(-code).name})"
        return FAILED, self._last_error_line() if code else "it ended without a record"

    def _last_error_line(self) -> str:
        output = self.log.read_bytes()[self._log_start :]
        return launch.last_error_line(output.decode(errors="replace"))


class Driver:
    """Trains the networks of a sweep; `run` returns the exit code."""

    def __init__(
        self,
        folder: Path,
        sweep: Sweep,
        slots: tuple[Slot, ...],
        command: Callable[[SweepNetwork], list[str]],
        display: SweepDisplay,
        retry: bool = False,
    ) -> None:
        self._folder, self._sweep, self._display = folder, sweep, display
        self._command = command
        self.results = read_results(folder, sweep, retry)
        self._free = list(slots)
        self._processes: list[NetworkProcess] = []
        self._waiting = [n for n in sweep.networks if not self.results[n.name].is_final]
        self._preempted_by: str | None = None
        self._stopping, self._looked = False, 0.0

    def run(self) -> int:
        """Train until all networks have ended or the sweep must end. Return the exit code."""
        (self._folder / STOP_FILE).unlink(missing_ok=True)
        with launch.caught_signals() as signals, self._display.live or nullcontext():
            while True:
                self._obey(signals)
                for process in list(self._processes):
                    if (outcome := process.outcome()) is not None:
                        self._finish(process, *outcome)
                if time.monotonic() > self._looked + POLL_FILES_EVERY:
                    self._looked = time.monotonic()
                    self._poll_files()
                if not self._processes and (self._is_ending() or not self._waiting):
                    break
                time.sleep(POLL_PROCESSES_EVERY)
        write_csv(self._folder, self._sweep, self.results.values())
        (self._folder / STOP_FILE).unlink(missing_ok=True)
        if self._preempted_by:
            self._display.line(f"preempted ({self._preempted_by}); the same command resumes")
            return LEFT
        return int(any(result.status == FAILED for result in self.results.values()))

    def _is_ending(self) -> bool:
        return bool(self._preempted_by or self._stopping)

    def _obey(self, signals: list[tuple[signal.Signals, float]]) -> None:
        """Preempt all networks on the first signal; kill them on a second Ctrl-C or SIGTERM."""
        if not signals:
            return
        if self._preempted_by is None:
            self._preempt(signals[0][0].name)
        if launch.is_repeated(signals):
            for process in self._processes:
                process.requested = "kill"
            launch.end(*(process.process for process in self._processes))

    def _preempt(self, why: str) -> None:
        self._preempted_by = why
        if self._processes:
            self._display.line(f"{why}: the networks save and end; once more ends them at once")
        for process in self._processes:
            process.preempt()

    def _poll_files(self) -> None:
        """Check the folders for a request to stop, and for locks."""
        if not self._is_ending() and (self._folder / STOP_FILE).exists():
            self._stopping = True
            self._display.line("asked to stop: the networks stop after their next step")
        for process in self._processes if self._stopping else ():
            process.stop()
        for network in list(self._waiting):
            if self._is_ending() or not self._free:
                break
            folder = self._folder / network.name
            if not (folder.is_dir() and is_locked(folder)):
                self._waiting.remove(network)
                self._launch(network)
        self._display.update([(p.network.name, p.slot, p.history()) for p in self._processes])

    def _launch(self, network: SweepNetwork) -> None:
        slot = self._free.pop(0)
        self._set(network, RUNNING, None, self.results[network.name].history)
        command = self._command(network)
        self._processes.append(NetworkProcess(self._folder, network, slot, command))
        self._display.begin(network.name, slot)

    def _finish(self, process: NetworkProcess, status: str, reason: str | None) -> None:
        self._processes.remove(process)
        self._free = sorted([*self._free, process.slot], key=lambda slot: slot.number)
        name = process.network.name
        if status == PREEMPTED:
            status = UNFINISHED
            if self._preempted_by is None:
                self._preempt(f"{name} was preempted: {reason}")
        self._set(process.network, status, reason, process.history())
        self._display.end(self.results[name], process.log, list(self.results.values()))

    def _set(
        self, network: SweepNetwork, status: str, reason: str | None, history: History
    ) -> None:
        self.results[network.name] = NetworkResult(network, status, reason, history)
        write_csv(self._folder, self._sweep, self.results.values())
