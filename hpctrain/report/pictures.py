"""Pictures of images, as PNG."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import numpy as np
from PIL import Image, ImageDraw, ImageFont

from hpctrain.errors import RunError
from hpctrain.files import whole_file

SIDE = 84  # pixels, about, of the shorter side: images are enlarged by a whole number
GAP = 4


def write_rows(path: Path, rows: Mapping[str, np.ndarray]) -> None:
    """One row of images for each name, (n, H, W, C) in [0, 1]; the name stands before it.

    RunError if the disk does not take it.
    """
    some = next(iter(rows.values()))
    height, width = some.shape[1:3]
    scale = max(1, SIDE // min(height, width))
    high, wide = scale * height + GAP, scale * width + GAP
    font = ImageFont.load_default(size=16)
    margin = 2 * GAP + round(max(font.getlength(name) for name in rows))
    sheet = Image.new("RGB", (margin + GAP + wide * len(some), GAP + high * len(rows)), "white")
    draw = ImageDraw.Draw(sheet)
    for number, (name, images) in enumerate(rows.items()):
        top = GAP + number * high
        draw.text((GAP, top + high // 2), name, fill="black", font=font, anchor="lm")
        for place, image in enumerate(images):
            tile = Image.fromarray(_bytes(image)).resize(
                (scale * width, scale * height), Image.Resampling.NEAREST
            )
            sheet.paste(tile, (margin + GAP + place * wide, top))
    _write(path, sheet)


def write_image(path: Path, image: np.ndarray) -> None:
    """One image (H, W, C) in [0, 1]. RunError if the disk does not take it."""
    _write(path, Image.fromarray(_bytes(image)))


def _write(path: Path, image: Image.Image) -> None:
    try:
        with whole_file(path) as temporary:
            image.save(temporary, format="PNG")
    except OSError as error:
        raise RunError(f"cannot write {path}: {error.strerror or error}") from error


def _bytes(image: np.ndarray) -> np.ndarray:
    """(H, W, C) in [0, 1] -> (H, W, 3) or (H, W) of bytes, rounded."""
    values = (image.clip(0, 1) * 255).round().astype(np.uint8)
    return values if values.shape[2] == 3 else values[:, :, 0]
