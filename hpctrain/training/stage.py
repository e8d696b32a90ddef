"""``--stage DIR``: before the first step every host copies what its ranks read to its own disk.

The ranks of a host share the copying. A whole copy that an earlier launch left is compared and
used again; until it is whole it has another name.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path

from hpctrain.data.checks import Sums
from hpctrain.data.pack_format import Pack
from hpctrain.data.staging import (
    Piece,
    begin,
    compare,
    copy,
    finish,
    make_folder,
    make_room,
    pieces,
    staged_name,
)
from hpctrain.parallel.mpi import Comm, allgather, call_on_all, call_on_root, comm_of_host


def stage(
    folder: str,
    pack: Pack,
    sums: Sums,
    extent: tuple[int, int],
    comm: Comm,
) -> tuple[Pack, tuple[int, int]]:
    """The pack as it is read on this host: copied into `folder`, bytes `extent` of the training
    images; and the bytes that are there, what the ranks of the host need together. Raises the same
    on all ranks. Collective.
    """
    host = comm_of_host(comm)
    try:
        call_on_all(comm, lambda: make_folder(Path(folder)))
        extents = allgather(host, extent)
        low, high = min(start for start, _ in extents), max(stop for _, stop in extents)
        final = Path(folder).absolute() / staged_name(pack, (low, high))
        whole = pieces(pack, sums, (low, high))
        part = whole[host.rank :: host.size]  # of this rank
        sound = final.exists() and compare(pack, final, part)
        needed = 0 if all(allgather(host, sound)) else sum(piece.length for piece in whole)
        _copy(pack, final, part, needed, host, comm)
        return dataclasses.replace(pack, path=str(final)), (low, high)
    finally:
        host.Free()


def _copy(pack: Pack, final: Path, part: list[Piece], needed: int, host: Comm, comm: Comm) -> None:
    """Copy `needed` bytes, this rank its `part` of them; nothing where none are. Collective, also
    for hosts that need nothing."""

    def make() -> Path | None:
        if not needed or host.rank:
            return None
        make_room(final.parent, final.name, needed)
        return begin(final.parent, pack, final.name)

    temporary = call_on_all(comm, make)
    target = call_on_root(host, lambda: temporary)
    try:
        call_on_all(comm, lambda: copy(pack, target, part) if target else None)
        call_on_all(comm, lambda: finish(temporary, final) if temporary else None)
    finally:
        if temporary:
            temporary.unlink(missing_ok=True)
