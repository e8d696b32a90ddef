"""Image files as the input of a network: list them, and decode them as ``pack`` would."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from hpctrain.data.images import BadImage, read_image
from hpctrain.data.jpeg import decode_threads, map_parts
from hpctrain.errors import UsageError
from hpctrain.inference.blocks import Read, Unusable
from hpctrain.inference.network import Saved

SUFFIXES = (".jpg", ".jpeg", ".png", ".gif", ".bmp", ".tif", ".tiff", ".webp", ".ppm", ".pgm")


def list_images(targets: Sequence[str | Path]) -> list[Path]:
    """List the given image files, and those in the given folders, each folder in sorted order."""
    files: list[Path] = []
    for target in map(Path, targets):
        if target.is_dir():
            found = sorted(
                p
                for p in target.rglob("*")
                if p.suffix.lower() in SUFFIXES and not p.name.startswith(".")
            )
            if not found:
                raise UsageError(f"{target} holds no image file")
            files += found
        elif target.is_file():
            files.append(target)
        else:
            raise UsageError(f"{target}: there is no such file or folder")
    return files


def file_reader(saved: Saved, files: Sequence[Path]) -> Read:
    """Return a function that decodes files in several threads and resizes them as for the pack."""
    shape, crop, threads = saved.image_shape, saved.crop, decode_threads()
    warnings.filterwarnings("ignore", module=r"PIL\.")  # on unusual metadata

    def read(rows: np.ndarray, images: np.ndarray) -> Unusable:
        bad: Unusable = {}

        def decode(part: slice) -> None:
            for image, row in zip(images[part], rows[part].tolist(), strict=True):
                try:
                    image[:] = read_image(str(files[row]), shape, crop)
                except BadImage as error:
                    bad[row] = f"{files[row]} cannot be read as an image: {error}"
                except OSError as error:
                    bad[row] = f"{files[row]} cannot be read: {error.strerror}"

        map_parts(threads, decode, len(rows))
        return bad

    return read
