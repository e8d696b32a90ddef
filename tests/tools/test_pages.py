"""The commands of all pages: each parses, and runs as printed with smaller numbers and networks.

A page's commands run in one folder, in their order, on one rank. What they name and no earlier
command made is made first: packs, external files, weights, runs. `NOT_RUN` says which do not run
here, and why.
"""

from __future__ import annotations

import contextlib
import csv
import re
import shlex
import shutil
import sys
import tarfile
from pathlib import Path

import h5py
import numpy as np
import pytest
import torch
from PIL import Image

import hpctrain as hp
from hpctrain.cli import parse
from tests.support.launch import ROOT, run
from tests.support.packs import draw_entries, draw_images, make_pack
from tests.support.programs import run_program
from tests.support.ranks import alone, command, job, on_ranks

PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
# Those are run by test_scientific_page.py and test_targets_page.py.
RUN = [page for page in PAGES if page.stem not in ("scientific", "targets")]
BLOCK = re.compile(r"^```(\w*)\n(.*?)^```", re.MULTILINE | re.DOTALL)
COMMANDS = r"mpirun|srun|sbatch|salloc|qsub|flux|python|pip|hpctrain|(scripts|slurm|tests)/\S+"
START = re.compile(rf"(\w+=\S+ )*({COMMANDS})(\s|$)")
NOT_RUN = {
    r"^(srun|sbatch|salloc|qsub|flux|slurm/|PACK=)": "needs a scheduler",
    r"^pip |-m (pip|venv)|weights=.*DEFAULT|pretrained=True": "needs the internet",
    r"^(scripts|tests)/|tests/gpu|-m scripts\.bench": "takes minutes, and other tests start it",
    r"--config scripts/recipes": "trains a ResNet-50",
    r"--device cuda|--cuda-graphs|--reduce|--precision": "needs a GPU",
    r"--worker-load": "needs a number of ranks",
    r"hpctrain watch .*--web": "ends with Ctrl-C only",
    r"hpctrain stop": "needs a run in progress",
    r"hpctrain (sweep|.*--best)": "trains many networks: test_sweep_whole.py",
}
SMALLER = {
    r"--size \d+x\d+": "--size 40x40",
    r"--epochs \d+": "--epochs 1",
    r"timm:convnext_atto\(\S+\)": "timm:test_resnet(drop_rate=0.1)",
    r"--model (resnet\d+|timm:\w+)": "--model page_net:resnet",
    r"--data (digits|flowers)(?= |$)": r"--data \1.h5",
    r"--stage \S+": "--stage staged",
    r"mpirun -n \d+ ": "",
    r"hpctrain (evaluate|predict|export)(?!.*--trust-code)": r"hpctrain \1 --trust-code",
    r"hpctrain pack (?!--check)": "hpctrain pack --overwrite ",
    r"hpctrain watch(?!.*--once)": "hpctrain watch --once",
    r'hp\.load\("(\w+)"\)': r'hp.load("\1", trust_code=True)',
}
#: In place of a ResNet: a layer of each name that the pages use.
NETWORK = """
from collections import OrderedDict
from torch import nn

def resnet(image_shape, classes):
    layers = {"conv1": nn.Conv2d(image_shape[2], 4, 3, 2), "bn1": nn.BatchNorm2d(4)}
    layers |= {"relu": nn.ReLU(), "layer1": nn.Conv2d(4, 8, 3, 2), "pool": nn.AdaptiveAvgPool2d(1)}
    return nn.Sequential(OrderedDict(**layers, flat=nn.Flatten(), fc=nn.Linear(8, classes)))
"""
ROWS = {"train": 60, "validation": 12, "test": 20}


def commands(page):
    """The command lines in the blocks of a page: continued lines joined, comments cut."""
    for kind, block in BLOCK.findall(page.read_text()):
        line = ""
        for part in block.splitlines() if kind in ("", "sh", "bash") else ():
            line = f"{line}\n{part}".strip()
            try:
                words = shlex.split(line.replace("\\\n", " "), comments=True)
            except ValueError:  # a quotation or a line that goes on
                continue
            if START.match(line):
                yield shlex.join(words)
            line = ""


def smaller(text):
    for pattern, short in SMALLER.items():
        text = re.sub(pattern, short, text)
    return text


def words_of(line):
    """The words after each `hpctrain` in a line, without variables of the shell."""
    words = [word for word in shlex.split(line) if "$" not in word]
    found = [i for i, word in enumerate(words) if word == "hpctrain" and words[0] != "pip"]
    return [words[i + 1 :] for i in found]


def write_files(page):
    """Write the files that a page shows: by the name in their first line, or functions as mine.py
    and mynets.py.
    """
    functions = ""
    for kind, block in BLOCK.findall(page.read_text()):
        if kind in ("python", "toml") and (named := re.match(r"# (\w+\.(py|toml))\n", block)):
            Path(named[1]).write_text(smaller(block))
        elif kind in ("", "python") and re.search("^(def|class) ", block, re.MULTILINE):
            with contextlib.suppress(ImportError, NameError):
                exec(block, {})
                functions += block
    for name in ("mine.py", "mynets.py"):
        if functions and not Path(name).exists():
            Path(name).write_text(functions)


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """The folder of a user: photographs of three classes, arrays, a network."""
    rng = np.random.default_rng(0)
    labels = []
    for number in range(42):
        file = Path(f"photos/{('daisy', 'rose', 'tulip')[number % 3]}/{number}.jpg")
        labels.append((file.relative_to("photos"), file.parent.name))
        for path in (file, Path(f"new_photos/{number}.jpg"))[: 2 if number < 3 else 1]:
            (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
            pixels = rng.integers(0, 255, (48, 56, 3), dtype=np.uint8)
            Image.fromarray(pixels).save(tmp_path / path)
        stack = Path(f"stacks/{file.parent.name}/{number}.tif")
        (tmp_path / stack).parent.mkdir(parents=True, exist_ok=True)
        pages = [Image.fromarray(rng.integers(0, 4096, (24, 24), dtype=np.uint16)) for _ in "ab"]
        pages[0].save(tmp_path / stack, save_all=True, append_images=pages[1:])
        scene = tmp_path / f"scenes/{file.parent.name}"
        scene.mkdir(parents=True, exist_ok=True)
        if number < 30:
            np.save(scene / f"{number}.npy", rng.integers(-99, 999, (256, 300), dtype=np.int16))
    with tarfile.open(tmp_path / "photos.tgz", "w:gz") as archive:
        archive.add(tmp_path / "photos", "photos")
    with open(tmp_path / "labels.csv", "w", newline="") as file:
        csv.writer(file).writerows([("path", "label"), *labels])
    with open(tmp_path / "patients.csv", "w", newline="") as file:
        rows = [(f"photos/{path}", label, 40.5, "") for path, label in labels]
        rows[0] = (rows[0][0], "daisy;?rose", 39, 70)
        csv.writer(file).writerows([("path", "labels", "age", "mass"), *rows])
    arrays = {}
    for name, count in {"train": 80, "test": 20}.items():
        images = rng.integers(0, 255, (count, 28, 28), dtype=np.uint8)
        arrays |= {f"x_{name}": images, f"y_{name}": np.arange(count, dtype=np.uint8) % 10}
        with h5py.File(tmp_path / f"slides_{name}.h5", "w") as file:
            file.create_dataset("x", data=np.repeat(images[..., None], 3, 3), compression="gzip")
            file["y"] = np.arange(count) % 2
    np.savez(tmp_path / "mnist.npz", **arrays)
    (tmp_path / "page_net.py").write_text(NETWORK)
    (tmp_path / "scripts").symlink_to(ROOT / "scripts")
    job().ready()  # before it can start in this folder, which goes if the test passes
    monkeypatch.chdir(tmp_path)
    yield tmp_path
    on_ranks(1, forget, folder=tmp_path)


def forget(comm, folder):
    """What the functions of a page left in a rank."""
    sys.path[:] = [place for place in sys.path if place != str(folder)]
    for name in ("mine", "mynets", "page_net"):
        sys.modules.pop(name, None)


def prepare_set(pattern, settings):
    """Make HDF5 files that a pattern stands for, with --layout HWC of one sample each."""
    images, labels = draw_images(np.random.default_rng(0), 60, (40, 40, 3), 3)
    is_sample = settings.layout == "HWC"
    for row in range(0, 60, 1 if is_sample else 6):
        path = Path(pattern.replace("**", "folder").replace("*", str(row)))
        path.parent.mkdir(parents=True, exist_ok=True)
        rows = row if is_sample else slice(row, row + 6)
        with h5py.File(path, "w") as file:
            file[settings.images] = images[rows]
            file[settings.labels] = labels[rows]


def prepare(name, settings):
    """Make what a command names, in the current folder, if nothing made it."""
    data = getattr(settings, "data", None) or ""
    shape = (28, 28, 1) if re.match("digits|mnist", data) else (40, 40, 3)
    if "*" in data:
        prepare_set(data, settings)
    elif data and not Path(data).exists() and getattr(settings, "images", None):
        with h5py.File(data, "w") as file:
            for split in ("train", "test") if "{split}" in settings.images else ("",):
                images, labels = draw_images(np.random.default_rng(0), 60, shape, 3)
                file[settings.images.format(split=split)] = images
                if settings.task == "multilabel":
                    labels = np.stack([labels % 2, labels % 3 == 0], axis=1)
                for number, target in enumerate(settings.targets or [settings.labels]):
                    file[target.format(split=split)] = labels + number
    elif data not in ("", "shapes") and not Path(data).exists():
        make_pack(Path(data), ROWS, shape, 3)
        if getattr(settings, "task", "") == "multilabel":
            entries = draw_entries(np.random.default_rng(0), 60, shape)[:2]
            splits = dict.fromkeys(("train", "validation", "test"), entries)
            hp.write_pack(data, splits, ["a", "b", "c"], overwrite=True)
    init = getattr(settings, "init", None) or ""
    if init.endswith(".pth") and not Path(init).exists():
        exec(NETWORK, made := {})
        torch.save(made["resnet"]((40, 40, 3), 1000).state_dict(), init)
    if name == "train":
        shutil.rmtree(f"runs/{settings.run}", ignore_errors=True)
        return
    named = [getattr(settings, field, None) for field in ("run", "first", "second")]
    if name == "pack":
        return
    for run_name in filter(None, [*named, *getattr(settings, "targets", ()), init]):
        if "." not in run_name and not Path("runs", run_name).exists():
            line = "--data photos.h5 --model page_net:resnet --epochs 1 --run"
            prepare("train", parse([*shlex.split(line), run_name])[1])
            assert command(1, *shlex.split(line), run_name, cwd=Path.cwd()).code == 0


def run_hpctrain(line):
    """Run one command of hpctrain; what it promised to write must be there."""
    words = words_of(line)[0]
    name, settings = parse(words)
    if name == "train" and not {"--model", "denoise"} & {*words}:
        words += ["--model", "page_net:resnet"]
    if name == "train" and "--epochs" not in words:
        words += ["--epochs", "1"]
    for each in words_of(line):  # of supervise also the command that it launches
        prepare(*parse(each))
    launches = name in ("supervise", "watch")
    ended = alone(*words) if launches else command(1, *words, cwd=Path.cwd())
    assert ended.code == 0, line + "\n" + ended.err
    if written := getattr(settings, "output", None):
        assert Path(written).exists(), line
    if name == "train" and settings.run and not settings.dry_run:
        assert Path("runs", settings.run, "model.safetensors").exists(), line


def test_every_command_parses(monkeypatch):
    monkeypatch.chdir(ROOT)  # for --config scripts/recipes/...
    found = [words for page in PAGES for line in commands(page) for words in words_of(line)]
    for words in found:
        parse(words)
    assert len(found) > 40


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("page", RUN, ids=lambda page: page.stem)
def test_the_commands_of_a_page_run(page, folder):
    write_files(page)
    for line in commands(page):
        if any(re.search(pattern, line) for pattern in NOT_RUN):
            continue
        line = smaller(line)
        words = shlex.split(line)
        if words_of(line):
            run_hpctrain(line)
        elif line.startswith("python -m scripts."):
            done = run([sys.executable, *words[1:]], cwd=ROOT)
            assert done.returncode == 0, line + done.stderr
        else:
            assert re.fullmatch(r"python \w+\.py", line), f"run, or say in NOT_RUN why not: {line}"
            run_program(1, folder / words[1])
