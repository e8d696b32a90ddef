"""``hpctrain pack``: make one HDF5 pack of image files.

Memory is bounded by a few blocks of pixels and a few hundred bytes per image. The steps are:

1. list the source (``packing/sources.py``, ``manifest.py``);
2. assign the images to splits and shuffle them, from the seed (``split.py``);
3. decode every image into its row of a new file with a temporary name, and compute a digest of its
   pixels (``make.py``, ``decode.py``);
4. add checksums and attributes, and rename the file (``write.py``).

Images are decoded by a pool of worker processes (``workers.py``) on one node.
"""

from __future__ import annotations

import faulthandler
import re
import time
from pathlib import Path

import numpy as np

from hpctrain.config import PackConfig, check_settings, split_shares
from hpctrain.data.builtin import BUILT_IN, generate
from hpctrain.data.pack_format import SPLITS
from hpctrain.data.packed import read_pack, verify
from hpctrain.data.packing import report
from hpctrain.data.packing.arrays import write_pack
from hpctrain.data.packing.make import pack_images
from hpctrain.data.packing.sources import HDF5
from hpctrain.data.packing.split import assign, rows_by_split
from hpctrain.data.packing.write import writing
from hpctrain.errors import UsageError
from hpctrain.files import remove_left_behind
from hpctrain.text import say

__all__ = ["check_pack", "create_pack", "main", "make_pack", "write_pack"]


def main(config: PackConfig) -> int:
    """Run the subcommand: make or check a pack. Returns the exit code."""
    if config.check is not None:
        if config.source is not None:
            raise UsageError(f"--check {config.check} packs nothing: leave out {config.source}")
        return check_pack(config.check)
    faulthandler.enable(2)  # an image may crash its decoder: with --jobs 1, the stack is printed
    create_pack(config)
    return 0


def check_pack(path: str) -> int:
    """Verify all checksums and print the pack's table. Returns 0, or 1 if the pack is corrupt."""
    pack = read_pack(path)
    corrupt = verify(pack)
    report.print_table(pack)
    for line in corrupt:
        report.say(f"{pack.path}: {line}")
    if corrupt:
        report.say(f"{len(corrupt)} corrupt: do not use this pack, copy or make it again")
        return 1
    say("all checksums agree")
    return 0


def create_pack(config: PackConfig) -> Path:
    """Make the pack that `config` describes, print its table and return its path."""
    start = time.perf_counter()
    path = make_pack(config)
    seconds = time.perf_counter() - start
    pack = read_pack(path)
    report.print_table(pack)
    images = sum(split.samples for split in pack.splits.values())
    report.say(f"{images:,} images in {seconds:.1f} s, {images / seconds:,.0f} images/s")
    return path


def make_pack(config: PackConfig) -> Path:
    """Make the pack without printing a table, and return its path.

    Raises UsageError if the source or the settings cannot be used, RunError if the disk is full.
    After an error or an interruption, no file exists under the pack's name.
    """
    check_settings(config)
    if config.source is None:
        raise UsageError("pack what? Give a folder, .tgz, .zip, .csv, flowers or digits")
    output = output_path(config)
    path = Path(config.source)
    if config.source == "flowers":
        from hpctrain.data.flowers import fetch_archive

        path = fetch_archive(config.cache_dir)
    with writing(output):
        remove_left_behind(output)
        if config.source == "digits":
            _pack_digits(config, output)
        else:
            pack_images(config, path, output)
    return output


def output_path(config: PackConfig) -> Path:
    """Return the path of the pack to write, checked before any work is done."""
    assert config.source is not None
    if config.output:
        path = Path(config.output)
    elif config.source in BUILT_IN:
        path = Path(config.cache_dir) / f"{config.source}.h5"
    else:
        name = Path(config.source).resolve().name
        stem = re.sub(r"(\.tar)?\.gz$|\.(tgz|tar|zip|csv)$", "", name)
        path = Path(f"{stem}.h5")
    if path.is_dir():
        raise UsageError(f"--output {path} is a folder: name the file to write")
    if path.exists() and not config.overwrite:
        raise UsageError(f"{path} exists: name another --output, or replace it with --overwrite")
    if path.exists() and not looks_like_pack(path):
        raise UsageError(f"--output {path} is no pack: --overwrite replaces nothing else")
    if config.source in BUILT_IN and not config.output:
        path.parent.mkdir(parents=True, exist_ok=True)
    if not path.parent.is_dir():
        raise UsageError(f"--output {path}: there is no folder {path.parent}")
    return path


def looks_like_pack(path: Path) -> bool:
    """Whether this is a regular file that begins as HDF5 files do, perhaps damaged, or is empty."""
    if not path.is_file():  # a device or a pipe
        return False
    try:
        with open(path, "rb") as file:
            return file.read(len(HDF5)) in (HDF5, b"")
    except OSError:
        return False


def _pack_digits(config: PackConfig, output: Path) -> None:
    for name in ("size", "channels", "crop", "encoding", "manifest", "fold"):
        if getattr(config, name) != getattr(PackConfig, name):
            flag = name.replace("_", "-")
            raise UsageError(f"--{flag} does not apply to digits: they are made as they are")
    report.say(f"drawing the digits for {output} ...")
    splits, classes, provenance = generate(config.seed)
    if config.split != PackConfig.split:
        splits = {**_cut_again(splits, classes, config), "unseen": splits["unseen"]}
        provenance["split"] = config.split
    write_pack(output, splits, classes, provenance, overwrite=True)


def _cut_again(
    splits: dict[str, tuple[np.ndarray, np.ndarray]], classes: tuple[str, ...], config: PackConfig
) -> dict[str, tuple[np.ndarray, np.ndarray]]:
    """Divide the digits of train and test again, by the shares of --split."""
    shares = split_shares(config.split)
    made = splits["train"], splits["test"]
    images, labels = (np.concatenate(arrays) for arrays in zip(*made, strict=True))
    drawn = assign(labels, shares, config.seed)
    wanted = [name for name, share in zip(SPLITS, shares, strict=True) if share]
    rows = rows_by_split(drawn, labels, classes, wanted, config.seed)
    return {name: (images[of], labels[of]) for name, of in rows.items()}
