"""``hpctrain bundle``, with a small environment; test_slurm.py tries it on a real Slurm."""

from __future__ import annotations

import os
import shlex
import shutil
import signal
import subprocess
import sys
import tarfile
import time
from pathlib import Path

import pytest

from hpctrain.bundle import ON_NODE
from hpctrain.launch import mpirun
from tests.launch import ROOT, environment

SHOW = "import sys, hpctrain; print(sys.prefix, sys.base_prefix, hpctrain.__file__)"


class Site:
    """A shared folder with an environment and archives, and the disk of a node."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.disk = folder, folder / "disk"
        self.venv = folder / "venv"
        self.disk.mkdir()
        base = Path(sys.base_prefix) / "bin" / "python3"
        subprocess.run([base, "-m", "venv", "--without-pip", self.venv], check=True)
        self.packages = next(self.venv.glob("lib/python*/site-packages"))
        (self.packages / "own.py").write_text("number = 1\n")
        (self.packages / "own" / "include").mkdir(parents=True)
        (self.packages / "own" / "include" / "own.h").write_text("int number;\n")
        (self.venv / "bin" / "tool").write_text(f"#!{self.venv}/bin/python3\nprint('a tool')\n")
        (self.venv / "bin" / "tool").chmod(0o755)
        (self.packages / "__editable__.hpctrain-0.1.0.pth").write_text(str(ROOT))
        self.env = environment()
        for name in ("SLURM_JOB_ID", "LOCAL_DISK", "VIRTUAL_ENV", "PYTHONPATH"):
            self.env.pop(name, None)
        self.env["PATH"] = f"{self.venv}/bin:{self.env['PATH']}"

    def script(self, rest: str, words: str = "", **env: str) -> subprocess.CompletedProcess[str]:
        """Run a shell script that uses copies of Python after its first line."""
        command = f"python -m hpctrain bundle --disk {self.disk} --folder archives {words}"
        return subprocess.run(
            ["bash", "-c", f'eval "$({command})"\n{rest}'],
            cwd=self.folder,
            env={**self.env, **env},
            capture_output=True,
            text=True,
            timeout=100,
        )

    def archives(self) -> list[Path]:
        return sorted((self.folder / "archives").iterdir())


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    return Site(tmp_path_factory.mktemp("site"))


def test_the_rest_of_the_script_uses_the_copy_and_removes_it(site):
    rest = (
        f'python -c "{SHOW}"; python -m hpctrain --version; tool; echo "[$PYTHONPATH]"; which tool'
    )
    done = site.script(rest)
    prefix, base, package = done.stdout.split("\n")[0].split()
    assert {Path(path).parents[i] for i, path in enumerate((prefix, base))}, done.stderr
    for path in (prefix, base, package):
        assert path.startswith(f"{site.disk}/hpctrain-job-python-"), done.stderr
    version, tool, path, place = done.stdout.splitlines()[1:]
    assert (version, tool, path) == ("0.1.0", "a tool", "[]")
    assert place == f"{prefix}/bin/tool"
    assert list(site.disk.iterdir()) == []


@pytest.mark.skipif(shutil.which("strace") is None, reason="no strace")
def test_a_process_reads_nothing_of_the_original(site):
    done = site.script("strace -f -qq -o trace -e trace=%file python -m hpctrain --help")
    assert done.returncode == 0, done.stderr
    trace = (site.folder / "trace").read_text().splitlines()
    assert len(trace) > 300
    shared = (site.venv, Path(sys.base_prefix), ROOT, f'{site.folder}"')
    read = [line for line in trace if any(f'"{path}' in line for path in shared)]
    assert len(read) <= 8, read  # the current folder, in which python -m looks for hpctrain


def test_what_is_beside_hpctrain_on_pythonpath_is_found_last(site):
    """Such as functions of the user in a checkout; other folders stay where they are."""
    show = "import sys; print(sys.path[1] if len(sys.argv) > 1 else '', sys.path[-1])"
    done = site.script(f'python -c "{show}" x', PYTHONPATH=f"/nowhere{os.pathsep}{ROOT}")
    assert done.stdout.split() == ["/nowhere", str(ROOT)], done.stderr


def test_headers_are_links_to_the_original(site):
    rest = 'readlink "$VIRTUAL_ENV"/lib/python*/site-packages/own/include; ls -l "$VIRTUAL_ENV"/bin'
    done = site.script(rest, VIRTUAL_ENV=str(site.venv))
    assert done.stdout.splitlines()[0] == str(site.packages / "own" / "include")
    assert "python3 -> ../../base/bin/python3." in done.stdout


def test_an_archive_is_made_again_when_a_file_changes(site):
    site.script(":")
    (first,) = site.archives()
    made = first.stat().st_mtime_ns
    done = site.script('python -c "import own; print(own.number)"')
    assert done.stdout == "1\n"
    assert "reading" not in done.stderr
    assert site.archives() == [first] and first.stat().st_mtime_ns == made
    (site.packages / "own.py").write_text("number = 2\n")
    done = site.script('python -c "import own; print(own.number)"')
    assert done.stdout == "2\n"
    (second,) = site.archives()
    assert second != first


def test_modules_are_compiled_once_not_by_every_node(site):
    site.script(":")
    with tarfile.open(site.archives()[0]) as tar:
        names = tar.getnames()
    compiled = f"hpctrain/bundle/__pycache__/archive.{sys.implementation.cache_tag}.pyc"
    assert any(name.endswith(compiled) for name in names)
    assert any("site-packages/__pycache__/own." in name for name in names)


def on_node(archive, place, *, queued="", stay="go", key="k"):
    words = ["sh", "-c", ON_NODE, "bundle", *map(str, (archive, place)), key, queued, stay]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    return subprocess.Popen(words, start_new_session=True, **pipes)


@pytest.fixture
def small(tmp_path):
    """An archive of one program, and the place of its copy."""
    shutil.copy(shutil.which("sleep"), tmp_path / "sleep")
    with tarfile.open(tmp_path / "a.tar", "w") as tar:
        tar.add(tmp_path / "sleep", "base/bin/sleep")
    (tmp_path / "disk").mkdir()
    return tmp_path / "a.tar", tmp_path / "disk" / "hpctrain-job-python-7"


def test_half_a_copy_is_never_used(small):
    archive, place = small
    os.mkfifo(archive.with_name("slow.tar"))
    process = on_node(archive.with_name("slow.tar"), place)
    with open(archive.with_name("slow.tar"), "wb") as pipe:
        pipe.write(archive.read_bytes()[:20480])  # two records of tar
        pipe.flush()
        while not list(place.parent.glob("*/base")):
            time.sleep(0.01)
        os.killpg(process.pid, signal.SIGKILL)
        process.communicate()
        assert not place.exists()
    cut = archive.with_name("cut.tar")
    cut.write_bytes(archive.read_bytes()[:5000])
    process = on_node(cut, place)
    out, err = process.communicate(timeout=20)
    assert (process.returncode, out) == (1, "")
    assert "tar" in err and len(err.splitlines()) == 1
    assert not place.exists()
    assert on_node(archive, place, queued="7").communicate(timeout=20) == ("ready\n", "")
    assert (place / "key").read_text() == "k\n"
    assert len(list(place.parent.glob("*part*"))) == 1  # of the killed process; this job's still
    on_node(archive, place, queued="8").communicate(timeout=20)
    assert list(place.parent.glob("*part*")) == []


def test_the_copy_of_an_earlier_life_is_kept_if_it_is_the_same(small):
    archive, place = small
    assert on_node(archive, place).communicate(timeout=20)[0] == "ready\n"
    (place / "mark").touch()
    assert on_node(archive, place).communicate(timeout=20)[0] == "ready\n"
    assert (place / "mark").exists()
    assert on_node(archive, place, key="other").communicate(timeout=20)[0] == "ready\n"
    assert not (place / "mark").exists()


def test_what_killed_jobs_left_is_removed_and_that_of_queued_jobs_stays(small):
    archive, place = small
    for name in ("job-5", "job-python-5", "job-tar-5", "job-part99-5", "job-6", "job-part3-6"):
        (place.parent / f"hpctrain-{name}").mkdir()
    (place.parent / "other-5").mkdir()
    on_node(archive, place, queued="6\n7\n15").communicate(timeout=20)
    left = sorted(folder.name for folder in place.parent.iterdir())
    assert left == ["hpctrain-job-6", "hpctrain-job-part3-6", "hpctrain-job-python-7", "other-5"]
    on_node(archive, place).communicate(timeout=20)  # squeue failed: nothing is known
    assert len(list(place.parent.iterdir())) == 4


def test_at_the_end_of_the_job_the_copy_goes_after_the_last_process_that_uses_it(small):
    archive, place = small
    keeper = on_node(archive, place, stay="stay")
    assert keeper.stdout.readline() == "ready\n"
    user = subprocess.Popen([place / "base/bin/sleep", "60"])
    keeper.send_signal(signal.SIGUSR2)  # a notice to all steps of the job
    time.sleep(0.3)
    assert place.exists() and keeper.poll() is None
    keeper.terminate()
    time.sleep(0.6)
    assert (place / "base/bin/sleep").exists()
    user.kill()
    user.wait()
    keeper.wait(timeout=20)
    assert list(place.parent.iterdir()) == []
    keeper.communicate()


FAKE_SRUN = """#!/bin/bash
echo "$@" >>"$LOG"
while [[ $1 == -* ]]; do [[ $1 == --nodes=* ]] && nodes=${1#*=}; shift; done
for ((i = 0; i < nodes; i++)); do "$@" & echo $! >>"$LOG.pids"; done; wait
"""


@pytest.mark.parametrize("sbcast", ["works", "fails", "missing"])
def test_in_a_job_srun_extracts_and_sbcast_sends_if_it_can(site, tmp_path, sbcast):
    """With stand-ins for both. What srun started is ended as at the end of a job."""
    programs = {"srun": FAKE_SRUN, "squeue": "#!/bin/sh\necho 42\n"}
    if sbcast != "missing":
        code = 'cp "$2" "$3"' if sbcast == "works" else "exit 1"
        programs["sbcast"] = f'#!/bin/sh\necho "sbcast $@" >>"$LOG"; {code}\n'
    for name, text in programs.items():
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(0o755)
    system = tmp_path / "system"  # all commands but Slurm's own sbcast
    system.mkdir()
    for command in (*Path("/usr/bin").iterdir(), *Path("/bin").iterdir()):
        if command.name != "sbcast" and not (system / command.name).exists():
            (system / command.name).symlink_to(command)
    path = os.pathsep.join([str(site.venv / "bin"), str(tmp_path), str(system)])
    job = {"SLURM_JOB_ID": "42", "SLURM_JOB_NUM_NODES": "2", "SLURM_NTASKS_PER_NODE": "4"}
    rest = f'python -c "{SHOW}"; kill $(cat "$LOG.pids")'
    done = site.script(rest, **job, PATH=path, LOG=str(tmp_path / "log"))
    place = f"{site.disk}/hpctrain-job-python-42"
    assert done.stdout.startswith(f"{place}/venv {place}/base {place}/venv/"), done.stderr
    log = (tmp_path / "log").read_text()
    archive = site.archives()[0]
    sent = site.disk / "hpctrain-job-tar-42"
    assert (f"sbcast --force {archive} {sent}" in log) == (sbcast != "missing")
    assert f"bundle {sent if sbcast == 'works' else archive} {place}" in log
    assert "--nodes=2 --ntasks=2 --ntasks-per-node=1" in log
    assert ("sbcast failed; each node reads the archive" in done.stderr) == (sbcast == "fails")
    assert "trap" not in done.stdout
    until = time.monotonic() + 20
    while list(site.disk.iterdir()) and time.monotonic() < until:
        time.sleep(0.1)
    assert list(site.disk.iterdir()) == []


def test_mpirun_extracts_and_removes_on_each_node(site):
    launcher = shlex.quote(f"{mpirun()} --map-by ppr:1:node")
    done = site.script(f'python -c "{SHOW}"', f"--launcher {launcher}")
    assert done.stdout.startswith(f"{site.disk}/hpctrain-job-python-"), done.stderr
    assert list(site.disk.iterdir()) == []


def test_without_room_the_script_goes_on_with_the_original(site, tmp_path):
    (tmp_path / "file").touch()
    done = site.script(f'python -c "{SHOW}"', f"--disk {tmp_path}/file/disk")
    assert done.stdout.split()[0] == str(site.venv)
    assert f"hpctrain: no copy of Python in {tmp_path}/file/disk/" in done.stderr
    assert f"ranks start from {site.venv}" in done.stderr
    assert "Traceback" not in done.stderr
    done = site.script("true", "--launcher 'sh -c false'")
    assert "sh ended with 1" in done.stderr
