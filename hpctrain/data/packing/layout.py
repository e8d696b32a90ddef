"""Store listed images as rows of one NumPy array, and derive classes and splits from folders.

``read_class_folders`` uses names alone, so the same rules hold for folders and archives:

* hidden files (``.name``, ``__MACOSX``, Thumbs.db, desktop.ini) are ignored;
* a single top folder is skipped (``flower_photos/…`` in ``flower_photos.tgz``);
* every folder is a class, and the files in it at any depth are its images; files beside the class
  folders (README, LICENSE.txt) are ignored;
* if all folders have names of splits (train, val, testing_data, …: SPLIT_FOLDER) and hold class
  folders, they are the splits.

Folders that look like splits but have other names are an error; they are not packed as classes.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import numpy as np

from hpctrain.data.pack_format import SPLITS
from hpctrain.errors import UsageError

SPLIT_FOLDER = re.compile(
    r"(?:(?P<train>train|training)|(?P<validation>validation|valid|val|dev)|(?P<test>test|testing))"
    r"(?:[-_ ]?(?:data|set|split|images|imgs))?",
    re.IGNORECASE,
)
HIDDEN_NAMES = ("__MACOSX", "Thumbs.db", "desktop.ini")
IMAGE_SUFFIXES = (".jpg", ".jpeg", ".png", ".gif", ".bmp", ".tif", ".tiff", ".webp", ".ppm", ".pgm")
NO_SPLIT = -1
DIGEST_BYTES = 16
#: One row per image.
LISTED = [("label", "<i4"), ("split", "i1"), ("group", "<i4")]
#: The location of its bytes in an archive, and more that a .zip says about it.
PLACED = [("offset", "<i8"), ("size", "<i8")]
ZIPPED = [("method", "<u2"), ("compressed", "<i8"), ("crc32", "<u4")]
COLUMNS = {  # by kind of the source
    "folder": LISTED,
    "slices": [*LISTED, *PLACED],
    "zip": [*LISTED, *PLACED, *ZIPPED],
}
#: Results of a decoded image: whether it can be decoded, and the digest of its pixels.
DECODED: list[tuple[Any, ...]] = [("good", "?"), ("digest", f"S{DIGEST_BYTES}")]


@dataclass
class ImageSource:
    """A source whose images are listed but not decoded yet.

    kind: "folder" (images are files under `root`), "slices" (within the file `root`, by offset and
    size) or "zip" (members of the file `root`; `offset` is that of their local header). In
    `images`, split is an index into SPLITS or NO_SPLIT; group is a number shared by the images of a
    group, or -1.
    """

    name: str
    kind: str
    root: str
    classes: tuple[str, ...]
    images: np.ndarray  # (N,) COLUMNS[kind]
    names: list[str]  # of the images, within the source
    split_by: str  # origin of the splits, if there are any: "folders" or "manifest"
    bad: list[tuple[str, str]] = field(default_factory=list)  # (name, reason) of unusable files
    notes: list[str] = field(default_factory=list)

    def leave_out(self, reasons: Mapping[int, str]) -> None:
        """Remove unusable images, given by row with a reason, and list them as bad."""
        if reasons:
            self.bad += [(self.names[row], why) for row, why in reasons.items()]
            self.names = [name for row, name in enumerate(self.names) if row not in reasons]
            self.images = np.delete(self.images, list(reasons))

    def take(self, rows: np.ndarray) -> ImageSource:
        """Return a source with only these images, in this order, and without names of classes."""
        names = [self.names[row] for row in rows.tolist()]
        return replace(self, classes=(), images=self.images[rows], names=names, bad=[], notes=[])


def jpeg_dtype(channels: int) -> np.dtype:
    """Return the dtype of a decoded image's results in a pack of JPEG files."""
    fields = [*DECODED, ("size", "<i8"), ("crc32", "<u4")]
    fields += [("kept", "?")]  # bytes of the source unchanged
    return np.dtype([*fields, ("sums", "<u8", (2, channels))])  # as in Written


class ClassFolders(NamedTuple):
    """Classes and splits derived from the names of files."""

    classes: tuple[str, ...]
    order: np.ndarray  # (N,) int64: indices of the images among the names, sorted by folder
    labels: np.ndarray  # (N,) int32
    splits: np.ndarray  # (N,) int8: indices into SPLITS, or NO_SPLIT
    ignored: int  # image files outside of class folders


def image_table(kind: str, count: int, **columns: object) -> np.ndarray:
    """Return a table (N,) COLUMNS[kind] of `count` images, with these columns.

    `split` and `group` default to -1.
    """
    table = np.zeros(count, COLUMNS[kind])
    table["split"] = table["group"] = -1
    for column, values in columns.items():
        table[column] = values
    return table


def split_number(name: str) -> int | None:
    """Return the index in SPLITS of a common name of a split ("val", "testing_data"), or None."""
    found = SPLIT_FOLDER.fullmatch(name)
    return next(i for i, split in enumerate(SPLITS) if found[split]) if found else None


def folder_by_folder(names: Sequence[str]) -> np.ndarray:
    """Return the indices (n,) int64 of the distinct names, sorted; of equal names, the last one's.

    "/" sorts before all other characters: the files of a folder stand before those of others whose
    names begin with its own.
    """
    last = {name: row for row, name in enumerate(names)}
    rows = sorted(last.values(), key=lambda row: names[row].replace("/", "\0"))
    return np.array(rows, np.int64)


def hidden(parts: Iterable[str]) -> bool:
    """Whether a path of these parts is ignored."""
    return any(part.startswith(".") or part in HIDDEN_NAMES for part in parts)


def read_class_folders(
    names: Sequence[str], files: np.ndarray, folders: Iterable[str], where: str
) -> ClassFolders:
    """Derive classes and splits from names relative to the source, with parts joined by "/".

    `files` (n,) int64 are the indices of the files among the names, sorted folder by folder.
    Raises UsageError if there are no class folders, if one is empty, or if they look like splits.
    """
    above, folder_of = _folders_of(names, files)
    files, folder_of = files[folder_of >= 0], folder_of[folder_of >= 0]
    tree: dict[str, Any] = {}  # of folders
    for name in filter(None, (*above, *(f for f in folders if not hidden(f.split("/"))))):
        node = tree
        for part in name.split("/"):
            node = node.setdefault(part, {})
    top = 0  # number of nested top folders that hold nothing but one folder
    while len(tree) == 1 and (only := next(iter(tree.values()))):
        tree, top = only, top + 1
    if not tree:
        raise UsageError(
            f"{where} holds {len(files)} files but no class folders: expected one folder per"
            f" class, as in {where}/CLASS/IMAGE, or a table of labels (--manifest)"
        )
    below = {head: sorted(tree[head]) for head in sorted(tree)}
    splits = _split_folders(below, where)
    classes = tuple(sorted({name for head in splits for name in below[head]} or tree))
    depth = top + bool(splits)  # of the part that names the class
    label_of = {name: label for label, name in enumerate(classes)}
    labels, given = np.full(len(above), -1, np.int32), np.full(len(above), NO_SPLIT, np.int8)
    for number, name in enumerate(above):
        parts = name.split("/") if name else []
        if len(parts) > depth:
            labels[number] = label_of[parts[depth]]
            given[number] = splits[parts[top]] if splits else NO_SPLIT
    found = labels[folder_of]
    others = (names[row].lower() for row in files[found < 0])
    ignored = sum(name.endswith(IMAGE_SUFFIXES) for name in others)
    order, folder_of, found = files[found >= 0], folder_of[found >= 0], found[found >= 0]
    chosen = given[folder_of]
    _check_classes(classes, found[chosen <= 0], where)
    return ClassFolders(classes, order, found, chosen, ignored)


def _folders_of(names: Sequence[str], files: np.ndarray) -> tuple[list[str], np.ndarray]:
    """Return the folders that hold files, and the index (n,) int32 of each file's; -1 = hidden."""
    numbers: dict[str, int] = {}
    found = np.full(len(files), -1, np.int32)
    for place, row in enumerate(map(int, files)):
        folder, _, name = names[row].rpartition("/")
        if not hidden((name,)) and (folder in numbers or not hidden(folder.split("/"))):
            found[place] = numbers.setdefault(folder, len(numbers))
    return list(numbers), found


def _split_folders(below: Mapping[str, list[str]], where: str) -> dict[str, int]:
    """Return folder -> split if the folders are splits that hold class folders, else {}.

    Raises UsageError if they probably are splits, but not all of them have known names.
    """
    nested = [head for head in below if below[head]]
    splits = {head: split_number(head) for head in nested}
    known = {head: split for head, split in splits.items() if split is not None}
    way_out = (
        "name split folders train, validation and test and move others away; if these folders are"
        " classes, give labels by a table (--manifest)"
    )
    if known and len(known) == len(below) and 0 in known.values():
        return known
    if known and len(below) > 1:
        raise UsageError(
            f"{where} has folders of splits ({', '.join(known)}) but"
            + (
                f" others beside them ({_few(below.keys() - known)})"
                if known.keys() != below.keys()
                else " none for training"
            )
            + f": {way_out}"
        )
    same = len({tuple(names) for names in below.values()}) == 1
    if len(below) > 1 and same and nested:
        raise UsageError(
            f"all folders of {where} ({_few(below)}) hold the same subfolders"
            f" ({_few(below[nested[0]])}): they look like splits, not classes; {way_out}"
        )
    return {}


def _few(names: Iterable[str]) -> str:
    ordered = sorted(names)
    return ", ".join(ordered[:5]) + (", …" if len(ordered) > 5 else "")


def _check_classes(classes: tuple[str, ...], trained: np.ndarray, where: str) -> None:
    """Raise UsageError if a class has no file, or none in train if splits are given."""
    counts = np.bincount(trained, minlength=len(classes))
    if empty := [name for name, count in zip(classes, counts, strict=True) if not count]:
        raise UsageError(
            f"{len(empty)} of {len(classes)} class folders of {where} hold no file to train on:"
            f" {_few(empty)}; fill or remove them"
        )
