"""Parameters that no gradient has reached stay as they are, as in torch where `.grad` is None."""

from __future__ import annotations

import contextlib
import dataclasses
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from hpctrain.config import Config
from hpctrain.data.loader import Batch
from hpctrain.report.record import read_records
from hpctrain.streams import Snapshot
from hpctrain.training import state
from hpctrain.training.optimizer import UnusedParameters
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


def ours(comm, config, steps=range(STEPS), late=0):
    trainer = make_trainer(net(), comm, config)
    trainer.in_flight = late
    for step in steps:
        trainer.model.step = step
        images, labels = data(step)
        own = slice(comm.rank, None, comm.size)
        train_step(trainer, [Batch(comm.rank, images[own], labels[own], step)], ROWS)
    return trainer


def plain(config):
    """torch's own loop, one parameter at a time. A gradient that there was once is zero later."""
    model = net()
    options = {"lr": config.lr, "weight_decay": config.weight_decay, "foreach": False}
    kinds = {"adam": torch.optim.Adam, "adamw": torch.optim.AdamW}
    if config.optimizer == "sgdm":
        optimizer = torch.optim.SGD(model.parameters(), momentum=config.momentum, **options)
    else:
        optimizer = kinds[config.optimizer](model.parameters(), **options)
    for step in range(STEPS):
        model.step = step
        optimizer.zero_grad(set_to_none=False)
        images, labels = data(step)
        nn.functional.cross_entropy(model(images), labels).backward()
        if config.clip_norm:
            nn.utils.clip_grad_norm_(model.parameters(), config.clip_norm)
        for p in model.parameters():
            if p.grad is not None and not optimizer.state[p] and config.optimizer != "sgdm":
                zeros = {name: torch.zeros_like(p) for name in ("exp_avg", "exp_avg_sq")}
                # Adam's correction counts the steps of the run, not those of a parameter
                optimizer.state[p] = {"step": torch.tensor(float(step)), **zeros}
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
@pytest.mark.parametrize("told_late", [False, True])
def test_every_parameter_is_that_of_a_plain_loop(comm, config, told_late, monkeypatch):
    """Also where the host never learns which are used, as before a GPU's copy arrives."""
    if told_late:
        monkeypatch.setattr(Snapshot, "arrived", False)
    trainer = ours(comm, config)
    expected, begun = plain(config).state_dict(), net().state_dict()
    for name, value in trainer.model.state_dict().items():
        assert (value - expected[name]).abs().max() < 1e-12, name
        assert torch.equal(value, begun[name]) == name.startswith("never"), name
    assert trainer.unused.names() == ["never.weight", "never.bias"]
    flat = trainer.tensors()
    for segment in trainer.message.layout.segments[-2:]:
        for name in ("momentum_buffer", "exp_avg", "exp_avg_sq"):
            if f"optimizer.{name}" in flat:
                assert not segment.of(flat[f"optimizer.{name}"]).any()


def test_decay_would_shrink_them(comm, monkeypatch):
    """Negative control."""
    monkeypatch.setattr(UnusedParameters, "untouched", lambda *a: contextlib.nullcontext())
    shrunk = ours(comm, CONFIGS[0]).model.never.weight
    assert (shrunk - net().never.weight).abs().max() > 1e-3


def test_a_gradient_of_one_rank_is_one_of_all(comm):
    trainer = make_trainer(net(), comm, CONFIGS[0])
    trainer.model.step = 0 if comm.rank == comm.size - 1 else 1
    images, labels = data(0)
    train_step(trainer, [Batch(comm.rank, images, labels, 0)], ROWS * comm.size)
    assert trainer.unused.names() == ["rare.weight", "rare.bias", "never.weight", "never.bias"]
    assert len(set(comm.allgather(trainer.message.weights.detach().numpy().tobytes()))) == 1


def test_a_step_that_is_not_finite_makes_nothing_used(comm):
    trainer = make_trainer(net(), comm, CONFIGS[0])
    images, labels = data(0)
    train_step(trainer, [Batch(comm.rank, images * float("inf"), labels, 0)], ROWS * comm.size)
    assert not trainer.message.totals().finite
    assert len(trainer.unused.names()) == 8


class Counter(TorchDispatchMode):
    """Counts operations."""

    def __init__(self):
        super().__init__()
        self.calls = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.calls += 1
        return function(*args, **(kwargs or {}))


def test_once_all_are_used_a_step_launches_nothing_more(comm, monkeypatch):
    def calls():
        model = net()
        del model.never
        trainer, found = make_trainer(model, comm, CONFIGS[0]), []
        for step in (0, 2, 1):
            model.step = step
            images, labels = data(step)
            with Counter() as counter:
                train_step(trainer, [Batch(comm.rank, images, labels, 0)], ROWS * comm.size)
            found.append(counter.calls)
        return found

    with_it = calls()
    monkeypatch.setattr(UnusedParameters, "untouched", lambda *a: contextlib.nullcontext())
    without = calls()
    assert with_it[0] > without[0] and with_it[1] > without[1]
    assert with_it[2] == without[2]


@pytest.fixture
def config(settings):
    """Three epochs of a network with a layer that comes late and one that is never used."""
    own = {"model": "tests.odd_models:branches", "weight_decay": 0.1, "epochs": 3}
    return dataclasses.replace(settings, shards=8, deterministic=True, threads=None, **own)


def test_what_no_gradient_reached_is_named_once(comm, config, capsys):
    assert train(dataclasses.replace(config, progress="plain"), comm) == 0
    if comm.rank == 0:
        notes = [r for r in read_records(Path(config.runs_dir) / "a") if r["kind"] == "note"]
        assert [n["text"] for n in notes if "gradient" in n["text"]] == [
            "no gradient reached 2 of 6 parameters (spare.weight, spare.bias): they are left as"
            " they were, by --weight-decay too"
        ]
        assert "no gradient reached 2 of 6" in capsys.readouterr().out


def test_in_a_checkpoint_of_before_all_are_used(comm, config, monkeypatch):
    """It does not say which are: they go on as they were trained, shrinking."""
    begun = dataclasses.replace(config, epochs=1, checkpoint_every="7")
    with monkeypatch.context() as patch:
        original = state.gather

        def older(*given):
            tensors, state = original(*given)
            return {n: t for n, t in tensors.items() if n != "used"}, state

        patch.setattr("hpctrain.training.loop.gather", older)
        assert train(begun, comm) == 0
    before = load_file(Path(config.runs_dir) / "a/model.safetensors")
    comm.Barrier()
    assert train(config, comm) == 0
    after = load_file(Path(config.runs_dir) / "a/model.safetensors")
    assert (before["spare.weight"] - after["spare.weight"]).abs().max() > 1e-3
    assert train(dataclasses.replace(config, run="new"), comm) == 0
    comm.Barrier()
    new = load_file(Path(config.runs_dir) / "new/model.safetensors")
    assert torch.equal(new["spare.weight"], before["spare.weight"])
