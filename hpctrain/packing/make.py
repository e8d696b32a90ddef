"""``hpctrain pack``: make one HDF5 pack of image files.

1. List the source (``sources.py``).
2. Assign the images to splits and shuffle them, from the seed (``assign.py``). Equal files, by size
   and SHA-256, stay in one split.
3. Decode every image in worker processes on one node (``workers.py``), and write it at its place in
   a new file with a temporary name. JPEG files, whose places depend on their sizes, are decoded
   first; then they are read again and written.
4. Add checksums and attributes, and rename the file (``write.py``).

If images turn out to be unreadable and may be left out, steps 2 and 3 begin again without them.
The table of the pack is printed on standard output, everything else on standard error.
"""

from __future__ import annotations

import faulthandler
import math
import os
import re
import sys
import time
from collections.abc import Callable, Generator, Iterator, Mapping
from contextlib import closing
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any

import numpy as np
import PIL
from rich.table import Column, Table

import hpctrain
from hpctrain.config import PackConfig, check_settings, image_size, split_shares
from hpctrain.data.digits import generate
from hpctrain.data.draws import assign, check_splits, shuffled
from hpctrain.data.images import Fit, probe
from hpctrain.data.pack import SPLITS, Pack, is_pack, read_pack
from hpctrain.data.split import Split, find_corrupt
from hpctrain.errors import RunError, UsageError
from hpctrain.files import check_room, remove_left_behind, whole_file
from hpctrain.packing import workers
from hpctrain.packing.assign import TRAIN, assign_rows
from hpctrain.packing.builtin import BUILT_IN, cache_path, fetch_flowers
from hpctrain.packing.sources import Source, open_source
from hpctrain.packing.workers import Run
from hpctrain.packing.write import PackWriter, write_pack, writing
from hpctrain.report.console import make_console
from hpctrain.text import counted, say

ARCHIVE = r"(\.tar)?\.gz$|\.(tgz|tar|zip|csv)$"
FLOWERS_SIZE = "100x100"
MIN_IMAGES_PER_JOB = 16
IMAGES_PER_TASK = 64  # that are read; fewer are decoded
TASKS_PER_WORKER, TASK_BYTES = 32, 4 << 20  # tasks that decode: at least so many, at most so large
CLASSES_SHOWN, GROUPS_SHOWN = 40, 10
SKIPPED_NAMED = 100  # most names of skipped files in the provenance
PRINTED = ("source", "split_by", "split", "fold", "seed", "groups", "hpctrain")  # of the provenance


class BadFiles(Exception):
    """Some images cannot be read: the reasons by row. What is written of the pack is discarded."""


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
    print_table(pack)
    images = sum(split.samples for split in pack.splits.values())
    note(f"{images:,} images in {seconds:.1f} s, {images / seconds:,.0f} images/s")
    return 0


def check_pack(path: str) -> int:
    """Read all samples of a pack; name those that are corrupt, else print the pack's table.

    Returns 0, or 1 if there are corrupt samples.
    """
    pack, count = read_pack(path), 0
    for line in find_corrupt(pack):
        note(line)
        count += 1
    if count:
        note(f"{count:,} corrupt in {path}: do not use it, copy or make it again")
        return 1
    print_table(pack)
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
    output = output_path(config, config.source)
    with writing(output):
        remove_left_behind(output)
        if config.source == "digits":
            pack_digits(config, output)
        elif config.source == "flowers":
            pack_images(config, fetch_flowers(config.cache_dir), output)
        else:
            pack_images(config, Path(config.source), output)
    return output


def output_path(config: PackConfig, source: str) -> Path:
    """Return the path of the pack to write, checked before any work is done."""
    path = Path(config.output or re.sub(ARCHIVE, "", Path(source).resolve().name) + ".h5")
    if source in BUILT_IN and not config.output:
        path = cache_path(config.cache_dir, f"{source}.h5")
    if path.is_dir():
        raise UsageError(f"--output {path} is a folder: name the file to write")
    if path.exists() and not config.overwrite:
        raise UsageError(f"{path} exists: name another --output, or replace it with --overwrite")
    if path.exists() and not is_pack(path):
        raise UsageError(f"--output {path} is not a pack: --overwrite does not replace it")
    if not path.parent.is_dir():
        raise UsageError(f"--output {path}: there is no folder {path.parent}")
    return path


def pack_digits(config: PackConfig, output: Path) -> None:
    """Make a pack of the generated digits; --split divides those of train and test again."""
    for name in ("size", "channels", "crop", "encoding", "manifest", "fold"):
        if getattr(config, name) != getattr(PackConfig, name):
            raise UsageError(f"--{name} does not apply to digits: they are made as they are")
    note(f"drawing the digits for {output} ...")
    splits, classes, provenance = generate(config.seed)
    if config.split != PackConfig.split:
        provenance["split"] = config.split
        made, shares = (splits["train"], splits["test"]), split_shares(config.split)
        images, labels = (np.concatenate(arrays) for arrays in zip(*made, strict=True))
        drawn = assign(labels, shares, config.seed)
        rows = {name: np.flatnonzero(drawn == i) for i, name in enumerate(SPLITS) if shares[i]}
        check_splits(rows, labels, classes, rows, "digits")
        rows = {name: shuffled(of, config.seed, "pack order", name) for name, of in rows.items()}
        unseen = {"unseen": splits["unseen"]}
        splits = {name: (images[of], labels[of]) for name, of in rows.items()} | unseen
    write_pack(output, splits, classes, provenance, overwrite=True)


def pack_images(config: PackConfig, path: Path, output: Path) -> None:
    """Make a pack of the images at `path`."""
    with open_source(path, output.parent, config.manifest) as source:
        total = len(source.names)
        jobs = config.jobs or len(os.sched_getaffinity(0))
        jobs = max(1, min(jobs, total // MIN_IMAGES_PER_JOB))
        with workers.start_workers(jobs) as run:
            fit = choose_fit(config, source, run)
            find_equal_files(source, run)
            while True:
                try:
                    return write_images(config, source, fit, run, jobs, output)
                except BadFiles as found:
                    reasons = found.args[0]
                source.drop(reasons)
                for name, why in source.bad[-len(reasons) :]:
                    note(f"unreadable: {name}: {why}")
                if not source.names:
                    raise UsageError(f"source {path}: none of its {total:,} files is an image")
                if not config.skip_bad:
                    raise UsageError(
                        f"{len(source.bad):,} of {total:,} files cannot be read, they are listed"
                        " above: repair or remove them, or leave them out with --skip-bad"
                    )


def choose_fit(config: PackConfig, source: Source, run: Run) -> Fit:
    """Return the size and channels of the pack, reading as few headers as necessary.

    Without --size, all images must have the size of the first readable one. Without --channels,
    there are 3 channels if any image has colour. Raises UsageError if no image can be read, or if
    sizes differ.
    """
    text = config.size or (FLOWERS_SIZE if config.source == "flowers" else None)
    size, channels = image_size(text) if text else None, config.channels
    exact, first, colour = not size, "", False
    if config.crop and exact:
        raise UsageError("--crop cuts to a size: give one, as in --size 100x100")
    if exact or not channels:
        rows = np.arange(len(source.names))
        with closing(_read(source, rows, run, workers.read_each, probe, None)) as headers:
            for name, header in zip(source.names, headers, strict=True):
                if header is None:  # found again when it is decoded
                    continue
                width, height, has_colour = header
                if not size:
                    size, first = (width, height), name
                if exact and (width, height) != size:
                    raise UsageError(
                        f"source {source.name}: images differ in size, {first} has"
                        f" {size[0]}x{size[1]} pixels, {name} {width}x{height}: give one by --size"
                    )
                colour = colour or has_colour
                if colour and not exact:
                    break
    if not size:
        raise UsageError(f"source {source.name}: none of its {len(rows):,} files is an image")
    return Fit(*size, channels or (3 if colour else 1), config.crop, exact)


def find_equal_files(source: Source, run: Run) -> None:
    """Give equal files equal numbers in `source.duplicate_of`.

    Only files of equal size are hashed (in a .zip, of equal CRC-32): all their bytes.
    """
    rows = source.duplicate_of = np.arange(len(source.names))
    if source.kind == "folder":
        keys = np.fromiter(_read(source, rows, run, workers.read_sizes), np.int64, len(rows))
    else:
        keys = source.places[:, 3 if source.kind == "zip" else 2]  # CRC-32, else size
    _, numbers, counts = np.unique(keys, return_inverse=True, return_counts=True)
    rows = np.flatnonzero((counts[numbers] > 1) & (keys >= 0))
    found = _read(source, rows, run, workers.read_each, workers.sha256, b"")
    digests = np.fromiter(found, "S32", len(rows))
    rows, digests = rows[digests != b""], digests[digests != b""]
    _, first, numbers = np.unique(digests, return_index=True, return_inverse=True)
    source.duplicate_of[rows] = rows[first][numbers]


def _read(
    source: Source, rows: np.ndarray, run: Run, function: Callable[..., list[Any]], *options: Any
) -> Generator[Any]:
    """Yield what a function of slices returns for these images."""
    starts = range(0, len(rows), IMAGES_PER_TASK)
    tasks = ((source.slices(rows[at : at + IMAGES_PER_TASK]), *options) for at in starts)
    for found in run("reading", function, tasks, len(rows)):
        yield from found


def write_images(
    config: PackConfig, source: Source, fit: Fit, run: Run, jobs: int, output: Path
) -> None:
    """Assign all images to splits, decode them and write the pack.

    Raises UsageError if a split or a class has no image, and BadFiles if some cannot be read.
    """
    rows = assign_rows(source, config)
    order, counts = np.concatenate([*rows.values()]), {name: len(of) for name, of in rows.items()}
    labels, count, jpeg = source.labels[order], len(order), config.encoding == "jpeg"
    shape = fit.height, fit.width, fit.channels
    step = max(1, min(TASK_BYTES // math.prod(shape), count // (TASKS_PER_WORKER * jobs)))
    parts = [
        slice(start, min(start + step, end))
        for first, end in pairwise(accumulate(counts.values(), initial=0))
        for start in range(first, end, step)
    ]
    crc32, sizes = np.zeros(count, np.uint32), np.zeros(count, np.int64)
    sums = np.zeros((2, fit.channels), np.uint64)  # of train
    kept, bad = 0, dict[int, str]()

    def tasks(*how: Any, places: np.ndarray | None = None) -> Iterator[tuple[Any, ...]]:
        """Yield the arguments of the task of each part; it is written at the first of `places`."""
        for part in parts:
            where = () if places is None else (file.name, int(places[part.start]))
            yield source.slices(order[part]), labels[part].tolist(), *how, *where

    def make_writer(sizes: np.ndarray | None = None) -> PackWriter:
        needed = count * math.prod(shape) if sizes is None else int(sizes.sum())
        check_room(output.parent, needed, "packing")
        names = [source.names[row] for row in order] if config.names else None
        return PackWriter(file, counts, labels, shape, sizes, names)

    with whole_file(output, point="pack") as file:
        writer = None if jpeg else make_writer()
        given = tasks(fit, places=writer.places if writer else None)
        decoded = run("decoding", workers.decode_images, given, count)
        for part, done in zip(parts, decoded, strict=True):
            crc32[part], sizes[part], kept = done.crc32, done.sizes, kept + done.kept
            if part.start < counts["train"]:  # which comes first
                sums += done.sums
            bad |= {int(order[part.start + row]): why for row, why in done.bad}
        if bad:
            raise BadFiles(bad)
        facts, how = provenance(source, config, fit, counts), ""
        if writer is None:
            writer, how = make_writer(sizes), "crop" if fit.crop else "stretch"
            written = run("writing", workers.write_files, tasks(places=writer.places), count)
            changed = order[np.concatenate([*written]) != crc32]
            if len(changed):
                name = source.names[changed[0]]
                raise RunError(f"{name} was changed while it was packed: pack again")
            facts["encoding"] = {"name": "jpeg", "kept": kept, "encoded_anew": count - kept}
        say_chosen(source, config, facts)
        writer.finish(crc32, sums, source.classes, facts, how)


def provenance(
    source: Source, config: PackConfig, fit: Fit, counts: dict[str, int]
) -> dict[str, Any]:
    """Return what the pack was made of and how, without paths or times."""
    alike, skipped = np.bincount(source.duplicate_of), sorted(name for name, _ in source.bad)
    return {
        "source": source.name,
        "kind": source.kind,
        "size": f"{fit.width}x{fit.height}",
        "fit": "as is" if fit.exact else "crop" if fit.crop else "stretch",
        "channels": fit.channels,
        "split_by": source.split_by if (source.splits > TRAIN).any() else "seed",
        "split": config.split,
        "fold": config.fold or "",
        "seed": config.seed,
        "groups": len(np.unique(source.groups[source.groups >= 0])),
        "hpctrain": hpctrain.__version__,
        "pillow": PIL.__version__,
        "skipped": {"files": len(skipped), "names": skipped[:SKIPPED_NAMED]},
        "images": counts,
        "duplicates": {
            "groups": int((alike > 1).sum()),
            "images": int(alike[alike > 1].sum()),
            "left_out": len(source.names) - sum(counts.values()),
        },
    }


def say_chosen(source: Source, config: PackConfig, facts: Mapping[str, Any]) -> None:
    """Print notes for the user on what is packed, and how it was divided into splits."""
    if source.ignored:
        note(f"{source.ignored:,} image files outside the class folders were ignored")
    if bad := len(source.bad):
        note(f"{bad:,} of {bad + len(source.names):,} files left out, they cannot be read")
    if facts["split_by"] != "seed":
        note(f"{source.name} says which images are for testing or validation: kept")
    if "validation" not in facts["images"] and config.split == PackConfig.split:
        note(
            f"splits are {' and '.join(facts['images'])}: --final best and --patience need"
            " validation, too, as drawn by --split 0.8,0.1,0.1"
        )
    for number in np.flatnonzero(np.bincount(source.duplicate_of) > 1)[:GROUPS_SHOWN]:
        rows = np.flatnonzero(source.duplicate_of == number)
        classes = " (in different classes)" if len({*source.labels[rows]}) > 1 else ""
        note(f"equal files{classes}: {' = '.join(source.names[row] for row in rows)}")
    if (equal := facts["duplicates"])["groups"]:
        less = f"; {equal['left_out']:,} of earlier splits are left out" * (equal["left_out"] > 0)
        files = f"{equal['images']:,} files in {equal['groups']:,} groups"
        note(f"{files} are equal: each group is in one split{less}")


def note(text: str) -> None:
    """Print a line on standard error."""
    say(text, sys.stderr)


def print_table(pack: Pack) -> None:
    """Print the number of images by class and split, and the properties of the pack."""
    counts: dict[str, np.ndarray] = {}
    for name in pack.splits:
        with Split(pack, name, threads=1) as split:
            counts[name] = split.count_classes()
    columns = np.array([*counts.values(), sum(counts.values())])
    lines = [*zip(pack.classes, columns.T, strict=True), ("total", columns.sum(axis=1))]
    table = Table("class", *(Column(name, justify="right") for name in [*counts, "all"]))
    table.title = pack.path
    for name, line in lines if len(lines) <= CLASSES_SHOWN else lines[-1:]:
        table.add_row(name, *(f"{count:,}" for count in line))
    make_console().print(table)
    height, width, channels = pack.image_shape
    how = {"": "", "stretch": ", stretched from JPEG files", "crop": ", cut from JPEG files"}
    made = [f"{key} {pack.provenance[key]}" for key in PRINTED if pack.provenance.get(key)]
    say(f"images  {width} x {height} pixels, {counted(channels, 'channel')}{how[pack.fit]}")
    say(f"classes {len(pack.classes):,}")
    say(f"file    {pack.sizes[pack.path] / 2**20:,.1f} MiB, {pack.uuid}")
    say(f"made    {', '.join(made)}")
