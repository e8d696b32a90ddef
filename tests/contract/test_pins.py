"""What a run computes, records, writes and prints, to a table from commit to commit.

test_digests.py holds that the bits of networks stay; this the way to them and from them. Each case
is trained, evaluated and used by the command line, and these parts of it are compared:

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

The table pins.json has `tensors`, `plan` and `names` once, and the others for each torch, processor
and instruction set that it was made on; what depends on the decoder of JPEG files, or on the
library that draws, also by that. Elsewhere the others are not compared. To write what this machine
finds into it:

    pytest tests/contract/test_pins.py --update

A changed line that users can see has a line in CHANGELOG.md.
"""

from __future__ import annotations

import difflib
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
from PIL import Image, features

import hpctrain as hp
from tests.support.api import read_model
from tests.support.packs import draw_images
from tests.support.pipeline import describe_tensors, digest
from tests.support.ranks import command, on_ranks

TABLE = Path(__file__).with_name("pins.json")
ROWS = {"train": 101, "validation": 35, "test": 70}  # evaluated in 1 and 2 blocks
SHAPES = {"gray": (12, 12, 1), "colour": (9, 14, 3)}
CLASSES = 5
OWN = "tests.support.own_functions"

BASE: dict[str, Any] = {"model": "digits", "epochs": 1, "batch_size": 32, "shards": 3}
BASE |= {"deterministic": True, "data": "gray.h5", "device": "cpu"}
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
}
ON_TWO_RANKS = "class weights"
DRAWN_BY_PROCESSOR = ("own loss, augmentation, metric", "gaussian noise")  # normal deviates

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


def write_data(folder: Path) -> None:
    """Write the packs and files of the cases."""
    names = tuple(f"class{k}" for k in range(CLASSES))
    for name, shape in SHAPES.items():
        splits = {split: make_images(rows, shape) for split, rows in ROWS.items()}
        hp.write_pack(folder / f"{name}.h5", splits, names)
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


def settings_of(case: str, folder: Path) -> dict[str, Any]:
    """All settings of a case that the results depend on."""
    settings = {**BASE, **CASES[case]}
    return {**settings, "data": str(folder / settings["data"]), "threads": 1}


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

    def __init__(self, case: str, ranks: int, folder: Path) -> None:
        self.case, self.ranks, self.folder = case, ranks, folder
        self.runs = folder / f"runs{ranks}"
        self.run = self.runs / re.sub(r"\W+", "-", case)
        self.settings = settings_of(case, folder)
        self.restores = self.settings.get("task") == "denoise"
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
        if self.restores:
            parts["predicted"] = self.restore()
        else:
            parts["predicted"] = self.predict(parts["picture"])
        parts["names"] = names_of(parts)
        parts["tensors"] = self.tensors()
        return parts, records[0]["key"]

    def evaluate(self, parts: dict[str, Part]) -> None:
        """Add what an evaluation prints and writes to the parts."""
        output = self.run / "evaluated.json"
        words = ["--output", output, "--threads", "1", *self.options]
        if not self.restores:
            words += ["--mistakes", "6"]
        printed = self.command("evaluate", self.run, *words)
        lines = [plain(line) for line in printed if not line.startswith(tuple(BORDERS))]
        parts["printed"] += [("evaluate", line) for line in lines]
        parts["evaluated"].append(("evaluate", json.loads(self.read(output.name))))
        if not self.restores:
            parts["picture"].append(("mistakes", digest_image(output.with_suffix(".png"))))

    def predict(self, pictures: Part) -> Part:
        """The answers to the test images, or to some files; some are drawn."""
        output = self.run / "predicted.csv"
        files = []
        if self.settings["data"].endswith("jpeg.h5"):
            files = sorted((self.folder / "files").rglob("*0.jpg"))
        words = ["--output", output, "--threads", "1", "--figure", "3", *self.trust]
        self.command("predict", self.run, *files, *words)
        text = self.read(output.name)
        lines = text.splitlines()
        pictures.append(("figure", digest_image(output.with_suffix(".png"))))
        whole = {"lines": len(lines), "digest": digest(np.frombuffer(text.encode(), np.uint8))}
        return [*(("line", line) for line in lines[:FIRST_LINES]), ("all", whole)]

    def restore(self) -> Part:
        """The values of some images that the network restored."""
        output = self.run / "restored"
        words = ["--output", output, "--threads", "1", *self.trust]
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


def place_of(part: str, case: str, key: str) -> str:
    """Where in the table a part of a case is."""
    is_drawn_here = part == "tensors" and case in DRAWN_BY_PROCESSOR
    place = ANYWHERE if part in SAME_ANYWHERE and not is_drawn_here else key
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


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    made = tmp_path_factory.mktemp("pins").resolve()
    write_data(made)
    return made


@pytest.fixture(scope="module")
def table():
    return json.loads(TABLE.read_text())


@pytest.mark.parametrize("case", CASES)
def test_what_a_run_leaves_is_that_of_the_table(case, folder, table, request):
    parts, key = Launches(case, 1, folder).parts()
    found = {part: as_lines(values) for part, values in parts.items()}
    if case == ON_TWO_RANKS:
        of_two, _ = Launches(case, 2, folder).parts()
        apart = [
            line
            for part, lines in found.items()
            for line in difference(part, lines, as_lines(of_two[part]))
        ]
        assert not apart, "\n".join(apart)
    if request.config.getoption("update"):
        for part, lines in found.items():
            table.setdefault(place_of(part, case, key), {}).setdefault(case, {})[part] = lines
        TABLE.write_text(json.dumps(table, indent=1, ensure_ascii=False) + "\n")
    missing, moved = set(), []
    for part, lines in found.items():
        place = place_of(part, case, key)
        pinned = table.get(place, {}).get(case, {}).get(part)
        if pinned is None:
            missing.add(place)
        else:
            moved += difference(part, pinned, lines)
    assert not moved, "\n".join(moved)
    if missing:
        pytest.skip(f"equal where pinned; the table has none for {' nor '.join(missing)}: --update")


def test_the_table_has_all_cases_and_tells_them_apart(table):
    assert table[ANYWHERE].keys() == CASES.keys()
    assert all(cases.keys() <= CASES.keys() for cases in table.values())
    records = [
        (place, tuple(parts["record"][1:]))
        for place, cases in table.items()
        for parts in cases.values()
        if "record" in parts
    ]
    assert len(records) >= len(CASES) and len({*records}) == len(records)
