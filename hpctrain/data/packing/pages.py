"""Cut a dataset between processes that fill it at the same time, by whole pages of the file.

Two writers on two hosts must never write one page of 4,096 bytes: file systems of networks keep
whole pages on each host, and the one that is written back last would undo the other.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from hpctrain.data.packing.team import parts

PAGE = 4096  # bytes
Span = tuple[int, int]  # first byte, and the one after the last; counted from the dataset's first


class Share(NamedTuple):
    """What one process does for a dataset: it makes the checksums of `blocks`, whole ones, and
    writes the bytes of `spans`, which are nearly those of its blocks."""

    blocks: range
    spans: tuple[Span, ...]


def cut_pages(offset: int, length: int, block_bytes: int, size: int) -> list[Share]:
    """The shares of `size` processes in the `length` bytes that begin at byte `offset` of the file.

    Every block is one process's and so is every byte; where two processes meet is a multiple of
    PAGE in the file. Pages that hold other things too, at both ends, are left to the root, which
    writes those.
    """
    end = offset + length
    first = min(-(-offset // PAGE) * PAGE, end)
    last = max(end // PAGE * PAGE, first)
    blocks = parts(-(-length // block_bytes), size)
    inner = [(offset + part.start * block_bytes) // PAGE * PAGE for part in blocks[1:]]
    borders = [first, *(min(max(border, first), last) for border in inner), last]
    shares = []
    for rank, part in enumerate(blocks):
        spans = [(borders[rank], borders[rank + 1])]
        if rank == 0:
            spans = [(offset, first), *spans, (last, end)]
        shares.append(Share(part, _joined(spans, offset)))
    return shares


def overlaps(spans: tuple[Span, ...], start: int, stop: int) -> Iterator[Span]:
    """What the spans have in common with the bytes `start` to `stop`."""
    for low, high in spans:
        if max(low, start) < min(high, stop):
            yield max(low, start), min(high, stop)


def outside(spans: tuple[Span, ...], start: int, stop: int) -> Iterator[Span]:
    """What the spans have besides the bytes `start` to `stop`."""
    for low, high in spans:
        if low < min(high, start):
            yield low, min(high, start)
        if max(low, stop) < high:
            yield max(low, stop), high


def _joined(spans: list[Span], offset: int) -> tuple[Span, ...]:
    """In bytes of the dataset, nothing empty, and one where two touch."""
    joined: list[Span] = []
    for start, stop in spans:
        if joined and joined[-1][1] == start - offset:
            joined[-1] = (joined[-1][0], stop - offset)
        elif start < stop:
            joined.append((start - offset, stop - offset))
    return tuple(joined)
