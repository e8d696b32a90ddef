"""Open a pack or a file of somebody else, and the rows of a split, whatever the file holds."""

from __future__ import annotations

from os import PathLike
from typing import Any

from hpctrain.data.checks import Checks
from hpctrain.data.foreign import ForeignRows, read_foreign
from hpctrain.data.pack_format import Pack
from hpctrain.data.packed import Rows, is_pack, read_pack
from hpctrain.data.source import Opened


def read_again(path: str | PathLike[str], named: dict[str, Any] | None) -> Pack:
    """The pack of this path; or, where it is none, the file of somebody else in which a network
    was trained on the rows that are `named`. Raises UsageError.
    """
    return read_pack(path) if named is None or is_pack(path) else read_foreign(path, **named)


def open_split(
    pack: Pack, split: str, threads: int | None = None, checks: Checks | None = None
) -> Opened:
    """The rows of one split, to be closed by leaving a ``with`` block.

    JPEG files are decoded by `threads` threads; by default as many as cores may be used, at most
    8. `checks` say what is compared while a pack is read. Raises UsageError where the file is
    missing, is not the one that was checked or has labels beyond its classes, RunError where it
    cannot be read.
    """
    if pack.encoded:
        from hpctrain.data.encoded import Encoded  # brings Pillow

        return Encoded(pack, split, threads, checks)
    return ForeignRows(pack, split) if pack.foreign else Rows(pack, split, checks)
