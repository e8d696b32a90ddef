"""``hpctrain pack``: image files -> one HDF5 pack.

In four passes, memory bounded by a few blocks of pixels and a few hundred bytes an image:

1. list the source (``sources.py``, ``arrays.py``, ``npz.py``);
2. decode every image, in all worker processes, into its row of a scratch file (or append it as a
   JPEG file), with a digest of its pixels (``packing/decode_shared.py``, ``packing/worker.py``,
   ``images.py``);
3. cut each class into splits from the seed, equal images together, and shuffle
   (``packing/choose.py``, ``packing/split.py``);
4. write the rows in their new order, with checksums, under a temporary name that becomes the
   pack's when all is on disk (``packing/columns.py``, ``packing/write.py``, ``packing/fill.py``).

Needs room for what the pack holds twice, in the folder of the pack.

Several processes (a ``Team``, ``packing/team.py``) share passes 2 and 4 and give the same bytes as
one; the root alone lists, draws the splits and talks.
"""

from __future__ import annotations

import errno
import os
import re
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import numpy as np

from hpctrain.config import PackConfig
from hpctrain.data.pack_format import SPLITS
from hpctrain.data.packed import read_pack, verify
from hpctrain.data.packing import report
from hpctrain.data.packing.choose import check_decoded, choose
from hpctrain.data.packing.columns import Placed, image_counts, stored_columns
from hpctrain.data.packing.decode import joined
from hpctrain.data.packing.decode_shared import decode_shared
from hpctrain.data.packing.settings import check_encoding, image_wish, job_count, output_path
from hpctrain.data.packing.shared import reread, shared_work
from hpctrain.data.packing.split import LEFT_OUT, assign, parse_split, rows_by_split
from hpctrain.data.packing.team import ASK, Framed, Team
from hpctrain.data.packing.write import ALONE, Content, write_columns, write_pack
from hpctrain.errors import RunError, UsageError
from hpctrain.text import say

__all__ = ["check_pack", "create_pack", "main", "make_pack", "write_pack"]

NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


def main(config: PackConfig, team: Team = ALONE) -> int:
    """The subcommand: pack, or check a pack. Its exit code. Collective."""
    if config.check is not None:
        return team.call_on_root(lambda: _check(config, team.columns))
    create_pack(config, team)
    return 0


def _check(config: PackConfig, columns: int | None) -> int:
    if config.source is not None:
        raise UsageError(f"--check {config.check} packs nothing: leave out {config.source}")
    return check_pack(str(config.check), columns)


def check_pack(path: str, columns: int | None = ASK) -> int:
    """Verify all checksums and print the pack's table. 0: as it was written, 1: damaged."""
    pack = read_pack(path)
    damage = verify(pack)
    report.print_table(pack, columns)
    for line in damage:
        report.say(f"{pack.path}: {line}")
    if damage:
        report.say(f"{len(damage)} damaged: do not use this pack, copy or make it again")
        return 1
    say("all checksums agree")
    return 0


def create_pack(config: PackConfig, team: Team = ALONE) -> Path:
    """Make the pack that `config` asks for and print its table; its path. Collective."""
    start = time.perf_counter()
    path = make_pack(config, team)
    seconds = time.perf_counter() - start
    team.call_on_root(lambda: _say_made(path, seconds, team.columns))
    return path


def _say_made(path: Path, seconds: float, columns: int | None) -> None:
    pack = read_pack(path)
    report.print_table(pack, columns)
    images = sum(split.rows for split in pack.splits.values())
    report.say(f"{images:,} images in {seconds:.1f} s, {images / seconds:,.0f} images/s")


def make_pack(config: PackConfig, team: Team = ALONE) -> Path:
    """Make the pack without a table, in whatever process this is; the path of the pack.

    Raises UsageError where the source or the settings cannot be used, RunError where the disk is
    full; then, and when interrupted, nothing is left under the pack's name. Collective.
    """
    path, output = team.call_on_root(lambda: _places(config))
    team = Framed(team, lambda: _writing(output))
    if config.source == "digits":
        team.call_on_root(lambda: _pack_digits(config, output))
    else:
        _pack_images(config, path, output, team)
    return output


def _places(config: PackConfig) -> tuple[Path, Path]:
    """Where the source is, fetched if need be, and where the pack goes."""
    if config.source is None:
        raise UsageError("pack what? Give a folder, .tgz, .zip, idx, .npz, flowers or digits")
    output = output_path(config)
    if config.source != "flowers":
        return Path(config.source), output
    from hpctrain.data.flowers import fetch_archive

    return fetch_archive(config.data_dir), output


def _pack_digits(config: PackConfig, output: Path) -> None:
    for name in ("size", "channels", "crop", "encoding"):
        if getattr(config, name) != getattr(PackConfig, name):
            raise UsageError(f"--{name} does not apply to digits: they are made as they are")
    from hpctrain.data.digits import generate

    report.say(f"drawing the digits for {output} ...")
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


def _pack_images(config: PackConfig, path: Path, output: Path, team: Team) -> None:
    wish, shares = team.call_on_root(lambda: (image_wish(config), parse_split(config.split)))
    with shared_work(path, output, team) as work, ExitStack() as stack:
        team.call_on_all(lambda: check_encoding(config, work.mine))
        jobs = team.call_on_all(lambda: job_count(config, len(work.mine.items), team.cores))
        fit, decoded = decode_shared(work, wish, config.encoding, jobs, output, team)

        def choose_rows() -> tuple[dict[str, Placed], Content]:
            assert work.source
            whole = joined(work.source, fit, decoded)
            check_decoded(work.source, whole, config.skip_bad)
            return choose(work.source, whole, config, fit, shares, work.counts)

        chosen, content = team.call_on_root(choose_rows)
        store = team.call_on_all(lambda: reread(work.store, team, stack))
        columns = stored_columns(chosen, content.image_shape, store)
        with report.progress("writing", *image_counts(columns, team), team) as advance:
            write_columns(output, columns, content, jobs, advance, team)


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
