"""The driver: networks in slots until all have ended, each a process group of its own.

It knows of the networks only what stands in the sweep's folder, so a driver that was killed is
replaced by the next one: done, pruned and failed networks stay as they are, all others are launched
again and go on from their checkpoints. A network in whose folder another job still works waits.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

from hpctrain.launcher import LEFT
from hpctrain.report.history import RunHistory
from hpctrain.report.record import read_history
from hpctrain.sweep.file import Network, Networks
from hpctrain.sweep.job import Job
from hpctrain.sweep.notices import Notices
from hpctrain.sweep.prune import Pruner
from hpctrain.sweep.results import (
    FAILED,
    FINAL,
    PRUNED,
    RUNNING,
    STOPPED,
    UNFINISHED,
    Row,
    read_known,
    status_of,
    write_results,
)
from hpctrain.sweep.show import Show
from hpctrain.sweep.slots import Slot
from hpctrain.training.control import STOP_FILE, is_locked

TICK = 0.1  # seconds between looks at the processes
LOOK_EVERY = 0.5  # seconds between looks at records, locks and the STOP file


def read_rows(folder: Path, networks: Networks, retry: bool = False) -> dict[str, Row]:
    """How all networks of a sweep stand, by name, where none of them runs."""
    known, rows = read_known(folder), {}
    for network in networks.all:
        history = read_history(folder / network.name, "none")
        status, reason = status_of(history, known.get(network.name))
        if retry and status == FAILED:
            status, reason = UNFINISHED, None
        rows[network.name] = Row(network, status, reason, history)
    return rows


class Driver:
    """Runs the networks of a sweep; `run` gives the exit code."""

    def __init__(
        self,
        folder: Path,
        networks: Networks,
        slots: tuple[Slot, ...],
        command: Callable[[Network], list[str]],
        show: Show,
        pruner: Pruner | None = None,
        retry: bool = False,
    ) -> None:
        self._folder, self._networks, self._show = folder, networks, show
        self._command, self._pruner = command, pruner
        self.rows = read_rows(folder, networks, retry)
        self._free = list(slots)
        self._jobs: list[Job] = []
        self._waiting = [n for n in networks.all if self.rows[n.name].status not in FINAL]
        self._leaving: str | None = None  # why
        self._stopping = False
        self._looked = 0.0
        self._seen: dict[str, int] = {}  # validations of a network that the pruner knows

    def run(self) -> int:
        """All networks, until they have ended or the sweep has to end; the exit code."""
        (self._folder / STOP_FILE).unlink(missing_ok=True)
        self._replay()
        with Notices() as notices, self._show:
            while True:
                self._hear(notices)
                for job in list(self._jobs):
                    if (outcome := job.outcome()) is not None:
                        self._settle(job, *outcome)
                if time.monotonic() > self._looked + LOOK_EVERY:
                    self._looked = time.monotonic()
                    self._look()
                if not self._jobs and (self._ending() or not self._waiting):
                    break
                time.sleep(TICK)
        self._write()
        (self._folder / STOP_FILE).unlink(missing_ok=True)
        statuses = [row.status for row in self.rows.values()]
        if self._leaving:
            self._show.line(f"left ({self._leaving}); the same command goes on")
            return LEFT
        return 1 if FAILED in statuses else 0

    def _ending(self) -> bool:
        return self._leaving is not None or self._stopping

    def _hear(self, notices: Notices) -> None:
        if notices.leave and self._leaving is None:
            self._leave(notices.leave)
        if notices.kill:
            for job in self._jobs:
                job.kill()

    def _leave(self, why: str) -> None:
        self._leaving = why
        if self._jobs:
            self._show.line(f"{why}: the networks save and leave; once more ends them at once")
        for job in self._jobs:
            job.leave()

    def _look(self) -> None:
        """At what lies in folders: a wish to stop, records, locks."""
        if not self._ending() and (self._folder / STOP_FILE).exists():
            self._stopping = True
            self._show.line("asked to stop: the networks stop after their next step")
        for job in self._jobs:
            if self._stopping:
                job.stop()
            self._prune(job, job.look())
        self._fill()
        self._show.update([(job.network.name, job.slot, job.look()) for job in self._jobs])

    def _fill(self) -> None:
        for network in list(self._waiting):
            if self._ending() or not self._free:
                return
            folder = self._folder / network.name
            if not (folder.is_dir() and is_locked(folder)):
                self._waiting.remove(network)
                self._launch(network)

    def _launch(self, network: Network) -> None:
        slot = self._free.pop(0)
        self._set(network, RUNNING, None, self.rows[network.name].history)
        self._write()
        job = Job(self._folder, network, slot, self._command(network))
        self._jobs.append(job)
        self._show.begins(network.name, slot)

    def _settle(self, job: Job, status: str, reason: str | None) -> None:
        self._jobs.remove(job)
        self._free.append(job.slot)
        self._free.sort(key=lambda slot: slot.number)
        name, before = job.network.name, self.rows[job.network.name]
        if before.status == PRUNED and status in (STOPPED, UNFINISHED):
            status, reason = PRUNED, before.reason
        if status == "left" and self._leaving is None:
            self._leave(f"{name} had to leave: {reason}")
        if status == "left":
            status = UNFINISHED
        self._set(job.network, status, reason, job.look())
        self._write()
        self._show.ended(self.rows[name], job.log, list(self.rows.values()))

    def _set(self, network: Network, status: str, reason: str | None, history: RunHistory) -> None:
        self.rows[network.name] = Row(network, status, reason, history)

    def _write(self) -> None:
        write_results(self._folder, self._networks, self.rows.values())

    def _replay(self) -> None:
        """Tell the pruner what earlier drivers have seen."""
        for name, row in self.rows.items():
            if self._pruner:
                self._pruner.weak(name, row.history.validations)
            self._seen[name] = len(row.history.validations)

    def _prune(self, job: Job, history: RunHistory) -> None:
        name, found = job.network.name, history.validations
        if self._pruner is None or job.asked or len(found) <= self._seen[name]:
            return
        self._seen[name] = len(found)
        if history.outcome.status == "" and self._pruner.weak(name, found):
            reason = f"not in the better half after {len(found)} validation(s)"
            self._set(job.network, PRUNED, reason, history)
            self._write()  # first: a driver that is killed now leaves it pruned
            job.stop()


def not_ended(rows: dict[str, Row]) -> list[str]:
    """The networks that the same command would take up."""
    return [name for name, row in rows.items() if row.status not in FINAL]
