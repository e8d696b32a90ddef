"""Make packs of the generated sets, the digits (``digits.py``) and the shapes (``shapes.py``)."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np

from hpctrain.config import PackConfig
from hpctrain.config.option import flag_of
from hpctrain.data.orders import shuffled
from hpctrain.data.pack import SPLITS
from hpctrain.data.strata import ByClass, assign
from hpctrain.errors import UsageError
from hpctrain.packing import digits, shapes
from hpctrain.packing.arrays import write_pack
from hpctrain.text import say

NOT_OF_GENERATED = (
    *("size", "crop", "tiles", "channels", "pages", "dtype", "max_value", "nodata"),
    *("background", "encoding", "manifest", "targets", "fold"),
)


def pack_generated(config: PackConfig, output: Path) -> None:
    """Make a pack of a generated set. Raises UsageError for options that do not apply to it."""
    refused = [*NOT_OF_GENERATED]
    if config.source == "digits":
        refused.append("task")
    for name in refused:
        if getattr(config, name) != getattr(PackConfig, name):
            raise UsageError(
                f"{flag_of(name)} does not apply to {config.source}: they are made as they are"
            )
    say(f"drawing the {config.source} for {output} ...", sys.stderr)
    if config.source == "digits":
        pack_digits(config, output)
    else:
        pack_shapes(config, output)


def pack_digits(config: PackConfig, output: Path) -> None:
    """Make a pack of the digits; --split divides those of train and test again."""
    splits, classes, provenance = digits.generate(config.seed)
    if config.split != PackConfig.split:
        provenance["split"] = str(config.split)
        train_images, train_labels = splits.pop("train")
        test_images, test_labels = splits.pop("test")
        images = np.concatenate([train_images, test_images])
        labels = np.concatenate([train_labels, test_labels])
        numbers = assign(ByClass(labels, len(classes)), config.split, config.seed)
        for number in np.unique(numbers).tolist():
            name = SPLITS[number]
            rows = shuffled(np.flatnonzero(numbers == number), config.seed, "pack order", name)
            splits[name] = (images[rows], labels[rows])
    write_pack(output, splits, classes, provenance, overwrite=True)


def pack_shapes(config: PackConfig, output: Path) -> None:
    """Make a pack of the shapes, with what --task learns; --split divides them otherwise."""
    task = config.task or "classify"
    shares = shapes.SHARES
    provenance = {"source": shapes.SOURCE, "task": task, "seed": config.seed}
    if config.split != PackConfig.split:
        shares = config.split
        provenance["split"] = str(config.split)
    write_pack(
        output,
        shapes.generate(task, config.seed, shares),
        shapes.KINDS if task != "regress" else None,
        provenance,
        overwrite=True,
        columns=shapes.COUNTS if task == "regress" else None,
        layout="NHWC",
    )
