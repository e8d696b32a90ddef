"""Training on packs of JPEG files: the same bits on any number of ranks, refusals, damage."""

from __future__ import annotations

import dataclasses
import sys
from pathlib import Path

import pytest

from hpctrain.cli import main as command
from hpctrain.config import Config, check_settings
from hpctrain.data.packed import read_pack
from hpctrain.data.split import Split
from hpctrain.errors import RunError, UsageError
from hpctrain.inference.evaluate import evaluate
from hpctrain.report.record import read_records
from hpctrain.training import train as loop
from hpctrain.training.setup import set_up
from tests.data.pictures import class_folders, pack
from tests.support.launch import mpirun, run
from tests.support.packs import make_pack
from tests.training.runs import digest, short_run

CASES = {
    "whole": {},
    "random parts": {"random_crop": 0.08},
    "balanced": {"balanced_sampling": True, "random_crop": 0.3, "read_buffer": "9K"},
    "in windows": {"random_crop": 0.3, "shuffle": "blocks", "read_buffer": "9K", "flip": True},
}


@pytest.fixture
def jpegs(comm, shared_tmp):
    """Settings of a run of two epochs over 59 files of 97x83 pixels, decoded to 17x13."""
    if comm.rank == 0:
        counts = {"a": 43, "b": 31}
        folder = class_folders(shared_tmp / "images", counts, ".jpg", width=97, height=83)
        split = {"split": "0.8,0.1,0.1", "encoding": "jpeg"}
        pack(folder, shared_tmp / "pack.h5", size="17x13", **split)
    comm.Barrier()
    return short_run(
        shared_tmp,
        "pack.h5",
        model="digits",
        epochs=2,
        batch_size=16,
        shards=2,
        deterministic=True,
    )


@pytest.mark.mpi
@pytest.mark.parametrize("case", CASES)
def test_the_same_bits_as_on_one_rank(comm, one_rank, jpegs, case, monkeypatch):
    monkeypatch.setattr("hpctrain.plan.READ_BYTES", 2000)
    config = dataclasses.replace(jpegs, shards=4, **CASES[case])
    together = digest(config, comm, "together")
    if comm.rank == 0:
        assert digest(config, one_rank, "alone") == together
        assert digest(dataclasses.replace(config, seed=1), one_rank, "other") != together
        if config.random_crop:
            whole = dataclasses.replace(config, random_crop=0.0)
            assert digest(whole, one_rank, "whole") != together


@pytest.mark.parametrize("crop", ["0", "0.08"])
def test_one_and_two_ranks_by_the_command(comm, jpegs, crop):
    found = []
    for ranks in (1, 2):
        name = f"of{ranks}"
        flags = ["--data", jpegs.data, "--runs-dir", jpegs.runs_dir, "--run", name]
        flags += ["--epochs", "2", "--batch-size", "16", "--shards", "2", "--deterministic"]
        flags += ["--model", "digits", "--progress", "none", "--random-crop", crop]
        done = run([mpirun(), "-n", str(ranks), sys.executable, "-m", "hpctrain", *flags], 100)
        assert done.returncode == 0, done.stderr
        records = list(read_records(Path(jpegs.runs_dir) / name))
        found.append(records[-1]["digest"])
    assert found[0] == found[1]
    assert digest(dataclasses.replace(jpegs, random_crop=float(crop)), comm, "here") == found[0]
    assert digest(dataclasses.replace(jpegs, random_crop=0.2), comm, "other") != found[0]


@pytest.mark.mpi
def test_the_same_weights_as_from_a_pack_of_pixels(comm, jpegs, shared_tmp):
    if comm.rank == 0:
        split = {"split": "0.8,0.1,0.1"}
        pack(shared_tmp / "images", shared_tmp / "raw.h5", size="17x13", **split)
    comm.Barrier()
    weights = []
    for number, config in enumerate(
        (jpegs, dataclasses.replace(jpegs, data=str(shared_tmp / "raw.h5")))
    ):
        job = set_up(dataclasses.replace(config, run=str(number), shards=4), comm)
        weights.append([b.images for step in job.loader.epoch(0) for b in step])
    assert all((a == b).all() for a, b in zip(*weights, strict=True))


@pytest.mark.mpi
def test_ranks_that_decode_otherwise_are_refused(comm, jpegs, monkeypatch):
    version = "old" if comm.rank == comm.size - 1 else "new"
    monkeypatch.setattr("hpctrain.data.jpeg.decoder_versions", lambda: version)
    if comm.size == 1:
        set_up(dataclasses.replace(jpegs, run="a"), comm)
        return
    with pytest.raises(UsageError, match="what decodes JPEG files differs between ranks: new on"):
        set_up(dataclasses.replace(jpegs, run="a", shards=4), comm)


@pytest.mark.mpi
def test_windows_of_files_fill_the_read_buffer_by_their_size_not_that_of_pixels(comm, jpegs):
    mean = read_pack(jpegs.data).splits["train"]
    size = -(-mean.files_bytes // mean.samples)
    assert size != 17 * 13 * 3
    for crop, row_bytes in ((0.0, 17 * 13 * 3), (0.1, size)):
        config = dataclasses.replace(jpegs, random_crop=crop, shards=4, run="a")
        assert set_up(config, comm).plan.block_rows == -(-(4 << 20) // row_bytes)


@pytest.mark.mpi
def test_evaluation_never_crops(comm, jpegs):
    figures, batches = [], []
    for crop in (0.0, 0.08):
        job = set_up(dataclasses.replace(jpegs, random_crop=crop, shards=4, run="a"), comm)
        batches.append([b.images for step in job.loader.epoch(0) for b in step])
        with Split(job.pack, "test") as rows:
            found = evaluate(job.trainer.model, rows, job.task, job.prepare, comm, 3)
        figures.append(found.figures())
    assert figures[0] == figures[1]
    assert any((a != b).any() for a, b in zip(*batches, strict=True))


def test_wrong_settings_are_one_line(jpegs, tmp_path, capsys):
    raw = str(make_pack(tmp_path / "raw.h5", {"train": 31, "test": 7}))
    flags = ["--runs-dir", str(tmp_path / "runs"), "--progress", "none"]
    for data, crop, text in (
        (raw, "0.08", "raw.h5 holds pixels: pack with --encoding jpeg"),
        (jpegs.data, "1.5", "--random-crop 1.5: give a number in [0, 1]"),
        (jpegs.data, "-0.1", "--random-crop -0.1"),
        (jpegs.data, "nan", "--random-crop nan"),
    ):
        assert command(["train", "--data", data, f"--random-crop={crop}", *flags]) == 2
        shown = capsys.readouterr().err.strip()
        assert text in shown and "\n" not in shown
    for fine in (0.0, 1e-9, 1.0):
        check_settings(Config(random_crop=fine))
    with pytest.raises(UsageError):
        check_settings(Config(random_crop=1.0001))


@pytest.mark.mpi
@pytest.mark.parametrize("crop", [0.0, 0.08])
def test_an_image_that_cannot_be_decoded_ends_the_run_by_name(comm, jpegs, crop):
    packed = read_pack(jpegs.data)
    split = packed.splits["train"]
    comm.Barrier()
    if comm.rank == 0:
        with Split(packed, "train") as rows:
            start, _ = rows.byte_range(range(53, 54))
        with open(jpegs.data, "r+b") as file:
            file.seek(split.images_offset + start)
            file.write(b"nothing at all")
    comm.Barrier()
    config = dataclasses.replace(jpegs, run="a", random_crop=crop, shards=4)
    with pytest.raises(UsageError, match="is corrupt: train/bytes"):
        loop.train(config, comm)
    if comm.size > 1:
        return  # the rank that meets it fails alone, and ends all
    with pytest.raises(RunError, match=r"pack.h5: sample 53 of split 'train' cannot be decoded"):
        loop.train(dataclasses.replace(config, verify="never"), comm)
    damaged = r"pack.h5: sample \d+ of split 'train' cannot be used \(train/bytes: .* \(block 0\)"
    with pytest.raises(RunError, match=damaged):
        loop.train(dataclasses.replace(config, verify="first-touch"), comm)


def test_a_row_is_named_whatever_rank_reads_it(comm, jpegs):
    packed = read_pack(jpegs.data)
    with Split(packed, "train") as rows:
        start, _ = rows.byte_range(range(53, 54))
    with open(jpegs.data, "r+b") as file:
        file.seek(packed.splits["train"].images_offset + start)
        file.write(b"nothing at all")
    flags = ["--data", jpegs.data, "--runs-dir", jpegs.runs_dir, "--run", "a", "--model", "digits"]
    flags += ["--batch-size", "16", "--progress", "none"]
    flags += ["--verify", "never"]
    done = run([mpirun(), "-n", "2", sys.executable, "-m", "hpctrain", *flags], 100)
    assert done.returncode == 1, done.stderr
    assert "sample 53 of split 'train' cannot be decoded" in done.stderr
    assert "Traceback" not in done.stderr
