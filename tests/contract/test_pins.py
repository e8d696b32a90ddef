"""What a run computes, records, writes and prints, to a table from commit to commit.

test_digests.py holds that the bits of networks stay; this the way to them and from them: the parts
that tests/support/pins.py describes. Where the table pins.json has none for this processor, only
what no processor changes is compared. To write what this machine finds into it:

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
