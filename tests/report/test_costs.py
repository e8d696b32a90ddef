"""Hosts with more ranks than cores."""

from __future__ import annotations

from hpctrain.parallel.placement import crowd


def test_the_most_crowded_host():
    assert crowd([0b111, 0b111]) == (2 / 3, 2, 3)
    assert crowd([0b11, 0b11, 0b11]) == (1.5, 3, 2)
    assert crowd([0b1, 0b10, 0b100]) == (1, 3, 3)  # each bound to its own
    assert crowd([1 << 300, 1 << 300]) == (2, 2, 1)
