"""Bytes that a rank receives before its first step, counted with a simulated communicator."""

from __future__ import annotations

import pytest

from scripts.benchmarks.ranks import INSIDE, WEIGHTS, bytes_at_start

MOST = 100_000
MANY = 16_384


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"deterministic": True, "overlap": 3},
        {"worker_load": ",".join(["2", "1"] * (MANY // 2)), "batch_size": 2 * MANY},
        {"batch_per_rank": 1, "batch_size": None},
    ],
)
def test_a_rank_receives_few_bytes_at_the_start_on_any_number_of_ranks(tmp_path, changes):
    received = bytes_at_start(MANY, tmp_path, **changes)
    assert received["names of hosts"] > 0 and received["bcast"] > 1000 and received[WEIGHTS] > 0
    assert not received["allgather"] and not received["gather"], "nothing is gathered of all ranks"
    assert received[INSIDE] == 8 * MANY, "ranks are split into hosts once"
    counted = sum(n for name, n in received.items() if name not in (WEIGHTS, INSIDE))
    assert counted <= MOST, received


def test_the_bytes_at_the_start_hardly_differ_on_few_ranks(tmp_path):
    (tmp_path / "few").mkdir()
    few, many = bytes_at_start(64, tmp_path / "few"), bytes_at_start(MANY, tmp_path)
    assert abs(few["bcast"] - many["bcast"]) < 1000
