"""Many HDF5 files whose samples are rows of one array, in the order of the files' names.

``--data 'scans/*.h5'`` names them by a pattern. `FileSet` says in a few arrays, which rank 0 sends
to all, where each file has its rows (``file_index.py`` makes them). `FileSetRows` reads rows: files
are opened when they are needed, and only so many are open at a time.
"""

from __future__ import annotations

import glob
import hashlib
import json
import os
import threading
from collections import OrderedDict
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from hpctrain.cores import make_pool
from hpctrain.data.stored import File, OffsetRows, RowReader, Stored
from hpctrain.errors import RunError, UsageError, first_line
from hpctrain.text import counted, listed_names

MOST_OPEN = 128  # files at a time
MANY = 16  # files that a thread opens and reads, one after another
THREADS = 8  # of a rank: to open a file of a network file system takes a millisecond
MOST_CACHED = 256 << 20  # bytes that HDF5 may cache of all files that are open
LEAST_CACHED = MOST_CACHED // MOST_OPEN  # of one of them
IDENTIFYING = 2  # columns of `FileSet.table`


def is_pattern(path: str | os.PathLike[str]) -> bool:
    """Whether a path stands for many files: it has a `*`, `?` or `[`, and no file of this name."""
    return glob.has_magic(os.fspath(path)) and not os.path.exists(path)


def absolute_pattern(path: str | os.PathLike[str]) -> str:
    """Return a pattern that stands for the same files in any working directory."""
    if os.path.isabs(path):
        return os.path.normpath(path)
    return os.path.normpath(os.path.join(glob.escape(os.getcwd()), path))


def split_pattern(pattern: str) -> tuple[str, str]:
    """Divide an absolute pattern into a folder, without wildcards, and the rest.

    "/data/scans/**/*.h5" gives "/data/scans" and "**/*.h5".
    """
    parts = pattern.split(os.sep)
    count = len(parts) - 1
    for number, part in enumerate(parts[:-1]):
        if glob.has_magic(part) and not _is_escaped(part):
            count = number
            break
    folder = os.sep.join(map(_unescaped, parts[:count]))
    return folder or os.sep, os.sep.join(parts[count:])


def _unescaped(part: str) -> str:
    """Undo `glob.escape`."""
    for character in "*?[":
        part = part.replace(f"[{character}]", character)
    return part


def _is_escaped(part: str) -> bool:
    return glob.escape(_unescaped(part)) == part


class FileSet(NamedTuple):
    """F files, each with some of the N rows; only their names are longer than a number."""

    folder: str  # of the pattern, without wildcards; the names are relative to it
    names: np.ndarray  # (F,) bytes, of a pattern ascending
    sizes: np.ndarray  # (F,) int64, bytes
    modified: np.ndarray  # (F,) int64, ns
    starts: np.ndarray  # (F + 1,) int64, first row of each, and N
    offsets: np.ndarray  # (F,) int64, position of the first image in the file; 0: read by HDF5
    chunk_rows: np.ndarray  # (F,) int64, rows of a chunk; 0 = no chunks that hold several
    crc32: np.ndarray  # (F,) uint32, of a probe of the images and of all labels
    is_sample: bool = False  # whether a file is one sample: its dataset has no axis N

    def name(self, number: int) -> str:
        """Return the name of a file relative to the folder."""
        return os.fsdecode(self.names[number])

    def path(self, number: int) -> str:
        """Return the absolute path of a file."""
        return os.path.join(self.folder, self.name(number))

    def files_of(self, rows: np.ndarray) -> np.ndarray:
        """Return the numbers of the files that hold these rows, (n,) int64."""
        return np.searchsorted(self.starts, rows, "right") - 1

    def place_of(self, row: int, dataset: str) -> str:
        """Return where a row is: "scans/a.h5:/x[5]", of a file that is one sample without "[5]"."""
        number = int(self.files_of(np.array(row)))
        name = os.path.join(os.path.basename(self.folder), self.name(number))
        if self.is_sample:
            return f"{name}:{dataset}"
        return f"{name}:{dataset}[{row - self.starts[number]}]"

    def block_bounds(self, block_rows: int) -> np.ndarray:
        """Return the first row of each block, and N, (B + 1,) int64.

        A block has whole chunks of about `block_rows` rows of one file; the last of a file may be
        shorter.
        """
        units = np.maximum(self.chunk_rows, 1)
        steps = np.maximum(block_rows // units, 1) * units  # (F,)
        rows = np.diff(self.starts)
        blocks = -(-rows // steps)
        file_of = np.repeat(np.arange(len(rows)), blocks)
        within = np.arange(len(file_of)) - np.repeat(np.cumsum(blocks) - blocks, blocks)
        bounds = self.starts[file_of] + within * steps[file_of]
        return np.append(bounds, self.starts[-1])

    def table(self) -> dict[str, list[int]]:
        """Return rows, CRC-32, bytes and time of modification of each file, by its name."""
        names = map(os.fsdecode, self.names.tolist())
        columns = (np.diff(self.starts), self.crc32, self.sizes, self.modified)
        return dict(zip(names, np.stack(columns, axis=1).tolist(), strict=True))

    def identity(self) -> str:
        """Return a hash of names, rows and CRC-32: equal for a copy of all files elsewhere."""
        facts = [[name, *values[:IDENTIFYING]] for name, values in self.table().items()]
        return hashlib.sha256(json.dumps(facts).encode()).hexdigest()


def describe_changes(before: dict[str, list[int]], now: dict[str, list[int]]) -> str:
    """Say which files of a set are other ones than `before`: both are a `FileSet.table`."""
    both = [name for name in now if name in before]
    changes = {
        "missing": [name for name in before if name not in now],
        "added": [name for name in now if name not in before],
        "changed": [n for n in both if now[n][:IDENTIFYING] != before[n][:IDENTIFYING]],
    }
    return "; ".join(
        f"{counted(len(names), 'file')} {what}: {listed_names(names)}"
        for what, names in changes.items()
        if names
    )


class FileSetRows:
    """The rows of a set of files: a `RowReader`.

    A thread that reads a file has its reader to itself, so that no other closes it. A file that was
    opened before must not have been changed since.
    """

    def __init__(self, files: FileSet, images: Stored, readers: int = 1) -> None:
        """Read `images` (N, ...), whose rows are those of the files.

        With several `readers` of one dataset each, all of them have MOST_OPEN files open at most.
        """
        self._files = files
        self._images = images
        most = int(files.chunk_rows.max())
        self._cached = max(LEAST_CACHED, 2 * most * images.row_bytes)  # of a file, by HDF5
        self._most_open = max(1, MOST_OPEN // readers)
        if not files.offsets.all():
            self._most_open = max(1, min(MOST_OPEN, MOST_CACHED // self._cached) // readers)
        self._threads = make_pool(THREADS, "files")  # starts none before it is used
        self._lock = threading.Lock()
        self._readers: OrderedDict[int, RowReader] = OrderedDict()  # idle, the oldest first
        self._modified = np.zeros(len(files.names), np.int64)  # when it was first opened here, ns
        self._is_closed = False

    def read(self, rows: np.ndarray, out: np.ndarray, places: np.ndarray | None = None) -> None:
        """Implement `RowReader`: file by file, and many files by threads, each some of them."""

        def read_files(chosen_of: Sequence[tuple[int, np.ndarray]]) -> None:
            for number, chosen in chosen_of:
                reader = self._take(number)
                in_result = chosen if places is None else places[chosen]
                try:
                    reader.read(rows[chosen] - self._files.starts[number], out, in_result)
                finally:
                    self._put_back(number, reader)

        by_file = self._by_file(rows)
        if len(by_file) < MANY:
            read_files(by_file)
        else:
            parts = [by_file[at : at + MANY] for at in range(0, len(by_file), MANY)]
            for _ in self._threads.map(read_files, parts):
                pass  # raises the error of the first file that has one

    def read_ahead(self, rows: np.ndarray) -> None:
        """Implement `RowReader`, unless `read` has threads that wait for the disk."""
        by_file = self._by_file(rows)
        if len(by_file) >= MANY:
            return
        for number, chosen in by_file:
            if not self._files.offsets[number]:
                continue
            reader = self._take(number)
            try:
                reader.read_ahead(rows[chosen] - self._files.starts[number])
            finally:
                self._put_back(number, reader)

    def close(self) -> None:
        """Close all files; those that are being read are closed after it."""
        with self._lock:
            self._is_closed = True
            readers = [*self._readers.values()]
            self._readers.clear()
        self._threads.shutdown(cancel_futures=True)
        for reader in readers:
            reader.close()

    def _by_file(self, rows: np.ndarray) -> list[tuple[int, np.ndarray]]:
        """Return the number of each file of which there are rows, and their places in `rows`."""
        if len(rows) == 0:
            return []
        order = np.argsort(rows, kind="stable")
        numbers = self._files.files_of(rows[order])
        cuts = np.flatnonzero(np.diff(numbers)) + 1
        firsts = np.concatenate([[0], cuts])
        return [*zip(numbers[firsts].tolist(), np.split(order, cuts), strict=True)]

    def _take(self, number: int) -> RowReader:
        """Return the reader of a file, which is no other thread's until it is put back."""
        with self._lock:
            reader = self._readers.pop(number, None)
        return reader or self._open(number)

    def _put_back(self, number: int, reader: RowReader) -> None:
        """Keep a file open; close the one that has been idle for the longest time instead."""
        surplus = [reader]
        with self._lock:
            if not self._is_closed and number not in self._readers:
                self._readers[number] = reader
                surplus = []
            while len(self._readers) > self._most_open:
                surplus.append(self._readers.popitem(last=False)[1])
        for reader in surplus:
            reader.close()

    def _open(self, number: int) -> RowReader:
        """Open a file. Raises RunError if it cannot be opened or was changed."""
        files = self._files
        path = files.path(number)
        size = int(files.sizes[number])
        stored = self._images._replace(
            shape=(int(np.diff(files.starts[number : number + 2])[0]), *self._images.shape[1:]),
            offset=int(files.offsets[number]),
            chunk_rows=int(files.chunk_rows[number]),
        )
        reader: RowReader
        try:
            file = File(path, size)
            modified = file.modified
            if stored.offset:
                reader = OffsetRows(file, stored)
            else:
                from hpctrain.data.hdf5 import Hdf5Rows  # imports h5py

                file.close()
                reader = Hdf5Rows(path, stored, {path: size}, self._cached)
        except UsageError as error:
            raise RunError(str(error)) from None
        except Exception as error:  # HDF5 and h5py raise many types
            raise RunError(f"{path} cannot be read: {first_line(error)}") from None
        if self._modified[number] not in (0, modified):
            reader.close()
            raise RunError(f"{path} was changed while in use")
        self._modified[number] = modified
        return reader
