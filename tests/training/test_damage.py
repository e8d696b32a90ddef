"""What a resumed run rests on: every flipped bit of the small files is refused or without effect,
and so is a checkpoint whose checksums are right but that no run has written.
"""

from __future__ import annotations

import dataclasses
from functools import cache

import pytest
import torch

from hpctrain import plan_check
from hpctrain.config import Config, Interval, to_toml
from hpctrain.errors import UsageError
from hpctrain.plan import resolve
from hpctrain.plan_check import go_on
from hpctrain.training.checkpoint import Writer, newest
from hpctrain.training.folder import check_same, read_settings
from hpctrain.training.train import train
from tests.flips import flip_each_bit
from tests.packs import make_pack
from tests.test_plan import FACTS
from tests.training.runs import short_run

CONFIG = Config(data="flowers.h5", run="a", lr=0.017, momentum=0.875, flip=True, shards=4, seed=3)


@pytest.mark.parametrize("name", ["plan.json", "config.toml"])
def test_every_flipped_bit_is_refused_or_has_no_effect(tmp_path, monkeypatch, name):
    parse_toml = cache(plan_check.parse_toml)  # the other file's is slow
    monkeypatch.setattr(plan_check, "parse_toml", parse_toml)
    plan = resolve(CONFIG, FACTS)
    (tmp_path / "config.toml").write_text(to_toml(CONFIG))
    (tmp_path / "plan.json").write_text(plan.to_json() + "\n")
    facts = dataclasses.replace(FACTS, ranks=3)
    expected, without_effect = go_on(plan, CONFIG, facts), 0
    for place in flip_each_bit(tmp_path / name):
        try:
            before, found = read_settings(tmp_path)
            check_same(CONFIG, before, found, tmp_path)
        except UsageError as error:
            assert "\n" not in str(error)
            continue
        without_effect += 1
        assert go_on(found, CONFIG, facts) == expected, place
    size = 8 * (tmp_path / name).stat().st_size
    assert without_effect < size * {"plan.json": 0.1, "config.toml": 0.9}[name]
    assert read_settings(tmp_path) == (CONFIG, plan)


def without(name):
    return lambda tensors, state: tensors.pop(name)


def with_tensor(name, *shape):
    return lambda tensors, state: tensors.update({name: torch.zeros(shape)})


def with_state(**fields):
    return lambda tensors, state: state.update(fields)


@pytest.mark.parametrize(
    "change, said",
    [
        (without("norms.running"), "it lacks the tensor 'norms.running'"),
        (without("weights"), "it lacks the tensor 'weights'"),
        (with_tensor("weights", 3), r"no place for the tensor 'weights', \(3,\) of torch.float32"),
        (with_tensor("optimizer.momentum_buffer", 3), "no place for the tensor 'optimizer.mom"),
        (with_tensor("best.0", 3), "no place for the tensor 'best.0'"),
        (with_tensor("best.x"), "no place for the tensor 'best.x'"),
        (with_tensor("model.none", 3), "no place for the tensor 'model.none'"),
        (with_tensor("surplus", 3), "no place for the tensor 'surplus'"),
        (with_state(epoch=9), "step 7 of epoch 10 is no place in the run"),
        (with_state(step=8), "step 8 of epoch 2 is no place in the run"),
    ],
)
def test_a_checkpoint_that_no_run_has_written_is_refused(comm, finished, change, said):
    settings, folder = finished
    found, _ = newest(folder, 9999)
    tensors, state = found.tensors(), dict(found.state)
    change(tensors, state)
    with Writer(folder, Interval(steps=1), 1) as writer:
        writer.save(found.step, tensors, state)
        writer.wait()
    with pytest.raises(UsageError, match=f"checkpoint .* cannot be resumed from: .*{said}"):
        train(dataclasses.replace(settings, epochs=2), comm)


@pytest.fixture
def finished(comm, tmp_path):
    """The settings and the folder of a run of one epoch."""
    make_pack(tmp_path / "pack.h5", {"train": 101, "test": 23})
    settings = short_run(tmp_path, "pack.h5", run="a", batch_size=16, threads=1)
    assert train(settings, comm) == 0
    return settings, tmp_path / "runs" / "a"
