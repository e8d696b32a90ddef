"""``hpctrain pack``: make one HDF5 pack of image files.

1. List the source (``sources.py``).
2. Assign the images to splits and shuffle them, from the seed (``assign.py``). Equal files, by size
   and SHA-256, stay in one split.
3. Decode every image in a pool of worker processes on one node (``pool.py``), and write it at its
   place in a new file with a temporary name. JPEG files, whose places depend on their sizes, are
   decoded first; then they are read again and written.
4. Add checksums and attributes, and rename the file (``write.py``).

If images turn out to be unreadable and may be left out, steps 2 and 3 begin again without them.
"""

from __future__ import annotations

import faulthandler
import hashlib
import math
import os
import re
import time
from collections.abc import Callable, Iterator
from contextlib import closing, suppress
from itertools import chain, pairwise
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from hpctrain.config import PackConfig, check_settings, image_size, split_shares
from hpctrain.data.digits import generate
from hpctrain.data.draws import assign, check_splits, shuffled
from hpctrain.data.images import BadImage, Fit, as_jpeg, decode, probe
from hpctrain.data.pack import SPLITS, checksum, is_pack, read_pack
from hpctrain.data.split import find_corrupt
from hpctrain.errors import RunError, UsageError
from hpctrain.files import check_room, remove_left_behind, whole_file, write_at
from hpctrain.packing import report
from hpctrain.packing.assign import assign_rows
from hpctrain.packing.builtin import BUILT_IN, cache_path, fetch_flowers
from hpctrain.packing.pool import Run, start_workers
from hpctrain.packing.sources import FileRange, RangeReader, Source, open_source
from hpctrain.packing.write import PackWriter, channel_sums, write_pack, writing
from hpctrain.text import say

FLOWERS_SIZE = "100x100"
MIN_IMAGES_PER_JOB = 16
FIRST_IMAGES = 256  # number of headers that are read first
IMAGES_PER_TASK = 64  # that are read; fewer are decoded
TASKS_PER_WORKER, TASK_BYTES = 32, 4 << 20  # tasks that decode: at least so many, at most so large


class BadFiles(Exception):
    """Some images cannot be read: `reasons` by row. What is written of the pack is discarded."""

    def __init__(self, reasons: dict[int, str]) -> None:
        super().__init__(reasons)
        self.reasons = reasons


# Tasks of the worker processes


class Decoded(NamedTuple):
    """What is known of n decoded images."""

    crc32: np.ndarray  # (n,) uint32
    sizes: np.ndarray  # (n,) int64, bytes
    sums: np.ndarray  # (2, C) uint64: of the values of each channel and of their squares
    kept: int  # JPEG files that are stored as they are
    bad: list[tuple[int, str]]  # unreadable ones, with the reason


def read_each(ranges: list[FileRange], use: Callable[[bytes], Any], bad: Any) -> list[Any]:
    """Return the results (n,) of calling `use` with the bytes of each file, `bad` without any.

    `use` is `probe` or `sha256`.
    """
    found = [bad] * len(ranges)
    with closing(RangeReader()) as reader:
        for row, each in enumerate(ranges):
            with suppress(BadImage):
                found[row] = use(reader.read(each))
    return found


def sha256(data: bytes) -> bytes:
    """Return the SHA-256 of all bytes."""
    return hashlib.sha256(data).digest()


def read_sizes(ranges: list[FileRange]) -> list[int]:
    """Return the sizes (n,) of files in bytes, -1 for those that cannot be read."""
    found = [-1] * len(ranges)
    for row, each in enumerate(ranges):
        with suppress(OSError, ValueError):
            found[row] = os.stat(each.path).st_size
    return found


def decode_images(
    ranges: list[FileRange], labels: list[int], fit: Fit, path: str = "", offset: int = 0
) -> Decoded:
    """Decode images and write their pixels consecutively into the file `path`. Raises OSError.

    Without `path`, convert them to JPEG files and decode these as training will, to check and
    measure them.
    """
    crc32, sizes = np.zeros(len(ranges), np.uint32), np.zeros(len(ranges), np.int64)
    size, kept, bad = fit.width * fit.height * fit.channels, 0, list[tuple[int, str]]()
    pixels = memoryview(bytearray(size * len(ranges)))
    with closing(RangeReader()) as reader:
        for row, (each, label) in enumerate(zip(ranges, labels, strict=True)):
            try:
                given = reader.read(each)
                file = given if path else as_jpeg(given)
                made = decode(file, fit)
            except BadImage as error:
                bad.append((row, str(error)))
                continue
            pixels[row * size : (row + 1) * size] = made
            crc32[row], sizes[row] = checksum(made if path else file, label), len(file)
            kept += file is given
    if path:
        with open(path, "r+b", buffering=0) as output:
            write_at(output.fileno(), pixels, offset)
    return Decoded(crc32, sizes, channel_sums(pixels, fit.channels), kept, bad)


def write_files(ranges: list[FileRange], labels: list[int], path: str, offset: int) -> np.ndarray:
    """Write images as JPEG files consecutively; return their checksums (n,). Raises OSError."""
    found = np.zeros(len(ranges), np.uint32)
    with closing(RangeReader()) as reader, open(path, "r+b") as output:
        output.seek(offset)
        for row, (each, label) in enumerate(zip(ranges, labels, strict=True)):
            with suppress(BadImage):
                data = as_jpeg(reader.read(each))
                found[row] = checksum(data, label)
                output.write(data)
    return found


# The command


def main(config: PackConfig) -> int:
    """Run the subcommand: make or check a pack. Returns the exit code."""
    if config.check is not None:
        if config.source is not None:
            raise UsageError(f"--check {config.check} packs nothing: leave out {config.source}")
        return check_pack(config.check)
    faulthandler.enable(2)  # an image may crash its decoder: with --jobs 1, the stack is printed
    start = time.perf_counter()
    path = make_pack(config)
    seconds = time.perf_counter() - start
    pack = read_pack(path)
    report.print_table(pack)
    images = sum(split.samples for split in pack.splits.values())
    report.say(f"{images:,} images in {seconds:.1f} s, {images / seconds:,.0f} images/s")
    return 0


def check_pack(path: str) -> int:
    """Read all samples of a pack; name those that are corrupt, else print the pack's table.

    Returns 0, or 1 if there are corrupt samples.
    """
    pack, count = read_pack(path), 0
    for line in find_corrupt(pack):
        report.say(line)
        count += 1
    if count:
        report.say(f"{count:,} corrupt in {pack.path}: do not use it, copy or make it again")
        return 1
    report.print_table(pack)
    say("all checksums agree")
    return 0


def make_pack(config: PackConfig) -> Path:
    """Make the pack that `config` describes without printing a table, and return its path.

    Raises UsageError if the source or the settings cannot be used, RunError if the disk is full.
    After an error or an interruption, no file exists under the pack's name.
    """
    check_settings(config)
    if config.source is None:
        raise UsageError("nothing to pack: give a folder, .tgz, .zip, .csv, flowers or digits")
    output = output_path(config)
    flowers = config.source == "flowers"
    path = fetch_flowers(config.cache_dir) if flowers else Path(config.source)
    with writing(output):
        remove_left_behind(output)
        if config.source == "digits":
            pack_digits(config, output)
        else:
            pack_images(config, path, output)
    return output


def output_path(config: PackConfig) -> Path:
    """Return the path of the pack to write, checked before any work is done."""
    assert config.source is not None
    if config.output:
        path = Path(config.output)
    elif config.source in BUILT_IN:
        path = cache_path(config.cache_dir, f"{config.source}.h5")
    else:
        name = Path(config.source).resolve().name
        path = Path(re.sub(r"(\.tar)?\.gz$|\.(tgz|tar|zip|csv)$", "", name) + ".h5")
    if path.is_dir():
        raise UsageError(f"--output {path} is a folder: name the file to write")
    if path.exists() and not config.overwrite:
        raise UsageError(f"{path} exists: name another --output, or replace it with --overwrite")
    if path.exists() and not is_pack(path):
        raise UsageError(
            f"--output {path} is not a pack, or a damaged one: --overwrite does not replace it;"
            " remove it first"
        )
    if not path.parent.is_dir():
        raise UsageError(f"--output {path}: there is no folder {path.parent}")
    return path


def pack_digits(config: PackConfig, output: Path) -> None:
    """Make a pack of the generated digits; --split divides those of train and test again."""
    for name in ("size", "channels", "crop", "encoding", "manifest", "fold"):
        if getattr(config, name) != getattr(PackConfig, name):
            raise UsageError(f"--{name} does not apply to digits: they are made as they are")
    report.say(f"drawing the digits for {output} ...")
    splits, classes, provenance = generate(config.seed)
    if config.split != PackConfig.split:
        provenance["split"] = config.split
        made, shares = (splits["train"], splits["test"]), split_shares(config.split)
        images, labels = (np.concatenate(arrays) for arrays in zip(*made, strict=True))
        drawn = assign(labels, shares, config.seed)
        rows = {name: np.flatnonzero(drawn == i) for i, name in enumerate(SPLITS) if shares[i]}
        check_splits(rows, labels, classes, rows, "digits")
        rows = {name: shuffled(of, config.seed, name) for name, of in rows.items()}
        unseen = {"unseen": splits["unseen"]}
        splits = {name: (images[of], labels[of]) for name, of in rows.items()} | unseen
    write_pack(output, splits, classes, provenance, overwrite=True)


def pack_images(config: PackConfig, path: Path, output: Path) -> None:
    """Make a pack of the images at `path`."""
    with open_source(path, output.parent, config.manifest) as source:
        jobs = config.jobs or len(os.sched_getaffinity(0))
        jobs = max(1, min(jobs, len(source) // MIN_IMAGES_PER_JOB))
        with start_workers(jobs) as run:
            fit = choose_fit(config, source, run)
            find_equal_files(source, run)
            while True:
                try:
                    return write_images(config, source, fit, run, jobs, output)
                except BadFiles as found:
                    source.drop(found.reasons)
                    report.say_unreadable(source.bad[len(source.bad) - len(found.reasons) :])
                    report.check_readable(source, config.skip_bad)


def write_images(
    config: PackConfig, source: Source, fit: Fit, run: Run, jobs: int, output: Path
) -> None:
    """Assign all images to splits, decode them and write the pack.

    Raises UsageError if a split or a class has no image, and BadFiles if some cannot be read.
    """
    rows = assign_rows(source, config)
    order, ends = np.concatenate([*rows.values()]), np.cumsum([len(of) for of in rows.values()])
    labels, count, jpeg = source.labels[order], len(order), config.encoding == "jpeg"
    shape = fit.height, fit.width, fit.channels
    image_bytes = math.prod(shape)
    step = max(1, min(TASK_BYTES // image_bytes, count // (TASKS_PER_WORKER * jobs)))
    parts = [
        slice(start, min(start + step, int(end)))
        for first, end in pairwise([0, *ends])
        for start in range(first, end, step)
    ]
    crc32, sizes = np.zeros(count, np.uint32), np.full(count, image_bytes)
    sums = np.zeros((2, fit.channels), np.uint64)  # of train
    kept = 0  # JPEG files that are stored as they are

    def by_split(values: np.ndarray) -> dict[str, np.ndarray]:
        return dict(zip(rows, np.split(values, ends[:-1]), strict=True))

    def tasks(*how: Any, places: np.ndarray | None = None) -> Iterator[tuple[Any, ...]]:
        """Yield the arguments of the task of each part; `places` are those of the images."""
        for part in parts:
            where = () if places is None else (file.name, int(places[part.start]))
            yield source.ranges(order[part]), labels[part].tolist(), *how, *where

    def decode_all(places: np.ndarray | None = None) -> None:
        nonlocal kept
        given, bad = tasks(fit, places=places), dict[int, str]()
        for part, done in zip(parts, run("decoding", decode_images, given, count), strict=True):
            crc32[part], kept = done.crc32, kept + done.kept
            if jpeg:
                sizes[part] = done.sizes
            if part.start < ends[0]:  # train comes first
                np.add(sums, done.sums, out=sums)
            bad |= {int(order[part.start + row]): why for row, why in done.bad}
        if bad:
            raise BadFiles(bad)

    with whole_file(output, point="pack") as file:
        if jpeg:
            decode_all()
        check_room(output.parent, int(sizes.sum()), "packing")
        offsets = {split: np.cumsum([0, *own]) for split, own in by_split(sizes).items()}
        names = None
        if config.names:
            names = {split: [source.names[row] for row in of] for split, of in rows.items()}
        writer = PackWriter(file, by_split(labels), shape, offsets if jpeg else None, names)
        places = np.concatenate([writer.images[split] + of[:-1] for split, of in offsets.items()])
        facts, how = report.provenance(source, config, fit, rows), ""
        if jpeg:
            written = run("writing", write_files, tasks(places=places), count)
            changed = order[np.concatenate([*written]) != crc32]
            if len(changed):
                name = source.names[int(changed[0])]
                raise RunError(f"{name} was changed while it was packed: pack again")
            how = "crop" if fit.crop else "stretch"
            facts["encoding"] = {"name": "jpeg", "kept": kept, "encoded_anew": count - kept}
        else:
            decode_all(places)
        report.say_chosen(source, config, rows)
        writer.finish(by_split(crc32), sums, source.classes, facts, how)


def choose_fit(config: PackConfig, source: Source, run: Run) -> Fit:
    """Return the size and channels of the pack, reading as few headers as necessary.

    Without --size, all images must have the size of the first readable one. Without --channels,
    there are 3 channels if any image has colour. Raises UsageError if no image can be read, or if
    sizes differ.
    """
    text = config.size or (FLOWERS_SIZE if config.source == "flowers" else None)
    size, channels, count = image_size(text) if text else None, config.channels, len(source)
    if config.crop and not size:
        raise UsageError("--crop cuts to a size: give one, as in --size 100x100")
    headers = np.zeros((count, 3), np.int64)  # width, height, whether there is colour; 0 = not read
    if not (size and channels):
        for start, stop in pairwise((0, min(FIRST_IMAGES, count), count)):
            found = [*_read(source, np.arange(start, stop), run, read_each, probe, (0, 0, 0))]
            headers[start:stop] = np.reshape(found, (-1, 3))
            if size and headers[:, 2].any():
                break
    width, height = size or _only_size(source, headers[:, :2])
    channels = channels or (3 if headers[:, 2].any() else 1)
    return Fit(width, height, channels, config.crop, exact=size is None)


def _only_size(source: Source, sizes: np.ndarray) -> tuple[int, int]:
    """Return the one size of all images, given `sizes` (N, 2), 0 if unreadable.

    Raises UsageError if sizes differ or no image can be read.
    """
    readable = np.flatnonzero(sizes[:, 0])
    if not len(readable):
        raise UsageError(f"source {source.name}: none of its {len(source):,} files is an image")
    width, height = sizes[readable[0]].tolist()
    others = readable[(sizes[readable] != (width, height)).any(axis=1)]
    if len(others):
        one, other = (source.names[rows[0]] for rows in (readable, others))
        raise UsageError(
            f"source {source.name}: images differ in size, {one} has {width}x{height} pixels and"
            f" {other} {'x'.join(map(str, sizes[others[0]]))}: give one with --size,"
            f" at most {'x'.join(map(str, sizes[readable].min(axis=0)))} to enlarge none"
        )
    return width, height


def find_equal_files(source: Source, run: Run) -> None:
    """Give equal files equal numbers in `source.duplicate_of`.

    Only files of equal size are hashed (in a .zip, of equal CRC-32, too): all their bytes.
    """
    if source.kind == "folder":
        sizes = _read(source, np.arange(len(source)), run, read_sizes)
        keys = np.fromiter(sizes, np.int64, len(source))
    else:
        keys = source.places[:, 1] << 32 | source.places[:, 4]
    _, numbers, counts = np.unique(keys, return_inverse=True, return_counts=True)
    rows = np.flatnonzero((counts[numbers] > 1) & (keys >= 0))
    digests = np.fromiter(_read(source, rows, run, read_each, sha256, b""), "S32", len(rows))
    rows, digests = rows[digests != b""], digests[digests != b""]
    _, first, numbers = np.unique(digests, return_index=True, return_inverse=True)
    source.duplicate_of[rows] = rows[first][numbers]


def _read(
    source: Source, rows: np.ndarray, run: Run, function: Callable[..., list[Any]], *options: Any
) -> Iterator[Any]:
    """Yield what a function of ranges returns for these images."""
    parts = (
        rows[start : start + IMAGES_PER_TASK] for start in range(0, len(rows), IMAGES_PER_TASK)
    )
    tasks = ((source.ranges(part), *options) for part in parts)
    return chain.from_iterable(run("reading", function, tasks, len(rows)))
