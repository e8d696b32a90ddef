"""``hpctrain bench CASE``: how fast this machine trains, reads and sums, against the limits.

digits, resnet50   hpctrain against the same network without loading and communication (the limit)
                   and under PyTorch's DistributedDataParallel (``peers.py``)
data               batches from a pack against a copy in memory, h5py and torch's DataLoader
allreduce          MPI's Allreduce for messages of 4 B to 64 MiB (``hpctrain doctor`` on all ranks)

hpctrain is measured from outside: whole epochs from the pack through the public command, with its
records written, timed by the wall-clock times in ``progress.jsonl``. In all training jobs the clock
starts at the end of the last warm-up step; images/s are the images of all ranks in the time of the
slowest.
"""

from __future__ import annotations

import json
import shutil
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from hpctrain.bench.harness import (
    Rates,
    machine_lines,
    measure,
    python,
    run_job,
    steps_rate,
    table,
)
from hpctrain.config import BenchConfig
from hpctrain.errors import RunError, UsageError
from hpctrain.launch import environment

FORMATS = {
    "fp32 NCHW": ["--precision", "fp32", "--no-channels-last"],
    "fp32 NHWC": ["--precision", "fp32", "--channels-last"],  # hpctrain's default on CPUs
    "bf16 NHWC": ["--precision", "bf16", "--channels-last"],
}
HPCTRAIN, LIMIT, DDP = "hpctrain", "limit: no loading, no communication", "DDP, data in memory"
LOADER, LOADER_2 = "DDP with DataLoader", "DDP with DataLoader, 2 workers"
MODES = {LIMIT: "limit", DDP: "ddp", LOADER: "loader", LOADER_2: "loader"}  # of peers.py
RESNET_STEPS, RESNET_WARM, RESNET_BATCH = 15, 3, 32
IMAGE_SHAPE, CLASSES = (100, 100, 3), 5  # of made images
IMAGES = 4000  # made for reading

Show = Callable[[object], object]


class Workload(NamedTuple):
    """What is trained, and how long."""

    model: str
    pack: str
    batch: int  # over all ranks
    epochs: int
    warm: int  # steps before the clock starts


def main(config: BenchConfig) -> int:
    """Run all rounds and print the table."""
    from hpctrain.console import Console

    console = Console(width=None if sys.stdout.isatty() else 120)
    for line in machine_lines():
        console.print(line)
    case = {"data": bench_data, "allreduce": bench_allreduce}.get(config.case, bench_training)
    with tempfile.TemporaryDirectory(prefix="hpctrain-bench-") as folder:
        case(config, Path(folder), console.print)
    return 0


def bench_training(config: BenchConfig, folder: Path, show: Show) -> Rates:
    """images/s of hpctrain, of the limit and of DDP, in each format."""
    work = make_workload(config, folder)
    jobs = commands(work, config.ranks, folder / "job")

    def run(name: str) -> float:
        (folder / "job").mkdir()
        run_job(jobs[name], name)
        rate = training_rate(folder / "job", config.ranks, work.warm)
        shutil.rmtree(folder / "job")
        return rate

    rates = measure(jobs, config.rounds, run, show)
    compared = {}
    for name in jobs:
        form = name.rpartition(", ")[2]
        peers = (
            ("/ DataLoader", LOADER, "fp32 NCHW"),
            ("/ DDP", DDP, form),
            ("/ limit", LIMIT, form),
        )
        compared[name] = {head: other for head, who, f in peers if (other := f"{who}, {f}") != name}
    show(table(f"{config.case}, {config.ranks} ranks of 1 thread", rates, compared))
    return rates


def make_workload(config: BenchConfig, folder: Path) -> Workload:
    """The workload; resnet50 trains on the first images of --data, or on made ones."""
    from hpctrain.data.builtin import locate
    from hpctrain.data.packed import read_pack

    if config.case == "digits":
        path = locate(config.data or "digits", config.data_dir)
        rows = read_pack(path).splits["train"].rows
        return Workload("digits", str(path), 128, epochs=3, warm=-(-rows // 128))
    path = folder / "resnet50.h5"
    rows = RESNET_STEPS * RESNET_BATCH
    write_pixels(config.data and str(locate(config.data, config.data_dir)), path, rows)
    return Workload("resnet50", str(path), RESNET_BATCH, epochs=1, warm=RESNET_WARM)


def write_pixels(data: str | None, path: Path, rows: int) -> None:
    """A pack of pixels: the first `rows` training images of the pack `data`, else made images."""
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
        found = pack.splits["train"].rows
        if found < rows:
            raise UsageError(
                f"{data} has {found:,} training images, {rows:,} are needed: give a larger pack,"
                " or none for made images"
            )
        with Split(pack, "train") as source:
            images = source.gather(np.arange(rows), np.empty((rows, *pack.image_shape), np.uint8))
            labels, classes = source.labels[:rows], pack.classes
    write_pack(path, {"train": (images, labels)}, classes, {"source": "hpctrain bench"})


def commands(work: Workload, ranks: int, job: Path) -> dict[str, list[str]]:
    """The job of each contestant, which writes its records into the folder `job`."""
    found = {}
    train = ["--data", work.pack, "--model", work.model, "--batch-size", str(work.batch)]
    train += ["--epochs", str(work.epochs), "--evaluate-every", "0", "--device", "cpu"]
    train += ["--threads", "1", "--run", "run", "--runs-dir", str(job), "--progress", "none"]
    peer = ["--data", work.pack, "--model", work.model, "--batch-size", str(work.batch)]
    peer += ["--epochs", str(work.epochs), "--warm", str(work.warm), "--output", str(job)]
    for name, flags in FORMATS.items():
        words = ["hpctrain", "train", *train, *flags]
        found[f"{HPCTRAIN}, {name}"] = python(*words, ranks=ranks)
    for who, mode in MODES.items():
        for name in ("fp32 NCHW",) if mode == "loader" else FORMATS:
            words = [
                "hpctrain.bench.peers",
                mode,
                *peer,
                *FORMATS[name],
                "--port",
                str(free_port()),
            ]
            words += ["--workers", "2"] if who == LOADER_2 else []
            found[f"{who}, {name}"] = python(*words, ranks=ranks)
    return found


def training_rate(job: Path, ranks: int, warm: int) -> float:
    """images/s of a job that has ended: from hpctrain's records, or from what its peers wrote."""
    from hpctrain.report.record import read_records

    if (job / "run").exists():
        steps = [record for record in read_records(job / "run") if record["kind"] == "step"]
        return steps_rate(steps, warm)
    found = [json.loads((job / f"rank{rank}.json").read_text()) for rank in range(ranks)]
    return float(sum(rank["rows"] for rank in found) / max(rank["seconds"] for rank in found))


def free_port() -> int:
    """A TCP port of this host that nobody uses now."""
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


def bench_data(config: BenchConfig, folder: Path, show: Show) -> Rates:
    """images/s of reading, on one core, from the page cache."""
    from hpctrain.bench.reading import COMPARED, CONTESTANTS
    from hpctrain.data.builtin import locate

    if config.data is None:
        write_pixels(None, pack := folder / "made.h5", IMAGES)
    else:
        pack = locate(config.data, config.data_dir)

    def run(name: str) -> float:
        run_job(python("hpctrain.bench.reading", name, str(pack), str(folder / "rate")), name)
        return float((folder / "rate").read_text())

    rates = measure(CONTESTANTS, config.rounds, run, show)
    show(table(f"Reading {pack.name} on one core", rates, COMPARED))
    return rates


def bench_allreduce(config: BenchConfig, folder: Path, show: Show) -> None:
    """Time Allreduce among the ranks, by ``hpctrain doctor``, whose findings explain it."""
    done = subprocess.run(python("hpctrain", "doctor", ranks=config.ranks), env=environment())
    if done.returncode:
        raise RunError(f"hpctrain doctor on {config.ranks} ranks failed ({done.returncode})")
