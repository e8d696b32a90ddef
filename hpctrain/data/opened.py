"""Open the rows of a split, whatever the file holds."""

from __future__ import annotations

from hpctrain.data.pack_format import Pack
from hpctrain.data.packed import Rows
from hpctrain.data.source import Opened


def open_split(pack: Pack, split: str) -> Opened:
    """The rows of one split, to be closed by leaving a ``with`` block.

    Raises UsageError where the file is missing, is not the one that was checked or has labels
    beyond its classes, RunError where it cannot be read.
    """
    return Rows(pack, split)
