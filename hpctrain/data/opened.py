"""Open the rows of a split, whatever the file holds."""

from __future__ import annotations

from hpctrain.data.pack_format import Pack
from hpctrain.data.packed import Rows
from hpctrain.data.source import Opened


def open_split(pack: Pack, split: str, threads: int | None = None) -> Opened:
    """The rows of one split, to be closed by leaving a ``with`` block.

    JPEG files are decoded by `threads` threads; by default as many as cores may be used, at most
    8. Raises UsageError where the file is missing, is not the one that was checked or has labels
    beyond its classes, RunError where it cannot be read.
    """
    if pack.encoded:
        from hpctrain.data.encoded import Encoded  # brings Pillow

        return Encoded(pack, split, threads)
    return Rows(pack, split)
