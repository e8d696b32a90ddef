"""Sheets of images, written as PNG or returned as arrays."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image, ImageDraw, ImageFont

from hpctrain.files import whole_file, writing
from hpctrain.text import printable

SIDE = 84  # approximate pixels of the shorter side: images are enlarged by an integer factor
GAP = 4
LETTERS = 13  # font size of captions, in pixels
WIDEST = 120  # pixels of a caption below a narrower image
IN_A_ROW = 8
LARGEST = 240  # pixels of the longer side of an image with a caption


def draw_captioned(
    images: np.ndarray, captions: Sequence[tuple[str, ...]], marked: Collection[int] = ()
) -> np.ndarray:
    """Draw images (n, H, W, C) in [0, 1] in rows, each above the lines of its caption.

    Returns an array (h, w, 3) of uint8. Images are enlarged or shrunk to a readable size. Lines
    that are wider than their image's cell are cut. The last two lines below the images with the
    numbers `marked` are red.
    """
    tiles = enlarge(images)
    for tile in tiles:
        tile.thumbnail((LARGEST, LARGEST))  # shrinks larger ones only
    font = ImageFont.load_default(size=LETTERS)
    high = tiles[0].height + (LETTERS + 3) * len(captions[0]) + 3 * GAP
    wide = max(tiles[0].width, WIDEST) + 2 * GAP
    columns = min(len(tiles), IN_A_ROW)
    rows = -(-len(tiles) // columns)
    sheet = Image.new("RGB", (columns * wide, rows * high), "white")
    draw = ImageDraw.Draw(sheet)
    for number, (image, lines) in enumerate(zip(tiles, captions, strict=True)):
        left, top = GAP + number % columns * wide, GAP + number // columns * high
        sheet.paste(image, (left, top))
        for place, line in enumerate(lines):
            below = top + image.height + GAP + place * (LETTERS + 3)
            fill = "crimson" if number in marked and place >= len(lines) - 2 else "black"
            draw.text((left, below), _fitting(line, font, wide - 2 * GAP), fill=fill, font=font)
    return np.asarray(sheet)


def enlarge(images: np.ndarray) -> list[Image.Image]:
    """Enlarge images (n, H, W, C) in [0, 1] by an integer factor to about `SIDE` pixels."""
    height, width = images.shape[1:3]
    scale = max(1, SIDE // min(height, width))
    size = scale * width, scale * height
    nearest = Image.Resampling.NEAREST
    return [Image.fromarray(_bytes(image)).resize(size, nearest) for image in images]


def _fitting(line: str, font: Any, room: float) -> str:
    line = printable(line, newlines=False)
    if font.getlength(line) <= room:
        return line
    while line and font.getlength(f"{line}…") > room:
        line = line[:-1]
    return f"{line}…"


def shown_values(images: np.ndarray) -> np.ndarray:
    """Scale stored images (n, H, W, C) to [0, 1].

    uint8 is divided by 255. Floats outside of [0, 1] are scaled by the range of their values.
    """
    if images.dtype == np.uint8:
        return images / np.float32(255)
    values = np.nan_to_num(images.astype(np.float32))
    low, high = min(0.0, float(values.min())), max(1.0, float(values.max()))
    return (values - low) / (high - low)


def write_image(path: Path, image: np.ndarray) -> None:
    """Write an image (H, W, C), uint8 or in [0, 1], as PNG. Raises RunError if that fails."""
    with writing(path), whole_file(path) as file:
        Image.fromarray(_bytes(image)).save(file, format="PNG")


def _bytes(image: np.ndarray) -> np.ndarray:
    """Round (H, W, C) in [0, 1] to uint8, unless it is uint8, and drop a single channel."""
    values = image
    if image.dtype != np.uint8:
        values = (image.clip(0, 1) * 255).round().astype(np.uint8)
    return values if values.shape[2] == 3 else values[:, :, 0]
