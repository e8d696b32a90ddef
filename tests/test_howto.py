"""The commands of docs/howto.md run as printed, on one rank, with smaller numbers."""

from __future__ import annotations

import importlib.util
import re
import runpy
import shlex
import sys

import h5py
import numpy as np
import pytest
import torch
from PIL import Image

from hpctrain.cli import main
from hpctrain.models import build
from tests.support.launch import ROOT

PAGE = (ROOT / "docs/howto.md").read_text()
SMALLER = {
    "--size 224x224": "--size 40x40",
    "--epochs 10": "--epochs 2",
    "--epochs 3": "--epochs 1",
    "--epochs 7": "--epochs 1",
}
NEEDS = {"hpctrain[timm]": "timm", "hpctrain[export]": "onnxruntime"}


@pytest.fixture
def folder(tmp_path):
    """The folder of a user: photographs of three classes, arrays, and published weights."""
    folder, rng = tmp_path, np.random.default_rng(0)
    for name, count in {"photos/daisy": 12, "photos/rose": 10, "photos/tulip": 20}.items():
        (folder / name).mkdir(parents=True)
        for number in range(count):
            pixels = rng.integers(0, 255, (48, 56, 3), dtype=np.uint8)
            Image.fromarray(pixels).save(folder / name / f"{number}.jpg")
    (folder / "new_photos").mkdir()
    for number in range(3):
        pixels = rng.integers(0, 255, (60, 50, 3), dtype=np.uint8)
        Image.fromarray(pixels).save(folder / f"new_photos/{number}.jpg")
    arrays = {}
    for name, count in {"train": 80, "test": 20}.items():
        images = rng.integers(0, 255, (count, 28, 28), dtype=np.uint8)
        arrays |= {f"x_{name}": images, f"y_{name}": np.arange(count, dtype=np.uint8) % 10}
        with h5py.File(folder / f"slides_{name}.h5", "w") as file:
            file.create_dataset("x", data=np.repeat(images[..., None], 3, 3), compression="gzip")
            file["y"] = np.arange(count) % 2
    np.savez(folder / "mnist.npz", **arrays)
    torch.save(build("resnet18", (224, 224, 3), 1000).state_dict(), folder / "resnet18.pth")
    return folder


def commands(text):
    """The commands of a block, continued lines joined."""
    for short, long in SMALLER.items():
        text = text.replace(short, long)
    return text.replace("\\\n", " ").splitlines()


@pytest.mark.timeout(300)
def test_the_commands_of_the_page_run(folder, monkeypatch, capsys):
    monkeypatch.chdir(folder)
    monkeypatch.syspath_prepend(str(folder))
    for kind, text in re.findall(r"^```(python|sh)\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL):
        if kind == "python":
            (folder / re.match(r"# (\w+\.py)\n", text)[1]).write_text(text)
            continue
        for command in commands(text):
            words = shlex.split(command.replace("mpirun -n 4 ", ""))
            if words[0] == "pip":
                if importlib.util.find_spec(NEEDS[words[2]]) is None:
                    break  # what follows needs this package
            elif words[1:3] == ["-m", "hpctrain"]:
                assert main(words[3:]) == 0, command
            elif words[1] == "-m":
                monkeypatch.setattr(sys, "argv", words[2:])
                monkeypatch.delitem(sys.modules, words[2], raising=False)
                runpy.run_module(words[2], run_name="__main__")
            else:
                exec((folder / words[1]).read_text(), {"__name__": "__main__"})
    sys.modules.pop("mine", None)
    answers = capsys.readouterr().out
    assert "balanced accuracy" in answers and "('daisy', 'rose', 'tulip')" in answers
    made = [
        "answers.csv",
        "answers.png",
        "runs/weighted/mistakes.png",
        "runs/exact/model.safetensors",
    ]
    assert [name for name in made if not (folder / name).is_file()] == []


def test_every_block_is_run_or_needs_the_internet():
    blocks = re.findall(r"^```(\w*)\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL)
    left = [text for kind, text in blocks if kind not in ("sh", "python")]
    assert len(left) == 1 and "weights='DEFAULT'" in left[0]
