"""The cases of ``python -m scripts.bench`` that train on CPUs.

digits, resnet50   hpctrain against the same network without loading and communication (the limit)
                   and under PyTorch's DistributedDataParallel (peers.py); for digits also the time
                   to the first step
tree               the cost of --deterministic: steps of the digits network

hpctrain is measured end to end: whole epochs from the pack, run by the public command, with its
records written, timed by the wall-clock times in ``progress.jsonl``. In all training jobs the clock
starts at the end of the last warm-up step. images/s are the images of all ranks divided by the time
of the slowest rank.
"""

from __future__ import annotations

import json
import shutil
import time
from argparse import Namespace
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np

import hpctrain as hp
from hpctrain.data.pack import read_pack
from hpctrain.data.split import Split
from hpctrain.errors import UsageError
from hpctrain.packing.find import find_pack_path
from hpctrain.report.history import time_of
from hpctrain.report.record import read_records
from scripts.bench.harness import measure, print_table, python, run_job, steps_rate
from scripts.bench.peers import TrainingJob

FORMATS = {  # precision, channels_last
    "fp32 NCHW": ("fp32", False),
    "fp32 NHWC": ("fp32", True),  # hpctrain's default on CPUs
    "bf16 NHWC": ("bf16", True),
}
HPCTRAIN = "hpctrain"
LIMIT = "limit: no loading, no communication"
DDP = "DDP, data in memory"
LOADER = "DDP with DataLoader"
PLAIN = "fp32 NCHW"  # the usual format of a DataLoader
MODES = {LIMIT: "limit", DDP: "ddp", LOADER: "loader"}  # of peers.py
DIGITS_BATCH = 128
DIGITS_EPOCHS = 3
RESNET_STEPS = 15
RESNET_WARM = 3
RESNET_BATCH = 32
IMAGE_SHAPE = (100, 100, 3)  # of generated images
CLASSES = 5  # the same
START_RANKS = 4
TREE_RANKS = (1, 2, 4)


def compare_training(options: Namespace, folder: Path) -> None:
    """Measure images/s of hpctrain, of the limit and of DDP in each format, and the first step."""
    work = make_job(options, folder)
    commands = make_commands(replace(work, folder=str(folder / "job")), options.ranks)

    def run(name: str) -> float:
        (folder / "job").mkdir()
        run_job(commands[name], name)
        rate = training_rate(folder / "job", options.ranks, work.warm)
        shutil.rmtree(folder / "job")
        return rate

    rates = measure(commands, options.rounds, run)
    compared = {}
    for name in commands:
        form = name.rpartition(", ")[2]
        peers = {
            "/ DataLoader": f"{LOADER}, {PLAIN}",
            "/ DDP": f"{DDP}, {form}",
            "/ limit": f"{LIMIT}, {form}",
        }
        compared[name] = {head: other for head, other in peers.items() if other != name}
    print_table(f"{options.case}, {options.ranks} ranks of 1 thread", rates, compared)
    if options.case == "digits":
        began = time.time()
        steps = train(folder / "start", START_RANKS, "--data", work.data, "--epochs", "1")
        seconds = (time_of(steps[0]) or 0) - began
        print(f"{seconds:.1f} s from mpirun -n {START_RANKS} to the first step")


def make_job(options: Namespace, folder: Path) -> TrainingJob:
    """Return the job to train: digits, or resnet50 on the first images of --data or generated ones.

    Writes the pack for resnet50 into `folder`. Raises UsageError if --data has too few images.
    """
    if options.case == "digits":
        path = find_pack_path(options.data or "digits", options.cache_dir)
        warm = -(-read_pack(path).splits["train"].samples // DIGITS_BATCH)
        return TrainingJob("digits", str(path), DIGITS_BATCH, DIGITS_EPOCHS, warm)
    path = folder / "resnet50.h5"
    rows = RESNET_STEPS * RESNET_BATCH
    if options.data is None:
        random = np.random.default_rng(0)
        images = random.integers(256, size=(rows, *IMAGE_SHAPE), dtype=np.uint8)
        labels = np.arange(rows) % CLASSES
        classes = tuple("abcde")
    else:
        pack = read_pack(find_pack_path(options.data, options.cache_dir))
        classes = pack.classes
        samples = pack.splits["train"].samples
        if samples < rows:
            raise UsageError(f"{options.data} has {samples:,} training images, {rows:,} are needed")
        with Split(pack, "train") as source:
            images = source.gather(np.arange(rows), np.empty((rows, *pack.image_shape), np.uint8))
            labels = source.read_targets(np.arange(rows))
    hp.write_pack(path, {"train": (images, labels)}, classes, {"source": "scripts.bench"})
    return TrainingJob("resnet50", str(path), RESNET_BATCH, epochs=1, warm=RESNET_WARM)


def make_commands(job: TrainingJob, ranks: int) -> dict[str, list[str]]:
    """Return the command of each contestant; it writes its results into the folder of `job`."""
    commands = {}
    flags = [
        *("--data", job.data),
        *("--model", job.model),
        *("--batch-size", str(job.batch_size)),
        *("--epochs", str(job.epochs)),
    ]
    for form, (precision, last) in FORMATS.items():
        order = "--channels-last" if last else "--no-channels-last"
        words = train_words(job.folder, *flags, "--precision", precision, order)
        commands[f"{HPCTRAIN}, {form}"] = python("hpctrain", *words, ranks=ranks)
    for who, mode in MODES.items():
        for form in (PLAIN,) if mode == "loader" else FORMATS:
            precision, last = FORMATS[form]
            peer = replace(job, mode=mode, precision=precision, channels_last=last)
            words = ["scripts.bench.peers", json.dumps(asdict(peer))]
            commands[f"{who}, {form}"] = python(*words, ranks=ranks)
    return commands


def training_rate(folder: Path, ranks: int, warm: int) -> float:
    """Return images/s of a completed job, from hpctrain's record or from the files of a peer."""
    if (folder / "run").exists():
        return steps_rate(steps_of(folder / "run"), warm)
    results = [json.loads((folder / f"rank{rank}.json").read_text()) for rank in range(ranks)]
    rows = sum(result["rows"] for result in results)
    seconds = max(result["seconds"] for result in results)
    return float(rows / seconds)


def train_words(folder: str, *flags: str) -> list[str]:
    """Return the arguments that train without validation, with one CPU thread per rank."""
    words = ["train", "--runs-dir", folder, "--run", "run", "--progress", "none"]
    return [*words, "--validate-every", "0", "--device", "cpu", "--threads", "1", *flags]


def train(folder: Path, ranks: int, *flags: str) -> list[dict[str, Any]]:
    """Train without validation, one CPU thread per rank; return the records of the steps."""
    command = python("hpctrain", *train_words(str(folder), *flags), ranks=ranks)
    run_job(command, f"training on {ranks} ranks")
    return steps_of(folder / "run")


def steps_of(run: Path) -> list[dict[str, Any]]:
    """Return the records of the steps of a run."""
    return [record for record in read_records(run) if record["kind"] == "step"]


def measure_tree(options: Namespace, folder: Path) -> None:
    """Measure the milliseconds of a step, in tree order and by a plain Allreduce."""
    pack = str(find_pack_path(options.data or "digits", options.cache_dir))
    flags = ["--data", pack, "--model", "digits", "--batch-size", str(DIGITS_BATCH)]
    flags += ["--epochs", str(DIGITS_EPOCHS)]
    ways = {
        f"{ranks} ranks, {way}": (ranks, ["--shards", str(ranks), *more])
        for ranks in TREE_RANKS
        for way, more in (("Allreduce", []), ("tree order", ["--deterministic"]))
    }

    def step(name: str) -> float:
        ranks, more = ways[name]
        steps = train(folder / f"{name} {time.time()}", ranks, *flags, *more)
        return 1000 * DIGITS_BATCH / steps_rate(steps, len(steps) // DIGITS_EPOCHS)

    rates = measure(ways, options.rounds, step)
    compared = {
        f"{ranks} ranks, tree order": {"/ Allreduce": f"{ranks} ranks, Allreduce"}
        for ranks in TREE_RANKS
    }
    print_table(f"digits, global batch size {DIGITS_BATCH}, a step", rates, compared, "ms")
