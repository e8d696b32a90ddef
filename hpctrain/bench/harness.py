"""What all benchmarks share: jobs, rounds in which each contestant has its turn, one table.

Contestants run in turn (A B C ... A B C ...), so that a machine that slows down slows all of them
down. Compared are the medians over the rounds.
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
from statistics import median
from typing import TYPE_CHECKING, Any

from hpctrain import __version__, launch
from hpctrain.errors import RunError, UsageError
from hpctrain.text import say

if TYPE_CHECKING:
    from rich.table import Table

JOB_LIMIT = 1800.0  # seconds
FEWEST_ROUNDS = 3  # for figures to quote

Rates = dict[str, list[float]]  # contestant -> its figure in each round


def run_job(command: list[str], name: str, env: Mapping[str, str] | None = None) -> None:
    """Run a job to its end, by default with one thread a rank. RunError with its last words if it
    fails or takes too long; UsageError if it exits with 2, wrong usage.
    """
    say(f"running {name} ...", sys.stderr)
    process = subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        env=env or launch.environment({"OMP_NUM_THREADS": "1"}),
    )
    try:
        printed, _ = process.communicate(timeout=JOB_LIMIT)
    except subprocess.TimeoutExpired:
        raise RunError(f"{name}: not done after {JOB_LIMIT:.0f} s: {' '.join(command)}") from None
    finally:
        if process.poll() is None:  # also on Ctrl-C: mpirun then ends its ranks
            process.terminate()
            try:
                process.communicate(timeout=10)
            except subprocess.TimeoutExpired:
                process.kill()
                process.communicate()
    if process.returncode:
        words = launch.last_error_line(printed)
        if process.returncode == UsageError.exit_code:
            raise UsageError(words.removeprefix("hpctrain: "))
        error = RunError(f"{name} failed ({process.returncode}): {words}")
        error.add_note(printed)  # for a log; the user sees the line above
        raise error


def python(*words: str, ranks: int = 0) -> list[str]:
    """The command ``python -m WORDS``, under mpirun where `ranks` are given."""
    start = [launch.mpirun(), "-n", str(ranks)] if ranks else []
    return [*start, sys.executable, "-m", *words]


def steps_rate(steps: list[dict[str, Any]], warm: int) -> float:
    """images/s by the wall clock, from the end of step `warm` to the end of the last one."""
    elapsed = timestamp(steps[-1]) - timestamp(steps[warm - 1])
    return float(sum(step["rows"] for step in steps[warm:]) / elapsed)


def timestamp(record: dict[str, Any]) -> float:
    """When a record was written, in seconds since 1970."""
    return datetime.fromisoformat(record["time"]).timestamp()


def measure(
    names: Iterable[str], rounds: int, run: Callable[[str], float], show: Callable[[str], object]
) -> Rates:
    """`run` each contestant once a round, in turn; `show` each figure at once."""
    rates: Rates = {name: [] for name in names}
    for number in range(rounds):
        for name, figures in rates.items():
            began = time.perf_counter()
            figures.append(run(name))
            job = f"job {time.perf_counter() - began:.1f} s"
            show(f"round {number + 1} of {rounds}  {name}: {number_text(figures[-1])} ({job})")
    return rates


def ratio(rates: Rates, name: str, other: str) -> float:
    """Median over median."""
    return median(rates[name]) / median(rates[other])


def table(
    title: str, rates: Rates, compared: Mapping[str, Mapping[str, str]], unit: str = "images/s"
) -> Table:
    """Median, range and ratios of each contestant. `compared` gives for a contestant, by the
    heading of a column, the one whose median its own is divided by.
    """
    from rich.table import Table

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
    """Whole numbers from 100 on, below that one or two decimals."""
    decimals = 0 if number >= 100 else 1 if number >= 10 else 2
    return f"{number:,.{decimals}f}"


def machine_lines() -> list[str]:
    """Processor, cores, load and versions: a figure without them means little."""
    from hpctrain.parallel.device import processor_name  # imports torch

    versions = ", ".join(f"{name} {version(name)}" for name in ("torch", "mpi4py", "h5py"))
    load = os.getloadavg()[0]
    return [
        f"{processor_name()}, {len(os.sched_getaffinity(0))} cores allowed, load {load:.1f} before",
        f"hpctrain {__version__}, Python {platform.python_version()}, {versions}",
    ]
