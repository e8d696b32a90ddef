"""Programs that import hpctrain: of README.md and docs/python.md; what ends all of their ranks."""

from __future__ import annotations

import json
import re
import sys

import pytest
from PIL import Image

from tests.support.launch import ROOT, run, run_mpi
from tests.support.packs import make_pack
from tests.support.pictures import picture
from tests.support.programs import run_program

ROWS = {"train": 40, "validation": 10, "test": 16}
ALONE = {"OMP_NUM_THREADS": "1"}


SMALLER = {'"resnet18"': '"digits"', '"epochs": 8': '"epochs": 2', "n_trials=6": "n_trials=3"}


LOOP = """
totals = message.totals()
bits = comm.allgather(message.weights.detach().numpy().tobytes())
assert len(set(bits)) == 1, "ranks hold different weights"
print("found", epoch + 1, step + 1, not totals.skipped)
"""


@pytest.mark.parametrize("ranks", [1, 3])
def test_the_loop_of_the_readme_runs_and_learns(tmp_path, ranks):
    (tmp_path / "data").mkdir()
    make_pack(tmp_path / "data/digits.h5", {"train": 401})
    page = (ROOT / "README.md").read_text()
    (program,) = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    (tmp_path / "loop.py").write_text(program + LOOP)
    printed = run_program(ranks, tmp_path / "loop.py")
    assert [text.splitlines()[-1] for text in printed] == ["found 2 4 True"] * ranks
    epochs = re.findall(r"^epoch (\d+): loss (\S+)$", printed[0], re.MULTILINE)
    assert [number for number, _ in epochs] == ["1", "2"]
    assert float(epochs[1][1]) < 0.5, "the network did not learn: chance is 2.3"


def blocks():
    """The Python blocks of docs/python.md as one program; those with a file's name by that."""
    text = (ROOT / "docs/python.md").read_text()
    for given, short in SMALLER.items():
        assert given in text
        text = text.replace(given, short)
    found = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    apart = {m[1]: block for block in found if (m := re.match(r"# (\w+\.py)", block))}
    return "".join(block for block in found if block not in apart.values()), apart


@pytest.fixture
def place(tmp_path):
    """A folder with the files that the page names."""
    make_pack(tmp_path / "photos.h5", ROWS, (32, 32, 3), 3)
    (tmp_path / "new_photos").mkdir()
    for number, name in enumerate("ab"):
        Image.fromarray(picture(number, 40, 30)).save(tmp_path / f"new_photos/{name}.png")
    return tmp_path


def test_the_programs_of_the_page_run(place):
    program, apart = blocks()
    (place / "page.py").write_text(program)
    (printed,) = run_program(1, place / "page.py")
    assert "runs/first done" in printed and (place / "tested.json").is_file()
    (place / "program.py").write_text(apart["program.py"])
    run_program(2, place / "program.py")
    assert (place / "runs/on-four/model.safetensors").is_file()


@pytest.mark.parametrize(
    ("name", "package", "printed"),
    [("search.py", "optuna", " {'lr': 0."), ("live.py", "IPython", "Figure(640x480)\n" * 5)],
)
def test_the_programs_of_on_evaluation_run(place, name, package, printed):
    pytest.importorskip(package)
    pytest.importorskip("matplotlib")
    (place / name).write_text(blocks()[1][name])
    (found,) = run_program(1, place / name, MPLBACKEND="agg")
    assert printed in found


def test_the_notebook_runs(tmp_path):
    """Its cells one after another, over fewer digits; no output is stored in it."""
    pytest.importorskip("matplotlib")
    cells = json.loads((ROOT / "docs/example.ipynb").read_text())["cells"]
    code = [cell for cell in cells if cell["cell_type"] == "code"]
    assert len(code) > 5 and not any(c["outputs"] or c["execution_count"] for c in code)
    (tmp_path / "data").mkdir()
    rows = {"train": 256, "test": 50, "unseen": 50}
    make_pack(tmp_path / "data/digits.h5", rows)
    program = ["".join(cell["source"]) for cell in code]
    program += ["print(len(plt.get_fignums()), result.status)", "plt.close('all')"]
    (tmp_path / "cells.py").write_text("\n".join(program))
    (printed,) = run_program(1, tmp_path / "cells.py", MPLBACKEND="agg")
    assert printed.splitlines()[-1] == "3 done"


OWN = """
import sys
import numpy as np
import torch
import hpctrain as hp

def tiny(image_shape, classes):
    return torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(32 * 32 * 3, classes))

"""
TRAIN = """
given = {"data": "photos.h5", "model": "__main__:tiny", "progress": "none"}
hp.train(**given, epochs=1, batch_size=16, run="own")
try:
    hp.load("own")
except hp.UsageError as error:
    print(error)
"""
LOAD = """
network = hp.load("own", trust_code=True)
answers = network.predict(np.zeros((3, 50, 28, 3), np.uint8))
assert len(hp.history("own").steps["loss"]) == 3 and network.config.epochs == 1
print(answers["prediction"].shape, {"mpi4py", "mpi4py.MPI", "h5py"} & {*sys.modules})
"""


def test_a_network_of_a_notebook_is_loaded_without_mpi(place):
    (place / "train_it.py").write_text(OWN + TRAIN)
    (place / "load_it.py").write_text(OWN + LOAD)
    (printed,) = run_program(1, place / "train_it.py")
    assert "names __main__:tiny: " in printed and "trust_code=True" in printed
    done = run([sys.executable, "load_it.py"], cwd=place, timeout=100)
    resized = "of 3 images: 3 resized, from another size than those of the training\n"
    assert (done.stdout, done.stderr) == ("(3,) set()\n", resized)


FAILS = """
import hpctrain as hp

comm = hp.start_mpi()
try:
    hp.train(data="nowhere.h5")
except hp.UsageError as error:
    print("told", comm.rank, error, flush=True)

def f(record):
    raise ValueError("only here")

hp.train(data="photos.h5", model="digits", epochs=1, progress="none", on_evaluation=f)
print("not reached")
"""


def test_an_error_of_one_rank_ends_all(place):
    """A mistake of all ranks is raised on all, and the program goes on."""
    (place / "fails.py").write_text(FAILS)
    done = run_mpi(2, ["fails.py"], cwd=place, env=ALONE, timeout=100)
    assert done.returncode == 1, done.stderr
    assert sorted(re.findall(r"told (\d) ", done.stdout)) == ["0", "1"]
    assert "ValueError: only here" in done.stderr and "not reached" not in done.stdout


CALLS = """
import time

import hpctrain as hp

if hp.start_mpi().rank == 0:
    hp.evaluate("a", hang_timeout="2s")
time.sleep(100)  # in MPI_Finalize, Open MPI 5.0 sometimes does not end it after an abort
"""


def test_a_call_that_one_rank_does_not_make_ends_all(tmp_path):
    (tmp_path / "calls.py").write_text(CALLS)
    done = run_mpi(2, ["calls.py"], cwd=tmp_path, timeout=100)
    assert done.returncode == 1, done.stderr
    assert "waiting for all in hpctrain.evaluate" in done.stderr
