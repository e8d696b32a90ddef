"""Find the targets and splits of a source: a folder, an archive or a table.

They follow from the names of folders: a single top folder is skipped; every folder is a class, and
the files in it at any depth are its images; if all folders have names of splits (`split_number`)
and hold class folders, they are the splits. Or a table says it (``manifest.py``). What is left out
or merged is noted (`Source.notes`).
"""

from __future__ import annotations

import os
import re
import sys
import unicodedata
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryFile

import numpy as np

from hpctrain.data.listing import (
    ARCHIVES,
    FileFinder,
    Listing,
    list_archive,
    list_folder,
)
from hpctrain.data.slices import Slice
from hpctrain.data.targets import Targets
from hpctrain.errors import UsageError
from hpctrain.packing.manifest import is_table, read_manifest
from hpctrain.packing.names import (
    NO_GROUP,
    NO_SPLIT,
    SPLIT_NUMBERS,
    class_notes,
    class_order,
    split_number,
)
from hpctrain.text import brief, counted, listed_names

UNLABELLED = ("pred", "prediction", "predictions", "unlabeled", "unlabelled")  # beside splits
IMAGE_FOLDERS = ("images", "imgs", "image", "img", "jpegimages", "data")  # they name no class
ANNOTATIONS = (
    *("labels", "label", "annotations", "annotation", "masks", "mask"),
    *("segmentationclass", "segmentationobject", "ground_truth", "groundtruth"),
)
ROW_ARRAYS = (  # of `Source`, in order of its images
    *("target_rows", "splits", "groups", "places", "duplicate_of", "files", "corners"),
)
ADVICE = (
    "give one folder per class, within train, validation and test if there are splits, or a table"
    " of labels (--manifest)"
)

Folders = dict[str, "Folders"]  # by name, the folders in each folder


@dataclass
class Source:
    """A source whose images are listed but not decoded yet: N of them, in order of their names.

    Images are files, or tiles of files (``tiles.py``).
    """

    names: list[str]
    targets: Targets
    target_rows: np.ndarray  # (N, ...), as `targets` says
    splits: np.ndarray  # (N,) int8: indices into SPLITS, or NO_SPLIT
    groups: np.ndarray  # (N,) int32: equal numbers within a group, or all NO_GROUP
    split_by: str  # origin of given splits: "folders" or "manifest"
    notes: list[str]  # on what is left out or merged
    name: str = ""
    kind: str = "folder"  # or "tar" or "zip"
    root: str = ""  # path of the folder or archive
    bad: list[tuple[str, str]] = field(default_factory=list)  # names and reasons of dropped files
    places: np.ndarray = field(init=False)  # of an archive, (N, 4) int64: Slice from `kind` on
    duplicate_of: np.ndarray = field(init=False)  # (N,) int64: equal files have equal numbers
    paths: list[str] | None = None  # of tiles, the N files that hold them
    files: np.ndarray | None = None  # of tiles, (N,) int32: equal numbers within a file
    corners: np.ndarray | None = None  # of tiles, (N, 2) int32: top and left
    split_notes: list[str] = field(default_factory=list)  # on classes that a split lacks
    empty_tiles: int = 0  # left out, since all their values are nodata

    def path_of(self, row: int) -> str:
        """Return the name of the file of an image."""
        return (self.paths or self.names)[row]

    def count_files(self) -> int:
        """Return the number of files that hold the images."""
        return len({*(self.paths or self.names)})

    def slices(self, rows: np.ndarray) -> list[Slice]:
        """Return where the bytes of the files of these images are."""
        if self.kind == "folder":
            folder = os.path.join(self.root, "")
            paths = map((self.paths or self.names).__getitem__, rows.tolist())
            return [Slice(path if path.startswith("/") else folder + path) for path in paths]
        return [Slice(self.root, *place) for place in self.places[rows].tolist()]

    def drop(self, reasons: Mapping[int, object], is_listed: bool = True) -> None:
        """Remove unusable images, given by row with a reason. Their files are listed as bad."""
        if is_listed:
            self.bad += sorted({(self.path_of(row), str(why)) for row, why in reasons.items()})
        self.names = [name for row, name in enumerate(self.names) if row not in reasons]
        if self.paths is not None:
            self.paths = [path for row, path in enumerate(self.paths) if row not in reasons]
        for column in ROW_ARRAYS:
            values = getattr(self, column, None)
            if values is not None:
                setattr(self, column, np.delete(values, [*reasons], axis=0))


@contextmanager
def open_source(
    path: Path,
    scratch: Path,
    manifest: str | None = None,
    columns: Sequence[str] | None = None,
) -> Iterator[Source]:
    """List the source at `path`. Raises UsageError if there is nothing to pack.

    `columns` of the table are the targets; None = its classes.
    A compressed .tar is decompressed to a file in the folder `scratch`, without a name: it vanishes
    with this process.
    """
    if is_table(path, columns):
        if manifest:
            raise UsageError(f"{path} is a table, and so is --manifest {manifest}: give one")
        manifest = str(path)
        path = path.absolute().parent
    if columns and not manifest and path.exists():
        raise UsageError(
            f"--targets {','.join(columns)} names columns of a table: give one by --manifest"
        )
    if path.is_dir():  # files that a table names and that are missing are noticed when read
        if manifest:
            source = table_source(manifest, FileFinder(str(path)), columns)
        else:
            source = read_class_folders(list_folder(str(path)), str(path))
        source.name = path.resolve().name
        source.root = str(path)
        yield source
        return
    with TemporaryFile(dir=scratch) as unzipped:
        listing = list_archive(path, unzipped)
        if manifest:
            source = table_source(manifest, FileFinder(str(path), listing.rows), columns)
            missing = [name for name in source.names if name not in listing.rows]
            if missing:
                raise UsageError(
                    f"{manifest} names {counted(len(missing), 'file')} that {path} does not hold:"
                    f" {listed_names(missing)}"
                )
            others = {*listing.names}.difference(source.names)
            listing.add_note("left out, since not in the table", others)
            source.notes += listing.notes
        else:
            source = read_class_folders(listing, str(path))
        source.name = path.name
        source.kind = listing.kind
        source.root = listing.root
        source.places = listing.places[[listing.rows[name] for name in source.names]]
        yield source


def table_source(path: str, files: FileFinder, columns: Sequence[str] | None) -> Source:
    """Return the source that a table describes. Raises UsageError."""
    table = read_manifest(path, files, columns)
    return Source(
        names=table.names,
        targets=table.targets,
        target_rows=table.target_rows,
        splits=table.splits,
        groups=table.groups,
        split_by="manifest",
        notes=table.notes,
    )


# Folders


def read_class_folders(listing: Listing, where: str) -> Source:
    """Derive classes and splits from the names of folders. Raises UsageError.

    The images are in order of their names, folder by folder.
    """
    files = listing.names
    if files and all(name.lower().endswith(ARCHIVES) for name in files):
        raise UsageError(
            f"{where} holds archives ({listed_names(files, 3)}) and no images: unpack them, and"
            " give the folder"
        )
    if files and all(re.fullmatch(r"[^/]*\.npy", name) for name in files):
        raise UsageError(f"{where} holds arrays: hpctrain.write_pack makes a pack of them")
    if "[Content_Types].xml" in files:
        raise UsageError(f"{where} is a workbook or another document: save a table as CSV in UTF-8")
    within = [sys.intern(name.rpartition("/")[0]) for name in files]
    paths = sorted(tuple(name.split("/")) for name in {*within, *listing.folders} if name)
    try:
        roots = _find_roots(paths)
    except UsageError as error:
        raise UsageError(f"{where} {error}: {ADVICE}") from None
    roles = _class_folders(paths, roots, listing)
    classes = class_order(name for name, _ in roles.values())
    words = {name.lower() for name in classes}
    like_splits = [name for name in classes if split_number(name) != NO_SPLIT]
    if words & {*ANNOTATIONS} and (words & {*IMAGE_FOLDERS} or like_splits):
        raise UsageError(f"{where} holds no class folders, but {listed_names(classes)}: {ADVICE}")
    label_of = {name: label for label, name in enumerate(classes)}
    names = [name for name, folder in zip(files, within, strict=True) if folder in roles]
    images = [roles[folder] for folder in within if folder in roles]
    labels = np.array([label_of[name] for name, _ in images], np.int32)
    splits = np.array([split for _, split in images], np.int8)
    counts = np.bincount(labels[splits <= 0], minlength=len(classes))
    empty = [classes[label] for label in np.flatnonzero(counts == 0)]
    if empty:
        raise UsageError(
            f"class folders of {where} hold no file to train on: {listed_names(empty)}"
        )
    if like_splits:
        listing.notes.append(
            f"named like splits, but taken as classes: {listed_names(like_splits)}"
        )
    listing.note_hidden()
    listing.add_note("left out, since outside of class folders", {*files}.difference(names))
    return Source(
        names=names,
        targets=Targets("class", classes),
        target_rows=labels,
        splits=splits,
        groups=np.full(len(names), NO_GROUP, np.int32),
        split_by="folders",
        notes=listing.notes,
    )


def _class_folders(
    paths: Iterable[tuple[str, ...]],
    roots: Mapping[tuple[str, ...], int],
    listing: Listing,
) -> dict[str, tuple[str, int]]:
    """Return the class and the split of each folder below the roots, and note what is joined."""
    roles: dict[str, tuple[str, int]] = {}
    spellings: dict[str, set[str]] = {}  # of each class
    below = set[str]()  # folders in class folders
    for path in paths:
        for root, split in roots.items():
            depth = len(root)
            if path[:depth] == root and path[depth:]:
                name = unicodedata.normalize("NFC", path[depth])
                roles["/".join(path)] = name, split
                spellings.setdefault(name, set()).add(path[depth])
                if path[depth + 1 :]:
                    below.add("/".join(path[: depth + 2]))
    for number in set(roots.values()):
        joined = ["/".join(root) for root, split in roots.items() if split == number]
        if len(joined) > 1:
            listing.add_note("joined as one split", joined, "folder")
    listing.add_note("folders in a class folder belong to that class", below, "folder")
    listing.notes += class_notes(spellings)
    if len(spellings) == 1:
        listing.notes.append(f"all images are of one class, {brief(next(iter(spellings)))}")
    return roles


def _find_roots(paths: Iterable[tuple[str, ...]]) -> dict[tuple[str, ...], int]:
    """Return the folders whose folders are the classes, with their splits.

    Raises UsageError, whose text continues the name of the source.
    """
    tree: Folders = {}
    for path in paths:
        folders = tree
        for part in path:
            folders = folders.setdefault(part, {})
    top: tuple[str, ...] = ()
    while len(tree) == 1 and any(tree.values()):
        (name,) = tree
        tree = tree[name]
        top = (*top, name)
    if not tree:
        raise UsageError("holds no class folders")
    numbers = _split_numbers(tree)
    splits = {name: number for name, number in numbers.items() if tree[name]}
    others = [name for name in tree if name not in splits and not _is_unlabelled(name)]
    if splits and not others and 0 in splits.values():
        return {(*top, name, *_nested(name, tree[name])): splits[name] for name in splits}
    if len(tree) > 1:
        _refuse_other_roles(
            tree,
            numbers=numbers,
            splits=splits,
            others=others,
        )
    return {top: NO_SPLIT}


def _split_numbers(names: Collection[str]) -> dict[str, int]:
    """Return the splits of these folders, as far as they are named like one.

    Words that all names begin with are ignored: "seg_train", "seg_test".
    """
    start = 0
    for mark in re.finditer("[-_ .]", min(names, default="")):
        prefix = mark.string[: mark.end()]
        if all(name.startswith(prefix) for name in names):
            start = mark.end()
    numbers = {}
    for name in names:
        number = max(split_number(name), split_number(name[start:]))
        if number != NO_SPLIT:
            numbers[name] = number
    return numbers


def _is_unlabelled(name: str) -> bool:
    return re.split("[-_ ]", name.lower())[-1] in UNLABELLED


def _nested(name: str, below: Folders) -> tuple[str, ...]:
    """Return the path from a split's folder to that of its classes.

    Some programs unpack train.zip as train/train; other data sets have train/images.
    """
    path: tuple[str, ...] = ()
    while len(below) == 1:
        (inner,) = below
        if inner.lower() not in (name.lower(), *IMAGE_FOLDERS):
            break
        if not below[inner]:
            raise UsageError(f"holds no class folders in {'/'.join((name, *path, inner))}")
        path = (*path, inner)
        below = below[inner]
    return path


def _refuse_other_roles(
    tree: Folders,
    numbers: Mapping[str, int],
    splits: Mapping[str, int],
    others: Sequence[str],
) -> None:
    """Raise UsageError for folders that are neither splits nor classes, by their names."""
    shown = listed_names(tree)
    if splits and others:
        raise UsageError(
            f"holds splits with class folders ({listed_names(splits)}) beside folders that are none"
            f" ({listed_names(others)})"
        )
    if splits:
        raise UsageError(f"holds no split to train on, but {shown}")
    for name, below in tree.items():
        inner = _split_numbers(below)
        if len(inner) > 1 and 0 in inner.values():
            raise UsageError(f"holds splits ({listed_names(inner)}) within {brief(name)}")
    alike = [_similar_splits(name, numbers) for name in tree]
    if all(alike) and 0 in set().union(*alike):
        raise UsageError(f"holds folders that look like splits ({shown})")
    inside = {tuple(sorted(below)) for below in tree.values()}
    names = inside.pop()
    if not inside and not {name.lower() for name in names} <= {*IMAGE_FOLDERS}:
        raise UsageError(
            f"holds folders ({shown}) that all hold the same ones ({listed_names(names, 3)})"
        )


def _similar_splits(name: str, numbers: Mapping[str, int]) -> set[int]:
    """Return the splits that a name means, or that it contains a word of: "train_images_v2"."""
    words = re.split("[^a-z]+", name.lower())
    similar = {SPLIT_NUMBERS[word] for word in words if word in SPLIT_NUMBERS}
    if name in numbers:
        similar.add(numbers[name])
    return similar
