"""Find out what a source is and list it: a folder, an archive, or arrays (``arrays.py``).

Nothing of an archive is ever unpacked to a path. A .tgz is unzipped once into a scratch file
without a name, where every member is a slice of known offset; a .zip is read member by member.
So names cannot lead out of a folder; an archive with names that try is refused all the same.
Links are followed within the archive only, devices and pipes are unreadable files like any other.
"""

from __future__ import annotations

import os
import posixpath
import stat
import tarfile
import zipfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import BinaryIO, NamedTuple

from hpctrain.data.images import FILE_LIMIT
from hpctrain.data.packing import arrays, npz
from hpctrain.data.packing.layout import Item, Source, arrange, hidden
from hpctrain.data.packing.scratch import RATIO, ZIP_ERRORS, Archive, Place, check_count, unzipped
from hpctrain.errors import UsageError, brief
from hpctrain.watchdog import doing

FOLDER, REGULAR, SOFT_LINK, HARD_LINK, OTHER = range(5)  # kinds of members
SMALL = 2**24  # bytes of an image file that may come of a few
GZIP, ZIP, HDF5 = b"\x1f\x8b", b"PK", b"\x89HDF\r\n\x1a\n"


class TarStream(tarfile.TarFile):
    """A .tar that need not keep all that it has read."""

    members: list[tarfile.TarInfo]


class Member(NamedTuple):
    """What is kept of a member of a .tar."""

    kind: int
    offset: int = 0
    size: int = 0
    link: str = ""


@contextmanager
def open_source(path: Path, scratch: Place) -> Iterator[Source]:
    """The listed source at `path`; scratch files go to `scratch`.

    Raises UsageError, one line, where there is nothing to pack.
    """
    with ExitStack() as stack:
        source = _listed(path, scratch, stack)
        source.items = [item for item in source.items if not _too_large(item, source)]
        yield source


def _too_large(item: Item, source: Source) -> bool:
    limit = FILE_LIMIT
    if item.packed:
        limit = min(limit, SMALL + RATIO * item.packed[2])
    if item.size > limit:
        source.bad.append((item.name, f"{item.size:,} bytes; the limit is {limit:,}"))
    return item.size > limit


def _listed(path: Path, scratch: Place, stack: ExitStack) -> Source:
    if path.is_dir():
        if pairs := arrays.find_idx(path):
            return arrays.idx_source(path.name, pairs, scratch, stack)
        return _folder(path)
    if not path.is_file():
        kind = "is no file or folder" if path.exists() else "does not exist"
        raise UsageError(
            f"source {path} {kind}: give a folder with a folder per class, .tgz, .zip, idx, .npz,"
            " or flowers or digits by name"
        )
    with path.open("rb") as file:
        start = file.read(8)
    if path.suffix == ".npz":
        return npz.npz_source(path, scratch, stack)
    if start.startswith(ZIP):
        return _zip(path)
    if start.startswith(HDF5):
        raise UsageError(f"source {path} is an HDF5 file already: --check shows what it holds")
    if arrays.is_idx(path):
        return arrays.idx_source(path.name, arrays.idx_pair(path), scratch, stack)
    if start.startswith(GZIP):
        return _tar(path, stack.enter_context(unzipped(path, scratch)))
    if tarfile.is_tarfile(path):
        return _tar(path, stack.enter_context(path.open("rb")))
    raise UsageError(f"source {path} is no .tgz, .tar, .zip, idx or .npz file")


def _folder(root: Path) -> Source:
    files, folders, bad = _walk(str(root))
    layout = arrange(files, folders, str(root))
    items = [Item(place.name, place.label, place.split) for place in layout.places]
    odd = [(name, why) for name, why in bad if not hidden(name.split("/"))]
    return Source(
        root.resolve().name, "folder", str(root), layout.classes, items, odd, _notes(layout.ignored)
    )


def _walk(root: str) -> tuple[list[str], list[str], list[tuple[str, str]]]:
    """Files, folders and what is neither, below `root`; links are followed, loops are not."""
    files: list[str] = []
    folders: list[str] = []
    bad: list[tuple[str, str]] = []

    def enter(folder: str, above: tuple[tuple[int, int], ...]) -> None:
        doing(f"listing {root}/{folder}")
        with os.scandir(os.path.join(root, folder)) as entries:
            for entry in entries:
                name = f"{folder}/{entry.name}" if folder else entry.name
                broken = entry.is_symlink() and not os.path.exists(entry.path)  # or to itself
                if broken or not (entry.is_file() or entry.is_dir()):
                    if folder:
                        bad.append((name, "a link to nothing" if broken else "no regular file"))
                elif entry.is_file():
                    files.append(name)
                else:
                    found = entry.stat()
                    folders.append(name)
                    if (found.st_dev, found.st_ino) not in above:
                        enter(name, (*above, (found.st_dev, found.st_ino)))

    try:
        top = os.stat(root)
        enter("", ((top.st_dev, top.st_ino),))
    except OSError as error:
        raise UsageError(f"{error.filename} cannot be listed: {error.strerror}") from None
    return files, folders, bad


def _tar(path: Path, file: BinaryIO) -> Source:
    """Members as slices of `file`; of members of one name the last one counts, as in tar."""
    members: dict[str, Member] = {}
    length = file.seek(0, os.SEEK_END)
    file.seek(0)
    try:
        with TarStream.open(fileobj=file, mode="r:") as archive:
            while (found := archive.next()) is not None:
                archive.members = []
                doing(f"listing {path}")
                name = _safe_name(found.name, path)
                if name:
                    members.pop(name, None)
                    members[name] = _member(found)
                    check_count(f"source {path}", len(members))
    except (tarfile.TarError, EOFError, ValueError) as error:
        raise UsageError(f"source {path} is no whole tar archive: {brief(error)}") from None
    files: dict[str, Member] = {}
    bad: dict[str, str] = {}
    for name, member in members.items():
        if member.kind == FOLDER:
            continue
        target = _follow(name, members)
        if target is None or target.kind != REGULAR:
            bad[name] = "no regular file" if target is not None else "a link out of the archive"
        elif target.offset + target.size > length:
            raise UsageError(f"source {path} is cut short within {name}: fetch it again")
        else:
            files[name] = target
    folders = [name for name, member in members.items() if member.kind == FOLDER]
    layout = arrange([*files, *bad], folders, str(path))
    items = [
        Item(p.name, p.label, p.split, 0, files[p.name].offset, files[p.name].size)
        for p in layout.places
        if p.name in files
    ]
    odd = [(p.name, bad[p.name]) for p in layout.places if p.name in bad]
    notes = _notes(layout.ignored)
    return Source(path.name, "slices", "", layout.classes, items, odd, notes, [file])


def _member(member: tarfile.TarInfo) -> Member:
    if member.issym() or member.islnk():
        kind = SOFT_LINK if member.issym() else HARD_LINK
        return Member(kind, link=member.linkname)
    if member.isdir():
        return Member(FOLDER)
    regular = member.isreg() and not member.issparse()
    return Member(REGULAR if regular else OTHER, member.offset_data, member.size)


def _follow(name: str, members: dict[str, Member]) -> Member | None:
    """The member itself, or where its links lead within the archive."""
    for _ in range(8):
        member = members.get(name)
        if member is None or member.kind not in (SOFT_LINK, HARD_LINK):
            return member
        base = posixpath.dirname(name) if member.kind == SOFT_LINK else ""
        name = posixpath.normpath(posixpath.join(base, member.link))
    return None


def _zip(path: Path) -> Source:
    try:
        with Archive(path) as file, zipfile.ZipFile(file) as archive:
            members = {_safe_name(m.filename, path): m for m in archive.infolist()}
    except (*ZIP_ERRORS, OSError, ValueError) as error:
        raise UsageError(f"source {path} is no whole zip archive: {brief(error)}") from None
    members.pop("", None)
    files = [name for name, member in members.items() if not member.is_dir()]
    folders = [name for name, member in members.items() if member.is_dir()]
    layout = arrange(files, folders, str(path))
    items: list[Item] = []
    odd: list[tuple[str, str]] = []
    for place in layout.places:
        member = members.pop(place.name)
        mode = stat.S_IFMT(member.external_attr >> 16)
        if mode not in (0, stat.S_IFREG):
            odd.append((place.name, "no regular file"))
        else:
            where = 0, member.header_offset, member.file_size
            packed = member.compress_type, member.flag_bits, member.compress_size, member.CRC
            items.append(Item(place.name, place.label, place.split, *where, packed))
    notes = _notes(layout.ignored)
    return Source(path.name, "zip", str(path.resolve()), layout.classes, items, odd, notes)


def _safe_name(name: str, archive: Path) -> str:
    """The name without "./", refused where it leads out of the archive."""
    parts = [part for part in name.split("/") if part not in ("", ".")]
    if name.startswith("/") or ".." in parts:
        raise UsageError(f"source {archive} names a file outside of itself, {name!r}: refused")
    return "/".join(parts)


def _notes(ignored: int) -> list[str]:
    return [f"{ignored} image files outside the class folders were ignored"] if ignored else []
