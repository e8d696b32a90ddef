"""Small data sets and runs for the surfaces, and the result of a training step on them."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from hpctrain.config import Config, check_settings
from hpctrain.packing.write import write_pack
from hpctrain.report.record import read_records
from hpctrain.watchdog import Beat


def make_images(rows: int, shape: tuple[int, int, int], seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Return images of noise and labels 0, 1, 2."""
    draw = np.random.default_rng(seed)
    return draw.integers(256, size=(rows, *shape), dtype=np.uint8), np.arange(rows) % 3


def make_image_files(folder: Path, count: int, suffixes: tuple[str, ...]) -> list[Path]:
    """Write smooth colour images of 20x16 pixels to three folders, with the suffixes in turn."""
    draw = np.random.default_rng(0)
    made = []
    for number in range(count):
        coarse = draw.integers(256, size=(4, 4, 3), dtype=np.uint8)
        path = folder / f"class{number % 3}" / f"{number}{suffixes[number % len(suffixes)]}"
        path.parent.mkdir(parents=True, exist_ok=True)
        options = {"quality": 90} if path.suffix in (".jpg", ".webp") else {}
        Image.fromarray(coarse).resize((20, 16)).save(path, **options)
        made.append(path)
    return made


def make_pack(path: Path) -> Path:
    """Write a pack of gray images of 7x6 pixels, for few steps and small networks."""
    splits = {
        name: make_images(rows, (6, 7, 1), rows)
        for name, rows in (("train", 37), ("validation", 13), ("test", 11))
    }
    write_pack(path, splits, "abc", {"source": "scripts/fuzz"})
    return path


def one_step(**settings: Any) -> str:
    """Return the digest after a step on this rank and the figures of the test split."""
    from mpi4py import MPI

    from hpctrain.inference.evaluate import evaluate
    from hpctrain.inference.network import Inference
    from hpctrain.training.setup import set_up

    config = Config(model="digits", deterministic=True, batch_size=7, **settings)
    check_settings(config)
    run = set_up(config, MPI.COMM_SELF)
    batches = run.loader.epoch(0)
    run.trainer.step(next(batches), run.plan.partition.total(0))
    batches.close()
    with run.split("test") as source:
        inference = Inference(run.trainer.model, run.task, run.prepare, 256)
        result = evaluate(inference, source, MPI.COMM_SELF)
    run.close()
    return f"{run.trainer.checksums()} {result and result.figures()}"


def run_settings(folder: Path, **more: Any) -> Config:
    """Return settings of a run of two epochs of five steps, with a checkpoint every two steps."""
    settings = {
        "data": str(folder / "pack.h5"),
        "runs_dir": str(folder),
        "model": "digits",
        "epochs": 2,
        "batch_size": 8,
        "checkpoint_every": "2steps",
        "deterministic": True,
        "shards": 2,
        "threads": 1,
        "optimizer": "adam",
        "final": "best",
        "progress": "none",
    }
    return Config(**{**settings, **more})


def train(config: Config) -> int:
    """Train on this rank and return the exit code."""
    from mpi4py import MPI

    from hpctrain.training.train import run_training

    return run_training(config, MPI.COMM_SELF).exit_code


def last_digest(run: Path) -> str:
    """Return the digest at the end of a run's record."""
    return str(list(read_records(run))[-1].get("digest"))


def leave_heartbeat(run: Path) -> None:
    """Write a heartbeat to the folder of a run, as a rank that is killed leaves one behind."""
    (run / "ranks").mkdir(exist_ok=True)
    beat = Beat(0, "x", 1, "start", 1.0, 1.0)
    (run / "ranks" / "0.json").write_text(json.dumps(dataclasses.asdict(beat)))
