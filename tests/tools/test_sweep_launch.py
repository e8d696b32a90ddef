"""What a sweep would launch: names and settings of its networks, where they compute, job arrays."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
import tomllib

import pytest

from tests.support.launch import ROOT, run
from tests.support.packs import make_pack
from tests.support.ranks import alone
from tests.support.records import end_line, make_run, run_line
from tests.support.scripts import write_scripts

THREE = "[base]\ndata = 'pack.h5'\n[grid]\nseed = [1, 2, 3]\n"
#: A job of Slurm whose batch script calls the sweep.
JOB = {"SLURM_JOB_ID": "1"}


@pytest.fixture
def place(tmp_path, monkeypatch):
    """The current folder, with a pack."""
    monkeypatch.chdir(tmp_path)
    make_pack(tmp_path / "pack.h5", {"train": 31, "test": 9})
    (tmp_path / "s.toml").write_text(THREE)
    return tmp_path


@pytest.fixture
def dry_run(place, monkeypatch):
    """A function: what --dry-run prints on a machine of so many cores."""

    def show(*words, cores=2, env=None):
        monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(cores)))
        ended = alone("sweep", "s.toml", "--dry-run", *words, env=env)
        assert ended.code == 0, ended.err
        assert not (place / "runs").exists()
        return ended.out

    return show


def prepared(place, text):
    """The settings of each network of a sweep, by name, as --prepare writes them."""
    (place / "s.toml").write_text(text)
    ended = alone("sweep", "s.toml", "--run", "s", "--prepare")
    assert ended.code == 0, ended.err
    files = sorted((place / "runs/s").glob("[0-9]*.toml"))
    return {path.stem: tomllib.loads(path.read_text()) for path in files}


def test_a_grid_and_variants_make_networks_with_names_by_what_differs(place):
    found = prepared(
        place,
        """
        [base]
        epochs = 3
        lr = 1
        data = "pack.h5"
        [grid]
        optimizer = ["sgdm", "adam"]
        flip = [true, false]
        [[variant]]
        name = "very wide/one"
        model = "resnet18"
        [[variant]]
        data = "./pack.h5"
        lr = 0.003
        """,
    )
    assert list(found) == [
        "01-optimizer=sgdm,flip=yes",
        "02-optimizer=sgdm,flip=no",
        "03-optimizer=adam,flip=yes",
        "04-optimizer=adam,flip=no",
        "05-very_wide_one",
        "06-data=pack.h5,lr=0.003",
    ]
    first, *_, last = found.values()
    same = {"epochs": 3, "lr": 1.0, "optimizer": "sgdm", "flip": True, "runs_dir": "runs/s"}
    assert (same | {"run": "01-optimizer=sgdm,flip=yes"}).items() <= first.items()
    assert {"epochs": 3, "lr": 0.003, "data": "./pack.h5"}.items() <= last.items()
    assert "optimizer" not in last


def test_names_of_many_networks_sort_by_number(place):
    names = list(prepared(place, THREE.replace("[1, 2, 3]", str(list(range(120))))))
    assert len(names) == 120 and names == sorted(names) and names[0] == "001-seed=0"


@pytest.mark.parametrize(
    ("words", "cores", "gpus", "slots"),
    [
        ("--ranks-per-network 2", 10, "", ["cores 0-1", "cores 2-3", "cores 4-5"]),
        ("--slots 3", 8, "0,1,2,3", ["GPU 0", "GPU 1", "GPU 2, 3"]),
        ("", 8, "3,5", ["GPU 3", "GPU 5"]),
        ("--ranks-per-network 2", 8, "0,1,2,3", ["GPU 0, 1", "GPU 2, 3"]),
        ("--ranks-per-network 16", 8, "", ["cores 0-7"]),
        ("--slots 3", 2, "a,b", ["GPU a", "GPU b", "GPU a"]),
        ("--slots 3", 2, "", ["any core"] * 3),
        ("--slots 2 --ranks-per-network 4", 2, "", ["cores 0", "cores 1"]),
    ],
)
def test_slots_share_cores_and_gpus_only_where_there_are_too_few(
    dry_run, words, cores, gpus, slots
):
    shown = dry_run(*words.split(), cores=cores, env={"CUDA_VISIBLE_DEVICES": gpus})
    (line,) = re.findall(r"^3 networks in \d+ slots? \((.*)\)$", shown, re.MULTILINE)
    assert [part.partition(": ")[2] for part in line.split("; ")][: len(slots)] == slots


def test_gpus_are_left_alone_by_networks_for_cpus(place, dry_run):
    (place / "s.toml").write_text(THREE.replace("[grid]", "device = 'cpu'\n[grid]"))
    assert "GPU" not in dry_run(env={"CUDA_VISIBLE_DEVICES": "3,5"})


def steps(shown):
    """How many steps fit into an allocation, and the words that launch one."""
    count = int(re.search(r"^3 networks in (\d+) slot", shown, re.MULTILINE)[1])
    return count, shlex.split(re.search(r"^launch: (.*)$", shown, re.MULTILINE)[1])


@pytest.mark.parametrize(
    ("ranks", "tasks", "slots", "nodes"),
    [(2, "2(x3),1", 3, 1), (1, "2(x3),1", 7, 1), (4, "2(x4)", 2, 2), (3, "4(x2)", 2, 1)],
)
def test_steps_fill_an_allocation(dry_run, ranks, tasks, slots, nodes):
    env = JOB | {"SLURM_TASKS_PER_NODE": tasks}
    count, words = steps(dry_run("--ranks-per-network", ranks, env=env))
    assert (count, words[-1]) == (slots, "runs/s/01-seed=1.toml")  # the sweep is named by its file
    assert {"--exact", f"--nodes={nodes}", f"--ntasks={ranks}", "--mpi=pmix"} <= set(words)
    assert not any(word.startswith(("--mem", "--gpus")) for word in words)


def test_steps_share_the_memory_and_gpus_of_an_allocation_and_inherit_no_request(dry_run):
    """A step that asks for all GPUs of the job keeps all others waiting."""
    env = JOB | {"SLURM_TASKS_PER_NODE": "4", "SLURM_MEM_PER_NODE": "8000", "SLURM_GPUS": "4"}
    env |= {"SLURM_CPUS_PER_GPU": "3", "SLURM_NTASKS": "4", "HPCTRAIN_PMI": "pmi2"}
    _, words = steps(dry_run("--ranks-per-network", "2", env=env))
    assert {"--mem=4000M", "--cpus-per-task=3", "--mpi=pmi2"} <= set(words)
    assert {"--gpus-per-task=1", "--gpu-bind=none"} <= set(words)
    left = run([*words[: words.index("srun")], "env"], env=env)
    names = {line.partition("=")[0] for line in left.stdout.splitlines()}
    assert set(env) - names == {"SLURM_GPUS", "SLURM_CPUS_PER_GPU", "SLURM_NTASKS"}
    ended = alone("sweep", "s.toml", "--ranks-per-network", "5", env=env)
    assert ended.code == 2 and "--ranks-per-network 5" in ended.err


def test_a_dry_run_imports_neither_torch_nor_mpi(place):
    code = "import runpy, sys; sys.argv[1:] = ['sweep', 's.toml', '--dry-run']\n"
    code += "try: runpy.run_module('hpctrain', run_name='__main__')\n"
    code += "finally: print({'torch', 'mpi4py'} & set(sys.modules))"
    done = run([sys.executable, "-c", code], cwd=place)
    assert "02-seed=2" in done.stdout and done.stdout.endswith("set()\n"), done.stderr


@pytest.fixture
def task(place):
    """A function that runs slurm/sweep.sbatch as task of a job array: what it prints."""
    python = f'printf "%s\\n" "$@" >"{place}/called"'
    own = {"HPCTRAIN_VENV": str(place), "SLURM_CPUS_PER_TASK": "1", "HPCTRAIN_PMI": "pmi2"}
    own |= {"PATH": write_scripts(place / "bin", activate="", python=python)}

    def call(number, *words):
        env = {**os.environ, **own, "SLURM_ARRAY_TASK_ID": str(number)}
        command = ["bash", str(ROOT / "slurm" / "sweep.sbatch"), *words]
        done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=60)
        assert done.returncode == 0, done.stderr
        return done.stdout

    return call


@pytest.mark.parametrize("name", ["first", "a b;$(touch pwned)`touch pwned`"])
def test_a_task_of_a_job_array_supervises_the_network_of_its_number(place, task, name):
    prepare = ["sweep", "s.toml", "--run", name, "--prepare"]
    lines = alone(*prepare).out.splitlines()
    assert lines[0] == f"runs/{name}: 3 of 3 networks to train"
    assert shlex.split(lines[1]) == ["sbatch", "--array=1-3", "slurm/sweep.sbatch", f"runs/{name}"]
    assert alone(*prepare, "--trust-code").out.splitlines()[1] == f"{lines[1]} --trust-code"
    assert task(2, f"runs/{name}", "--epochs", "3") == ""
    called = (place / "called").read_text().splitlines()
    assert called[:4] == ["-m", "hpctrain", "supervise", "--"] and "--mpi=pmi2" in called
    settings = f"runs/{name}/02-seed=2.toml"
    words = ["python", "-m", "hpctrain", "train", "--config", settings, "--epochs", "3"]
    assert called[-8:] == words and (place / settings).is_file()
    assert not (place / "pwned").exists()


def test_after_a_request_to_stop_no_task_trains_until_the_sweep_is_prepared_again(place, task):
    prepare = ["sweep", "s.toml", "--run", "a", "--prepare"]
    alone(*prepare)
    make_run(place / "runs/a/02-seed=2", run_line(), end_line("done"))
    assert alone("stop", "a").code == 0
    assert "runs/a" in task(1, "runs/a") and not (place / "called").exists()
    assert "runs/a: 2 of 3 networks to train\nsbatch --array=1,3 " in alone(*prepare).out
    task(1, "runs/a")
    assert (place / "called").exists()
