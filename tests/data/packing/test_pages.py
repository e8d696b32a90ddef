"""The cut of a dataset between processes, and what they write by it."""

import os
from types import SimpleNamespace

import numpy as np
import pytest

from hpctrain import files
from hpctrain.data.packing import fill as filling
from hpctrain.data.packing import write
from hpctrain.data.packing.columns import image_counts, pixel_columns, slices
from hpctrain.data.packing.decode import first_rows, scratch_rows
from hpctrain.data.packing.fill import fill, total
from hpctrain.data.packing.pages import PAGE, cut_pages, outside, overlaps
from hpctrain.data.packing.team import parts

# offset, length, bytes of a block: aligned and not, within a page, of one page, of many blocks
CASES = [
    (8192, 1_000_003, 97_003),
    (8192, 4096 * 7, 4096),
    (4096, 4096 * 8 - 1, 4096 * 3 + 1),
    (2056, 31, 31),
    (2056, 5000, 7),
    (4000, 96, 96),
    (4000, 97, 10),
    (4096, 1, 1),
    (4096, 2**22 + 11, 2**20 - 5),
]


def owners(offset, shares):
    """Which shares write something of each page of the file."""
    pages = {}
    for rank, share in enumerate(shares):
        for start, stop in share.spans:
            first, last = (offset + start) // PAGE, (offset + stop - 1) // PAGE
            for page in range(first, last + 1):
                pages.setdefault(page, set()).add(rank)
    return pages


@pytest.mark.parametrize(("offset", "length", "block"), CASES)
@pytest.mark.parametrize("size", [1, 2, 3, 5, 13])
def test_every_byte_is_written_once_and_every_page_by_one(offset, length, block, size):
    shares = cut_pages(offset, length, block, size)
    assert len(shares) == size
    spans = sorted(span for share in shares for span in share.spans)
    assert [start for start, _ in spans] == [0, *(stop for _, stop in spans[:-1])]
    assert spans[-1][1] == length and all(start < stop for start, stop in spans)
    assert [n for share in shares for n in share.blocks] == list(range(-(-length // block)))
    pages = owners(offset, shares)
    assert {len(ranks) for ranks in pages.values()} == {1}
    first, last = offset // PAGE, (offset + length) // PAGE
    if offset % PAGE:
        assert pages[first] == {0}  # other things of the file are in that page
    if (offset + length) % PAGE:
        assert pages[last] == {0}


def test_shares_are_of_the_blocks_but_for_less_than_a_page():
    for rank, (blocks, spans) in enumerate(cut_pages(8192, 10**6, 10_007, 7)):
        start, stop = spans[0]
        assert abs(start - blocks.start * 10_007) < PAGE, rank
        assert abs(stop - min(10**6, blocks.stop * 10_007)) < PAGE, rank


def test_a_cut_between_blocks_would_share_pages():
    """The negative control: the same blocks, without regard to pages."""
    shares = [
        SimpleNamespace(spans=[(share.blocks.start * 10_007, share.blocks.stop * 10_007)])
        for share in cut_pages(8192, 10_007 * 10, 10_007, 3)
    ]
    assert 2 in {len(ranks) for ranks in owners(8192, shares).values()}


def test_spans_inside_and_outside():
    spans = ((0, 10), (20, 30))
    assert list(overlaps(spans, 5, 25)) == [(5, 10), (20, 25)]
    assert list(overlaps(spans, 10, 20)) == []
    assert list(outside(spans, 5, 25)) == [(0, 5), (25, 30)]
    assert list(outside(spans, 12, 12)) == [(0, 10), (20, 30)]
    assert list(outside(spans, 0, 30)) == []


def test_parts_differ_by_one():
    assert parts(2, 3) == [range(0, 1), range(1, 2), range(2, 2)]
    for count in range(30):
        for size in range(1, 9):
            cut = parts(count, size)
            assert [n for part in cut for n in part] == list(range(count))
            assert max(map(len, cut)) - min(map(len, cut)) <= 1


@pytest.mark.parametrize("row_bytes", [1, 7, 429, 4096, 10_797, 30_000])
def test_no_two_decode_into_one_page_of_the_scratch_file(row_bytes):
    counts = [5000, 1, 0, 4096, 3]
    firsts = first_rows(counts, row_bytes)
    ends = [first + count for first, count in zip(firsts, counts, strict=True)]
    for end, following in zip(ends, firsts[1:], strict=False):
        assert following >= end and following * row_bytes % PAGE == 0
    rows = scratch_rows(counts, row_bytes)
    assert len(rows) == sum(counts) and rows.max() == max(ends) - 1
    assert (np.diff(rows) >= 1).all()
    assert (scratch_rows([31], row_bytes) == np.arange(31)).all()


@pytest.mark.parametrize("size", [2, 3, 7, 40])
@pytest.mark.parametrize("row_shape", [(61, 59, 3), (7, 5, 1), (1201, 1103, 1)])
def test_processes_fill_what_one_fills(tmp_path, monkeypatch, size, row_shape):
    rows = 3 if row_shape[0] > 1000 else 353
    rng = np.random.default_rng(size)
    columns = []
    for name in ("train", "test"):
        images = rng.integers(0, 256, (rows, *row_shape), np.uint8)
        columns += pixel_columns(name, rng.integers(0, 9, rows), row_shape, slices(images))
    whole, shared = str(tmp_path / "whole"), str(tmp_path / "shared")
    with open(whole, "w+b") as one, open(shared, "w+b") as other:
        _, offsets = write._lay_out(one, columns)
        assert write._lay_out(other, columns)[1] == offsets
    alone = fill(whole, columns, offsets, SimpleNamespace(rank=0, size=1), 1, lambda n: None)
    written, done, synced = {}, [], []

    def write_at(descriptor, data, offset):
        for page in range(offset // PAGE, -(-(offset + len(data)) // PAGE)):
            written.setdefault(page, set()).add(team.rank)
        files.write_at(descriptor, data, offset)

    def fsync(descriptor):
        synced.append(team.rank)

    recording = SimpleNamespace(**{**vars(os), "fsync": fsync})
    monkeypatch.setattr(filling, "write_at", write_at)
    monkeypatch.setattr(filling, "os", recording)
    every = []
    for rank in reversed(range(size)):
        team = SimpleNamespace(rank=rank, size=size)
        every.insert(0, fill(shared, columns, offsets, team, 1, done.append))
    with open(whole, "rb") as one, open(shared, "rb") as other:
        assert one.read() == other.read()
    assert {len(ranks) for ranks in written.values()} == {1}
    assert sum(done) == 2 * rows and sorted(synced) == list(range(size))
    teams = [SimpleNamespace(rank=rank, size=size) for rank in range(size)]
    own = [image_counts(columns, team) for team in teams]
    assert {count for count, _ in own} == {2 * rows} == {sum(count for _, count in own)}
    for mine, theirs in zip(total([alone]), total(every), strict=True):
        assert all((a == b).all() and len(a) == len(b) for a, b in zip(mine, theirs, strict=True))
