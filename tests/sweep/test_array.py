"""A sweep as a job array: --prepare, and slurm/sweep.sbatch with stand-ins for Slurm."""

from __future__ import annotations

import os
import shlex
import subprocess
from pathlib import Path

import pytest

from hpctrain.config import StopConfig, SweepConfig
from hpctrain.errors import UsageError
from hpctrain.stop import main as stop
from hpctrain.sweep import main as sweep
from tests.support.launch import ROOT
from tests.support.packs import make_pack
from tests.support.records import end_line, make_run, run_line


def test_a_folder_that_is_no_sweep_is_named(tmp_path):
    (tmp_path / "pictures").mkdir()
    for name, message in ("pictures", "no run or sweep 'pictures'"), ("x.toml", "no file x.toml"):
        with pytest.raises(UsageError, match=message):
            sweep(SweepConfig(file=name, runs_dir=str(tmp_path)))
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "progress.jsonl").touch()
    with pytest.raises(UsageError, match="a is a run, not a sweep"):
        sweep(SweepConfig(file="a", runs_dir=str(tmp_path)))


@pytest.fixture
def prepared(tmp_path, monkeypatch):
    """A folder in which a sweep of three networks is prepared, and the environment of a task."""
    monkeypatch.chdir(tmp_path)
    make_pack(tmp_path / "pack.h5", {"train": 31, "test": 9})
    (tmp_path / "s.toml").write_text('[base]\ndata = "pack.h5"\n[grid]\nseed = [1, 2, 3]\n')
    (tmp_path / "bin").mkdir()
    python = f'#!/bin/sh\nprintf "%s\\n" "$@" >"{tmp_path}/called"\n'
    for name, text in {"activate": "", "python": python}.items():
        (tmp_path / "bin" / name).write_text(text)
        (tmp_path / "bin" / name).chmod(0o755)
    own = {"HPCTRAIN_VENV": str(tmp_path), "SLURM_CPUS_PER_TASK": "1", "HPCTRAIN_PMI": "pmi2"}
    return tmp_path, {**os.environ, **own, "PATH": f"{tmp_path}/bin:{os.environ['PATH']}"}


def run_task(env, number, *words):
    """Run the batch script as task `number` of a job array; what it prints."""
    command = ["bash", str(ROOT / "slurm" / "sweep.sbatch"), *words]
    env = {**env, "SLURM_ARRAY_TASK_ID": str(number)}
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize("name", ["first", "a b;$(touch pwned)`touch pwned`"])
def test_a_task_supervises_the_network_of_its_number(prepared, capsys, name):
    folder, env = prepared
    assert sweep(SweepConfig(file="s.toml", run=name, prepare=True)) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == f"runs/{name}: 3 of 3 networks to train"
    assert shlex.split(lines[1]) == ["sbatch", "--array=1-3", "slurm/sweep.sbatch", f"runs/{name}"]
    assert sweep(SweepConfig(file="s.toml", run=name, prepare=True, trust_code=True)) == 0
    assert capsys.readouterr().out == f"{lines[0]}\n{lines[1]} --trust-code\n"
    assert run_task(env, 2, f"runs/{name}", "--epochs", "3") == ""
    called = (folder / "called").read_text().splitlines()
    assert called[:4] == ["-m", "hpctrain", "supervise", "--"] and "--mpi=pmi2" in called
    settings = f"runs/{name}/02-seed=2.toml"
    words = ["python", "-m", "hpctrain", "train", "--config", settings, "--epochs", "3"]
    assert called[-8:] == words and Path(settings).is_file()
    assert not (folder / "pwned").exists()


def test_after_a_request_to_stop_no_task_trains_until_the_sweep_is_prepared_again(prepared, capsys):
    folder, env = prepared
    settings = SweepConfig(file="s.toml", run="a", prepare=True)
    sweep(settings)
    make_run(folder / "runs/a/02-seed=2", run_line(), end_line("done"))
    stop(StopConfig(target="a"))
    assert "queued tasks of a job array will end at once" in capsys.readouterr().out
    assert run_task(env, 1, "runs/a") == "runs/a is asked to stop: network 1 is not trained\n"
    assert not (folder / "called").exists()
    sweep(settings)
    assert "runs/a: 2 of 3 networks to train\nsbatch --array=1,3 " in capsys.readouterr().out
    run_task(env, 1, "runs/a")
    assert (folder / "called").exists()
