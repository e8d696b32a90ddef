"""The bits of trained networks: equal on 1, 2 and 3 ranks, and to a table from commit to commit.

Each case is trained by the command line. The digests are computed here: of the tensors in the
weights file by name, of the optimizer's values in the newest checkpoint however they lie there, and
figures as numbers. The table digests.json has an entry for each torch, processor and instruction
set that it was made on (for cases with JPEG files also for the decoder): elsewhere the bits may be
others, and only the ranks are compared. To write what this machine finds into it:

    pytest tests/contract/test_digests.py --update

A changed entry is a change for users and has a line in CHANGELOG.md. Figures are compared to 1e-12,
because the order of an evaluation's sums is no promise.
"""

from __future__ import annotations

import hashlib
import json
import tempfile
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
from PIL import Image, features
from safetensors.numpy import load_file

import hpctrain as hp
from tests.support.packs import draw_entries, draw_images
from tests.support.ranks import command

TABLE = Path(__file__).with_name("digests.json")
ROWS = {"train": 101, "validation": 70, "test": 150}  # evaluated in 2 and 3 blocks of 64
FEW = {"train": 21, "test": 5}  # for the large network
BASE = {"model": "digits", "epochs": 2, "batch_size": 32, "shards": 4, "deterministic": True}
BASE |= {"data": "gray.h5", "progress": "none"}
JPEG = {"data": "jpeg.h5"}
CHUNKED = {"data": "chunked.h5", "images": "x", "labels": "y", "split": "0.5,0.2,0.3"}
RESNET = {"data": "few.h5", "model": "resnet18", "small_stem": True, "batch_size": 16, "epochs": 1}
CLASSES = {"task": "multilabel", "data": "classes.h5"}
VALUES = {"task": "regress", "data": "values.h5"}
DENOISE = {"task": "denoise", "model": "autoencoder"}

CASES: dict[str, dict[str, Any]] = {
    "digits": {},
    "overlap": {"overlap": 3},
    "uneven ranks": {"worker_load": {1: "1", 2: "3,1", 3: "2,1,1"}},
    "six shards, last step of one row": {"shards": 6, "batch_size": 20},
    "running": {"batch_norm": "running"},
    "average": {"batch_norm": "average", "shards": 5},
    "dropout, adam": {"model": "tests.support.nets:with_dropout", "optimizer": "adam"},
    "adamw, clipped": {
        "optimizer": "adamw",
        "weight_decay": 0.1,
        "no_decay": "norm",
        "clip_norm": 0.5,
    },
    "cosine, warm-up": {"schedule": "cosine", "scale_lr": "linear", "warmup_epochs": 1},
    "one-cycle, average": {
        "schedule": "one-cycle",
        "ema": 0.9,
        "final": "ema",
        "validate_every": "3steps",
    },
    "bf16": {"precision": "bf16"},
    "own loss, augmentation, metric": {
        "loss": "tests.support.own_functions:focal",
        "augment": "tests.support.own_functions:mirror",
        "metric": "tests.support.own_functions:top3",
        "momentum": 0,
    },
    "NCHW": {"channels_last": False},
    "all samples shuffled": {"shuffle": "global"},
    "balanced sampling": {"balanced_sampling": True, "read_buffer": "4K"},
    "class weights, smoothing": {
        "class_weights": "balanced",
        "label_smoothing": 0.1,
        "validate_every": "3steps",
        "final": "best",
    },
    "fine-tuned": {
        "init": "digits.safetensors",
        "freeze": "conv1,bn1",
        "lr_factors": "conv2=0.5,fc=2",
        "data": "seven.h5",
    },
    "colour, augmented": {"data": "colour.h5", "normalize": "pack", "flip": True, "shift": 2},
    "resnet18": RESNET,
    "JPEG files": JPEG,
    "JPEG files, random parts": {**JPEG, "random_crop": 0.3, "flip": True},
    "HDF5, chunks": CHUNKED,
    "HDF5, NCHW of float32": {
        "data": "floats.h5",
        "images": "{split}/x",
        "labels": "{split}/y",
        "layout": "NCHW",
        "max_value": 255,
        "shuffle": "partition",
    },
    "several classes": {
        **CLASSES,
        "class_weights": "balanced",
        "label_smoothing": 0.1,
        "overlap": 3,
    },
    "values": {**VALUES, "clip_norm": 0.5, "ema": 0.9, "final": "ema", "validate_every": "3steps"},
    "denoise": {**DENOISE, "validate_every": "3steps", "final": "best", "patience": 4},
    "denoise, gaussian noise": {**DENOISE, "noise": "gaussian", "optimizer": "sgdm"},
}
EQUAL = {"overlap": "digits", "uneven ranks": "digits"}  # what takes another way to the same bits
MEASURED = {"kind", "time", "seconds", "images_per_second"}  # of a record


def make_images(count: int, shape: tuple[int, ...], classes: int) -> tuple[np.ndarray, np.ndarray]:
    """Images that can be learnt, and labels; the table follows from them."""
    return draw_images(np.random.default_rng(count), count, shape, classes)


def make_entries(count: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Images, which of three classes they have, and two values; the table follows from them."""
    return draw_entries(np.random.default_rng(count), count, (12, 12, 1))


def write_data(folder: Path) -> Path:
    """Write all packs and files of the cases, and the weights that fine-tuning begins with."""
    packs = {"gray": ((12, 12, 1), 10), "seven": ((12, 12, 1), 7), "colour": ((9, 14, 3), 5)}
    packs["few"] = ((8, 8, 3), 5)
    for name, (shape, classes) in packs.items():
        rows = FEW if name == "few" else ROWS
        splits = {split: make_images(count, shape, classes) for split, count in rows.items()}
        hp.write_pack(folder / f"{name}.h5", splits, [f"class{k}" for k in range(classes)])
    splits = {split: make_entries(count) for split, count in ROWS.items()}
    classes = {split: (images, present) for split, (images, present, _) in splits.items()}
    hp.write_pack(folder / "classes.h5", classes, ["a", "b", "c"])
    values = {split: (images, values) for split, (images, _, values) in splits.items()}
    hp.write_pack(folder / "values.h5", values, columns=["sum", "share"])
    with h5py.File(folder / "chunked.h5", "w") as file:
        images, labels = make_images(211, (9, 14, 3), 5)
        file.create_dataset("x", data=images, chunks=(8, 9, 14, 3), compression="gzip")
        file["y"] = labels
    with h5py.File(folder / "floats.h5", "w") as file:
        for split, count in ROWS.items():
            images, labels = make_images(count, (9, 14, 3), 5)
            file[f"{split}/x"] = images.transpose(0, 3, 1, 2).astype(np.float32)
            file[f"{split}/y"] = np.eye(5)[labels]
    images, labels = make_images(170, (24, 30, 3), 3)
    for number, (image, label) in enumerate(zip(images, labels, strict=True)):
        path = folder / "files" / "abc"[label] / f"{number:03}.jpg"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(image).save(path, quality=90)
    words = ["--encoding", "jpeg", "--size", "16x12", "--split", "0.6,0.2,0.2", "--jobs", "1"]
    packed = command(1, "pack", folder / "files", "--output", folder / "jpeg.h5", *words)
    assert packed.code == 0, packed.err
    model, _ = train(1, "digits", folder)
    (model / "model.safetensors").rename(folder / "digits.safetensors")
    return folder


def train(ranks: int, case: str, folder: Path) -> tuple[Path, list[dict[str, Any]]]:
    """Train a case on so many ranks; return the run's folder and its record."""
    words = []
    for name, value in {**BASE, **CASES[case]}.items():
        value = value[ranks] if isinstance(value, dict) else value
        value = folder / value if str(value).endswith((".h5", ".safetensors")) else value
        flag = name.replace("_", "-")
        words += [f"--{'no-' * (value is False)}{flag}"]
        words += [] if isinstance(value, bool) else [value]
    run = Path(tempfile.mkdtemp(prefix="run-", dir=folder)) / "run"
    ended = command(ranks, "train", *words, "--runs-dir", run.parent, "--run", run.name)
    assert ended.code == 0, ended.err
    return run, [json.loads(line) for line in (run / "progress.jsonl").read_text().splitlines()]


def digest_weights(run: Path) -> str:
    """Of all tensors of the network by name."""
    found = hashlib.sha256()
    for name, tensor in sorted(load_file(run / "model.safetensors").items()):
        found.update(f"{name} {tensor.dtype} {tensor.shape}".encode())
        found.update(np.ascontiguousarray(tensor).tobytes())
    return found.hexdigest()[:16]


def digest_optimizer(run: Path) -> str:
    """Of all values that an optimizer keeps, by kind, in any order: they may lie in one buffer."""
    kinds: dict[str, list[np.ndarray]] = {}
    for name, tensor in load_file(max((run / "checkpoints").glob("[0-9]*.safetensors"))).items():
        if name.startswith("optimizer."):
            kinds.setdefault(name.rpartition(".")[2], []).append(tensor[tensor != 0])
    found = hashlib.sha256()
    for kind, tensors in sorted(kinds.items()):
        found.update(kind.encode() + np.sort(np.concatenate(tensors)).tobytes())
    return found.hexdigest()[:16]


def final_figures(records: list[dict[str, Any]]) -> dict[str, float]:
    """What was recorded last of the training and of each split."""
    last = {r.get("split", "train"): r for r in records if r["kind"] in ("epoch", "evaluation")}
    return {
        f"{split} {name}": value
        for split, record in sorted(last.items())
        for name, value in record.items()
        if name not in MEASURED and isinstance(value, int | float)
    }


def outcome(ranks: int, case: str, folder: Path) -> tuple[dict[str, Any], str, str]:
    """An entry of the table, the digest of the whole record, and what the bits depend on."""
    run, records = train(ranks, case, folder)
    first, last = records[0], records[-1]
    assert (first["ranks"], last["kind"], last["status"]) == (ranks, "end", "done")
    entry = {"weights": digest_weights(run), "optimizer": digest_optimizer(run)}
    decoder = f", Pillow {features.version('pil')}, libjpeg {features.version('jpg')}"
    key = first["key"] + decoder * ("JPEG" in case)
    return {**entry, "figures": final_figures(records)}, last["digest"], key


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_data(tmp_path_factory.mktemp("digests"))


@pytest.fixture(scope="module")
def table():
    return json.loads(TABLE.read_text())


@pytest.mark.parametrize("case", CASES)
def test_the_bits_are_those_of_one_rank_and_of_the_table(case, folder, table, request):
    entry, whole, key = outcome(1, case, folder)
    for ranks in (2, 3):
        assert outcome(ranks, case, folder) == (entry, whole, key), f"{ranks} ranks"
    if request.config.getoption("update"):
        table.setdefault(key, {})[case] = entry
        TABLE.write_text(json.dumps(table, indent=1) + "\n")
    elif known := table.get(key, {}).get(case):
        assert (entry["weights"], entry["optimizer"]) == (known["weights"], known["optimizer"])
        assert entry["figures"] == pytest.approx(known["figures"], rel=1e-12, abs=0)
    else:
        pytest.skip(f"equal on 1 to 3 ranks, but the table has none for {key}: see --update")


def test_every_case_of_the_table_has_bits_of_its_own(table):
    found: dict[str, dict[str, str]] = {}
    for key, cases in table.items():
        found.setdefault(key.partition(", Pillow")[0], {}).update(
            {case: entry["weights"] for case, entry in cases.items()}
        )
    assert set().union(*found.values()) == CASES.keys()  # later ones are there for some processors
    for digests in found.values():
        own = {case: digest for case, digest in digests.items() if case not in EQUAL}
        assert len(set(own.values())) == len(own)
        assert all(digests[case] == digests[other] for case, other in EQUAL.items())
