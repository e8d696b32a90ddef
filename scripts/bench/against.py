"""``python -m scripts.bench CASE --against COMMIT``: this package and an earlier one in turn.

The files of the commit are extracted from git once, into ~/.cache/hpctrain-bench/COMMIT. Each
package writes its data with its own code, so that the format of packs may differ. digits and
resnet50 are timed as in training.py, with the default settings, tree as digits with
--deterministic, data as in reading.py, and pack as in packing.py. CPU seconds are those of a whole
job, with the start of its ranks; CPU time per step is that of a rank between its first and its last
call of MPI. Memory is the peak of a process. Messages and bytes per step are those that a rank
passes to MPI.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
from argparse import Namespace
from pathlib import Path
from typing import NamedTuple

import numpy as np

from hpctrain import launch
from hpctrain.errors import UsageError
from scripts.bench import reading, training
from scripts.bench.harness import Rates, measure, print_table, python, run_job, steps_rate
from scripts.bench.packing import compare_packing

CACHE = Path.home() / ".cache" / "hpctrain-bench"
FIGURES = "images/s", "CPU s", "CPU ms per step", "MiB", "messages per step", "bytes per step"
USAGE = """\
import resource, subprocess, sys
code = subprocess.call(sys.argv[1:])
used = resource.getrusage(resource.RUSAGE_CHILDREN)
print(used.ru_utime + used.ru_stime, used.ru_maxrss / 1024)
sys.exit(code)
"""
# Runs hpctrain, and prints on each rank what it sent: messages, bytes, CPU seconds meanwhile.
COUNT = """\
import atexit, os, runpy, time
from hpctrain.parallel.mpi import MPI
calls = []
def size(message):
    if not isinstance(message, list):
        return memoryview(message).nbytes
    buffer, *count, kind = message
    return kind.Get_size() * count[0] if count else buffer.nbytes
def counted(call):
    def method(self, *args, **named):
        calls.append((size(args[args[0] is MPI.IN_PLACE]), time.process_time()))
        return call(self, *args, **named)
    return method
names = "Allreduce", "Alltoall", "Allgather", "Sendrecv", "Isend"
methods = {name: counted(getattr(MPI.Intracomm, name)) for name in names}
MPI.COMM_WORLD = type("Counted", (MPI.Intracomm,), methods)(MPI.COMM_WORLD)
def show():
    sizes, times = zip(*calls)
    os.write(2, f"\\nSENT {len(calls)} {sum(sizes)} {times[-1] - times[0]}\\n".encode())
atexit.register(show)
runpy.run_module("hpctrain", run_name="__main__", alter_sys=True)
"""


class Package(NamedTuple):
    """One of the packages, and the folder for its data and runs."""

    name: str
    tree: Path
    folder: Path

    def run(self, *command: str) -> tuple[float, float, np.ndarray]:
        """Run a command that imports this package.

        Returns CPU seconds, peak memory in MiB, and what the ranks printed by COUNT, (ranks, 3).
        """
        env = launch.environment({"OMP_NUM_THREADS": "1", "PYTHONPATH": str(self.tree)})
        printed = run_job([sys.executable, "-c", USAGE, *command], self.name, env, self.folder)
        seconds, memory = printed.split()[-2:]
        sent = [line.split()[1:] for line in printed.splitlines() if line.startswith("SENT ")]
        return float(seconds), float(memory), np.array(sent, float).reshape(-1, 3)

    @property
    def validate_every(self) -> str:
        """The flag of ``train`` of this name in this package."""
        options = "".join(p.read_text() for p in (self.tree / "hpctrain/config").glob("*.py"))
        return "--validate-every" if " validate_every: " in options else "--evaluate-every"

    @property
    def readers(self) -> str:
        """The module of this package that measures readers."""
        if (self.tree / "scripts" / "bench").exists():
            return "scripts.bench.reading"
        return "scripts.benchmarks.data"


def compare_packages(options: Namespace, folder: Path, commit: str) -> None:
    """Measure the case with both packages; print the ratios of the new one to that of `commit`."""
    packages = [Package("new", launch.ROOT, folder / "new")]
    packages.append(Package(commit, extract(commit), folder / "old"))
    for package in packages:
        package.folder.mkdir()
    if options.case == "data":
        time_reading(options, packages)
    elif options.case == "pack":
        compare_packing(options, folder, {package.name: package.tree for package in packages})
    else:
        time_training(options, packages)


def extract(commit: str) -> Path:
    """Return the folder with the files of a commit, extracted from git unless it is there."""
    git = ["git", "-C", str(launch.ROOT)]
    words = [*git, "rev-parse", "--verify", f"{commit}^{{commit}}"]
    parsed = subprocess.run(words, capture_output=True, text=True)
    if parsed.returncode:
        raise UsageError(f"--against {commit}: there is no such commit")
    tree = CACHE / parsed.stdout.strip()
    if not tree.exists():
        CACHE.mkdir(parents=True, exist_ok=True)
        part = tempfile.mkdtemp(dir=CACHE)
        archive = subprocess.run([*git, "archive", tree.name], capture_output=True, check=True)
        subprocess.run(["tar", "-x", "-C", part], input=archive.stdout, check=True)
        os.rename(part, tree)
    return tree


def time_training(options: Namespace, packages: list[Package]) -> None:
    """Print images/s, CPU seconds, peak memory, messages and bytes of training."""
    by_name = {package.name: package for package in packages}
    figures: dict[str, Rates] = {unit: {name: [] for name in by_name} for unit in FIGURES}
    is_resnet = options.case == "resnet50"
    if is_resnet and options.data is None:
        for package in packages:
            write_pack(package)
    if is_resnet:
        model = "resnet50"
        source = options.data or "images.h5"
        batch = training.RESNET_BATCH
        epochs = 1
    else:
        model = "digits"
        source = options.data or "digits"
        batch = training.DIGITS_BATCH
        epochs = training.DIGITS_EPOCHS
    words = [
        *("--data", source),
        *("--model", model),
        *("--batch-size", str(batch)),
        *("--epochs", str(epochs)),
        "--no-test",
        *("--device", "cpu"),
        *("--progress", "none"),
        *("--run", "run"),
    ]
    if options.case == "tree":
        words.append("--deterministic")
    else:
        words += ["--threads", "1"]

    def rate(name: str) -> float:
        package = by_name[name]
        shutil.rmtree(package.folder / "runs", ignore_errors=True)
        train = [sys.executable, "-c", COUNT, "train", *words, package.validate_every, "0"]
        command = [launch.mpirun(), "-n", str(options.ranks), *train]
        seconds, peak, sent = package.run(*command)
        text = (package.folder / "runs" / "run" / "progress.jsonl").read_text()
        records = map(json.loads, text.splitlines())
        steps = [record for record in records if record["kind"] == "step"]
        warm = training.RESNET_WARM if is_resnet else len(steps) // epochs
        speed = steps_rate(steps, warm)
        messages, size, busy = sent.mean(axis=0) / len(steps)
        values = (speed, seconds, 1000 * busy, peak, messages, size)
        for unit, value in zip(FIGURES, values, strict=True):
            figures[unit][name].append(float(value))
        return speed

    measure(by_name, options.rounds, rate)
    compared = {"new": {"new / old": packages[1].name}}
    for unit, rates in figures.items():
        print_table(f"{options.case}, {options.ranks} ranks of 1 thread", rates, compared, unit)


def write_pack(package: Package) -> None:
    """Write images.h5, the pack for resnet50, with the code of this package."""
    count = training.RESNET_STEPS * training.RESNET_BATCH
    reading.write_images(package.folder / "files", count)
    words = ["pack", "files", "--size", "100x100", "--split", "1", "--output", "images.h5"]
    package.run(*python("hpctrain", *words))


def time_reading(options: Namespace, packages: list[Package]) -> None:
    """Print images/s of the readers of both packages."""
    source = os.path.abspath(options.data) if options.data else None
    make = f"make_files(pathlib.Path(), {source!r})"
    for package in packages:
        imports = f"import pathlib; from {package.readers} import make_files"
        package.run(sys.executable, "-c", f"{imports}; {make}")
    readers = [name for name in reading.READERS if name.startswith(("pack", "external"))]
    jobs = {f"{name}: {package.name}": (package, name) for name in readers for package in packages}

    def rate(job: str) -> float:
        package, name = jobs[job]
        package.run(*python(package.readers, name, "raw.h5", "rate"))
        return float((package.folder / "rate").read_text())

    rates = measure(jobs, options.rounds, rate)
    old = packages[1].name
    compared = {f"{name}: new": {"new / old": f"{name}: {old}"} for name in readers}
    print_table("Images of 100x100x3 on one core", rates, compared)
