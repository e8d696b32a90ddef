"""--stage: each host copies what its ranks read to its own disk; nothing else changes."""

from __future__ import annotations

import os
import subprocess
import sys
from collections import namedtuple
from pathlib import Path

import h5py
import numpy as np
import pytest

import hpctrain as hp
from tests.support.api import cluster, ranks_as_hosts
from tests.support.launch import ROOT
from tests.support.launches import check_same, launch, run_of
from tests.support.packs import make_pack
from tests.support.pictures import class_folders
from tests.support.pictures import make_pack as pack_files
from tests.support.scripts import write_scripts
from tests.support.short import short_run
from tests.support.spoil import overwrite

ROWS = 59  # samples of train
SAME_RUN = {"deterministic": True, "shards": 4}
CASES = {
    "pixels": {},
    "jpeg": {"random_crop": 0.3},
    "balanced": {"balanced_sampling": True},
    "balanced, global": {"balanced_sampling": True, "shuffle": "global"},
    "weights": {"class_weights": "balanced", "shuffle": "blocks"},
    "global": {"shuffle": "global"},
    "first samples": {"augment": "tests.support.own_functions:mirror", "freeze": "conv1,bn1"},
    "picture": {"task": "denoise", "model": "autoencoder"},
    "several classes": {"task": "multilabel", "shuffle": "blocks"},
    "values": {"task": "regress"},
}

TARGETS = {"several classes": 17, "values": 2}  # numbers of a sample


@pytest.fixture
def settings(tmp_path):
    return short_run(tmp_path) | SAME_RUN


def write_pack(folder, case):
    """A pack of pixels or of JPEG files. Of several classes, targets are not held in memory."""
    if case in TARGETS:
        rng = np.random.default_rng(7)
        splits = {}
        for name, rows in (("train", ROWS), ("validation", 14)):
            images = rng.integers(0, 256, (rows, 16, 16, 1), np.uint8)
            splits[name] = images, rng.integers(0, 2, (rows, TARGETS[case]))
        names = [f"name {number}" for number in range(TARGETS[case])]
        named = {"columns": names} if case == "values" else {"classes": names}
        hp.write_pack(folder / "pack.h5", splits, **named)
    elif case == "jpeg":
        images = class_folders(folder / "images", {"a": 37, "b": 36}, ".jpg", width=41)
        how = {"size": "16x16", "encoding": "jpeg", "split": "0.8,0.2"}
        pack_files(images, folder / "pack.h5", **how)
    else:
        make_pack(folder / "pack.h5", {"train": ROWS, "validation": 14}, (16, 16, 1))
    return hp.read_pack(folder / "pack.h5")


def check_part(pack, path, samples):
    """A copy has these training samples, no sample more, and all of the other splits."""
    whole = Path(pack.path).read_bytes()
    expected = bytearray(len(whole))
    with h5py.File(pack.path) as file:
        for name in ["identity", *(f"{s}/{d}" for s in pack.splits for d in file[s])]:
            data, kind = file[name], name.partition("/")[2]
            start, stop = 0, len(data)
            if name.startswith("train/"):
                start, stop = samples.start, samples.stop + (kind == "offsets")
            if name == "train/bytes":
                start, stop = file["train/offsets"][[start, stop]].tolist()
            if not kind.startswith("name"):
                begin, size = data.id.get_offset(), data[0].nbytes
                places = slice(begin + start * size, begin + stop * size)
                expected[places] = whole[places]
    assert path.read_bytes() == expected


# Whole runs


def test_a_staged_run_computes_the_same_bits(settings, tmp_path):
    """From a new copy and from the same again; a short one is made anew, a corrupt one noticed."""
    settings |= {"epochs": 1}
    local = tmp_path / "local"
    assert launch(settings).code == 0
    inodes = set()
    for name in ("new", "again"):
        staged = settings | {"run": name, "stage": str(local)}
        assert launch(staged).code == 0
        check_same(staged, settings)
        (copy,) = local.iterdir()
        inodes.add(copy.stat().st_ino)
    assert len(inodes) == 1
    overwrite(copy, hp.read_pack(settings["data"]).splits["train"].images.offset + 90 * 144)
    damaged = launch(staged | {"run": "damaged"})
    assert damaged.code == 1 and f"{copy}: sample 90 of split 'train' is corrupt" in damaged.error
    assert "remove this copy, and the next launch copies the pack again" in damaged.error
    os.truncate(copy, copy.stat().st_size - 1)
    assert launch(staged | {"run": "short"}).code == 0
    check_same(staged | {"run": "short"}, settings)


@pytest.mark.parametrize("case", CASES)
def test_hosts_that_copy_a_part_each_compute_the_same_bits(tmp_path, case):
    """Every rank is a host; also where the run is resumed on fewer, which need other parts."""
    settings = short_run(tmp_path) | SAME_RUN | {"read_buffer": "1K"} | CASES[case]
    os.unlink(settings["data"])
    pack = write_pack(tmp_path, case)
    assert launch(settings, 2).code == 0
    local = tmp_path / "local"  # of every host: their copies have names of their own
    staged = settings | {"stage": str(local), "run": "staged"}
    assert launch(staged, first=ranks_as_hosts).code == 0
    check_same(staged, settings)
    parts = {path: [int(n) for n in path.stem.split("-")[-2:]] for path in local.iterdir()}
    everything = case.endswith("global")
    assert len(parts) == (1 if everything else 3)
    for path, (start, stop) in parts.items():
        assert (stop - start == ROWS) == everything
        check_part(pack, path, range(start, stop))
    resumed = staged | {"run": "resumed"}
    assert launch(resumed, leave=1, first=ranks_as_hosts).code == 75
    assert launch(resumed, 1, first=ranks_as_hosts).code == 0
    check_same(resumed, settings)
    assert len(list(local.iterdir())) == len(parts) + (not everything)


Usage = namedtuple("Usage", "total used free")


def test_what_does_not_fit_on_the_disk_of_a_host_is_refused(settings, tmp_path):
    local = tmp_path / "local"
    full = launch(
        settings,
        stage=str(local),
        first=lambda patch: patch.setattr("shutil.disk_usage", lambda path: Usage(1, 1, 0)),
    )
    assert full.code == 1 and "0 B free, the host's part of the pack needs" in full.error
    assert os.listdir(local) == [] and not run_of(settings).parent.exists()


def test_offsets_that_one_rank_cannot_read_are_an_error_on_all_ranks(settings, tmp_path):
    def fail(*arguments):
        raise hp.RunError("reading at byte 12 failed")

    def on_the_last(patch):
        if cluster.launched_rank() == 2:
            patch.setattr(hp.Split, "byte_range", fail)

    os.unlink(settings["data"])
    write_pack(tmp_path, "jpeg")
    failed = launch(settings, first=on_the_last, stage=str(tmp_path / "local"))
    assert failed.code == 1 and "rank 2: reading at byte 12 failed" in failed.error


# The batch script


STANDINS = {
    "srun": 'while [[ $1 == --* ]]; do shift; done; [ "$1" != python ] || exit $CODE; exec "$@"',
    "squeue": 'printf "%s\\n" $QUEUED; exit $SQUEUE',
    "scontrol": "exit 0",
    "activate": "",
    "python": f'exec {sys.executable} "$@"',
}


@pytest.mark.parametrize(
    ("code", "squeue", "left"),
    [
        (0, 0, {"7", "x9"}),
        (75, 0, {"5", "7", "x9"}),  # requeued: what it copied stays
        (1, 1, {"7", "9", "x9"}),  # no answer: nothing of other jobs is touched
    ],
)
def test_the_batch_script_removes_copies_of_jobs_that_are_over(tmp_path, code, squeue, left):
    path = write_scripts(tmp_path / "bin", **STANDINS)
    disk = tmp_path / "disk"
    for name in ("job-5", "job-7", "job-9", "x9"):
        (disk / f"hpctrain-{name}").mkdir(parents=True)
    own = {"PATH": path, "HPCTRAIN_VENV": str(tmp_path)}
    own |= {"CODE": str(code), "SQUEUE": str(squeue), "QUEUED": "5 7", "LOCAL_DISK": str(disk)}
    own |= {"SLURM_JOB_ID": "5", "SLURM_NNODES": "1", "SLURM_CPUS_PER_TASK": "1", "PACK": "a"}
    script = ROOT / "slurm/staged.sbatch"
    done = subprocess.run(["bash", script], env={**os.environ, **own}, timeout=60)
    assert done.returncode == code
    assert {path.name.rpartition("-")[2] for path in disk.iterdir()} == left
