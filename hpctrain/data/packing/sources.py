"""Detect the type of a source and list its images: a folder or an archive.

Archives are never extracted to paths. A .tgz is decompressed once into a scratch file, where every
member is a slice at a known offset; a .zip is read member by member. Links in archives, devices and
pipes are listed as unreadable files.
"""

from __future__ import annotations

import gzip
import os
import shutil
import stat
import tarfile
import zipfile
import zlib
from array import array
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryFile
from typing import IO

import numpy as np

from hpctrain.data.packing.layout import (
    PLACED,
    ZIPPED,
    ImageSource,
    folder_by_folder,
    hidden,
    image_table,
    read_class_folders,
)
from hpctrain.data.packing.manifest import find_images, read_manifest, shortest
from hpctrain.errors import UsageError
from hpctrain.text import brief

FOLDER, REGULAR, OTHER, UNREADABLE = range(4)  # kinds of members
REASONS = {OTHER: "no regular file", UNREADABLE: "encrypted, or not compressed by deflate"}
ENCRYPTED = 0x1  # flag of a member of a .zip (APPNOTE.TXT 4.4.4)
BLOCK = 2**20
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
        yield _listed(path, unzipped, manifest)


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
    if start.startswith(ZIP) and path.suffix != ".npz":  # a .zip of arrays
        return _zip(path, manifest)
    if start.startswith(HDF5):
        raise UsageError(f"source {path} is an HDF5 file already: --check shows what it holds")
    if start.startswith(GZIP):
        _unzip(path, unzipped)
        return _tar(path, unzipped, f"/proc/{os.getpid()}/fd/{unzipped.fileno()}", manifest)
    if tarfile.is_tarfile(path):
        with path.open("rb") as file:
            return _tar(path, file, str(path.resolve()), manifest)
    raise UsageError(
        f"source {path} is no .tgz, .tar, .zip or .csv file; arrays are packed by"
        " hpctrain.write_pack"
    )


def _source(
    path: Path, kind: str, root: str, names: list[str], is_folder: np.ndarray, manifest: str | None
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
        order = folder_by_folder(names)
        folders = (names[row] for row in order[is_folder[order]])
        files = order[~is_folder[order]]
        found = read_class_folders(names, files, folders, str(path))
        order, classes, by = found.order, found.classes, "folders"
        columns = dict(label=found.labels, split=found.splits)
        if found.ignored:
            notes.append(f"{found.ignored} image files outside the class folders were ignored")
    images = image_table(kind, len(order), **columns)
    chosen = [names[row] for row in order.tolist()]
    name = path.resolve().name if kind == "folder" else path.name
    source = ImageSource(name, kind, root, classes, images, chosen, by, notes=notes)
    return source, order


def _folder(root: Path, manifest: str | None) -> ImageSource:
    """List the image files of a folder.

    If a manifest names them, the folder is not searched: missing files are noticed when read.
    """
    names, is_folder, bad = ([], bytearray(), []) if manifest else _walk(str(root))
    source, _ = _source(root, "folder", str(root), names, np.frombuffer(is_folder, bool), manifest)
    source.bad = [(name, why) for name, why in bad if not hidden(name.split("/"))]
    return source


def _walk(root: str) -> tuple[list[str], bytearray, list[tuple[str, str]]]:
    """List the names below `root`, whether each is a folder, and other entries with a reason.

    Links are followed except in loops.
    """
    names, is_folder = list[str](), bytearray()
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
    names: list[str] = []
    columns = array("b"), array("q"), array("q")  # kind, offset, size
    file.seek(0)
    try:
        with TarStream.open(fileobj=file, mode="r:") as archive:
            while (found := archive.next()) is not None:
                archive.members = []
                names.append(shortest(found.name.lstrip("/")))
                facts = _kind(found), found.offset_data, found.size
                for column, fact in zip(columns, facts, strict=True):
                    column.append(fact)
            file.seek(archive.offset)  # of the first block that is not a member
            if file.read(tarfile.BLOCKSIZE) != bytes(tarfile.BLOCKSIZE):
                raise tarfile.ReadError(f"no end mark after {names[-1]}: fetch it again")
    except (tarfile.TarError, EOFError, ValueError, OverflowError) as error:
        raise UsageError(f"source {path} is no whole tar archive: {brief(error)}") from None
    kinds, offsets, sizes = (np.frombuffer(column, column.typecode) for column in columns)
    source, order = _source(path, "slices", opened, names, kinds == FOLDER, manifest)
    source.images["offset"], source.images["size"] = offsets[order], sizes[order]
    _leave_out(source, kinds[order])
    return source


def _leave_out(source: ImageSource, kinds: np.ndarray) -> None:
    """Leave out images that are no readable files, by the kind (N,) of their member."""
    rows = np.flatnonzero(kinds > REGULAR).tolist()
    source.leave_out({row: REASONS[int(kinds[row])] for row in rows})


def _kind(member: tarfile.TarInfo) -> int:
    if member.isdir():
        return FOLDER
    return REGULAR if member.isreg() and not member.issparse() else OTHER


def _zip(path: Path, manifest: str | None) -> ImageSource:
    names, facts, kinds = list[str](), np.zeros(0, ZIP_FACTS), bytearray()
    try:
        with zipfile.ZipFile(path) as archive:
            facts = np.zeros(len(archive.infolist()), ZIP_FACTS)
            for m in archive.infolist():
                if name := shortest(m.filename.lstrip("/")):
                    place = m.header_offset, m.file_size
                    facts[len(names)] = *place, m.compress_type, m.compress_size, m.CRC
                    kinds.append(_zip_kind(m))
                    names.append(name)
    except (zipfile.BadZipFile, RuntimeError, OSError, ValueError, OverflowError) as error:
        raise UsageError(f"source {path} is no whole zip archive: {brief(error)}") from None
    kind = np.frombuffer(kinds, np.uint8)
    source, order = _source(path, "zip", str(path.resolve()), names, kind == FOLDER, manifest)
    for column in facts.dtype.names or ():
        source.images[column] = facts[column][order]
    _leave_out(source, kind[order])
    return source


def _zip_kind(member: zipfile.ZipInfo) -> int:
    if member.is_dir():
        return FOLDER
    if stat.S_IFMT(member.external_attr >> 16) not in (0, stat.S_IFREG):
        return OTHER
    known = member.compress_type in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED)
    return REGULAR if known and not member.flag_bits & ENCRYPTED else UNREADABLE


def _unzip(path: Path, target: IO[bytes]) -> None:
    """Write the contents of the .gz file `path` to `target`. Raises UsageError."""
    try:
        with gzip.open(path) as stream:
            shutil.copyfileobj(stream, target, BLOCK)
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise UsageError(
            f"source {path} is cut short or corrupt ({brief(error)}): fetch it again"
        ) from None
    target.flush()
