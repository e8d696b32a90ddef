"""List the images of a source, with their classes and splits: a folder, an archive or a manifest.

Archives are never extracted. A .tgz is decompressed once into a scratch file, where every member is
a slice of bytes; members of a .zip are slices, too, stored or deflated. What cannot be read, such
as a link in an archive, is listed like an image and found to be bad when it is read.

Classes and splits follow from the names of files alone: hidden files (``.name``, ``__MACOSX``) and
a single top folder are skipped; every folder is a class, and the files in it at any depth are its
images; if all folders have names of splits (train, val, testing_data, …: SPLIT_FOLDER) and hold
class folders, they are the splits. Or a manifest says it, a CSV file with the columns ``path``
(relative to the source, or absolute for files of a folder), ``label``, and optionally ``split`` and
``group`` (images of one group, such as one patient, are never divided between splits).
"""

from __future__ import annotations

import csv
import gzip
import os
import re
import shutil
import sys
import tarfile
import zipfile
import zlib
from array import array
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from io import FileIO
from itertools import chain, filterfalse, groupby
from pathlib import Path
from tempfile import TemporaryFile
from typing import IO, NamedTuple

import numpy as np

from hpctrain.data.images import SUFFIXES, BadImage
from hpctrain.data.pack import ALIASES, SPLITS
from hpctrain.errors import UsageError
from hpctrain.text import brief, listed

NAMES = "|".join(f"(?P<{split}>{'|'.join(names)})" for split, names in ALIASES.items())
SPLIT_FOLDER = re.compile(f"(?:{NAMES})(?:[-_ ]?(?:data|set|split|images|imgs))?", re.IGNORECASE)
HIDDEN_NAMES = ("__MACOSX", "Thumbs.db", "desktop.ini")
COLUMNS = ("path", "label", "split", "group")  # of a manifest
NO_SPLIT = NO_GROUP = -1
PLAIN, STORED, DEFLATED, UNREADABLE = range(4)  # kinds of slices
GZIP, ZIP, OTHER_COMPRESSION = b"\x1f\x8b", b"PK", (b"BZh", b"\xfd7zXZ")


class Slice(NamedTuple):
    """Where an image file is: a file, or `size` bytes of an archive from `offset` on.

    There, a member of a .zip (STORED or DEFLATED) has its local header, which comes in addition.
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
    ignored: int = 0  # image files outside of class folders
    name: str = ""
    kind: str = ""  # "folder", "tar" or "zip"
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


def read_files(slices: list[Slice]) -> Iterator[bytes | BadImage]:
    """Yield the bytes of each image file, or why it cannot be read; an archive is opened once."""
    for path, parts in groupby(slices, lambda part: part.path):
        with ExitStack() as opened:
            file = None
            for part in parts:
                try:
                    file = file or opened.enter_context(FileIO(path, opener=_open_at_once))
                    yield _read(file, part)
                except BadImage as error:
                    yield error
                except (OSError, ValueError, zlib.error) as error:
                    yield BadImage(getattr(error, "strerror", None) or str(error))


def _open_at_once(path: str, flags: int) -> int:
    """Open a file; a named pipe does not wait for a writer, and is read as an empty file."""
    return os.open(path, flags | os.O_NONBLOCK)


def _read(file: FileIO, part: Slice) -> bytes:
    """Read an image file. Raises BadImage, OSError and zlib.error."""
    if part.kind == UNREADABLE:
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
    if part.kind == DEFLATED:
        data = zlib.decompress(data, -zlib.MAX_WBITS)
    if part.kind != PLAIN and zlib.crc32(data) != part.crc32:
        raise BadImage("the archive is damaged: CRC-32 differs")
    return data


@contextmanager
def open_source(path: Path, scratch: Path, manifest: str | None = None) -> Iterator[Source]:
    """List the source at `path`, for use in a ``with`` block.

    A .tgz is unzipped to a file in the folder `scratch`. It has no name, so it vanishes when this
    process ends, in whatever way. Raises UsageError (one line) if there is nothing to pack.
    """
    if path.suffix == ".csv" and path.is_file():
        path, manifest = path.absolute().parent, str(path)
    with TemporaryFile(dir=scratch) as unzipped:
        yield _list_source(path, unzipped, manifest)


def _list_source(path: Path, unzipped: IO[bytes], manifest: str | None) -> Source:
    rows, kind, root = dict[str, int](), "folder", str(path)
    files: Iterable[str] = rows
    folders: Iterable[str] = ()
    if not path.is_dir():
        kind, root = _open_archive(path, unzipped)
        folders, places = _list_members(path, kind, root, rows)
    elif not manifest:  # else missing files are noticed when they are read
        files, folders = _walk(root)
    source = read_manifest(manifest) if manifest else read_class_folders(files, folders, str(path))
    source.name, source.kind, source.root = path.resolve().name, kind, root
    if kind != "folder":
        source.name = path.name
        if missing := [name for name in source.names if name not in rows]:
            raise UsageError(
                f"{manifest} names {len(missing):,} images that the archive does not hold,"
                f" such as {missing[0]}"
            )
        source.places = places[[rows[name] for name in source.names]]
    return source


def _walk(root: str) -> tuple[list[str], list[str]]:
    """List the files and the folders below `root` by name. Links are followed except in loops."""
    files, folders = list[str](), list[str]()

    def refuse(error: OSError) -> None:
        raise UsageError(f"{error.filename} cannot be listed: {error.strerror}") from None

    for folder, below, names in os.walk(root, onerror=refuse, followlinks=True):
        inside, name = f"{os.path.realpath(folder)}/", os.path.relpath(folder, root)
        real = {each: os.path.realpath(os.path.join(folder, each)) for each in below}
        below[:] = [each for each in below if not inside.startswith(f"{real[each]}/")]
        files += (shortest(f"{name}/{each}") for each in names)
        folders += (shortest(f"{name}/{each}") for each in below)
    return files, folders


def _open_archive(path: Path, unzipped: IO[bytes]) -> tuple[str, str]:
    """Return the kind of an archive and the path by which its members are read.

    Raises UsageError.
    """
    try:
        with path.open("rb") as file:
            start = file.read(8)
    except OSError as error:
        raise UsageError(
            f"source {path} cannot be read: {error.strerror}; give a folder with a folder per"
            " class, .tgz, .zip, .csv, or flowers or digits by name"
        ) from None
    if start.startswith(GZIP):
        try:
            with gzip.open(path) as stream:
                shutil.copyfileobj(stream, unzipped, 2**20)
        except (EOFError, zlib.error, gzip.BadGzipFile) as error:
            raise UsageError(
                f"source {path} is cut short or corrupt ({brief(error)}): fetch it again"
            ) from None
        unzipped.flush()
        return "tar", f"/proc/{os.getpid()}/fd/{unzipped.fileno()}"
    is_zip = start.startswith(ZIP) and path.suffix != ".npz"  # a .zip of arrays
    is_compressed = start.startswith(OTHER_COMPRESSION)
    if is_compressed or not (is_zip or tarfile.is_tarfile(path)):
        hint = "arrays are packed by hpctrain.write_pack"
        hint = "decompress it first" if is_compressed else hint
        raise UsageError(f"source {path} is not a .tgz, .tar, .zip or .csv file: {hint}")
    return "zip" if is_zip else "tar", str(path.resolve())


def _list_members(
    path: Path, kind: str, opened: str, rows: dict[str, int]
) -> tuple[list[str], np.ndarray]:
    """Add the row of each file in an archive to `rows`, by name; return folders and places (M, 4).

    Of equal names the last one counts, as in tar. Raises UsageError.
    """
    folders, fields = list[str](), array("q")
    try:
        for name, is_folder, *place in (_tar_members if kind == "tar" else _zip_members)(opened):
            name = shortest(name.lstrip("/"))
            if is_folder:
                folders.append(name)
            else:
                rows[name] = len(fields) // 4
                fields.extend(place)
    except (tarfile.TarError, zipfile.BadZipFile, EOFError, OSError, ValueError) as error:
        raise UsageError(f"source {path} is not a whole {kind} archive: {brief(error)}") from None
    return folders, np.frombuffer(fields, np.int64).reshape(-1, 4)


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
    kinds = {zipfile.ZIP_STORED: STORED, zipfile.ZIP_DEFLATED: DEFLATED}
    with zipfile.ZipFile(path) as archive:
        for m in archive.infolist():
            is_encrypted = m.flag_bits & 1  # APPNOTE.TXT 4.4.4
            kind = UNREADABLE if is_encrypted else kinds.get(m.compress_type, UNREADABLE)
            yield m.filename, m.is_dir(), kind, m.header_offset, m.compress_size, m.CRC


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


def read_class_folders(files: Iterable[str], folders: Iterable[str], where: str) -> Source:
    """Derive classes and splits from names relative to the source, with parts joined by "/".

    The images are in order of their names, folder by folder. Raises UsageError if there are no
    class folders, if one is empty, or if they look like splits.
    """
    # "/" sorts before all other characters, so that the files of a folder stand together
    files = sorted(filterfalse(hidden, files), key=lambda name: name.replace("/", "\0"))
    within = [sys.intern(name.rpartition("/")[0]) for name in files]
    paths = [name.split("/") for name in {*within, *filterfalse(hidden, folders)} if name]
    top = 0  # number of nested top folders that hold nothing but one folder
    while len({path[top] for path in paths if path[top:]}) == 1 < max(map(len, paths)) - top:
        top += 1
    below: dict[str, set[str]] = {}
    for path in paths:
        if path[top:]:
            below.setdefault(path[top], set()).update(path[top + 1 : top + 2])
    if not below:
        raise UsageError(
            f"{where} holds {len(files)} files but no class folders: expected one folder per"
            f" class, as in {where}/CLASS/IMAGE, or a table of labels (--manifest)"
        )
    splits = _split_folders(below, where)
    depth = top + bool(splits)  # of the part that names the class
    classes = sorted(set[str]().union(*below.values()) if splits else below)
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
        raise UsageError(
            f"{len(empty)} of {len(classes)} class folders of {where} hold no file to train on:"
            f" {listed(empty)}; fill or remove them"
        )
    others = (name for name, folder in zip(files, within, strict=True) if folder not in found)
    ignored = sum(name.lower().endswith(SUFFIXES) for name in others)
    no_groups = np.full(len(names), NO_GROUP, np.int32)
    given = given.astype(np.int8)
    return Source(names, tuple(classes), labels.copy(), given, no_groups, "folders", ignored)


def _split_folders(below: Mapping[str, set[str]], where: str) -> dict[str, int]:
    """Return folder -> split if the folders are splits that hold class folders, else {}.

    Raises UsageError if they probably are splits, but not all of them have known names.
    """
    numbers = {head: split_number(head) for head in sorted(below) if below[head]}
    known = {head: number for head, number in numbers.items() if number is not None}
    if len(known) == len(below) and 0 in known.values():
        return known
    same = len(numbers) > 0 and len({frozenset(names) for names in below.values()}) == 1
    if len(below) > 1 and (known or same):
        what = f"some names of splits ({', '.join(known)})" if known else "the same subfolders"
        raise UsageError(
            f"the folders of {where} ({listed(sorted(below))}) have {what}: name split"
            " folders train, validation and test, and move others away; if these folders are"
            " classes, give labels by a table (--manifest)"
        )
    return {}


def read_manifest(path: str) -> Source:
    """Read a table of images, separated by commas, semicolons or tabs.

    Classes are in numerical order if all labels are whole numbers. Raises UsageError with the line
    in its message.
    """
    lines, split_of = dict[str, int](), dict[str, int]()  # of each image, of each group
    columns: dict[str, list[str]] = {name: [] for name in COLUMNS[1:]}
    splits = array("b")
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
            for row in rows:
                cells = {name: (row.get(name) or "").strip() for name in COLUMNS}
                image, where = shortest(cells["path"]), f"{path}: line {rows.line_num}"
                number = split_number(cells["split"]) if cells["split"] else NO_SPLIT
                if any(row.get(None, ())):
                    raise UsageError(f"{where} has more cells than the header")
                if not (image and cells["label"]):
                    raise UsageError(f"{where} has no {'label' if image else 'path'}")
                if image in lines:
                    raise UsageError(f"{where} names {image}, as line {lines[image]} does")
                if number is None:
                    known = ", ".join(SPLITS)
                    raise UsageError(f"{where} has the split {cells['split']!r}: give {known}")
                group = cells["group"]
                if group and number >= 0 and split_of.setdefault(group, number) != number:
                    both = f"{SPLITS[split_of[group]]} and {SPLITS[number]}"
                    raise UsageError(f"{where}: group {group!r} is in both {both}")
                lines[image] = rows.line_num
                splits.append(number)
                for name, column in columns.items():
                    column.append(sys.intern(cells[name]))  # equal texts are one object
    except (OSError, csv.Error) as error:
        why = getattr(error, "strerror", None) or brief(error)
        raise UsageError(f"manifest {path} cannot be read: {why}") from None
    if not lines:
        raise UsageError(f"{path} names no images")
    for name in ("split", "group"):
        if "" in columns[name] and any(columns[name]):
            line = [*lines.values()][columns[name].index("")]
            raise UsageError(f"{path}: line {line} has no {name}, other lines have one")
    classes, labels = _number(columns["label"])
    groups = _number(columns["group"])[1] + (0 if any(columns["group"]) else NO_GROUP)
    return Source([*lines], classes, labels, np.array(splits, np.int8), groups, "manifest")


def _number(column: Sequence[str]) -> tuple[tuple[str, ...], np.ndarray]:
    """Return the distinct values in order, and the index (N,) int32 of each value among them."""
    distinct = sorted({*column})
    if all(value.isdecimal() for value in distinct):
        distinct.sort(key=lambda value: (int(value), value))
    numbers = {value: number for number, value in enumerate(distinct)}
    return tuple(distinct), np.array([numbers[value] for value in column], np.int32)
