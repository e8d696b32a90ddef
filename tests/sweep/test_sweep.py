"""The whole command: what it checks first, and a sweep that is hit in every way and still ends."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
from pathlib import Path

import pytest

from hpctrain.cli import main
from hpctrain.report.record import read_history, read_records
from tests.support.launch import ROOT, Job, run_cli
from tests.support.packs import make_pack
from tests.support.wait import wait_for
from tests.sweep.sweeps import statuses

BASE = """
[base]
data = "pack.h5"
model = "tests.support.nets:slow"
epochs = 12
batch_size = 16
shards = 2
deterministic = true
device = "cpu"
checkpoint_every = "5steps"
"""
TWO = BASE + "[grid]\nseed = [1, 2]\n"
OWN = ("--trust-code",)
NAMES = ("01-seed=1", "02-seed=2")


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    folder = tmp_path_factory.mktemp("sweep")
    make_pack(folder / "pack.h5", {"train": 101, "validation": 13, "test": 23})
    (folder / "two.toml").write_text(TWO)
    return folder


def ranks_of(job, name):
    """Processes of the job that are ranks of this network."""
    found = []
    for pid in job.members():
        with contextlib.suppress(OSError):
            words = Path(f"/proc/{pid}/cmdline").read_bytes().decode().split("\0")
            if "python" in words[0] and any(name in word for word in words):
                found.append(pid)
    return found


def sweep_job(place, *words, env=None):
    return Job([sys.executable, "-m", "hpctrain", "sweep", *words], cwd=place, env=env)


def digest(folder):
    return list(read_records(folder))[-1]["digest"]


@pytest.fixture
def here(place, monkeypatch):
    """The same folder, for commands within this process, as if no launcher had started it."""
    monkeypatch.chdir(place)
    for name in [*os.environ]:
        if name.startswith(("OMPI_", "PMI", "SLURM_", "HYDI_", "MPI_LOCAL")):
            monkeypatch.delenv(name)
    return place


@pytest.fixture
def call(here, capsys):
    """A function that calls hpctrain in this process: its exit code, what it prints."""

    def call(*words):
        capsys.readouterr()
        return main([*words]), *capsys.readouterr()

    return call


@pytest.fixture(scope="module")
def hit(place):
    """A sweep of two networks: a rank of one is killed, the driver gets SIGTERM, and the same
    command with --retry ends it.
    """
    words = ["two.toml", *OWN, "--run", "hit", "--ranks-per-network", "2", "--slots", "2"]
    sweep = place / "runs" / "hit"
    job = sweep_job(place, *words, env={"HPCTRAIN_TEST_PACE": "0.25"})
    try:
        wait_for(lambda: all(read_history(sweep / name).last_step >= 6 for name in NAMES))
        victims = ranks_of(job, NAMES[1])
        assert len(victims) == 2
        os.kill(victims[-1], signal.SIGKILL)
        wait_for(lambda: statuses(sweep)["02"] == "failed")
        failed = (sweep / "results.csv").read_text()
        second = run_cli(["sweep", *words], cwd=place)
        job.send_signal(signal.SIGTERM)
        out, err = job.communicate(timeout=60)
    finally:
        job.end()
    between = statuses(sweep), list(read_records(sweep / NAMES[0]))[-1]["status"]
    again = run_cli(["sweep", *words, "--retry"], timeout=100, cwd=place)
    assert again.returncode == 0, again.stdout + again.stderr
    return {
        "code": job.returncode,
        "printed": out + err,
        "failed": failed,
        "second": second,
        "between": between,
        "again": again.stdout,
    }


def test_a_killed_rank_fails_its_network_alone_and_a_notice_saves_the_other(place, hit):
    assert "signal 9" in hit["failed"]
    assert hit["code"] == 75
    assert hit["between"] == ({"01": "unfinished", "02": "failed"}, "preempted")
    assert "SIGTERM: the networks save and end" in hit["printed"]
    assert (hit["second"].returncode, hit["second"].stdout) == (2, "")  # one driver at a time
    assert "is at work" in hit["second"].stderr


def test_what_was_hit_ends_with_the_bits_of_undisturbed_runs(place, hit, call):
    sweep = place / "runs" / "hit"
    assert statuses(sweep) == {"01": "done", "02": "done"}
    assert hit["again"].count("begins in slot") == 2
    digests = []
    for number, name in enumerate(NAMES, start=1):
        settings = ["--config", f"runs/hit/{name}.toml", "--runs-dir", "runs", *OWN]
        code, _, error = call("train", *settings, "--run", f"whole{number}")
        assert code == 0, error
        code, printed, _ = call("compare", f"whole{number}", f"hit/{name}")
        assert printed.endswith("equal\n") and code == 0, printed
        digests.append(digest(sweep / name))
        assert digests[-1] == digest(place / f"runs/whole{number}")
        assert "going on after step" in (sweep / name / "progress.jsonl").read_text()
    assert digests[0] != digests[1]


def test_the_best_network_classifies_and_predicts(hit, call):
    code, printed, error = call("evaluate", "hit", "--best")
    assert (code, printed) == (2, "")
    assert "names tests.support.nets:slow" in error and "--trust-code" in error
    code, printed, error = call("evaluate", "hit", "--best", *OWN)
    assert code == 0, error
    assert "best of runs/hit: 0" in error
    assert "by validation accuracy" in error
    assert "test: 23 images" in printed
    _, printed, error = call("predict", "hit", "--best", "--output", "-", *OWN)
    assert len(printed.splitlines()) >= 24, error
    code, printed, error = call("evaluate", "hit")
    assert (code, printed) == (2, "")
    assert "is a sweep: name one of its runs, or give --best" in error


def test_the_same_command_repeats_nothing(place, hit, call):
    ended = 0, "runs/hit has ended: 2 done\n", ""
    assert call("sweep", "two.toml", "--run", "hit") == ended
    assert call("sweep", "runs/hit") == ended
    (place / "other.toml").write_text(TWO.replace("[1, 2]", "[1, 3]"))
    code, _, error = call("sweep", "other.toml", "--run", "hit")
    assert code == 2
    assert "was begun with another file" in error


def test_a_stopped_sweep_would_go_on(place):
    (place / "long.toml").write_text(BASE.replace("epochs = 12", "epochs = 2000") + "[[variant]]\n")
    job = sweep_job(place, "long.toml", *OWN)
    try:
        wait_for(lambda: [*place.glob("runs/*-sweep/01-base/progress.jsonl")])
        sweep = next((place / "runs").glob("*-sweep"))
        wait_for(lambda: read_history(sweep / "01-base").last_step >= 1)
        done = run_cli(["stop", str(sweep)], cwd=place)
        assert "asked to stop" in done.stdout
        out, err = job.communicate(timeout=60)
        assert job.returncode == 0, err
        assert f"{sweep.relative_to(place)}: 1 stopped" in out
        assert statuses(sweep) == {"01": "stopped"}
        done = run_cli(["sweep", "long.toml", "--dry-run", *OWN], cwd=place)
        line = f"--config {sweep.relative_to(place)}/01-base.toml {' '.join(OWN)}"
        assert line in done.stdout  # it would go on
    finally:
        job.end()


@pytest.mark.parametrize(
    ("text", "words", "message"),
    [
        (TWO + "[[variant]]\nlr = -1.0\n", [], "--lr -1.0"),
        (TWO, [], "bad.toml names tests.support.nets:slow: a function that a file names"),
        (TWO.replace("[grid]", "trust_code = true\n[grid]"), OWN, "trust_code can be given on the"),
        (TWO.replace("pack.h5", "away.h5"), OWN, "--data 'away.h5' is no file"),
        (TWO, ["--slots", "0"], "--slots 0: give 1 or more"),
        (TWO, ["--ranks-per-network", "0"], "--ranks-per-network 0"),
        (TWO, ["--launcher", "srun"], "no Slurm allocation"),
        (TWO, ["--run", "a/b"], "give the name of a folder"),
        (TWO, ["--results", "--run", "none"], "there is no sweep"),
    ],
)
def test_what_is_refused_before_anything_is_launched(here, capsys, text, words, message):
    (here / "bad.toml").write_text(text)
    assert main(["sweep", "bad.toml", "--runs-dir", "none", *words]) == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1
    assert not (here / "none").exists()


def test_a_dry_run_says_what_would_be_done_without_torch_and_mpi(place):
    code = (
        "import sys; from hpctrain.cli import main;"
        "main(['sweep', 'two.toml', '--dry-run', '--slots', '3', '--runs-dir', 'none']);"
        "print({'torch', 'mpi4py'} & set(sys.modules))"
    )
    job = Job([sys.executable, "-c", code], cwd=place, env={"PYTHONPATH": str(ROOT)})
    out, err = job.communicate(timeout=60)
    assert "02-seed=2" in out, err
    assert "2 networks in 3 slots" in out
    assert "mpirun -n 1 " in out
    assert "set()" in out
    assert not (place / "none").exists()
