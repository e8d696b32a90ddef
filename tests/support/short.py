"""Short runs: 101 small images in 7 steps per epoch, the last of them ragged."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np

import hpctrain as hp
from tests.support.packs import draw_images

ROWS = {"train": 101, "validation": 13, "test": 23}
MARKED = 60  # the training image that begins with 255, which no other does


def images(rows: int, shape: tuple[int, ...], classes: int, seed: int = 0) -> Any:
    """Images that can be learnt, and labels: others for each number of rows."""
    return draw_images(np.random.default_rng((seed, rows)), rows, shape, classes)


def short_run(folder: Path, shape: tuple[int, ...] = (12, 12, 1), classes: int = 10) -> dict:
    """Settings of two epochs over a pack that is written to this folder, which gets the runs."""
    splits = {split: images(rows, shape, classes) for split, rows in ROWS.items()}
    splits["train"][0][MARKED, 0, 0, 0] = 255
    hp.write_pack(folder / "pack.h5", splits, [f"class{k}" for k in range(classes)])
    files = {"data": str(folder / "pack.h5"), "runs_dir": str(folder / "runs"), "run": "a"}
    how = {"model": "digits", "epochs": 2, "batch_size": 16, "threads": 1, "progress": "none"}
    return files | how


def records(settings: dict, kind: str = "") -> list[dict]:
    """The record of a run, of this kind."""
    file = Path(settings["runs_dir"]) / settings["run"] / "progress.jsonl"
    found = [json.loads(line) for line in file.read_text().splitlines()]
    return [record for record in found if kind in ("", record["kind"])]


def digest(comm: Any, settings: dict) -> str:
    """Train a run to its end; its digest. Collective."""
    assert hp.train(**settings).exit_code == 0
    return str(comm.bcast(records(settings)[-1]["digest"] if comm.rank == 0 else None))
