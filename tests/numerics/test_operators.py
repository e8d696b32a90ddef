"""A step dispatches few more operators than that of a plain torch loop, with the same settings.

Both use the foreach implementation of SGD, as torch does on GPUs, where every operator but views
and allocations launches kernels: for a small network their number is the time of a step.
"""

from __future__ import annotations

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import hpctrain as hp
from scripts.bench.steps import first_batches, plain_step, ready
from tests.support.packs import make_pack

ROWS, WARM = 8, 4
MOST = {"resnet50": 1.09, "digits": 1.56}  # measured: 1.08, 1.51


class Counter(TorchDispatchMode):
    """Counts the operators that torch dispatches."""

    found = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.found += not function._schema.name.startswith("profiler::")
        return function(*args, **(kwargs or {}))


def count(step):
    """The operators of a step, after some that are not counted: the first ones do more."""
    for _ in range(WARM):
        step()
    with Counter() as counter:
        step()
    return counter.found


@pytest.mark.parametrize(("network", "shape"), [("resnet50", (64, 64, 3)), ("digits", (28, 28, 1))])
def test_a_step_has_few_operators_more_than_a_plain_one(tmp_path, network, shape):
    pack = make_pack(tmp_path / "pack.h5", {"train": ROWS}, shape, 5)
    flags = ["--data", pack, "--model", network, "--batch-size", ROWS, "--weight-decay", "1e-4"]
    with ready(*flags, "--device", "cpu", "--threads", "1") as run:
        ((batch,),) = first_batches(run)
        model = hp.build(network, shape, 5).to(memory_format=torch.channels_last).train()
        plain = plain_step(model, "fp32", foreach=True, weight_decay=1e-4)
        ours = count(lambda: run.trainer.step([batch], ROWS).array())
        ratio = ours / count(lambda: plain(batch.images, batch.targets))
    assert 0.9 < ratio < MOST[network]
