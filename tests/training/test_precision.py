"""Training, evaluation and prediction compute in the --precision that is asked for, or was."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
import torch
from torch import nn

from hpctrain.config import EvaluateConfig, PredictConfig
from hpctrain.errors import UsageError
from hpctrain.inference import evaluate, predict
from hpctrain.training.train import train

pytestmark = pytest.mark.mpi


@pytest.fixture
def seen():
    """What was allowed while a module ran: (TF32 in cuDNN, in products, by timing, autocast)."""
    found = set()

    def note(module, inputs):
        tf32, timed = torch.backends.cudnn.allow_tf32, torch.backends.cudnn.benchmark
        half = torch.is_autocast_enabled("cpu")
        found.add((tf32, torch.get_float32_matmul_precision(), timed, half))

    handle = nn.modules.module.register_module_forward_pre_hook(note)
    yield found
    handle.remove()


@pytest.mark.parametrize(
    ("precision", "tf32", "product", "half"),
    [
        ("default", True, "highest", False),
        ("fp32", False, "highest", False),
        ("tf32", True, "high", False),
        ("bf16", False, "highest", True),
    ],
)
def test_trained_saved_evaluated_and_predicted(
    comm, settings, seen, tmp_path, precision, tf32, product, half
):
    config = dataclasses.replace(settings, epochs=1, precision=precision)
    assert train(config, comm) == 0
    assert (tf32, product, True, half) in seen
    # A check of the fresh network's shapes is not in bfloat16.
    assert seen <= {(tf32, product, True, half), (tf32, product, True, False)}
    comm.Barrier()
    common = {"run": "a", "runs_dir": settings.runs_dir, "threads": 1, "batch_size": 4}
    output = str(tmp_path / "answers.csv")
    for asked in (None, "default", "fp32", "tf32", "bf16"):
        expected = {"fp32": (False, "highest", False, False), "tf32": (True, "high", False, False)}
        expected["bf16"] = (False, "highest", False, True)
        expected["default"] = (asked is not None, "highest", False, False)  # of a CPU's run: fp32
        for main, config in (
            (evaluate.main, EvaluateConfig(**common, precision=asked)),
            (predict.main, PredictConfig(**common, precision=asked, output=output)),
        ):
            seen.clear()
            assert main(config) == 0
            assert seen == {expected[asked or precision]}


@pytest.mark.parametrize("begun", ["default", "fp32", "tf32"])
def test_a_run_goes_on_in_the_precision_that_it_was_begun_with(comm, settings, seen, begun):
    """By its plan where none is asked for: runs that were begun when fp32 was usual stay strict."""
    config = dataclasses.replace(settings, epochs=1, precision=begun)
    assert train(config, comm) == 0
    comm.Barrier()
    seen.clear()
    assert train(dataclasses.replace(config, epochs=2, precision="default"), comm) == 0
    assert {tf32 for tf32, *_ in seen} == {begun == "tf32"}
    was = begun.replace("default", "fp32")  # on a CPU
    with pytest.raises(UsageError, match=f"begun with --precision {was}, not with"):
        train(dataclasses.replace(config, epochs=3, precision="bf16"), comm)


def test_a_resume_may_name_the_precision_of_the_plan(comm, settings):
    """On a CPU a run that asked for nothing has fp32; what was asked for stays in config.toml."""
    config = dataclasses.replace(settings, epochs=1)
    assert train(config, comm) == 0
    for epochs, precision in ((2, "fp32"), (3, "default"), (4, "fp32")):
        comm.Barrier()
        assert train(dataclasses.replace(config, epochs=epochs, precision=precision), comm) == 0
    comm.Barrier()
    text = (Path(settings.runs_dir) / "a" / "config.toml").read_text()
    assert 'precision = "default"' in text
