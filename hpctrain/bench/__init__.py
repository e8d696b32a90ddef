"""``hpctrain bench CASE``: measure training, reading and Allreduce on this machine.

digits, resnet50   hpctrain against the same network without loading and communication (the limit)
                   and under PyTorch's DistributedDataParallel (``peers.py``)
data               batches from a pack against a copy in memory, h5py and torch's DataLoader
allreduce          MPI's Allreduce for messages of 4 B to 64 MiB (``hpctrain doctor`` on all ranks)

hpctrain is measured end to end: whole epochs from the pack, run by the public command, with its
records written, timed by the wall-clock times in ``progress.jsonl``. In all training jobs the clock
starts at the end of the last warm-up step. images/s are the images of all ranks divided by the time
of the slowest rank.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from hpctrain.bench.harness import (
    Rates,
    machine_lines,
    measure,
    python,
    run_job,
    steps_rate,
    table,
)
from hpctrain.config import BenchConfig, Config, as_words
from hpctrain.errors import RunError, UsageError
from hpctrain.launch import environment

if TYPE_CHECKING:
    from hpctrain.bench.peers import TrainingJob

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
IMAGES = 4000  # generated for the case "data"

Show = Callable[[object], object]


def main(config: BenchConfig) -> int:
    """Run all rounds of a case and print its table."""
    from hpctrain.console import Console

    console = Console(width=None if sys.stdout.isatty() else 120)
    for line in machine_lines():
        console.print(line)
    cases = {"data": bench_data, "allreduce": bench_allreduce}
    case = cases.get(config.case, bench_training)
    with tempfile.TemporaryDirectory(prefix="hpctrain-bench-") as folder:
        case(config, Path(folder), console.print)
    return 0


def bench_training(config: BenchConfig, folder: Path, show: Show) -> Rates:
    """Measure images/s of hpctrain, of the limit and of DDP, in each format."""
    work = make_job(config, folder)
    commands = make_commands(replace(work, folder=str(folder / "job")), config.ranks)

    def run(name: str) -> float:
        (folder / "job").mkdir()
        run_job(commands[name], name)
        rate = training_rate(folder / "job", config.ranks, work.warm)
        shutil.rmtree(folder / "job")
        return rate

    rates = measure(commands, config.rounds, run, show)
    compared = {}
    for name in commands:
        form = name.rpartition(", ")[2]
        peers = {"/ DataLoader": f"{LOADER}, {PLAIN}", "/ DDP": f"{DDP}, {form}"}
        peers["/ limit"] = f"{LIMIT}, {form}"
        compared[name] = {head: other for head, other in peers.items() if other != name}
    show(table(f"{config.case}, {config.ranks} ranks of 1 thread", rates, compared))
    return rates


def make_job(config: BenchConfig, folder: Path) -> TrainingJob:
    """Return the job to train: digits, or resnet50 on the first images of --data or generated ones.

    Writes the pack for resnet50 into `folder`.
    """
    from hpctrain.bench.peers import TrainingJob
    from hpctrain.data.builtin import locate
    from hpctrain.data.packed import read_pack

    if config.case == "digits":
        path = locate(config.data or "digits", config.data_dir)
        rows = read_pack(path).splits["train"].samples
        return TrainingJob("digits", str(path), 128, epochs=3, warm=-(-rows // 128))
    path, rows = folder / "resnet50.h5", RESNET_STEPS * RESNET_BATCH
    write_pixels(config.data and str(locate(config.data, config.data_dir)), path, rows)
    return TrainingJob("resnet50", str(path), RESNET_BATCH, epochs=1, warm=RESNET_WARM)


def write_pixels(data: str | None, path: Path, rows: int) -> None:
    """Write a pack of pixels at `path`: the first `rows` training images of the pack `data`.

    Without `data`, the images are generated. Raises UsageError if `data` has too few images.
    """
    import numpy as np

    from hpctrain.data.pack import write_pack
    from hpctrain.data.packed import read_pack
    from hpctrain.data.split import Split

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
    write_pack(path, {"train": (images, labels)}, classes, {"source": "hpctrain bench"})


def make_commands(job: TrainingJob, ranks: int) -> dict[str, list[str]]:
    """Return the command of each contestant; it writes its results into the folder of `job`."""
    found = {}
    own = Config(data=job.data, model=job.model, batch_size=job.batch_size, epochs=job.epochs)
    own = replace(own, validate_every="0", device="cpu", threads=1, progress="none")
    for form, (precision, last) in FORMATS.items():
        settings = replace(own, precision=precision, channels_last=last)
        words = as_words(replace(settings, run="run", runs_dir=job.folder))
        found[f"{HPCTRAIN}, {form}"] = python("hpctrain", "train", *words, ranks=ranks)
    for who, mode in MODES.items():
        job = replace(job, mode=mode, workers=2 if who == LOADER_2 else 0)
        for form in (PLAIN,) if mode == "loader" else FORMATS:
            precision, last = FORMATS[form]
            peer = replace(job, precision=precision, channels_last=last)
            found[f"{who}, {form}"] = python(*peer.words, ranks=ranks)
    return found


def training_rate(folder: Path, ranks: int, warm: int) -> float:
    """Return images/s of a completed job, from hpctrain's record or from the files of a peer."""
    from hpctrain.report.record import read_records

    if (folder / "run").exists():
        steps = [record for record in read_records(folder / "run") if record["kind"] == "step"]
        return steps_rate(steps, warm)
    found = [json.loads((folder / f"rank{rank}.json").read_text()) for rank in range(ranks)]
    return float(sum(rank["rows"] for rank in found) / max(rank["seconds"] for rank in found))


def bench_data(config: BenchConfig, folder: Path, show: Show) -> Rates:
    """Measure images/s of reading on one core from the page cache."""
    from hpctrain.bench.peers import COMPARED, READERS
    from hpctrain.data.builtin import locate

    if config.data is None:
        write_pixels(None, pack := folder / "made.h5", IMAGES)
    else:
        pack = locate(config.data, config.data_dir)

    def run(name: str) -> float:
        run_job(python("hpctrain.bench.peers", name, str(pack), str(folder / "rate")), name)
        return float((folder / "rate").read_text())

    rates = measure(READERS, config.rounds, run, show)
    show(table(f"Reading {pack.name} on one core", rates, COMPARED))
    return rates


def bench_allreduce(config: BenchConfig, folder: Path, show: Show) -> None:
    """Time Allreduce between ranks with ``hpctrain doctor``, whose findings explain the times."""
    done = subprocess.run(python("hpctrain", "doctor", ranks=config.ranks), env=environment())
    if done.returncode:
        raise RunError(f"hpctrain doctor on {config.ranks} ranks failed ({done.returncode})")
