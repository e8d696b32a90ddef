"""The cases of ``python -m scripts.benchmarks`` that train on CPUs, and their goals.

digits, resnet50   ``hpctrain bench`` of the same name; for digits also the time to the first step
tree               the cost of --deterministic: steps of the digits network, and sums of messages
sweep              networks trained concurrently against the same ones trained one after another
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median

from hpctrain.bench import DDP, HPCTRAIN, LIMIT, LOADER, Show, bench_training
from hpctrain.bench.harness import (
    Rates,
    measure,
    python,
    ratio,
    run_job,
    steps_rate,
    table,
    timestamp,
)
from hpctrain.config import BenchConfig
from hpctrain.data.builtin import locate
from hpctrain.report.record import read_records
from scripts.benchmarks import data
from scripts.benchmarks.data import goal_line

FORMATS = ("fp32 NCHW", "fp32 NHWC", "bf16 NHWC")
WRITTEN = f"{LOADER}, fp32 NCHW"
GOALS = {  # case -> (contestant, minimum ratio, to this contestant)
    "digits": [
        ("hpctrain, fp32 NHWC", 1.5, WRITTEN),
        *((f"{HPCTRAIN}, {form}", 0.95, f"{LIMIT}, {form}") for form in FORMATS),
    ],
    "resnet50": [
        ("hpctrain, fp32 NHWC", 1.15, WRITTEN),
        ("hpctrain, bf16 NHWC", 1.9, WRITTEN),
        *((f"{HPCTRAIN}, {form}", 1.0, f"{DDP}, {form}") for form in FORMATS),
        *((f"{HPCTRAIN}, {form}", 0.88, f"{LIMIT}, {form}") for form in FORMATS),
    ],
}
START_RANKS, START_GOAL = 4, 6.0  # seconds to the first step, on two cores

TREE_RANKS, TREE_EPOCHS, TREE_BATCH = (1, 2, 4), 3, 128
LENGTHS = (29_000, 25_600_000)  # numbers in the messages of a small network and of ResNet-50
STEP_GOAL, SUM_GOAL = 1.05, 1.5  # maximum ratios to the plain Allreduce, on 2 ranks

NETWORKS, SLOTS, SWEEP_EPOCHS, SWEEP_GOAL = 6, 2, 3, 0.6
SWEEP = """\
[base]
data = {data}
epochs = {epochs}
threads = 1
device = "cpu"
[grid]
seed = {seeds}
"""


def training(config: BenchConfig, folder: Path, show: Show) -> list[str]:
    """Run ``hpctrain bench`` and, for digits, time the first step; return a line for each goal."""
    rates = bench_training(config, folder, show)
    goals = [
        goal_line(ratio(rates, who, other), factor, f"{who} / {other}")
        for who, factor, other in GOALS[config.case]
    ]
    if config.case == "digits":
        pack = str(locate(config.data or "digits", config.data_dir))
        starts = [first_step(pack, folder / f"start{number}") for number in range(config.rounds)]
        what = f"seconds from mpirun -n {START_RANKS} to the first step, on 2 cores"
        goals.append(goal_line(median(starts), START_GOAL, what, at_most=True))
    return goals


def first_step(pack: str, folder: Path) -> float:
    """Return the seconds from the start of mpirun to the end of the first step."""
    began = time.time()
    steps = train(folder, START_RANKS, "--data", pack, "--model", "digits", "--epochs", "1")
    return timestamp(steps[0]) - began


def train(folder: Path, ranks: int, *flags: str) -> list[dict[str, float]]:
    """Train without validation, one CPU thread per rank; return the records of the steps."""
    words = ["--runs-dir", str(folder), "--run", "run", "--progress", "none"]
    words += ["--validate-every", "0", "--device", "cpu", "--threads", "1", *flags]
    run_job(python("hpctrain", "train", *words, ranks=ranks), f"training on {ranks} ranks")
    return [record for record in read_records(folder / "run") if record["kind"] == "step"]


def tree(config: BenchConfig, folder: Path, show: Show) -> list[str]:
    """Measure the milliseconds of a step and of a sum, in tree order and by a plain Allreduce."""
    pack = str(locate(config.data or "digits", config.data_dir))
    flags = ["--data", pack, "--model", "digits", "--batch-size", str(TREE_BATCH)]
    flags += ["--epochs", str(TREE_EPOCHS)]
    ways = {
        f"{ranks} ranks, {way}": (ranks, ["--shards", str(ranks), *more])
        for ranks in TREE_RANKS
        for way, more in (("Allreduce", []), ("tree order", ["--deterministic"]))
    }

    def step(name: str) -> float:
        ranks, more = ways[name]
        steps = train(folder / f"{name} {time.time()}", ranks, *flags, *more)
        return 1000 * TREE_BATCH / steps_rate(steps, len(steps) // TREE_EPOCHS)

    steps = measure(ways, config.rounds, step, show)
    show(table(f"digits, global batch size {TREE_BATCH}, a step", steps, by_plain(steps), "ms"))
    sums: Rates = {}
    for _ in range(config.rounds):
        for ranks in TREE_RANKS[1:]:
            for length in LENGTHS:
                for way, seconds in add(ranks, length, folder / "sum.json").items():
                    name = f"{length:,} numbers, {ranks} ranks, {way}"
                    sums.setdefault(name, []).append(1000 * seconds)
    show(table("Sum of float32 numbers", sums, by_plain(sums), "ms"))
    sum_2 = f"{LENGTHS[-1]:,} numbers, 2 ranks, "
    return [
        goal_line(ratio(found, f"{name}tree order", f"{name}Allreduce"), most, what, at_most=True)
        for found, name, most, what in (
            (steps, "2 ranks, ", STEP_GOAL, "a step in tree order on 2 ranks, of a plain one"),
            (sums, sum_2, SUM_GOAL, f"{sum_2}in tree order, of a plain one"),
        )
    ]


def by_plain(rates: Rates) -> dict[str, dict[str, str]]:
    """Return the comparisons of each way with the plain Allreduce."""
    plain = {name: f"{name.rpartition(', ')[0]}, Allreduce" for name in rates}
    return {name: {"/ Allreduce": other} for name, other in plain.items() if name != other}


def add(ranks: int, length: int, output: Path) -> dict[str, float]:
    """Return the seconds of each way to sum, from one job of allreduce.py."""
    words = ["scripts.benchmarks.allreduce", str(length), str(output)]
    run_job(python(*words, ranks=ranks), f"sums on {ranks} ranks")
    figures: dict[str, float] = json.loads(output.read_text())[str(length)]
    return figures


def sweep(config: BenchConfig, folder: Path, show: Show) -> list[str]:
    """Measure the seconds of a whole sweep of the digits network, in two slots and in one."""
    pack = str(locate(config.data or "digits", config.data_dir))
    file, seeds = folder / "sweep.toml", list(range(NETWORKS))
    file.write_text(SWEEP.format(data=json.dumps(pack), epochs=SWEEP_EPOCHS, seeds=seeds))
    ways = {f"{slots} slot(s)": slots for slots in (SLOTS, 1)}

    def seconds(name: str) -> float:
        words = ["sweep", str(file), "--slots", str(ways[name]), "--name", f"{time.time()}"]
        began = time.perf_counter()
        words += ["--progress", "none", "--runs-dir", str(folder)]
        run_job(python("hpctrain", *words), f"the sweep in {name}")
        return time.perf_counter() - began

    rates = measure(ways, config.rounds, seconds, show)
    together, alone = ways
    title = f"{NETWORKS} networks of {SWEEP_EPOCHS} epochs"
    show(table(title, rates, {together: {f"/ {alone}": alone}}, "s"))
    what = f"of the time one after another, in {SLOTS} slots"
    return [goal_line(ratio(rates, together, alone), SWEEP_GOAL, what, at_most=True)]


CASES: dict[str, Callable[[BenchConfig, Path, Show], list[str]]] = {
    "digits": training,
    "resnet50": training,
    "tree": tree,
    "sweep": sweep,
    "data": data.measure_data,
}
