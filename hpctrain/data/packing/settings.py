"""What ``pack`` was asked for, checked before any work is done."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

from hpctrain.config import PackConfig
from hpctrain.data.images import Fit
from hpctrain.data.pack_format import MAX_SIDE
from hpctrain.data.packing.decode import IMAGES_PER_TASK, Wish, row_bytes
from hpctrain.data.packing.layout import Source
from hpctrain.errors import RunError, UsageError

BUILT_IN = ("flowers", "digits")
FLOWERS_SIZE = "100x100"


def image_wish(config: PackConfig) -> Wish:
    """--size (100x100 for the flowers), --channels and --crop."""
    if config.channels not in (None, 1, 3):
        raise UsageError(f"--channels {config.channels}: 1 is gray, 3 is colour")
    text = config.size or (FLOWERS_SIZE if config.source == "flowers" else None)
    if text is None:
        if config.crop:
            raise UsageError("--crop cuts to a size: give one, as in --size 100x100")
        return Wish(None, config.channels, False)
    numbers = re.fullmatch(r"([0-9]{1,5})x([0-9]{1,5})", text)
    size = (int(numbers[1]), int(numbers[2])) if numbers else (0, 0)
    if not 1 <= min(size) <= max(size) <= MAX_SIDE:
        raise UsageError(
            f"--size {text}: give WIDTHxHEIGHT in pixels, 1 to {MAX_SIDE:,}, as in 100x100"
        )
    return Wish(size, config.channels, config.crop)


def job_count(config: PackConfig, images: int, cores: int) -> int:
    """--jobs, by default one for each of the cores; no more than have something to do."""
    if config.jobs is not None and config.jobs < 1:
        raise UsageError(f"--jobs {config.jobs}: at least 1 process is needed")
    return max(1, min(config.jobs or cores, images // IMAGES_PER_TASK))


def output_path(config: PackConfig) -> Path:
    """Where the pack goes, checked before any work is done."""
    assert config.source is not None
    if config.output:
        path = Path(config.output)
    elif config.source in BUILT_IN:
        path = Path(config.data_dir) / f"{config.source}.h5"
    else:
        stem = re.sub(r"(\.tar)?\.gz$|\.(tgz|tar|zip|npz)$", "", Path(config.source).resolve().name)
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


def check_encoding(config: PackConfig, source: Source) -> None:
    """UsageError where JPEG files are asked for and the source is arrays of pixels."""
    if config.encoding != "raw" and source.shape:
        raise UsageError(
            f"--encoding {config.encoding} is for image files; source {source.name} holds arrays of"
            " pixels"
        )


def bytes_of(source: Source, fit: Fit, encoding: str) -> int:
    """What the pack will hold: the pixels, or roughly the files (0 where their size is unknown)."""
    if encoding == "raw":
        return len(source.items) * row_bytes(fit)
    return sum(item.size for item in source.items)


def check_room(output: Path, held: int) -> None:
    """Refuse at once what cannot fit: the scratch file and the pack."""
    free = shutil.disk_usage(output.parent).free
    if 2 * held > free:
        raise RunError(
            f"{output.parent} has {free / 2**20:,.0f} MiB free, packing needs"
            f" {2 * held / 2**20:,.0f} MiB there, half of it for a time"
        )
