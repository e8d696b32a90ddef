"""The --precision in which networks are trained, evaluated and asked, and torch's other flags;
clipping; dropout.
"""

from __future__ import annotations

import contextlib

import pytest
import torch
from torch import nn

import hpctrain as hp
from tests.support.api import clip_gradient, command_line

EXPECTED = {  # TF32 in cuDNN, in products, whether cuDNN chooses by timing, autocast
    "default": (True, "highest", True, False),
    "fp32": (False, "highest", True, False),
    "tf32": (True, "high", True, False),
    "bf16": (False, "highest", True, True),
}

OF_CHECK = (False, "highest", False, False)  # that an output depends on its sample alone


@contextlib.contextmanager
def seen_by(kind: type, note):
    """Within the block, the results of `note(module, inputs)` for all modules of this kind."""
    found = []

    def hook(module, inputs):
        if isinstance(module, kind):
            found.append(note(module, inputs))

    handle = nn.modules.module.register_module_forward_pre_hook(hook)
    try:
        yield found
    finally:
        handle.remove()


def settings_of_torch(module, inputs):
    product = torch.get_float32_matmul_precision()
    half = torch.is_autocast_enabled("cpu")
    cudnn = torch.backends.cudnn
    return cudnn.allow_tf32, product, cudnn.benchmark, half


@pytest.mark.ranks(2)
@pytest.mark.parametrize("precision", EXPECTED)
def test_networks_are_trained_and_asked_in_the_precision_of_the_run(comm, short, precision):
    with seen_by(nn.Module, settings_of_torch) as seen:
        hp.train(**short | {"epochs": 1, "precision": precision})
    expected = EXPECTED[precision]
    # A check of the fresh network's shapes is not in bfloat16, and the probe does not time.
    untimed = *expected[:2], False, expected[3]
    fresh = *expected[:3], False
    assert expected in seen and {*seen} <= {expected, untimed, fresh, OF_CHECK}
    answers = f"{short['runs_dir']}.csv"
    common = ["a", "--runs-dir", short["runs_dir"], "--threads", "1", "--batch-size", "4"]
    for asked in (None, *(EXPECTED if precision == "default" else ())):
        tf32, product, _, half = EXPECTED[asked or precision.replace("default", "fp32")]
        flags = ["--precision", asked] if asked else []
        for words in (["evaluate"], ["predict", "--output", answers]):
            with seen_by(nn.Module, settings_of_torch) as seen:
                assert command_line([*words[:1], *common, *words[1:], *flags]) == 0
            assert {*seen} == {(tf32, product, False, half)}


@pytest.mark.ranks(2)
@pytest.mark.parametrize("begun", ["default", "fp32", "tf32"])
def test_a_run_goes_on_in_the_precision_that_it_was_begun_with(comm, short, begun):
    """By its plan where none is asked for; that precision may be named, others are refused."""
    hp.train(**short | {"epochs": 1, "precision": begun})
    was = begun.replace("default", "fp32")  # on a CPU
    for epochs, asked in ((2, "default"), (3, was)):
        with seen_by(nn.Module, settings_of_torch) as seen:
            assert hp.train(**short | {"epochs": epochs, "precision": asked}).epoch == epochs
        assert {tf32 for tf32, *_ in {*seen} - {OF_CHECK}} == {begun == "tf32"}
    with pytest.raises(hp.UsageError, match=f"begun with --precision {was}, not with"):
        hp.train(**short | {"epochs": 4, "precision": "bf16"})
    text = (hp.train(**short | {"epochs": 3}).folder / "config.toml").read_text()
    assert f'precision = "{begun}"' in text


def state_of_torch(*_):
    """Deterministic algorithms, or a warning; what else precision and determinism set; threads; the
    generator.
    """
    mode, cudnn = torch.get_deterministic_debug_mode(), torch.backends.cudnn
    flags = mode, torch.utils.deterministic.fill_uninitialized_memory, cudnn.deterministic
    flags += cudnn.benchmark, cudnn.allow_tf32, torch.get_float32_matmul_precision()
    return flags, torch.get_num_threads(), torch.get_rng_state().numpy().tobytes()


@pytest.mark.ranks
def test_a_run_leaves_torch_as_somebody_has_set_it(comm, fixed):
    """Each flag is another in the run, which ends well or fails."""
    torch.manual_seed(5)
    torch.set_num_threads(2)
    torch.set_deterministic_debug_mode("warn")
    torch.set_float32_matmul_precision("medium")
    torch.backends.cudnn.benchmark = True
    try:
        before = state_of_torch()
        assert before[0] == (1, True, False, True, True, "medium")
        with seen_by(nn.Module, state_of_torch) as seen:
            hp.train(**fixed | {"epochs": 1, "precision": "fp32"})
        assert state_of_torch() == before
        assert {flags for flags, *_ in seen} == {(2, False, True, False, False, "highest")}
        assert {threads for _, threads, _ in seen} == {1} and before[2] not in {s for *_, s in seen}
        with pytest.raises(hp.UsageError, match="put_ does not have"):
            hp.train(**fixed | {"model": "tests.support.nets:WithPut", "run": "fails"})
        assert state_of_torch() == before
    finally:
        torch.set_deterministic_debug_mode("default")
        torch.set_float32_matmul_precision("highest")
        torch.backends.cudnn.benchmark = False


@pytest.mark.ranks(2)
def test_algorithms_are_not_timed_for_the_shapes_of_the_probe(comm, short):
    settings = short | {"model": "tests.support.nets:with_dropout", "epochs": 1}
    with seen_by(nn.Flatten, lambda *_: torch.backends.cudnn.benchmark) as seen:
        hp.train(**settings)
    _, *later = seen  # the first checks the fresh network's shapes, on the CPU
    assert later == sorted(later) and later[-1], "not timed, then timed"
    assert (False in later) == (comm.rank == 0)


@pytest.mark.ranks
def test_dropout_is_drawn_anew_in_every_step_and_shard(comm, short):
    settings = short | {"model": "tests.support.nets:with_dropout", "shards": 4, "epochs": 2}
    with seen_by(nn.Flatten, lambda module, inputs: inputs[0]) as seen:
        hp.train(**settings | {"test": False, "validate_every": "0"})
    drawn = {str((x[:1] == 0).flatten().tolist()) for x in seen if x.requires_grad}
    everywhere = [each for part in comm.allgather(drawn) for each in part]
    assert len(set(everywhere)) >= 2 * (6 * 4 + 1), "shards of all steps"


@pytest.mark.parametrize("length", [4096, 3 * 4096 + 17, 3_000_017])
def test_the_norm_of_a_long_gradient_is_accurate(length):
    """One float32 sum over it would not be. Short ones: tests/contract/test_truth.py."""
    gradient = torch.rand(length)
    clipped, exact = gradient.clone(), gradient.double().norm().item()
    for norm, limit in ((exact, 0.01 * exact), (0.01 * exact, 0.0101 * exact)):
        assert clip_gradient(clipped, limit).item() == pytest.approx(norm, rel=1e-6)
        torch.testing.assert_close(clipped, gradient * 0.01, rtol=1e-5, atol=0)
