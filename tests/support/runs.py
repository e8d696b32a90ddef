"""Trained runs that many tests read: made once per pytest session, for all of its processes.

    def test_x(trained): ...  # trained.run("plain") is a folder; nothing in it may change
    def test_y(trained_copy): ...  # the same, in a copy of the test's own

| run | what it is |
|---|---|
| plain | two epochs of 10 classes, two ranks, validated after each |
| tuned | fine-tuned from plain for 7 classes: frozen layers, factors, class weights, best saved |
| restored | an autoencoder: --task denoise, ten epochs |

All are deterministic with 4 shards and one thread. gray.h5 and seven.h5 are their packs.
"""

from __future__ import annotations

import fcntl
import shutil
from pathlib import Path
from typing import NamedTuple

import numpy as np

import hpctrain as hp
from tests.support.ranks import command

ROWS = {"train": 101, "validation": 13, "test": 53}  # of both packs
SAME = ["--deterministic", "--shards", "4", "--batch-size", "16", "--threads", "1"]
SAME += ["--progress", "none"]
RUNS = {
    "plain": ("gray.h5", ["--epochs", "2", "--lr", "0.005", "--normalize", "pack"]),
    "tuned": (
        "seven.h5",
        ["--epochs", "2", "--optimizer", "adamw", "--freeze", "conv1,bn1"]
        + ["--lr-factors", "conv2=0.5", "--class-weights", "balanced"]
        + ["--final", "best", "--validate-every", "3steps", "--flip"],
    ),
    "restored": ("gray.h5", ["--task", "denoise", "--epochs", "10", "--lr", "0.01"]),
}


class TrainedRuns(NamedTuple):
    """The folder that holds the packs, and the runs in its folder `runs`."""

    folder: Path

    @property
    def runs(self) -> Path:
        return self.folder / "runs"

    def run(self, name: str) -> Path:
        """The folder of a run."""
        return self.runs / name

    def pack(self, name: str) -> Path:
        """The pack that a run was trained on."""
        return self.folder / RUNS[name][0]


def make_hard_pack(path: Path, classes: int) -> None:
    """Images of 28x28 with a faint band of lines by class; one label in eight is wrong."""
    random, splits = np.random.default_rng(classes), {}
    for split, count in ROWS.items():
        labels = random.integers(0, classes, count)
        images = random.integers(0, 200, (count, 28, 28, 1), dtype=np.uint8)
        for image, label in zip(images, labels, strict=True):
            image[3 * label // 2 * 10 // classes :][:3] += 50
        wrong = random.random(count) < 1 / 8
        splits[split] = images, np.where(wrong, random.integers(0, classes, count), labels)
    hp.write_pack(path, splits, [f"class{k}" for k in range(classes)])


def make_trained_runs(folder: Path) -> TrainedRuns:
    """Train the runs, or wait until another process has."""
    made = TrainedRuns(folder / "trained")
    with (folder / "trained.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (folder / "trained.done").exists():
            shutil.rmtree(made.folder, ignore_errors=True)
            made.folder.mkdir()
            make_hard_pack(made.folder / "gray.h5", 10)
            make_hard_pack(made.folder / "seven.h5", 7)
            for name, (_, flags) in RUNS.items():
                words = ["--data", made.pack(name), "--runs-dir", made.runs, "--run", name]
                if name == "tuned":
                    words += ["--init", made.run("plain") / "model.safetensors"]
                ended = command(2, "train", *words, *SAME, *flags)
                assert ended.code == 0, ended.err
            (folder / "trained.done").touch()
    return made


def train_once(pack: Path, *words: object, run: str = "a", ranks: int = 1) -> Path:
    """Train one epoch over a pack; return the run's folder, runs/RUN beside the pack."""
    runs = pack.parent / "runs"
    flags = ["--data", pack, "--runs-dir", runs, "--run", run, *SAME, "--epochs", "1"]
    ended = command(ranks, "train", *flags, *words)
    assert ended.code == 0, ended.err
    return runs / run


def copy_runs(trained: TrainedRuns, folder: Path) -> TrainedRuns:
    """A copy that a test may change. Its runs name the packs of the original."""
    return TrainedRuns(Path(shutil.copytree(trained.folder, folder / "trained")))


def content_of(folder: Path) -> dict[str, bytes]:
    """All files below a folder."""
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    return {str(path.relative_to(folder)): path.read_bytes() for path in files}
