"""List the image files of a folder or an archive, alike for all subcommands (``slices.py`` reads
them).

A listing holds every file that is neither hidden nor made by an operating system (`SYSTEM_NAMES`),
whatever its name ends with: whether it is an image is seen when it is read. Links in a folder are
followed, except to a folder that contains them. Archives are never extracted: a member of a .tar is
a slice of its bytes, and so is one of a .zip, stored or deflated; a compressed .tar is decompressed
once into a scratch file. Names of members are relative to the archive, even if they begin with "/"
or "..".
"""

from __future__ import annotations

import errno
import os
import re
import shutil
import stat
import struct
import tarfile
import unicodedata
import zipfile
from array import array
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from importlib import import_module
from os.path import normpath
from pathlib import Path
from typing import IO, NamedTuple

import numpy as np

from hpctrain.data.formats import name_format
from hpctrain.data.images import BadImage
from hpctrain.data.slices import ENCRYPTED, LINK, PLAIN, SPECIAL, open_regular
from hpctrain.errors import UsageError
from hpctrain.text import brief, counted, listed_names

#: Files and folders that systems leave in any folder, in lower case. Further ones begin with ".",
#: such as .DS_Store, .Trash-1000 and .ipynb_checkpoints, or end with SYSTEM_ENDINGS.
SYSTEM_NAMES = frozenset(
    (
        *("__macosx", "icon\r", "network trash folder", "temporary items"),  # macOS
        *("thumbs.db", "ehthumbs.db", "ehthumbs_vista.db", "desktop.ini", "picasa.ini"),  # Windows
        *("$recycle.bin", "system volume information", "found.000"),
        *("@eadir", "@tmp", "#recycle", "#snapshot"),  # Synology
        *("@recycle", "@recently-snapshot", "@__thumb", "~snapshot"),  # QNAP, NetApp
        *("lost+found", "lost.dir", "__pycache__"),  # Linux, Android, Python
    )
)
SYSTEM_ENDINGS = (
    *(":zone.identifier", ":zone.identifier:$data", ":encryptable", ":afp_afpinfo"),  # Windows
    *("@synoeastream", "@synoresource"),  # Synology
)
COMPRESSED = {b"\x1f\x8b": "gzip", b"BZh": "bz2", b"\xfd7zXZ\0": "lzma"}  # modules that read them
ZIP = (b"PK\x03\x04", b"PK\x05\x06")  # the second begins an empty archive
HDF5_START = b"\x89HDF\r\n\x1a\n"
MATLAB_BYTES = 512  # of the header of MATLAB 7.3, which HDF5 follows
ARCHIVES = (".zip", ".tar", ".tgz", ".gz", ".bz2", ".xz", ".zst", ".7z", ".rar")


class Member(NamedTuple):
    """A member of an archive: its name, and `Slice` from `kind` on."""

    name: str
    is_folder: bool
    place: tuple[int, int, int, int]
    same_as: str = ""  # the file that a hard link names


@dataclass
class Listing:
    """The M files of a folder or an archive."""

    kind: str  # "folder", "tar" or "zip"
    root: str  # path of the folder, or of the file that holds the members
    names: list[str] = field(default_factory=list)  # files that are not hidden, in their order
    folders: list[str] = field(default_factory=list)
    hidden: set[str] = field(default_factory=set)  # files and folders that are not in `names`
    notes: list[str] = field(default_factory=list)  # on what is left out, or named otherwise
    rows: dict[str, int] = field(default_factory=dict)  # of all members of an archive, by name
    places: np.ndarray = field(default_factory=lambda: np.empty((0, 4), np.int64))  # of these rows

    def add_note(self, text: str, names: Iterable[str], noun: str = "file") -> None:
        """Add a line such as "text: 3 files (a, b, c)", if there are names."""
        names = sorted(names)
        if names:
            self.notes.append(f"{text}: {counted(len(names), noun)} ({listed_names(names)})")

    def note_hidden(self) -> None:
        """Add the note on hidden files and folders."""
        self.add_note("left out, hidden or of the system", self.hidden, "name")


def by_folder(name: str) -> str:
    """Return the key that sorts files by name, so that those of a folder stand together."""
    return name.replace("/", "\0")  # which sorts before all other characters


def is_hidden(name: str) -> bool:
    """Whether a file or folder of this name, without a path, is left out of all listings."""
    name = name.lower()
    return name.startswith(".") or name in SYSTEM_NAMES or name.endswith(SYSTEM_ENDINGS)


def list_folder(path: str) -> Listing:
    """List the files below a folder. Raises UsageError if a folder cannot be read."""
    listing = Listing("folder", path)
    loops = list[str]()
    waiting: list[tuple[str, tuple[tuple[int, int], ...]]] = [("", ())]  # and folders above it
    while waiting:
        inside, above = waiting.pop()
        try:
            status = os.stat(os.path.join(path, inside))
            identity = status.st_dev, status.st_ino
            if identity in above:
                loops.append(inside)
                continue
            if inside:
                listing.folders.append(inside.rstrip("/"))
            with os.scandir(os.path.join(path, inside)) as entries:
                for entry in entries:
                    name = inside + entry.name
                    if is_hidden(entry.name):
                        listing.hidden.add(name)
                    elif entry.is_dir():
                        waiting.append((f"{name}/", (*above, identity)))
                    else:
                        listing.names.append(name)
        except OSError as error:
            raise UsageError(f"{error.filename} cannot be listed: {error.strerror}") from None
    listing.names.sort(key=by_folder)
    listing.add_note("left out, links to a folder that contains them", loops, "link")
    return listing


# Archives


def is_archive(path: str) -> bool:
    """Whether a file begins as an archive or a compressed file does. Raises OSError."""
    start = read_start(path)
    return start.startswith((*ZIP, *COMPRESSED)) or start[257:262] == b"ustar"


def is_hdf5(path: str) -> bool:
    """Whether a file begins as HDF5 does, also behind the header of MATLAB 7.3. Raises OSError."""
    descriptor, _ = open_regular(path)
    try:
        return HDF5_START in (os.pread(descriptor, 8, 0), os.pread(descriptor, 8, MATLAB_BYTES))
    finally:
        os.close(descriptor)


def list_archive(path: Path, scratch: IO[bytes]) -> Listing:
    """List an archive; a compressed .tar is decompressed into the file `scratch`.

    Raises UsageError for what is not a sound archive.
    """
    listing = Listing("tar", str(path.resolve()))
    try:
        start = read_start(str(path))
        for magic, module in COMPRESSED.items():
            if start.startswith(magic):
                with import_module(module).open(path) as stream:
                    shutil.copyfileobj(stream, scratch, 2**20)
                scratch.flush()
                listing.root = f"/proc/{os.getpid()}/fd/{scratch.fileno()}"
                start = read_start(listing.root)
                break
        if start.startswith(b"PK"):
            listing.kind = "zip"
            _add_members(listing, _zip_members(listing))
        else:
            _add_members(listing, _tar_members(listing.root))
    except (MemoryError, UsageError):
        raise
    except Exception as error:  # corrupt archives raise many types
        if getattr(error, "errno", None) in (errno.ENOSPC, errno.EDQUOT):  # of `scratch`
            raise
        why = getattr(error, "strerror", None) or brief(error)
        if isinstance(error, tarfile.ReadError) and not listing.rows and not listing.folders:
            why = f"it is {name_format(start) or f'none of them ({why})'}"
        raise UsageError(
            f"source {path} cannot be read as a folder, archive (.tar, .tgz, .zip) or table"
            f" (.csv, .tsv, .txt): {why}"
        ) from None
    return listing


def _add_members(listing: Listing, members: Iterable[Member]) -> None:
    """Add the members of an archive to its listing; of equal names the last is taken."""
    fields = array("q")
    repeated = set[str]()
    hidden_within = dict[str, str]()  # by folder: the part of its path that is hidden
    for member in members:
        name = _inside(member.name)
        if member.is_folder:
            if name != ".":
                listing.folders.append(name)
            continue
        if name in listing.rows:
            repeated.add(name)
        place = member.place
        if member.same_as:
            row = listing.rows.get(_inside(member.same_as))
            if row is not None:
                kind, offset, size, crc32 = fields[4 * row : 4 * row + 4]
                place = (kind, offset, size, crc32)
        listing.rows[name] = len(fields) // 4
        fields.extend(place)
    for name in sorted(listing.rows, key=by_folder):
        folder, _, last = name.rpartition("/")
        if folder not in hidden_within:
            hidden_within[folder] = _hidden_part(folder)
        if hidden_within[folder]:
            listing.hidden.add(hidden_within[folder])
        elif is_hidden(last):
            listing.hidden.add(name)
        else:
            listing.names.append(name)
    listing.folders = [name for name in listing.folders if not _hidden_part(name)]
    listing.places = np.frombuffer(fields, np.int64).reshape(-1, 4)
    listing.add_note("names that occur more than once, the last is taken", repeated)


def _inside(name: str) -> str:
    """Return the name of a member relative to the archive."""
    name = normpath(name.lstrip("/"))
    while name.startswith("../"):
        name = name[3:]
    return name


def _hidden_part(path: str) -> str:
    """Return a path up to its first hidden part, or "" if none is."""
    parts = path.split("/")
    for number, part in enumerate(parts, 1):
        if is_hidden(part):
            return "/".join(parts[:number])
    return ""


def _tar_members(path: str) -> Iterator[Member]:
    """Yield the members of a .tar. Raises TarError."""
    with open(path, "rb") as file, tarfile.TarFile.open(fileobj=file, mode="r:") as archive:
        while (m := archive.next()) is not None:
            archive.members = []  # type: ignore[attr-defined]  # it would keep them in memory
            place = (PLAIN, m.offset_data, m.size, 0)
            if m.issym() or m.islnk():
                place = (LINK, 0, 0, 0)
            elif not m.isreg() or m.issparse():
                place = (SPECIAL, 0, 0, 0)
            yield Member(
                name=m.name,
                is_folder=m.isdir(),
                place=place,
                same_as=m.linkname if m.islnk() else "",
            )
        if not archive.offset:
            raise tarfile.ReadError("empty")
        file.seek(archive.offset)  # the first block that is not a member
        if file.read(tarfile.BLOCKSIZE) != bytes(tarfile.BLOCKSIZE):
            raise tarfile.ReadError("it has no end mark: fetch it again")
        while block := file.read(2**20):
            if block.strip(b"\0"):
                raise tarfile.ReadError(
                    "it goes on behind its end mark, as joined archives do: unpack it with"
                    " tar --ignore-zeros, and give the folder"
                )


def _zip_members(listing: Listing) -> Iterator[Member]:
    r"""Yield the members of a .zip; "\" in their names separates folders. Raises BadZipFile."""
    guessed = list[str]()
    unknown = list[str]()
    if not zipfile.is_zipfile(listing.root):
        raise zipfile.BadZipFile("its end is missing: fetch it again, or join its parts")
    with zipfile.ZipFile(listing.root) as archive:
        for m in archive.infolist():
            name = m.filename
            in_utf8 = _unicode_path(m)
            if in_utf8:
                name = in_utf8
            elif not m.flag_bits & 0x800 and not name.isascii():  # APPNOTE.TXT 4.4.4, bit 11
                try:
                    name = name.encode("cp437").decode()  # as macOS writes them
                    guessed.append(name)
                except UnicodeError:
                    unknown.append(name)
            name = name.replace("\\", "/")  # which 4.4.17.1 forbids, and letters of drives
            name = re.sub("^[A-Za-z]:/", "", name)
            kind = m.compress_type
            if m.flag_bits & 1:
                kind = ENCRYPTED
            if stat.S_ISLNK(m.external_attr >> 16):
                kind = LINK
            yield Member(
                name=name,
                is_folder=name.endswith("/"),
                place=(kind, m.header_offset, m.compress_size, m.CRC),
            )
    listing.add_note("names without a flag that says so are read as UTF-8", guessed)
    listing.add_note("names that are not UTF-8 are read as code page 437", unknown)


def _unicode_path(member: zipfile.ZipInfo) -> str:
    """Return the name in UTF-8 that WinZip and Info-ZIP add to that of a code page, or ""."""
    extra = member.extra
    while len(extra) > 9:  # APPNOTE.TXT 4.6.9: version, CRC-32 of the other name, this name
        kind, size = struct.unpack_from("<HH", extra)
        if kind == 0x7075:
            return extra[9 : 4 + size].decode("utf-8", "replace")
        extra = extra[4 + size :]
    return ""


# Tables name files


class FileFinder:
    r"""Finds the files of a folder or an archive that a table names.

    A table may write them with "\\", or with accents in another normalization of Unicode.
    """

    def __init__(self, root: str, rows: Mapping[str, int] | None = None) -> None:
        """Look in the folder `root`, or among the members `rows` of an archive."""
        self._root = root
        self._rows = rows
        self._by_form: dict[str, str] = {}
        self._entries: dict[str, dict[str, list[str]]] = {}  # of folders: names by NFC
        if rows is not None:
            self._by_form = {unicodedata.normalize("NFC", name): name for name in rows}

    def find(self, path: str) -> str:
        """Return the name of a file, which is `path` where no other file is meant."""
        plain = normpath(path)
        if path.isascii() and "\\" not in path:
            return plain
        for name in (plain, normpath(path.replace("\\", "/"))):
            if self.has(name):
                return name
            similar = self._find_form(unicodedata.normalize("NFC", name))
            if similar:
                return similar
        return plain

    def has(self, name: str) -> bool:
        """Whether there is a file of exactly this name."""
        if self._rows is not None:
            return name in self._rows
        return os.path.lexists(os.path.join(self._root, name))

    def _find_form(self, name: str) -> str:
        """Return the file whose path has this NFC, or ""."""
        if self._rows is not None:
            return self._by_form.get(name, "")
        paths = [""]
        if name.startswith("/"):
            paths = ["/"]
        for part in name.strip("/").split("/"):
            paths = [os.path.join(p, same) for p in paths for same in self._same_form(p, part)]
        return next(filter(self.has, paths), "")

    def _same_form(self, folder: str, part: str) -> list[str]:
        """Return the names in a folder that have this NFC; the name itself if there is none."""
        if folder not in self._entries:
            self._entries[folder] = {}
            with suppress(OSError):
                for name in os.listdir(os.path.join(self._root, folder)):
                    form = unicodedata.normalize("NFC", name)
                    self._entries[folder].setdefault(form, []).append(name)
        return self._entries[folder].get(part, [part])


def read_start(path: str) -> bytes:
    """Return the first block of a regular file. Raises OSError."""
    try:
        descriptor, _ = open_regular(path)
    except BadImage as error:
        raise OSError(str(error)) from None
    try:
        return os.pread(descriptor, tarfile.BLOCKSIZE, 0)
    finally:
        os.close(descriptor)
