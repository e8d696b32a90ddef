"""The commands of docs/howto.md run as printed, on one rank, with smaller numbers and networks."""

from __future__ import annotations

import importlib.util
import re
import shlex
import sys

import h5py
import numpy as np
import pytest
import torch
from PIL import Image

from tests.support.launch import ROOT, run
from tests.support.programs import run_program
from tests.support.ranks import alone, command, on_ranks

PAGE = (ROOT / "docs/howto.md").read_text()
BLOCKS = re.findall(r"^```(\w*)\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL)
SMALLER = {
    r"--size 224x224": "--size 40x40",
    r"--epochs \d+": "--epochs 1",
    r"--model resnet18": "--model howto_net:resnet",
    r"mpirun -n 4 ": "",
    r"hpctrain (evaluate|predict|export)": r"hpctrain \1 --trust-code",
    r'hp.load\("tuned"\)': 'hp.load("tuned", trust_code=True)',
}
NEEDS = {"hpctrain[timm]": "timm", "hpctrain[export]": "onnxruntime"}
#: In place of a ResNet: a layer of each name that the page uses.
NETWORK = """
from collections import OrderedDict
from torch import nn

def resnet(image_shape, classes):
    layers = {"conv1": nn.Conv2d(3, 4, 3, 2), "bn1": nn.BatchNorm2d(4), "relu": nn.ReLU()}
    layers |= {"layer1": nn.Conv2d(4, 8, 3, 2), "pool": nn.AdaptiveAvgPool2d(1)}
    return nn.Sequential(OrderedDict(**layers, flat=nn.Flatten(), fc=nn.Linear(8, classes)))
"""


def smaller(text):
    for pattern, short in SMALLER.items():
        text = re.sub(pattern, short, text)
    return text


def forget(comm, folder):
    """What the functions of the page left in a rank."""
    sys.path[:] = [place for place in sys.path if place != str(folder)]
    for name in ("mine", "howto_net"):
        sys.modules.pop(name, None)


@pytest.fixture
def folder(tmp_path, monkeypatch):
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
    (folder / "howto_net.py").write_text(NETWORK)
    names = {}
    exec(NETWORK, names)
    torch.save(names["resnet"]((40, 40, 3), 1000).state_dict(), folder / "resnet18.pth")
    monkeypatch.chdir(folder)
    yield folder
    on_ranks(1, forget, folder=folder)


def test_the_commands_of_the_page_run(folder):
    printed = ""
    for kind, text in BLOCKS:
        if kind == "python":
            (folder / re.match(r"# (\w+\.py)\n", text)[1]).write_text(smaller(text))
        for line in smaller(text).replace("\\\n", " ").splitlines() if kind == "sh" else ():
            words = shlex.split(line)
            if words[0] == "pip":
                if importlib.util.find_spec(NEEDS[words[2]]) is None:
                    break  # what follows needs this package
                continue
            if words[1:3] == ["-m", "hpctrain"]:
                ended = alone(*words[3:]) if words[3] == "supervise" else None
                ended = ended or command(1, *words[3:], cwd=folder)
                assert ended.code == 0, line + ended.err
                printed += ended.out
            elif words[1] == "-m":
                assert run([sys.executable, *words[1:]], cwd=ROOT).returncode == 0, line
            else:
                run_program(1, folder / words[1])
    assert "balanced accuracy" in printed
    made = ["answers.csv", "answers.png", "runs/weighted/mistakes.png", "mnist.h5", "slides.h5"]
    made += ["runs/exact/model.safetensors", "runs/watched/model.safetensors"]
    assert [name for name in made if not (folder / name).is_file()] == []


def test_every_block_is_run_or_needs_the_internet():
    left = [text for kind, text in BLOCKS if kind not in ("sh", "python")]
    assert len(left) == 1 and "weights='DEFAULT'" in left[0]
