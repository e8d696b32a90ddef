"""``hpctrain bench``: hpctrain, the limit, and PyTorch's DistributedDataParallel (DDP), in turn.

    python -m hpctrain bench digits

Every contestant is one job ``mpirun -n 2 ...`` with one thread a rank, all under the same binding,
started in turn (A B C ... A B C ...), so that a machine that slows down slows all of them down. The
peers stand in ``scripts/bench_ddp.py``. In all jobs the clock starts at the end of the last warm-up
step and stops at the end of the last step; images/s are the rows of all ranks in that time (of the
slowest rank, where they are independent). Medians over the rounds are compared.

hpctrain is measured from outside: whole epochs from the pack through the public command, with its
records written, timed by the wall-clock times in ``progress.jsonl``.
"""

from __future__ import annotations

import json
import shutil
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hpctrain.bench import balance, data, sweep, tree
from hpctrain.bench.jobs import free_port, moment, run_job, steps_rate
from hpctrain.bench.report import (
    START,
    START_RANKS,
    TRAINERS,
    Contestant,
    Results,
    machine_lines,
    number_text,
    table,
    target_lines,
)
from hpctrain.config import BenchConfig
from hpctrain.errors import UsageError
from hpctrain.launch import ROOT, mpirun
from hpctrain.launcher import launched_size

PEERS = ROOT / "scripts" / "bench_ddp.py"
RANKS = 2
OTHERS = {"tree": tree, "balance": balance, "data": data, "sweep": sweep}
RESNET_STEPS, RESNET_WARM, RESNET_BATCH = 15, 3, 32
RESNET_SHAPE, RESNET_CLASSES = (100, 100, 3), 5  # without --data


@dataclass(frozen=True)
class Case:
    """What is trained, and how long."""

    model: str
    pack: str
    batch: int  # over all ranks
    epochs: int
    warm: int  # steps before the clock starts


def main(config: BenchConfig) -> int:
    """Run all rounds and print the table. Needs mpirun and the source tree."""
    if launched_size() is not None:
        raise UsageError("bench starts its own jobs: call it without mpirun or srun")
    if config.rounds < 1:
        raise UsageError(f"--rounds {config.rounds}: give 1 or more, 3 for figures to quote")
    if not PEERS.is_file():
        raise UsageError(f"bench needs {PEERS}, which only the source tree has: run it from there")
    from hpctrain.console import Console

    console = Console(width=None if sys.stdout.isatty() else 120)
    if config.case in OTHERS:
        OTHERS[config.case].run(config, console.print)
        return 0
    contestants = TRAINERS + ((START,) if config.case == "digits" else ())
    with tempfile.TemporaryDirectory(prefix="hpctrain-bench-") as folder:
        case = make_case(config, Path(folder))
        for line in machine_lines():
            console.print(line)
        results = measure(case, contestants, config.rounds, Path(folder), console.print)
    console.print(table(config.case, results))
    for line in target_lines(config.case, results):
        console.print(line)
    return 0


def make_case(config: BenchConfig, folder: Path) -> Case:
    """The workload; resnet50 trains on the first rows of --data, or on made images."""
    from hpctrain.data.builtin import locate
    from hpctrain.data.packed import read_pack

    if config.case == "digits":
        path = locate(config.data or "digits", config.data_dir)
        rows = read_pack(path).splits["train"].rows
        return Case("digits", str(path), 128, epochs=3, warm=-(-rows // 128))
    path = folder / "resnet50.h5"
    write_resnet_pack(config.data and str(locate(config.data, config.data_dir)), path)
    return Case("resnet50", str(path), RESNET_BATCH, epochs=1, warm=RESNET_WARM)


def write_resnet_pack(data: str | None, path: Path) -> None:
    """A pack of as many rows as the timed steps need, all in the split train."""
    import numpy as np

    from hpctrain.data.opened import open_split
    from hpctrain.data.pack import write_pack
    from hpctrain.data.packed import read_pack

    rows = RESNET_STEPS * RESNET_BATCH
    if data is None:
        random = np.random.default_rng(0)
        images = random.integers(256, size=(rows, *RESNET_SHAPE), dtype=np.uint8)
        labels = np.arange(rows) % RESNET_CLASSES
        classes = tuple(f"class {number}" for number in range(RESNET_CLASSES))
    else:
        pack = read_pack(data)
        found = pack.splits["train"].rows
        if found < rows:
            raise UsageError(
                f"{data} has {found:,} training images; {RESNET_STEPS} steps of {RESNET_BATCH}"
                f" need {rows}: give a larger pack, or none for made images"
            )
        with open_split(pack, "train") as source:
            images = source.gather(np.arange(rows), np.empty((rows, *pack.image_shape), np.uint8))
            labels, classes = source.labels[:rows], pack.classes
    write_pack(path, {"train": (images, labels)}, classes, {"source": "hpctrain bench"})


def measure(
    case: Case, contestants: tuple[Contestant, ...], rounds: int, folder: Path, say: Any
) -> Results:
    """Run every contestant once a round, in turn."""
    results: Results = {contestant: [] for contestant in contestants}
    for number in range(rounds):
        for place, contestant in enumerate(contestants):
            job = folder / f"{number}-{place}"
            job.mkdir()
            began = time.time()
            run_job(command(contestant, case, job), contestant.name)
            wall = time.time() - began
            figure, remark = figures(contestant, case, job, began)
            results[contestant].append(figure)
            say(
                f"round {number + 1} of {rounds}  {contestant.name}, {contestant.format}:"
                f" {number_text(figure)} {contestant.unit} (job {wall:.1f} s{remark})"
            )
            shutil.rmtree(job)
    return results


def command(contestant: Contestant, case: Case, job: Path) -> list[str]:
    """The job of a contestant, which leaves its records in the folder `job`."""
    format = ["--precision", contestant.precision]
    work = ["--model", case.model]
    if contestant.kind in ("hpctrain", "start"):
        start = contestant.kind == "start"
        format += ["--channels-last" if contestant.channels_last else "--no-channels-last"]
        work += ["--data", case.pack, "--batch-size", str(case.batch)]
        work += ["--epochs", "1" if start else str(case.epochs), "--evaluate-every", "0"]
        records = ["--run", "run", "--runs-dir", str(job), "--progress", "none"]
        program = ["-m", "hpctrain", "train", *work, *format, *records]
        program += ["--device", "cpu", "--threads", "1"]
        return [mpirun(), "-n", str(START_RANKS if start else RANKS), sys.executable, *program]
    format += ["--channels-last"] if contestant.channels_last else []
    work += ["--pack", case.pack, "--batch", str(case.batch), "--epochs", str(case.epochs)]
    work += ["--warm", str(case.warm), "--workers", str(contestant.workers)]
    meeting = ["--port", str(free_port()), "--output", str(job)]
    program = [str(PEERS), contestant.kind, *work, *format, *meeting]
    return [mpirun(), "-n", str(RANKS), sys.executable, *program]


def figures(contestant: Contestant, case: Case, job: Path, began: float) -> tuple[float, str]:
    """What a finished job reached, and a remark on how it was measured."""
    if contestant.kind not in ("hpctrain", "start"):
        ranks = [json.loads((job / f"rank{rank}.json").read_text()) for rank in range(RANKS)]
        return peers_rate(ranks), f", {ranks[0]['cores']:.0f} core(s) a rank"
    from hpctrain.report.record import read_records

    records = list(read_records(job / "run"))
    steps = [record for record in records if record["kind"] == "step"]
    if contestant.kind == "start":
        return moment(steps[0]) - began, ""
    rate, covered = steps_rate(steps, case.warm)
    return rate, f", steps cover {100 * covered:.1f} % of the wall clock"


def peers_rate(ranks: list[dict[str, float]]) -> float:
    """images/s: the rows of all ranks in the time of the slowest."""
    return sum(rank["rows"] for rank in ranks) / max(rank["seconds"] for rank in ranks)
