"""Small image files, and folders and archives of them."""

from __future__ import annotations

import io
import tarfile
import zipfile
from pathlib import Path

import numpy as np
from PIL import Image


def picture(number: int, width: int = 13, height: int = 11, channels: int = 3) -> np.ndarray:
    """A smooth picture, another one for every number: (H, W, C) uint8."""
    y, x = np.mgrid[0:height, 0:width]
    planes = [
        128 + 100 * np.sin(0.3 * x + 0.7 * number + c) * np.cos(0.2 * y + 0.11 * number * c)
        for c in range(channels)
    ]
    return np.stack(planes, axis=-1).astype(np.uint8)


def encode(pixels: np.ndarray, kind: str = "PNG", **options) -> bytes:
    """The bytes of an image file."""
    file = io.BytesIO()
    Image.fromarray(pixels.squeeze()).save(file, kind, **options)
    return file.getvalue()


def class_folders(root: Path, counts: dict[str, int], suffix: str = ".png", **shape) -> Path:
    """A folder per class with so many pictures each, all different."""
    number = 0
    for name, count in counts.items():
        (root / name).mkdir(parents=True)
        for i in range(count):
            kind = {".png": "PNG", ".jpg": "JPEG"}[suffix]
            (root / name / f"{i:03}{suffix}").write_bytes(encode(picture(number, **shape), kind))
            number += 1
    return root


def tar(path: Path, root: Path, prefix: str = "", mode: str = "w:gz") -> Path:
    """The folder `root` as a tar archive."""
    with tarfile.open(path, mode) as archive:
        archive.add(root, prefix or ".")
    return path


def zipped(path: Path, root: Path, prefix: str = "") -> Path:
    """The folder `root` as a zip archive."""
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for file in sorted(root.rglob("*")):
            archive.write(file, f"{prefix}{file.relative_to(root)}")
    return path
