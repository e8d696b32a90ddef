"""Pictures of images, as PNG or as bytes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image, ImageDraw, ImageFont

from hpctrain.errors import RunError
from hpctrain.files import whole_file
from hpctrain.text import printable

SIDE = 84  # pixels, about, of the shorter side: images are enlarged by a whole number
GAP = 4
LETTERS = 13  # pixels of a caption
WIDEST = 120  # of a caption below an image that is less wide
IN_A_ROW = 8


def write_rows(path: Path, rows: Mapping[str, np.ndarray]) -> None:
    """One row of images for each name, (n, H, W, C) in [0, 1]; the name stands before it.

    RunError if the disk does not take it.
    """
    some = next(iter(rows.values()))
    height, width = some.shape[1:3]
    scale = max(1, SIDE // min(height, width))
    high, wide = scale * height + GAP, scale * width + GAP
    rows = {printable(name, newlines=False): images for name, images in rows.items()}
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


def draw_captioned(images: np.ndarray, captions: Sequence[tuple[str, ...]]) -> np.ndarray:
    """Images (n, H, W, C) in [0, 1] in rows, each with the lines of its caption below: (h, w, 3) of
    bytes. What does not fit below an image is cut.
    """
    height, width = images.shape[1:3]
    scale = max(1, SIDE // min(height, width))
    font = ImageFont.load_default(size=LETTERS)
    high = scale * height + (LETTERS + 3) * len(captions[0]) + 3 * GAP
    wide = max(scale * width, WIDEST) + 2 * GAP
    columns = min(len(images), IN_A_ROW)
    rows = -(-len(images) // columns)
    sheet = Image.new("RGB", (columns * wide, rows * high), "white")
    draw = ImageDraw.Draw(sheet)
    for number, (image, lines) in enumerate(zip(images, captions, strict=True)):
        left, top = GAP + number % columns * wide, GAP + number // columns * high
        size = scale * width, scale * height
        sheet.paste(
            Image.fromarray(_bytes(image)).resize(size, Image.Resampling.NEAREST), (left, top)
        )
        for place, line in enumerate(lines):
            below = top + scale * height + GAP + place * (LETTERS + 3)
            draw.text((left, below), _fitting(line, font, wide - 2 * GAP), fill="black", font=font)
    return np.asarray(sheet)


def _fitting(line: str, font: Any, room: float) -> str:
    line = printable(line, newlines=False)
    if font.getlength(line) <= room:
        return line
    while line and font.getlength(f"{line}…") > room:
        line = line[:-1]
    return f"{line}…"


def shown_values(images: np.ndarray) -> np.ndarray:
    """Images (n, H, W, C) as they are stored, in [0, 1]: bytes by their range, floats that leave
    it by their own.
    """
    if images.dtype == np.uint8:
        return images / np.float32(255)
    values = np.nan_to_num(images.astype(np.float32))
    low, high = min(0.0, float(values.min())), max(1.0, float(values.max()))
    return (values - low) / (high - low)


def write_image(path: Path, image: np.ndarray) -> None:
    """One image (H, W, C) in [0, 1]. RunError if the disk does not take it."""
    _write(path, Image.fromarray(_bytes(image)))


def _write(path: Path, image: Image.Image) -> None:
    try:
        with whole_file(path) as file:
            image.save(file, format="PNG")
    except OSError as error:
        raise RunError(f"cannot write {path}: {error.strerror or error}") from error


def _bytes(image: np.ndarray) -> np.ndarray:
    """(H, W, C) in [0, 1] -> (H, W, 3) or (H, W) of bytes, rounded."""
    values = (image.clip(0, 1) * 255).round().astype(np.uint8)
    return values if values.shape[2] == 3 else values[:, :, 0]
