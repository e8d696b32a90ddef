"""A sweep of two real networks is hit, goes on, and ends with the bits of undisturbed runs."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
from pathlib import Path

import pytest

from tests.support.launch import Job, run
from tests.support.packs import make_pack
from tests.support.ranks import command
from tests.support.records import FILE, read_strictly, statuses
from tests.support.wait import wait_for

pytestmark = pytest.mark.timeout(300)  # of the first test, which waits for two launches
TWO = """
[base]
data = "pack.h5"
model = "tests.support.nets:Slow"
epochs = 6
batch_size = 16
shards = 2
deterministic = true
device = "cpu"
checkpoint_every = "5steps"
[grid]
seed = [1, 2]
"""
NAMES = ("01-seed=1", "02-seed=2")
WORDS = ["sweep", "two.toml", "--trust-code", "--run", "hit", "--slots", "2"]


def steps_done(folder):
    """How many steps a record tells of; its last line may be half written."""
    with contextlib.suppress(FileNotFoundError):
        return (folder / FILE).read_text().count('"kind": "step"')
    return 0


def ranks_of(job, name):
    """Processes of the job that train this network."""
    found = []
    for pid in job.members():
        with contextlib.suppress(OSError):
            words = Path(f"/proc/{pid}/cmdline").read_bytes().decode().split("\0")
            if "python" in words[0] and any(name in word for word in words):
                found.append(pid)
    return found


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """The folder of the sweep. One of its networks is killed, the other saves at a signal; the
    same command with --retry ends both.
    """
    place = tmp_path_factory.mktemp("sweep")
    make_pack(place / "pack.h5", {"train": 101, "validation": 13, "test": 23})
    (place / "two.toml").write_text(TWO)
    program = [sys.executable, "-m", "hpctrain", *WORDS]
    sweep = place / "runs" / "hit"
    job = Job(program, {"HPCTRAIN_TEST_PACE": "0.25"}, place)
    try:
        wait_for(lambda: all(steps_done(sweep / name) >= 6 for name in NAMES))
        cores = [os.sched_getaffinity(ranks_of(job, name)[0]) for name in NAMES]
        if len(os.sched_getaffinity(0)) > 1:
            assert not cores[0] & cores[1]
        (victim,) = ranks_of(job, NAMES[1])
        os.kill(victim, signal.SIGKILL)
        wait_for(lambda: statuses(sweep)["02"] == "failed")
        assert "signal 9" in (sweep / "results.csv").read_text()
        job.send_signal(signal.SIGTERM)
        out, err = job.communicate(timeout=90)
        assert job.returncode == 75, out + err
    finally:
        job.end()
    assert statuses(sweep) == {"01": "unfinished", "02": "failed"}
    assert read_strictly(sweep / NAMES[0])[-1]["status"] == "preempted"
    again = run([*program, "--retry"], 110, cwd=place)
    assert again.returncode == 0, again.stdout + again.stderr
    return place


def test_what_was_hit_ends_with_the_bits_of_undisturbed_runs(place):
    sweep = place / "runs/hit"
    assert statuses(sweep) == {"01": "done", "02": "done"}
    digests = []
    for number, name in enumerate(NAMES, start=1):
        words = ["--config", f"runs/hit/{name}.toml", "--runs-dir", "runs", "--trust-code"]
        whole = command(2, *words, "--run", f"whole{number}", "--progress", "none", cwd=place)
        assert whole.code == 0, whole.err
        compared = command(1, "compare", f"whole{number}", f"hit/{name}", cwd=place)
        assert compared.code == 0, compared.out
        launches = [record["kind"] for record in read_strictly(sweep / name)].count("run")
        assert launches == 2
        digests.append(read_strictly(sweep / name)[-1]["digest"])
        assert digests[-1] == read_strictly(place / f"runs/whole{number}")[-1]["digest"]
    assert digests[0] != digests[1]


def test_the_best_network_classifies_and_predicts(place):
    own = ["hit", "--best", "--trust-code"]
    tested = command(2, "evaluate", *own, cwd=place)
    assert tested.code == 0 and "best of runs/hit: 0" in tested.err, tested.err
    predicted = command(2, "predict", *own, "--output", "-", cwd=place)
    assert len(predicted.out.splitlines()) == 24, predicted.err
