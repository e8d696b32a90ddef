"""Images as the input of a network: files, arrays and images of Pillow, resized as for its pack."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from PIL import Image

from hpctrain.data.images import SUFFIXES, BadImage, Fit, decode, decode_threads, fit_image
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
    if isinstance(given, str | os.PathLike):
        given = [given]
    kind = getattr(getattr(given, "dtype", None), "kind", None)
    if isinstance(given, Iterator) or kind in ("O", "U"):  # as of Path.glob, and of pandas
        given = list(given)
    if isinstance(given, list | tuple) and any(isinstance(g, str | os.PathLike) for g in given):
        if not all(isinstance(each, str | os.PathLike) for each in given):
            raise UsageError("files among arrays: give files only, or arrays only")
        files = list_images(given)
        read = file_reader(saved, files)
        return Images([str(file) for file in files], read, np.dtype(np.uint8), True)
    if isinstance(given, Image.Image):
        given = [given]
    if not isinstance(given, list | tuple):
        given = as_batch(np.asarray(given), saved.image_shape[2])
    images = [each if isinstance(each, Image.Image) else as_image(saved, each) for each in given]
    kinds = {each.dtype if isinstance(each, np.ndarray) else np.dtype(np.uint8) for each in images}
    if len(kinds) > 1:
        raise UsageError(f"images of several types: {', '.join(sorted(map(str, kinds)))}")
    read = reader(lambda row: fitted(images[row], saved), lambda row: f"image {row}")
    names = [f"image {row}" for row in range(len(images))]
    return Images(names, read, kinds.pop() if kinds else np.dtype(np.uint8), False)


def as_batch(array: np.ndarray, channels: int) -> np.ndarray:
    """Return an array of images with the axes (N, H, W, C). Raises UsageError.

    An array that may be a single image (C, H, W) or (H, W, 4) is not taken for gray images.
    """
    if array.ndim == 3 and (
        array.shape[2] == 4 or (array.shape[0] == channels == 3 != array.shape[2])
    ):
        kind = "(H, W, C), C = 1 (gray) or 3, or gray images as (N, H, W, 1)"
        raise UsageError(f"an array of shape {tuple(array.shape)}: give an image as {kind}")
    if array.ndim == 2 or (array.ndim == 3 and array.shape[2] in (1, 3)):
        array = array[None]  # one image
    if array.ndim == 3:
        array = array[..., None]  # gray
    if array.ndim != 4 or array.shape[3] not in (1, 3):
        shape = tuple(array.shape)
        raise UsageError(f"an array of shape {shape}: give (N, H, W, C), C = 1 (gray) or 3")
    return array


def as_image(saved: Saved, given: Any) -> np.ndarray:
    """Return one image as an array (H, W, C) of uint8 or floats. Raises UsageError."""
    array = np.asarray(given)
    if not array.dtype.isnative:  # torch takes no others
        array = array.astype(array.dtype.newbyteorder("="))
    array = array[..., None] if array.ndim == 2 else array
    if array.ndim != 3 or array.shape[2] not in (1, 3) or 0 in array.shape:
        shape = tuple(array.shape)
        raise UsageError(f"an image of shape {shape}: give (H, W, C), C = 1 (gray) or 3")
    if array.dtype == np.uint8:
        return array
    if array.dtype.kind != "f":
        raise UsageError(f"images of type {array.dtype}: give uint8, or floats in [0, 1]")
    if array.shape != saved.image_shape:
        raise UsageError(
            f"an image of floats of shape {tuple(array.shape)}: the network takes"
            f" {saved.image_shape}, and only uint8 is resized"
        )
    outside = not (array.min() >= 0 and array.max() <= 1)
    if outside and np.isfinite(array).all() and not saved.metadata.get("external"):
        raise UsageError(
            f"values from {array.min():g} to {array.max():g}: give uint8, or floats in [0, 1]"
        )
    return array


def fitted(image: np.ndarray | Image.Image, saved: Saved) -> np.ndarray:
    """Return an image as an array (H, W, C) of the network's size. Raises BadImage."""
    height, width, channels = saved.image_shape
    if isinstance(image, np.ndarray):
        if image.shape == saved.image_shape:
            return image
        image = Image.fromarray(image[..., 0] if image.shape[2] == 1 else image)
    pixels = fit_image(image, Fit(width, height, channels, saved.crop))
    return np.frombuffer(pixels, np.uint8).reshape(saved.image_shape)


def list_images(targets: Sequence[str | os.PathLike[str]]) -> list[Path]:
    """List the given image files, and those in the given folders, each folder in sorted order."""
    files: list[Path] = []
    for target in map(Path, targets):
        if target.is_dir():
            found = sorted(
                p
                for p in target.rglob("*")
                if p.suffix.lower() in SUFFIXES and not p.name.startswith(".") and p.is_file()
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
    height, width, channels = saved.image_shape
    fit = Fit(width, height, channels, saved.crop)

    def one(row: int) -> np.ndarray:
        pixels = decode(files[row].read_bytes(), fit)
        return np.frombuffer(pixels, np.uint8).reshape(saved.image_shape)

    return reader(one, lambda row: str(files[row]))


def reader(one: Callable[[int], np.ndarray], name: Callable[[int], str]) -> Read:
    """Return a function that reads rows in several threads, each image by `one`."""

    def read(rows: np.ndarray, images: np.ndarray) -> Unusable:
        bad: Unusable = {}

        def read_one(image: np.ndarray, row: int) -> None:
            try:
                image[:] = one(row)
            except BadImage as error:
                bad[row] = f"{name(row)} cannot be read as an image: {error}"
            except OSError as error:
                bad[row] = f"{name(row)} cannot be read: {error.strerror}"

        with decode_threads() as threads:
            for _ in threads.map(read_one, images, rows.tolist()):
                pass
        return bad

    return read
