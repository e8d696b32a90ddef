"""Frozen parts and averaged weights in whole runs.

What they learn is compared with torch in tests/contract/test_truth.py.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

import hpctrain as hp
from tests.support.short import ROWS, images, records

pytestmark = pytest.mark.ranks
AVERAGED = {"ema": 0.999, "final": "ema"}


def weights(settings: dict, name: str = "model") -> dict[str, torch.Tensor]:
    folder = Path(settings["runs_dir"]) / settings["run"]
    return load_file(max(folder.glob(f"{name}*.safetensors")))


def test_the_average_is_what_is_validated_saved_and_tested(comm, short):
    settings = short | AVERAGED | {"data": f"{short['runs_dir']}-same.h5"}
    if comm.rank == 0:
        same = images(ROWS["test"], (12, 12, 1), 10)
        splits = {"train": images(101, (12, 12, 1), 10), "validation": same, "test": same}
        hp.write_pack(settings["data"], splits, list("abcdefghij"))
    comm.Barrier()
    result = hp.train(**settings)
    assert hp.evaluate(result.folder).loss == pytest.approx(result.figures["test_loss"], rel=1e-5)
    assert result.figures["test_loss"] == result.figures["validation_loss"]
    if comm.rank == 0:
        losses = [record["loss"] for record in records(settings, "evaluation")]
        assert max(losses) - min(losses) < 0.1, "it barely moves"


def test_the_best_network_is_an_average_too(comm, short):
    settings = short | AVERAGED | {"epochs": 1}
    hp.train(**settings)
    best, final = weights(settings, "best"), weights(settings)
    assert all(torch.equal(best[name], final[name]) for name in final)


@pytest.mark.parametrize("tied", ["second", "third"])
def test_tied_parameters_are_frozen_by_either_name(comm, short, tied):
    settings = short | {"model": "tests.support.nets:FineTuned", "freeze": f"{tied}.weight"}
    settings |= {"epochs": 1, "lr": 0.1}
    hp.train(**settings)
    hp.train(**settings | {"run": "slow", "lr": 1e-12})
    found, first = weights(settings), weights(settings | {"run": "slow"})
    assert torch.equal(found["second.weight"], first["second.weight"])
    assert not torch.allclose(found["second.bias"], first["second.bias"], atol=1e-6)


def test_a_message_holds_no_gradient_of_a_frozen_part(comm):
    model = torch.nn.Sequential(torch.nn.Linear(100, 50), torch.nn.Linear(50, 3))
    whole = hp.Message(model, 0, 0, 1).tensor.numel()
    model[0].requires_grad_(False)
    assert hp.Message(model, 0, 0, 1).tensor.numel() <= whole - 100 * 50
