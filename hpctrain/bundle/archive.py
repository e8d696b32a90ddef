"""The archive of Python: the files of a virtual environment and of the Python it was made from.

Its members begin with ``venv/`` and ``base/``. What no rank reads (headers, tests, static
libraries) is a link to the original. It can be extracted anywhere: only ``venv/pyvenv.cfg`` then
needs the line with "home".
"""

from __future__ import annotations

import compileall
import hashlib
import io
import os
import sys
import sysconfig
import tarfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

from hpctrain.errors import UsageError
from hpctrain.files import whole_file, writing
from hpctrain.text import counted, say

OWN = os.path.dirname(os.path.dirname(os.path.realpath(__file__)))  # hpctrain
BESIDE = os.path.dirname(OWN)  # on PYTHONPATH it comes last in the copy: hpctrain is in there
ROOT = "base" if sys.prefix == sys.base_prefix else "venv"  # the copy of sys.prefix
SYSTEM = ("/usr", "/usr/local")  # prefixes of a Python that is on each node already
LINKED = ("include", "tests", "test")  # folders that stay where they are, behind a link
PRELOAD = "import runpy\n"  # before python -m makes the current folder the first to look into
READERS = 32  # threads that look up files: each waits for a slow file system


class Entry(NamedTuple):
    """One file, or link, of the archive."""

    name: str  # in the archive
    path: str
    size: int
    mtime: int  # ns
    target: str = ""  # of a link

    @property
    def compiled(self) -> bool:
        """Whether Python made this file from another one."""
        return self.name.endswith(".pyc")


def make_archive(folder: Path) -> tuple[Path, str]:
    """Return the archive of this Python, made unless an equal one exists, and its key.

    The key is a hash of names, sizes and times of all files that Python did not make itself.
    Raises RunError if the archive cannot be written, UsageError if this Python cannot be copied.
    """
    entries = list_files()
    facts = (f"{e.name}\0{e.size}\0{e.mtime}\0{e.target}\n" for e in entries if not e.compiled)
    start = PRELOAD + "".join(f"{folder}\n" for folder in python_path() if folder == BESIDE)
    key = hashlib.sha256("".join([start, *facts]).encode("utf-8", "surrogateescape")).hexdigest()[
        :24
    ]
    owner = hashlib.sha256(sys.prefix.encode()).hexdigest()[:8]  # one archive an environment
    archive = folder.absolute() / f"python-{owner}-{key}.tar"
    if archive.exists():
        return archive, key
    say(f"hpctrain bundle: reading {counted(len(entries), 'file')} into {archive}", sys.stderr)
    packages = sysconfig.get_path("purelib")
    for root in {packages, sysconfig.get_path("platlib"), OWN}:
        compileall.compile_dir(root, quiet=2, workers=len(os.sched_getaffinity(0)))
    with writing(archive):
        folder.mkdir(parents=True, exist_ok=True)
        with (
            whole_file(archive, durable=False) as file,
            tarfile.open(fileobj=file, mode="w") as tar,
        ):
            for entry in list_files():
                _add(tar, entry)
            _add_text(tar, f"{ROOT}/{os.path.relpath(packages, sys.prefix)}/start.pth", start)
        for old in folder.glob(f"python-{owner}-*.tar"):
            if old.name != archive.name:
                old.unlink(missing_ok=True)
    return archive, key


def _add(tar: tarfile.TarFile, entry: Entry) -> None:
    """Add a file to the archive; scripts and pyvenv.cfg do not name the place they come from."""
    found = tar.gettarinfo(entry.path, entry.name)
    if entry.target:
        found.type, found.linkname, found.size = tarfile.SYMTYPE, entry.target, 0
        return tar.addfile(found)
    if found.islnk():  # a second name of the same file
        found.type, found.linkname, found.size = tarfile.REGTYPE, "", entry.size
    with open(entry.path, "rb") as file:
        if entry.name == "venv/pyvenv.cfg":
            kept = [line for line in file if not line.startswith((b"home", b"exec", b"command"))]
            content = b"".join(kept)
        elif entry.name.startswith("venv/bin/") and file.read(2) == b"#!":
            first, rest = file.readline(), file.read()
            ours = first.strip().startswith(f"{sys.prefix}/bin/python".encode())
            content = b"#!" + (b"/usr/bin/env python3\n" if ours else first) + rest
        elif entry.name.startswith("base/") and file.read(4) == b"\x7fELF":
            folder = os.path.relpath("base/lib", os.path.dirname(entry.name))
            content = _relocated(b"\x7fELF" + file.read(), f"$ORIGIN/{folder}")
        else:
            file.seek(0)
            return tar.addfile(found, file)
    found.size = len(content)
    return tar.addfile(found, io.BytesIO(content))


def _add_text(tar: tarfile.TarFile, name: str, text: str) -> None:
    found, content = tarfile.TarInfo(name), text.encode("utf-8", "surrogateescape")
    found.size = len(content)
    tar.addfile(found, io.BytesIO(content))


def python_path() -> list[str]:
    """Return the folders of PYTHONPATH."""
    return [part for part in os.environ.get("PYTHONPATH", "").split(os.pathsep) if part]


def _relocated(program: bytes, folder: str) -> bytes:
    """Return an ELF file that looks for libpython in `folder`, not in that of the original."""
    old = f"{sys.base_prefix}/lib".encode()
    if sys.base_prefix in SYSTEM or len(folder) > len(old):
        return program
    return program.replace(old + b"\0", folder.encode().ljust(len(old) + 1, b"\0"))


def list_files() -> list[Entry]:
    """Return all files of this Python, sorted by name.

    Raises UsageError if it is neither a virtual environment nor in a folder of its own.
    """
    prefix, base = sys.prefix, sys.base_prefix
    if prefix == base:
        if prefix in SYSTEM:
            raise UsageError(f"bundle copies virtual environments, not {prefix}: make one")
        return sorted(_walk({"base": prefix}, skipped={f"{prefix}/{n}" for n in ("pkgs", "envs")}))
    trees, skipped = {"venv": prefix}, set[str]()
    for name in ("stdlib", "platstdlib"):
        folder = sysconfig.get_path(name, vars={"platbase": sys.base_exec_prefix})
        trees[f"base/{os.path.relpath(folder, base)}"] = folder
        skipped |= {f"{folder}/{packages}" for packages in ("site-packages", "dist-packages")}
    for folder in sys.path:  # of an environment that sees the packages of its base
        if folder in skipped or (folder.startswith(f"{base}/") and folder.endswith("-packages")):
            skipped.discard(folder)
            trees[f"base/{os.path.relpath(folder, base)}"] = folder
    packages = sysconfig.get_path("purelib")
    if not OWN.startswith(f"{prefix}/"):  # installed editable, or on PYTHONPATH
        trees[f"venv/{os.path.relpath(packages, prefix)}/hpctrain"] = OWN
        skipped |= {str(path) for path in Path(packages).glob("__editable__*hpctrain*")}
    entries = {entry.name: entry for entry in _walk(trees, skipped)}
    executable = os.path.realpath(sys.executable)
    libraries = [] if base in SYSTEM else [*Path(base, "lib").glob("*.so*")]
    for path in (executable, *map(str, libraries)):
        name = f"base/{'bin' if path == executable else 'lib'}/{os.path.basename(path)}"
        entries[name] = _entry(name, path, os.lstat(path))
    for entry in list(entries.values()):
        if os.path.isabs(entry.target) and os.path.realpath(entry.path) == executable:
            target = f"../../base/bin/{os.path.basename(executable)}"  # of venv/bin/python3
            entries[entry.name] = entry._replace(target=target)
    return sorted(entries.values())


def _walk(trees: dict[str, str], skipped: set[str]) -> Iterator[Entry]:
    """Yield the files of `trees`, by their names in the archive, with many threads."""
    with ThreadPoolExecutor(READERS) as pool:
        folders = [*trees.items()]
        while folders:
            found = [*pool.map(lambda pair: _scan(pair[0], pair[1], skipped), folders)]
            folders = [pair for _, inner in found for pair in inner]
            for entries, _ in found:
                yield from entries


def _scan(name: str, folder: str, skipped: set[str]) -> tuple[list[Entry], list[tuple[str, str]]]:
    """Return the files of a folder, and its folders with their names."""
    files, folders = [], []
    with os.scandir(folder) as found:
        for each in found:
            inner = f"{name}/{each.name}"
            if each.path in skipped:
                continue
            if each.is_dir(follow_symlinks=False) and each.name not in LINKED:
                folders.append((inner, each.path))
            elif each.is_dir(follow_symlinks=False) or each.name.endswith(".a"):
                status = each.stat(follow_symlinks=False)
                files.append(Entry(inner, each.path, 0, status.st_mtime_ns, each.path))
            elif each.is_file() or each.is_symlink():
                files.append(_entry(inner, each.path, each.stat(follow_symlinks=False)))
    return files, folders


def _entry(name: str, path: str, status: os.stat_result) -> Entry:
    target = os.readlink(path) if os.path.islink(path) else ""
    return Entry(name, path, status.st_size, status.st_mtime_ns, target)
