"""--stage: what is copied, that it is compared, and that nothing else changes."""

from __future__ import annotations

import dataclasses
import os
import subprocess
import sys
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest

from hpctrain.data import staging
from hpctrain.data.packed import read_pack, read_sums
from hpctrain.data.split import Split
from hpctrain.errors import RunError, UsageError
from hpctrain.report.record import read_records
from hpctrain.training import train as loop
from tests.support.packs import make_pack, part_of
from tests.training.runs import short_run
from tests.training.test_bad_rows import overwrite

SHAPE = (32, 32, 3)  # 341 rows a block


def make(folder, rows=3001):
    return read_pack(make_pack(folder / "a.h5", {"train": rows, "test": 401}, SHAPE))


def copied(packed, samples, target):
    """A pack that is a copy of a part, and its pieces."""
    part = part_of(packed, samples)
    share = staging.pieces(packed, read_sums(packed), part)
    with open(target, "wb") as file:
        file.truncate(packed.file_size)
    staging.copy(packed, target, share)
    return dataclasses.replace(packed, path=str(target), part=part), share


def test_all_that_is_needed_lies_where_it_lies_in_the_pack(tmp_path):
    packed = make(tmp_path)
    here, share = copied(packed, range(1000, 1500), tmp_path / "b")
    for before, after in pairwise(share):
        assert before.stop <= after.start
    whole, there = Path(packed.path).read_bytes(), Path(here.path).read_bytes()
    for piece in share:
        assert whole[piece.start : piece.stop] == there[piece.start : piece.stop]
    read_pack(here.path)  # HDF5's own bytes are all there
    with Split(packed, "train") as one, Split(here, "train") as other:
        rows = np.arange(1000, 1500)
        images = [np.empty((500, *SHAPE), np.uint8) for _ in range(2)]
        assert (one.gather(rows, images[0]) == other.gather(rows, images[1])).all()
        assert (one.read_labels(rows) == other.read_labels(rows)).all()
    with Split(packed, "test") as one, Split(here, "test") as other:
        rows, images = np.arange(401), [np.empty((401, *SHAPE), np.uint8) for _ in range(2)]
        assert (one.gather(rows, images[0]) == other.gather(rows, images[1])).all()
    assert sum(piece.length for piece in share) < 0.5 * packed.file_size
    everything = staging.pieces(packed, read_sums(packed), part_of(packed, range(3001)))
    assert [p.start for p in everything] == [0, *(p.stop for p in everything[:-1])]
    assert everything[-1].stop == packed.file_size


def test_every_block_is_compared_on_its_way_and_when_used_again(tmp_path):
    packed = make(tmp_path)
    here, share = copied(packed, range(3001), tmp_path / "b")
    assert staging.compare(packed, Path(here.path), share)
    overwrite(here.path, packed.splits["train"].images_offset + 2000 * packed.image_bytes)
    assert not staging.compare(packed, Path(here.path), share)
    other, share = copied(packed, range(3001), tmp_path / "d")
    overwrite(other.path, packed.uuid_offset, b"x")  # HDF5's own bytes have no checksum
    assert not staging.compare(packed, Path(other.path), share)
    overwrite(packed.path, packed.splits["test"].labels_offset)
    with pytest.raises(RunError, match="test/labels: block 0 is corrupt"):
        copied(packed, range(3001), tmp_path / "c")


def test_too_small_a_disk_is_refused_with_both_numbers(tmp_path):
    with pytest.raises(
        RunError, match="MiB are free, the host's part of the pack needs 1,099,511,627,776 MiB"
    ):
        staging.check_room(tmp_path, 1 << 60)
    (tmp_path / "file").touch()
    with pytest.raises(UsageError, match="file is a file: name a folder"):
        staging.make_folder(tmp_path / "file")
    with pytest.raises(UsageError, match="--stage"):
        staging.make_folder(tmp_path / "file" / "x")


@pytest.mark.mpi
@pytest.mark.parametrize("shuffle", ["partition", "global", "blocks"])
def test_a_staged_run_computes_the_same_bits(comm, shared_tmp, shuffle):
    if comm.rank == 0:
        make_pack(shared_tmp / "a.h5", {"train": 601, "validation": 99}, SHAPE)
    comm.Barrier()
    config = short_run(
        shared_tmp,
        "a.h5",
        model="digits",
        batch_size=64,
        shards=4,
        shuffle=shuffle,
        read_buffer="1K",
        deterministic=True,
    )
    local = shared_tmp / "local"
    plain, first, again = (dataclasses.replace(config, run=name) for name in ("a", "b", "c"))
    assert loop.train(plain, comm) == 0
    assert loop.train(dataclasses.replace(first, stage=str(local)), comm) == 0
    names = sorted(os.listdir(local))
    assert len(names) == 1 and names[0].endswith(".staged")
    inode = os.stat(local / names[0]).st_ino
    comm.Barrier()
    assert loop.train(dataclasses.replace(again, stage=str(local)), comm) == 0
    assert os.stat(local / names[0]).st_ino == inode  # used again
    comm.Barrier()
    if comm.rank == 0:
        digests = [digest(shared_tmp / "runs" / name) for name in "abc"]
        assert len(set(digests)) == 1
        packed = read_pack(shared_tmp / "a.h5")
        overwrite(local / names[0], packed.splits["validation"].images_offset)
    comm.Barrier()
    last = dataclasses.replace(config, run="d", stage=str(local))
    assert loop.train(last, comm) == 0
    assert os.stat(local / names[0]).st_ino != inode  # corrupt: copied anew
    comm.Barrier()
    if comm.rank == 0:
        assert digest(shared_tmp / "runs" / "d") == digests[0]
        assert os.listdir(local) == names


def digest(folder):
    return [r for r in read_records(folder) if r["kind"] == "digest"][-1]["digest"]


def test_a_copy_of_another_length_is_not_used_again(tmp_path):
    packed = make(tmp_path)
    here, share = copied(packed, range(3001), tmp_path / "b")
    with open(here.path, "ab") as file:
        file.write(b"x")
    assert not staging.compare(packed, Path(here.path), share)


def test_nothing_stays_where_the_disk_has_no_room_for_a_copy(tmp_path):
    packed = dataclasses.replace(make(tmp_path), file_size=1 << 62)  # more than a file may have
    (tmp_path / "local").mkdir()
    with pytest.raises(RunError, match="no room left"):
        staging.begin(tmp_path / "local", packed, "name")
    assert os.listdir(tmp_path / "local") == []


@pytest.mark.mpi
def test_a_corrupt_pack_is_not_staged(comm, shared_tmp):
    if comm.rank == 0:
        path = make_pack(shared_tmp / "a.h5", {"train": 1001}, SHAPE)
        overwrite(path, read_pack(path).splits["train"].images_offset + 900 * 3072)
    comm.Barrier()
    config = short_run(
        shared_tmp,
        "a.h5",
        model="digits",
        verify="never",
        stage=str(shared_tmp / "local"),
    )
    with pytest.raises(RunError, match="train/images: block 2 is corrupt"):
        loop.train(config, comm)
    comm.Barrier()
    assert os.listdir(shared_tmp / "local") == []
    assert not (shared_tmp / "runs").exists()


@pytest.mark.mpi
def test_offsets_that_one_rank_cannot_read_are_an_error_on_all_ranks(comm, shared_tmp, monkeypatch):
    if comm.rank == 0:
        make_pack(shared_tmp / "a.h5", {"train": 101}, SHAPE)
    comm.Barrier()

    def fail(*arguments):
        raise RunError("reading at byte 12 failed")

    if comm.rank == comm.size - 1:
        monkeypatch.setattr(Split, "byte_range", fail)
    local = str(shared_tmp / "local")
    config = short_run(shared_tmp, "a.h5", model="digits", batch_size=16, stage=local)
    with pytest.raises(RunError, match="reading at byte 12 failed") as caught:
        loop.train(config, comm)
    assert caught.value.agreed


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
    for name in ("5", "7", "9", "x9"):
        (disk / f"hpctrain-job-{name}").mkdir(parents=True)
    (disk / "hpctrain-job-x9").rename(disk / "hpctrain-x9")
    own = {"PATH": f"{tmp_path}:{os.environ['PATH']}", "HPCTRAIN_VENV": str(tmp_path)}
    own |= {"CODE": str(code), "SQUEUE": str(squeue), "QUEUED": "5 7", "LOCAL_DISK": str(disk)}
    own |= {"SLURM_JOB_ID": "5", "SLURM_NNODES": "1", "SLURM_CPUS_PER_TASK": "1", "PACK": "a"}
    script = Path(__file__).parents[2] / "slurm/staged.sbatch"
    done = subprocess.run(["bash", script], env={**os.environ, **own}, timeout=60)
    assert done.returncode == code
    assert {path.name.rpartition("-")[2] for path in disk.iterdir()} == left
