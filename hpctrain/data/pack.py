"""``hpctrain pack``: image files -> one HDF5 pack.

In four passes, memory bounded by a few blocks of pixels and a few hundred bytes an image:

1. list the source (``sources.py``, ``arrays.py``);
2. decode every image, in all worker processes, into its row of a scratch file, with a digest of
   its pixels (``packing/decode_shared.py``, ``packing/worker.py``, ``images.py``);
3. cut each class into splits from the seed, equal images together, and shuffle
   (``packing/split.py``);
4. write the rows in their new order, with checksums, under a temporary name that becomes the
   pack's when all is on disk (``packing/write.py``, ``packing/fill.py``).

Needs room for the pixels twice, in the folder of the pack.

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
from fractions import Fraction
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import PIL

import hpctrain
from hpctrain.config import PackConfig
from hpctrain.data.images import Fit
from hpctrain.data.pack_format import SPLITS
from hpctrain.data.packed import gather_rows, read_pack, verify
from hpctrain.data.packing import report
from hpctrain.data.packing.decode import Decoded, joined, row_bytes, scratch_rows
from hpctrain.data.packing.decode_shared import decode_shared
from hpctrain.data.packing.fill import Fetch, Part, row_counts
from hpctrain.data.packing.layout import Source
from hpctrain.data.packing.settings import image_wish, job_count, output_path
from hpctrain.data.packing.shared import reread, shared_work
from hpctrain.data.packing.split import (
    LEFT_OUT,
    TRAIN,
    assign,
    equal_pixels,
    parse_split,
    rows_by_split,
)
from hpctrain.data.packing.team import ASK, Framed, Team
from hpctrain.data.packing.write import ALONE, write_pack, write_parts
from hpctrain.errors import RunError, UsageError

__all__ = ["check_pack", "create_pack", "main", "make_pack", "write_pack"]

SKIPPED_NAMED = 100  # files left out that the provenance names
NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


def main(config: PackConfig, team: Team = ALONE) -> int:
    """The subcommand: pack, or check a pack. Its exit code. Collective."""
    if config.check is not None:
        return team.from_root(lambda: _check(config, team.columns))
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
    print("all checksums agree")
    return 0


def create_pack(config: PackConfig, team: Team = ALONE) -> Path:
    """Make the pack that `config` asks for and print its table; its path. Collective."""
    start = time.perf_counter()
    path = make_pack(config, team)
    seconds = time.perf_counter() - start
    team.from_root(lambda: _say_made(path, seconds, team.columns))
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
    path, output = team.from_root(lambda: _places(config))
    team = Framed(team, lambda: _writing(output))
    if config.source == "digits":
        team.from_root(lambda: _pack_digits(config, output))
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
    for name in ("size", "channels", "crop"):
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


def _pack_images(config: PackConfig, path: Path, output: Path, team: Team) -> None:
    wish, shares = team.from_root(lambda: (image_wish(config), parse_split(config.split)))
    with shared_work(path, output, team) as work, ExitStack() as stack:
        jobs = team.everywhere(lambda: job_count(config, len(work.mine.items), team.cores))
        fit, decoded = decode_shared(work, wish, jobs, output, team)

        def choose() -> tuple[dict[str, tuple[np.ndarray, np.ndarray]], dict[str, Any]]:
            assert work.source
            whole = joined(work.source, fit, decoded)
            _check_decoded(work.source, whole, config.skip_bad)
            places = scratch_rows(work.counts, row_bytes(fit))
            return _chosen(work.source, whole, config, fit, shares, places)

        chosen, provenance = team.from_root(choose)
        shape = (fit.height, fit.width, fit.channels)
        store = team.everywhere(lambda: reread(work.store, team, stack))
        parts = {
            n: Part(labels, _fetch(store, rows, shape)) for n, (rows, labels) in chosen.items()
        }
        total, own = row_counts(parts, row_bytes(fit), team)
        classes = work.mine.classes
        with report.progress("writing", total, own, team) as advance:
            write_parts(output, parts, shape, classes, provenance, jobs, advance, team)


def _chosen(
    source: Source,
    decoded: Decoded,
    config: PackConfig,
    fit: Fit,
    shares: tuple[Fraction, Fraction, Fraction],
    places: np.ndarray,
) -> tuple[dict[str, tuple[np.ndarray, np.ndarray]], dict[str, Any]]:
    """Of every split the scratch rows in final order and their labels; and the provenance.
    `places`: the scratch row (N,) of every image of the source."""
    good = np.flatnonzero(decoded.good)
    items = [source.items[row] for row in good.tolist()]
    labels = np.array([item.label for item in items], np.int64)
    given = np.array(
        [SPLITS.index(item.split) if item.split else LEFT_OUT for item in items], np.int8
    )
    groups, equal = equal_pixels(decoded.digests[good])
    splits = assign(labels, given, groups, shares, config.seed)
    by_source = bool((given > TRAIN).any())
    wanted = [name for name, share in zip(SPLITS, shares, strict=True) if share and not by_source]
    rows = rows_by_split(splits, labels, source.classes, wanted, config.seed)
    left_out = int((splits == LEFT_OUT).sum())
    for note in source.notes:
        report.say(note)
    if by_source:
        report.say(f"{source.name} says which images are for testing or validation: kept")
    report.say_duplicates([item.name for item in items], labels, equal, left_out)
    facts = _provenance(source, decoded, config, fit)
    facts["split_by"] = "source" if by_source else "seed"
    facts["images"] = {name: len(part) for name, part in rows.items()}
    facts["duplicates"] = {
        "groups": len(equal),
        "images": sum(len(group) for group in equal),
        "across_classes": sum(len(set(labels[group].tolist())) > 1 for group in equal),
        "left_out": left_out,
    }
    return {name: (places[good[part]], labels[part]) for name, part in rows.items()}, facts


def _provenance(source: Source, decoded: Decoded, config: PackConfig, fit: Fit) -> dict[str, Any]:
    """What the pack was made of and how, without places or times."""
    skipped = [name for name, _ in decoded.bad]
    return {
        "source": source.name,
        "kind": source.kind,
        "size": f"{fit.width}x{fit.height}",
        "fit": "as is" if fit.exact else "crop" if fit.crop else "stretch",
        "channels": fit.channels,
        "split": config.split,
        "seed": config.seed,
        "hpctrain": hpctrain.__version__,
        "pillow": PIL.__version__,
        "skipped": {"files": len(skipped), "names": skipped[:SKIPPED_NAMED]},
    }


def _fetch(store: BinaryIO, rows: np.ndarray, shape: tuple[int, int, int]) -> Fetch:
    """Reads blocks of `rows`, in that order, from the scratch file."""

    def fetch(start: int, stop: int) -> np.ndarray:
        block = np.empty((stop - start, *shape), np.uint8)
        gather_rows("the scratch file", store.fileno(), 0, rows[start:stop], block.data.cast("B"))
        return block

    return fetch


def _check_decoded(source: Source, decoded: Decoded, skip_bad: bool) -> None:
    """Files that could not be read are listed, and refused unless they may be left out."""
    report.say_bad(decoded.bad)
    count, total = len(decoded.bad), len(decoded.bad) + int(decoded.good.sum())
    if count == total:
        raise UsageError(f"source {source.name}: none of its {total:,} files can be read")
    if count and not skip_bad:
        raise UsageError(
            f"{count:,} of {total:,} files cannot be read, they are listed above: repair or remove"
            " them, or leave them out with --skip-bad"
        )
    if count:
        report.say(f"{count:,} of {total:,} files left out, they cannot be read")


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
