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
from tests.support.api import ranks_as_hosts, small_blocks, stage_part
from tests.support.launch import ROOT
from tests.support.launches import check_same, launch, run_of
from tests.support.packs import make_pack
from tests.support.pictures import class_folders
from tests.support.pictures import make_pack as pack_files
from tests.support.short import short_run

ROWS, BLOCK, SHAPE = 59, 7, (9, 11, 3)
SAME_RUN = {"deterministic": True, "shards": 4}
CASES = {
    "pixels": {},
    "jpeg": {"random_crop": 0.3},
    "balanced": {"balanced_sampling": True},
    "weights": {"class_weights": "balanced", "shuffle": "blocks"},
    "global": {"shuffle": "global"},
    "first samples": {"augment": "tests.support.own_functions:mirror", "freeze": "conv1,bn1"},
    "picture": {"task": "denoise", "model": "autoencoder"},
}


@pytest.fixture
def settings(tmp_path):
    return short_run(tmp_path) | SAME_RUN


def write_at(path, offset, data=b"nothing at all"):
    with open(path, "r+b") as file:
        file.seek(offset)
        file.write(data)


# Whole runs


@pytest.mark.parametrize("shuffle", ["partition", "global", "blocks"])
def test_a_staged_run_computes_the_same_bits(settings, tmp_path, shuffle):
    """From a new copy, from the same again, and from one that replaces a damaged one."""
    settings |= {"shuffle": shuffle, "epochs": 1}
    local = tmp_path / "local"
    assert launch(settings).code == 0
    inodes = []
    for name in ("new", "again", "damaged"):
        staged = settings | {"run": name, "stage": str(local)}
        assert launch(staged).code == 0
        check_same(staged, settings)
        (copy,) = local.iterdir()
        inodes.append(copy.stat().st_ino)
        if name == "again":
            write_at(copy, hp.read_pack(settings["data"]).splits["validation"].images_offset)
    assert inodes[0] == inodes[1] != inodes[2]


@pytest.mark.parametrize("case", CASES)
def test_hosts_that_copy_a_part_each_compute_the_same_bits(tmp_path, case):
    """Every rank is a host; also where the run is resumed on fewer, which need other parts."""
    settings = short_run(tmp_path) | SAME_RUN | {"read_buffer": "1K", "shards": 4} | CASES[case]
    with pytest.MonkeyPatch.context() as patch:
        small_blocks(patch, 5)
        if case == "jpeg":
            folder = class_folders(tmp_path / "images", {"a": 37, "b": 36}, ".jpg", width=41)
            os.unlink(settings["data"])
            pack_files(folder, settings["data"], size="16x16", encoding="jpeg", split="0.8,0.2")
        else:
            make_pack(Path(settings["data"]), {"train": 59}, (16, 16, 1))
    assert launch(settings, 2).code == 0
    local = tmp_path / "local"  # of every host: their copies have names of their own
    staged = settings | {"stage": str(local), "run": "staged"}
    assert launch(staged, first=ranks_as_hosts).code == 0
    check_same(staged, settings)
    parts = {path: [int(n) for n in path.stem.split("-")[-2:]] for path in local.iterdir()}
    everything = case == "global"
    assert len(parts) == (1 if everything else 3)
    column = hp.read_pack(settings["data"]).columns("train")["labels"]
    whole = np.fromfile(settings["data"], np.int64, column.rows, offset=column.offset)
    for path, (start, stop) in parts.items():
        assert (stop - start == column.rows) == everything
        low, high = start // 5 * 5, -(-stop // 5) * 5  # whole blocks
        labels = np.fromfile(path, np.int64, column.rows, offset=column.offset)
        assert (labels[low:high] == whole[low:high]).all()
        assert not labels[:low].any() and not labels[high:].any()
    resumed = staged | {"run": "resumed"}
    assert launch(resumed, leave=1, first=ranks_as_hosts).code == 75
    assert launch(resumed, 1, first=ranks_as_hosts).code == 0
    check_same(resumed, settings)
    assert len(list(local.iterdir())) == len(parts) + (not everything)


Usage = namedtuple("Usage", "total used free")


def test_what_cannot_be_staged_is_refused(settings, tmp_path):
    local = tmp_path / "local"
    full = launch(
        settings,
        stage=str(local),
        first=lambda patch: patch.setattr("shutil.disk_usage", lambda path: Usage(1, 1, 0)),
    )
    assert full.code == 1 and "0 MiB are free, the host's part of the pack needs" in full.error
    (tmp_path / "file").touch()
    for place in ("file", "file/x"):
        refused = launch(settings, stage=str(tmp_path / place))
        assert refused.code == 2 and f"--stage {tmp_path / place}" in refused.error
    column = hp.read_pack(settings["data"]).splits["train"]
    write_at(settings["data"], column.images_offset + 90 * 144)
    corrupt = launch(settings, verify="never", stage=str(local))
    assert corrupt.code == 1 and "train/images: block 0 is corrupt" in corrupt.error
    assert os.listdir(local) == [] and not run_of(settings).parent.exists()


def test_offsets_that_one_rank_cannot_read_are_an_error_on_all_ranks(settings, tmp_path):
    def fail(*arguments):
        raise hp.RunError("reading at byte 12 failed")

    def on_the_last(patch):
        if os.environ["OMPI_COMM_WORLD_RANK"] == "2":
            patch.setattr(hp.Split, "byte_range", fail)

    failed = launch(settings, first=on_the_last, stage=str(tmp_path / "local"))
    assert failed.code == 1 and "rank 2: reading at byte 12 failed" in failed.error


# Copies


@pytest.fixture(scope="module", params=["pixels", "jpeg"])
def pack(request, tmp_path_factory):
    """A pack with blocks of few rows."""
    folder = tmp_path_factory.mktemp("pack")
    with pytest.MonkeyPatch.context() as patch:
        small_blocks(patch, BLOCK)
        if request.param == "pixels":
            make_pack(folder / "a.h5", {"train": ROWS, "test": 14}, SHAPE)
        else:
            files = {"a": 37, "b": 36}
            images = class_folders(folder / "images", files, ".jpg", width=41, height=37)
            how = {"size": "11x9", "encoding": "jpeg", "split": "0.8,0,0.2"}
            pack_files(images, folder / "a.h5", **how)
    return hp.read_pack(folder / "a.h5")


def read(pack, split, rows):
    """The images and labels of these rows."""
    with hp.Split(pack, split, threads=1) as source:
        images = np.empty((len(rows), *SHAPE), np.uint8)
        return np.array(source.gather(rows, images)), np.array(source.read_labels(rows))


@pytest.mark.parametrize("start", [0, 6, 7, 8, 41])
@pytest.mark.parametrize("stop", [42, 48, 49, 50, ROWS])
def test_a_copy_has_the_rows_of_its_samples_and_no_block_more(pack, tmp_path, start, stop):
    here = stage_part(pack, range(start, stop), tmp_path)
    whole, there = Path(pack.path).read_bytes(), Path(here.path).read_bytes()
    assert len(whole) == len(there)
    for kind, column in pack.columns("train").items():
        size = 397 if kind == "bytes" else BLOCK * column.row_bytes
        rows = here.part.rows(kind)
        first, last = rows[0] * column.row_bytes, rows[-1] * column.row_bytes
        low, end = first // size * size, column.rows * column.row_bytes
        high, at = min(end, (last // size + 1) * size), column.offset
        assert there[at + low : at + high] == whole[at + low : at + high]
        assert not any(there[at : at + low]) and not any(there[at + high : at + end])
    with h5py.File(here.path) as file:  # HDF5's own bytes are all there
        assert file["train/labels"].shape == (ROWS,)
    for split, wanted in (("train", np.arange(start, stop)), ("test", np.arange(14))):
        for one, other in zip(read(pack, split, wanted), read(here, split, wanted), strict=True):
            assert np.array_equal(one, other)


@pytest.mark.parametrize("row", [12, 30])
def test_rows_that_a_copy_lacks_are_an_error_and_not_zeros(pack, tmp_path, row):
    here, out = stage_part(pack, range(13, 30), tmp_path), np.empty((2, *SHAPE), np.uint8)
    with hp.Split(here, "train", threads=1) as split:
        split.gather(np.array([13, 29]), out)
        with pytest.raises(RuntimeError, match="of train's labels, not all of"):
            split.read_labels(np.array([20, row]))
        with pytest.raises(RuntimeError, match="of train's (images|offsets), not all of"):
            split.gather(np.array([20, row]), out)
        with pytest.raises(RuntimeError, match="not all of"):
            split.hold(range(min(row, 13), 30 + (row == 30)))
        with pytest.raises(RuntimeError, match="of train's labels"):
            split.count_classes()
        assert (split.read_labels(np.array([13, 29])) >= 0).all()


def test_a_corrupt_block_is_an_error_only_for_those_who_need_it(pack, tmp_path):
    content = Path(pack.path).read_bytes()
    for kind in pack.columns("train").keys() & {"labels", "offsets"}:
        spoilt = tmp_path / "a.h5"
        spoilt.write_bytes(content)
        write_at(spoilt, pack.columns("train")[kind].offset + 2 * BLOCK * 8)
        before, least = range(7, 14), range(7, 15)
        for samples in (before, least)[kind == "labels" :]:  # sample 13 ends at offset 14
            with pytest.raises(hp.RunError, match=f"train/{kind}: block 2 is corrupt"):
                stage_part(pack, samples, tmp_path, spoilt)
        stage_part(pack, range(21, 30), tmp_path, spoilt)


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
    for name, text in STANDINS.items():
        (tmp_path / name).write_text(f"#!/bin/bash\n{text}\n")
        (tmp_path / name).chmod(0o755)
    (tmp_path / "bin").symlink_to(tmp_path)
    disk = tmp_path / "disk"
    for name in ("job-5", "job-7", "job-9", "x9"):
        (disk / f"hpctrain-{name}").mkdir(parents=True)
    own = {"PATH": f"{tmp_path}:{os.environ['PATH']}", "HPCTRAIN_VENV": str(tmp_path)}
    own |= {"CODE": str(code), "SQUEUE": str(squeue), "QUEUED": "5 7", "LOCAL_DISK": str(disk)}
    own |= {"SLURM_JOB_ID": "5", "SLURM_NNODES": "1", "SLURM_CPUS_PER_TASK": "1", "PACK": "a"}
    script = ROOT / "slurm/staged.sbatch"
    done = subprocess.run(["bash", script], env={**os.environ, **own}, timeout=60)
    assert done.returncode == code
    assert {path.name.rpartition("-")[2] for path in disk.iterdir()} == left
