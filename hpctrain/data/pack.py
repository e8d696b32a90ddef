"""``hpctrain pack``: image files -> one HDF5 pack.

In four passes, memory bounded by a few blocks of pixels and a few hundred bytes an image:

1. list the source (``sources.py``, ``arrays.py``);
2. decode every image, in all worker processes, into its row of a scratch file (or append it as a
   JPEG file), with a digest of its pixels (``packing/decode.py``,
   ``packing/worker.py``, ``images.py``);
3. cut each class into splits from the seed, equal images together, and shuffle
   (``packing/choose.py``, ``packing/split.py``);
4. write the rows in their new order, with checksums, under a temporary name that becomes the
   pack's when all is on disk (``packing/write.py``).

Needs room for what the pack holds twice, in the folder of the pack.
"""

from __future__ import annotations

import errno
import os
import re
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import BinaryIO

import numpy as np

from hpctrain.config import PackConfig
from hpctrain.data.pack_format import JPEG, SPLITS
from hpctrain.data.packed import gather_rows, read_pack, verify
from hpctrain.data.packing import report
from hpctrain.data.packing.choose import check_decoded, choose
from hpctrain.data.packing.decode import (
    choose_fit,
    decode_all,
    descriptors,
    shared_counter,
)
from hpctrain.data.packing.jobs import workers
from hpctrain.data.packing.scratch import scratch_file
from hpctrain.data.packing.settings import (
    bytes_of,
    check_encoding,
    check_room,
    image_wish,
    job_count,
    output_path,
)
from hpctrain.data.packing.sources import open_source
from hpctrain.data.packing.split import (
    LEFT_OUT,
    assign,
    parse_split,
    rows_by_split,
)
from hpctrain.data.packing.write import Fetch, Part, write_pack, write_parts
from hpctrain.data.packing.write_encoded import write_encoded
from hpctrain.errors import RunError, UsageError
from hpctrain.launcher import launched_size

__all__ = ["check_pack", "create_pack", "main", "make_pack", "write_pack"]

NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


def main(config: PackConfig) -> int:
    """The subcommand: pack, or check a pack. Its exit code."""
    if config.check is not None:
        if config.source is not None:
            raise UsageError(f"--check {config.check} packs nothing: leave out {config.source}")
        return check_pack(config.check)
    create_pack(config)
    return 0


def check_pack(path: str) -> int:
    """Verify all checksums and print the pack's table. 0: as it was written, 1: damaged."""
    pack = read_pack(path)
    damage = verify(pack)
    report.print_table(pack)
    for line in damage:
        report.say(f"{pack.path}: {line}")
    if damage:
        report.say(f"{len(damage)} damaged: do not use this pack, copy or make it again")
        return 1
    print("all checksums agree")
    return 0


def create_pack(config: PackConfig) -> Path:
    """Make the pack that `config` asks for and print its table; the path of the pack.

    Refused where a launcher started several processes: all of them would do the same.
    """
    size = launched_size() or 1
    if size > 1:
        raise UsageError(
            f"pack runs as one process, but {size} were started: leave out mpirun or srun"
        )
    start = time.perf_counter()
    path = make_pack(config)
    seconds = time.perf_counter() - start
    pack = read_pack(path)
    report.print_table(pack)
    images = sum(split.rows for split in pack.splits.values())
    report.say(f"{images:,} images in {seconds:.1f} s, {images / seconds:,.0f} images/s")
    return path


def make_pack(config: PackConfig) -> Path:
    """Make the pack without a table, in whatever process this is; the path of the pack.

    Raises UsageError where the source or the settings cannot be used, RunError where the disk is
    full; then, and when interrupted, nothing is left under the pack's name.
    """
    if config.source is None:
        raise UsageError("pack what? Give a folder, .tgz, .zip, idx, .npz, flowers or digits")
    output = output_path(config)
    path = Path(config.source)
    if config.source == "flowers":
        from hpctrain.data.flowers import fetch_archive

        path = fetch_archive(config.data_dir)
    with _writing(output):
        if config.source == "digits":
            _pack_digits(config, output)
        else:
            _pack_images(config, path, output)
    return output


def _pack_digits(config: PackConfig, output: Path) -> None:
    for name in ("size", "channels", "crop", "encoding"):
        if getattr(config, name) != getattr(PackConfig, name):
            raise UsageError(f"--{name} does not apply to digits: they are made as they are")
    from hpctrain.data.digits import generate

    splits, classes, provenance = generate(config.seed)
    if config.split != PackConfig.split:
        splits = {**_cut_again(splits, classes, config), "unseen": splits["unseen"]}
        provenance["split"] = config.split
    write_pack(output, splits, classes, provenance)


def _cut_again(
    splits: dict[str, tuple[np.ndarray, np.ndarray]], classes: tuple[str, ...], config: PackConfig
) -> dict[str, tuple[np.ndarray, np.ndarray]]:
    """The digits of train and test drawn anew into the shares of --split."""
    shares = parse_split(config.split)
    made = splits["train"], splits["test"]
    images, labels = (np.concatenate(arrays) for arrays in zip(*made, strict=True))
    nothing_given = np.full(len(labels), LEFT_OUT, np.int8)
    drawn = assign(labels, nothing_given, np.arange(len(labels)), shares, config.seed)
    wanted = [name for name, share in zip(SPLITS, shares, strict=True) if share]
    rows = rows_by_split(drawn, labels, classes, wanted, config.seed)
    return {name: (images[of], labels[of]) for name, of in rows.items()}


def _pack_images(config: PackConfig, path: Path, output: Path) -> None:
    wish = image_wish(config)
    shares = parse_split(config.split)
    counting = shared_counter() if config.encoding == JPEG else nullcontext()
    with (
        open_source(path, output.parent) as source,
        scratch_file(output.parent) as store,
        counting as counter,
    ):
        check_encoding(config, source)
        jobs = job_count(config, len(source.items))
        with workers(jobs, descriptors(source, store, counter)) as run:
            fit = choose_fit(source, wish, run)
            check_room(output, bytes_of(source, fit, config.encoding))
            with report.progress("decoding", len(source.items)) as advance:
                decoded = decode_all(source, fit, store, run, advance, counter)
        check_decoded(source, decoded, config.skip_bad)
        chosen, provenance = choose(source, decoded, config, fit, shares)
        shape, facts = (fit.height, fit.width, fit.channels), (source.classes, provenance)
        total = sum(len(labels) for _, labels in chosen.values())
        with report.progress("writing", total) as advance:
            if counter:
                write_encoded(
                    output, chosen, store, decoded.files, fit, *facts, jobs=jobs, advance=advance
                )
            else:
                parts = {
                    name: Part(labels, _fetch(store, rows, shape))
                    for name, (rows, labels) in chosen.items()
                }
                write_parts(output, parts, shape, *facts, jobs=jobs, advance=advance)


def _fetch(store: BinaryIO, rows: np.ndarray, shape: tuple[int, int, int]) -> Fetch:
    """Reads blocks of `rows`, in that order, from the scratch file."""

    def fetch(start: int, stop: int) -> np.ndarray:
        block = np.empty((stop - start, *shape), np.uint8)
        gather_rows("the scratch file", store.fileno(), 0, rows[start:stop], block.data.cast("B"))
        return block

    return fetch


@contextmanager
def _writing(output: Path) -> Iterator[None]:
    """What the system says while the pack is written -> one line."""
    try:
        yield
    except (OSError, RuntimeError) as error:
        # HDF5 puts the system's number into its text; closing a file raises RuntimeError
        inner = re.search(r"errno = (\d+)", str(error))
        number = int(inner[1]) if inner else getattr(error, "errno", None)
        if number is None:
            raise
        if number in NO_ROOM:
            raise RunError(
                f"no room left in {output.parent} for {output.name}: nothing kept"
            ) from None
        if number in (errno.EACCES, errno.EPERM, errno.EROFS):
            raise UsageError(f"{output} cannot be written: {os.strerror(number)}") from None
        raise RunError(f"writing {output} failed: {os.strerror(number)}") from None
