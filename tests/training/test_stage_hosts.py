"""--stage where every rank is a host of its own, which has only the samples of its shards."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from hpctrain.data.packed import read_pack
from hpctrain.training import train as loop
from tests.data.pictures import class_folders, pack
from tests.support.packs import make_pack
from tests.training.runs import digest, leave_after, short_run

CASES = {
    "pixels": {},
    "jpeg": {"random_crop": 0.3},
    "balanced": {"balanced_sampling": True},
    "weights": {"class_weights": "balanced", "shuffle": "blocks"},
    "global": {"shuffle": "global"},
    "first samples": {
        "augment": "tests.support.own_functions:mirror",
        "freeze": "conv1,bn1",
    },
    "picture": {"task": "denoise", "model": "autoencoder"},
}


@pytest.fixture
def settings(comm, shared_tmp, monkeypatch, request):
    """Of two epochs over 59 images, of which no host has the 32 first; blocks have few rows."""
    monkeypatch.setattr(
        "hpctrain.training.reading.comm_of_host", lambda comm: comm.Split(comm.rank)
    )
    own = CASES[request.param]
    if comm.rank == 0:
        rows = "hpctrain.data.packing.write.rows_per_block"
        monkeypatch.setattr(rows, lambda size: 5 if size > 1 else 397)
        if request.param == "jpeg":
            folder = class_folders(shared_tmp / "images", {"a": 37, "b": 36}, ".jpg", width=41)
            pack(folder, shared_tmp / "a.h5", size="16x16", encoding="jpeg", split="0.8,0.2")
        else:
            make_pack(shared_tmp / "a.h5", {"train": 59}, (16, 16, 1))
    comm.Barrier()
    given = {"model": "digits", "epochs": 2, "batch_size": 16, "shards": 4}
    given |= {"read_buffer": "1K", "deterministic": True, "threads": 1}
    return short_run(shared_tmp, "a.h5", **given | own)


@pytest.mark.mpi
@pytest.mark.parametrize("settings", CASES, indirect=True)
def test_the_same_bits_from_a_part_of_the_samples(comm, one_rank, shared_tmp, settings):
    """As without copies; also when the run is resumed on fewer ranks, which need other parts."""
    local = shared_tmp / "local"  # of every host: their copies have names of their own
    staged = dataclasses.replace(settings, stage=str(local))
    plain = digest(settings, comm, "plain")
    assert digest(staged, comm, "staged") == plain
    comm.Barrier()
    parts = {path: [int(n) for n in path.stem.split("-")[-2:]] for path in local.iterdir()}
    everything = settings.shuffle == "global" or comm.size == 1
    assert len(parts) == (1 if everything else comm.size)
    column = read_pack(settings.data).columns("train")["labels"]
    whole = np.fromfile(settings.data, np.int64, column.rows, offset=column.offset)
    for path, (start, stop) in parts.items():
        assert (stop - start == column.rows) == everything
        low, high = start // 5 * 5, -(-stop // 5) * 5  # whole blocks
        labels = np.fromfile(path, np.int64, column.rows, offset=column.offset)
        assert (labels[low:high] == whole[low:high]).all()
        assert not labels[:low].any() and not labels[high:].any()
    with leave_after(2):
        assert loop.train(dataclasses.replace(staged, run="parts"), comm) == 75
    comm.Barrier()
    if comm.rank == 0:
        assert digest(staged, one_rank, "parts") == plain
        assert len(list(local.iterdir())) == len(parts) + (not everything)
