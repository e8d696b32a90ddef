"""The nodes of a Slurm allocation: which are alive, and the srun that uses them.

A job with ``--no-kill`` keeps its allocation when a node fails. Slurm notices a dead node only
after SlurmdTimeout (300 s by default), but the connections of its ranks break immediately. After a
failure, a job step is therefore run on each node, and nodes that do not answer are excluded.

``--overlap`` is given to these steps and to all later launches: the step of the failed launch may
hold its cores until Slurm has noticed that a node is dead (srun(1)), or until the job ends if only
the step daemon was killed.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import takewhile
from pathlib import Path

from hpctrain.cluster import REQUESTS, ask, find_job, tasks_by_node
from hpctrain.errors import RunError, UsageError
from hpctrain.text import counted, listed, say

ANSWER_WITHIN = 15.0  # seconds for a node to run a step
AT_ONCE = 32  # nodes asked at the same time
MOST_REQUEUES = 20
#: Options of srun that belong to the supervisor.
OWN = {"-N", "--nodes", "-n", "--ntasks", "--ntasks-per-node"}
OWN |= {"-w", "--nodelist", "-x", "--exclude"}


class Allocation:
    """The nodes of this Slurm job, and how many of them the run uses."""

    def __init__(self, nodes: Sequence[str], tasks: Sequence[int], wanted: int | None) -> None:
        """`tasks` are the ranks of each node; `wanted` nodes are used, all for None."""
        self._nodes, self._tasks = list(nodes), dict(zip(nodes, tasks, strict=True))
        self._wanted = wanted or len(nodes)
        self._spares = len(nodes) > self._wanted
        self._dead: list[str] = []
        self._failed = False

    def command(self, words: Sequence[str]) -> list[str]:
        """Return the launch command for the nodes that are left."""
        own: list[str] = []
        if self._dead or self._spares:
            tasks = [self._tasks[node] for node in self._nodes[: self._wanted]]
            own += [f"--nodes={len(tasks)}", f"--ntasks={sum(tasks)}"]
            own += [f"--ntasks-per-node={tasks[0]}"] if len(set(tasks)) == 1 else []
        own += ["--overlap"] if self._failed else []
        if self._dead:
            own += [f"--exclude={','.join(self._dead)}"]
        return [words[0], *own, *words[1:]]

    def environment(self) -> dict[str, str]:
        """Return the environment of that command: not with the GPUs of all nodes, if it is fewer.

        Without a request of its own, a step gets all GPUs that the job has on its nodes.
        """
        fewer = self._dead or self._spares
        return {n: v for n, v in os.environ.items() if not (fewer and n == "SLURM_GPUS")}

    def exclude_dead(self) -> str:
        """Exclude nodes that do not answer; return why the run cannot continue here, or ''.

        If no node answers, not even the node of this process, Slurm is at fault: none is excluded.
        """
        self._failed = True
        with ThreadPoolExecutor(AT_ONCE) as pool:
            alive = dict(zip(self._nodes, pool.map(answers, self._nodes), strict=True))
        if not any(alive.values()):
            return ""
        self._dead += [node for node in self._nodes if not alive[node]]
        self._nodes = [node for node in self._nodes if alive[node]]
        if 2 * len(self._nodes) < self._wanted:
            return f"{len(self._nodes)} of {self._wanted} nodes are left ({self._names()} lost)"
        return ""

    def describe(self) -> str:
        """Return "on 3 nodes, without n3"."""
        count = min(self._wanted, len(self._nodes))
        without = f", without {self._names()}" if self._dead else ""
        return f"on {counted(count, 'node')}{without}"

    def _names(self) -> str:
        return listed(self._dead)


def find_allocation(words: Sequence[str], wanted: int | None) -> Allocation | None:
    """Return the allocation whose nodes the command's srun uses; None without srun or Slurm.

    Raises UsageError if there are fewer than `wanted` nodes, or if the command sets sizes for srun,
    and RunError if `wanted` is given and scontrol fails.
    """
    nodes: list[str] = []
    if Path(words[0]).name == "srun":
        try:
            nodes = nodes_of_job(os.environ)
        except RunError as error:
            if wanted is not None:
                raise
            say(f"hpctrain supervise: lost nodes will not be excluded ({error})", sys.stderr)
    if not nodes:
        if wanted is not None:
            raise UsageError("--nodes is for srun in a Slurm job: mpirun gets its hosts itself")
        return None
    # The options of srun end at the first command, such as numactl, which has a -N of its own.
    options = takewhile(lambda word: word.startswith("-") or not shutil.which(word), words[1:])
    for word in options:
        if word.split("=")[0] in OWN or word[:2] in OWN:
            raise UsageError(
                f"srun {word}: leave nodes and tasks to sbatch and to supervise --nodes, which"
                " change them when a node is lost"
            )
    if wanted is not None and wanted > len(nodes):
        raise UsageError(f"--nodes {wanted}: the job has {len(nodes)}")
    return Allocation(nodes, tasks_of_nodes(os.environ, len(nodes)), wanted)


def nodes_of_job(env: Mapping[str, str]) -> list[str]:
    """Return the names of the nodes of this Slurm job; none outside of one. Raises RunError."""
    if not env.get("SLURM_JOB_NODELIST"):
        return []
    return ask("scontrol", "show", "hostnames", env["SLURM_JOB_NODELIST"]).split()


def tasks_of_nodes(env: Mapping[str, str], count: int) -> list[int]:
    """Return the ranks of each of `count` nodes for which the job asked."""
    if env.get("SLURM_NTASKS_PER_NODE", "").isdigit():
        return count * [int(env["SLURM_NTASKS_PER_NODE"])]
    tasks = tasks_by_node(env.get("SLURM_TASKS_PER_NODE", ""))
    return tasks if len(tasks) == count else count * [max(tasks, default=1)]


def answers(node: str) -> bool:
    """Whether a step runs on this node."""
    command = ["srun", "--overlap", "--nodes=1", "--ntasks=1", "--ntasks-per-node=1", "--mpi=none"]
    own = (*REQUESTS, "SLURM_NTASKS", "SLURM_NPROCS", "SLURM_NNODES", "SLURM_CPUS_PER_TASK")
    env = {name: value for name, value in os.environ.items() if name not in own}
    try:
        done = subprocess.run(
            [*command, f"--nodelist={node}", "true"],
            env=env,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=ANSWER_WITHIN,
            start_new_session=True,  # Ctrl-C does not mean that the node is dead
        )
    except (OSError, subprocess.TimeoutExpired):
        return False
    return done.returncode == 0


def restarts() -> int:
    """Return how often this job was requeued; 0 outside of a job, or if that is not known."""
    found = find_job(os.environ)
    return int(os.environ.get(found[0].restarts) or 0) if found else 0


def requeue() -> str:
    """Requeue this job; return what was done, or '' outside of a job and in one of Flux.

    A job that was requeued `MOST_REQUEUES` times, or whose scheduler refuses to requeue it, ends.
    """
    scheduler, job = find_job(os.environ) or (None, "")
    if scheduler is None or not scheduler.requeue:
        return ""
    if array := os.environ.get("SLURM_ARRAY_JOB_ID"):  # its last task has the ID of the whole array
        job = f"{array}_{os.environ.get('SLURM_ARRAY_TASK_ID')}"
    if restarts() >= MOST_REQUEUES:
        return f"job {job} ends, it was requeued {restarts()} times"
    try:
        ask(*scheduler.requeue, job, within=60.0)
    except RunError as error:
        return f"job {job} ends, it cannot be requeued: {error}"
    return f"job {job} is requeued"
