"""Gradients launched kernel by kernel, compiled, or replayed from graphs: the same."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import hpctrain as hp
from tests.support.api import make_gradients

SHAPE = (3, 8, 8)


class Recorder:
    """As GPUs record: the work is known by what it reads and writes, replays fill its results."""

    def __init__(self):
        self.recorded = self.replayed = 0

    def warm_up(self, work):
        return work()

    def __call__(self, work):
        self.recorded += 1
        sums = {"loss": torch.full((), torch.nan), "correct": torch.full((), -1)}

        def replay():
            self.replayed += 1
            for name, new in work().items():
                sums[name].copy_(new)

        return sums, replay


def network(dropout=0.5):
    torch.manual_seed(3)
    layers = nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Dropout(dropout), nn.Flatten()
    return nn.Sequential(*layers, nn.Linear(4 * 36, 5)).train()


def batch(rows, key):
    generator = torch.Generator().manual_seed(key)
    images = torch.rand(rows, *SHAPE, generator=generator)
    targets = torch.randint(0, 5, (rows,), generator=generator)
    return images.to(memory_format=torch.channels_last), targets


def gradients(rows, total=16, model=None, **how):
    """What a list of batches gives, one after another: losses, answers, gradients, statistics."""
    model = model or network()
    norms = hp.BatchNorms(model)
    message = hp.Message(model, norms.channels, 0, 1)
    backward = make_gradients(model, message, **how)
    found, statistics = [], [model[1].running_mean, model[1].running_var]
    for key, count in enumerate(rows):
        message.zero()
        torch.manual_seed(key)
        sums = backward(*batch(count, key), total)
        figures = torch.stack([sums["loss"].detach(), sums["correct"]])
        found.append(torch.cat([figures, message.gradients, *statistics]).clone())
    return found


def same(one, other):
    return all(torch.equal(*pair) for pair in zip(one, other, strict=True))


def test_replayed_gradients_are_the_same_whatever_the_shape():
    rows = [8, 8, 8, 3, 8, 8, 3, 8, 8, 3, 8, 3, 3]  # whole batches, and short last ones
    recorder, plain = Recorder(), gradients(rows)
    assert same(plain, gradients(rows, recorder=recorder))
    assert recorder.recorded == 2 and recorder.replayed > 5
    assert not same(plain, gradients(rows, total=17))
    assert not same(plain[:-1], plain[1:])


def test_a_step_that_cannot_be_recorded_is_one_line():
    """The user learns of what broke the recording, not of how that ended."""

    class Broken(Recorder):
        def __call__(self, work):
            try:
                raise RuntimeError("operation not permitted when stream is capturing\nand more")
            finally:
                raise RuntimeError("operation failed due to a previous error during capture")

    with pytest.raises(hp.RunError, match="--cuda-graphs: .*not permitted when stream") as caught:
        gradients([4] * 9, recorder=Broken())
    assert "\n" not in str(caught.value)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # torch's compiler uses its own old parts
def test_compiled_gradients_are_those_of_torch_and_are_recorded_like_others():
    """Without dropout, which draws other random numbers when compiled."""
    rows, recorder = [4, 4, 2, 2, 4, 4, 4], Recorder()
    compiled, plain, recorded = (
        gradients(rows, model=network(0.0), **how)
        for how in ({"compiled": True}, {}, {"compiled": True, "recorder": recorder})
    )
    for found, expected in zip(compiled, plain, strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-6)
    assert same(compiled, recorded) and recorder.replayed > 0
    assert not torch.allclose(compiled[0], compiled[1], rtol=1e-4, atol=1e-6)


def test_what_cannot_be_compiled_is_one_line(monkeypatch):
    def broken(graph, inputs):
        raise ValueError("no such instruction")

    compile_by = torch.compile
    monkeypatch.setattr(torch, "compile", lambda m, **how: compile_by(m, backend=broken))
    with pytest.raises(hp.RunError, match="--compile: torch cannot compile.*no such instruction"):
        gradients([4], compiled=True)


@pytest.mark.ranks(1)
def test_a_compiler_that_the_machine_lacks_is_named(comm, short, monkeypatch):
    monkeypatch.setenv("CXX", "/nowhere/g++")
    with pytest.raises(hp.UsageError, match="--compile needs a C.*/nowhere"):
        hp.train(**short | {"compile": True, "device": "cpu"})
