"""What is wrong is never kept: steps that are not finite, ranks that hold different weights.

The run fails with one line. The same command without the fault goes on, or starts again, and ends
with the bits of a run that never met it.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as some

import hpctrain as hp
from tests.support.api import IN_FLIGHT, tensor_checksum
from tests.support.short import digest, records

OPTIMIZERS = {
    "nan": {"optimizer": "sgdm", "weight_decay": 0.1},
    "inf": {"optimizer": "adam", "clip_norm": 0.3},
    "gradient": {"optimizer": "adamw", "ema": 0.9, "final": "ema", "overlap": 2},
}


@pytest.fixture
def faulty(fixed):
    return fixed | {"model": "tests.support.nets:Faulty", "test": False}


def fail(comm, monkeypatch, settings, fault) -> str:
    """Train with this fault in the step that reads a certain image; the text of the error."""
    monkeypatch.setenv("HPCTRAIN_TEST_FAULT", fault)
    with pytest.raises(hp.RunError) as caught:
        hp.train(**settings)
    monkeypatch.delenv("HPCTRAIN_TEST_FAULT")
    text = str(caught.value)
    assert "\n" not in text and comm.allgather(text) == [text] * comm.size
    if comm.rank == 0:
        assert records(settings)[-1]["status"] == "failed"
    return text


@pytest.mark.ranks
@pytest.mark.parametrize(("fault", "in_flight"), [("nan", 1), ("inf", 0), ("gradient", 1)])
def test_a_step_that_is_not_finite_changes_nothing(comm, faulty, fault, in_flight, monkeypatch):
    monkeypatch.setitem(IN_FLIGHT, "cpu", in_flight)  # as on GPUs: the next step has begun
    settings = faulty | OPTIMIZERS[fault]
    whole = digest(comm, settings | {"run": "whole"})
    text = fail(comm, monkeypatch, settings, fault)
    assert ("gradient of step" if fault == "gradient" else "loss of step") in text
    assert fault == "gradient" or "on rank" in text
    if comm.rank == 0:
        steps = [record["step"] for record in records(settings, "step")]
        assert steps == list(range(1, len(steps) + 1)) and 1 < len(steps) < 7
        assert f"step {len(steps) + 1} " in text and f"step {len(steps)} " in text
    assert digest(comm, settings) == whole


COMPARED = {
    "linear.bias": {"checkpoint_every": "1step"},
    "linear.weight": {"checkpoint_every": "2steps", "comm_dtype": "bf16", "deterministic": False},
    "frozen": {"validate_every": "3steps"},
    "late": {"validate_every": "0", "final": "ema", "ema": 0.9},
}


@pytest.mark.ranks(3)
@pytest.mark.parametrize(
    ("fault", "in_flight"),
    [(name, number % 2) for number, name in enumerate(COMPARED)],
)
def test_ranks_that_differ_are_named_and_nothing_of_them_is_saved(
    comm, faulty, fault, in_flight, monkeypatch
):
    """Before a checkpoint, before a validation, and at the end."""
    monkeypatch.setitem(IN_FLIGHT, "cpu", in_flight)
    settings = faulty | COMPARED[fault]
    whole = digest(comm, settings | {"run": "whole"})
    text = fail(comm, monkeypatch, settings, fault)
    assert f"of {comm.size} held other weights" in text and fault in text
    if comm.rank == 0:
        folder = Path(settings["runs_dir"]) / settings["run"]
        assert not (folder / "model.safetensors").exists()
        sound = [r["digest"] for r in records(settings | {"run": "whole"}, "digest")]
        own = [r["digest"] for r in records(settings, "digest")]
        assert own == sound[: len(own)] and len(own) < len(sound)
    assert digest(comm, settings) == whole


TYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float8_e4m3fn, torch.bool)
TYPES += (torch.int64, torch.complex64, torch.complex128)


@given(some.sampled_from(TYPES), some.integers(1, 300), some.data())
def test_a_checksum_shows_a_flipped_bit_and_values_that_change_places(dtype, length, data):
    bits = torch.arange(length) % 7 > 2
    changed, place = bits.clone(), data.draw(some.integers(0, length - 1))
    changed[place] = ~changed[place]
    found, moved = tensor_checksum(bits.to(dtype)), bits.roll(place)
    assert tensor_checksum(bits.to(dtype)) == found != tensor_checksum(changed.to(dtype))
    assert (tensor_checksum(moved.to(dtype)) == found) == torch.equal(moved, bits)
