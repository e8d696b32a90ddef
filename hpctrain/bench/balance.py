"""``hpctrain bench balance``: what --worker-load auto gets back where a rank is slow.

    python -m hpctrain bench balance

Two ranks and eight shards; a shard takes 10 ms on the first and 30 ms on the second (slowed.py). An
even split, the one that is told in advance (3,1), and auto, in turn; the first epoch is not timed:
auto measures in it.
"""

from __future__ import annotations

import statistics
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

from hpctrain.bench.jobs import run_job, steps_rate
from hpctrain.bench.report import machine_lines, number_text
from hpctrain.bench.slowed import SECONDS, TIMES
from hpctrain.config import BenchConfig
from hpctrain.launch import mpirun

SHARDS, BATCH, EPOCHS = 8, 512, 3
WAYS = {"even": [], "3,1": ["--worker-load", "3,1"], "auto": ["--worker-load", "auto"]}
TARGET = 0.8


def run(config: BenchConfig, say: Callable[[object], None]) -> None:
    """Run all rounds and print the table."""
    from hpctrain.data.builtin import locate

    pack = str(locate(config.data or "digits", config.data_dir))
    for line in machine_lines():
        say(line)
    rates: dict[str, list[float]] = {way: [] for way in WAYS}
    with tempfile.TemporaryDirectory(prefix="hpctrain-bench-") as folder:
        for number in range(config.rounds):
            for way, flags in WAYS.items():
                rate = train(flags, pack, Path(folder) / f"{number}-{way}")
                rates[way].append(rate)
                say(f"round {number + 1}  {way}: {number_text(rate)} images/s")
    for line in lines(rates):
        say(line)


def train(flags: list[str], pack: str, place: Path) -> float:
    """images/s after the first epoch."""
    from hpctrain.report.record import read_records

    words = [
        "--data",
        pack,
        "--model",
        "hpctrain.bench.slowed:net",
        "--shards",
        str(SHARDS),
        *flags,
    ]
    words += ["--batch-size", str(BATCH), "--epochs", str(EPOCHS), "--evaluate-every", "0"]
    words += ["--device", "cpu", "--threads", "1", "--progress", "none"]
    words += ["--run", "run", "--runs-dir", str(place)]
    program = [sys.executable, "-m", "hpctrain", "train", *words]
    run_job([mpirun(), "-n", "2", *program], "training with a slow rank")
    steps = [record for record in read_records(place / "run") if record["kind"] == "step"]
    return steps_rate(steps, len(steps) // EPOCHS)[0]


def recovered(rates: dict[str, list[float]]) -> float:
    """The share of the time between the even split and the told one that auto gets back."""
    even, told, auto = (1 / statistics.median(rates[way]) for way in ("even", "3,1", "auto"))
    return (even - auto) / (even - told)


def lines(rates: dict[str, list[float]]) -> list[str]:
    """A line per way, and whether the target was reached."""
    found = recovered(rates)
    rounds = len(rates["even"])
    head = f"{SHARDS} shards of {1000 * SECONDS:.0f} ms, on the last rank {TIMES} times as long"
    table = [
        f"  {way:6}{number_text(statistics.median(values)):>8} images/s"
        for way, values in rates.items()
    ]
    verdict = "reached" if found >= TARGET else "MISSED "
    goal = f"{verdict} {found:.3f}  of what the ideal split saves, by auto >= {TARGET}"
    return [f"{head}, median of {rounds} round(s)", *table, goal]
