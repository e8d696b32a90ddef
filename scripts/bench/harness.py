"""Common functions of all benchmarks: run jobs, measure rounds, print a table.

Contestants run alternately (A B C ... A B C ...), so that a slower phase of the machine affects all
of them alike. The medians over the rounds are compared.
"""

from __future__ import annotations

import os
import platform
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Mapping
from datetime import datetime
from importlib.metadata import version
from pathlib import Path
from statistics import median
from typing import Any

from rich.table import Table

from hpctrain import __version__, launch
from hpctrain.errors import RunError
from hpctrain.parallel.device import processor_name

JOB_LIMIT = 1800.0  # seconds
FEWEST_ROUNDS = 3  # for results to be quoted

Rates = dict[str, list[float]]  # contestant -> its rate in each round
Show = Callable[[object], object]


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
    start = [launch.mpirun(), "-n", str(ranks)] if ranks else []
    return [*start, sys.executable, "-m", *words]


def steps_rate(steps: list[dict[str, Any]], warm: int) -> float:
    """Return images/s by wall-clock time, from the end of step `warm` to that of the last step."""
    elapsed = timestamp(steps[-1]) - timestamp(steps[warm - 1])
    return float(sum(step["rows"] for step in steps[warm:]) / elapsed)


def timestamp(record: dict[str, Any]) -> float:
    """Return when a record was made, in seconds since 1970."""
    return datetime.fromisoformat(record["time"]).timestamp()


def measure(
    names: Iterable[str], rounds: int, run: Callable[[str], float], show: Callable[[str], object]
) -> Rates:
    """Measure each contestant once per round by `run`; pass a line on each result to `show`."""
    rates: Rates = {name: [] for name in names}
    for number in range(rounds):
        for name, figures in rates.items():
            began = time.perf_counter()
            figures.append(run(name))
            job = f"job {time.perf_counter() - began:.1f} s"
            show(f"round {number + 1} of {rounds}  {name}: {number_text(figures[-1])} ({job})")
    return rates


def ratio(rates: Rates, name: str, other: str) -> float:
    """Return the median of `name` divided by that of `other`."""
    return median(rates[name]) / median(rates[other])


def table(
    title: str, rates: Rates, compared: Mapping[str, Mapping[str, str]], unit: str = "images/s"
) -> Table:
    """Return a table of median, range and ratios of each contestant.

    ``compared[name][heading]`` is the contestant by whose median that of `name` is divided in the
    column `heading`.
    """
    rounds = min(map(len, rates.values()))
    made = Table(title=f"{title}, median of {rounds} round(s)")
    if rounds < FEWEST_ROUNDS:
        made.caption = f"fewer than {FEWEST_ROUNDS} rounds: not to be quoted"
    headings = list(dict.fromkeys(heading for peers in compared.values() for heading in peers))
    made.add_column("", no_wrap=True)
    for heading in (unit, "min - max", *headings):
        made.add_column(heading, justify="right", no_wrap=True)
    for name, figures in rates.items():
        spread = f"{number_text(min(figures))} - {number_text(max(figures))}"
        peers = [compared.get(name, {}).get(heading) for heading in headings]
        ratios = [f"{ratio(rates, name, peer):.3f}" if peer in rates else "" for peer in peers]
        made.add_row(name, number_text(median(figures)), spread, *ratios)
    return made


def number_text(number: float) -> str:
    """Format a number: an integer from 100 on, with one decimal from 10 on, else with two."""
    decimals = 0 if number >= 100 else 1 if number >= 10 else 2
    return f"{number:,.{decimals}f}"


def machine_lines() -> list[str]:
    """Return lines on processor, cores, load and versions, without which results mean little."""
    versions = ", ".join(f"{name} {version(name)}" for name in ("torch", "mpi4py", "h5py"))
    load = os.getloadavg()[0]
    return [
        f"{processor_name()}, {len(os.sched_getaffinity(0))} cores allowed, load {load:.1f} before",
        f"hpctrain {__version__}, Python {platform.python_version()}, {versions}",
    ]
