"""The batch script of a sweep, run by bash with stand-ins for what Slurm brings."""

from __future__ import annotations

import os
import subprocess

import pytest

from hpctrain.config import SweepConfig
from hpctrain.sweep import array
from hpctrain.sweep.file import read_networks


@pytest.mark.parametrize(("task", "model"), [(1, ""), (2, " --model mynets:net")])
def test_a_task_names_the_network_that_is_imported(tmp_path, monkeypatch, task, model):
    file = tmp_path / "sweep.toml"
    file.write_text('[[variant]]\nseed = 1\n[[variant]]\nseed = 2\nmodel = "mynets:net"\n')
    networks = read_networks(file).all
    monkeypatch.setattr(array, "python_program", lambda: ["echo", "hpctrain"])
    script = array.write_script(SweepConfig(), tmp_path, networks)
    settings = tmp_path / f"{networks[task - 1].name}.toml"
    settings.touch()
    (tmp_path / "srun").write_text('#!/bin/sh\necho "$@"\n')
    (tmp_path / "srun").chmod(0o755)
    own = {"PATH": f"{tmp_path}:{os.environ['PATH']}", "SLURM_ARRAY_TASK_ID": str(task)}
    subprocess.run(["bash", script], env={**os.environ, **own}, check=True, timeout=60)
    words = settings.with_suffix(".log").read_text().strip()
    assert words.endswith(f" echo hpctrain train --config {settings}{model}")
