"""Parameters that no gradient reaches: updated as with a gradient of zero, and named once."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
import torch
from torch import nn

from hpctrain.config import Config
from hpctrain.data.loader import Batch
from hpctrain.report.record import read_records
from hpctrain.training.train import train
from tests.training.test_step import make_trainer, train_step

pytestmark = pytest.mark.mpi
ROWS, STEPS = 14, 8


class Net(nn.Module):
    """Layers for every step, for steps 0, 3, 6, for steps 2, 5, and for none."""

    def __init__(self):
        super().__init__()
        self.always, self.often, self.rare, self.never = (nn.Linear(5, 3) for _ in range(4))
        self.step = 0

    def forward(self, x):
        x, layers = x.flatten(1), [self.always]
        layers += {0: [self.often], 2: [self.rare]}.get(self.step % 3, [])
        return sum(layer(x) for layer in layers)


def net():
    torch.manual_seed(3)
    return Net().double()


def data(step):
    generator = torch.Generator().manual_seed(step)
    images = torch.randn(ROWS, 1, 1, 5, generator=generator, dtype=torch.float64)
    return images, torch.randint(3, (ROWS,), generator=generator)


def ours(comm, config):
    trainer = make_trainer(net(), comm, config)
    for step in range(STEPS):
        trainer.model.step = step
        images, labels = data(step)
        own = slice(comm.rank, None, comm.size)
        train_step(trainer, [Batch(comm.rank, images[own], labels[own], step)], ROWS)
    return trainer


def plain(config):
    """torch's own loop, one parameter at a time. Without a gradient, it is zero."""
    model = net()
    options = {"lr": config.lr, "weight_decay": config.weight_decay, "foreach": False}
    kinds = {"adam": torch.optim.Adam, "adamw": torch.optim.AdamW}
    if config.optimizer == "sgdm":
        optimizer = torch.optim.SGD(model.parameters(), momentum=config.momentum, **options)
    else:
        optimizer = kinds[config.optimizer](model.parameters(), **options)
    for p in model.parameters():
        p.grad = torch.zeros_like(p)
    for step in range(STEPS):
        model.step = step
        optimizer.zero_grad(set_to_none=False)
        images, labels = data(step)
        nn.functional.cross_entropy(model(images), labels).backward()
        if config.clip_norm:
            nn.utils.clip_grad_norm_(model.parameters(), config.clip_norm)
        optimizer.step()
    return model


CONFIGS = [
    Config(optimizer="sgdm", lr=0.1, weight_decay=0.1),
    Config(optimizer="sgdm", lr=0.1, weight_decay=0.1, momentum=0.0),
    Config(optimizer="sgdm", lr=0.1, weight_decay=0.1, clip_norm=0.3),
    Config(optimizer="sgdm", lr=0.1),
    Config(optimizer="adam", lr=0.1, weight_decay=0.1),
    Config(optimizer="adamw", lr=0.1, weight_decay=0.1),
]


@pytest.mark.parametrize("config", CONFIGS, ids=lambda c: f"{c.optimizer} {c.weight_decay}")
def test_every_parameter_is_that_of_a_plain_loop(comm, config):
    trainer = ours(comm, config)
    expected, begun = plain(config).state_dict(), net().state_dict()
    for name, value in trainer.model.state_dict().items():
        assert (value - expected[name]).abs().max() < 1e-12, name
        same = name.startswith("never") and not config.weight_decay
        assert torch.equal(value, begun[name]) == same, name


@pytest.fixture
def config(settings):
    """Three epochs of a network with a layer that comes late and one that is never used."""
    own = {"model": "tests.support.nets:branches", "weight_decay": 0.1, "epochs": 3}
    return dataclasses.replace(settings, shards=8, deterministic=True, threads=None, **own)


def test_what_no_gradient_reached_is_named_once(comm, config, capsys):
    assert train(dataclasses.replace(config, progress="plain"), comm) == 0
    if comm.rank == 0:
        notes = [r for r in read_records(Path(config.runs_dir) / "a") if r["kind"] == "note"]
        (text,) = (n["text"] for n in notes if "gradient" in n["text"])
        assert "parameters in the last step of the first epoch (" in text
        assert "spare.weight, spare.bias)" in text and "linear" not in text
        assert text[:40] in capsys.readouterr().out


def test_nothing_is_noted_where_every_parameter_has_a_gradient(comm, settings):
    assert train(settings, comm) == 0
    if comm.rank == 0:
        assert not [r for r in read_records(Path(settings.runs_dir) / "a") if r["kind"] == "note"]
