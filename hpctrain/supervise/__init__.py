"""``hpctrain supervise -- srun python -m hpctrain ...``: launch a run again until it is done.

    hpctrain supervise -- mpirun -n 4 python -m hpctrain --data flowers.h5 --run first

One policy, for a workstation and for a batch job:

* A launch that dies (a rank was killed, memory ran out, a GPU failed, a node was lost or fell
  silent) is followed by another one, on the nodes that are left (`nodes.py`). It resumes from the
  newest checkpoint.
* The allocation is given back, with a requeue in Slurm and exit code 75, when the scheduler
  wants it or fewer than half of the nodes are left. A job whose batch host dies, Slurm requeues.
* The supervisor ends with 1 after `--deaths` launches in succession without a new checkpoint, and
  when the run reports that it cannot continue; with the run's own code for a mistake.

The supervisor uses neither MPI nor torch, so that what ends a rank does not end it.
"""

from __future__ import annotations

import signal
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from subprocess import Popen

from hpctrain import launch
from hpctrain.config import Config, SuperviseConfig, duration
from hpctrain.errors import RunError, UsageError
from hpctrain.launcher import LEFT
from hpctrain.report.history import Outcome, find_outcome
from hpctrain.report.record import HistoryReader
from hpctrain.supervise.nodes import Allocation, find_allocation, requeue
from hpctrain.text import say

POLL_EVERY = 0.1  # seconds
KILL_AFTER = 60.0  # seconds from SIGTERM to this process to SIGTERM to the launcher
PAUSES = (0.0, 5.0, 30.0)  # seconds before a launch, by earlier ones without a new checkpoint


@dataclass
class EndedLaunch:
    """How one launch of the run ended."""

    code: int  # of the launcher; -9 if it was killed
    outcome: Outcome  # as recorded, or as heartbeats show it
    recorded: bool  # the run itself recorded its end
    began: bool  # a run folder exists and this launch wrote to its record
    saved: int  # step of the newest checkpoint, 0 without one

    def cause(self) -> str:
        """Return why the launch ended, in one line."""
        code = f"exit code {self.code}" if self.code >= 0 else signal.Signals(-self.code).name
        return f"{code}: {self.outcome.reason or 'no rank recorded a reason; see above'}"


def main(settings: SuperviseConfig) -> int:
    """Launch the run until it is done, failed or given back; return the exit code."""
    words, config = parse_command(settings.command)
    allocation = find_allocation(words, settings.nodes)
    with launch.caught_signals() as signals:
        return Supervisor(words, config, settings.deaths, allocation, signals).run()


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
    name, config = parse(words[places[0] + 1 :])
    if name != "train":
        raise UsageError(f"supervise launches train, not {name}")
    if config.run is None:
        run = time.strftime("%Y%m%d-%H%M%S")
        words += ["--run", run]
        _, config = parse(words[places[0] + 1 :])
    return words, config


class Supervisor:
    """Launches one run again and again; see the module for the policy."""

    def __init__(
        self,
        words: list[str],
        config: Config,
        deaths: int,
        allocation: Allocation | None,
        signals: list[tuple[signal.Signals, float]],
    ) -> None:
        self._words, self._config, self._most = words, config, deaths
        self._allocation, self._signals = allocation, signals
        self._folder = Path(config.runs_dir) / str(config.run)
        limit = config.time_limit
        self._deadline = time.monotonic() + duration(limit, "--time-limit") if limit else None
        self._number = 0  # of the launch

    def run(self) -> int:
        """Launch until a decision to end; return the exit code."""
        fruitless, saved = 0, newest_step(self._folder)
        while True:
            ended = self._launch()
            if (code := self._final(ended)) is not None:
                return code
            fruitless = 0 if ended.saved > saved else fruitless + 1
            saved = ended.saved
            what = f"launch {self._number} died, {ended.cause()}"
            if fruitless >= self._most:
                self._say(f"{what}; {fruitless} in succession without a new checkpoint: giving up")
                return 1
            if self._allocation and (problem := self._allocation.exclude_dead()):
                return self._give_back(f"{what}; {problem}")
            where = f" {self._allocation.describe()}" if self._allocation else ""
            self._say(f"{what}; launching again{where}, after step {saved:,}")
            self._pause(PAUSES[min(fruitless, len(PAUSES)) - 1] if fruitless else 0.0)
            if self._signals:
                return self._give_back("preempted between two launches")

    def _launch(self) -> EndedLaunch:
        """Launch the run once, and wait for its end; signals are passed on as SIGUSR2."""
        self._number += 1
        reader = HistoryReader(self._folder, "none")
        reader.poll()
        before, began = reader.history.outcome.time, time.time()
        process = self._start()
        asked = 0.0
        while process.poll() is None:
            asked = self._pass_on(process, asked)
            time.sleep(POLL_EVERY)
        reader.poll()
        history = reader.history
        outcome = find_outcome(self._folder, history, is_over=True)
        recorded = history.outcome.status != "" and history.outcome.time != before
        if not recorded and outcome.time < began:  # of an earlier launch
            outcome = Outcome()
        first = history.launch.began or 0.0
        return EndedLaunch(
            process.returncode, outcome, recorded, first >= began, newest_step(self._folder)
        )

    def _start(self) -> Popen[bytes]:
        words = list(self._words)
        if self._allocation:
            words = self._allocation.command(words)
        if self._number > 1:
            words += ["--resume", "auto"]
        if self._deadline is not None:
            words += ["--time-limit", f"{max(self._deadline - time.monotonic(), 1):.0f}s"]
        try:
            return launch.start(words, None, launch.environment())
        except OSError as error:
            raise RunError(f"cannot start {words[0]}: {error.strerror}") from error

    def _pass_on(self, process: Popen[bytes], asked: float) -> float:
        """Ask the run to save and exit after a signal; end it after a second one.

        Returns when the run was asked first, 0 if it was not.
        """
        if not self._signals:
            return 0.0
        if not asked:
            process.send_signal(signal.SIGUSR2)
            return time.monotonic()
        insists = any(n == signal.SIGINT and at > asked + 1 for n, at in self._signals)
        if insists or (self._ends() and time.monotonic() > asked + KILL_AFTER):
            process.terminate()
        return asked

    def _ends(self) -> bool:
        """Whether a signal other than a scheduler's notice was received."""
        return any(n not in (signal.SIGUSR1, signal.SIGUSR2) for n, _ in self._signals)

    def _final(self, ended: EndedLaunch) -> int | None:
        """Return the exit code with which to end after this launch, or None to launch again."""
        code, status = ended.code, ended.outcome.status if ended.recorded else ""
        if code == 0:
            return 0
        if code == LEFT or self._signals:
            what = "saved" if code == LEFT else f"ended, {ended.cause()}"
            return self._give_back(f"{what} after step {ended.saved:,}")
        if status in ("failed", "preempted"):  # in a way that another launch would repeat
            self._say(f"not launched again: {ended.outcome.reason}")
            return 1
        if self._number == 1 and code in (1, 2) and not ended.began:
            return code  # a mistake, which hpctrain has named
        return None

    def _give_back(self, why: str) -> int:
        """End with 75; requeue the job if this is one of Slurm and no user ended it."""
        done = "" if self._ends() else requeue()
        self._say(f"{why}; {done or f'the same command with --run {self._config.run} resumes'}")
        return LEFT

    def _pause(self, seconds: float) -> None:
        """Wait, or until a signal comes."""
        until = time.monotonic() + seconds
        while time.monotonic() < until and not self._signals:
            time.sleep(POLL_EVERY)

    def _say(self, text: str) -> None:
        say(f"hpctrain supervise: {text}", sys.stderr)


def newest_step(run: Path) -> int:
    """Return the step of the newest checkpoint in the folder of a run, 0 without one."""
    names = (path.stem for path in (run / "checkpoints").glob("*.json"))
    return max((int(name) for name in names if name.isdecimal()), default=0)
