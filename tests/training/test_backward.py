"""Gradients launched kernel by kernel, compiled, or replayed from graphs: the same."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from torch import nn

from hpctrain.config import Config, check_settings
from hpctrain.errors import RunError, UsageError
from hpctrain.inference.tasks import Classification
from hpctrain.parallel.batchnorm import BatchNorms
from hpctrain.parallel.message import Message
from hpctrain.training import trainer
from hpctrain.training.compute import MOST_GRAPHS, WARM, Compiled, Eager, Graphs, make_backward
from tests.training.runs import digest

SHAPE = (3, 8, 8)


class Recorder:
    """As GPUs record: the work is known by what it reads and writes, replays fill its results."""

    def __init__(self):
        self.warmed = self.recorded = self.replayed = 0

    def warm_up(self, work):
        self.warmed += 1
        return work()

    def __call__(self, work):
        self.recorded += 1
        found = torch.full((), torch.nan), torch.full((), -1)

        def replay():
            self.replayed += 1
            for here, new in zip(found, work(), strict=True):
                here.copy_(new)

        return found, replay


def network():
    torch.manual_seed(3)
    layers = nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Dropout(0.5), nn.Flatten()
    return nn.Sequential(*layers, nn.Linear(4 * 36, 5)).train()


def batch(rows, key):
    generator = torch.Generator().manual_seed(key)
    images = torch.rand(rows, *SHAPE, generator=generator)
    targets = torch.randint(0, 5, (rows,), generator=generator)
    return images.to(memory_format=torch.channels_last), targets


def eager(model):
    return Eager(model, Classification(), Message(model, 4, 0, 1))


def made(model, compiled, graphs):
    return make_backward(model, Classification(), Message(model, 4, 0, 1), compiled, graphs)


def gradients(make, rows, total=16):
    """What a list of batches gives, one after another: losses, answers, gradients, statistics."""
    model = network()
    norms = BatchNorms(model)
    message = Message(model, norms.channels, 0, 1)
    backward = make(model, Classification(), message)
    found, statistics = [], [model[1].running_mean, model[1].running_var]
    for key, count in enumerate(rows):
        message.zero()
        torch.manual_seed(key)
        loss, correct = backward(*batch(count, key), total)
        assert not loss.requires_grad
        gradients, batch_norm = message.gradients.clone(), torch.stack(statistics)
        found.append((loss.item(), int(correct), gradients, batch_norm))
    return found


def same(one, other):
    return all(
        a[:2] == b[:2] and torch.equal(a[2], b[2]) and torch.equal(a[3], b[3])
        for a, b in zip(one, other, strict=True)
    )


def test_replayed_gradients_are_the_same_whatever_the_shape():
    rows = [8, 8, 8, 3, 8, 8, 3, 8, 8, 3, 8, 3, 3]  # whole batches, and short last ones
    recorder = Recorder()
    plain = gradients(Eager, rows)
    assert same(plain, gradients(lambda *parts: Graphs(Eager(*parts), recorder), rows))
    assert recorder.recorded == 2 and recorder.replayed == len(rows) - 2 * WARM
    assert recorder.warmed == 2 * WARM
    assert not same(plain, gradients(Eager, rows, total=17))
    assert not same(plain[:-1], plain[1:])


def test_a_graph_belongs_to_one_total_one_layout_and_few_shapes():
    model, recorder = network(), Recorder()
    backward = Graphs(eager(model), recorder)
    images, targets = batch(6, 0)
    for _ in range(WARM + 1):
        backward(images, targets, 6)
    assert recorder.recorded == 1
    backward(images, targets, 7)
    backward(images.contiguous(), targets, 6)
    assert (recorder.recorded, recorder.replayed) == (1, 1)
    for total in range(10, 10 + MOST_GRAPHS + 3):
        for _ in range(WARM + 2):
            backward(images, targets, total)
    assert recorder.recorded == MOST_GRAPHS


def test_a_step_that_cannot_be_recorded_is_one_line():
    """The user learns of what broke the recording, not of how that ended."""

    class Broken(Recorder):
        def __call__(self, work):
            try:
                raise RuntimeError("operation not permitted when stream is capturing\nand more")
            finally:
                raise RuntimeError("operation failed due to a previous error during capture")

    backward = Graphs(eager(network()), Broken())
    for _ in range(WARM):
        backward(*batch(4, 0), 4)
    with pytest.raises(RunError) as caught:
        backward(*batch(4, 0), 4)
    expected = "operation not permitted when stream is capturing; do without"
    assert str(caught.value) == f"--cuda-graphs: this network's step cannot be recorded: {expected}"


@pytest.mark.mpi
def test_a_run_with_graphs_is_the_same_run(comm, settings, monkeypatch):
    config = dataclasses.replace(settings, deterministic=True, shards=4, epochs=3, flip=True)
    plain, recorder = digest(config, comm, "plain"), Recorder()

    def made(model, loss, message, compiled, graphs):
        return Graphs(Eager(model, loss, message), recorder)

    monkeypatch.setattr(trainer, "make_backward", made)
    assert digest(config, comm, "graphs") == plain
    assert recorder.replayed > 10
    assert digest(dataclasses.replace(config, seed=1), comm, "other") != plain


def test_graphs_need_a_gpu_and_leave_nothing_to_overlap():
    with pytest.raises(UsageError, match="--cuda-graphs is for GPUs"):
        made(network(), False, True)
    with pytest.raises(UsageError, match="--overlap 3 and --cuda-graphs exclude each other"):
        check_settings(Config(cuda_graphs=True, overlap=3))
    check_settings(Config(cuda_graphs=True))


def without_dropout(compiled):
    """Compiled dropout draws other random numbers."""

    def make(model, loss, message):
        model[3].p = 0.0
        return make_backward(model, loss, message, compiled, False)

    return make


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # torch's compiler uses its own old parts
def test_compiled_gradients_are_those_of_torch():
    rows = [4, 4, 2, 2]
    compiled, plain = (gradients(without_dropout(kind), rows) for kind in (True, False))
    for found, expected in zip(compiled, plain, strict=True):
        assert found[1] == expected[1] and found[0] == pytest.approx(expected[0], rel=1e-5)
        assert torch.allclose(found[2], expected[2], rtol=1e-4, atol=1e-6)
        assert torch.allclose(found[3], expected[3], rtol=1e-5)
    assert not torch.allclose(compiled[0][2], compiled[1][2], rtol=1e-4, atol=1e-6)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_compiled_gradients_are_recorded_like_others(monkeypatch):
    """torch's own graphs are off whatever its environment says."""
    seen, compile_by = [], torch.compile

    def noted(model, **how):
        seen.append(how["options"])
        return compile_by(model, **how)

    monkeypatch.setattr(torch, "compile", noted)
    make, recorder, rows = without_dropout(True), Recorder(), [4] * (WARM + 3)
    compiled = gradients(make, rows)
    assert same(compiled, gradients(lambda *parts: Graphs(make(*parts), recorder), rows))
    assert (recorder.warmed, recorder.recorded, recorder.replayed) == (WARM, 1, 3)
    assert seen == [{"triton.cudagraphs": False}] * 2


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_compiling_needs_a_compiler(monkeypatch):
    monkeypatch.setenv("CXX", "/nowhere/g++")
    with pytest.raises(UsageError, match="--compile needs a C.. compiler .* there is no /nowhere"):
        made(network(), True, False)
    assert isinstance(made(network(), False, False), Eager)


def test_what_cannot_be_compiled_is_one_line(monkeypatch):
    def broken(graph, inputs):
        raise ValueError("no such instruction")

    compile_by = torch.compile
    monkeypatch.setattr(torch, "compile", lambda m, **how: compile_by(m, backend=broken))
    model = network()
    backward = Compiled(model, Classification(), Message(model, 4, 0, 1))
    with pytest.raises(RunError, match="--compile: torch cannot compile.*no such instruction"):
        backward(*batch(4, 0), 4)
