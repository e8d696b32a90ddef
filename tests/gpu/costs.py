"""What each step of a run asks of an emulated GPU, on rank 0, as JSON: one line a step.

HPCTRAIN_EMULATED_GPUS=2 tests/gpu/emulator/run mpirun -n 2 python -m tests.gpu.costs FOLDER nccl
"""

from __future__ import annotations

import itertools
import json
import sys
from pathlib import Path
from typing import Any
from unittest import mock

import emulated_gpu

import hpctrain as hp
from tests.support.api import Control
from tests.support.packs import make_pack


def main(folder: str, transport: str) -> None:
    """Train two epochs of 14 steps; the counters of the runtime from step to step."""
    comm = hp.start_mpi()
    if comm.rank == 0:
        make_pack(Path(folder) / "pack.h5", {"train": 224, "test": 16})
    comm.Barrier()
    original, seen = Control.requests, []

    def count(self: Control, *told: Any) -> Any:
        seen.append(emulated_gpu.counts())
        return original(self, *told)

    flags = {"model": "digits", "device": "cuda", "reduce": transport, "threads": 1, "run": "costs"}
    flags |= {"epochs": 2, "batch_size": 16, "progress": "none"}
    flags |= {"data": f"{folder}/pack.h5", "runs_dir": f"{folder}/runs"}
    with mock.patch.object(Control, "requests", count):
        hp.train(**flags)
    if comm.rank == 0:
        for before, after in itertools.pairwise(seen):
            print(json.dumps({name: after[name] - before[name] for name in after}))


if __name__ == "__main__":
    main(*sys.argv[1:])
