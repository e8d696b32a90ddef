"""``python -m scripts.benchmarks CASE --against COMMIT``: this package and an earlier one in turn.

The files of the commit are extracted from git once, into ~/.cache/hpctrain-benchmarks/COMMIT. Each
package writes its data with its own code, so that the format of packs may differ. digits and
resnet50 are timed as in cases.py, with the default settings, and data as in data.py. CPU seconds
are those of a whole job, with the start of its ranks; memory is the peak of a process.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import NamedTuple

from hpctrain import launch
from hpctrain.errors import UsageError
from scripts.benchmarks import data
from scripts.benchmarks.cases import RESNET_BATCH, RESNET_STEPS, RESNET_WARM
from scripts.benchmarks.harness import Options, Rates, Show, measure, python, run_job, steps_rate
from scripts.benchmarks.harness import table as draw

CACHE = Path.home() / ".cache" / "hpctrain-benchmarks"
EARLIER = {"--validate-every": "--evaluate-every"}  # settings that have been renamed
DIGITS_BATCH, DIGITS_EPOCHS = 128, 3
USAGE = """\
import resource, subprocess, sys
code = subprocess.call(sys.argv[1:])
used = resource.getrusage(resource.RUSAGE_CHILDREN)
print(used.ru_utime + used.ru_stime, used.ru_maxrss / 1024)
sys.exit(code)
"""


class Package(NamedTuple):
    """One of the packages, and the folder for its data and runs."""

    name: str
    tree: Path
    folder: Path

    def run(self, *command: str) -> tuple[float, float]:
        """Run a command that imports this package; return CPU seconds and peak memory in MiB."""
        env = launch.environment({"OMP_NUM_THREADS": "1", "PYTHONPATH": str(self.tree)})
        printed = run_job([sys.executable, "-c", USAGE, *command], self.name, env, self.folder)
        seconds, memory = printed.split()[-2:]
        return float(seconds), float(memory)

    def flags(self, *words: str) -> list[str]:
        """Return settings of ``train`` under the names that this package has for them."""
        options = (self.tree / "hpctrain" / "config" / "train.py").read_text()
        earlier = {
            new: old
            for new, old in EARLIER.items()
            if f"{new[2:].replace('-', '_')}:" not in options
        }
        return [earlier.get(word, word) for word in words]


def compare_packages(options: Options, commit: str, folder: Path, show: Show) -> None:
    """Measure the case with both packages; show the ratios of the new one to that of `commit`."""
    measured = {"digits": time_training, "resnet50": time_training, "data": time_reading}
    if options.case not in measured:
        raise UsageError(f"--against is for {', '.join(measured)}, not {options.case}")
    packages = [Package("new", launch.ROOT, folder / "new")]
    packages.append(Package(commit, extract(commit), folder / "old"))
    for package in packages:
        package.folder.mkdir()
    measured[options.case](options, packages, show)


def extract(commit: str) -> Path:
    """Return the folder with the files of a commit, extracted from git unless it is there."""
    git = ["git", "-C", str(launch.ROOT)]
    words = [*git, "rev-parse", "--verify", f"{commit}^{{commit}}"]
    found = subprocess.run(words, capture_output=True, text=True)
    if found.returncode:
        raise UsageError(f"--against {commit}: there is no such commit")
    tree = CACHE / found.stdout.strip()
    if not tree.exists():
        CACHE.mkdir(parents=True, exist_ok=True)
        part = tempfile.mkdtemp(dir=CACHE)
        archive = subprocess.run([*git, "archive", tree.name], capture_output=True, check=True)
        subprocess.run(["tar", "-x", "-C", part], input=archive.stdout, check=True)
        os.rename(part, tree)
    return tree


def time_training(options: Options, packages: list[Package], show: Show) -> None:
    """Show images/s, CPU seconds and peak memory of training with both packages."""
    by_name = {package.name: package for package in packages}
    cpu: Rates = {name: [] for name in by_name}
    memory: Rates = {name: [] for name in by_name}
    if options.case == "resnet50" and options.data is None:
        for package in packages:
            data.write_images(package.folder / "files", RESNET_STEPS * RESNET_BATCH)
            words = ["pack", "files", "--size", "100x100", "--split", "1", "--output", "images.h5"]
            package.run(*python("hpctrain", *words))
    batch, epochs = (DIGITS_BATCH, DIGITS_EPOCHS) if options.case == "digits" else (RESNET_BATCH, 1)
    source = options.data or {"digits": "digits", "resnet50": "images.h5"}[options.case]
    words = ["--data", source, "--model", options.case, "--batch-size", str(batch)]
    words += ["--epochs", str(epochs), "--validate-every", "0", "--no-test", "--device", "cpu"]
    words += ["--threads", "1", "--progress", "none", "--run", "run"]

    def rate(name: str) -> float:
        package = by_name[name]
        shutil.rmtree(package.folder / "runs", ignore_errors=True)
        command = python("hpctrain", "train", *package.flags(*words), ranks=options.ranks)
        seconds, peak = package.run(*command)
        cpu[name].append(seconds)
        memory[name].append(peak)
        text = (package.folder / "runs" / "run" / "progress.jsonl").read_text()
        steps = [r for r in map(json.loads, text.splitlines()) if r["kind"] == "step"]
        return steps_rate(steps, RESNET_WARM if epochs == 1 else len(steps) // epochs)

    rates = measure(by_name, options.rounds, rate, show)
    compared = {"new": {"new / old": packages[1].name}}
    for figures, unit in ((rates, "images/s"), (cpu, "CPU s"), (memory, "MiB")):
        show(draw(f"{options.case}, {options.ranks} ranks of 1 thread", figures, compared, unit))


def time_reading(options: Options, packages: list[Package], show: Show) -> None:
    """Show images/s of the readers of both packages."""
    source = os.path.abspath(options.data) if options.data else None
    make = f"from scripts.benchmarks import data; data.make_files(data.Path(), {source!r})"
    for package in packages:
        package.run(sys.executable, "-c", make)
    readers = [name for name in data.READERS if name.startswith(("pack", "external"))]
    jobs = {f"{name}: {package.name}": (package, name) for name in readers for package in packages}

    def rate(job: str) -> float:
        package, name = jobs[job]
        package.run(*python("scripts.benchmarks.data", name, "raw.h5", "rate"))
        return float((package.folder / "rate").read_text())

    rates = measure(jobs, options.rounds, rate, show)
    old = packages[1].name
    compared = {f"{name}: new": {"new / old": f"{name}: {old}"} for name in readers}
    show(draw("Images of 100x100x3 on one core", rates, compared))
