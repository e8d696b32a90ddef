"""The cases of ``python -m scripts.benchmarks`` that train on CPUs, and their goals.

digits, resnet50   hpctrain against the same network without loading and communication (the limit)
                   and under PyTorch's DistributedDataParallel (peers.py); for digits also the time
                   to the first step
tree               the cost of --deterministic: steps of the digits network
sweep              networks trained concurrently against the same ones trained one after another

hpctrain is measured end to end: whole epochs from the pack, run by the public command, with its
records written, timed by the wall-clock times in ``progress.jsonl``. In all training jobs the clock
starts at the end of the last warm-up step. images/s are the images of all ranks divided by the time
of the slowest rank.
"""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from statistics import median

import numpy as np

from hpctrain.data.pack import read_pack
from hpctrain.data.split import Split
from hpctrain.errors import UsageError
from hpctrain.packing.builtin import locate
from hpctrain.packing.write import write_pack
from hpctrain.report.record import read_records
from scripts.benchmarks import data
from scripts.benchmarks.harness import (
    Options,
    Rates,
    Show,
    goal_line,
    measure,
    python,
    ratio,
    run_job,
    steps_rate,
    table,
    timestamp,
)
from scripts.benchmarks.peers import TrainingJob

FORMATS = {  # precision, channels_last
    "fp32 NCHW": ("fp32", False),
    "fp32 NHWC": ("fp32", True),  # hpctrain's default on CPUs
    "bf16 NHWC": ("bf16", True),
}
HPCTRAIN, LIMIT, DDP = "hpctrain", "limit: no loading, no communication", "DDP, data in memory"
LOADER, LOADER_2 = "DDP with DataLoader", "DDP with DataLoader, 2 workers"
PLAIN = "fp32 NCHW"  # the usual format of a DataLoader
MODES = {LIMIT: "limit", DDP: "ddp", LOADER: "loader", LOADER_2: "loader"}  # of peers.py
RESNET_STEPS, RESNET_WARM, RESNET_BATCH = 15, 3, 32
IMAGE_SHAPE, CLASSES = (100, 100, 3), 5  # of generated images

WRITTEN = f"{LOADER}, {PLAIN}"
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
STEP_GOAL = 1.05  # maximum ratio to the plain Allreduce, on 2 ranks

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


def training(options: Options, folder: Path, show: Show) -> list[str]:
    """Compare the contestants and, for digits, time the first step; return a line for each goal."""
    rates = compare_training(options, folder, show)
    goals = [
        goal_line(ratio(rates, who, other), factor, f"{who} / {other}")
        for who, factor, other in GOALS[options.case]
    ]
    if options.case == "digits":
        pack = str(locate(options.data or "digits", options.cache_dir))
        starts = [first_step(pack, folder / f"start{number}") for number in range(options.rounds)]
        what = f"seconds from mpirun -n {START_RANKS} to the first step, on 2 cores"
        goals.append(goal_line(median(starts), START_GOAL, what, at_most=True))
    return goals


def compare_training(options: Options, folder: Path, show: Show) -> Rates:
    """Measure images/s of hpctrain, of the limit and of DDP, in each format."""
    work = make_job(options, folder)
    commands = make_commands(replace(work, folder=str(folder / "job")), options.ranks)

    def run(name: str) -> float:
        (folder / "job").mkdir()
        run_job(commands[name], name)
        rate = training_rate(folder / "job", options.ranks, work.warm)
        shutil.rmtree(folder / "job")
        return rate

    rates = measure(commands, options.rounds, run, show)
    compared = {}
    for name in commands:
        form = name.rpartition(", ")[2]
        peers = {"/ DataLoader": f"{LOADER}, {PLAIN}", "/ DDP": f"{DDP}, {form}"}
        peers["/ limit"] = f"{LIMIT}, {form}"
        compared[name] = {head: other for head, other in peers.items() if other != name}
    show(table(f"{options.case}, {options.ranks} ranks of 1 thread", rates, compared))
    return rates


def make_job(options: Options, folder: Path) -> TrainingJob:
    """Return the job to train: digits, or resnet50 on the first images of --data or generated ones.

    Writes the pack for resnet50 into `folder`.
    """
    if options.case == "digits":
        path = locate(options.data or "digits", options.cache_dir)
        rows = read_pack(path).splits["train"].samples
        return TrainingJob("digits", str(path), 128, epochs=3, warm=-(-rows // 128))
    path, rows = folder / "resnet50.h5", RESNET_STEPS * RESNET_BATCH
    write_pixels(options.data and str(locate(options.data, options.cache_dir)), path, rows)
    return TrainingJob("resnet50", str(path), RESNET_BATCH, epochs=1, warm=RESNET_WARM)


def write_pixels(data: str | None, path: Path, rows: int) -> None:
    """Write a pack of pixels at `path`: the first `rows` training images of the pack `data`.

    Without `data`, the images are generated. Raises UsageError if `data` has too few images.
    """
    if data is None:
        random = np.random.default_rng(0)
        images = random.integers(256, size=(rows, *IMAGE_SHAPE), dtype=np.uint8)
        labels = np.arange(rows) % CLASSES
        classes = tuple(f"class {number}" for number in range(CLASSES))
    else:
        pack = read_pack(data)
        found = pack.splits["train"].samples
        if found < rows:
            raise UsageError(
                f"{data} has {found:,} training images, {rows:,} are needed: give a larger pack,"
                " or omit --data for random images"
            )
        with Split(pack, "train") as source:
            images = source.gather(np.arange(rows), np.empty((rows, *pack.image_shape), np.uint8))
            labels, classes = source.read_labels(np.arange(rows)), pack.classes
    write_pack(path, {"train": (images, labels)}, classes, {"source": "scripts.benchmarks"})


def make_commands(job: TrainingJob, ranks: int) -> dict[str, list[str]]:
    """Return the command of each contestant; it writes its results into the folder of `job`."""
    found = {}
    own = ["--data", job.data, "--model", job.model, "--batch-size", str(job.batch_size)]
    own += ["--epochs", str(job.epochs)]
    for form, (precision, last) in FORMATS.items():
        order = "--channels-last" if last else "--no-channels-last"
        words = train_words(job.folder, *own, "--precision", precision, order)
        found[f"{HPCTRAIN}, {form}"] = python("hpctrain", *words, ranks=ranks)
    for who, mode in MODES.items():
        job = replace(job, mode=mode, workers=2 if who == LOADER_2 else 0)
        for form in (PLAIN,) if mode == "loader" else FORMATS:
            precision, last = FORMATS[form]
            peer = replace(job, precision=precision, channels_last=last)
            found[f"{who}, {form}"] = python(*peer.words, ranks=ranks)
    return found


def training_rate(folder: Path, ranks: int, warm: int) -> float:
    """Return images/s of a completed job, from hpctrain's record or from the files of a peer."""
    if (folder / "run").exists():
        steps = [record for record in read_records(folder / "run") if record["kind"] == "step"]
        return steps_rate(steps, warm)
    found = [json.loads((folder / f"rank{rank}.json").read_text()) for rank in range(ranks)]
    return float(sum(rank["rows"] for rank in found) / max(rank["seconds"] for rank in found))


def first_step(pack: str, folder: Path) -> float:
    """Return the seconds from the start of mpirun to the end of the first step."""
    began = time.time()
    steps = train(folder, START_RANKS, "--data", pack, "--model", "digits", "--epochs", "1")
    return timestamp(steps[0]) - began


def train_words(folder: str, *flags: str) -> list[str]:
    """Return the arguments that train without validation, with one CPU thread per rank."""
    words = ["train", "--runs-dir", folder, "--run", "run", "--progress", "none"]
    return [*words, "--validate-every", "0", "--device", "cpu", "--threads", "1", *flags]


def train(folder: Path, ranks: int, *flags: str) -> list[dict[str, float]]:
    """Train without validation, one CPU thread per rank; return the records of the steps."""
    command = python("hpctrain", *train_words(str(folder), *flags), ranks=ranks)
    run_job(command, f"training on {ranks} ranks")
    return [record for record in read_records(folder / "run") if record["kind"] == "step"]


def tree(options: Options, folder: Path, show: Show) -> list[str]:
    """Measure the milliseconds of a step, in tree order and by a plain Allreduce."""
    pack = str(locate(options.data or "digits", options.cache_dir))
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

    steps = measure(ways, options.rounds, step, show)
    show(table(f"digits, global batch size {TREE_BATCH}, a step", steps, by_plain(steps), "ms"))
    what = "a step in tree order on 2 ranks, of a plain one"
    found = ratio(steps, "2 ranks, tree order", "2 ranks, Allreduce")
    return [goal_line(found, STEP_GOAL, what, at_most=True)]


def by_plain(rates: Rates) -> dict[str, dict[str, str]]:
    """Return the comparisons of each way with the plain Allreduce."""
    plain = {name: f"{name.rpartition(', ')[0]}, Allreduce" for name in rates}
    return {name: {"/ Allreduce": other} for name, other in plain.items() if name != other}


def sweep(options: Options, folder: Path, show: Show) -> list[str]:
    """Measure the seconds of a whole sweep of the digits network, in two slots and in one."""
    pack = str(locate(options.data or "digits", options.cache_dir))
    file, seeds = folder / "sweep.toml", list(range(NETWORKS))
    file.write_text(SWEEP.format(data=json.dumps(pack), epochs=SWEEP_EPOCHS, seeds=seeds))
    ways = {f"{slots} slot(s)": slots for slots in (SLOTS, 1)}

    def seconds(name: str) -> float:
        words = ["sweep", str(file), "--slots", str(ways[name]), "--run", f"{time.time()}"]
        began = time.perf_counter()
        words += ["--progress", "none", "--runs-dir", str(folder)]
        run_job(python("hpctrain", *words), f"the sweep in {name}")
        return time.perf_counter() - began

    rates = measure(ways, options.rounds, seconds, show)
    together, alone = ways
    title = f"{NETWORKS} networks of {SWEEP_EPOCHS} epochs"
    show(table(title, rates, {together: {f"/ {alone}": alone}}, "s"))
    what = f"of the time one after another, in {SLOTS} slots"
    return [goal_line(ratio(rates, together, alone), SWEEP_GOAL, what, at_most=True)]


CASES: dict[str, Callable[[Options, Path, Show], list[str]]] = {
    "digits": training,
    "resnet50": training,
    "tree": tree,
    "sweep": sweep,
    "data": data.measure_data,
}
