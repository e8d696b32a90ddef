"""On a GPU, real or emulated: rows of scripts/gpu_check that take seconds, each line as wanted."""

from __future__ import annotations

import pytest
import torch

from scripts.benchmarks.gpu import memory, parity, trace
from scripts.benchmarks.gpu.case import OK, Case
from tests.gpu.emulator import EMULATED
from tests.support.api import open_transport, zeros_for_messages

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.filterwarnings("default"),  # torch tells of prototypes and of its profiler's ways
]


@pytest.mark.parametrize(
    "row",
    [parity.measure, memory.message, memory.memory, trace.measure],
    ids=lambda row: row.__qualname__,
)
def test_on_a_gpu(row, tmp_path):
    if EMULATED and row is trace.measure:
        pytest.skip("the emulated GPU has no profiler")
    results = list(row(Case(tmp_path)))
    if EMULATED:
        results = [result for result in results if "tf32" not in result.what]
    assert {result.verdict for result in results} == {OK}, results


def test_staging_sums_what_lies_on_the_gpu(comm):
    """Through pinned memory in pieces, and back to where it was."""
    vector = zeros_for_messages(1003, torch.float32, torch.device("cuda", 0))
    vector.copy_(torch.arange(1003))
    open_transport(comm, "host", 64).allreduce(vector)
    assert torch.equal(vector.cpu(), torch.arange(1003.0))
