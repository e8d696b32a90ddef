"""torch's switches: what each --precision and --deterministic sets, and that all is put back."""

from __future__ import annotations

import contextlib

import pytest
import torch

from hpctrain.parallel.device import torch_settings


def switches():
    """Algorithms, warn only, fill, cuDNN deterministic, by timing, TF32 in cuDNN, matmul."""
    return (
        torch.are_deterministic_algorithms_enabled(),
        torch.is_deterministic_algorithms_warn_only_enabled(),
        torch.utils.deterministic.fill_uninitialized_memory,
        torch.backends.cudnn.deterministic,
        torch.backends.cudnn.benchmark,
        torch.backends.cudnn.allow_tf32,
        torch.get_float32_matmul_precision(),
    )


@pytest.fixture(params=["as torch comes", "as somebody left it"])
def before(request):
    """What torch is set to when a run begins."""
    if request.param == "as somebody left it":
        torch.set_float32_matmul_precision("medium")
        torch.backends.cudnn.benchmark = True
        torch.backends.cudnn.allow_tf32 = False
        torch.use_deterministic_algorithms(True, warn_only=True)
    yield switches()
    torch.set_float32_matmul_precision("highest")
    torch.backends.cudnn.benchmark = False
    torch.backends.cudnn.allow_tf32 = True
    torch.use_deterministic_algorithms(False)


REPEATED = (True, False, False, True, False)
FREE, UNTIMED = (False, False, False, False, True), (False, False, False, False, False)
CASES = {
    ("default", False): (*FREE, True, "highest"),
    ("fp32", False): (*FREE, False, "highest"),
    ("tf32", False): (*FREE, True, "high"),
    ("bf16", False): (*FREE, False, "highest"),
    ("default", True): (*REPEATED, True, "highest"),
    ("fp32", True): (*REPEATED, False, "highest"),
    ("tf32", True): (*REPEATED, True, "high"),
    ("bf16", True): (*REPEATED, False, "highest"),
}


@pytest.mark.parametrize(("precision", "deterministic"), CASES)
@pytest.mark.parametrize("fails", [False, True])
def test_set_and_put_back(before, precision, deterministic, fails):
    state = torch.get_num_threads(), torch.initial_seed(), torch.get_rng_state().sum().item()
    ends = pytest.raises(ZeroDivisionError) if fails else contextlib.nullcontext()
    with ends, torch_settings(precision, deterministic):
        assert switches() == CASES[precision, deterministic]
        torch.set_num_threads(2)
        torch.manual_seed(99)
        torch.rand(3)
        assert 1 / (0 if fails else 1)
    assert switches() == before
    after = torch.get_num_threads(), torch.initial_seed(), torch.get_rng_state().sum().item()
    assert after == state


def test_what_must_not_depend_on_the_ranks_is_not_timed(before):
    with torch_settings("fp32", benchmark=False):
        assert switches() == (*UNTIMED, False, "highest")
    assert switches() == before


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_float32_on_a_gpu_is_float32():
    """A product with 2^-12, which TF32 rounds away, and its factor 1."""
    exact, one = 1 + 2.0**-12, torch.eye(512, device="cuda")
    factor = torch.full((512, 512), exact, device="cuda")
    image, kernel = factor.reshape(2, 512, 16, 16), one.reshape(512, 512, 1, 1)
    with torch_settings("fp32", benchmark=False):
        assert torch.all(factor @ one == exact) and torch.all(torch.conv2d(image, kernel) == exact)
    if torch.cuda.get_device_capability() >= (8, 0):  # those have TF32
        with torch_settings("tf32", benchmark=False):
            assert torch.all(factor @ one == 1)
