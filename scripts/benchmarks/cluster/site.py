"""The site that cluster_check tests: launch command, folder, and time limits."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hpctrain import launch
from hpctrain.cluster import find_job
from hpctrain.errors import RunError, UsageError
from hpctrain.packing.builtin import locate
from hpctrain.report.record import read_records
from scripts.benchmarks.gpu.check import output_of

PROGRAM = (sys.executable, "-m", "hpctrain")
RANK = "scripts.benchmarks.cluster.rank"


@dataclass
class Site:
    """The launch command, the folder for packs and runs, and facts about ranks and nodes."""

    folder: Path
    launcher: list[str]
    log: Path
    limit: float = 300.0  # seconds of a check
    ends: float = 0.0  # of the check that is running, by time.monotonic()
    ranks: int = 2
    facts: list[dict[str, Any]] = field(default_factory=list)  # of every rank
    undisturbed: str = ""  # digest of an undisturbed run

    @property
    def hosts(self) -> list[str]:
        """The nodes, in the order of their first ranks."""
        return list(dict.fromkeys(rank["host"] for rank in self.facts))

    @property
    def left(self) -> float:
        """The seconds that are left for the check, at least 0.1."""
        return max(self.ends - time.monotonic(), 0.1)

    def command(self, ranks: int | None = None) -> list[str]:
        """Return the launch command, for `ranks` ranks spread over the nodes."""
        if ranks is None:
            return self.launcher
        words, spread = list(self.launcher), list[str]()
        for name in {"-n", "-np"} & set(words):  # of two, Open MPI takes the first, srun the last
            del words[words.index(name) : words.index(name) + 2]
        if len(self.hosts) > 1 and Path(words[0]).name in ("mpirun", "mpiexec"):
            share = str(-(-ranks // len(self.hosts)))
            is_open_mpi = "Open MPI" in self.facts[0]["MPI"]
            spread = ["--map-by", "node"] if is_open_mpi else ["-ppn", share]
        return [*words, *spread, "-n", str(ranks)]

    def run(self, command: Sequence[str], env: Mapping[str, str] | None = None) -> str:
        """Run a command within the time limit of the check; return its output, also logged.

        Raises UsageError if it exits with 2, RunError if it fails or exceeds the limit.
        """
        with open(self.log, "a") as file:
            print(f"\n$ {shlex.join(command)}", file=file)
        start = self.log.stat().st_size
        process = launch.start(command, self.log, env or launch.environment())
        try:
            code = process.wait(timeout=self.left)
        except subprocess.TimeoutExpired:
            raise RunError(f"not done after {self.limit:g} s") from None
        finally:
            launch.end(process)  # also on Ctrl-C
        text = self.log.read_bytes()[start:].decode(errors="replace")
        line = launch.last_error_line(text)
        if code == UsageError.exit_code:
            raise UsageError(line)
        if code:
            raise RunError(f"exit code {code}: {line}")
        return text.strip()

    def ask(self, ranks: int | None = None) -> Any:
        """Launch rank.py on all ranks; return the facts of each."""
        output = self.folder / "facts.json"
        self.run([*self.command(ranks), sys.executable, "-m", RANK, str(output)])
        return json.loads(output.read_text())

    def words(self, run: str, *flags: str) -> list[str]:
        """Return the arguments that train on the 10,000 digits for about 60 steps."""
        pack, batch = locate("digits", str(self.folder)), 504 + -504 % self.ranks
        epochs = str(60 * batch // 10_000)
        words = ["--data", str(pack), "--batch-size", str(batch), "--shards", str(self.ranks)]
        words += [
            "--epochs",
            epochs,
            "--deterministic",
            "--checkpoint-every",
            "5steps",
            "--no-test",
        ]
        words += ["--runs-dir", str(self.folder), "--run", run, "--hang-timeout", "2m"]
        return [*words, "--progress", "none", *flags]

    def train(self, run: str, *flags: str, ranks: int | None = None) -> str:
        """Train, and return the digest at the end."""
        self.run([*self.command(ranks), *PROGRAM, *self.words(run, *flags)])
        return self.digest(run)

    def digest(self, run: str) -> str:
        """Return the digest at the end of a run. Raises RunError if it is not done."""
        end = list(read_records(self.folder / run))[-1]
        if end.get("status") != "done":
            raise RunError(f"{run} is not done: {end.get('status')}, {end.get('reason')}")
        return str(end["digest"])

    def compare(self, run: str) -> str:
        """Compare a run's digest with that of an undisturbed run. Raises RunError if it differs."""
        self.undisturbed = self.undisturbed or self.train("undisturbed")
        if (digest := self.digest(run)) != self.undisturbed:
            raise RunError(f"digest {digest}, undisturbed {self.undisturbed}")
        return "the same digest as undisturbed"


def find_launcher(given: str | None) -> list[str]:
    """Return the launch command: the one given, srun in a job of Slurm, or mpirun.

    Raises UsageError on a login node and under other schedulers, where it must be given.
    """
    if given:
        try:
            return shlex.split(given)
        except ValueError as error:
            raise UsageError(f"--launch {given}: {error}") from None
    if found := find_job(os.environ):
        if found[0].name != "Slurm":
            name = found[0].name
            raise UsageError(f"in a {name} job, give --launch 'COMMAND that starts the ranks'")
        cores = os.environ.get("SLURM_CPUS_PER_TASK")
        more = [f"--cpus-per-task={cores}"] if cores else []
        pmi = os.environ.get("HPCTRAIN_PMI", "pmix")
        return ["srun", f"--mpi={pmi}", "--kill-on-bad-exit=1", *more]
    if output_of("sinfo", "--noheader"):
        raise UsageError(
            "this is a login node: run salloc -N 2 --ntasks-per-node 2 scripts/cluster_check, or"
            " scripts/cluster_check --launch 'srun --mpi=pmix -N 2 --ntasks-per-node 2'"
        )
    return [launch.mpirun(), "-n", str(max(2, min(4, len(os.sched_getaffinity(0)))))]
