"""Files that are damaged by accident: a bit flipped, cut short, emptied, removed, swapped."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path


def flip_each_bit(path: Path, step: int = 1) -> Iterator[int]:
    """Flip every bit of a file in turn, or one of `step`, and back; its number."""
    content = path.read_bytes()
    descriptor = os.open(path, os.O_RDWR)  # kept open: truncating 10,000 times takes a minute
    try:
        for place in range(0, 8 * len(content), step):
            at, bit = divmod(place, 8)
            os.pwrite(descriptor, bytes([content[at] ^ 1 << bit]), at)
            yield place
            os.pwrite(descriptor, content[at : at + 1], at)
    finally:
        os.close(descriptor)


SPOILT = {  # what accidents leave of a file's content
    "flipped": lambda content: content[:-3] + bytes([content[-3] ^ 1]) + content[-2:],
    "short": lambda content: content[:-3],
    "empty": lambda content: b"",
    "nonsense": lambda content: b"{}",
    "gone": None,
}


def spoil(path: Path, how: str) -> None:
    """Damage a file in one of these ways."""
    change = SPOILT[how]
    if change is None:
        path.unlink()
    else:
        path.write_bytes(change(path.read_bytes()))


def overwrite(path: str | Path, offset: int, data: bytes = b"nothing at all") -> None:
    """Write over the bytes of a file at this offset."""
    with open(path, "r+b") as file:
        file.seek(offset)
        file.write(data)
