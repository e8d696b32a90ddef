"""The start of a rank: modules, file operations. On a shared file system each one counts."""

from __future__ import annotations

import gc
import inspect
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from hpctrain.launch import mpirun
from hpctrain.quick_imports import quick_imports
from tests.support.launch import environment, run
from tests.support.packs import make_pack

TRAIN = ["--model", "digits", "--epochs", "1", "--batch-size", "8", "--run", "a"]
TRAIN += ["--deterministic", "--progress", "none"]  # as on all ranks but the first
NEEDS_STRACE = pytest.mark.skipif(shutil.which("strace") is None, reason="no strace")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("start")
    make_pack(folder / "a.h5", {"train": 16, "validation": 8, "test": 8}, (8, 8, 1), 2)
    return folder


def file_operations(command: list[str], folder: Path) -> list[str]:
    """The system calls of a command that name a file, traced by strace."""
    trace = folder / "trace"
    shutil.rmtree(folder / "runs", ignore_errors=True)
    words = ["strace", "-f", "-qq", "-e", "signal=none", "-e", "trace=%file", "-o", str(trace)]
    done = subprocess.run(
        [*words, *command], cwd=folder, env=environment(), capture_output=True, timeout=200
    )
    assert done.returncode == 0, done.stderr
    return [line for line in trace.read_text().splitlines() if '"' in line and '""' not in line]


@pytest.mark.parametrize("optimizer", ["sgdm", "adamw"])
def test_training_imports_neither_the_compiler_nor_what_draws(folder, optimizer):
    """torch's compiler takes longer than torch itself and reads 1,000 files more; Pillow and rich
    are for packs of JPEG files and for terminals.
    """
    words = ["train", "--data", "a.h5", *TRAIN, "--optimizer", optimizer, "--clip-norm", "1"]
    unused = {"torch._dynamo", "torch._inductor", "sympy", "PIL", "rich"}
    code = f"import sys; from hpctrain.cli import main; code = main({words})\n"
    code += f"print('seen:', {unused} & set(sys.modules), code, len(sys.modules))"
    shutil.rmtree(folder / "runs", ignore_errors=True)
    done = run([sys.executable, "-c", code], cwd=folder)
    seen = re.fullmatch(r"seen: set\(\) 0 (\d+)", done.stdout.splitlines()[-1])
    assert seen, done.stdout + done.stderr
    assert int(seen[1]) < 1350


@NEEDS_STRACE
def test_a_run_takes_few_file_operations(folder):
    """9,200 from the start to the end of a small run, of which torch 4,900."""
    command = [sys.executable, "-m", "hpctrain", "--data", "a.h5", *TRAIN]
    assert len(file_operations(command, folder)) < 10_000


@NEEDS_STRACE
def test_modules_are_not_looked_for_in_the_current_folder(folder):
    """But for those that are imported before the first line of hpctrain runs."""
    command = [sys.executable, "-m", "hpctrain", "--data", "a.h5", *TRAIN, "--dry-run"]
    own = [line for line in file_operations(command, folder) if f'"{folder}"' in line]
    assert len(own) <= 80, "150 more without the line in __main__.py"


@NEEDS_STRACE
def test_a_rank_makes_few_file_operations_in_the_run_folder(folder):
    """It opens its stack file and the splits of the pack; a heartbeat takes two calls."""
    shutil.rmtree(folder / "runs", ignore_errors=True)
    script = folder / "rank.sh"
    trace = f"strace -f -qq -e signal=none -e trace=%file -o {folder}/trace.$RANK"
    script.write_text(f'#!/bin/sh\nRANK=$OMPI_COMM_WORLD_RANK$PMI_RANK\nexec {trace} "$@"\n')
    script.chmod(0o755)
    words = [str(script), sys.executable, "-m", "hpctrain", "--data", "a.h5", *TRAIN]
    done = run([mpirun(), "-n", "2", *words], 100, cwd=folder)
    assert done.returncode == 0, done.stderr
    lines = (folder / "trace.1").read_text().splitlines()
    named = [line for line in lines if '"runs' in line or "/a.h5" in line]
    beats = [line for line in named if "/.1.json." in line]
    rest = [re.findall(r"(\w+)\(.*[/.](\w+)\"", line)[0] for line in named if line not in beats]
    at_end = [("newfstatat", "stack"), ("unlink", "stack"), ("unlink", "json")]
    assert rest == [("openat", "h5"), ("openat", "stack"), *[("openat", "h5")] * 2, *at_end]
    assert beats and len(beats) % 2 == 0


def test_modules_in_the_current_folder_come_first_for_functions_of_the_user(folder):
    """As under `python -m`: here before a package of the same name on PYTHONPATH."""
    other = folder / "other"
    for place, text in ((folder, "here"), (other, "elsewhere")):
        place.mkdir(exist_ok=True)
        (place / "own_net.py").write_text(f"raise ValueError('the one {text}')\n")
    path = os.pathsep.join([str(other), environment()["PYTHONPATH"]])
    words = ["-m", "hpctrain", "--data", "a.h5", "--model", "own_net:net"]
    done = run([sys.executable, *words], env={"PYTHONPATH": path}, cwd=folder)
    assert done.returncode == 2
    assert "the one here" in done.stderr


def test_quick_imports_restores_what_it_replaces():
    before = inspect.getmodule, inspect.getframeinfo
    assert gc.isenabled()
    with pytest.raises(KeyError), quick_imports():
        assert not gc.isenabled()
        assert inspect.getmodule(inspect.currentframe()) is sys.modules[__name__]
        assert inspect.getmodule(pytest.raises).__name__.startswith("_pytest")
        assert inspect.getframeinfo(inspect.currentframe()).code_context is None
        raise KeyError
    assert (inspect.getmodule, inspect.getframeinfo) == before
    assert gc.isenabled()
