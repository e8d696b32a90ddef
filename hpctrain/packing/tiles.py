"""Cut images into tiles at their own resolution.

Neighbouring tiles share `overlap` pixels. The last tile of a row and of a column is moved back
inside the image, so every pixel is in a tile and none is made up. The tiles of a file are samples
with its target, in one group, which no split divides.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from hpctrain.config import Size
from hpctrain.data.values import Header
from hpctrain.errors import UsageError
from hpctrain.packing.sources import NO_GROUP, Source


def check_tiles(size: Size, overlap: int) -> None:
    """Raise UsageError if tiles of this size cannot share so many pixels."""
    if overlap >= min(size):
        raise UsageError(
            f"--overlap {overlap} with --tiles {size}: tiles must share fewer pixels than their"
            f" shorter side, {min(size)}"
        )


def starts(length: int, size: int, overlap: int) -> list[int]:
    """Return where tiles of `size` begin along an axis of at least as many pixels."""
    last = length - size
    return [*range(0, last, size - overlap), last]


def corners(header: Header, size: Size, overlap: int) -> Iterator[tuple[int, int]]:
    """Yield the top and left of each tile of an image."""
    width, height = size
    for top in starts(header.height, height, overlap):
        for left in starts(header.width, width, overlap):
            yield top, left


def too_small(header: Header, size: Size) -> str:
    """Return why an image cannot be cut into tiles, or ""."""
    if header.width >= size[0] and header.height >= size[1]:
        return ""
    return f"{header.width}x{header.height} pixels, smaller than a tile of {size[0]}x{size[1]}"


def cut_source(source: Source, headers: Sequence[Header], size: Size, overlap: int) -> None:
    """Let each tile be an image of the source, instead of its N files.

    headers: of all files, N of them, none of which is smaller than a tile.
    """
    places = [[*corners(header, size, overlap)] for header in headers]
    counts = np.array([len(of_file) for of_file in places])
    file_of = np.repeat(np.arange(len(headers)), counts)
    first = np.cumsum(counts) - counts  # tile of each file
    within = np.arange(len(file_of)) - first[file_of]
    files = source.names
    source.paths = [files[file] for file in file_of.tolist()]
    source.files = file_of.astype(np.int32)
    source.corners = np.array([corner for of_file in places for corner in of_file], np.int32)
    width, height = size
    source.names = [
        f"{path}[{top}:{top + height}, {left}:{left + width}]"
        for path, (top, left) in zip(source.paths, source.corners.tolist(), strict=True)
    ]
    _, like, numbers = np.unique(source.duplicate_of, return_index=True, return_inverse=True)
    groups = source.groups[file_of]
    if (groups == NO_GROUP).all():
        groups = file_of.astype(np.int32)
    source.duplicate_of = first[like[numbers]][file_of] + within
    source.groups = groups
    for column in ("target_rows", "splits", "places"):
        values = getattr(source, column, None)
        if values is not None:
            setattr(source, column, values[file_of])
