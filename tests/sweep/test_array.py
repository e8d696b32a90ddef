"""The batch script of a sweep, run by bash with stand-ins for what Slurm brings."""

from __future__ import annotations

import os
import subprocess

import pytest

from hpctrain.config import SweepConfig
from hpctrain.errors import UsageError
from hpctrain.sweep import machine
from hpctrain.sweep import main as sweep
from hpctrain.sweep.file import read_sweep


def test_the_file_of_another_sweep_imports_nothing(tmp_path, monkeypatch):
    """Named by its path too: who sent the folder must not choose what is imported."""
    monkeypatch.chdir(tmp_path)
    text = '[base]\ndata = "gone.h5"\nmodel = "payload:net"\n[grid]\nlr = [0.1]\n'
    for name in ("got", "own"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "sweep.toml").write_text(text)
    (tmp_path / "got/results.csv").write_text("name,status\n")
    with pytest.raises(UsageError, match="if you trust it, give --model payload:net$"):
        sweep(SweepConfig(file="got/sweep.toml"))
    for own in ({"file": "got/sweep.toml", "model": "payload:net"}, {"file": "own/sweep.toml"}):
        with pytest.raises(UsageError, match=r"gone\.h5"):  # it was allowed to go on
            sweep(SweepConfig(**own))


def test_a_folder_that_is_no_sweep_is_named(tmp_path):
    (tmp_path / "pictures").mkdir()
    for name, message in ("pictures", "no run or sweep 'pictures'"), ("x.toml", "no file x.toml"):
        with pytest.raises(UsageError, match=message):
            sweep(SweepConfig(file=name, runs_dir=str(tmp_path)))
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "progress.jsonl").touch()
    with pytest.raises(UsageError, match="a is a run, not a sweep"):
        sweep(SweepConfig(file="a", runs_dir=str(tmp_path)))


LOSS = " --loss my_losses:focal --metric m:f1"


@pytest.mark.parametrize(("task", "model"), [(1, ""), (2, " --model mynets:net"), (3, LOSS)])
def test_a_task_names_the_functions_that_are_imported(tmp_path, monkeypatch, task, model):
    file = tmp_path / "sweep.toml"
    text = '[[variant]]\nseed = 1\n[[variant]]\nseed = 2\nmodel = "mynets:net"\n'
    file.write_text(f'{text}[[variant]]\nloss = "my_losses:focal"\nmetric = "m:f1"\n')
    networks = read_sweep(file).networks
    monkeypatch.setattr(machine, "python_program", lambda: ["echo", "hpctrain"])
    script = machine.write_array_script(SweepConfig(), tmp_path, networks)
    settings = tmp_path / f"{networks[task - 1].name}.toml"
    settings.touch()
    (tmp_path / "srun").write_text('#!/bin/sh\necho "$@"\n')
    (tmp_path / "srun").chmod(0o755)
    own = {"PATH": f"{tmp_path}:{os.environ['PATH']}", "SLURM_ARRAY_TASK_ID": str(task)}
    subprocess.run(["bash", script], env={**os.environ, **own}, check=True, timeout=60)
    words = settings.with_suffix(".log").read_text().strip()
    assert words.endswith(f" echo hpctrain train --config {settings}{model}")
