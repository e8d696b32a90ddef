"""Images that hold NaN or infinite values: which they are. Files of others may hold such floats."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import numpy as np

from hpctrain.data.source import Source

NOT_FINITE = "holds NaN or infinite values: write finite ones, or take it out of the file"
AT_ONCE = 64  # rows that are read together


def nonfinite_rows(source: Source, rows: np.ndarray, images: np.ndarray) -> dict[int, str]:
    """Those of `rows` (n,) of a split whose `images` (n, H, W, C), as read, are not finite, each
    with what to say of it.
    """
    if images.dtype.kind != "f":
        return {}
    finite = np.isfinite(images).reshape(len(rows), -1).all(axis=1)
    place = getattr(source, "place", "row {}".format)
    return {row: f"{place(row)} {NOT_FINITE}" for row in rows[~finite].tolist()}


def find_nonfinite(source: Source, rows: np.ndarray) -> dict[int, str]:
    """The same of rows that are read for it. RunError where they cannot be read."""
    found: dict[int, str] = {}
    for first in range(0, len(rows) if source.dtype.kind == "f" else 0, AT_ONCE):
        part = rows[first : first + AT_ONCE]
        images = np.empty((len(part), *source.image_shape), source.dtype)
        found |= nonfinite_rows(source, part, source.gather(part, images))
    return found


def describe_first(found: Iterable[Mapping[int, str]]) -> str | None:
    """One sentence of what all ranks found; None where that is nothing."""
    texts = {row: text for each in found for row, text in each.items()}
    if not texts:
        return None
    return texts[min(texts)] + (f" ({len(texts)} such images)" if len(texts) > 1 else "")
