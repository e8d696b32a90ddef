"""Small image files, folders and archives of them, and packs of these."""

from __future__ import annotations

import io
import json
import tarfile
import zipfile
from itertools import pairwise
from pathlib import Path

import h5py
import numpy as np
from PIL import Image

from tests.support.api import command_line
from tests.support.launch import as_flags


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


def write_npy(values: np.ndarray) -> bytes:
    """The bytes of a file of NumPy."""
    file = io.BytesIO()
    np.save(file, values)
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


# Packs of them, made by the command and read by h5py


def command_words(source: object, output: object, **settings) -> list[str]:
    """The command line that packs `source`: ``skip_bad=True`` is ``--skip-bad``."""
    return ["pack", str(source), "--output", str(output), *as_flags({"jobs": 1, **settings})]


def make_pack(source: object, output: Path, **settings) -> Path:
    """Pack `source`; its images must be usable."""
    assert command_line(command_words(source, output, **settings)) == 0
    return output


def arrays(path: Path, split: str = "train") -> tuple[np.ndarray, np.ndarray]:
    """The images (N, H, W, C) and labels (N,) of a pack of pixels."""
    with h5py.File(path) as file:
        return file[f"{split}/images"][:], file[f"{split}/targets"][:]


def splits(path: Path) -> list[str]:
    """The names of a pack's splits."""
    with h5py.File(path) as file:
        return [name for name in file if name != "identity"]


def facts(path: Path) -> dict:
    """The attributes of a pack: the names of its classes, what its provenance says, and others."""
    with h5py.File(path) as file:
        found = dict(file.attrs)
    names = [name.decode("utf-8", "surrogateescape") for name in found["classes"]]
    return {**found, "classes": names, "provenance": json.loads(found["provenance"])}


def counts(path: Path) -> dict[str, list[int]]:
    """Images of every class in every split."""
    classes = len(facts(path)["classes"])
    labels = {name: arrays(path, name)[1] for name in splits(path)}
    return {name: np.bincount(of, minlength=classes).tolist() for name, of in labels.items()}


def file_names(path: Path, split: str = "train") -> list[str]:
    """The names of the files of a pack's samples, in their order."""
    with h5py.File(path) as file:
        data = file[f"{split}/names"][:].tobytes()
        ends = file[f"{split}/name_offsets"][:].tolist()
    return [data[a:b].decode("utf-8", "surrogateescape") for a, b in pairwise(ends)]


def placed(path: Path) -> dict[int, tuple[str, str]]:
    """The split and the class of each picture, by number."""
    _, height, width, channels = arrays(path)[0].shape
    known = {picture(n, width, height, channels).tobytes(): n for n in range(400)}
    classes = facts(path)["classes"]
    return {
        known[image.tobytes()]: (name, classes[label])
        for name in splits(path)
        for image, label in zip(*arrays(path, name), strict=True)
    }


def tiles(sheet, images, scale):
    """Where each image, enlarged by an integer, stands in a sheet: (top, left), or None."""
    for image in images:
        tile = np.kron(image[:, :, 0], np.ones((scale, scale), int))
        high, wide = tile.shape
        windows = np.lib.stride_tricks.sliding_window_view(sheet, (wide,), axis=1)
        tops, lefts = np.nonzero((windows == tile[0]).all(2))
        yield next(
            (
                (top, left)
                for top, left in zip(tops, lefts, strict=True)
                if np.array_equal(sheet[top : top + high, left : left + wide], tile)
            ),
            None,
        )
