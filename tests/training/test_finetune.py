"""Fine-tuning against plain torch in float64: frozen parts, groups, schedules."""

from __future__ import annotations

import copy
import dataclasses

import numpy as np
import pytest
import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from hpctrain.config import Config, check_settings
from hpctrain.data.pack import write_pack
from hpctrain.errors import UsageError
from hpctrain.models import read_model
from hpctrain.parallel.batchnorm import BatchNorms
from hpctrain.parallel.layout import Group, lay_out
from hpctrain.parallel.message import Message
from hpctrain.parallel.overlap import cut
from hpctrain.report.record import read_records
from hpctrain.training.average import Average
from hpctrain.training.finetune import freeze, parameter_groups
from hpctrain.training.setup import make_model, set_up
from hpctrain.training.train import train

MODEL = "tests.training.test_finetune:network"
STEPS, EPOCHS = 7, 3


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv, self.norm = nn.Conv2d(6, 6, 3, padding=1), nn.GroupNorm(2, 6)

    def forward(self, x):
        return x + torch.tanh(self.norm(self.conv(x)))


class Network(nn.Module):
    """Layers of a fine-tuned network, in float64: a stem, two blocks, a classifier."""

    def __init__(self, channels, classes):
        super().__init__()
        self.stem, self.bn = nn.Conv2d(channels, 6, 3, stride=2, bias=False), nn.BatchNorm2d(6)
        self.blocks = nn.Sequential(Block(), Block())
        self.last, self.shift = nn.BatchNorm2d(6), nn.Parameter(torch.zeros(6))
        self.fc = nn.Linear(6, classes)

    def forward(self, x):
        x = self.blocks(torch.tanh(self.bn(self.stem(x))))
        return self.fc(self.last(x).mean((2, 3)) + self.shift)


def network(image_shape, classes):
    return Network(image_shape[2], classes).double()


def sgd(groups):
    return torch.optim.SGD(groups, lr=0.1, momentum=0.9, foreach=False)


def adamw(groups):
    return torch.optim.AdamW(groups, lr=0.1, foreach=False)


def layer(name):
    """The number of a parameter's layer: the stem with its norm, two blocks, the classifier."""
    layers = {"blocks.0": 1, "blocks.1": 2, "last": 2, "fc": 3}  # a norm counts with the one before
    return next((n for start, n in layers.items() if name.startswith(start)), 0)


def undecayed(name):
    return (
        name.endswith("bias")
        or "norm" in name
        or name.startswith(("bn", "last"))
        or name == "shift"
    )


@dataclasses.dataclass
class Case:
    """Settings, and the same as a user of torch alone writes them."""

    settings: dict
    optimizer: object = sgd
    scale: object = lambda name: 1.0
    decay: object = lambda name: 0.0
    frozen: object = lambda name: False
    schedule: object = None  # of the optimizer, to a scheduler that is stepped after each step
    average: object = None  # of the model, to a torch AveragedModel of it


CASES = {
    "freeze": Case(
        {"freeze": "stem,bn,blocks.0.*"}, frozen=lambda n: n.startswith(("stem", "bn", "blocks.0"))
    ),
    "freeze, groups": Case(
        {
            "freeze": "stem, bn",
            "optimizer": "adamw",
            "weight_decay": 0.3,
            "no_decay": "norm,bias,shift",
            "lr_factors": "*=0.5,blocks.1=0.25,fc.bias=2",
            "overlap": 3,
        },
        adamw,
        lambda n: 2 if n == "fc.bias" else 0.25 if n.startswith("blocks.1") else 0.5,
        lambda n: 0.0 if undecayed(n) else 0.3,
        lambda n: n.startswith(("stem", "bn")),
    ),
    "a factor for each layer": Case(
        {"lr_factors": "stem=0.125,bn=0.125,shift=0.125,blocks.0=0.25,blocks.1=0.5,last=0.5"},
        scale=lambda n: 0.5 ** (3 - layer(n)),
    ),
    "no decay, smallest rate": Case(
        {"weight_decay": 0.3, "no_decay": "bias", "schedule": "cosine", "min_lr": 0.02},
        decay=lambda n: 0.0 if n.endswith("bias") else 0.3,
        schedule=lambda o: torch.optim.lr_scheduler.CosineAnnealingLR(o, STEPS * EPOCHS, 0.02),
    ),
    "average, freeze": Case(
        {
            "freeze": "stem,bn",
            "ema": 0.8,
            "final": "ema",
            "optimizer": "adamw",
        },
        adamw,
        frozen=lambda n: n.startswith(("stem", "bn")),
        average=lambda model: AveragedModel(
            model, multi_avg_fn=get_ema_multi_avg_fn(0.8), use_buffers=True
        ),
    ),
    "one cycle": Case(
        {"schedule": "one-cycle"},
        schedule=lambda o: torch.optim.lr_scheduler.OneCycleLR(
            o, 0.1, STEPS * EPOCHS, cycle_momentum=False
        ),
    ),
}


@pytest.fixture
def settings(small_settings):
    own = {"model": MODEL, "shards": 5, "epochs": EPOCHS, "lr": 0.1, "test": False}
    return dataclasses.replace(small_settings, **own)


def plain_torch(case, config, alone):
    """The same batches by shards in one process, with nothing of hpctrain's optimizer or layout."""
    job = set_up(dataclasses.replace(config, overlap=0, freeze=None), alone)
    model, _ = make_model(config, job.pack)
    parameters = dict(model.named_parameters())
    frozen = [name for name in parameters if case.frozen(name)]
    for name in frozen:
        parameters[name].requires_grad_(False)
    model.bn.train(not any(name.startswith("bn") for name in frozen))
    before = copy.deepcopy(model.bn.state_dict())

    def group(name):
        own = {"lr": 0.1 * case.scale(name), "weight_decay": case.decay(name)}
        return {"params": [parameters[name]], **own}

    optimizer = case.optimizer([group(name) for name in parameters if name not in frozen])
    scheduler = case.schedule(optimizer) if case.schedule else None
    average, steps = case.average(model) if case.average else None, 0
    if average:
        average.update_parameters(model)  # the first one copies
    for epoch in range(EPOCHS):
        for number, batches in enumerate(job.loader.epoch(epoch)):
            optimizer.zero_grad()
            for batch in batches:
                scores = model(batch.images.double())
                loss = nn.functional.cross_entropy(scores, batch.targets, reduction="sum")
                (loss / job.plan.partition.total(number)).backward()
            optimizer.step()
            steps += 1
            if scheduler:
                scheduler.step()
            if average:
                average.update_parameters(model)
    job.loader.close()
    return (average.module if average else model).state_dict(), before


@pytest.mark.mpi
@pytest.mark.parametrize("name", CASES)
def test_it_learns_what_plain_torch_learns_in_float64(comm, one_rank, settings, name, shared_tmp):
    case = CASES[name]
    config = dataclasses.replace(settings, run=name, **case.settings)
    assert train(config, comm) == 0
    if comm.rank == 0:
        found, _ = read_model(shared_tmp / "runs" / name / "model.safetensors")
        expected, statistics = plain_torch(case, config, one_rank)
        for key in dict(network((12, 12, 1), 10).named_parameters()):
            value = expected[key]
            torch.testing.assert_close(found[key], value, rtol=1e-12, atol=1e-12)
        if config.freeze:
            assert all(torch.equal(found[f"bn.{key}"], value) for key, value in statistics.items())
    comm.Barrier()


@pytest.mark.parametrize("name", ["freeze", "average, freeze"])
def test_running_statistics_are_those_of_torch(one_rank, settings, name, shared_tmp):
    """With one shard, pooled statistics are those of torch."""
    case = CASES[name]
    config = dataclasses.replace(settings, run=name, shards=1, **case.settings)
    assert train(config, one_rank) == 0
    found, _ = read_model(shared_tmp / "runs" / name / "model.safetensors")
    expected, _ = plain_torch(case, config, one_rank)
    for key in expected:
        if "running" in key:
            torch.testing.assert_close(found[key], expected[key], rtol=1e-11, atol=1e-11)


@pytest.mark.mpi
def test_the_average_is_what_is_validated_saved_and_tested(comm, settings, shared_tmp):
    if comm.rank == 0:
        images = np.random.default_rng(1).integers(0, 255, (124, 12, 12, 1), dtype=np.uint8)
        labels = np.arange(124) % 10
        same = images[101:], labels[101:]
        splits = {"train": (images[:101], labels[:101]), "validation": same, "test": same}
        write_pack(shared_tmp / "same.h5", splits, tuple("abcdefghij"), {"source": "test"})
    comm.Barrier()
    own = {"data": str(shared_tmp / "same.h5"), "ema": 0.999, "final": "ema", "test": True}
    assert train(dataclasses.replace(settings, **own), comm) == 0
    if comm.rank == 0:
        found = [r for r in read_records(shared_tmp / "runs" / "a") if r["kind"] == "evaluation"]
        last = {record["split"]: record["loss"] for record in found}
        assert last["validation"] == last["test"]
        assert max(r["loss"] for r in found) - min(r["loss"] for r in found) < 0.1  # barely moves
    comm.Barrier()


@pytest.mark.mpi
def test_the_best_network_is_an_average_too(comm, settings, shared_tmp):
    assert train(dataclasses.replace(settings, epochs=1, ema=0.9, final="ema"), comm) == 0
    if comm.rank == 0:
        files = [shared_tmp / "runs" / "a" / f"{name}.safetensors" for name in ("best", "model")]
        best, final = (read_model(file)[0] for file in files)
        assert all(torch.equal(best[key], final[key]) for key in final)
    comm.Barrier()


def test_running_statistics_are_averaged_and_a_skipped_step_is_not():
    model = network((12, 12, 1), 10)
    norms = BatchNorms(model)
    message = Message(model, norms.channels, 0, 1)
    average, first = (
        Average(message, norms, 0.75),
        [message.weights.data.clone(), norms.running + 0],
    )
    for skipped in (0, 1):
        message.weights.data.add_(4.0)
        norms.running.add_(8.0)
        message.skipped.fill_(skipped)
        average.update()
    with average.in_model():
        found = message.weights.data, norms.running, model.bn.running_mean
        expected = first[0] + 1, first[1] + 2, first[1][0, :6] + 2
        torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)
    found = message.weights.data, model.bn.running_mean
    torch.testing.assert_close(found, (first[0] + 8, first[1][0, :6] + 16), rtol=1e-12, atol=1e-12)


def test_the_message_holds_no_gradient_of_a_frozen_part():
    model = network((12, 12, 1), 10)
    freeze(model, "stem,bn,blocks,last")
    assert lay_out(model).length == 64 * (1 + 1 + 1)  # shift, fc.weight and fc.bias
    assert not model.bn.training and model.blocks.training


def test_groups_are_contiguous():
    model = network((12, 12, 1), 10)
    config = Config(weight_decay=0.1, no_decay="bias", lr_factors="fc=2")
    layout = lay_out(model, parameter_groups(model, config))
    assert [group for group, _ in layout.groups] == [
        Group(scale, decay) for scale in (1.0, 2.0) for decay in (0.0, 0.1)
    ]
    ends = [0, *(span.stop for _, span in layout.groups)]
    assert [span.start for _, span in layout.groups] == ends[:-1] and ends[-1] == layout.length


def test_segments_are_summed_in_the_order_in_which_backward_completes_them():
    model = network((12, 12, 1), 10)
    layout = lay_out(model, parameter_groups(model, Config(lr_factors="stem=0.5,blocks.0=0.5")))
    spans = cut(layout, 4)
    first = [min(s.number for s in layout.segments if s.offset in span) for span in spans]
    assert len(spans) > 2 and first == sorted(first, reverse=True) and first[-1] == 0
    assert [span.start for span in spans] != sorted((s.start for s in spans), reverse=True)


class Tied(Network):
    def __init__(self, channels, classes):
        super().__init__(channels, classes)
        self.blocks[1].conv.weight = self.blocks[0].conv.weight


def test_tied_parameters_are_named_by_either_name():
    model = Tied(1, 10)
    config = Config(lr_factors="blocks.1.conv.weight=0.5", no_decay="blocks.1", weight_decay=0.1)
    groups = parameter_groups(model, config)
    assert groups["blocks.0.conv.weight"] == Group(0.5, 0.0)
    freeze(model, "blocks.1.conv")
    assert not model.blocks[0].conv.weight.requires_grad


REFUSED = {
    "x*: no name in the network matches; the network has shift, stem, bn": {"freeze": "x*"},
    "it freezes all parameters": {"freeze": "*"},
    "--lr-factors blocks.2: no name": {"lr_factors": "blocks.2=0.1"},
    "--no-decay embed: no name": {"no_decay": "norm,embed", "weight_decay": 0.1},
}


@pytest.mark.parametrize("words", REFUSED)
def test_a_pattern_that_matches_nothing_is_refused(words):
    config, model = Config(**REFUSED[words]), network((12, 12, 1), 10)
    check_settings(config)
    with pytest.raises(UsageError) as caught:
        freeze(model, config.freeze)
        parameter_groups(model, config)
    assert words in str(caught.value)


@pytest.mark.mpi
def test_one_cycle_has_no_other_warm_up(comm, settings):
    how = {"schedule": "one-cycle", "scale_lr": "linear", "batch_size": None}
    config = dataclasses.replace(settings, batch_per_rank=2, **how)
    assert set_up(config, comm).plan.warmup_steps == 0
    assert set_up(dataclasses.replace(config, schedule="cosine"), comm).plan.warmup_steps > 0


CONFLICTS = {
    "--no-decay bias needs a --weight-decay": {"no_decay": "bias"},
    "--min-lr is for --schedule cosine or step": {"min_lr": 0.1},
    "--min-lr 0.1 is above --lr 0.01": {"min_lr": 0.1, "schedule": "cosine"},
    "--schedule one-cycle has a warm-up": {"schedule": "one-cycle", "warmup_epochs": 1.0},
    "--ema 0.9 needs --final ema": {"ema": 0.9},
    "--final ema needs the decay": {"final": "ema"},
    "--lr-factors fc: give patterns": {"lr_factors": "fc"},
    "--lr-factors fc=0: give patterns": {"lr_factors": "fc=0"},
    "--lr-factors fc=nan: give patterns": {"lr_factors": "fc=nan"},
    "--freeze 'a,,b': give patterns": {"freeze": "a,,b"},
}


@pytest.mark.parametrize("words", CONFLICTS)
def test_settings_that_contradict_each_other_are_refused(words):
    with pytest.raises(UsageError) as caught:
        check_settings(Config(**CONFLICTS[words]))
    assert words in str(caught.value)
