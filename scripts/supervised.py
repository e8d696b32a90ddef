"""Supervised runs that scripts/faults breaks: five failures each, at random times.

`hpctrain supervise` launches a run on 3 ranks: with mpirun, or in a job of 4 nodes of
scripts/slurm_testbed, one of them a spare. After each new checkpoint, and a random delay of up to
two seconds, one of these failures happens; then the run must end with the digest of an undisturbed
run, and its job must not have been requeued.

    rank      SIGKILL, as from the kernel when memory runs out; SIGSEGV; SIGSTOP, which the watchdog
              of the run has to notice
    launcher  SIGKILL of mpirun or srun
    daemon    SIGKILL of Slurm's step daemon (slurmstepd) on one node
    node      SIGKILL of all processes of a node, including slurmd; not of the node that runs the
              batch script
"""

from __future__ import annotations

import contextlib
import os
import random
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

from hpctrain.heartbeat import read_beats
from hpctrain.launch import ROOT
from hpctrain.report.history import History, time_of
from hpctrain.report.record import read_records
from hpctrain.supervise import newest_step
from tests.support.launch import Job, mpirun
from tests.support.wait import wait_for

PER_RUN = 5  # failures
RANKS = 3
NODES = 4
MOST_NODES = 2  # nodes lost per run: two of four remain, for a run that asks for three
LIMIT = 300.0  # seconds that a run may take to continue after a failure
PACE = {"HPCTRAIN_TEST_PACE": "0.02"}
TESTBED = str(ROOT / "scripts" / "slurm_testbed")
Costs = list[tuple[str, float | None]]  # failures, and the seconds to the next step


class Supervised:
    """Runs are started by mpirun on this machine."""

    faults: tuple[str, ...] = ("rank KILL", "rank SEGV", "rank STOP", "launcher KILL")

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.sound = ""  # the digest of an undisturbed run

    def trial(self, name: str, draw: random.Random) -> tuple[list[str], Costs]:
        """Run a job with failures; return the problems and the costs of the failures."""
        if not self.sound:
            self.run("undisturbed", [], draw)
            self.sound = self.digest("undisturbed")
        faults = [draw.choice(self.faults) for _ in range(PER_RUN)]
        while faults.count("node KILL") > MOST_NODES:
            faults[faults.index("node KILL")] = "rank KILL"
        problems, costs = self.run(name, faults, draw)
        digest = self.digest(name)
        if digest != self.sound:
            problems.append(f"digest {digest} is not {self.sound}")
        return problems, costs

    def digest(self, name: str) -> str:
        """Return the last digest of a run."""
        return str(list(read_records(self.folder / name))[-1].get("digest"))

    def run(self, name: str, faults: list[str], draw: random.Random) -> tuple[list[str], Costs]:
        """Run a supervised job with these failures; return the problems and the costs."""
        flags = f"--run {name} --runs-dir . --data pack.h5 --model tests.support.nets:Slow"
        flags += " --epochs 79 --batch-size 16 --shards 4 --deterministic --hang-timeout 6s"
        flags += " --checkpoint-every 10steps --validate-every 20epochs --progress none"
        job = self.start(name, [sys.executable, "-m", "hpctrain", *flags.split()])
        problems = []
        costs = Costs()
        try:
            for fault in faults:
                if not self.wait_for_checkpoint(job, name):
                    break
                time.sleep(draw.uniform(0, 2))
                began = time.time()
                ranks = [beat.pid for beat in read_beats(self.folder / name / "ranks")]
                with contextlib.suppress(OSError, IndexError, StopIteration):  # between launches
                    self.strike(job, ranks, fault, draw)
                    costs.append((fault, self.seconds_to_step(job, name, began)))
            _, errors = job.communicate(timeout=LIMIT)
            if job.returncode:
                problems.append(f"exit code {job.returncode}: {errors[-600:]}")
            restarts = self.restarts()
            if restarts:
                problems.append(f"requeued {restarts} times")
        except subprocess.TimeoutExpired:
            problems.append(f"hung: not done {LIMIT:.0f} s after the last failure")
        finally:
            self.end(job)
        return problems, costs

    def wait_for_checkpoint(self, job: Job, name: str) -> bool:
        """Wait for a newer checkpoint than the newest now; return whether the run is active."""
        folder = self.folder / name
        before = newest_step(folder)
        wait_for(lambda: job.poll() is not None or newest_step(folder) != before, LIMIT)
        return job.poll() is None

    def seconds_to_step(self, job: Job, name: str, when: float) -> float | None:
        """Return the seconds from a failure to the first step of the next launch, if any."""
        until = time.monotonic() + LIMIT
        while job.poll() is None and time.monotonic() < until:
            launch = History.read(self.folder / name, "sampled").launch
            if (launch.began or 0.0) > when and launch.first_step:
                return (time_of(launch.first_step) or 0.0) - when
            time.sleep(0.1)
        return None

    def start(self, name: str, rank: list[str]) -> Job:
        """Start a supervised run with this command for its ranks."""
        ranks = [mpirun(), "-n", str(RANKS), *rank]
        supervised = [sys.executable, "-m", "hpctrain", "supervise", "--", *ranks]
        return Job(supervised, PACE, self.folder)

    def strike(self, job: Job, ranks: list[int], fault: str, draw: random.Random) -> None:
        """Make a process of the job fail. Raises OSError or IndexError if it has already ended."""
        what, name = fault.split()
        target = draw.choice(ranks)
        if what == "launcher":
            words = {pid: Path(f"/proc/{pid}/cmdline").read_text() for pid in job.members()}
            parent = next(pid for pid, line in words.items() if "\0supervise\0" in line)
            target = int(Path(f"/proc/{parent}/task/{parent}/children").read_text().split()[0])
        elif what == "daemon":
            target = int(re.search(r"PPid:\s*(\d+)", Path(f"/proc/{target}/status").read_text())[1])
        os.kill(target, signal.Signals[f"SIG{name}"])

    def restarts(self) -> int:
        """Return how often the job was requeued."""
        return 0

    def end(self, job: Job) -> None:
        """End the remaining processes of a run."""
        if job.members():
            job.end()


class Testbed(Supervised):
    """Runs are jobs on four Slurm nodes on this machine (scripts/slurm_testbed)."""

    faults = (*Supervised.faults, "daemon KILL", "node KILL")

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        keep = [str(folder), sys.prefix, str(Path(sys.executable).resolve().parents[1])]
        self.home = f"/var/lib/hpctrain-testbed-{os.getpid()}"
        os.environ["HPCTRAIN_TESTBED"] = self.home
        os.environ["HPCTRAIN_TESTBED_KEEP"] = ":".join(keep)
        text = subprocess.check_output([TESTBED, "up"], text=True)
        os.environ["SLURM_CONF"] = re.search(r"SLURM_CONF=(\S+)", text)[1]
        self.name = ""
        self.lost: list[str] = []

    def start(self, name: str, rank: list[str]) -> Job:
        step = ["srun", "--mpi=pmix", "--kill-on-bad-exit=1", *rank]
        supervise = f"-m hpctrain supervise --nodes={RANKS} --"
        supervised = [sys.executable, *supervise.split(), *step]
        batch = ["sbatch", "--wait", f"--job-name={name}", f"--nodes={NODES}", "--no-kill"]
        batch += ["--ntasks-per-node=1", "--requeue", f"--output={self.folder / name}.log"]
        self.name = name
        return Job([*batch, f"--wrap=exec {shlex.join(supervised)}"], PACE, self.folder)

    def facts(self) -> dict[str, str]:
        """Return the fields of `scontrol show job`."""
        command = ["scontrol", "show", "job", "--oneliner"]
        jobs = subprocess.check_output(command, text=True).splitlines()
        return dict(re.findall(r"(\w+)=(\S*)", next(j for j in jobs if f"={self.name} " in j)))

    def strike(self, job: Job, ranks: list[int], fault: str, draw: random.Random) -> None:
        if fault != "node KILL":
            return super().strike(job, ranks, fault, draw)
        variables = [Path(f"/proc/{pid}/environ").read_text() for pid in ranks]
        nodes = {re.search(r"\0SLURMD_NODENAME=(\w+)", text)[1] for text in variables}
        node = draw.choice(sorted(nodes - {self.facts()["BatchHost"], *self.lost}))
        self.lost.append(node)
        subprocess.run([TESTBED, "kill", node[1:]], check=True)

    def restarts(self) -> int:
        return int(self.facts()["Restarts"])

    def end(self, job: Job) -> None:
        subprocess.run(["scancel", f"--name={self.name}"], check=False)
        for node in self.lost:
            subprocess.run([TESTBED, "boot", node[1:]], check=True)
        self.lost = []
        idle = "sinfo -h -p normal -t idle -o %D"
        wait_for(lambda: subprocess.getoutput(idle) == str(NODES), LIMIT)
        super().end(job)

    def down(self) -> None:
        """Stop the Slurm daemons."""
        subprocess.run([TESTBED, "down"], check=False)
        shutil.rmtree(self.home, ignore_errors=True)
