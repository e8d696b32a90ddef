"""Runs whose every result is pinned: what they compute, record, print and write, by part.

Each case is trained, evaluated and used by the command line. `compare` compares its parts with
tests/contract/pins.json:

    tensors    digests of a step's samples by stage, from stored values to input and target, and of
               a block of the validation: tests/support/pipeline.py
    plan       plan.json
    record     progress.jsonl, without what is measured and what describes the machine
    printed    figures that a training prints, and what an evaluation does
    network    the metadata of model.safetensors
    evaluated  the JSON of the test, and that of `evaluate --output`
    predicted  the CSV of `predict`, of which most is a digest, or digests of restored images
    picture    digests of the pixels of the mistakes, and of `predict --figure`
    names      the five before it with types in place of values that a processor may change: what
               there is, what it is called, and in what order

`place_of` says where in the table a part is: `tensors`, `plan` and `names` are there once, the
others for each torch, processor and instruction set that they were made on; what depends on the
decoder of JPEG files, or on the library that draws, also by that. On a GPU, only tensors whose
random numbers are drawn elsewhere are those of any processor.
"""

from __future__ import annotations

import difflib
import json
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
from PIL import Image, features

import hpctrain as hp
from tests.support.api import read_model, task_class
from tests.support.launch import ROOT
from tests.support.packs import draw_entries, draw_images
from tests.support.pipeline import describe_tensors, digest
from tests.support.ranks import command, on_ranks

TABLE = ROOT / "tests" / "contract" / "pins.json"
ROWS = {"train": 101, "validation": 35, "test": 70}  # evaluated in 1 and 2 blocks
SHAPES = {"gray": (12, 12, 1), "colour": (9, 14, 3)}
CLASSES = 5
OWN = "tests.support.own_functions"

BASE: dict[str, Any] = {"model": "digits", "epochs": 1, "batch_size": 32, "shards": 3}
BASE |= {"deterministic": True, "data": "gray.h5"}
COLOUR = {"data": "colour.h5"}
JPEG = {"data": "jpeg.h5"}
HDF5 = {"data": "stored.h5", "labels": "{split}/y"}
IMAGENET = {"normalize": "imagenet"}
DENOISE = {"task": "denoise", "model": "autoencoder", "epochs": 3, "lr": 0.01}

CASES: dict[str, dict[str, Any]] = {
    "classes": {"epochs": 2},
    "class weights": {
        "class_weights": "balanced",
        "label_smoothing": 0.1,
        "validate_every": "2steps",
        "final": "best",
    },
    "balanced sampling": {"balanced_sampling": True, "metric": f"{OWN}:counts"},
    "flips and shifts": {**COLOUR, "normalize": "pack", "flip": True, "shift": 2},
    "shifts, NCHW": {**COLOUR, "shift": 1, "channels_last": False},
    "JPEG files": {**JPEG, "flip": True},
    "JPEG files, random parts": {**JPEG, "random_crop": 0.3, "flip": True, "shift": 1},
    "own loss, augmentation, metric": {
        "loss": f"{OWN}:focal",
        "augment": f"{OWN}:mirror",
        "metric": f"{OWN}:top3",
        "class_weights": "1,2,0.5,1,0.25",
        "flip": True,
    },
    "average": {"schedule": "one-cycle", "ema": 0.9, "final": "ema", "validate_every": "3steps"},
    "several classes": {
        "task": "multilabel",
        "data": "classes.h5",
        "class_weights": "balanced",
        "epochs": 2,
        "final": "best",
    },
    "values": {
        "task": "regress",
        "data": "values.h5",
        "epochs": 2,
        "lr": 0.003,
        "validate_every": "2epochs",
        "metric": f"{OWN}:mean_error",
    },
    "salt and pepper": {**DENOISE, "final": "best", "flip": True, "shift": 1},
    "gaussian noise": {**DENOISE, "noise": "gaussian", "loss": f"{OWN}:absolute"},
    "8 bits, HDF5": {**HDF5, "images": "{split}/bytes", "flip": True, "shift": 1},
    "8 bits, HDF5, divided": {**HDF5, "images": "{split}/bytes", "max_value": 240, "flip": True},
    "8 bits, HDF5, normalized": {**HDF5, **IMAGENET, "images": "{split}/bytes"},
    "16 bits, HDF5": {**HDF5, "images": "{split}/words", "flip": True, "shift": 1},
    "floats, HDF5, normalized": {
        **HDF5,
        **IMAGENET,
        "images": "{split}/floats",
        "layout": "NCHW",
        "flip": True,
        "shift": 1,
    },
    # Apart: where the order of augmentation and normalization, or of division and normalization,
    # decides on bits.
    "own augmentation, normalized": {**COLOUR, "normalize": "pack", "augment": f"{OWN}:brighten"},
    "16 bits, HDF5, normalized": {**HDF5, **IMAGENET, "images": "{split}/words"},
    "8 bits, HDF5, divided, normalized": {
        **HDF5,
        **IMAGENET,
        "images": "{split}/bytes",
        "max_value": 240,
    },
}
EVALUATE: dict[str, list[str]] = {  # other options
    "classes": ["--split", "validation", "--loss", f"{OWN}:focal", "--metric", f"{OWN}:counts"],
    "flips and shifts": ["--batch-size", "16", "--split", "validation"],
    "own loss, augmentation, metric": ["--trust-code"],
    "balanced sampling": ["--trust-code"],
    "gaussian noise": ["--trust-code"],
    "values": ["--trust-code"],
}
ON_TWO_RANKS = "class weights"
DRAWN_BY_PROCESSOR = ("own loss, augmentation, metric", "gaussian noise")  # normal deviates
DRAWN_BY_GPU = (*DRAWN_BY_PROCESSOR, "salt and pepper", "own augmentation, normalized")

MACHINE = {"ranks", "hosts", "host_ranks", "host_cores", "rank_shares", "mpi", "torch", "hpctrain"}
MACHINE |= {"key", "memory", "memory_reason", "transport", "transport_reason"}
MEASURED = {"time", "seconds", "images_per_second", "slowest_rank", "step_seconds", "shares"}
MEASURED |= {"idle", "slowest_share", "advice", "checkpoint_stall"}
DIGESTS = {"digest", "plan", "pack_uuid"}
FIGURES = re.compile(r"Epoch|  validation|  test|Done")  # lines that a training prints
SPEED = re.compile(r"[\d,]+ images/s|\d+:\d\d( left)?")
BORDERS = "┏┡└"  # a line of a table begins with one of them
FIRST_LINES = 4  # of a CSV
ANYWHERE = "any processor"
SAME_ANYWHERE = ("tensors", "plan", "names")

Part = list[tuple[str, Any]]  # values of JSON, each with a name


def make_images(rows: int, shape: tuple[int, ...]) -> tuple[np.ndarray, np.ndarray]:
    """Images that can be learnt, and labels; one in seven is wrong, so that there are mistakes."""
    images, labels = draw_images(np.random.default_rng(rows), rows, shape, CLASSES)
    labels[::7] = (labels[::7] + 1) % CLASSES
    return images, labels


def write_data(folder: Path) -> Path:
    """Write the packs and files of the cases into a folder; return it."""
    names = tuple(f"class{k}" for k in range(CLASSES))
    for name, shape in SHAPES.items():
        splits = {split: make_images(rows, shape) for split, rows in ROWS.items()}
        hp.write_pack(folder / f"{name}.h5", splits, names)
    entries = {
        split: draw_entries(np.random.default_rng(rows), rows, SHAPES["gray"])
        for split, rows in ROWS.items()
    }
    classes = {split: (images, present) for split, (images, present, _) in entries.items()}
    hp.write_pack(folder / "classes.h5", classes, names[:3])
    values = {split: (images, values) for split, (images, _, values) in entries.items()}
    hp.write_pack(folder / "values.h5", values, columns=["sum", "share"])
    with h5py.File(folder / "stored.h5", "w") as file:
        for split, rows in ROWS.items():
            images, labels = make_images(rows, SHAPES["colour"])
            file[f"{split}/bytes"] = images
            low = np.arange(images.size).reshape(images.shape) % 257
            file[f"{split}/words"] = (images.astype(np.uint16) * 257 + low).astype(np.uint16)
            file[f"{split}/floats"] = (images / 255).transpose(0, 3, 1, 2).astype(np.float32)
            file[f"{split}/y"] = labels
    images, labels = make_images(120, (24, 30, 3))
    for number, (image, label) in enumerate(zip(images, labels, strict=True)):
        path = folder / "files" / f"class{label}" / f"{number:03}.jpg"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(image).save(path, quality=90)
    (folder / "noisy").mkdir()
    for number, image in enumerate(make_images(3, SHAPES["gray"])[0]):
        Image.fromarray(image[:, :, 0]).save(folder / "noisy" / f"{number}.png")
    words = ["--encoding", "jpeg", "--size", "16x12", "--split", "0.6,0.2,0.2", "--jobs", "1"]
    packed = command(1, "pack", folder / "files", "--output", folder / "jpeg.h5", *words)
    assert packed.code == 0, packed.err
    return folder


def settings_of(case: str, folder: Path, device: str) -> dict[str, Any]:
    """All settings of a case that the results depend on."""
    settings = {**BASE, **CASES[case]}
    data = str(folder / settings["data"])
    return {**settings, "data": data, "device": device, "threads": 1}


def as_words(settings: dict[str, Any]) -> Iterator[object]:
    """Settings as words of the command line."""
    for name, value in settings.items():
        flag = name.replace("_", "-")
        if isinstance(value, bool):
            yield f"--{flag}" if value else f"--no-{flag}"
        else:
            yield from (f"--{flag}", value)


class Launches:
    """The commands of a case on so many ranks, and the files that they write."""

    def __init__(self, case: str, ranks: int, folder: Path, device: str = "cpu") -> None:
        self.case = case
        self.ranks = ranks
        self.folder = folder
        self.device = device
        self.runs = folder / f"runs{ranks}"
        self.run = self.runs / re.sub(r"\W+", "-", case)
        self.settings = settings_of(case, folder, device)
        self.here = ["--device", device, "--threads", "1"]
        self.task = task_class(self.settings.get("task", "classify"))
        self.options = EVALUATE.get(case, [])
        self.trust = [word for word in self.options if word == "--trust-code"]

    def command(self, *words: object) -> list[str]:
        """The lines that a subcommand prints; it must succeed."""
        ended = command(self.ranks, *words, "--runs-dir", self.runs)
        assert ended.code == 0, ended.err
        return self.without_folders(ended.out).splitlines()

    def without_folders(self, text: str) -> str:
        return text.replace(str(self.runs), "RUNS").replace(str(self.folder), "DATA")

    def read(self, name: str) -> str:
        """The text of a file of the run."""
        return self.without_folders((self.run / name).read_text())

    def parts(self) -> tuple[dict[str, Part], str]:
        """All parts, and what the bits depend on."""
        words = [*as_words(self.settings), "--run", self.run.name, "--progress", "plain"]
        trained = [line for line in self.command("train", *words) if FIGURES.match(line)]
        records = [json.loads(line) for line in self.read("progress.jsonl").splitlines()]
        metadata = read_model(self.run / "model.safetensors")[1]
        parts = {
            "plan": [("plan", json.loads(self.read("plan.json")))],
            "record": [
                (record["kind"], without_measured(record))
                for record in records
                if "of a host" not in record.get("text", "")  # a note on the cores of this one
            ],
            "printed": [("train", plain(SPEED.sub("", line))) for line in trained],
            "network": [("network", json.loads(self.without_folders(json.dumps(metadata))))],
            "evaluated": [("test", json.loads(self.read("evaluation-test.json")))],
            "picture": [],
        }
        parts["network"][0][1]["hpctrain"] = "*"
        self.evaluate(parts)
        if self.task.gives_images:
            parts["predicted"] = self.restore()
        else:
            parts["predicted"] = self.predict(parts["picture"])
        parts["names"] = names_of(parts)
        parts["tensors"] = self.tensors()
        return parts, records[0]["key"]

    def evaluate(self, parts: dict[str, Part]) -> None:
        """Add what an evaluation prints and writes to the parts."""
        output = self.run / "evaluated.json"
        words = ["--output", output, *self.here, *self.options]
        if self.task.has_mistakes:
            words += ["--mistakes", "6"]
        printed = self.command("evaluate", self.run, *words)
        lines = [plain(line) for line in printed if not line.startswith(tuple(BORDERS))]
        parts["printed"] += [("evaluate", line) for line in lines]
        parts["evaluated"].append(("evaluate", json.loads(self.read(output.name))))
        if self.task.has_mistakes:
            parts["picture"].append(("mistakes", digest_image(output.with_suffix(".png"))))

    def predict(self, pictures: Part) -> Part:
        """The answers to the test images, or to some files; some are drawn."""
        output = self.run / "predicted.csv"
        files = []
        if self.settings["data"].endswith("jpeg.h5"):
            files = sorted((self.folder / "files").rglob("*0.jpg"))
        words = ["--output", output, *self.here, "--figure", "3", *self.trust]
        self.command("predict", self.run, *files, *words)
        text = self.read(output.name)
        lines = text.splitlines()
        pictures.append(("figure", digest_image(output.with_suffix(".png"))))
        whole = {"lines": len(lines), "digest": digest(np.frombuffer(text.encode(), np.uint8))}
        return [*(("line", line) for line in lines[:FIRST_LINES]), ("all", whole)]

    def restore(self) -> Part:
        """The values of some images that the network restored."""
        output = self.run / "restored"
        words = ["--output", output, *self.here, *self.trust]
        self.command("predict", self.run, self.folder / "noisy", *words)
        return [(path.name, {"digest": digest_image(path)}) for path in sorted(output.iterdir())]

    def tensors(self) -> Part:
        """The lines of all shards, and of a block, which each rank makes."""
        of_ranks = on_ranks(self.ranks, describe_tensors, settings=self.settings)
        return [("", line) for line in sorted({line for lines in of_ranks for line in lines})]


def without_measured(record: dict[str, Any]) -> dict[str, Any]:
    """A record with the names of all fields, and the values of those that equal runs share."""
    masked = MEASURED | MACHINE
    return {name: "*" if name in masked else value for name, value in record.items()}


def plain(line: str) -> str:
    """A line with single spaces."""
    return " ".join(line.split())


def names_of(parts: dict[str, Part]) -> Part:
    """The part "names"."""
    return [
        (f"{part} {name}", type_of(value))
        for part in ("record", "printed", "network", "evaluated", "predicted")
        for name, value in parts[part]
        if "│" not in str(value)  # a row of a table
    ]


def type_of(value: Any, name: str = "") -> Any:
    """A value with all of its names, and types in place of what a processor may change."""
    if isinstance(value, dict):
        return {key: type_of(inner, key) for key, inner in value.items()}
    if isinstance(value, list):
        return [type_of(inner) for inner in value[:1]]
    if isinstance(value, str) and name not in DIGESTS:
        return re.sub(r"\d[\d.,]*", "#", value)
    if isinstance(value, bool) or value is None or name == "rows":
        return value
    return type(value).__name__


def digest_image(path: Path) -> str:
    """Of the values of an image file."""
    with Image.open(path) as image:
        return digest(np.asarray(image))


def place_of(part: str, case: str, key: str, device: str) -> str:
    """Where in the table a part of a case is."""
    if device == "cpu":
        is_anywhere = part in SAME_ANYWHERE
        drawn = DRAWN_BY_PROCESSOR
    else:
        is_anywhere = part == "tensors"
        drawn = DRAWN_BY_GPU
    if part == "tensors" and case in drawn:
        is_anywhere = False
    place = ANYWHERE if is_anywhere else key
    if part == "picture" or ("JPEG" in case and part != "names"):
        place += f", Pillow {features.version('pil')}, libjpeg {features.version('jpg')}"
    return place


def as_lines(values: Part) -> list[str]:
    """A part as the table has it."""
    return [f"{name} {json.dumps(value, ensure_ascii=False)}" for name, value in values]


def difference(part: str, pinned: list[str], found: list[str]) -> list[str]:
    """What differs between the lines of a part, field by field."""
    both = [[field for line in lines for field in line.split(', "')] for lines in (pinned, found)]
    names = f"{part} expected", f"{part} found"
    return [*difflib.unified_diff(*both, *names, n=1, lineterm="")]


def compare(case: str, folder: Path, ranks: Sequence[int], device: str, update: bool) -> None:
    """Compare a case on so many ranks with the table, or write it; skip where that has not all."""
    table = json.loads(TABLE.read_text())
    parts, key = Launches(case, ranks[0], folder, device).parts()
    found = {part: as_lines(values) for part, values in parts.items()}
    for more in ranks[1:]:
        others, _ = Launches(case, more, folder, device).parts()
        check({part: (lines, as_lines(others[part])) for part, lines in found.items()})
    places = {part: place_of(part, case, key, device) for part in found}
    if update:
        for part, place in places.items():
            table.setdefault(place, {}).setdefault(case, {})[part] = found[part]
        TABLE.write_text(json.dumps(table, indent=1, ensure_ascii=False) + "\n")
    pinned = {part: table.get(place, {}).get(case, {}).get(part) for part, place in places.items()}
    check({part: (lines, found[part]) for part, lines in pinned.items() if lines is not None})
    missing = {places[part] for part, lines in pinned.items() if lines is None}
    if missing:
        pytest.skip(f"equal where pinned; the table has none for {' nor '.join(missing)}: --update")


def check(pairs: dict[str, tuple[list[str], list[str]]]) -> None:
    """Fail with what differs between the expected and the found lines of parts."""
    apart = [line for part, both in pairs.items() for line in difference(part, *both)]
    assert not apart, "\n".join(apart)
