"""Where networks compute: cores, GPUs, steps of a Slurm job."""

import os
import subprocess
import sys

import pytest

from hpctrain import launch
from hpctrain.config import SweepConfig
from hpctrain.errors import UsageError
from hpctrain.sweep.machine import Slot, find_machine, make_slots, step_words
from tests.support.launch import Job


def test_slots_share_no_core_and_no_gpu():
    slots = make_slots(None, 2, range(10), [])
    assert [slot.cores for slot in slots] == [(0, 1), (2, 3), (4, 5), (6, 7), (8, 9)]
    slots = make_slots(3, 1, range(8), ["0", "1", "2", "3"])
    assert [slot.gpus for slot in slots] == [("0",), ("1",), ("2", "3")]
    assert sorted(core for slot in slots for core in slot.cores) == list(range(8))
    assert len(make_slots(None, 2, range(8), ["0", "1", "2", "3"])) == 2
    assert len(make_slots(None, 16, range(8), [])) == 1


def test_more_slots_than_there_is_share():
    slots = make_slots(3, 1, range(2), ["a", "b"])
    assert [slot.cores for slot in slots] == [(), (), ()]
    assert [slot.gpus for slot in slots] == [("a",), ("b",), ("a",)]
    assert make_slots(2, 4, range(2), [])[1].cores == (1,)


def test_places_for_readers():
    assert str(Slot(1, (0, 1, 2, 5))) == "cores 0-2, 5"
    assert str(Slot(1, (), ("0", "1"))) == "GPU 0, 1"
    assert "CUDA_VISIBLE_DEVICES" not in Slot(1, (3,)).environment()
    assert Slot(1, (3,), ("0", "1")).environment()["CUDA_VISIBLE_DEVICES"] == "0,1"


def test_gpus_count_unless_no_network_wants_them(monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3,5")
    monkeypatch.delenv("SLURM_JOB_ID", raising=False)
    settings = SweepConfig(file="x.toml")
    assert [slot.gpus for slot in find_machine(settings, True).slots] == [("3",), ("5",)]
    assert all(slot.gpus == () for slot in find_machine(settings, False).slots)


def test_tasks_of_an_allocation():
    for env, tasks in ({"SLURM_TASKS_PER_NODE": "2(x3),1"}, 7), ({"SLURM_NTASKS": "5"}, 5), ({}, 1):
        assert step_words(1, env)[1] == tasks


@pytest.mark.parametrize(
    ("ranks", "tasks", "slots", "nodes"),
    [(2, "2(x3),1", 3, 1), (1, "2(x3),1", 7, 1), (4, "2(x4)", 2, 2), (3, "4(x2)", 2, 1)],
)
def test_steps_of_an_allocation(ranks, tasks, slots, nodes):
    words, count = step_words(ranks, {"SLURM_TASKS_PER_NODE": tasks})
    assert count == slots
    assert {"--exact", f"--nodes={nodes}", f"--ntasks={ranks}", "--mpi=pmix"} <= set(words)
    assert not any(word.startswith(("--mem", "--gpus")) for word in words)


def test_steps_share_memory_and_gpus_of_an_allocation():
    env = {"SLURM_TASKS_PER_NODE": "4", "SLURM_MEM_PER_NODE": "8000", "SLURM_GPUS": "4"}
    words, _ = step_words(2, {**env, "SLURM_CPUS_PER_TASK": "3", "HPCTRAIN_PMI": "pmi2"})
    assert {"--mem=4000M", "--gpus-per-task=1", "--cpus-per-task=3", "--mpi=pmi2"} <= set(words)
    with pytest.raises(UsageError, match="--ranks-per-network 5: the allocation has 4 tasks"):
        step_words(5, env)


def test_a_step_inherits_no_request_for_gpus():
    """A step that asks for all GPUs of the job keeps all others waiting."""
    env = {"SLURM_TASKS_PER_NODE": "2", "SLURM_GPUS_PER_NODE": "2", "SLURM_GPUS_ON_NODE": "2"}
    env |= {"SLURM_NTASKS_PER_GPU": "1", "SLURM_CPUS_PER_GPU": "3"}
    words, _ = step_words(1, env)
    assert {"--gpus-per-task=1", "--cpus-per-task=3"} <= set(words)
    program = [*words[: words.index("srun")], "env"]
    left = subprocess.run(program, env={**os.environ, **env}, capture_output=True, text=True)
    names = {line.partition("=")[0] for line in left.stdout.splitlines()}
    assert set(env) & names == {"SLURM_TASKS_PER_NODE", "SLURM_GPUS_ON_NODE"}
    assert step_words(1, {"SLURM_TASKS_PER_NODE": "2"})[0][0] == "srun"


def test_a_job_has_its_cores_and_dies_with_us(tmp_path):
    core = min(os.sched_getaffinity(0))
    program = "import os, time; print(*os.sched_getaffinity(0), flush=True); time.sleep(60)"
    script = (
        "import sys, time; from pathlib import Path; from hpctrain import launch;"
        f"launch.start([sys.executable, '-c', {program!r}], Path('log'), launch.environment(),"
        f" ({core},)); time.sleep(60)"
    )
    job = Job([sys.executable, "-c", script], cwd=tmp_path)
    try:
        while not (tmp_path / "log").exists() or not (tmp_path / "log").read_text():
            assert job.poll() is None
        assert (tmp_path / "log").read_text() == f"{core}\n"
        job.kill()
        job.wait()
        for _ in range(200):
            if not job.members():
                break
            subprocess.run(["sleep", "0.05"], check=True)
        assert job.members() == []
    finally:
        job.end()


def test_the_telling_line_of_a_log():
    tail = "-----\nmpirun noticed\n"
    assert launch.last_error_line(f"a\nValueError: x\n  at\n{tail}") == "ValueError: x"
    assert launch.last_error_line(f"hpctrain: no\n{tail}") == "hpctrain: no"
    assert launch.last_error_line("rank 1 exited on signal 9 (Killed)\n-----\n") == (
        "rank 1 exited on signal 9 (Killed)"
    )
    assert launch.last_error_line("a\nb\n---\n") == "b"
    assert launch.last_error_line("") == "nothing printed"
