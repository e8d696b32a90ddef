"""--batch-per-rank auto on a GPU: torch runs out of memory, and everything is freed again."""

from __future__ import annotations

import json

import pytest
import torch

from hpctrain.training import batch_fit
from hpctrain.training.train import train
from tests.packs import make_pack
from tests.training.runs import digest, short_run

pytestmark = pytest.mark.gpu
MIB = 1 << 20


def test_what_fits_is_found_and_the_memory_is_free_afterwards(comm, shared_tmp, monkeypatch):
    make_pack(shared_tmp / "p.h5", {"train": 600, "test": 5})
    config = short_run(shared_tmp, "p.h5", run="a", batch_per_rank="auto", device="cuda")
    tried = []
    step = batch_fit.MemoryTrial.step

    def note(self, images):
        step(self, images)
        tried.append((images, torch.cuda.max_memory_reserved() / MIB))

    monkeypatch.setattr(batch_fit.MemoryTrial, "step", note)
    monkeypatch.setattr(batch_fit, "free_on_gpu", lambda device: 100.0 * MIB)
    train(config, comm)
    fitted = json.loads((shared_tmp / "runs" / "a" / "plan.json").read_text())["batch_size"]
    assert 8 <= fitted < 512  # 512 images: the cap
    assert [images for images, _ in tried] == [2**n for n in range(len(tried))]  # else: no memory
    assert tried[-1][0] == fitted and tried[-1][1] <= 95
    torch.cuda.empty_cache()
    assert torch.empty(200 * MIB, dtype=torch.uint8, device="cuda").is_cuda  # no limit is left


@pytest.mark.parametrize("given", [{}, {"graphs": True}])
def test_recomputed_activations_give_the_same_bits(comm, shared_tmp, given):
    make_pack(shared_tmp / "p.h5", {"train": 40, "test": 5}, (32, 32, 3), 3)
    given = given | {"model": "resnet18", "batch_size": 8, "deterministic": True, "epochs": 2}
    config = short_run(shared_tmp, "p.h5", device="cuda", **given)
    plain = digest(config, comm, "plain")
    again = short_run(shared_tmp, "p.h5", device="cuda", checkpoint_activations=True, **given)
    assert digest(again, comm, "checkpointed") == plain
