"""A training rank holds what belongs to its own samples, however many there are."""

from __future__ import annotations

import hashlib
import json
import sys
import uuid
import zlib

import h5py
import numpy as np
import pytest

import hpctrain as hp
from tests.support.launch import run

ROWS, SHARDS, SHAPE = 10**9, 1000, (28, 28, 1)
MOST = 400  # MiB
RANK = f"""
import sys
import hpctrain as hp
from tests.support.api import make_order
partition = hp.cut_epoch({ROWS}, 128 * {SHARDS}, {SHARDS})
pack = hp.read_pack(sys.argv[1])
for name in ("partition", "blocks"):
    order = make_order(name, partition, 0, block_rows=5350, window_blocks=4)
    with hp.Split(pack, "train") as split:
        loader = hp.Loader(split, order, [7], epochs=2)
        for number, (batch,) in enumerate(loader.epoch(0)):
            assert len(batch.images) == 128 and not batch.targets.any()
            if number == 200:
                break
        loader.close()
    # Not ru_maxrss: a process begins with that of its parent.
    with open("/proc/self/status") as status:
        peak = next(line.split()[1] for line in status if line.startswith("VmHWM"))
    print(name, int(peak) / 1024)
"""


def write_sparse(path, mine):
    """Write a pack of black images of class 0, with checksums of the samples `mine`, all else
    in holes.
    """
    small = path.with_name("small.h5")
    hp.write_pack(small, {"train": (np.zeros((1, *SHAPE), np.uint8), np.zeros(1, int))}, ["a"])
    pack = hp.read_pack(small)
    checksums = np.full(len(mine), zlib.crc32(bytes(784), 0), "<u4")
    known = {n: getattr(pack, n) for n in ("image_shape", "classes", "fit", "mean", "std")}
    with h5py.File(small) as file:
        known |= {n: json.loads(file.attrs[n]) for n in ("provenance", "targets", "scale")}
    text = json.dumps(["hpctrain-pack", 4, known], sort_keys=True)
    identity = hashlib.sha256(text.encode() + b'"train"')
    zeros = bytes(4 << 20)
    for count, middle in ((mine.start, checksums.tobytes()), (ROWS - mine.stop, b"")):
        for start in range(0, 4 * count, len(zeros)):
            identity.update(zeros[: 4 * count - start])
        identity.update(middle)
    with h5py.File(small) as old, h5py.File(path, "w", libver=("v110", "v110")) as file:
        for name, value in old.attrs.items():
            file.attrs[name] = value
        file["identity"] = np.frombuffer(
            str(uuid.UUID(bytes=identity.digest()[:16])).encode(), "u1"
        )
        for name, data in old["train"].items():
            properties = h5py.h5p.create(h5py.h5p.DATASET_CREATE)
            properties.set_alloc_time(h5py.h5d.ALLOC_TIME_EARLY)
            properties.set_fill_time(h5py.h5d.FILL_TIME_NEVER)
            space = h5py.h5s.create_simple((ROWS, *data.shape[1:]))
            group = file.require_group("train").id
            h5py.h5d.create(group, name.encode(), data.id.get_type(), space, properties)
        file["train/crc32"][mine.start : mine.stop] = checksums


@pytest.mark.slow
@pytest.mark.timeout(120)
def test_a_rank_of_a_thousand_takes_little_memory_for_a_billion_samples(tmp_path):
    partition = hp.cut_epoch(ROWS, 128 * SHARDS, SHARDS)
    write_sparse(tmp_path / "a.h5", hp.Order(partition).reach(range(7, 8)))
    done = run([sys.executable, "-c", RANK, str(tmp_path / "a.h5")], 110)
    assert done.returncode == 0, done.stderr
    peaks = dict(line.split() for line in done.stdout.splitlines())
    assert peaks.keys() == {"partition", "blocks"}
    assert max(map(float, peaks.values())) < MOST, peaks
