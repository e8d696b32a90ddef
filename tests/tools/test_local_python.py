"""slurm/local_python.sh with stand-ins for uv and Slurm; test_slurm.py runs it on a real Slurm."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.launch import ROOT, environment
from tests.support.scripts import write_scripts

SCRIPT = ROOT / "slurm" / "local_python.sh"
STANDINS = {  # uv makes an environment of a Python that goes with it; this host is the only node
    "uv": 'cp "$BASE" "$UV_PYTHON_INSTALL_DIR/python3"\n'
    'exec "$UV_PYTHON_INSTALL_DIR/python3" -m venv --without-pip "${@: -1}"',
    "srun": 'while [[ $1 == -* ]]; do shift; done; exec "$@"',
    "sbcast": 'echo "sbcast" >&2; [ "$SBCAST" = works ] && cp "$2" "$3"',
}


@pytest.fixture
def site(tmp_path, monkeypatch):
    """A folder with an archive in it, the local disk, and the environment of a batch script."""
    (tmp_path / "disk").mkdir()
    env = environment({"LOCAL_DISK": str(tmp_path / "disk"), "SLURM_NNODES": "1"})
    env |= {"PATH": write_scripts(tmp_path, **STANDINS), "BASE": os.path.realpath(sys.executable)}
    env |= {"SLURM_JOB_ID": "7", "PYTHONHOME": sys.base_prefix}

    def call(*words: str, **more: str) -> subprocess.CompletedProcess[str]:
        command = [str(SCRIPT), str(tmp_path / "python.tgz"), *words]
        return subprocess.run(command, env=env | more, capture_output=True, text=True, timeout=60)

    install = 'cd "$VIRTUAL_ENV"/lib/python*/site-packages; echo "number = 1" >own.py'
    made = call("bash", "-c", install)
    assert made.returncode == 0, made.stderr
    return tmp_path, call


@pytest.mark.parametrize("name", ["local_python.sh", "chain.sh"])
def test_the_shell_understands_the_script(name):
    subprocess.run(["bash", "-n", ROOT / "slurm" / name], check=True)


@pytest.mark.parametrize("sbcast", ["works", "fails"])
def test_python_starts_from_the_copy_on_the_local_disk(site, sbcast):
    folder, call = site
    done = call(SBCAST=sbcast)
    assert done.returncode == 0 and "sbcast" in done.stderr
    bin_folder = Path(done.stdout.strip())
    assert bin_folder.is_relative_to(folder / "disk")
    assert os.listdir(folder / "disk") == [bin_folder.parts[-3]]  # neither archive nor parts
    show = "import own, sys; print(own.number, sys.prefix, sys._base_executable)"
    words = [bin_folder / "python", "-c", show]
    env = environment({"PYTHONHOME": ""})
    ran = subprocess.run(words, capture_output=True, text=True, env=env)
    place = bin_folder.parents[1]
    assert ran.stdout.split() == ["1", str(place / "venv"), str(place / "base/python3")], ran.stderr
    again = call()
    assert (again.stdout, again.stderr) == (done.stdout, "")  # nothing is sent or extracted


def test_an_archive_cut_short_leaves_nothing_and_the_job_its_own_python(site):
    folder, call = site
    os.truncate(folder / "python.tgz", 5000)
    done = call(SBCAST="works")
    assert done.returncode != 0 and done.stdout == ""
    assert "gzip: stdin: unexpected end of file" in done.stderr
    assert os.listdir(folder / "disk") == []
