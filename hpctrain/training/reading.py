"""The input of a run: its pack, the comparison of checksums, and the order of samples.

With ``--stage DIR`` every host copies the data that its ranks read to its own disk before the first
step. The ranks of a host share the copying. A complete copy that an earlier launch left is verified
and reused; an incomplete one has another name.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from hpctrain.config import Config
from hpctrain.data.augment import check_shift
from hpctrain.data.builtin import locate
from hpctrain.data.checks import Checks
from hpctrain.data.external import read_external
from hpctrain.data.imbalance import BalancedOrder
from hpctrain.data.orders import Order, make_order
from hpctrain.data.pack_format import Pack, Part
from hpctrain.data.split import Split
from hpctrain.data.staging import (
    Piece,
    begin,
    check_room,
    compare,
    copy,
    finish,
    make_folder,
    pieces,
    staged_name,
)
from hpctrain.errors import UsageError
from hpctrain.files import remove_left_behind
from hpctrain.inference.opening import find_sums, require_split
from hpctrain.parallel.hosts import comm_of_host
from hpctrain.parallel.mpi import Comm, agreed, allgather, call_on_all, call_on_root
from hpctrain.plan import Plan

VERIFIED_BYTES = 1 << 30  # packs up to this size are verified at start, about 1 s per GB
FIRST_ROWS = 32  # of the training split: rank 0 tests the network and own functions with them
START, FIRST_TOUCH, NEVER = "start", "first-touch", "never"


@dataclass(frozen=True)
class Reading:
    """The source of a run's samples, on one rank."""

    pack: Pack  # the one that is read: the original or its copy on this host
    checks: Checks
    source: Split  # the training split
    order: Order

    def split(self, name: str) -> Split:
        """Open another split, for use in a ``with`` block."""
        return Split(self.pack, name, checks=self.checks)


def check_data(config: Config, pack: Pack) -> None:
    """Raise UsageError for settings that do not fit the pack."""
    check_shift(config.shift, pack.image_shape)
    if config.random_crop and not pack.encoded:
        raise UsageError(
            f"--random-crop cuts JPEG files as they are decoded, but {pack.path} holds pixels: pack"
            " with --encoding jpeg"
        )
    chunked = pack.external is not None and pack.external.chunk_rows > 0
    if config.balanced_sampling and (config.shuffle or ("blocks" if chunked else "")) == "blocks":
        default = "" if config.shuffle else " (the default for a file of chunks)"
        raise UsageError(
            f"--balanced-sampling and --shuffle blocks{default} exclude each other: a block is read"
            " once per epoch, and images of rare classes repeat: use --shuffle partition"
        )
    needs = {
        "--final best": config.final == "best",
        "--patience": config.patience,
        "--validate-every": config.validate_every not in (Config.validate_every, "0"),
    }
    require_validation(pack, needs)


def require_validation(pack: Pack, needs: Mapping[str, object]) -> None:
    """Raise UsageError if a setting in `needs` is given and the pack has no validation split."""
    for flag, given in needs.items():
        if given and "validation" not in pack.splits:
            raise UsageError(
                f"{flag} needs a split validation, and {pack.path} has none:"
                f" {'train' if pack.external else 'pack'} with --split 0.8,0.1,0.1"
            )


def open_pack(config: Config, split: str, comm: Comm) -> Pack:
    """Open the pack, or the file of --images, on rank 0 for all ranks. Collective.

    Rank 0 finds (or makes) and validates it.
    """

    def find() -> Pack:
        from hpctrain.data.packed import read_pack, read_sums, verify  # imports h5py

        path = locate(config.data, config.cache_dir)
        if config.images is not None and config.labels is not None:
            names = config.images, config.labels, config.layout
            blocks = None if config.shuffle == "blocks" else 0
            split_by = config.split, config.seed, blocks
            return read_external(path, *names, *split_by, config.max_value)
        pack = read_pack(path)
        require_split(pack, split)
        when = verified(config, pack)
        if when == START and (found := verify(pack)):
            raise UsageError(f"{pack.path} is corrupt: {found[0]} ({len(found)} corrupt blocks)")
        if when == NEVER:
            read_sums(pack)  # they must belong to the pack even if none is compared
        return pack

    return call_on_root(comm, find)


def verified(config: Config, pack: Pack) -> str:
    """Return when the checksums of a pack are compared: `START`, `FIRST_TOUCH` or `NEVER`.

    The default depends on the size of the pack.
    """
    if config.verify != "auto":
        return config.verify
    return START if pack.file_size <= VERIFIED_BYTES else FIRST_TOUCH


def make_checks(config: Config, pack: Pack, comm: Comm) -> Checks:
    """Make the checks of samples as they are read. Collective."""
    wanted = not pack.external and verified(config, pack) == FIRST_TOUCH
    sums = call_on_root(comm, lambda: find_sums(pack)) if wanted else None
    return Checks(sums)


def make_reading(
    config: Config, plan: Plan, source: Split, checks: Checks, shards: range, comm: Comm
) -> Reading:
    """Return how this rank, which carries `shards`, reads the training split. Collective.

    Labels and offsets that it may need are read now and kept. Raises the same error on all ranks.
    """
    reading = Reading(source.pack, checks, source, order_of(plan, source))
    if config.stage and not config.dry_run:
        reading = staged(config.stage, reading, shards, comm)
        reading = replace(reading, order=order_of(plan, reading.source))
    call_on_all(comm, lambda: reading.source.hold(reading.order.reach(shards)))
    return reading


def staged(folder: str, reading: Reading, shards: range, comm: Comm) -> Reading:
    """Copy the pack to `folder` on this host's disk, to be read from there. Collective.

    Of the training split, the copy holds what the ranks of the host need together; `shards` are
    those of this rank. Raises the same error on all ranks.
    """
    pack, source = reading.pack, reading.source
    if pack.external:
        problem = f"--stage copies packs, and {pack.path} is none: copy the file yourself"
        raise agreed(UsageError(problem))
    sums = reading.checks.sums or call_on_root(comm, lambda: find_sums(pack))
    host = comm_of_host(comm)
    call_on_all(comm, lambda: make_folder(Path(folder)))
    reach = reading.order.reach(shards)
    if comm.rank == 0:  # it also tests the network and own functions with the first samples
        reach = range(0, max(reach.stop, min(FIRST_ROWS, len(source))))
    own = call_on_all(comm, lambda: Part(reach, range(*source.byte_range(reach))))
    parts = zip(*allgather(host, own), strict=True)
    part = Part(*(range(min(r.start for r in of), max(r.stop for r in of)) for of in parts))
    final = Path(folder).absolute() / staged_name(pack, part)
    whole = pieces(pack, sums, part)
    share = whole[host.rank :: host.size]  # of this rank
    sound = final.exists() and compare(pack, final, share)
    needed = 0 if all(allgather(host, sound)) else sum(piece.length for piece in whole)
    _copy(pack, final, share, needed, host, comm)
    source.close()
    here = replace(pack, path=str(final), part=part)
    checks = Checks()  # every block was verified when copied
    opened = call_on_all(comm, lambda: Split(here, "train", checks=checks))
    return replace(reading, pack=here, checks=checks, source=opened)


def order_of(plan: Plan, source: Split) -> Order:
    """Return the order in which the shards read the samples of the training split."""
    if plan.balanced_sampling:
        everywhere = plan.shuffle == "global"
        return BalancedOrder(
            plan.partition, plan.seed, source.read_labels, everywhere, plan.scattered
        )
    runs = plan.block_rows, plan.window_blocks, plan.scattered
    return make_order(plan.shuffle, plan.partition, plan.seed, *runs)


def _copy(pack: Pack, final: Path, share: list[Piece], needed: int, host: Comm, comm: Comm) -> None:
    """Copy this rank's `share` of the `needed` bytes; nothing if that is 0. Collective.

    Hosts that need no copy take part too."""

    def make() -> Path | None:
        if not needed or host.rank:
            return None
        remove_left_behind(final)
        check_room(final.parent, needed)
        return begin(final.parent, pack, final.name)

    temporary = call_on_all(comm, make)
    target = call_on_root(host, lambda: temporary)
    try:
        call_on_all(comm, lambda: copy(pack, target, share) if target else None)
        call_on_all(comm, lambda: finish(temporary, final) if temporary else None)
    finally:
        if temporary:
            temporary.unlink(missing_ok=True)
