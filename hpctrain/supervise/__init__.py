"""``hpctrain supervise -- srun python -m hpctrain ...``: restart a run after failures.

    hpctrain supervise -- mpirun -n 4 python -m hpctrain --data flowers.h5 --run first

One policy, for a workstation and for a batch job:

* After a failure (a rank was killed, memory ran out, a GPU failed, a node was lost or fell silent)
  the run is restarted from its newest checkpoint, on the nodes that are left (`nodes.py`).
* When the scheduler preempts the job, or fewer than half of the nodes are left, the supervisor
  requeues the job and exits with 75. Slurm itself requeues a job that lost its first node.
* The supervisor exits with 1 after `--max-failures` consecutive failures without a new checkpoint,
  and when loss or gradient is not finite; after a mistake in the settings with the run's exit code.

The supervisor uses neither MPI nor torch, so that what ends a rank does not end it.
"""

from __future__ import annotations

import math
import os
import signal
import sys
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from hpctrain import launch
from hpctrain.cluster import LEFT
from hpctrain.config import Config, SuperviseConfig
from hpctrain.errors import RunError, UsageError
from hpctrain.report.find import CHECKPOINTS, checkpoint_steps
from hpctrain.report.history import History, Outcome
from hpctrain.supervise.nodes import Allocation, find_allocation, requeue, restarts
from hpctrain.text import say
from hpctrain.training.control import is_locked
from hpctrain.watchdog import IMPORTS

POLL_EVERY = 0.1  # seconds
LOCKED_FOR = 120.0  # seconds to wait for a lock: NFS keeps that of a lost node for 90 s
PAUSES = (0.0, 5.0, 30.0)  # seconds before a restart, by failures without a new checkpoint


@dataclass(frozen=True)
class EndedLaunch:
    """How one launch of the run ended."""

    number: int  # 1, 2, ...
    code: int  # of the launcher; -9 if it was killed
    outcome: Outcome  # as recorded by this launch, or as its heartbeats show it
    repeats: bool  # the run recorded that another launch would fail in the same way
    began: bool  # this launch wrote to the record
    saved: int  # step of the newest checkpoint, 0 without one
    saved_before: int  # the same when the supervisor began

    def cause(self) -> str:
        """Return why the launch ended, in one line."""
        code = f"exit code {self.code}" if self.code >= 0 else signal.Signals(-self.code).name
        return f"{code}: {self.outcome.reason or 'no rank recorded a reason, see above'}"

    def verdict(self, asked: bool) -> tuple[int | None, str]:
        """Return the exit code of the supervisor, or None to restart the run, and a message.

        `asked` is whether the supervisor had asked the run to save and exit.
        """
        preempted = self.code == LEFT or self.outcome.status == "preempted"
        if self.code == 0:
            return 0, ""
        if preempted and (asked or self.code == LEFT or self.saved > self.saved_before):
            return LEFT, f"saved after step {self.saved:,}"
        if asked:
            return LEFT, f"ended, {self.cause()}; the newest checkpoint is of step {self.saved:,}"
        if preempted or self.repeats:
            return 1, f"not restarted: {self.outcome.reason}"
        if (
            self.number == 1
            and not self.began
            and (self.code == 2 or (self.code, self.saved) == (1, 0))
        ):
            return self.code, ""  # a mistake, which hpctrain has named
        return None, f"launch {self.number} failed, {self.cause()}"


def main(settings: SuperviseConfig) -> int:
    """Launch the run until it is done, has failed or is preempted; return the exit code."""
    with launch.caught_signals() as signals:  # first: a notice may come at any time
        words, config = parse_command(settings.command)
        allocation = find_allocation(words, settings.nodes)
        return Supervisor(words, config, settings.max_failures, allocation, signals).run()


def parse_command(command: tuple[str, ...]) -> tuple[list[str], Config]:
    """Return the launch command, with a name for the run, and the settings of the run.

    Raises UsageError if the command does not train, or is refused by its own parser.
    """
    from hpctrain.cli import parse

    words = list(command)
    places = [n for n, word in enumerate(words) if Path(word).name == "hpctrain"]
    if not places:
        example = "supervise -- mpirun -n 4 python -m hpctrain --data flowers.h5"
        raise UsageError(f"supervise what? Give the launch command after --, as in {example}")
    place = next((n for n in places if n and words[n - 1] == "-m"), places[0])  # else in a path
    name, config = parse(words[place + 1 :])
    if name != "train":
        raise UsageError(f"supervise launches train, not {name}")
    if config.run is None:  # a job that is requeued must find its run again
        job = os.environ.get("SLURM_JOB_ID")
        words += ["--run", f"job-{job}" if job else time.strftime("%Y%m%d-%H%M%S")]
        _, config = parse(words[place + 1 :])
    return words, config


class Supervisor:
    """Launches a run and restarts it after failures; see the module for the policy."""

    def __init__(
        self,
        words: list[str],
        config: Config,
        max_failures: int,
        allocation: Allocation | None,
        signals: list[tuple[signal.Signals, float]],
    ) -> None:
        self._words, self._config, self._max_failures = words, config, max_failures
        self._allocation, self._signals = allocation, signals
        self._folder = Path(config.runs_dir) / str(config.run)
        self._timeout = config.hang_timeout + IMPORTS  # as in the watchdog
        limit = config.time_limit
        self._deadline = time.monotonic() + limit if limit else None
        self._number = 0  # of the launch
        self._saved_before = newest_step(self._folder)

    def run(self) -> int:
        """Launch the run until a verdict ends it; return the exit code."""
        fruitless, saved = 0, self._saved_before
        while not self._signals:
            ended = self._launch()
            code, what = ended.verdict(bool(self._signals))
            if code == LEFT:
                return self._give_back(what)
            if code is not None:
                if what:
                    self._say(what)
                return code
            fruitless = 0 if ended.saved > saved else fruitless + 1
            saved = ended.saved
            if fruitless >= self._max_failures:
                self._say(f"{what}; {fruitless} in a row without a new checkpoint: giving up")
                return 1
            problem = self._allocation.exclude_dead() if self._allocation else ""
            if self._deadline and time.monotonic() > self._deadline:
                problem = "the time is up"
            if problem:
                return self._give_back(f"{what}; {problem}")
            where = f" {self._allocation.describe()}" if self._allocation else ""
            after = f"after step {saved:,}" if saved else "from the start"
            self._say(f"{what}; restarting{where}, {after}")
            self._pause(PAUSES[min(fruitless, len(PAUSES)) - 1] if fruitless else 0.0)
        return self._give_back(f"{self._signals[0][0].name} while no launch was running")

    def _launch(self) -> EndedLaunch:
        """Launch the run once, and wait for its end; signals are passed on as SIGUSR2."""
        self._number += 1
        before = last_heartbeats(self._folder)  # of an earlier launch
        run = self._start()
        asked = silent = False
        until = time.monotonic() + self._timeout
        while (code := run.process.poll()) is None:
            if self._signals and not asked:
                asked = True
                if self._ends():
                    name = self._signals[0][0].name
                    self._say(f"{name}: the run saves and ends; once more ends it at once")
                run.preempt()
            if time.monotonic() > until:
                until, silent = math.inf, self._is_silent(run, before)
            if silent or launch.is_repeated(self._signals):
                run.kill()
            time.sleep(POLL_EVERY)
        began, outcome = run.has_begun(), run.recorded()
        repeats = bool(outcome.status and run.history().launch.end.get("repeats"))
        if not outcome.status:
            found = last_heartbeats(self._folder)
            outcome = found if found != before else Outcome()
        saved = newest_step(self._folder)
        return EndedLaunch(self._number, code, outcome, repeats, began, saved, self._saved_before)

    def _is_silent(self, run: launch.LaunchedRun, before: Outcome) -> bool:
        """Return whether no rank of this launch has written a record or heartbeat; say so."""
        silent = not run.has_begun() and last_heartbeats(self._folder) == before
        if silent:
            seconds = f"{self._timeout:.0f} s"
            self._say(f"no rank of launch {self._number} has started in {seconds}: ending it")
        return silent

    def _start(self) -> launch.LaunchedRun:
        words, env = list(self._words), dict(os.environ)
        if self._allocation:
            words, env = self._allocation.command(words), self._allocation.environment()
        if self._number > 1 or restarts():
            words += ["--resume", "auto"]
        if self._deadline is not None:
            words += ["--time-limit", f"{max(self._deadline - time.monotonic(), 1):.0f}s"]
        return launch.LaunchedRun(self._folder, words, env)

    def _ends(self) -> bool:
        """Whether a signal other than a scheduler's notice was received."""
        return any(n not in (signal.SIGUSR1, signal.SIGUSR2) for n, _ in self._signals)

    def _give_back(self, why: str) -> int:
        """Exit with 75; requeue the job, if there is one, unless the user ended it."""
        done = "" if self._ends() else requeue()
        self._say(f"{why}; {done or f'the same command with --run {self._config.run} resumes'}")
        return LEFT

    def _pause(self, seconds: float) -> None:
        """Wait, or until a signal comes; then wait for the processes of the last launch."""
        until = time.monotonic() + seconds
        while time.monotonic() < until and not self._signals:
            time.sleep(POLL_EVERY)
        until, said = time.monotonic() + LOCKED_FOR, False
        while time.monotonic() < until and not self._signals and is_in_use(self._folder):
            if not said:
                self._say(f"{self._folder} is still locked: waiting {LOCKED_FOR:.0f} s at most")
            said = True
            time.sleep(10 * POLL_EVERY)

    def _say(self, text: str) -> None:
        with suppress(OSError):  # nobody reads any more: the run is to go on
            say(f"hpctrain supervise: {text}", sys.stderr)


def last_heartbeats(run: Path) -> Outcome:
    """Return how the launch to which the heartbeats belong ended, without asking its record."""
    return History(run, "none").outcome(over=True)


def is_in_use(run: Path) -> bool:
    """Whether a process still holds the lock of the run."""
    with suppress(RunError):  # not begun, or not readable now: the next launch says more
        return is_locked(run)
    return False


def newest_step(run: Path) -> int:
    """Return the step of the newest checkpoint in the folder of a run, 0 without one."""
    return max(checkpoint_steps(run / CHECKPOINTS), default=0)
