"""The input of a run: its pack, its splits and the order of samples.

With ``--stage DIR`` every host copies the data that its ranks read to its own disk before the first
step (``staging.py``).
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np

from hpctrain.config import Config
from hpctrain.data.orders import BalancedOrder, Order, make_order
from hpctrain.data.pack import External, Pack, SplitInfo, read_pack
from hpctrain.data.split import Split
from hpctrain.errors import UsageError
from hpctrain.inference.opening import require_split
from hpctrain.packing.builtin import locate
from hpctrain.parallel.mpi import Comm, on_all, on_root
from hpctrain.plan import Plan
from hpctrain.text import counted
from hpctrain.training.staging import stage
from hpctrain.watchdog import doing

FIRST_ROWS = 32  # of the training split: rank 0 tests the network and own functions with them
NOTED_BYTES = 1 << 30  # on each rank for what is kept of samples; if it is more, a note says so
SORTED_BYTES = 48  # of a sample while --balanced-sampling sorts samples by class


@dataclass
class Input:
    """The source of a run's samples, on one rank."""

    pack: Pack  # the one that is read: the original or its copy on this host
    verify: bool
    train: Split
    order: Order
    others: dict[str, Split] = field(default_factory=dict)

    def split(self, name: str) -> Split:
        """Open another split. It stays open: each of its samples is verified once."""
        if name not in self.others:
            self.others[name] = Split(self.pack, name, verify=self.verify)
        return self.others[name]

    def close(self) -> None:
        """Close all splits."""
        for split in (self.train, *self.others.values()):
            split.close()


def check_data(config: Config, pack: Pack) -> None:
    """Raise UsageError for settings that do not fit the pack."""
    height, width, _ = pack.image_shape
    if not 0 <= config.shift < min(height, width):  # else nothing of an image could be left
        allowed = f"images of {width}x{height} allow 0 to {min(height, width) - 1}"
        raise UsageError(f"--shift is {config.shift}; {allowed}")
    if config.random_crop and not pack.fit:
        raise UsageError(
            f"--random-crop cuts JPEG files as they are decoded, but {pack.path} holds pixels: pack"
            " with --encoding jpeg"
        )
    chunked = pack.splits["train"].images.chunk_rows > 0
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
                f" {'train' if pack.external is not None else 'pack'} with --split 0.8,0.1,0.1"
            )


def open_pack(config: Config, comm: Comm) -> Pack:
    """Open the pack, or the file of --images, on rank 0 for all ranks. Collective."""
    return on_root(comm, find_pack, config)


def find_pack(config: Config) -> Pack:
    """Find (or make), check and open the pack, or the file of --images (rank 0)."""
    path = locate(config.data, config.cache_dir)
    if config.images is not None and config.labels is not None:
        from hpctrain.data.external import read_external  # imports h5py

        blocks = None if config.shuffle == "blocks" else 0
        names = config.images, config.labels, config.layout
        options = External(*names, config.split, config.seed, blocks, config.max_value)
        return read_external(path, options)
    pack = read_pack(path)
    require_split(pack, "train")
    return pack


def check_memory(config: Config, plan: Plan, info: SplitInfo, ranks: int) -> str:
    """Return a note on the memory that --shuffle global takes on each rank, "" if it is little.

    A rank then keeps the labels, checksums and offsets of all samples. Raises UsageError if that is
    more than the memory of this host, on which `ranks` ranks run.
    """
    columns = (info.labels, info.offsets, info.crc32 if config.verify else None)
    each = sum(np.dtype(column.dtype).itemsize for column in columns if column is not None)
    each += config.verify + SORTED_BYTES * config.balanced_sampling
    if plan.shuffle != "global" or each * info.samples <= NOTED_BYTES:
        return ""
    gib = each * info.samples / 2**30
    takes = (
        f"--shuffle global keeps labels, checksums and offsets of {info.samples:,} samples:"
        f" {gib:,.1f} GiB on each rank"
    )
    there = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / 2**30
    if gib * ranks > there:
        raise UsageError(
            f"{takes}, and this host has {there:,.1f} GiB for {counted(ranks, 'rank')}: use"
            " --shuffle partition or blocks, or fewer ranks per host"
        )
    return takes


def open_input(config: Config, plan: Plan, source: Split, shards: range, comm: Comm) -> Input:
    """Open the input of this rank, which carries `shards` of the training split. Collective.

    Labels, checksums and offsets that it may need are read now and kept. Raises the same error on
    all ranks.
    """
    reach = order_of(config, plan, source).reach(shards)
    if config.stage and not config.dry_run:
        needed = reach
        if comm.rank == 0:  # it also tests the network and own functions with the first samples
            needed = range(0, max(reach.stop, min(FIRST_ROWS, len(source))))
        pack = stage(config.stage, source, needed, comm)
        source.close()
        with on_all(comm):
            source = Split(pack, "train", verify=config.verify)
        doing("setting up")  # replaces the last piece that was staged
    with on_all(comm):
        source.hold(reach)
        order = order_of(config, plan, source)
        if isinstance(order, BalancedOrder):  # reads all labels of the shards
            for shard in shards:
                order.classes(shard)
    return Input(source.pack, config.verify, source, order)


def order_of(config: Config, plan: Plan, source: Split) -> Order:
    """Return the order in which the shards read the samples of the training split."""
    labels_of = source.read_labels if config.balanced_sampling else None
    blocks = plan.block_rows, plan.window_blocks
    return make_order(plan.shuffle, plan.partition, config.seed, *blocks, labels_of)
