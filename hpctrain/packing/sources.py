"""List the images of a source, with their classes and splits: a folder, an archive or a manifest.

Archives are never extracted. A .tgz is decompressed once into a scratch file, where every member is
a slice of bytes; members of a .zip are slices, too, stored or deflated. What cannot be read, such
as a link in an archive, is listed and found to be bad when it is read.

Classes and splits follow from the names of files alone: hidden files (``.name``, ``__MACOSX``) and
a single top folder are skipped; every folder is a class, and the files in it at any depth are its
images; if all folders have names of splits (`split_number`) and hold class folders, they are
the splits. Or a manifest says it, a CSV file with the columns ``path`` (relative to the source, or
absolute for files of a folder), ``label``, and optionally ``split`` and ``group`` (images of one
group, such as one patient, are never divided between splits).
"""

from __future__ import annotations

import csv
import errno
import gzip
import os
import re
import shutil
import sys
import tarfile
import zipfile
import zlib
from array import array
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from io import FileIO
from itertools import chain, filterfalse, groupby
from os.path import normpath
from pathlib import Path
from tempfile import TemporaryFile
from typing import IO, NamedTuple, TypeVar

import numpy as np

from hpctrain.data.images import BadImage
from hpctrain.data.pack import ALIASES, SPLITS
from hpctrain.errors import UsageError
from hpctrain.text import brief, listed

SPLIT_NUMBERS = {name: i for i, names in enumerate(ALIASES.values()) for name in names}
HIDDEN_NAMES = ("__MACOSX", "Thumbs.db", "desktop.ini")
COLUMNS = ("path", "label", "split", "group")  # of a manifest
NO_SPLIT = NO_GROUP = -1
PLAIN, ENCRYPTED = -1, -2  # kinds of slices; others are compression methods of .zip

T = TypeVar("T")


class Slice(NamedTuple):
    """Where an image file is: a file, or `size` bytes of an archive from `offset` on.

    There, a member of a .zip (not PLAIN) has its local header, which comes in addition.
    """

    path: str
    kind: int = PLAIN
    offset: int = 0
    size: int = -1  # as it is stored; -1: all bytes
    crc32: int = 0  # of a member of a .zip


@dataclass
class Source:
    """A source whose images are listed but not decoded yet: N of them, in order of their names."""

    names: list[str]
    classes: tuple[str, ...]
    labels: np.ndarray  # (N,) int32
    splits: np.ndarray  # (N,) int8: indices into SPLITS, or NO_SPLIT
    groups: np.ndarray  # (N,) int32: equal numbers within a group, or all NO_GROUP
    split_by: str  # origin of given splits: "folders" or "manifest"
    outside: int = 0  # files outside of class folders
    name: str = ""
    kind: str = "folder"  # or "tar" or "zip"
    root: str = ""  # path of the folder or archive
    bad: list[tuple[str, str]] = field(default_factory=list)  # names and reasons of dropped files
    places: np.ndarray = field(init=False)  # of an archive, (N, 4) int64: Slice from `kind` on
    duplicate_of: np.ndarray = field(init=False)  # (N,) int64: equal files have equal numbers

    def slices(self, rows: np.ndarray) -> list[Slice]:
        """Return where the bytes of these images are."""
        if self.kind == "folder":
            return [Slice(os.path.join(self.root, self.names[row])) for row in rows.tolist()]
        return [Slice(self.root, *place) for place in self.places[rows].tolist()]

    def drop(self, reasons: Mapping[int, str]) -> None:
        """Remove unusable images, given by row with a reason, and list them as bad."""
        self.bad += sorted((self.names[row], why) for row, why in reasons.items())
        self.names = [name for row, name in enumerate(self.names) if row not in reasons]
        for column in ("labels", "splits", "groups", "places", "duplicate_of"):
            if (values := getattr(self, column, None)) is not None:
                setattr(self, column, np.delete(values, [*reasons], axis=0))


def read_files(slices: list[Slice], use: Callable[[bytes], T]) -> Iterator[T | BadImage]:
    """Yield what `use` makes of the bytes of each image file, or why it cannot be read.

    An archive is opened once; a named pipe does not wait for a writer, and is read as an empty
    file. `use` may raise BadImage.
    """

    def open_at_once(path: str, flags: int) -> int:
        return os.open(path, flags | os.O_NONBLOCK)

    for path, parts in groupby(slices, lambda part: part.path):
        with ExitStack() as opened:
            file = None
            for part in parts:
                try:
                    file = file or opened.enter_context(FileIO(path, opener=open_at_once))
                    yield use(_read(file, part))
                except BadImage as error:
                    yield error
                except (OSError, ValueError, zlib.error) as error:
                    yield BadImage(getattr(error, "strerror", None) or str(error))


def _read(file: FileIO, part: Slice) -> bytes:
    """Read an image file. Raises BadImage, OSError and zlib.error."""
    if part.kind not in (PLAIN, zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
        raise BadImage("encrypted, or compressed otherwise than by deflate")
    start = part.offset
    if part.kind != PLAIN:  # a local header of 30 bytes, a name and an extra field
        file.seek(start + 26)
        lengths = file.read(4)
        start += 30 + int.from_bytes(lengths[:2], "little") + int.from_bytes(lengths[2:], "little")
    file.seek(start)
    data = file.read(part.size) or b""
    if part.size not in (-1, len(data)):
        raise BadImage("the archive was cut short")
    if part.kind == zipfile.ZIP_DEFLATED:
        data = zlib.decompress(data, -zlib.MAX_WBITS)
    if part.kind != PLAIN and zlib.crc32(data) != part.crc32:
        raise BadImage("the archive is damaged: CRC-32 differs")
    return data


@contextmanager
def open_source(path: Path, scratch: Path, manifest: str | None = None) -> Iterator[Source]:
    """List the source at `path`. Raises UsageError if there is nothing to pack.

    A .tgz is unzipped to a file in the folder `scratch`, without a name: it vanishes with this
    process.
    """
    if path.suffix == ".csv" and path.is_file():
        path, manifest = path.absolute().parent, str(path)
    if path.is_dir():  # files that a manifest names and that are missing are noticed when read
        source = read_manifest(manifest) if manifest else read_class_folders(*_walk(path))
        source.name, source.root = path.resolve().name, str(path)
        yield source
        return
    with TemporaryFile(dir=scratch) as unzipped:
        kind, root, folders, rows, places = _list_archive(path, unzipped)
        where = str(path)
        source = read_manifest(manifest) if manifest else read_class_folders(rows, folders, where)
        source.name, source.kind, source.root = path.name, kind, root
        if missing := [name for name in source.names if name not in rows]:
            raise UsageError(f"{manifest} names {missing[0]}, which the archive does not hold")
        source.places = places[[rows[name] for name in source.names]]
        yield source


def _walk(root: Path) -> tuple[list[str], list[str], str]:
    """Return what `read_class_folders` takes. Links are followed except in loops."""
    files, folders = list[str](), list[str]()

    def refuse(error: OSError) -> None:
        raise UsageError(f"{error.filename} cannot be listed: {error.strerror}") from None

    for folder, below, names in os.walk(root, onerror=refuse, followlinks=True):
        inside, name = f"{os.path.realpath(folder)}/", os.path.relpath(folder, root)
        real = {each: os.path.realpath(os.path.join(folder, each)) for each in below}
        below[:] = [each for each in below if not inside.startswith(f"{real[each]}/")]
        files += (normpath(f"{name}/{each}") for each in names)
        folders += (normpath(f"{name}/{each}") for each in below)
    return files, folders, str(root)


def _list_archive(
    path: Path, unzipped: IO[bytes]
) -> tuple[str, str, list[str], dict[str, int], np.ndarray]:
    """List the members of an archive, after decompressing a .tgz into the file `unzipped`.

    Returns its kind, the path by which its members are read, its folders, the row of each file by
    name (of equal ones the last, as in tar), and the files' places (M, 4). Raises UsageError.
    """
    kind, root = "tar", str(path.resolve())
    folders, rows, fields = list[str](), dict[str, int](), array("q")
    try:
        with path.open("rb") as file:
            start = file.read(2)
        if start == b"\x1f\x8b":  # RFC 1952: gzip
            with gzip.open(path) as stream:
                shutil.copyfileobj(stream, unzipped, 2**20)
            unzipped.flush()
            root = f"/proc/{os.getpid()}/fd/{unzipped.fileno()}"
        elif start == b"PK":
            kind = "zip"
        for name, is_folder, *place in (_tar_members if kind == "tar" else _zip_members)(root):
            name = normpath(name.lstrip("/"))
            if is_folder:
                folders.append(name)
            else:
                rows[name] = len(fields) // 4
                fields.extend(place)
    except MemoryError:
        raise
    except Exception as error:  # of many types, for corrupt archives
        if getattr(error, "errno", None) in (errno.ENOSPC, errno.EDQUOT):  # of `unzipped`
            raise
        raise UsageError(
            f"source {path} cannot be read as a folder, .tgz, .tar, .zip or .csv:"
            f" {getattr(error, 'strerror', None) or brief(error)}"
        ) from None
    return kind, root, folders, rows, np.frombuffer(fields, np.int64).reshape(-1, 4)


def _tar_members(path: str) -> Iterator[tuple[str, bool, int, int, int, int]]:
    """Yield the name of each member, whether it is a folder, and its place. Raises TarError."""
    with open(path, "rb") as file, tarfile.TarFile.open(fileobj=file, mode="r:") as archive:
        while (m := archive.next()) is not None:
            archive.members = []  # type: ignore[attr-defined]  # it would keep them in memory
            is_file = m.isreg() and not m.issparse()
            yield m.name, m.isdir(), PLAIN, m.offset_data, m.size * is_file, 0
        file.seek(archive.offset)  # of the first block that is not a member
        if file.read(tarfile.BLOCKSIZE) != bytes(tarfile.BLOCKSIZE):
            raise tarfile.ReadError("it has no end mark: fetch it again")


def _zip_members(path: str) -> Iterator[tuple[str, bool, int, int, int, int]]:
    """Yield the members of a .zip likewise. Raises BadZipFile."""
    with zipfile.ZipFile(path) as archive:
        for m in archive.infolist():
            kind = ENCRYPTED if m.flag_bits & 1 else m.compress_type  # APPNOTE.TXT 4.4.4
            yield m.filename, m.is_dir(), kind, m.header_offset, m.compress_size, m.CRC


def split_number(name: str) -> int:
    """Return the index in SPLITS of a name such as "val" or "testing_data", or NO_SPLIT."""
    word = re.sub("[-_ ]?(data|set|split|images|imgs)$", "", name.lower())
    return SPLIT_NUMBERS.get(word, NO_SPLIT)


def hidden(path: str) -> bool:
    """Whether a file or folder is ignored."""
    return any(part.startswith(".") or part in HIDDEN_NAMES for part in path.split("/"))


def read_class_folders(files: Iterable[str], folders: Iterable[str], where: str) -> Source:
    """Derive classes and splits from names relative to the source, with parts joined by "/".

    The images are in order of their names, folder by folder. Raises UsageError.
    """
    # "/" sorts before all other characters, so that the files of a folder stand together
    files = sorted(filterfalse(hidden, files), key=lambda name: name.replace("/", "\0"))
    within = [sys.intern(name.rpartition("/")[0]) for name in files]
    paths = [name.split("/") for name in {*within, *filterfalse(hidden, folders)} if name]
    top = 0  # number of nested top folders that hold nothing but one folder
    while len({path[top] for path in paths if path[top:]}) == 1 < max(map(len, paths)) - top:
        top += 1
    below: dict[str, set[str]] = {}  # names of the folders in each folder
    for path in paths:
        if path[top:]:
            below.setdefault(path[top], set()).update(path[top + 1 : top + 2])
    splits = {name: split_number(name) for name in below if below[name]}
    splits = {name: number for name, number in splits.items() if number != NO_SPLIT}
    is_split = len(splits) == len(below) and 0 in splits.values()
    alike = any(below.values()) and len({frozenset(names) for names in below.values()}) == 1
    if not below or (not is_split and len(below) > 1 and (splits or alike)):
        raise UsageError(
            f"{where} holds {len(files)} files in the folders ({listed(sorted(below))}): give one"
            " folder per class, within train, validation and test if there are splits, or a table"
            " of labels (--manifest)"
        )
    depth = top + is_split  # of the part that names the class
    classes = sorted(set[str]().union(*below.values()) if is_split else below)
    label_of = {name: label for label, name in enumerate(classes)}
    found = {  # label and split of each folder
        "/".join(path): (label_of[path[depth]], splits.get(path[top], NO_SPLIT))
        for path in paths
        if path[depth:]
    }
    names = [name for name, folder in zip(files, within, strict=True) if folder in found]
    images = (folder for folder in within if folder in found)
    labels, given = np.array([found[folder] for folder in images], np.int32).reshape(-1, 2).T
    counts = np.bincount(labels[given <= 0], minlength=len(classes))
    if empty := [name for name, count in zip(classes, counts, strict=True) if not count]:
        raise UsageError(f"class folders of {where} hold no file to train on: {listed(empty)}")
    no_groups, outside = np.full(len(names), NO_GROUP, np.int32), len(files) - len(names)
    given = given.astype(np.int8)
    return Source(names, tuple(classes), labels.copy(), given, no_groups, "folders", outside)


def read_manifest(path: str) -> Source:
    """Read a table of images, separated by commas, semicolons or tabs. Raises UsageError.

    Classes are in numerical order if all labels are whole numbers.
    """
    lines, split_of = dict[str, int](), dict[str, int]()  # of each image, of each group
    labels, groups, splits = list[str](), list[str](), array("b")
    try:
        with open(path, newline="", encoding="utf-8-sig", errors="surrogateescape") as file:
            header = file.readline()
            rows = csv.DictReader(chain([header], file), delimiter=max(",;\t", key=header.count))
            rows.fieldnames = names = [name.strip().lower() for name in rows.fieldnames or ()]
            if not {"path", "label"} <= {*names} or any(names.count(name) > 1 for name in COLUMNS):
                raise UsageError(
                    f"{path} has the columns {', '.join(names) or '(none)'}: give path and label,"
                    " and optionally split and group, each once"
                )
            needed = [name for name in COLUMNS if name in names]
            for row in rows:
                cells = {name: (row.get(name) or "").strip() for name in COLUMNS}
                image, where = normpath(cells["path"]), f"{path}: line {rows.line_num}"
                split, group = cells["split"], sys.intern(cells["group"])  # equal ones are one
                number = split_number(split)
                if any(row.get(None, ())):
                    raise UsageError(f"{where} has more cells than the header")
                if empty := [name for name in needed if not cells[name]]:
                    raise UsageError(f"{where} has no {empty[0]}")
                if image in lines:
                    raise UsageError(f"{where} names {image}, as line {lines[image]} does")
                if split and number == NO_SPLIT:
                    raise UsageError(f"{where} has the split {split!r}: give {listed(SPLITS)}")
                if group and split_of.setdefault(group, number) != number:
                    both = f"{SPLITS[split_of[group]]} and {SPLITS[number]}"
                    raise UsageError(f"{where}: group {group!r} is in both {both}")
                lines[image] = rows.line_num
                labels.append(sys.intern(cells["label"]))
                groups.append(group)
                splits.append(number)
    except (OSError, csv.Error) as error:
        why = getattr(error, "strerror", None) or brief(error)
        raise UsageError(f"manifest {path} cannot be read: {why}") from None
    if not lines:
        raise UsageError(f"{path} names no images")
    classes, numbers = _number(labels)
    grouped = _number(groups)[1] + (0 if "group" in names else NO_GROUP)
    return Source([*lines], classes, numbers, np.array(splits, np.int8), grouped, "manifest")


def _number(column: Sequence[str]) -> tuple[tuple[str, ...], np.ndarray]:
    """Return the distinct values in order, and the index (N,) int32 of each value among them."""
    distinct = sorted({*column})
    if all(value.isdecimal() for value in distinct):
        distinct.sort(key=lambda value: (int(value), value))
    numbers = {value: number for number, value in enumerate(distinct)}
    return tuple(distinct), np.array([numbers[value] for value in column], np.int32)
