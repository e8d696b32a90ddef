"""What a run reads and how: the pack, what is compared on the way, in which order.

``--stage DIR``: before the first step every host copies what its ranks read to its own disk.

The ranks of a host share the copying. A whole copy that an earlier launch left is compared and
used again; until it is whole it has another name.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass, replace
from pathlib import Path

from hpctrain.config import Config
from hpctrain.data.augment import check_shift
from hpctrain.data.builtin import locate
from hpctrain.data.checks import Checks
from hpctrain.data.external import read_external
from hpctrain.data.orders import Order, make_order
from hpctrain.data.pack_format import Pack
from hpctrain.data.split import Split
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
from hpctrain.errors import UsageError
from hpctrain.inference.network import find_sums, require_split
from hpctrain.parallel.mpi import Comm, allgather, call_on_all, call_on_root, comm_of_host
from hpctrain.plan import Plan
from hpctrain.text import say

VERIFIED_BYTES = 1 << 30  # packs up to this size are verified at start, about 1 s per GB
START, FIRST_TOUCH, NEVER = "start", "first-touch", "never"


@dataclass(frozen=True)
class Reading:
    """Where the rows come from."""

    pack: Pack  # as it is read here: itself or its copy on this host
    checks: Checks
    source: Split  # the training split
    order: Order

    def split(self, name: str) -> Split:
        """Another split, to be closed by leaving a ``with`` block."""
        return Split(self.pack, name, checks=self.checks)


def check_data(config: Config, pack: Pack) -> None:
    """Refuse settings that do not fit the pack."""
    check_shift(config.shift, pack.image_shape)
    if config.random_crop and not pack.encoded:
        raise UsageError(
            f"--random-crop cuts JPEG files as they are decoded, but {pack.path} holds pixels: pack"
            " with --encoding jpeg"
        )
    needs = {
        "--output best": config.output == "best",
        "--patience": config.patience,
        "--validate-steps": config.validate_steps,
    }
    for flag, given in needs.items():
        if given and "validation" not in pack.splits:
            raise UsageError(
                f"{flag} needs a split validation, and {pack.path} has none:"
                f" {'train' if pack.external else 'pack'} with --split 0.8,0.1,0.1"
            )


def open_pack(config: Config, split: str, comm: Comm) -> Pack:
    """The pack, found (or made) and validated by rank 0, seen by all ranks; or the file that
    --images is about. Collective.
    """

    def find() -> Pack:
        from hpctrain.data.packed import read_pack, read_sums, verify  # brings h5py

        path = locate(config.data, config.data_dir)
        if config.images is not None and config.labels is not None:
            names = config.images, config.labels, config.layout
            blocks = None if config.shuffle == "blocks" else 0
            split_by = config.split, config.seed, blocks
            return read_external(path, *names, *split_by, config.scale, config.label_gaps)
        pack = read_pack(path)
        require_split(pack, split)
        when = verified(config, pack)
        if when == START and (found := verify(pack)):
            raise UsageError(f"{pack.path} is corrupt: {found[0]} ({len(found)} corrupt blocks)")
        if when == NEVER:
            read_sums(pack)  # they must be those of the pack even where nothing is compared
        return pack

    return call_on_root(comm, find)


def verified(config: Config, pack: Pack) -> str:
    """When the checksums of a pack are compared: --verify, by default by its size, but never
    so that it ends a run that is to leave corrupt rows out.
    """
    if config.verify != "auto":
        return config.verify
    early = pack.file_size <= VERIFIED_BYTES and not config.skip_bad
    return START if early else FIRST_TOUCH


def make_checks(config: Config, pack: Pack, comm: Comm) -> Checks:
    """What is compared while samples are read, and whether bad ones are skipped. Collective."""

    def warn(text: str) -> None:
        say(f"hpctrain: rank {comm.rank}: {text}", sys.stderr)

    wanted = not pack.external and verified(config, pack) == FIRST_TOUCH
    sums = call_on_root(comm, lambda: find_sums(pack)) if wanted else None
    return Checks(sums, warn if config.skip_bad else None)


def staged(folder: str, reading: Reading, shards: range, comm: Comm) -> Reading:
    """The same from a copy in `folder`, on this host's disk: the training images that its ranks
    need together, if this rank may ever carry `shards`. Raises the same on all ranks. Collective.
    """
    pack, source = reading.pack, reading.source
    if pack.external:
        raise UsageError(f"--stage copies packs, and {pack.path} is none: copy the file yourself")
    sums = reading.checks.sums or call_on_root(comm, lambda: find_sums(pack))
    host = comm_of_host(comm)
    try:
        call_on_all(comm, lambda: make_folder(Path(folder)))
        extents = allgather(host, source.byte_range(reading.order.reach(shards)))
        held = min(start for start, _ in extents), max(stop for _, stop in extents)
        final = Path(folder).absolute() / staged_name(pack, held)
        whole = pieces(pack, sums, held)
        part = whole[host.rank :: host.size]  # of this rank
        sound = final.exists() and compare(pack, final, part)
        needed = 0 if all(allgather(host, sound)) else sum(piece.length for piece in whole)
        _copy(pack, final, part, needed, host, comm)
    finally:
        host.Free()
    source.close()
    here = replace(pack, path=str(final))
    checks = Checks(None, reading.checks.warn, held)  # every block was compared on its way
    opened = call_on_all(comm, lambda: Split(here, "train", checks=checks))
    return replace(reading, pack=here, checks=checks, source=opened)


def order_of(plan: Plan) -> Order:
    """In which order the shards read the training rows."""
    runs = plan.block_rows, plan.window_blocks, plan.scattered
    return make_order(plan.shuffle, plan.partition, plan.seed, *runs)


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
