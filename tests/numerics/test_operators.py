"""A step does not wait for the device, and dispatches few operators more than one of plain torch.

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
MOST = {"resnet50": 1.06, "digits": 1.5}  # measured: 1.05, 1.47
WAITING = {"_local_scalar_dense", "equal", "nonzero", "is_nonzero", "masked_select", "unique"}


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


class NoWaiting(TorchDispatchMode):
    """Refuses operations whose result the host needs."""

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        name = function._schema.name.partition("::")[2]
        assert name not in WAITING, f"{name} waits for the device"
        return function(*args, **(kwargs or {}))


def ready_to_train(folder, network, shape, *flags):
    """A run before its first step, whose batches have all images of its pack."""
    pack = make_pack(folder / "pack.h5", {"train": ROWS}, shape, 5)
    words = ["--data", pack, "--model", network, "--batch-size", ROWS, *flags]
    return ready(*words, "--device", "cpu", "--threads", "1")


@pytest.mark.parametrize(("network", "shape"), [("resnet50", (64, 64, 3)), ("digits", (28, 28, 1))])
def test_a_step_has_few_operators_more_than_a_plain_one(tmp_path, network, shape):
    with ready_to_train(tmp_path, network, shape, "--weight-decay", "1e-4") as run:
        ((batch,),) = first_batches(run)
        model = hp.build(network, shape, 5).to(memory_format=torch.channels_last).train()
        plain = plain_step(model, "fp32", foreach=True, weight_decay=1e-4)
        ours = count(lambda: run.trainer.step([batch], ROWS).array())
        ratio = ours / count(lambda: plain(batch.images, batch.targets))
    assert 0.9 < ratio < MOST[network]


@pytest.mark.parametrize("mode", ["exact", "running", "average"])
def test_a_step_does_not_wait_for_the_device(tmp_path, mode):
    flags = ["--batch-norm", mode, "--clip-norm", "1", "--class-weights", "balanced"]
    with ready_to_train(tmp_path, "digits", (28, 28, 1), *flags) as run:
        ((batch,),) = first_batches(run)
        with NoWaiting():
            reported = [run.trainer.step([batch], ROWS) for _ in range(2)]
            with pytest.raises(AssertionError, match="_local_scalar_dense"):
                torch.ones(()).item()
        assert len(reported[-1].array())
