"""Copy the part of a pack that one host reads to its local disk: ``--stage``.

The copy is a sparse file of the pack's length, with every copied byte at its offset in the pack. Of
the training split it holds the samples of the host's ranks: their images, targets, checksums and
offsets; of other splits it holds all. A sample's checksum is compared when it is first read, as in
the pack itself. Names stay in the pack.
"""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import ExitStack, closing
from dataclasses import replace
from itertools import islice
from pathlib import Path

from hpctrain.data.pack import Pack
from hpctrain.data.split import Split
from hpctrain.data.stored import File, Stored
from hpctrain.errors import UsageError
from hpctrain.files import check_room, remove_left_behind, whole_file, write_at, writing
from hpctrain.parallel.mpi import Comm, agreed, allgather, comm_of_host, on_all, on_root
from hpctrain.watchdog import doing

PIECE = 1 << 20  # bytes copied at a time


def stage(folder: str, source: Split, samples: range, comm: Comm) -> Pack:
    """Copy the pack of `source` to `folder` on this host's disk, to be read from there. Collective.

    `samples` are those of the training split that this rank needs; the copy holds all from the
    first to the last that ranks of the host need. They share the copying. A copy of the pack's size
    is complete and is used again. Raises the same error on all ranks.
    """
    pack = source.pack
    if pack.external is not None:
        problem = f"--stage copies packs, and {pack.path} is not one: copy the file yourself"
        raise agreed(UsageError(problem))
    host = comm_of_host(comm)
    size = pack.sizes[pack.path]
    needed = allgather(host, (samples.start, samples.stop))
    starts, stops = zip(*needed, strict=True)
    samples = range(min(starts), max(stops))
    with on_all(comm):
        parts = parts_to_copy(source, samples)
    name = f"hpctrain-{pack.uuid}-{samples.start}-{samples.stop}.staged"
    final = Path(folder).absolute() / name

    with ExitStack() as stack:
        created: str | Path = ""  # its temporary name, on one rank of a host that has no copy
        with on_all(comm):
            try:
                final.parent.mkdir(parents=True, exist_ok=True)
            except OSError as error:
                why = f"this folder cannot be made: {error.strerror}"
                raise UsageError(f"--stage {folder}: {why}") from None
            with writing(final):
                if host.rank == 0 and not (final.is_file() and final.stat().st_size == size):
                    remove_left_behind(final)
                    check_room(final.parent, sum(map(len, parts)), "the host's part of the pack")
                    file = stack.enter_context(whole_file(final, point="stage"))
                    file.truncate(size)
                    created = file.name
        temporary = on_root(host, str, created)
        with on_all(comm):
            if temporary:
                pieces = (
                    part[start : start + PIECE]
                    for part in parts
                    for start in range(0, len(part), PIECE)
                )
                copy(pack, temporary, islice(pieces, host.rank, None, host.size))
        with on_all(comm), writing(final):  # once all ranks have copied
            stack.close()

    splits = {name: info._replace(path=str(final)) for name, info in pack.splits.items()}
    return replace(pack, path=str(final), splits=splits, sizes={str(final): size}, staged=True)


def parts_to_copy(source: Split, samples: range) -> list[range]:
    """Return the bytes of the pack to copy, for these samples of train."""
    pack = source.pack
    assert pack.identity
    parts = [pack.identity.byte_range(0, pack.identity.shape[0])]
    for name, info in pack.splits.items():
        copied = samples if name == "train" else range(info.samples)
        rows = copied
        if info.offsets:
            parts.append(info.offsets.byte_range(copied.start, copied.stop + 1))
            rows = range(info.images.shape[0])
            if name == "train":
                rows = source.byte_range(copied)
        parts.append(info.images.byte_range(rows.start, rows.stop))
        for stored in (info.targets, info.crc32):
            if isinstance(stored, Stored):
                parts.append(stored.byte_range(copied.start, copied.stop))
    return parts


def copy(pack: Pack, target: str, share: Iterable[range]) -> None:
    """Copy pieces of a pack into the file `target`. Raises RunError."""
    size = pack.sizes[pack.path]
    with closing(File(pack.path, size)) as source, writing(target), open(target, "r+b", 0) as file:
        for piece in share:
            doing(f"staging byte {piece.start:,}")
            data = memoryview(bytearray(len(piece)))
            source.read(data, piece.start)
            write_at(file.fileno(), data, piece.start)
