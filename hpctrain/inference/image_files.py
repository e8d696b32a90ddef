"""Images as the input of a network: files, arrays and images of Pillow, resized as for its pack."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from PIL import Image

from hpctrain.data.images import SUFFIXES, BadImage, Fit, decode, decode_threads
from hpctrain.errors import UsageError
from hpctrain.inference.blocks import Read, Unusable
from hpctrain.inference.network import Saved


class Images(NamedTuple):
    """Images to be read as the input of a network."""

    names: list[str]  # of the files; the numbers of arrays
    read: Read
    dtype: np.dtype
    are_files: bool


def open_images(saved: Saved, given: Any) -> Images:
    """Return the images `given`, which are converted to the network's size when they are read.

    They are files and folders (str or Path), an array (N, H, W, C), (N, H, W) of gray images or
    one image (H, W, C) or (H, W), an image of Pillow, or a sequence of images of any sizes. Arrays
    are uint8, or floats of the network's own size, which are not resized. Raises UsageError.
    """
    kind = getattr(getattr(given, "dtype", None), "kind", None)
    if isinstance(given, str | os.PathLike | Image.Image):
        given = [given]
    elif isinstance(given, Iterator) or kind in ("O", "U"):  # as of Path.glob, and of pandas
        given = list(given)
    elif not isinstance(given, list | tuple):
        given = np.asarray(given)
        shape, channels = given.shape, saved.image_shape[2]
        is_gray = given.ndim == 3 and shape[2] not in (1, 3, 4) and not shape[0] == channels == 3
        is_batch = is_gray or (given.ndim == 4 and shape[3] in (1, 3))  # not (C, H, W), (H, W, 4)
        given = list(given) if is_batch else [given]
    files = [isinstance(each, str | os.PathLike) for each in given]
    if any(files):
        if not all(files):
            raise UsageError("files among arrays: give files only, or arrays only")
        paths = list_images(given)
        return Images([*map(str, paths)], file_reader(saved, paths), np.dtype(np.uint8), True)
    images = [each if isinstance(each, Image.Image) else as_image(saved, each) for each in given]
    kinds = {each.dtype if isinstance(each, np.ndarray) else np.dtype(np.uint8) for each in images}
    if len(kinds) > 1:
        raise UsageError(f"images of several types: {', '.join(sorted(map(str, kinds)))}")
    names = [f"image {row}" for row in range(len(images))]

    def fitted(row: int, fit: Fit) -> np.ndarray | bytes:
        image = images[row]
        if isinstance(image, np.ndarray):
            if image.shape == saved.image_shape:
                return np.ascontiguousarray(image)
            image = Image.fromarray(image[..., 0] if image.shape[2] == 1 else image)
        return decode(image, fit)

    dtype = kinds.pop() if kinds else np.dtype(np.uint8)
    return Images(names, reader(saved, names, fitted), dtype, False)


def as_image(saved: Saved, given: Any) -> np.ndarray:
    """Return one image as an array (H, W, C) of uint8 or floats. Raises UsageError."""
    array = np.asarray(given)
    array = array.astype(array.dtype.newbyteorder("="), copy=False)  # torch takes no others
    array = array[..., None] if array.ndim == 2 else array
    if array.ndim != 3 or array.shape[2] not in (1, 3) or 0 in array.shape:
        axes = "(H, W, C) or (N, H, W, C), C = 1 (gray) or 3"
        raise UsageError(f"an image of shape {array.shape}: give {axes}")
    if array.dtype == np.uint8:
        return array
    if array.dtype.kind != "f":
        raise UsageError(f"images of type {array.dtype}: give uint8, or floats in [0, 1]")
    if array.shape != saved.image_shape:
        size = f"the network takes {saved.image_shape}, and only uint8 is resized"
        raise UsageError(f"an image of floats of shape {array.shape}: {size}")
    low, high = array.min(), array.max()
    if np.isfinite(high - low) and not 0 <= low <= high <= 1 and not saved.metadata.get("external"):
        raise UsageError(f"values from {low:g} to {high:g}: give uint8, or floats in [0, 1]")
    return array


def list_images(targets: Sequence[str | os.PathLike[str]]) -> list[Path]:
    """List the given image files, and those in the given folders, each folder in sorted order."""
    files: list[Path] = []
    for target in map(Path, targets):
        found = [target] * target.is_file()
        if target.is_dir():
            inside = (p for p in target.rglob("*") if p.suffix.lower() in SUFFIXES and p.is_file())
            found = sorted(p for p in inside if not p.name.startswith("."))
        if not found:
            raise UsageError(f"{target}: no such file, and no folder that holds image files")
        files += found
    return files


def file_reader(saved: Saved, files: Sequence[Path]) -> Read:
    """Return a function that decodes files in several threads, resized as for the pack."""
    return reader(saved, files, lambda row, fit: decode(files[row].read_bytes(), fit))


def reader(saved: Saved, names: Sequence[object], one: Callable[[int, Fit], Any]) -> Read:
    """Return a function that reads rows in several threads.

    `one` returns an array, or the bytes of an image of the size of the given `Fit`.
    """
    height, width, channels = saved.image_shape
    fit = Fit(width, height, channels, saved.crop)

    def read(rows: np.ndarray, images: np.ndarray) -> Unusable:
        bad: Unusable = {}

        def read_one(image: np.ndarray, row: int) -> None:
            try:
                found = one(row, fit)
                image[:] = np.frombuffer(found, image.dtype).reshape(image.shape)
            except (BadImage, OSError) as error:
                bad[row] = f"{names[row]} cannot be read as an image: {error}"

        with decode_threads() as threads:
            for _ in threads.map(read_one, images, rows.tolist()):
                pass
        return bad

    return read
