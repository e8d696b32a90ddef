"""The rows of scripts/gpu_check: how numbers are judged, and what they find on a CPU."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from hpctrain import UsageError
from scripts.benchmarks.gpu import memory, parity, trace
from scripts.benchmarks.gpu.case import (
    FAILED,
    MISSED,
    OK,
    Case,
    Result,
    attempt,
    judged,
    made_pack,
    not_run,
)


@pytest.fixture
def case(tmp_path):
    return Case(tmp_path, rehearsal="cpu")


def test_numbers_are_judged_by_both_bounds():
    assert [judged("", x, least=1.0, most=2.0).verdict for x in (0.9, 1.0, 2.0, 2.1)] == [
        MISSED,
        OK,
        OK,
        MISSED,
    ]
    found = judged("speed", 12345.678, "images/s", least=0.98, n=7)
    assert found == Result("speed", OK, "12,346 images/s", ">= 0.98", 7, "", 12345.678)
    assert judged("", float("nan"), most=1.0).verdict == MISSED
    assert judged("", 5.25e-6, most=2e-5)[2:4] == ("5.2e-06", "<= 2.0e-05")


def test_an_error_becomes_a_line():
    def fail(error):
        raise error

    assert attempt("a", lambda what: judged(what, 1.0)).verdict == OK
    assert attempt("a", lambda _: fail(UsageError("no --such"))) == not_run("a", "no --such")
    failed = attempt("a", lambda _: fail(RuntimeError("CUDA error\nmore")))
    assert (failed.verdict, failed.remark) == (FAILED, "RuntimeError: CUDA error")


def test_a_trace_tells_kernels_and_copies():
    events = [
        {"cat": "kernel", "name": "ncclDevKernel_AllReduce_Sum_f32_RING_LL(ncclDevKernelArgs)"},
        {"cat": "kernel", "name": "void at::native::vectorized_elementwise_kernel<4>"},
        {"cat": "cpu_op", "name": "nccl:all_reduce"},
        {"cat": "gpu_memcpy", "name": "Memcpy DtoH (Device -> Pinned)", "args": {"bytes": 64}},
        {"cat": "gpu_memcpy", "name": "Memcpy DtoH (Device -> Pageable)", "args": {"bytes": 8}},
        {"cat": "gpu_memcpy", "name": "Memcpy HtoD (Pinned -> Device)", "args": {"bytes": 999}},
        {"ph": "M", "name": "process_name"},
    ]
    assert (trace.kernels(events, "nccl"), trace.kernels(events)) == (1, 2)
    assert trace.copied_bytes(events, "DtoH") == 72


def test_parts_lie_within_the_whole():
    whole = torch.zeros(10)
    assert memory.within(whole[4:], whole) and memory.within(whole, whole)
    assert not memory.within(torch.zeros(3), whole)
    assert not memory.within(whole, whole[4:])
    assert not memory.within(whole[2:8], whole[4:]) and not memory.within(whole[4:], whole[2:8])


def test_smooth_networks_have_no_kinks():
    kinds = {type(m) for m in parity.resnet18((32, 32, 3), 5).modules()}
    assert not kinds & {nn.ReLU, nn.MaxPool2d} and {nn.Softplus, nn.AvgPool2d} <= kinds
    torch.manual_seed(0)
    narrow = parity.digits((28, 28, 1), 5)
    torch.manual_seed(0)
    wide = parity.digits_float64((28, 28, 1), 5)
    assert wide.fc.weight.dtype == torch.float64 and torch.equal(
        wide.fc.weight.float(), narrow.fc.weight
    )
    assert parity.distance(torch.tensor([3.0, 4.5]), torch.tensor([3.0, 4.0])) == pytest.approx(0.1)


def test_arithmetic_other_than_asked_for_is_seen(case):
    """bf16 in place of fp32, and fp32 in place of bf16, are out of bounds."""
    pack = made_pack(case, parity.ROWS, (28, 28, 1), smooth=True)
    exact = parity.gradient(case, pack, "digits_float64", "fp32", "cpu")
    errors = {
        precision: parity.distance(parity.gradient(case, pack, "digits", precision, "cpu"), exact)
        for precision in ("fp32", "bf16")
    }
    assert errors["fp32"] < parity.BOUNDS["tf32"][0] < parity.BOUNDS["bf16"][0] < errors["bf16"]
    assert errors["fp32"] < parity.BOUNDS["fp32"][1] < errors["bf16"] < parity.BOUNDS["bf16"][1]
