"""List the images of a source, with their classes and splits: a folder, an archive or a manifest.

Archives are never extracted. A .tgz is decompressed once into a scratch file, where every member is
a range of bytes; members of a .zip are ranges, too, stored or deflated. What cannot be read, such
as a link in an archive or a pipe, is listed like an image and found to be bad when it is read.

Classes and splits follow from the names of files alone, so folders and archives have the same
rules:

* hidden files (``.name``, ``__MACOSX``, Thumbs.db, desktop.ini) are ignored;
* a single top folder is skipped (``flower_photos/…`` in ``flower_photos.tgz``);
* every folder is a class, and the files in it at any depth are its images; files beside the class
  folders (README, LICENSE.txt) are ignored;
* if all folders have names of splits (train, val, testing_data, …: SPLIT_FOLDER) and hold class
  folders, they are the splits. Folders that look like splits but have other names are an error.

Or a manifest says it, a CSV file with the columns ``path`` (relative to the source, or absolute for
files of a folder), ``label``, and optionally ``split`` and ``group`` (images of one group, such as
one patient, are never divided between splits), in any order and case.
"""

from __future__ import annotations

import csv
import gzip
import os
import re
import shutil
import stat
import sys
import tarfile
import zipfile
import zlib
from array import array
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import chain, filterfalse
from pathlib import Path
from tempfile import TemporaryFile
from typing import IO, Any, NamedTuple

import numpy as np

from hpctrain.data.images import SUFFIXES, BadImage
from hpctrain.data.pack import ALIASES, SPLITS
from hpctrain.errors import UsageError
from hpctrain.text import brief, listed

SPLIT_NAME = "|".join(f"(?P<{split}>{'|'.join(names)})" for split, names in ALIASES.items())
SPLIT_FOLDER = re.compile(
    f"(?:{SPLIT_NAME})(?:[-_ ]?(?:data|set|split|images|imgs))?", re.IGNORECASE
)
HIDDEN_NAMES = ("__MACOSX", "Thumbs.db", "desktop.ini")
NO_SPLIT = NO_GROUP = -1
MAX_LISTED = 5  # folders that an error message names
REGULAR, OTHER, UNREADABLE, FOLDER = range(4)  # kinds of members
REASONS = ("", "not a regular file", "encrypted, or not compressed by deflate")
ENCRYPTED = 0x1  # flag of a member of a .zip (APPNOTE.TXT 4.4.4)
LOCAL_HEADER = 30  # bytes, of a member of a .zip (APPNOTE.TXT 4.3.7)
BLOCK = 2**20
GZIP, ZIP, HDF5, OTHER_COMPRESSION = b"\x1f\x8b", b"PK", b"\x89HDF\r\n\x1a\n", (b"BZh", b"\xfd7zXZ")

# Names, classes, labels (N,) int32, splits (N,) int8 and groups (N,) int32, as in `Source`
Columns = tuple[list[str], tuple[str, ...], np.ndarray, np.ndarray, np.ndarray]
# Of an archive: the name, and the fields of FileRange from `offset` on
Member = tuple[str, int, int, int, int, int, int]


class FileRange(NamedTuple):
    """The bytes of an image file: a whole file, or `size` bytes of one from `offset` on.

    If `stored` is given, they are a member of a .zip, whose local header is at `offset`.
    """

    path: str
    offset: int = 0
    size: int = -1
    stored: int = -1  # bytes in the archive
    deflated: int = 0
    crc32: int = 0
    kind: int = REGULAR  # index into REASONS


@dataclass
class Source:
    """A source whose images are listed but not decoded yet: N of them, in order of their names."""

    name: str
    kind: str  # "folder", "tar" or "zip"
    root: str  # path of the folder or archive
    split_by: str  # origin of given splits: "folders" or "manifest"
    names: list[str]
    classes: tuple[str, ...]
    labels: np.ndarray  # (N,) int32
    splits: np.ndarray  # (N,) int8: indices into SPLITS, or NO_SPLIT
    groups: np.ndarray  # (N,) int32: equal numbers within a group, or NO_GROUP
    places: np.ndarray  # (N, 6) int64: the fields of FileRange from `offset` on; of a folder (0,)
    ignored: int = 0  # image files outside of class folders
    bad: list[tuple[str, str]] = field(default_factory=list)  # names and reasons of dropped files
    duplicate_of: np.ndarray = field(init=False)  # (N,) int64: equal files have equal numbers

    def __post_init__(self) -> None:
        self.duplicate_of = np.arange(len(self))

    def __len__(self) -> int:
        return len(self.names)

    def ranges(self, rows: np.ndarray) -> list[FileRange]:
        """Return where the bytes of these images are."""
        if self.kind == "folder":
            return [FileRange(os.path.join(self.root, self.names[row])) for row in rows.tolist()]
        return [FileRange(self.root, *place) for place in self.places[rows].tolist()]

    def drop(self, reasons: Mapping[int, str]) -> None:
        """Remove unusable images, given by row with a reason, and list them as bad."""
        rows = [*reasons]
        self.bad += [(self.names[row], why) for row, why in reasons.items()]
        self.names = [name for row, name in enumerate(self.names) if row not in reasons]
        for column in ("labels", "splits", "groups", "duplicate_of"):
            setattr(self, column, np.delete(getattr(self, column), rows))
        if self.kind != "folder":
            self.places = np.delete(self.places, rows, axis=0)


class RangeReader:
    """Reads ranges of files. Consecutive ranges of one file open it once."""

    def __init__(self) -> None:
        self._path, self._descriptor = "", -1

    def close(self) -> None:
        """Close the file that is open, if any."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
        self._path, self._descriptor = "", -1

    def read(self, wanted: FileRange) -> bytes:
        """Read all bytes of an image file. Raises BadImage."""
        if wanted.kind != REGULAR:
            raise BadImage(REASONS[wanted.kind])
        try:
            if wanted.path != self._path:
                self.close()
                self._descriptor = os.open(wanted.path, os.O_RDONLY | os.O_NONBLOCK)
                self._path = wanted.path
                if not stat.S_ISREG(os.fstat(self._descriptor).st_mode):  # a pipe would wait
                    raise BadImage(REASONS[OTHER])
            if wanted.stored >= 0:
                return _read_member(self._descriptor, wanted)
            size = os.fstat(self._descriptor).st_size if wanted.size < 0 else wanted.size
            data = os.pread(self._descriptor, size, wanted.offset)
        except (OSError, ValueError, MemoryError, OverflowError) as error:
            reason = error.strerror if isinstance(error, OSError) else str(error)
            raise BadImage(reason or type(error).__name__) from None
        if len(data) != size:
            raise BadImage("the source was cut short")
        return data


def _read_member(descriptor: int, member: FileRange) -> bytes:
    """Read a member of a .zip. Raises BadImage if it is not what the archive's directory says."""
    header = os.pread(descriptor, LOCAL_HEADER, member.offset)
    if header[:4] != b"PK\3\4":
        raise BadImage("it is not where the archive says")
    name, extra = (int.from_bytes(header[at : at + 2], "little") for at in (26, 28))
    data = os.pread(descriptor, member.stored, member.offset + LOCAL_HEADER + name + extra)
    if member.deflated:
        try:
            data = zlib.decompressobj(-zlib.MAX_WBITS).decompress(data, member.size + 1)
        except zlib.error as error:
            raise BadImage(f"the archive is damaged: {error}") from None
    if (len(data), zlib.crc32(data)) != (member.size, member.crc32):
        raise BadImage("the archive is damaged: size or CRC-32 differs")
    return data


@contextmanager
def open_source(path: Path, scratch: Path, manifest: str | None = None) -> Iterator[Source]:
    """List the source at `path`, for use in a ``with`` block.

    A .tgz is unzipped to a file in the folder `scratch`. It has no name, so it vanishes when this
    process ends, in whatever way. Raises UsageError (one line) if there is nothing to pack.
    """
    with TemporaryFile(dir=scratch) as unzipped:
        yield _list_source(path, unzipped, manifest)


def _list_source(path: Path, unzipped: IO[bytes], manifest: str | None) -> Source:
    if path.suffix == ".csv" and path.is_file():
        path, manifest = path.absolute().parent, str(path)
    rows, places = dict[str, int](), np.zeros(0, np.int64)
    if path.is_dir():
        name, kind, root = path.resolve().name, "folder", str(path)
        # The files of a manifest are not searched: missing ones are noticed when they are read.
        files, folders = ([], []) if manifest else _walk(root)
    else:
        name, (kind, root) = path.name, _open_archive(path, unzipped)
        rows, places = _list_members(path, kind, root)
        is_folder = (places[:, -1] == FOLDER).tolist()
        files = [name for name, row in rows.items() if not is_folder[row]]
        folders = [name for name, row in rows.items() if is_folder[row]]
    if manifest:
        columns, ignored = read_manifest(Path(manifest)), 0
        if kind != "folder" and (missing := sorted({*columns[0]} - {*files})):
            raise UsageError(
                f"{manifest} names {len(missing):,} images that the archive does not hold,"
                f" such as {missing[0]}"
            )
    else:
        columns, ignored = read_class_folders(files, folders, str(path))
    if kind != "folder":
        places = places[[rows[name] for name in columns[0]]]
    by = "manifest" if manifest else "folders"
    return Source(name, kind, root, by, *columns, places, ignored)


def _open_archive(path: Path, unzipped: IO[bytes]) -> tuple[str, str]:
    """Return the kind of an archive and the path by which its members are read.

    Raises UsageError.
    """
    if not path.is_file():
        kind = "is not a file or folder" if path.exists() else "does not exist"
        raise UsageError(
            f"source {path} {kind}: give a folder with a folder per class, .tgz, .zip,"
            " .csv, or flowers or digits by name; arrays are packed by hpctrain.write_pack"
        )
    try:
        with path.open("rb") as file:
            start = file.read(8)
    except OSError as error:
        raise UsageError(f"source {path} cannot be read: {error.strerror}") from None
    if start.startswith(ZIP) and path.suffix != ".npz":  # a .zip of arrays
        return "zip", str(path.resolve())
    if start.startswith(HDF5):
        raise UsageError(f"source {path} is an HDF5 file already: --check shows what it holds")
    if start.startswith(OTHER_COMPRESSION):
        raise UsageError(f"source {path} is compressed by bzip2 or xz: decompress it first")
    if start.startswith(GZIP):
        try:
            with gzip.open(path) as stream:
                shutil.copyfileobj(stream, unzipped, BLOCK)
        except (EOFError, zlib.error, gzip.BadGzipFile) as error:
            raise UsageError(
                f"source {path} is cut short or corrupt ({brief(error)}): fetch it again"
            ) from None
        unzipped.flush()
        return "tar", f"/proc/{os.getpid()}/fd/{unzipped.fileno()}"
    if tarfile.is_tarfile(path):
        return "tar", str(path.resolve())
    raise UsageError(
        f"source {path} is not a .tgz, .tar, .zip or .csv file; arrays are packed by"
        " hpctrain.write_pack"
    )


def _walk(root: str) -> tuple[list[str], list[str]]:
    """List the files and the folders below `root` by name. Links are followed except in loops."""
    files: list[str] = []
    folders: list[str] = []

    def refuse(error: OSError) -> None:
        raise UsageError(f"{error.filename} cannot be listed: {error.strerror}") from None

    for folder, below, names in os.walk(root, onerror=refuse, followlinks=True):
        inside, name = os.path.realpath(folder) + "/", os.path.relpath(folder, root)
        below[:] = [
            each
            for each in below
            if not inside.startswith(os.path.realpath(os.path.join(folder, each)) + "/")
        ]
        files += (shortest(f"{name}/{each}") for each in names)
        folders += (shortest(f"{name}/{each}") for each in below)
    return files, folders


def _tar_members(path: str) -> Iterator[Member]:
    """Yield the members of a .tar. Raises TarError."""
    name = ""
    with open(path, "rb") as file, tarfile.TarFile.open(fileobj=file, mode="r:") as archive:
        while (found := archive.next()) is not None:
            archive.members = []  # type: ignore[attr-defined]  # it would keep them in memory
            regular = REGULAR if found.isreg() and not found.issparse() else OTHER
            name, kind = found.name, FOLDER if found.isdir() else regular
            yield name, found.offset_data, found.size, -1, 0, 0, kind
        file.seek(archive.offset)  # of the first block that is not a member
        if file.read(tarfile.BLOCKSIZE) != bytes(tarfile.BLOCKSIZE):
            raise tarfile.ReadError(f"no end mark after {name}: fetch it again")


def _zip_members(path: str) -> Iterator[Member]:
    """Yield the members of a .zip. Raises BadZipFile."""
    with zipfile.ZipFile(path) as archive:
        for m in archive.infolist():
            kind = FOLDER if m.is_dir() else REGULAR
            known = m.compress_type in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED)
            if stat.S_IFMT(m.external_attr >> 16) not in (0, stat.S_IFREG, stat.S_IFDIR):
                kind = OTHER
            elif not known or m.flag_bits & ENCRYPTED:
                kind = UNREADABLE
            deflated = m.compress_type == zipfile.ZIP_DEFLATED
            yield m.filename, m.header_offset, m.file_size, m.compress_size, deflated, m.CRC, kind


def _list_members(path: Path, kind: str, opened: str) -> tuple[dict[str, int], np.ndarray]:
    """Return the row of each member of an archive by name, and their places (M, 6) int64.

    Of equal names the last one counts, as in tar. Raises UsageError.
    """
    rows, fields = dict[str, int](), array("q")
    try:
        for name, *place in (_tar_members if kind == "tar" else _zip_members)(opened):
            if name := shortest(name.lstrip("/")):
                rows[name] = len(fields) // 6
                fields.extend(place)
    except (
        tarfile.TarError,
        zipfile.BadZipFile,
        EOFError,
        OSError,
        RuntimeError,
        ValueError,
        OverflowError,
    ) as error:
        raise UsageError(f"source {path} is not a whole {kind} archive: {brief(error)}") from None
    return rows, np.frombuffer(fields, np.int64).reshape(-1, 6)


def split_number(name: str) -> int | None:
    """Return the index in SPLITS of a common name of a split ("val", "testing_data"), or None."""
    found = SPLIT_FOLDER.fullmatch(name)
    return next(i for i, split in enumerate(SPLITS) if found[split]) if found else None


def hidden(path: str) -> bool:
    """Whether a file or folder is ignored."""
    return any(part.startswith(".") or part in HIDDEN_NAMES for part in path.split("/"))


def shortest(path: str) -> str:
    """Return a path without "." and empty parts, as members of archives are listed."""
    parts = (part for part in path.split("/") if part not in ("", "."))
    return "/" * path.startswith("/") + "/".join(parts)


def read_class_folders(
    files: Iterable[str], folders: Iterable[str], where: str
) -> tuple[Columns, int]:
    """Derive classes and splits from names relative to the source, with parts joined by "/".

    Returns the images in order of their names, folder by folder, and the number of image files that
    are outside of class folders. Raises UsageError if there are no class folders, if one is empty,
    or if they look like splits.
    """
    # "/" sorts before all other characters, so that the files of a folder stand together
    files = sorted(filterfalse(hidden, files), key=lambda name: name.replace("/", "\0"))
    above = dict.fromkeys(name.rpartition("/")[0] for name in files)
    tree: dict[str, Any] = {}  # of folders
    for name in filter(None, (*above, *filterfalse(hidden, folders))):
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
    found = {}  # label and split of each folder
    for name in above:
        parts = name.split("/") if name else []
        if len(parts) > depth:
            found[name] = label_of[parts[depth]], splits.get(parts[top], NO_SPLIT)
    names = [name for name in files if name.rpartition("/")[0] in found]
    labels, given = (
        np.array([found[name.rpartition("/")[0]] for name in names], np.int32).reshape(-1, 2).T
    )
    counts = np.bincount(labels[given <= 0], minlength=len(classes))
    if empty := [name for name, count in zip(classes, counts, strict=True) if not count]:
        raise UsageError(
            f"{len(empty)} of {len(classes)} class folders of {where} hold no file to train on:"
            f" {listed(empty, MAX_LISTED)}; fill or remove them"
        )
    images = (name for name in files if name.lower().endswith(SUFFIXES))
    ignored = sum(name.rpartition("/")[0] not in found for name in images)
    no_groups = np.full(len(names), NO_GROUP, np.int32)
    return (names, classes, labels.copy(), given.astype(np.int8), no_groups), ignored


def _split_folders(below: Mapping[str, list[str]], where: str) -> dict[str, int]:
    """Return folder -> split if the folders are splits that hold class folders, else {}.

    Raises UsageError if they probably are splits, but not all of them have known names.
    """
    splits = {head: split_number(head) for head in below if below[head]}
    known = {head: split for head, split in splits.items() if split is not None}
    if len(known) == len(below) and 0 in known.values():
        return known
    same = len(splits) > 0 and len({tuple(names) for names in below.values()}) == 1
    if len(below) > 1 and (known or same):
        what = f"some names of splits ({', '.join(known)})" if known else "the same subfolders"
        raise UsageError(
            f"the folders of {where} ({listed(below, MAX_LISTED)}) have {what}: name split folders"
            " train, validation and test, and move others away; if these folders are classes, give"
            " labels by a table (--manifest)"
        )
    return {}


def read_manifest(path: Path) -> Columns:
    """Read a table of images. Raises UsageError with the line in its message.

    Classes are in numerical order if all labels are whole numbers.
    """
    lines: dict[str, int] = {}  # of each image
    columns: dict[str, list[str]] = {"label": [], "split": [], "group": []}
    for line, cells in _csv_rows(path):
        image = shortest(cells["path"])
        if not (image and cells["label"]):
            raise UsageError(f"{path}: line {line} has no {'label' if image else 'path'}")
        if (first := lines.setdefault(image, line)) != line:
            raise UsageError(f"{path}: lines {first} and {line} both name {image}")
        for name, column in columns.items():
            column.append(sys.intern(cells.get(name, "")))  # equal texts are one object
    if not lines:
        raise UsageError(f"{path} names no images")
    splits: list[int] = []
    split_of: dict[str, int] = {}  # of each group
    has_splits, has_groups = any(columns["split"]), any(columns["group"])
    for line, name, group in zip(lines.values(), columns["split"], columns["group"], strict=True):
        number = split_number(name) if name else NO_SPLIT
        if number is None:
            raise UsageError(
                f"{path}: line {line} has the split {name!r}: give {', '.join(SPLITS)}"
            )
        if (has_splits and not name) or (has_groups and not group):
            missing = "split" if has_splits and not name else "group"
            raise UsageError(f"{path}: line {line} has no {missing}, other lines have one")
        if group and (other := split_of.setdefault(group, number)) != number:
            both = f"{SPLITS[other]} and {SPLITS[number]}"
            raise UsageError(f"{path}: line {line}: group {group!r} is in both {both}")
        splits.append(number)
    groups = _number(columns["group"])[1] if has_groups else np.full(len(lines), NO_GROUP, np.int32)
    return [*lines], *_number(columns["label"]), np.array(splits, np.int8), groups


def _number(column: Sequence[str]) -> tuple[tuple[str, ...], np.ndarray]:
    """Return the distinct values in order, and the index (N,) int32 of each value among them."""
    distinct = sorted({*column})
    if all(value.isdecimal() for value in distinct):
        distinct.sort(key=lambda value: (int(value), value))
    numbers = {value: number for number, value in enumerate(distinct)}
    return tuple(distinct), np.array([numbers[value] for value in column], np.int32)


def _csv_rows(path: Path) -> Iterator[tuple[int, dict[str, str]]]:
    """Yield the line and the cells by column of each row, separated by commas, semicolons or tabs.

    Raises UsageError.
    """
    try:
        with open(path, newline="", encoding="utf-8-sig", errors="surrogateescape") as file:
            header = file.readline()
            reader = csv.reader(chain([header], file), delimiter=max(",;\t", key=header.count))
            names = [name.strip().lower() for name in next(reader, [])]
            for name, least in (("path", 1), ("label", 1), ("split", 0), ("group", 0)):
                if not least <= (count := names.count(name)) <= 1:
                    raise UsageError(
                        f"{path} has {count or 'no'} column{'s' * (count > 1)} {name} in its header"
                        f" {', '.join(names) or '(empty)'}: name its columns path, label, split,"
                        " group"
                    )
            for row in filter(None, reader):
                if any(row[len(names) :]):
                    raise UsageError(
                        f"{path}: line {reader.line_num} has {len(row)} cells, the header"
                        f" {len(names)}"
                    )
                row += [""] * (len(names) - len(row))
                cells = zip(names, map(str.strip, row), strict=False)
                yield reader.line_num, dict(cells)
    except OSError as error:
        raise UsageError(f"manifest {path} cannot be read: {error.strerror}") from None
    except csv.Error as error:
        raise UsageError(f"manifest {path} is not a CSV file: {brief(error)}") from None
