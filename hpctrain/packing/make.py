"""``hpctrain pack``: make one HDF5 pack of image files.

1. List the source (``sources.py``).
2. Assign the images to splits and shuffle them, from the seed. Equal files, by size and SHA-256,
   stay together: they are placed first, in train while there is room. Groups of a manifest are
   placed in order of size, the largest first, each in the split that most lacks the group's
   classes, so counts are only as exact as the groups allow. Splits given by the source are kept;
   copies in an earlier split (train before validation before test) are left out, so that no test
   image is trained on.
3. Choose size, channels and type (``kinds.py``). Decode every image in worker processes on one node
   (``workers.py``, ``decoding.py``), and write it at its place in a new file with a temporary name.
   JPEG files, whose places depend on their sizes, are decoded first; then they are read again and
   written. Files that are cut into tiles (``tiles.py``) are decoded once for all their tiles.
4. Add checksums and attributes, and rename the file (``write.py``).

If images turn out to be unreadable and may be left out, or of another type than the first ones,
steps 2 and 3 begin again.
The table of the pack is printed on standard output, everything else on standard error.
"""

from __future__ import annotations

import errno
import faulthandler
import math
import os
import re
import sys
import time
from collections.abc import Iterable, Iterator, Mapping
from fractions import Fraction
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any

import numpy as np
import PIL

import hpctrain
from hpctrain.config import PackConfig
from hpctrain.cores import core_count
from hpctrain.data.images import CHANGES, BadImage, Change, Fit, OtherKind, few_gray_levels
from hpctrain.data.orders import shuffled
from hpctrain.data.outliers import outlier_of_pack
from hpctrain.data.pack import SPLITS, is_pack, range_note, read_pack, scale_of
from hpctrain.data.partition import READ_BYTES
from hpctrain.data.scale import usual_maximum
from hpctrain.data.split import Bad, Split, pieces
from hpctrain.data.statistics import BeyondMaximum, ChannelStatistics
from hpctrain.data.strata import assign_groups, check_splits, strata_of
from hpctrain.data.values import Header
from hpctrain.errors import RunError, UsageError
from hpctrain.files import remove_left_behind, whole_file
from hpctrain.packing import workers
from hpctrain.packing.builtin import BUILT_IN, GENERATED, cache_path, fetch_flowers, pack_name
from hpctrain.packing.decoding import (
    Conversion,
    Decoded,
    EmptyImage,
    decode_images,
    decode_tiles,
    write_files,
)
from hpctrain.packing.kinds import Choice, choose_conversion, read_source, requested_size
from hpctrain.packing.sources import NO_SPLIT, Source, open_source
from hpctrain.packing.table import print_table
from hpctrain.packing.tiles import cut_source
from hpctrain.packing.workers import RunTasks
from hpctrain.packing.write import PackWriter, writing_file
from hpctrain.text import MOST_NAMED, brief, counted, listed, listed_names, say
from hpctrain.watchdog import doing

TRAIN, VALIDATION, TEST = range(3)  # indices into SPLITS and shares
SUFFIX = r"(?i)(\.tar)?\.(gz|bz2|xz)$|\.(tgz|tbz2|txz|tar|zip|csv|tsv|txt)$"  # of a source
MIN_IMAGES_PER_JOB = 16
TASKS_PER_WORKER = 32  # least tasks that decode
TASK_BYTES = 4 << 20  # most bytes of pixels of a task that decodes
NEARLY_BLACK = 15  # largest value of images that look black
SKIPPED_NAMED = 100  # most names of skipped files in the provenance


class BadFiles(Exception):
    """Some images cannot be read: the reasons by row. The unfinished pack is discarded."""


class OtherKinds(BadFiles):
    """Likewise, because their type or number of channels is not the one of the first images."""


def main(config: PackConfig) -> int:
    """Run the subcommand: make or check a pack. Returns the exit code."""
    if config.check is not None:
        if config.source is not None:
            raise UsageError(f"--check {config.check} packs nothing: leave out {config.source}")
        return check_pack(config.check)
    faulthandler.enable(2)  # an image may crash its decoder: with --jobs 1, the stack is printed
    start = time.perf_counter()
    pack = read_pack(make_pack(config))
    seconds = time.perf_counter() - start
    outlier = outlier_of_pack(pack)
    if outlier is not None:
        note(outlier.note("--nodata="))
    print_table(pack)
    images = sum(split.samples for split in pack.splits.values())
    note(f"{images:,} images in {seconds:.1f} s, {images / seconds:,.0f} images/s")
    return 0


def check_pack(path: str) -> int:
    """Read all samples of a pack; name those that are corrupt (returns 1), else print its table."""
    pack = read_pack(path)
    count = 0
    for name in pack.splits:
        with Split(pack, name) as split:
            for rows in pieces(len(split), max(1, READ_BYTES // pack.image_bytes)):
                doing(f"checking sample {rows[0]:,} of {name}")
                bad = Bad()
                pixels = np.empty((len(rows), *split.image_shape), split.dtype)
                split.gather(rows, pixels, bad=bad)
                split.read_targets(rows, bad)
                for text in [*bad.values()][: max(0, MOST_NAMED - count)]:
                    note(text)
                count += len(bad)
    if count > MOST_NAMED:
        note(f"corrupt: {count - MOST_NAMED:,} more")
    if count:
        note(f"{count:,} corrupt in {path}: do not use it, copy or make it again")
        return 1
    print_table(pack)
    say("all checksums agree")
    return 0


def make_pack(config: PackConfig) -> Path:
    """Make the pack that `config` describes, and return its path. Raises UsageError and RunError.

    After an error or an interruption, no file exists under the pack's name.
    """
    if config.source is None:
        raise UsageError(f"nothing to pack: give a folder, .tgz, .zip, .csv, or {listed(BUILT_IN)}")
    output = output_path(config, config.source)
    with writing_file(output):
        remove_left_behind(output)
        if config.source in GENERATED:
            from hpctrain.packing.generated import pack_generated

            pack_generated(config, output)
        else:
            if config.task is not None:
                raise UsageError(
                    f"--task {config.task} does not apply to {config.source}: a table says what its"
                    " targets are, by its columns and --targets"
                )
            is_flowers = config.source == "flowers"
            path = fetch_flowers(config.cache_dir) if is_flowers else Path(config.source)
            pack_images(config, path, output)
    return output


def output_path(config: PackConfig, source: str) -> Path:
    """Return the path of the pack to write, checked before any work is done."""
    path = Path(config.output or re.sub(SUFFIX, "", Path(source).resolve().name) + ".h5")
    if source in BUILT_IN and not config.output:
        path = cache_path(config.cache_dir, pack_name(source, config.task))
    if path.exists() and not config.overwrite:
        raise UsageError(f"{path} exists: name another --output, or replace it with --overwrite")
    if path.exists() and not is_pack(path):
        raise UsageError(f"--output {path} is not a pack: --overwrite does not replace it")
    if not path.parent.is_dir():
        raise UsageError(f"--output {path}: there is no folder {path.parent}")
    return path


def pack_images(config: PackConfig, path: Path, output: Path) -> None:
    """Make a pack of the images at `path`."""
    with open_source(path, output.parent, config.manifest, config.targets) as source:
        total = len(source.names)
        jobs = config.jobs or core_count()
        jobs = max(1, min(jobs, total // MIN_IMAGES_PER_JOB))
        with workers.start_workers(jobs) as run_tasks:
            choice = choose_conversion(config, source, run_tasks)
            if config.tiles or not choice.conversion.fit.width:
                bad = {i: why for i, why in enumerate(choice.headers) if isinstance(why, BadImage)}
                leave_out(config, source, bad, total)
            find_equal_files(source, run_tasks)
            if config.tiles:
                headers = [header for header in choice.headers if isinstance(header, Header)]
                cut_source(source, headers, config.tiles, config.overlap)
            while True:
                try:
                    return write_images(
                        config,
                        source=source,
                        choice=choice,
                        run_tasks=run_tasks,
                        jobs=jobs,
                        output=output,
                    )
                except OtherKinds as error:
                    if choice.is_final:
                        leave_out(config, source, error.args[0], total)
                    else:
                        choice = choose_conversion(config, source, run_tasks, is_final=True)
                except BadFiles as error:
                    leave_out(config, source, error.args[0], total)


def leave_out(
    config: PackConfig, source: Source, reasons: Mapping[int, BadImage], total: int
) -> None:
    """Drop unusable images, given by row with the reasons, and name the first of them.

    Raises UsageError, unless --skip-bad allows it and every class has an image left. Tiles of
    nothing but nodata are always left out.
    """
    if not reasons:
        return
    files = source.targets.count_known(source.target_rows)
    empty = [row for row, why in reasons.items() if isinstance(why, EmptyImage)]
    if source.corners is not None and len(empty) == len(reasons):
        names = listed_names(source.names[row] for row in sorted(empty))
        source.drop(reasons, is_listed=False)
        source.empty_tiles += len(empty)
        note(f"{counted(len(empty), 'tile')} left out, all nodata: {names}")
    else:
        drop_unreadable(source, reasons)
        if source.names and not config.skip_bad:
            raise UsageError(
                f"{len(source.bad):,} of {total:,} files cannot be read: remove those listed above,"
                " or leave them out with --skip-bad"
            )
    if not source.names:
        raise no_image_error(source)
    check_targets(source, files)


def check_targets(source: Source, files: np.ndarray) -> None:
    """Raise UsageError if a class or column that had `files`, (K,), has none that can be read."""
    left = source.targets.count_known(source.target_rows)
    for number in np.flatnonzero((files > 0) & (left == 0))[:1].tolist():
        count = counted(int(files[number]), "file")
        noun = source.targets.noun
        raise UsageError(
            f"{noun} {source.targets.names[number]} of {source.name} has no image: none of its"
            f" {count} can be read; remove the {noun}, or fetch its files again"
        )


def drop_unreadable(source: Source, reasons: Mapping[int, BadImage]) -> None:
    """Drop images, given by row with the reasons, and name the first of them."""
    before = len(source.bad)
    source.drop(reasons)
    dropped = source.bad[before:]
    for name, why in dropped[:MOST_NAMED]:
        note(f"unreadable: {brief(name)}: {brief(why)}")
    if len(dropped) > MOST_NAMED:
        note(f"unreadable: {len(dropped) - MOST_NAMED:,} more")


def no_image_error(source: Source) -> UsageError:
    """Return the error for a source of which all files are unreadable."""
    text = f"source {source.name}: none of its {counted(len(source.bad), 'file')}"
    if {why for _, why in source.bad} == {os.strerror(errno.ENOENT)}:
        return UsageError(f"{text} is there: paths of a table are relative to {source.root}")
    return UsageError(f"{text} can be packed: the reasons are above")


def find_equal_files(source: Source, run_tasks: RunTasks) -> None:
    """Give equal files equal numbers in `source.duplicate_of`.

    Only files of equal size (in a .zip, of equal CRC-32) are hashed: all their bytes, or of large
    ones first a part, and all bytes if it is equal, too.
    """
    source.duplicate_of = np.arange(len(source.names))
    rows = source.duplicate_of
    if source.kind == "folder":
        sizes = read_source(source, rows, run_tasks, workers.read_sizes)
        keys = np.fromiter(sizes, np.int64, len(rows))
    elif source.kind == "zip":
        keys = source.places[:, 3]  # CRC-32
    else:
        keys = source.places[:, 2]  # size
    _, numbers, counts = np.unique(keys, return_inverse=True, return_counts=True)
    rows = np.flatnonzero((counts[numbers] > 1) & (keys >= 0))
    if source.kind != "zip":
        results = read_source(source, rows, run_tasks, workers.hash_parts, columns=[keys])
        rows, _, numbers = group_by_digest(rows, results)
        rows = rows[np.bincount(numbers)[numbers] > 1]
    results = read_source(source, rows, run_tasks, workers.apply_to_files, workers.sha256)
    rows, first, numbers = group_by_digest(rows, results)
    source.duplicate_of[rows] = first[numbers]


def group_by_digest(
    rows: np.ndarray, results: Iterable[bytes | BadImage]
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return those rows (n,) that have a digest, the first row of each, and their numbers."""
    texts = (b"" if isinstance(result, BadImage) else result for result in results)
    digests = np.fromiter(texts, "S32", len(rows))
    is_read = digests != b""
    rows = rows[is_read]
    _, first, numbers = np.unique(digests[is_read], return_index=True, return_inverse=True)
    return rows, rows[first], numbers


def assign_rows(source: Source, config: PackConfig) -> dict[str, np.ndarray]:
    """Return the images (n,) of every split in their final order. Raises UsageError.

    If the source gives test but no validation, validation is drawn from the given train, in the
    ratio of these two shares. A fold is held out as test, or as validation of a given test.
    """
    strata = strata_of(source.targets, source.target_rows)
    together = source.duplicate_of
    is_grouped = bool((source.groups >= 0).any())
    if is_grouped:
        together = merge_groups(together, source.groups)
    shares: tuple[Fraction, ...] = config.split
    splits = source.splits.astype(np.int32)
    way = ""
    wanted = [name for name, share in zip(SPLITS, shares, strict=True) if share]
    if config.fold:  # K of N, which are stratified and divide no group
        if (splits == VALIDATION).any():
            raise UsageError("--fold is for sources without a validation split: this one gives it")
        number, count = config.fold
        held_out = VALIDATION if (splits == TEST).any() else TEST
        rows = shuffled(np.flatnonzero(splits != TEST), config.seed, "pack split")
        folds = assign_groups(
            strata.take(rows),
            groups=together[rows],
            shares=(Fraction(1, count),) * count,
            balanced=True,
        )
        splits[rows] = np.where(folds == number - 1, held_out, TRAIN)
        wanted = [SPLITS[held_out]]
        way = f" by --fold {config.fold}"
    elif (splits > TRAIN).any():
        wanted = []
    else:  # a source with only train does not give splits
        splits[:] = NO_SPLIT
    if (splits > TRAIN).any() and shares[VALIDATION] and not (splits == VALIDATION).any():
        wanted.append("validation")
        splits[splits == TRAIN] = NO_SPLIT
        shares = (shares[TRAIN], shares[VALIDATION], Fraction(0))
    latest = np.full(int(together.max()) + 1, NO_SPLIT, np.int32)  # given split of each group
    np.maximum.at(latest, together, splits)
    splits[splits < latest[together]] = NO_SPLIT  # left out
    rows = np.flatnonzero(latest[together] == NO_SPLIT)
    rows = shuffled(rows, config.seed, "pack split")
    splits[rows] = assign_groups(
        strata.take(rows),
        groups=together[rows],
        shares=shares,
        balanced=is_grouped,
    )
    rows_of = {name: np.flatnonzero(splits == position) for position, name in enumerate(SPLITS)}
    source.split_notes = check_splits(
        rows_of,
        strata=strata,
        classes=source.targets.classes,
        wanted=wanted,
        source=source.name,
        way=way,
    )
    check_train(source, rows_of["train"])
    return {
        name: shuffled(rows, config.seed, "pack order", name)
        for name, rows in rows_of.items()
        if len(rows)
    }


def check_train(source: Source, train: np.ndarray) -> None:
    """Raise UsageError if there are no images `train` (n,), or all of a class or column is unknown.

    Of a column, values; of a class, whether they have it.
    """
    if not len(train):
        raise UsageError(f"{source.name} has no image for train: all are in other splits")
    if source.targets.kind == "class":
        return
    counts = np.count_nonzero(~source.targets.is_unknown(source.target_rows[train]), axis=0)
    source.targets.check_known(source.name, counts, counted(len(train), "image") + " of train")


def merge_groups(one: np.ndarray, other: np.ndarray) -> np.ndarray:
    """Merge two groupings (N,): images connected by equal numbers in either get equal numbers."""
    numbers = np.arange(len(one))
    groupings = [np.unique(groups, return_inverse=True)[1] for groups in (one, other)]
    while True:
        before = numbers
        for groups in groupings:
            smallest = np.full(len(numbers), len(numbers))
            np.minimum.at(smallest, groups, numbers)
            numbers = smallest[groups]
        if np.array_equal(numbers, before):
            return numbers


def write_images(
    config: PackConfig,
    source: Source,
    choice: Choice,
    run_tasks: RunTasks,
    jobs: int,
    output: Path,
) -> None:
    """Assign all images to splits, decode them and write the pack.

    Raises UsageError if a split or a class has no image, and BadFiles if some cannot be read: soon
    after the first image of another kind, if those of all images were not compared before.
    """
    conversion = choice.conversion
    rows_of = assign_rows(source, config)
    order = np.concatenate([*rows_of.values()])
    counts = {name: len(rows) for name, rows in rows_of.items()}
    count = len(order)
    targets = source.targets
    target_rows = source.target_rows[order]
    names = None
    if config.names:
        names = [source.names[row] for row in order]
    parts = [*divide(source, order, counts, conversion, jobs)]
    crc32 = np.zeros(count, np.uint32)
    sizes = np.zeros(count, np.int64)
    statistics = ChannelStatistics(conversion.fit.channels, conversion.nodata)  # of train
    bad: dict[int, BadImage] = {}
    changed = PackChanges(count)

    def make_writer(sizes: np.ndarray | None) -> PackWriter:
        return PackWriter(
            file,
            counts=counts,
            targets=target_rows,
            image_shape=conversion.shape,
            dtype=conversion.dtype,
            sizes=sizes,
            names=names,
        )

    def decoding_tasks(writer: PackWriter | None) -> Iterator[tuple[Any, ...]]:
        """Yield the arguments of `decode_images` for each part."""
        for part in parts:
            if changed.has_other_kinds and not choice.is_final:
                return
            seeds = targets.seeds(target_rows[part])
            task: tuple[Any, ...] = (source.slices(order[part]), seeds, conversion)
            if writer:
                task = (*task, file.name, int(writer.places[part[0]]))
            yield task

    def writing_tasks(writer: PackWriter) -> Iterator[tuple[Any, ...]]:
        """Yield the arguments of `write_files` for each part."""
        for part in parts:
            yield (
                source.slices(order[part]),
                targets.seeds(target_rows[part]),
                (changed.kinds[part] & Change.ENCODED != 0).tolist(),
                conversion.fit,
                file.name,
                int(writer.places[part[0]]),
            )

    with whole_file(output, point="pack") as file:
        writer = None
        if config.encoding != "jpeg":
            writer = make_writer(None)
        if writer and conversion.is_tiled:
            cutting = (
                tile_task(source, order, part, conversion, writer.places, file.name)
                for part in parts
            )
            decoded = run_tasks("cutting", decode_tiles, cutting, source.count_files())
        else:
            decoded = run_tasks("decoding", decode_images, decoding_tasks(writer), count)
        for part, done in zip(parts, decoded, strict=False):
            crc32[part] = done.crc32
            sizes[part] = done.sizes
            changed.add(part, done)
            if part[0] < counts["train"]:  # which comes first
                statistics.merge(done.statistics)
            bad |= bad_rows(source, order[part], done)
        if changed.has_other_kinds:
            raise OtherKinds(bad)
        if bad:
            raise BadFiles(bad)
        changed.refuse_few_gray_levels(source)
        facts = provenance(source, config, conversion.fit, counts) | {"changed": changed.counts()}
        fit_of_files = ""
        if not writer:
            fit_of_files = "crop" if conversion.fit.crop else "stretch"
            writer = make_writer(sizes)
            written = run_tasks("writing", write_files, writing_tasks(writer), count)
            differs = order[np.concatenate([*written]) != crc32]
            if len(differs):
                name = source.names[differs[0]]
                raise RunError(f"{name} was changed while it was packed: pack again")
            anew = changed.count(Change.ENCODED)
            facts["encoding"] = {
                "name": "jpeg",
                "kept": count - anew,
                "encoded_anew": anew,
            }
        writer.finish(
            crc32=crc32,
            statistics=statistics,
            targets=targets,
            provenance=facts,
            fit=fit_of_files,
            max_value=conversion.max_value,
        )
    say_notes(source, config, facts)
    changed.say(source, order, conversion.fit)
    changed.say_values(conversion, statistics)


def divide(
    source: Source, order: np.ndarray, counts: Mapping[str, int], conversion: Conversion, jobs: int
) -> Iterator[np.ndarray]:
    """Yield the samples of each task that decodes, (n,) places in the pack.

    They are of one split, consecutive, or if they are tiles, all those of some files.
    """
    sample_bytes = math.prod(conversion.shape) * np.dtype(conversion.dtype).itemsize
    step = max(1, min(TASK_BYTES // sample_bytes, len(order) // (TASKS_PER_WORKER * jobs)))
    for first, end in pairwise(accumulate(counts.values(), initial=0)):
        places = np.arange(first, end)
        if source.files is None:
            stops = [*range(step, len(places), step), len(places)]
        else:
            files = source.files[order[first:end]]
            places = places[np.argsort(files, kind="stable")]
            stops = (np.flatnonzero(np.diff(np.sort(files), append=-1)) + 1).tolist()
        start = 0
        for stop in stops:
            if stop - start >= step or stop == len(places):
                yield places[start:stop]
                start = stop


def tile_task(
    source: Source,
    order: np.ndarray,
    part: np.ndarray,
    conversion: Conversion,
    places: np.ndarray,
    path: str,
) -> tuple[Any, ...]:
    """Return the arguments of `decode_tiles` for all tiles of some files.

    part: (n,) places of the tiles in the pack, by file; places: (N,) offsets in its file.
    """
    assert source.files is not None and source.corners is not None
    rows = order[part]
    cuts = np.flatnonzero(np.diff(source.files[rows])) + 1
    first = rows[[0, *cuts.tolist()]]
    return (
        source.slices(first),
        source.targets.seeds(source.target_rows[first]),
        np.split(source.corners[rows], cuts),
        np.split(places[part], cuts),
        conversion,
        path,
    )


def bad_rows(source: Source, rows: np.ndarray, done: Decoded) -> dict[int, BadImage]:
    """Return why images cannot be packed, by row: all tiles of a file that cannot be read."""
    bad = {}
    for place, why in done.bad:
        row = int(rows[place])
        bad[row] = why
        if source.files is not None and not isinstance(why, EmptyImage):
            of_file = np.flatnonzero(source.files == source.files[row])
            bad |= dict.fromkeys(of_file.tolist(), why)
    return bad


class PackChanges:
    """What was changed in the images of a pack, in the order of the pack."""

    def __init__(self, count: int) -> None:
        """Begin with `count` images of which nothing is known."""
        self.kinds = np.zeros(count, np.uint32)  # bits of Change
        self.deepest = 0  # largest value of more than 8 bits, in [0, 65535]
        self.brightest = -math.inf  # largest value as it is packed
        self.frames = 0  # of the files that hold several
        self.nodata = ""  # as the first file states it
        self.beyond = BeyondMaximum()
        self.has_other_kinds = False  # whether an image differs from the first one

    def add(self, part: np.ndarray, done: Decoded) -> None:
        """Add what was changed in the images of these places (n,)."""
        self.kinds[part] = done.changes
        self.deepest = max(self.deepest, done.deepest)
        self.brightest = max(self.brightest, float(done.statistics.high.max()))
        self.frames += done.frames
        self.nodata = self.nodata or done.nodata
        self.beyond.merge(done.beyond)
        self.has_other_kinds |= any(isinstance(why, OtherKind) for _, why in done.bad)

    def count(self, change: Change) -> int:
        """Return the number of images that were changed in this way."""
        return int(np.count_nonzero(self.kinds & change))

    def counts(self) -> dict[str, int]:
        """Return the number of images by kind of change, of those that occurred."""
        numbers = {str(change.name).lower(): self.count(change) for change in CHANGES}
        return {name: number for name, number in numbers.items() if number}

    def refuse_few_gray_levels(self, source: Source) -> None:
        """Raise UsageError if 8 bits would keep less than a quarter of the gray levels."""
        few = few_gray_levels(self.deepest)
        if few and self.count(Change.SIXTEEN_BITS):
            most = 2 ** self.deepest.bit_length() - 1
            raise UsageError(
                f"source {source.name}: the largest value of its 16-bit images is {few}: keep 16"
                f" bits, without --dtype uint8 and with --max-value {most}"
            )

    def say(self, source: Source, order: np.ndarray, fit: Fit) -> None:
        """Print a line for each kind of change, with the images unless all were changed.

        A file is decoded before it is cut: of tiles, files are counted.
        """
        paths = source.names
        total = len(order)
        noun = "images"
        if source.paths is not None:
            paths = source.paths
            total = len({paths[row] for row in order.tolist()})
            noun = "files"
        for change, template in CHANGES.items():
            rows = order[(self.kinds & change) != 0]
            if len(rows):
                what = template.format(
                    largest=self.deepest,
                    background=fit.background,
                    frames=self.frames,
                    nodata=self.nodata,
                )
                names = [*dict.fromkeys(paths[row] for row in np.sort(rows).tolist())]
                text = f"{what}: {len(names):,} of {total:,} {noun}"
                if len(names) < total:
                    text += f": {listed_names(names)}"
                note(text)

    def say_values(self, conversion: Conversion, statistics: ChannelStatistics) -> None:
        """Print notes on the range of the values, and on what becomes 1.0."""
        if conversion.max_value is not None:
            beyond = self.beyond.note(f"--max-value {conversion.max_value:,g}")
            if beyond:
                note(beyond)
            return
        scale = scale_of(conversion.dtype, None, statistics)
        if conversion.dtype == "uint8":
            if self.brightest <= NEARLY_BLACK:
                bits, maximum = usual_maximum(self.brightest)
                note(
                    f"the largest value of all images is {int(self.brightest)} of 255, as of"
                    f" {counted(bits, 'bit')}: they look black; --max-value {maximum} makes that"
                    " 1.0"
                )
        elif conversion.dtype == "uint16":
            text = range_note(statistics, scale, "--max-value ")
            if text:
                note(text)
        elif not scale.is_full:
            low = statistics.low.min()
            high = statistics.high.max()
            note(
                f"{conversion.dtype} values from {low:,g} to {high:,g} are kept as they are: train"
                " with --normalize pack, or pack with --max-value, the value that becomes 1.0"
            )


def provenance(
    source: Source,
    config: PackConfig,
    fit: Fit,
    counts: dict[str, int],
) -> dict[str, Any]:
    """Return what the pack was made of and how, without paths or times."""
    alike = np.bincount(source.duplicate_of)
    skipped = sorted(name for name, _ in source.bad)
    split_by = "seed"
    if (source.splits > TRAIN).any():
        split_by = source.split_by
    way = "as is"
    if fit.crop:
        way = "crop"
    elif config.tiles:
        way = "tiles"
    elif requested_size(config):
        way = "stretch"
    facts: dict[str, Any] = {
        "source": source.name,
        "kind": source.kind,
        "size": f"{fit.width}x{fit.height}",
        "fit": way,
        "channels": fit.channels,
        "background": fit.background,
        "split_by": split_by,
        "split": str(config.split),
        "fold": str(config.fold or ""),
        "seed": config.seed,
        "groups": int(np.count_nonzero(np.bincount(source.groups[source.groups >= 0]))),
        "hpctrain": hpctrain.__version__,
        "pillow": PIL.__version__,
        "skipped": {
            "files": len(skipped),
            "names": skipped[:SKIPPED_NAMED],
        },
        "images": counts,
        "duplicates": {
            "groups": int((alike > 1).sum()),
            "images": int(alike[alike > 1].sum()),
            "left_out": len(source.names) - sum(counts.values()),
        },
    }
    if config.pages:
        facts["pages"] = config.pages
    if fit.axes:
        facts["axes"] = fit.axes
    if fit.white is not None:
        facts["white"] = fit.white
    if config.tiles:
        facts["tiles"] = {
            "overlap": config.overlap,
            "files": source.count_files(),
            "empty": source.empty_tiles,
        }
    return facts


def say_notes(source: Source, config: PackConfig, facts: Mapping[str, Any]) -> None:
    """Print notes for the user on files that are left out, on the splits and on equal files."""
    for text in (*source.notes, *source.split_notes):
        note(text)
    if config.tiles and source.targets.kind == "values":
        note(f"each tile has the values of its file: {listed_names(source.targets.names)}")
    if "validation" not in facts["images"] and config.split == PackConfig.split:
        note(
            f"the splits are {' and '.join(facts['images'])}; --final best and --patience need"
            " validation, too: --split 0.8,0.1,0.1"
        )
    bad = len(source.bad)
    if bad:
        files = bad + source.count_files()
        note(f"{bad:,} of {files:,} files left out, they cannot be read")
    if facts["duplicates"]["groups"]:
        say_equal_files(source, facts["duplicates"])


def say_equal_files(source: Source, equal: Mapping[str, int]) -> None:
    """Print notes on equal files, first on those of several classes."""
    groups: dict[int, list[int]] = {}
    is_equal = np.bincount(source.duplicate_of)[source.duplicate_of] > 1
    for row in np.flatnonzero(is_equal).tolist():
        groups.setdefault(int(source.duplicate_of[row]), []).append(row)
    several = [rows for rows in groups.values() if is_contradictory(source, rows)]
    if several:
        noun = "labels" if source.targets.classes else "values"
        difference = f"with other {noun}"
        if source.targets.kind == "class":
            difference = "in several classes"
        note(
            f"contradictory {noun}: {counted(len(several), 'group')} of equal files {difference}:"
            f" {name_groups(source, several)}"
        )
    noun = "files" if source.files is None else "tiles"
    note(
        f"{equal['images']:,} {noun} in {counted(equal['groups'], 'group')} are equal; left out of"
        f" earlier splits: {equal['left_out']:,}: {name_groups(source, [*groups.values()])}"
    )


def is_contradictory(source: Source, rows: list[int]) -> bool:
    """Whether the targets of these images differ in an entry that is known of both."""
    stored = source.target_rows[rows]
    values = stored.astype(np.float64)
    values[source.targets.is_unknown(stored)] = np.nan
    return bool((np.fmax.reduce(values) > np.fmin.reduce(values)).any())


def name_groups(source: Source, groups: list[list[int]]) -> str:
    """Name at most ten files of groups of rows: "a = b; c = d; and 3 more groups"."""
    texts = []
    room = MOST_NAMED
    for rows in groups:
        if room < 2:
            break
        names = [brief(source.names[row]) for row in rows[:room]]
        if len(rows) > room:
            names.append("...")
        texts.append(" = ".join(names))
        room -= len(rows)
    if len(groups) > len(texts):
        texts.append(f"and {counted(len(groups) - len(texts), 'more group')}")
    return "; ".join(texts)


def note(text: str) -> None:
    """Print a line on standard error."""
    say(text, sys.stderr)
