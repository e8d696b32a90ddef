"""The first act of a set-up: the data of a run, and the order in which a rank reads them.

With ``--stage DIR`` every host copies the data that its ranks read to its own disk
(``staging.py``).
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch

from hpctrain.config import Config, Every
from hpctrain.cores import check_threads
from hpctrain.data.file_set import describe_changes
from hpctrain.data.orders import BalancedOrder, Order, make_order
from hpctrain.data.pack import ExternalOptions, Pack, SplitInfo, read_pack
from hpctrain.data.split import Split, held_bytes
from hpctrain.data.targets import target_kind
from hpctrain.errors import UsageError
from hpctrain.inference.network import require_split
from hpctrain.memory import keep_memory
from hpctrain.packing.find import find_pack_path
from hpctrain.parallel.device import choose_device, unused_gpus_note
from hpctrain.parallel.hosts import JobCores, core_notes, share_cores
from hpctrain.parallel.mpi import Comm, allgather, comm_of_host, on_all, on_root
from hpctrain.plan import Plan, cpu_threads
from hpctrain.report.settings import UnreadableFile, read_files_of
from hpctrain.tasks.facts import FACTS, KINDS
from hpctrain.tasks.task import task_class
from hpctrain.text import counted, listed, listed_names
from hpctrain.training.augmentation import rows_to_check
from hpctrain.training.resume import PreviousLaunch
from hpctrain.training.staging import stage
from hpctrain.watchdog import doing

NOTED_BYTES = 1 << 30  # on each rank for what is kept of samples; if it is more, a note says so
SORTED_BYTES = 48  # memory of a sample while --balanced-sampling sorts samples by class


class TrainingData(NamedTuple):
    """The data and the device of a rank."""

    pack: Pack
    train: Split
    device: torch.device
    cores: JobCores
    threads: int  # CPU threads of torch
    notes: list[str]  # for the user; those that are empty are left out


def open_data(config: Config, comm: Comm, earlier: PreviousLaunch | None) -> TrainingData:
    """Open the training split, choose the device, and set the threads of torch. Collective.

    Rank 0 opens the pack for all; ranks of a host share its GPUs and cores.
    """
    pack, copied = on_root(comm, open_pack, config, earlier)
    begun = earlier.plan if earlier else None
    local_rank = comm_of_host(comm).rank
    with on_all(comm):
        check_data(config, pack)
        device = choose_device(config.device, local_rank)
    cores = share_cores(comm)
    threads = cpu_threads(config, cores.threads, begun)
    with on_all(comm):
        train = Split(pack, "train", cores.decoding_threads(device.type), config.verify)
        torch.set_num_threads(threads)  # launchers set 1 or all cores
        check_threads(threads)
    keep_memory()
    asked_by = "--threads" if config.threads else "OMP_NUM_THREADS"
    return TrainingData(
        pack=pack,
        train=train,
        device=device,
        cores=cores,
        threads=threads,
        notes=[
            *core_notes(cores.scarcest, threads, asked_by),
            unused_gpus_note(config.device, device),
            copied,
        ],
    )


def open_pack(config: Config, earlier: PreviousLaunch | None) -> tuple[Pack, str]:
    """Return the pack of a run, and of one that is resumed a note on its files (rank 0).

    Raises UsageError, also if files differ from those of the `earlier` launch.
    """
    if earlier is None:
        return find_pack(config, None), ""
    pack = find_pack(config, earlier.plan)
    return pack, check_same_files(earlier.folder, earlier.plan, pack)


def find_pack(config: Config, begun: Plan | None) -> Pack:
    """Find (or make), check and open the pack, or the file of --images (rank 0).

    The splits of a run that was `begun` stay as they are.
    """
    path = find_pack_path(config.data, config.cache_dir, config.task)
    labels = config.labels
    if config.targets is not None:
        labels = ",".join(config.targets)
    if config.images is not None and labels is not None:
        from hpctrain.data.external_files import open_external  # imports h5py

        return open_external(
            path,
            ExternalOptions(
                images=config.images,
                labels=labels,
                layout=config.layout,
                split=config.table()["split"],
                seed=choose_split_seed(config, begun),
                block_rows=None if config.shuffle == "blocks" else 0,
                max_value=config.max_value,
                group=config.group,
                nodata=None if config.nodata is None else float(config.nodata),
                kind=target_kind(FACTS[config.task].targets),
            ),
            config.cache_dir,
        )
    pack = read_pack(path)
    require_split(pack, "train")
    if config.max_value is not None:
        return pack.with_max_value(config.max_value)
    return pack


def check_same_files(folder: Path, plan: Plan, pack: Pack) -> str:
    """Raise UsageError if a set of files is not the one with which the run in `folder` began.

    The error names the files that are others. Returns a note if files were written anew, with equal
    probes, as copies are; else "".
    """
    files = pack.splits["train"].files
    if files is None:
        return ""
    try:
        before = read_files_of(folder)
    except UnreadableFile:
        return ""  # the plan holds the identity of them all
    now = files.table()
    if pack.uuid != plan.pack_uuid:
        changes = describe_changes(before, now)
        if changes:
            raise UsageError(f"{pack.path}: since the run was begun, {changes}: it cannot go on")
    rewritten = [name for name in now if now[name] != before.get(name)]
    if not rewritten:
        return ""
    return (
        f"{len(rewritten):,} of {counted(len(now), 'file')} were written since the run was begun"
        f" ({listed_names(rewritten, 3)}): they are taken for copies, as probes of them are equal"
    )


def choose_split_seed(config: Config, begun: Plan | None) -> int:
    """Return --split-seed; --seed for a run begun when that one drew the splits."""
    if begun and begun.split_seed is None:
        return config.seed
    return config.split_seed


def check_data(config: Config, pack: Pack) -> None:
    """Raise UsageError for settings that do not fit the pack."""
    height, width, _ = pack.image_shape
    if not 0 <= config.shift < min(height, width):  # else nothing of an image could be left
        most = min(height, width) - 1
        raise UsageError(f"--shift {config.shift}: images of {width}x{height} allow 0 to {most}")
    if config.rotate90 and height != width:
        raise UsageError(
            f"--rotate90 turns square images, and those of {pack.path} have {width}x{height}"
            " pixels: leave it out"
        )
    task_class(config.task).check_data(pack)
    if config.balanced_sampling and pack.targets.kind != "class":
        raise UsageError(
            f"--balanced-sampling draws images by their one class, and {pack.path} holds"
            f" {KINDS[pack.targets.kind]}: leave it out"
        )
    require_validation("--final best", config.final == "best", pack)
    require_validation("--patience", config.patience, pack)
    require_validation("--best-by", config.best_by, pack)
    require_validation("--threshold best", not config.threshold, pack)
    every = config.validate_every not in (Config.validate_every, Every("0"))
    require_validation("--validate-every", every, pack)


def require_validation(flag: str, is_given: object, pack: Pack) -> None:
    """Raise UsageError if `flag` is given and the pack has no validation split."""
    if is_given and "validation" not in pack.splits:
        how = "train" if pack.external is not None else "pack"
        raise UsageError(
            f"{flag} needs a split validation, and {pack.path} has none: {how} with --split"
            " 0.8,0.1,0.1"
        )


def open_order(
    config: Config, plan: Plan, source: Split, shards: range, comm: Comm
) -> tuple[Split, Order]:
    """Return the training split, and the order in which this rank reads its `shards`. Collective.

    With --stage the split is that of a copy on this host, and `source` is closed. Labels, checksums
    and offsets that this rank may need are read now and kept. Raises the same error on all ranks.
    """

    def order_of(split: Split) -> Order:
        return make_order(
            name=plan.shuffle,
            partition=plan.partition,
            seed=config.seed,
            block_rows=plan.block_rows,
            window_blocks=plan.window_blocks,
            starts=split.block_starts,
            classes_of=split.read_targets if config.balanced_sampling else None,
        )

    train = source
    order = order_of(source)
    reach = order.reach(shards)
    if config.stage and not config.dry_run:
        needed = reach
        if comm.rank == 0:  # it also tests own functions with the first samples
            needed = range(0, max(reach.stop, min(rows_to_check(config), len(source))))
        pack = stage(config.stage, source, needed, comm)
        source.close()
        with on_all(comm):
            train = Split(pack, "train", source.threads, config.verify)
        order = order_of(train)
        doing("setting up")  # replaces the last piece that was staged
    with on_all(comm):
        train.hold(reach)
        if isinstance(order, BalancedOrder):  # reads all labels of the shards
            for shard in shards:
                order.classes(shard)
    return train, order


def balance_note(order: Order, shards: range, classes: Sequence[str], comm: Comm) -> str:
    """Return a note on classes that --balanced-sampling draws too rarely, "" if none. Collective.

    A shard of --shuffle partition cannot draw a class of which it has no sample.
    """
    if not isinstance(order, BalancedOrder) or order.everywhere:
        return ""
    counts = [order.drawn(shard, len(classes)) for shard in shards]
    drawn = np.concatenate(allgather(comm, counts))  # (shards, K)
    absent = (drawn == 0).sum(0)
    totals = drawn.sum(0)
    lacking = np.flatnonzero(absent).tolist()
    if not lacking:
        return ""
    rare = [f"{classes[k]} {absent[k]} ({totals[k]:,.0f} images an epoch)" for k in lacking]
    return (
        f"--balanced-sampling: some of {len(drawn):,} shards lack a class and cannot draw it:"
        f" {listed(rare, 3)}; of other classes up to {totals.max():,.0f} images are drawn an epoch;"
        " --shuffle global draws all equally often"
    )


def check_memory(config: Config, plan: Plan, info: SplitInfo, ranks: int) -> str:
    """Return a note on the memory that --shuffle global takes on each rank, "" if it is little.

    A rank then keeps targets, checksums and offsets of all samples. Raises UsageError if that is
    more than the memory of this host, on which `ranks` ranks run.
    """
    columns = (info.targets, info.offsets, info.crc32 if config.verify else None)
    sample_bytes = sum(held_bytes(column) for column in columns if column is not None)
    if config.verify:
        sample_bytes += 1  # whether its checksum was compared
    if config.balanced_sampling:
        sample_bytes += SORTED_BYTES
    if plan.shuffle != "global" or sample_bytes * info.samples <= NOTED_BYTES:
        return ""
    gib = sample_bytes * info.samples / 2**30
    takes = (
        f"--shuffle global keeps numbers of {info.samples:,} samples: {gib:,.1f} GiB on each rank"
    )
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / 2**30
    if gib * ranks > memory:
        raise UsageError(
            f"{takes}, and this host has {memory:,.1f} GiB for {counted(ranks, 'rank')}: use"
            " --shuffle partition or blocks, or fewer ranks per host"
        )
    return takes
