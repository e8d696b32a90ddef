"""What ``pack`` was asked for, checked; which images go into which split; what the pack says."""

from __future__ import annotations

import re
from fractions import Fraction
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import PIL

import hpctrain
from hpctrain.config import PackConfig
from hpctrain.data.images import Fit
from hpctrain.data.pack_format import MAX_SIDE, SPLITS
from hpctrain.data.packing import report
from hpctrain.data.packing.layout import ImageSource
from hpctrain.data.packing.split import (
    TRAIN,
    VALIDATION,
    assign,
    fold_as_given,
    merged,
    parse_fold,
    rows_by_split,
)
from hpctrain.errors import UsageError

BUILT_IN = ("flowers", "digits")
FLOWERS_SIZE = "100x100"
FEWEST = 16  # images for which a worker is started
SKIPPED_NAMED = 100  # files left out that the provenance names

Shares = tuple[Fraction, Fraction, Fraction]


class ImageSize(NamedTuple):
    """What was asked for; None where the images decide."""

    size: tuple[int, int] | None  # (width, height)
    channels: int | None
    crop: bool


def wanted_size(config: PackConfig) -> ImageSize:
    """--size (100x100 for the flowers), --channels and --crop. UsageError."""
    if config.channels not in (None, 1, 3):
        raise UsageError(f"--channels {config.channels}: 1 is gray, 3 is colour")
    text = config.size or (FLOWERS_SIZE if config.source == "flowers" else None)
    if text is None:
        if config.crop:
            raise UsageError("--crop cuts to a size: give one, as in --size 100x100")
        return ImageSize(None, config.channels, False)
    numbers = re.fullmatch(r"([0-9]{1,5})x([0-9]{1,5})", text)
    size = (int(numbers[1]), int(numbers[2])) if numbers else (0, 0)
    if not 1 <= min(size) <= max(size) <= MAX_SIDE:
        raise UsageError(
            f"--size {text}: give WIDTHxHEIGHT in pixels, 1 to {MAX_SIDE:,}, as in 100x100"
        )
    return ImageSize(size, config.channels, config.crop)


def choose_fit(source: ImageSource, wanted: ImageSize, headers: np.ndarray) -> Fit:
    """The size and channels of all rows, from the `headers` (n, 3) of as many images as needed.

    Without a size the first readable image sets it; without channels they are 3 as soon as one
    image has colour. Raises UsageError where no image can be read, or where sizes differ.
    """
    size, asked = wanted.size, wanted.size is not None
    if source.shape:
        height, width, channels = source.shape
        size = size or (width, height)
        return Fit(*size, wanted.channels or channels, wanted.crop, exact=not asked)
    size = size or _only_size(source, headers[:, :2])
    channels = wanted.channels or (3 if headers[:, 2].any() else 1)
    return Fit(*size, channels, wanted.crop, exact=not asked)


def _only_size(source: ImageSource, sizes: np.ndarray) -> tuple[int, int]:
    """Width and height of all images, from `sizes` (N, 2), 0 of unreadable ones. UsageError."""
    readable = np.flatnonzero(sizes[:, 0])
    if not len(readable):
        raise UsageError(
            f"source {source.name}: none of its {len(source.images):,} files is an image"
        )
    width, height = sizes[readable[0]].tolist()
    others = readable[(sizes[readable] != (width, height)).any(axis=1)]
    if len(others):
        one, other = source.name_of(readable[0]), source.name_of(others[0])
        raise UsageError(
            f"source {source.name}: images differ in size, {one} has {width}x{height} pixels and"
            f" {other} {'x'.join(map(str, sizes[others[0]]))}: give one with --size"
            f" {width}x{height}"
        )
    return width, height


def job_count(config: PackConfig, images: int, cores: int) -> int:
    """--jobs, by default one for each of the cores; no more than have something to do."""
    if config.jobs is not None and config.jobs < 1:
        raise UsageError(f"--jobs {config.jobs}: at least 1 process is needed")
    return max(1, min(config.jobs or cores, images // FEWEST))


def output_path(config: PackConfig) -> Path:
    """Where the pack goes, checked before any work is done."""
    assert config.source is not None
    if config.output:
        path = Path(config.output)
    elif config.source in BUILT_IN:
        path = Path(config.data_dir) / f"{config.source}.h5"
    else:
        name = Path(config.source).resolve().name
        stem = re.sub(r"(\.tar)?\.gz$|\.(tgz|tar|zip|npz|csv|parquet)$", "", name)
        path = Path(f"{stem}.h5")
    if path.is_dir():
        raise UsageError(f"--output {path} is a folder: name the file to write")
    if path.exists() and not config.overwrite:
        raise UsageError(f"{path} exists: name another --output, or replace it with --overwrite")
    if config.source in BUILT_IN and not config.output:
        path.parent.mkdir(parents=True, exist_ok=True)
    if not path.parent.is_dir():
        raise UsageError(f"--output {path}: there is no folder {path.parent}")
    return path


def check_decoded(source: ImageSource, good: int, skip_bad: bool) -> None:
    """Files that could not be read are listed, and refused unless they may be left out."""
    report.say_bad(sorted(source.bad))
    count, total = len(source.bad), len(source.bad) + good
    if count == total:
        raise UsageError(f"source {source.name}: none of its {total:,} files can be read")
    if count and not skip_bad:
        raise UsageError(
            f"{count:,} of {total:,} files cannot be read, they are listed above: repair or remove"
            " them, or leave them out with --skip-bad"
        )
    if count:
        report.say(f"{count:,} of {total:,} files left out, they cannot be read")


def assign_rows(
    source: ImageSource, good: np.ndarray, pixels: np.ndarray, config: PackConfig, shares: Shares
) -> dict[str, np.ndarray]:
    """The images (n,) of every split in their final order. good (N,): the images that can be read;
    pixels (N,): equal numbers for images of equal pixels. UsageError."""
    images = source.images[good]
    labels, given, groups = images["label"], images["split"], pixels
    by_manifest = bool((images["group"] >= 0).any())
    if by_manifest:
        groups = merged(pixels, images["group"])
    if config.fold:
        given = fold_as_given(labels, given, groups, parse_fold(config.fold), config.seed)
    splits = assign(labels, given, groups, shares, config.seed, by_manifest)
    wanted = [name for name, share in zip(SPLITS, shares, strict=True) if share]
    wanted = [] if (given > TRAIN).any() else wanted
    rows = rows_by_split(splits, labels, source.classes, wanted, config.seed)
    return {name: good[part] for name, part in rows.items()}


def say_chosen(
    source: ImageSource, good: np.ndarray, equal: list[np.ndarray], rows: dict[str, np.ndarray]
) -> None:
    """What the user should know of how the images were divided."""
    for note in source.notes:
        report.say(note)
    if (source.images["split"][good] > TRAIN).any():
        report.say(f"{source.name} says which images are for testing or validation: kept")
    labels, left_out = source.images["label"][good], len(good) - sum(map(len, rows.values()))
    named = {
        int(row): source.name_of(good[row])
        for group in equal[: report.GROUPS_SHOWN]
        for row in group
    }
    report.say_duplicates(named, labels, equal, left_out)


def provenance(
    source: ImageSource,
    good: np.ndarray,
    equal: list[np.ndarray],
    config: PackConfig,
    fit: Fit,
    rows: dict[str, np.ndarray],
) -> dict[str, Any]:
    """What the pack was made of and how, without places or times."""
    labels, given = source.images["label"][good], source.images["split"][good]
    skipped = sorted(name for name, _ in source.bad)
    facts: dict[str, Any] = {
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
        "split_by": source.split_by if (given > TRAIN).any() else "seed",
        "images": {name: len(part) for name, part in rows.items()},
        "duplicates": {
            "groups": len(equal),
            "images": sum(len(group) for group in equal),
            "across_classes": sum(len(set(labels[group].tolist())) > 1 for group in equal),
            "left_out": len(good) - sum(map(len, rows.values())),
        },
    }
    is_drawn = SPLITS[VALIDATION] in rows and not (given == VALIDATION).any()
    if (given > TRAIN).any() and is_drawn and not config.fold:
        facts["validation_drawn"] = True
    if groups := len(np.unique(source.images["group"][source.images["group"] >= 0])):
        facts["groups"] = groups
    if config.fold:
        facts["fold"] = config.fold
    return facts
