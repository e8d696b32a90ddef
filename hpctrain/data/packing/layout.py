"""What a source of images holds: which file is of which class and, where it says so, which split.

``arrange`` reads it off the names alone, so folders and archives follow the same rules:

* hidden files (``.name``, ``__MACOSX``, Thumbs.db, desktop.ini) are not there;
* a single top folder is seen through (``flower_photos/…`` in ``flower_photos.tgz``);
* every folder is a class, its files at any depth are its images; files beside the class folders
  (README, LICENSE.txt) are ignored;
* folders named train, validation (val, valid) and test, with class folders inside, give the split.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import BinaryIO, NamedTuple

from hpctrain.errors import UsageError

GIVEN_SPLITS = {
    "train": "train",
    "training": "train",
    "validation": "validation",
    "valid": "validation",
    "val": "validation",
    "test": "test",
    "testing": "test",
}
HIDDEN_NAMES = ("__MACOSX", "Thumbs.db", "desktop.ini")
IMAGE_SUFFIXES = (".jpg", ".jpeg", ".png", ".gif", ".bmp", ".tif", ".tiff", ".webp", ".ppm", ".pgm")


class Item(NamedTuple):
    """One image: its name in the source, class and given split, and where its bytes are."""

    name: str
    label: int
    split: str  # "" where it is still to be drawn
    slot: int = 0  # which of the source's open files
    offset: int = 0
    size: int = 0
    packed: tuple[int, ...] = ()  # of a .zip: compression, flags, compressed bytes, CRC-32


@dataclass
class Source:
    """A listed source, nothing decoded yet.

    kind: "folder" (items are files under `root`), "zip" (members of the file `root`, `offset` is
    that of their local header), "slices" (image files within `files`, by offset and size) or
    "pixels" (the same, raw rows of `shape`).
    """

    name: str
    kind: str
    root: str
    classes: tuple[str, ...]
    items: list[Item]
    bad: list[tuple[str, str]] = field(default_factory=list)  # (name, why) found while listing
    notes: list[str] = field(default_factory=list)
    files: list[BinaryIO] = field(default_factory=list)
    shape: tuple[int, int, int] | None = None  # (H, W, C)


class Place(NamedTuple):
    """What a name says about a file."""

    name: str
    label: int
    split: str


class Layout(NamedTuple):
    """Classes, the files of each in order of their names, and how many images were passed by."""

    classes: tuple[str, ...]
    places: list[Place]
    ignored: int


def hidden(parts: Iterable[str]) -> bool:
    """Whether a path with these parts counts as not there."""
    return any(part.startswith(".") or part in HIDDEN_NAMES for part in parts)


def arrange(files: Iterable[str], folders: Iterable[str], where: str) -> Layout:
    """Classes and splits from names relative to the source, parts joined by "/".

    Raises UsageError where there are no class folders, or where one is empty.
    """
    paths = sorted(tuple(name.split("/")) for name in files)
    paths = [path for path in paths if not hidden(path)]
    tree = {path[:depth] for path in paths for depth in range(1, len(path))}
    tree.update(path for path in (tuple(name.split("/")) for name in folders) if not hidden(path))
    top: tuple[str, ...] = ()
    while len(heads := _below(tree, top)) == 1 and _below(tree, (*top, heads[0])):
        top = (*top, heads[0])
    if not heads:
        raise UsageError(
            f"{where} holds {len(paths)} files but no class folders: expected one folder per"
            f" class, as in {where}/CLASS/IMAGE"
        )
    splits = _given_splits(tree, top, heads)
    roots = [(*top, head) for head in heads] if splits else [top]
    classes = tuple(sorted({name for root in roots for name in _below(tree, root)}))
    labels = {name: label for label, name in enumerate(classes)}
    depth = len(top) + (1 if splits else 0)  # of the part that names the class
    places: list[Place] = []
    ignored = 0
    for path in paths:
        if len(path) > depth + 1:
            split = splits[path[len(top)]] if splits else ""
            places.append(Place("/".join(path), labels[path[depth]], split))
        else:
            ignored += path[-1].lower().endswith(IMAGE_SUFFIXES)
    _check_classes(classes, places, where)
    return Layout(classes, places, ignored)


def _below(tree: set[tuple[str, ...]], top: tuple[str, ...]) -> list[str]:
    """Names of the folders directly in `top`."""
    depth = len(top)
    return sorted({path[depth] for path in tree if len(path) > depth and path[:depth] == top})


def _given_splits(
    tree: set[tuple[str, ...]], top: tuple[str, ...], heads: list[str]
) -> dict[str, str]:
    """Folder -> split where the folders are splits with classes inside; else nothing."""
    splits = {head: GIVEN_SPLITS.get(head.lower(), "") for head in heads}
    nested = all(_below(tree, (*top, head)) for head in heads)
    if nested and all(splits.values()) and "train" in splits.values():
        return splits
    return {}


def _check_classes(classes: tuple[str, ...], places: list[Place], where: str) -> None:
    """Every class needs a file, in train where splits are given."""
    trained = {place.label for place in places if place.split in ("", "train")}
    empty = [name for label, name in enumerate(classes) if label not in trained]
    if empty:
        names = ", ".join(empty[:5]) + (", …" if len(empty) > 5 else "")
        raise UsageError(
            f"{len(empty)} of {len(classes)} class folders of {where} hold no file to train on:"
            f" {names}; fill or remove them"
        )
