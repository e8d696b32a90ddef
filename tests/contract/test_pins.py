"""Runs compute, record, write and print the same as at earlier commits, by the table pins.json.

test_digests.py compares the bits of trained networks; this file compares the data from which they
are trained and all that is made with them: tests/support/pins.py lists the parts. Where the table
lacks this processor, only parts that are equal on all processors are compared. To write the parts
of this machine into it:

    pytest tests/contract/test_pins.py --update

A changed line that users can see has a line in CHANGELOG.md.
"""

from __future__ import annotations

import json

import pytest

from tests.support.pins import ANYWHERE, CASES, ON_TWO_RANKS, TABLE, compare, write_data


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_data(tmp_path_factory.mktemp("pins").resolve())


@pytest.mark.parametrize("case", CASES)
def test_what_a_run_leaves_is_that_of_the_table(case, folder, request):
    ranks = (1, 2) if case == ON_TWO_RANKS else (1,)
    compare(case, folder, ranks, "cpu", request.config.getoption("update"))


def test_the_table_has_all_cases_and_tells_them_apart():
    table = json.loads(TABLE.read_text())
    assert table[ANYWHERE].keys() == CASES.keys()
    assert all(cases.keys() <= CASES.keys() for cases in table.values())
    records = [
        (place, tuple(parts["record"][1:]))
        for place, cases in table.items()
        for parts in cases.values()
        if "record" in parts
    ]
    assert len(records) >= len(CASES) and len({*records}) == len(records)
