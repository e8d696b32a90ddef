"""Common functions of all benchmarks: run jobs, measure rounds, print a table.

Contestants run alternately (A B C ... A B C ...), so that a slower phase of the machine affects all
of them alike. The medians over the rounds are compared.
"""

from __future__ import annotations

import os
import platform
import subprocess
import sys
from collections.abc import Callable, Iterable, Mapping
from importlib.metadata import version
from pathlib import Path
from statistics import median
from typing import Any

from hpctrain import __version__, launch
from hpctrain.errors import RunError
from hpctrain.parallel.device import processor_name
from hpctrain.report.history import time_of

JOB_LIMIT = 1800.0  # seconds
FEWEST_ROUNDS = 3  # for results to be quoted

Rates = dict[str, list[float]]  # contestant -> its rate in each round


def run_job(
    command: list[str],
    name: str,
    env: Mapping[str, str] | None = None,
    folder: Path | None = None,
) -> str:
    """Run a job to completion, by default with one thread per rank; return its output.

    Raises RunError with its last error line if it fails.
    """
    print(f"running {name} ...", file=sys.stderr)
    done = subprocess.run(
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        env=env or launch.environment({"OMP_NUM_THREADS": "1"}),
        cwd=folder,
        timeout=JOB_LIMIT,
    )
    if done.returncode:
        words = launch.last_error_line(done.stdout)
        raise RunError(f"{name} failed ({done.returncode}): {words}")
    return done.stdout


def python(*words: str, ranks: int = 0) -> list[str]:
    """Return the command ``python -m WORDS``, under mpirun if `ranks` is not 0."""
    command = [sys.executable, "-m", *words]
    if ranks:
        return [launch.mpirun(), "-n", str(ranks), *command]
    return command


def steps_rate(steps: list[dict[str, Any]], warm: int) -> float:
    """Return images/s by wall-clock time, from the end of step `warm` to that of the last step."""
    began = time_of(steps[warm - 1]) or 0.0
    ended = time_of(steps[-1]) or 0.0
    rows = sum(step["rows"] for step in steps[warm:])
    return float(rows / (ended - began))


def measure(names: Iterable[str], rounds: int, run: Callable[[str], float]) -> Rates:
    """Measure each contestant once per round by `run`; print each result."""
    rates: Rates = {name: [] for name in names}
    for number in range(rounds):
        for name, figures in rates.items():
            figures.append(run(name))
            print(f"round {number + 1} of {rounds}  {name}: {figures[-1]:,.2f}", flush=True)
    return rates


def ratio(rates: Rates, name: str, other: str) -> float:
    """Return the median of `name` divided by that of `other`."""
    return median(rates[name]) / median(rates[other])


def print_table(
    title: str, rates: Rates, compared: Mapping[str, Mapping[str, str]], unit: str = "images/s"
) -> None:
    """Print median, range and ratios of each contestant.

    ``compared[name][heading]`` is the contestant by whose median that of `name` is divided.
    """
    rounds = min(map(len, rates.values()))
    few = "" if rounds >= FEWEST_ROUNDS else ": too few to be quoted"
    print(f"\n{title}, {unit}, median of {rounds} round(s){few}")
    for name, figures in rates.items():
        spread = f"({min(figures):,.2f} - {max(figures):,.2f})"
        peers = {head: peer for head, peer in compared.get(name, {}).items() if peer in rates}
        ratios = "".join(f"  {head} {ratio(rates, name, peer):.3f}" for head, peer in peers.items())
        print(f"{name:44}{median(figures):14,.2f} {spread:28}{ratios}", flush=True)


def print_machine() -> None:
    """Print processor, cores, load and versions, without which results mean little."""
    versions = ", ".join(f"{name} {version(name)}" for name in ("torch", "mpi4py", "h5py"))
    cores = len(os.sched_getaffinity(0))
    load = os.getloadavg()[0]
    print(f"{processor_name()}, {cores} cores allowed, load {load:.1f} before")
    print(f"hpctrain {__version__}, Python {platform.python_version()}, {versions}", flush=True)
