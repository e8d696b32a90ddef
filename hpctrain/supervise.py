"""``hpctrain supervise -- srun python -m hpctrain ...``: restart a run after failures.

    hpctrain supervise -- mpirun -n 4 python -m hpctrain --data flowers.h5 --run first

One policy, for a workstation and for a batch job:

* After a failure (a rank was killed, memory ran out, a GPU failed, a node was lost or fell silent)
  the run is restarted from its newest checkpoint, on the nodes that are left (`Allocation`).
* When the scheduler preempts the job, or fewer than half of the nodes are left, the supervisor
  requeues the job and exits with 75. Slurm itself requeues a job that lost its first node.
* The supervisor exits with 1 after `--max-failures` consecutive failures without a new checkpoint,
  and when loss or gradient is not finite; after a mistake in the settings with the run's exit code.

The supervisor uses neither MPI nor torch, so that what ends a rank does not end it.

A job of Slurm with ``--no-kill`` keeps its allocation when a node fails. Slurm notices a dead node
after SlurmdTimeout (300 s by default), but the connections of its ranks break immediately. After a
failure, a job step is therefore run on each node, and nodes that do not answer are excluded. It and
all later launches are given ``--overlap``: the step of the failed launch may hold its cores until
Slurm has noticed the dead node (srun(1)), or until the job ends if only the step daemon was killed.
"""

from __future__ import annotations

import math
import os
import re
import shutil
import signal
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path
from typing import NamedTuple

from hpctrain import launch
from hpctrain.cluster import LEFT, find_job, scheduler_output, srun_words, tasks_by_node
from hpctrain.config import Config, SuperviseConfig
from hpctrain.errors import RunError, UsageError
from hpctrain.outcome import Outcome, Status
from hpctrain.report.find import CHECKPOINTS, checkpoint_steps
from hpctrain.report.history import History
from hpctrain.text import counted, listed, say
from hpctrain.training.control import is_locked
from hpctrain.watchdog import IMPORTS

POLL_EVERY = 0.1  # seconds
LOCKED_FOR = 120.0  # seconds to wait for a lock: NFS keeps that of a lost node for 90 s
PAUSES = (0.0, 5.0, 30.0)  # seconds before a restart, by failures without a new checkpoint
ANSWER_WITHIN = 15.0  # seconds for a node to run a step
MOST_REQUEUES = 20
SIZES = {  # options of srun that the supervisor gives
    "-N",
    "--nodes",
    "-n",
    "--ntasks",
    "--ntasks-per-node",
    "-w",
    "--nodelist",
    "-x",
    "--exclude",
}


class EndedLaunch(NamedTuple):
    """How one launch of the run ended."""

    number: int  # 1, 2, ...
    code: int  # of the launcher; -9 if it was killed
    outcome: Outcome  # as recorded by this launch, or as its heartbeats show it
    repeats: bool  # the run recorded that another launch would fail in the same way
    began: bool  # this launch wrote to the record
    saved: int  # step of the newest checkpoint, 0 without one
    saved_before: int  # the same when the supervisor began
    memory: str = ""  # "; likely out of memory: ...", if it was

    def cause(self) -> str:
        """Return why the launch ended, in one line."""
        if self.code >= 0:
            code = f"exit code {self.code}"
        else:
            code = signal.Signals(-self.code).name
        reason = self.outcome.reason or "no rank recorded a reason, see above"
        return f"{code}: {reason}{self.memory}"

    def verdict(self, asked: bool) -> tuple[int | None, str]:
        """Return the exit code of the supervisor, or None to restart the run, and a message.

        `asked` is whether the supervisor had asked the run to save and exit.
        """
        preempted = self.code == LEFT or self.outcome.status == Status.PREEMPTED
        is_first = self.number == 1 and not self.began
        is_usage_error = self.code == 2 or (self.code == 1 and self.saved == 0)
        if self.code == 0:
            return 0, ""
        if preempted and (asked or self.code == LEFT or self.saved > self.saved_before):
            return LEFT, f"saved after step {self.saved:,}"
        if asked:
            return LEFT, f"ended, {self.cause()}; the newest checkpoint is of step {self.saved:,}"
        if preempted or self.repeats:
            return 1, f"not restarted: {self.outcome.reason}"
        if is_first and is_usage_error:
            return self.code, ""  # hpctrain has named it
        return None, f"launch {self.number} failed, {self.cause()}"


def main(settings: SuperviseConfig) -> int:
    """Launch the run until it is done, has failed or is preempted; return the exit code."""
    with launch.caught_signals() as signals:  # first: a notice may come at any time
        words, config = parse_command(settings.command)
        supervisor = Supervisor(
            words=words,
            config=config,
            allocation=find_allocation(words, settings.nodes),
            signals=signals,
        )
        return supervisor.run(settings.max_failures)


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
        run = f"job-{job}" if job else time.strftime("%Y%m%d-%H%M%S")
        words += ["--run", run]
        _, config = parse(words[place + 1 :])
    return words, config


@dataclass
class Supervisor:
    """Launches a run and restarts it after failures; see the module for the policy."""

    words: list[str]
    config: Config
    allocation: Allocation | None
    signals: launch.ReceivedSignals

    def __post_init__(self) -> None:
        self.folder = Path(self.config.runs_dir) / str(self.config.run)
        self.deadline = math.inf  # by the monotonic clock
        if self.config.time_limit:
            self.deadline = time.monotonic() + self.config.time_limit

    def run(self, max_failures: int) -> int:
        """Launch the run until a verdict ends it; return the exit code."""
        number = 0  # of the launch
        fruitless = 0  # failures in a row without a new checkpoint
        before = newest_step(self.folder)
        saved = before
        while not self.signals:
            number += 1
            ended = self._launch(number, before)
            code, message = ended.verdict(bool(self.signals))
            if code == LEFT:
                return self._give_back(message)
            if code is not None:
                if message:
                    tell(message)
                return code
            if ended.saved > saved:
                fruitless = 0
            else:
                fruitless += 1
            saved = ended.saved
            if fruitless >= max_failures:
                tell(f"{message}; {fruitless} in a row without a new checkpoint: giving up")
                return 1
            if self.allocation and not self.allocation.exclude_dead():
                return self._give_back(f"{message}; too few nodes are left ({self.allocation})")
            if time.monotonic() > self.deadline:
                return self._give_back(f"{message}; the time is up")
            where = f" on {self.allocation}" if self.allocation else ""
            after = f"after step {saved:,}" if saved else "from the start"
            tell(f"{message}; restarting{where}, {after}")
            if fruitless:
                self._wait(PAUSES[min(fruitless, len(PAUSES)) - 1])
            with suppress(RunError):  # not begun, or not readable now: the next launch says more
                if is_locked(self.folder):  # by processes of this launch
                    tell(f"{self.folder} is still locked: waiting {LOCKED_FOR:.0f} s at most")
                    self._wait(LOCKED_FOR, lambda: is_locked(self.folder))
        return self._give_back(f"{self.signals[0][0].name} while no launch was running")

    def _launch(self, number: int, saved_before: int) -> EndedLaunch:
        """Launch the run once, and wait for its end; signals are passed on as `launch.NOTICE`."""
        before = heartbeats(self.folder)  # of an earlier launch
        run = self._start(number)
        self._wait_for_end(run, number, before)
        began = run.has_begun()
        outcome = run.outcome()
        repeats = bool(outcome.status and run.history.launch.end.get("repeats"))
        if not outcome.status:
            shown = heartbeats(self.folder)
            if shown != before:
                outcome = shown
        code = run.process.returncode
        memory = ""
        if code:
            memory = run.memory_hint()
            if not memory and self.allocation:
                memory = step_memory_hint()
        return EndedLaunch(
            number=number,
            code=code,
            outcome=outcome,
            repeats=repeats,
            began=began,
            saved=newest_step(self.folder),
            saved_before=saved_before,
            memory=memory,
        )

    def _start(self, number: int) -> launch.LaunchedRun:
        """Start a launch of the run."""
        words = self.words
        env = dict(os.environ)
        if self.allocation:
            words, env = self.allocation.command_and_environment(words)
        if number > 1 or restarts():
            words = [*words, "--resume", "auto"]
        if self.deadline < math.inf:
            left = max(self.deadline - time.monotonic(), 1)
            words = [*words, "--time-limit", f"{left:.0f}s"]
        return launch.LaunchedRun(self.folder, words, env)

    def _wait_for_end(self, run: launch.LaunchedRun, number: int, before: Outcome) -> None:
        """Wait for the end of a launch: pass signals on, and end it if no rank starts."""
        patience = self.config.hang_timeout + IMPORTS  # as in the watchdog
        until = time.monotonic() + patience  # after which the launch must have begun
        while run.process.poll() is None:
            if self.signals and not run.is_notified:
                if self._is_ended_by_user():
                    name = self.signals[0][0].name
                    tell(f"{name}: the run saves and ends; once more ends it at once")
                run.notify()
            if launch.is_repeated(self.signals):
                launch.end(run.process)
            elif time.monotonic() > until:
                until = math.inf
                if not run.has_begun() and heartbeats(self.folder) == before:
                    tell(f"no rank of launch {number} has started in {patience:.0f} s: ending it")
                    launch.end(run.process)
            time.sleep(POLL_EVERY)

    def _is_ended_by_user(self) -> bool:
        """Whether a signal other than a scheduler's notice was received."""
        return any(n not in (signal.SIGUSR1, signal.SIGUSR2) for n, _ in self.signals)

    def _give_back(self, why: str) -> int:
        """Exit with 75; requeue the job, if there is one, unless the user ended it."""
        what_follows = ""
        if not self._is_ended_by_user():
            what_follows = requeue()
        if not what_follows:
            what_follows = f"the same command with --run {self.config.run} resumes"
        tell(f"{why}; {what_follows}")
        return LEFT

    def _wait(self, seconds: float, condition: Callable[[], bool] = lambda: True) -> None:
        """Wait while the condition holds, unless a signal comes."""
        until = time.monotonic() + seconds
        while time.monotonic() < until and not self.signals and condition():
            time.sleep(POLL_EVERY)


def tell(text: str) -> None:
    """Print a line to stderr."""
    with suppress(OSError):  # nobody reads any more: the run is to go on
        say(f"hpctrain supervise: {text}", sys.stderr)


def heartbeats(run: Path) -> Outcome:
    """Return how the launch to which the heartbeats belong ended, without asking its record."""
    return History(run, "none").outcome(over=True)


def step_memory_hint() -> str:
    """Return "; likely out of memory: ..." if Slurm's accounting says so of the last step."""
    job = os.environ.get("SLURM_JOB_ID")
    if not job:
        return ""
    steps: list[tuple[str, str]] = []
    with suppress(RunError):  # there is no accounting
        states = scheduler_output(
            "sacct",
            f"--jobs={job}",
            "--noheader",
            "--parsable2",
            "--format=JobID,State",
        )
        steps = re.findall(r"^(\S+\.\d+)\|(.*)$", states, re.MULTILINE)
    if not steps:
        return ""
    step, state = steps[-1]
    if state != "OUT_OF_MEMORY":
        return ""
    return f"; likely out of memory: Slurm's state of step {step} is OUT_OF_MEMORY"


def newest_step(run: Path) -> int:
    """Return the step of the newest checkpoint in the folder of a run, 0 without one."""
    return max(checkpoint_steps(run / CHECKPOINTS), default=0)


class Allocation:
    """The nodes of this Slurm job, and how many of them the run uses."""

    def __init__(self, nodes: Sequence[str], tasks: Sequence[int], wanted: int) -> None:
        """`tasks` are the ranks of each node."""
        self._tasks = dict(zip(nodes, tasks, strict=True))
        self._wanted = wanted
        self._dead: list[str] = []
        self._failed = False  # whether a launch has failed
        self._spares = len(nodes) > wanted

    def command_and_environment(self, words: Sequence[str]) -> tuple[list[str], dict[str, str]]:
        """Return the launch command for the nodes that are left, and its environment.

        Without a request of its own, a step gets all GPUs that the job has on its nodes: if it has
        fewer nodes, it must not inherit that request.
        """
        options: list[str] = []
        env = dict(os.environ)
        if self._dead or self._spares:
            tasks = list(self._tasks.values())[: self._wanted]
            options.append(f"--nodes={len(tasks)}")
            options.append(f"--ntasks={sum(tasks)}")
            if len(set(tasks)) == 1:
                options.append(f"--ntasks-per-node={tasks[0]}")
            env.pop("SLURM_GPUS", None)
        if self._failed:
            options.append("--overlap")
        if self._dead:
            options.append(f"--exclude={','.join(self._dead)}")
        return [words[0], *options, *words[1:]], env

    def exclude_dead(self) -> bool:
        """After a failure, exclude nodes that do not answer; return whether half are left.

        If no node answers, not even the node of this process, Slurm is at fault: none is excluded.
        """
        self._failed = True
        with ThreadPoolExecutor(32) as pool:  # nodes asked at the same time
            alive = list(pool.map(answers, self._tasks))
        dead = [node for node, answer in zip(self._tasks, alive, strict=True) if not answer]
        if any(alive):
            for node in dead:
                self._dead.append(node)
                del self._tasks[node]
        return 2 * len(self._tasks) >= self._wanted

    def __str__(self) -> str:
        text = counted(min(self._wanted, len(self._tasks)), "node")
        if self._dead:
            text += f", without {listed(self._dead)}"
        return text


def find_allocation(words: Sequence[str], wanted: int | None) -> Allocation | None:
    """Return the allocation whose nodes the command's srun uses; None without srun or Slurm.

    Raises UsageError if there are fewer than `wanted` nodes, or if the command sets sizes for srun,
    and RunError if `wanted` is given and scontrol fails.
    """
    nodes: list[str] = []
    env = os.environ
    names = env.get("SLURM_JOB_NODELIST")
    if names and Path(words[0]).name == "srun":
        try:
            nodes = scheduler_output("scontrol", "show", "hostnames", names).split()
        except RunError as error:
            if wanted is not None:
                raise
            tell(f"lost nodes will not be excluded ({error})")
    if wanted is not None and wanted > len(nodes):
        reason = f"the job has {len(nodes)} nodes" if nodes else "it is for srun in a Slurm job"
        raise UsageError(f"--nodes {wanted}: {reason}")
    if not nodes:
        return None
    # The options of srun end at the first command, such as numactl, which has a -N of its own.
    for word in takewhile(lambda word: word.startswith("-") or not shutil.which(word), words[1:]):
        if word.split("=")[0] in SIZES or word[:2] in SIZES:
            raise UsageError(
                f"srun {word}: leave nodes and tasks to sbatch and to supervise --nodes, which"
                " change them when a node is lost"
            )
    per_node = env.get("SLURM_NTASKS_PER_NODE") or env.get("SLURM_TASKS_PER_NODE", "1")
    if per_node.isdigit():
        per_node = f"{per_node}(x{len(nodes)})"
    tasks = tasks_by_node(per_node)
    if len(tasks) != len(nodes):  # the variable describes another step
        tasks = len(nodes) * [max(tasks, default=1)]
    return Allocation(nodes, tasks, wanted or len(nodes))


def answers(node: str) -> bool:
    """Whether a step runs on this node."""
    words = [
        *srun_words(),
        "--overlap",
        "--nodes=1",
        "--ntasks=1",
        "--ntasks-per-node=1",
        "--mpi=none",
        f"--nodelist={node}",
        "true",
    ]
    try:
        scheduler_output(*words, within=ANSWER_WITHIN)
    except RunError:
        return False
    return True


def restarts() -> int:
    """Return how often this job was requeued; 0 outside of a job, or if that is not known."""
    job = find_job(os.environ)
    if job is None:
        return 0
    scheduler, _ = job
    return int(os.environ.get(scheduler.restarts) or 0)


def requeue() -> str:
    """Requeue this job; return what was done, or '' outside of a job and in one of Flux.

    A job that was requeued `MOST_REQUEUES` times, or whose scheduler refuses to requeue it, ends.
    """
    scheduler, job = find_job(os.environ) or (None, "")
    if scheduler is None or not scheduler.requeue:
        return ""
    array = os.environ.get("SLURM_ARRAY_JOB_ID")
    if array:  # its last task has the ID of the whole array
        job = f"{array}_{os.environ.get('SLURM_ARRAY_TASK_ID')}"
    if restarts() >= MOST_REQUEUES:
        return f"job {job} ends, it was requeued {restarts()} times"
    try:
        scheduler_output(*scheduler.requeue, job, within=60.0)
    except RunError as error:
        return f"job {job} ends, it cannot be requeued: {error}"
    return f"job {job} is requeued"
