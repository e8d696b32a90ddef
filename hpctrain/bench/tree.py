"""``hpctrain bench tree``: what the same bits on any number of ranks cost.

    python -m hpctrain bench tree

On 1, 2 and 4 ranks: whole steps of the digits network with and without --deterministic, one shard a
rank, from outside as in the other cases; and the sum of a vector as long as ResNet-50's message,
both ways in turn in one job. Ratios of medians over interleaved rounds.
"""

from __future__ import annotations

import json
import statistics
import sys
import tempfile
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from hpctrain.bench.jobs import run_job, steps_rate
from hpctrain.bench.report import machine_lines, number_text
from hpctrain.config import BenchConfig
from hpctrain.launch import mpirun

if TYPE_CHECKING:
    from rich.table import Table

RANKS = (1, 2, 4)
LENGTHS = (29_000, 25_600_000)  # numbers: about the digits network's message, and ResNet-50's
EPOCHS = 3  # of the digits, the first to warm up
STEP_TARGET, SUM_TARGET = 1.05, 1.5  # times the plain one, on 2 ranks
BATCH = 128

Rates = dict[tuple[int, bool], list[float]]  # ranks, deterministic -> images/s, by round
Sums = dict[tuple[int, int], list[dict[str, float]]]  # ranks, length -> figures, by round


def run(config: BenchConfig, say: Callable[[object], None]) -> None:
    """Run all rounds and print both tables."""
    from hpctrain.data.builtin import locate

    pack = str(locate(config.data or "digits", config.data_dir))
    for line in machine_lines():
        say(line)
    rates: Rates = defaultdict(list)
    sums: Sums = defaultdict(list)
    with tempfile.TemporaryDirectory(prefix="hpctrain-bench-") as folder:
        for number in range(config.rounds):
            for ranks in RANKS:
                for deterministic in (False, True):
                    place = Path(folder) / f"{number}-{ranks}-{deterministic}"
                    rate = train(ranks, deterministic, pack, place)
                    rates[ranks, deterministic].append(rate)
                    how = "tree order" if deterministic else "Allreduce"
                    say(f"round {number + 1}  {ranks} ranks, {how}: {number_text(rate)} images/s")
                for length in LENGTHS if ranks > 1 else ():
                    place = Path(folder) / "sum.json"
                    sums[ranks, length].append(add(ranks, length, place))
    say(step_table(rates))
    say(sum_table(sums))
    for line in target_lines(rates, sums):
        say(line)


def train(ranks: int, deterministic: bool, pack: str, place: Path) -> float:
    """images/s of the digits network, all included."""
    from hpctrain.report.record import read_records

    flags = ["--data", pack, "--batch-size", str(BATCH), "--shards", str(ranks), "--threads", "1"]
    flags += ["--epochs", str(EPOCHS), "--evaluate-every", "0", "--device", "cpu"]
    flags += ["--run", "run", "--runs-dir", str(place), "--progress", "none"]
    flags += ["--deterministic"] if deterministic else []
    program = [sys.executable, "-m", "hpctrain", "train", "--model", "digits", *flags]
    run_job([mpirun(), "-n", str(ranks), *program], f"training on {ranks} ranks")
    steps = [record for record in read_records(place / "run") if record["kind"] == "step"]
    return steps_rate(steps, len(steps) // EPOCHS)[0]


def add(ranks: int, length: int, place: Path) -> dict[str, float]:
    """The figures of one job of reduction.py."""
    program = [sys.executable, "-m", "hpctrain.bench.reduction", str(length), str(ranks)]
    run_job([mpirun(), "-n", str(ranks), *program, str(place)], f"summing on {ranks} ranks")
    figures: dict[str, float] = json.loads(place.read_text())
    return figures


def step_ratio(rates: Rates, ranks: int) -> float:
    """Time of a step in tree order over that of a plain one."""
    return statistics.median(rates[ranks, False]) / statistics.median(rates[ranks, True])


def sum_ratio(sums: Sums, ranks: int, length: int, way: str = "tree") -> float:
    """Time of a sum in tree order over that of an Allreduce; by round, as both share a job."""
    return statistics.median(f[way] / f["allreduce"] for f in sums[ranks, length])


def step_table(rates: Rates) -> Table:
    """Whole steps of the digits network."""
    from rich.table import Table

    rounds = len(next(iter(rates.values())))
    table = Table(title=f"digits, mini-batch {BATCH}, 1 thread a rank, median of {rounds} round(s)")
    for name in ("ranks", "Allreduce, images/s", "tree order, images/s", "step, ratio"):
        table.add_column(name, justify="right")
    for ranks in RANKS:
        medians = (number_text(statistics.median(rates[ranks, way])) for way in (False, True))
        table.add_row(str(ranks), *medians, f"{step_ratio(rates, ranks):.3f}")
    return table


def sum_table(sums: Sums) -> Table:
    """Sums of a vector."""
    from rich.table import Table

    table = Table(title="Sum of float32 numbers over all ranks")
    names = ("ranks", "numbers", "Allreduce, ms", "tree order, ms", "ratio", "sent / ring")
    for name in (*names, "bf16 wire, ms", "ratio"):
        table.add_column(name, justify="right")
    for (ranks, length), rounds in sums.items():
        plain, tree = (statistics.median(f[way] for f in rounds) for way in ("allreduce", "tree"))
        sent = f"{rounds[0]['sent'] / rounds[0]['ring']:.3f}"
        narrow = statistics.median(f["bf16"] for f in rounds)
        times = (f"{1000 * plain:.3g}", f"{1000 * tree:.3g}")
        ratio, less = (f"{sum_ratio(sums, ranks, length, way):.2f}" for way in ("tree", "bf16"))
        row = (str(ranks), f"{length:,}", *times, ratio, sent, f"{1000 * narrow:.3g}", less)
        table.add_row(*row)
    return table


def target_lines(rates: Rates, sums: Sums) -> list[str]:
    """A line per target: what is wanted, what was reached."""
    step, total = step_ratio(rates, 2), sum_ratio(sums, 2, LENGTHS[-1])
    wanted = [
        (step, STEP_TARGET, "digits, a step in tree order on 2 ranks"),
        (total, SUM_TARGET, f"the sum of {LENGTHS[-1]:,} numbers in tree order on 2 ranks"),
    ]
    return [
        f"{'reached' if found <= most else 'MISSED '} {found:.3f}  {what} <= {most:.2f} x plain"
        for found, most, what in wanted
    ]
