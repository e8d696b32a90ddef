"""Triples of a transform, an optimizer and a network of other libraries have equal bits."""

from __future__ import annotations

import pytest

from scripts.triples import list_triples, run_triple, write_data

SOME = (0, 2, 3, 8, 9, 11)
COUNT = 100


def test_the_list_goes_through_all_transforms_and_its_networks():
    triples = list_triples()
    assert [triple.number for triple in triples] == list(range(COUNT))
    assert len({triple.transform for triple in triples}) > 70
    assert len({triple.optimizer for triple in triples}) > 80
    assert len({triple[1:] for triple in triples}) == COUNT


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_some_triples_have_the_same_bits_on_other_ranks_and_resumed(tmp_path):
    """`python -m scripts.triples` tries all."""
    pack = write_data(tmp_path)
    triples = list_triples()
    results = {str(triples[number]): run_triple(triples[number], pack) for number in SOME}
    assert {name: tuple(result) for name, result in results.items()} == dict.fromkeys(
        results, ("trained", "")
    )
