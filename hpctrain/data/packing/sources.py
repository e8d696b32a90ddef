"""Detect the type of a source and list its images: a folder or an archive.

Archives are never extracted to paths. A .tgz is decompressed once into a scratch file, where every
member is a slice at a known offset; a .zip is read member by member. So a member's name cannot
lead out of a folder; archives with such names are an error all the same. Links are followed within
the archive only. Devices and pipes are listed as unreadable files.
"""

from __future__ import annotations

import os
import posixpath
import stat
import tarfile
import zipfile
from array import array
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryFile
from typing import IO

import numpy as np

from hpctrain.data.images import FILE_LIMIT
from hpctrain.data.packing.layout import (
    PLACED,
    ZIPPED,
    ImageSource,
    hidden,
    image_table,
    read_class_folders,
)
from hpctrain.data.packing.manifest import find_images, read_manifest
from hpctrain.data.packing.names import Names
from hpctrain.data.packing.scratch import (
    RATIO,
    ZipArchive,
    check_count,
    unzip,
)
from hpctrain.errors import UsageError
from hpctrain.text import brief

FOLDER, REGULAR, SOFT_LINK, HARD_LINK, OTHER, UNREADABLE = range(6)  # kinds of members
REASONS = {OTHER: "no regular file", UNREADABLE: "encrypted, or not compressed by deflate"}
HUGE = 2**61  # bytes; larger sizes are stored as this one
ENCRYPTED = 0x1  # flag of a member of a .zip (APPNOTE.TXT 4.4.4)
SMALL = 2**24  # bytes of an image file that any member of a .zip may expand to
ZIP_FACTS = [*PLACED, *ZIPPED]  # columns of one archive
GZIP, ZIP, HDF5 = b"\x1f\x8b", b"PK", b"\x89HDF\r\n\x1a\n"


class TarStream(tarfile.TarFile):
    """A .tar whose list of members, which it would keep in memory, can be cleared."""

    members: list[tarfile.TarInfo]


@contextmanager
def open_source(path: Path, scratch: Path, manifest: str | None = None) -> Iterator[ImageSource]:
    """List the source at `path`, for use in a ``with`` block.

    A .tgz is unzipped to a file in the folder `scratch`. It has no name, so it vanishes when this
    process ends, in whatever way. Raises UsageError (one line) if there is nothing to pack.
    """
    with TemporaryFile(dir=scratch) as unzipped:
        source = _listed(path, unzipped, manifest)
        if source.kind != "folder":  # whose files have sizes when they are read
            _leave_out_large(source)
        yield source


def _leave_out_large(source: ImageSource) -> None:
    sizes, limits = source.images["size"], np.full(len(source.images), FILE_LIMIT)
    if source.kind == "zip":
        sizes = np.maximum(sizes, source.images["compressed"])
        limits = np.minimum(limits, SMALL + RATIO * source.images["compressed"])
    large = np.flatnonzero(sizes > limits).tolist()
    source.leave_out({row: f"{sizes[row]:,} bytes; the limit is {limits[row]:,}" for row in large})


def _listed(path: Path, unzipped: IO[bytes], manifest: str | None) -> ImageSource:
    if path.suffix == ".csv" and path.is_file():
        return _folder(path.absolute().parent, str(path))
    if path.is_dir():
        return _folder(path, manifest)
    if not path.is_file():
        kind = "is no file or folder" if path.exists() else "does not exist"
        raise UsageError(
            f"source {path} {kind}: give a folder with a folder per class, .tgz, .zip,"
            " .csv, or flowers or digits by name; arrays are packed by hpctrain.write_pack"
        )
    with path.open("rb") as file:
        start = file.read(8)
    if start.startswith(ZIP):
        return _zip(path, manifest)
    if start.startswith(HDF5):
        raise UsageError(f"source {path} is an HDF5 file already: --check shows what it holds")
    if start.startswith(GZIP):
        unzip(path, unzipped)
        return _tar(path, unzipped, f"/proc/{os.getpid()}/fd/{unzipped.fileno()}", manifest)
    if tarfile.is_tarfile(path):
        with path.open("rb") as file:
            return _tar(path, file, str(path.resolve()), manifest)
    raise UsageError(
        f"source {path} is no .tgz, .tar, .zip or .csv file; arrays are packed by"
        " hpctrain.write_pack"
    )


def _source(
    path: Path, kind: str, root: str, names: Names, is_folder: np.ndarray, manifest: str | None
) -> tuple[ImageSource, np.ndarray]:
    """Make a source of the images among these names; return it and their indices (N,) in `names`.

    is_folder (n,) bool: the other names are files; of equal names the last one counts.
    """
    notes: list[str] = []
    if manifest:
        table = read_manifest(Path(manifest))
        if kind == "folder":
            names, order = table.paths, np.arange(len(table.paths))
        else:
            order = find_images(table, names, is_folder)
        classes, by = table.classes, "manifest"
        columns = dict(label=table.labels, split=table.splits, group=table.groups)
    else:
        order, new = names.sort()
        order = order[np.roll(new, -1)]  # the last one of equal names
        folders = (names[row] for row in order[is_folder[order]])
        files = order[~is_folder[order]]
        found = read_class_folders(names, files, folders, str(path))
        order, classes, by = found.order, found.classes, "folders"
        columns = dict(label=found.labels, split=found.splits)
        if found.ignored:
            notes.append(f"{found.ignored} image files outside the class folders were ignored")
    images = image_table(kind, names, order, **columns)
    name = path.resolve().name if kind == "folder" else path.name
    source = ImageSource(name, kind, root, classes, images, names.encoded, by, notes=notes)
    return source, order


def _folder(root: Path, manifest: str | None) -> ImageSource:
    """List the image files of a folder.

    If a manifest names them, the folder is not searched: missing files are noticed when read.
    """
    names, is_folder, bad = (Names(), bytearray(), []) if manifest else _walk(str(root))
    source, _ = _source(root, "folder", str(root), names, np.frombuffer(is_folder, bool), manifest)
    source.bad = [(name, why) for name, why in bad if not hidden(name.split("/"))]
    return source


def _walk(root: str) -> tuple[Names, bytearray, list[tuple[str, str]]]:
    """List the names below `root`, whether each is a folder, and other entries with a reason.

    Links are followed except in loops.
    """
    names, is_folder = Names(), bytearray()
    bad: list[tuple[str, str]] = []

    def enter(folder: str, above: tuple[tuple[int, int], ...]) -> None:
        with os.scandir(os.path.join(root, folder)) as entries:
            for entry in entries:
                name = f"{folder}/{entry.name}" if folder else entry.name
                broken = entry.is_symlink() and not os.path.exists(entry.path)  # or a loop
                if broken or not (entry.is_file() or entry.is_dir()):
                    if folder:
                        bad.append((name, "a link to nothing" if broken else "no regular file"))
                    continue
                names.append(name)
                is_folder.append(entry.is_dir())
                if entry.is_dir():
                    found = entry.stat()
                    if (found.st_dev, found.st_ino) not in above:
                        enter(name, (*above, (found.st_dev, found.st_ino)))

    try:
        top = os.stat(root)
        enter("", ((top.st_dev, top.st_ino),))
    except OSError as error:
        raise UsageError(f"{error.filename} cannot be listed: {error.strerror}") from None
    return names, is_folder, bad


def _tar(path: Path, file: IO[bytes], opened: str, manifest: str | None) -> ImageSource:
    """List members as slices of `file`; of members with equal names the last is used, as in tar."""
    names = Names()
    columns = array("b"), array("q"), array("q")  # kind, offset, size
    links: dict[int, str] = {}
    length = file.seek(0, os.SEEK_END)
    file.seek(0)
    try:
        with TarStream.open(fileobj=file, mode="r:") as archive:
            while (found := archive.next()) is not None:
                archive.members = []
                if name := _safe_name(found.name, path):
                    names.append(name)
                    facts = _kind(found), found.offset_data, min(found.size, HUGE)
                    for column, fact in zip(columns, facts, strict=True):
                        column.append(fact)
                    if facts[0] in (SOFT_LINK, HARD_LINK):
                        links[len(names) - 1] = found.linkname
                    check_count(f"source {path}", len(names))
    except (tarfile.TarError, EOFError, ValueError) as error:
        raise UsageError(f"source {path} is no whole tar archive: {brief(error)}") from None
    kinds, offsets, sizes = (np.frombuffer(column, column.typecode) for column in columns)
    source, targets = _source(path, "slices", opened, names, kinds == FOLDER, manifest)
    numbers = {name: number for number, name in enumerate(names)} if links else {}
    is_link = (kinds[targets] == SOFT_LINK) | (kinds[targets] == HARD_LINK)
    for row in np.flatnonzero(is_link).tolist():
        targets[row] = _follow(source.name_of(row), numbers, kinds, links)
    source.images["offset"], source.images["size"] = offsets[targets], sizes[targets]
    bad = np.flatnonzero((targets < 0) | (kinds[targets] != REGULAR)).tolist()
    link, other = "a link out of the archive", REASONS[OTHER]
    source.leave_out({row: link if targets[row] < 0 else other for row in bad})
    cut = np.flatnonzero(source.images["offset"] + source.images["size"] > length)
    if len(cut):
        name = source.name_of(int(cut[0]))
        raise UsageError(f"source {path} is cut short within {name}: fetch it again")
    return source


def _kind(member: tarfile.TarInfo) -> int:
    if member.issym() or member.islnk():
        return SOFT_LINK if member.issym() else HARD_LINK
    if member.isdir():
        return FOLDER
    return REGULAR if member.isreg() and not member.issparse() else OTHER


def _follow(name: str, numbers: dict[str, int], kinds: np.ndarray, links: dict[int, str]) -> int:
    """Follow links within the archive; return the number of the member, or -1 if there is none."""
    for _ in range(8):
        number = numbers.get(name, -1)
        if number not in links:
            return number
        base = posixpath.dirname(name) if kinds[number] == SOFT_LINK else ""
        name = posixpath.normpath(posixpath.join(base, links[number]))
    return -1


def _zip(path: Path, manifest: str | None) -> ImageSource:
    names, facts, kinds = Names(), np.zeros(0, ZIP_FACTS), bytearray()
    try:
        with ZipArchive(path) as file, zipfile.ZipFile(file) as archive:
            facts = np.zeros(len(archive.infolist()), ZIP_FACTS)
            for m in archive.infolist():
                if name := _safe_name(m.filename, path):
                    place = min(m.header_offset, HUGE), min(m.file_size, HUGE)
                    how = m.compress_type, min(m.compress_size, HUGE), m.CRC
                    facts[len(names)] = place + how
                    kinds.append(_zip_kind(m))
                    names.append(name)
    except (zipfile.BadZipFile, RuntimeError, OSError, ValueError) as error:
        raise UsageError(f"source {path} is no whole zip archive: {brief(error)}") from None
    kind = np.frombuffer(kinds, np.uint8)
    source, order = _source(path, "zip", str(path.resolve()), names, kind == FOLDER, manifest)
    for column in facts.dtype.names or ():
        source.images[column] = facts[column][order]
    bad = np.flatnonzero(kind[order] > REGULAR).tolist()
    source.leave_out({row: REASONS[int(kind[order[row]])] for row in bad})
    return source


def _zip_kind(member: zipfile.ZipInfo) -> int:
    if member.is_dir():
        return FOLDER
    if stat.S_IFMT(member.external_attr >> 16) not in (0, stat.S_IFREG):
        return OTHER
    known = member.compress_type in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED)
    return REGULAR if known and not member.flag_bits & ENCRYPTED else UNREADABLE


def _safe_name(name: str, archive: Path) -> str:
    """Return the name without "./". Raises UsageError if it leads out of the archive."""
    parts = [part for part in name.split("/") if part not in ("", ".")]
    if "\0" in name:
        raise UsageError(f"source {archive} has a name with a NUL byte, {name!r}: refused")
    if name.startswith("/") or ".." in parts:
        raise UsageError(f"source {archive} names a file outside of itself, {name!r}: refused")
    return "/".join(parts)
