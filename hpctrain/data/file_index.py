"""The index of a set of HDF5 files: what each of them holds, kept in --cache-dir.

To open thousands of files takes long. So what was read from a file is kept, with its size and the
times of its last modification and change, and only files that have others by now are read again.
(Programs may set the first time, as `cp -p` does. The second is that of stat(2), st_ctime.) The
index is a .npz file, made of what it holds alone: one that is missing, damaged or outdated is made
anew.
"""

from __future__ import annotations

import glob
import hashlib
import json
import os
import stat
import time
import zipfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from hpctrain.cores import make_pool
from hpctrain.data.file_set import FileSet, split_pattern
from hpctrain.data.pack import WRITE_PHYSICAL
from hpctrain.errors import UsageError
from hpctrain.files import remove_left_behind, whole_file
from hpctrain.text import counted
from hpctrain.watchdog import doing

VERSION = 3  # part of the name of an index
THREADS = 16  # that ask for the sizes of files: each request may take a network file system 1 ms
FILES_AT_A_TIME = 64
SETTLED = 2_000_000_000  # ns after which another change has another time
COMPARED = ("names", "sizes", "modified", "changed")  # columns that tell whether to read again
UNKNOWN = -1  # time of a change after which there may have been another


class FileFormat(NamedTuple):
    """What all files of a set agree in."""

    dataset: str
    dtype: str
    layout: str
    shape: tuple[int, ...]  # of a sample, as stored
    scale_attributes: (
        str  # attributes by which stored values become physical ones, which are not applied
    )
    labels: str  # "integers", "strings", "one-hot of K" or the columns of targets; "" = not read
    columns: tuple[str, ...] = ()  # names of several classes, or of columns of values
    targets: tuple[Any, ...] = ()  # `stored_format` of their datasets, D

    def __str__(self) -> str:
        text = f"images of {self.dtype} {self.shape} in {self.layout}"
        if self.scale_attributes:
            text += f", {self.scale_attributes}"
        if self.labels:
            text += f", and labels {self.labels}"
        return text


class FileContent(NamedTuple):
    """What one file holds."""

    format: FileFormat
    rows: int
    offset: int  # position of its first image; 0: read by HDF5
    chunk_rows: int  # rows of a chunk; 0 = no chunks that hold several
    crc32: int  # of a probe of the images and of all labels
    notes: str  # for the user, on attributes that are not applied
    labels: np.ndarray  # (rows,) int64, or strings; empty if they are not read; targets (rows, K)
    target_places: tuple[tuple[int, int], ...] = ()  # offset and rows of a chunk, like the images',
    # of D datasets of targets


class MatchingFiles(NamedTuple):
    """The F files that a pattern stands for, or that were given one by one."""

    folder: str
    names: np.ndarray  # (F,) bytes, relative to the folder; of a pattern, sorted as texts
    sizes: np.ndarray  # (F,) int64, bytes
    modified: np.ndarray  # (F,) int64, ns
    changed: np.ndarray  # (F,) int64, ns


class Index(NamedTuple):
    """What F files of one format hold."""

    format: FileFormat
    names: np.ndarray  # (F,) bytes
    sizes: np.ndarray  # (F,) int64, bytes
    modified: np.ndarray  # (F,) int64, ns
    changed: np.ndarray  # (F,) int64, ns, or UNKNOWN
    rows: np.ndarray  # (F,) int64
    offsets: np.ndarray  # (F,) int64
    chunk_rows: np.ndarray  # (F,) int64
    crc32: np.ndarray  # (F,) uint32
    notes: np.ndarray  # (F,) strings
    labels: np.ndarray  # (N,) int64, or strings; or targets (N, K)
    target_places: np.ndarray  # (F, D, 2) int64

    def file_set(self, folder: str, is_sample: bool) -> FileSet:
        """Return what ranks need to read the files."""
        return FileSet(
            folder=folder,
            names=self.names,
            sizes=self.sizes,
            modified=self.modified,
            starts=np.cumsum([0, *self.rows]),
            offsets=self.offsets,
            chunk_rows=self.chunk_rows,
            crc32=self.crc32,
            is_sample=is_sample,
        )

    def contents(self) -> list[FileContent]:
        """Return what each file holds."""
        firsts = np.cumsum(self.rows) - self.rows
        columns = (firsts, self.rows, self.offsets, self.chunk_rows, self.crc32)
        numbers = np.stack(columns, axis=1).tolist()
        return [
            FileContent(
                format=self.format,
                rows=rows,
                offset=offset,
                chunk_rows=chunk_rows,
                crc32=crc32,
                notes=notes,
                labels=self.labels[first : first + rows],
                target_places=as_tuples(places),
            )
            for (first, rows, offset, chunk_rows, crc32), notes, places in zip(
                numbers, self.notes.tolist(), self.target_places.tolist(), strict=True
            )
        ]


def index_files(
    pattern: str, key: Sequence[object], cache_dir: str, read: Callable[[str], FileContent]
) -> tuple[Index, str]:
    """Return the index of the files of an absolute `pattern`, and a note if it cannot be kept.

    `read` returns what the file of this path holds, as the texts of `key` say. Raises UsageError if
    no file matches, if one cannot be used, or if they differ.
    """
    matching = list_files(pattern)
    path = None
    kept = None
    if cache_dir:
        digest = hashlib.sha256(json.dumps([VERSION, pattern, *key]).encode()).hexdigest()
        path = Path(cache_dir) / f"files-{digest[:16]}.npz"
        kept = read_index(path)
    if kept is not None and _is_current(kept, matching):
        return kept, ""
    began = time.time_ns()
    contents = read_changed(matching, kept, read)
    index = join_contents(matching, contents)
    if path is None:
        return index, ""
    is_settled = np.abs(began - matching.modified) > SETTLED
    is_settled &= np.abs(began - matching.changed) > SETTLED
    try:
        write_index(path, index._replace(changed=np.where(is_settled, matching.changed, UNKNOWN)))
    except OSError as error:
        return index, (
            f"the index of {counted(len(matching.names), 'file')} cannot be kept as {path}"
            f" ({error.strerror}): each launch reads all files"
        )
    return index, ""


def list_files(pattern: str) -> MatchingFiles:
    """List the files of an absolute pattern, with their sizes. Raises UsageError."""
    folder, wildcards = split_pattern(pattern)
    doing(f"listing {folder}")
    names = sorted(glob.glob(wildcards, root_dir=folder, recursive=True))
    if not names:
        why = "no file matches"
        if not os.path.isdir(folder):
            why = f"there is no folder {folder}"
        raise UsageError(f"{pattern}: {why}")
    parts = [names[at : at + FILES_AT_A_TIME] for at in range(0, len(names), FILES_AT_A_TIME)]
    with make_pool(THREADS, "files") as threads:
        results = threads.map(lambda part: [_status(os.path.join(folder, n)) for n in part], parts)
        states = [state for part in results for state in part]
    files: dict[tuple[int, int, int, int], str] = {}
    for name, state in zip(names, states, strict=True):
        path = os.path.join(folder, name)
        if not stat.S_ISREG(state.st_mode):
            what = "a folder" if stat.S_ISDIR(state.st_mode) else "no file"
            raise UsageError(f"{pattern} matches {path}, which is {what}: let it match files alone")
        identity = (state.st_dev, state.st_ino, state.st_size, state.st_mtime_ns)
        other = files.setdefault(identity, name)
        if other != name and state.st_ino:
            raise UsageError(
                f"{pattern} matches {path}, which is the same file as {other}: leave out the link,"
                " or its samples would be there twice"
            )
    return _as_columns(folder, names, states)


def match_files(paths: Sequence[str]) -> MatchingFiles:
    """Return these files, in this order, with their sizes. Raises UsageError."""
    names = [os.path.relpath(path, os.sep) for path in paths]
    return _as_columns(os.sep, names, [*map(_status, paths)])


def _as_columns(
    folder: str, names: Sequence[str], states: Sequence[os.stat_result]
) -> MatchingFiles:
    return MatchingFiles(
        folder=folder,
        names=np.array([os.fsencode(name) for name in names]),
        sizes=np.array([state.st_size for state in states]),
        modified=np.array([state.st_mtime_ns for state in states]),
        changed=np.array([state.st_ctime_ns for state in states]),
    )


def _status(path: str) -> os.stat_result:
    try:
        return os.stat(path)
    except OSError as error:
        raise UsageError(f"{path} cannot be opened: {error.strerror}") from None


def _is_current(index: Index, matching: MatchingFiles) -> bool:
    """Whether all files are those of the index, and no others."""
    return all(
        np.array_equal(getattr(index, column), getattr(matching, column)) for column in COMPARED
    )


def _keys(files: Index | MatchingFiles) -> Iterator[tuple[Any, ...]]:
    """Yield what identifies the content of each file."""
    return zip(*(getattr(files, column).tolist() for column in COMPARED), strict=True)


def read_changed(
    matching: MatchingFiles, kept: Index | None, read: Callable[[str], FileContent]
) -> list[FileContent]:
    """Return what each file holds: of those that are not changed, what was `kept`.

    Raises UsageError for the first file that cannot be used, with the number of such files.
    """
    contents_of: dict[tuple[Any, ...], FileContent] = {}
    if kept is not None:
        contents_of = dict(zip(_keys(kept), kept.contents(), strict=True))
    contents: list[FileContent] = []
    problems: list[str] = []
    total = len(matching.names)
    for number, key in enumerate(_keys(matching)):
        content = contents_of.get(key)
        if content is None:
            doing(f"reading file {number + 1:,} of {total:,}")
            try:
                content = read(os.path.join(matching.folder, os.fsdecode(key[0])))
            except UsageError as error:
                problems.append(str(error))
                if number == 0:  # likely a wrong dataset: all others would be read in vain
                    break
                continue
        contents.append(content)
    if problems:
        more = ""
        if len(problems) > 1:
            more = f" ({len(problems):,} of {total:,} files cannot be used)"
        raise UsageError(f"{problems[0]}{more}")
    return contents


def join_contents(matching: MatchingFiles, contents: Sequence[FileContent]) -> Index:
    """Return the index of files with these contents. Raises UsageError if they differ."""
    first = contents[0].format
    unlike = [number for number, content in enumerate(contents) if content.format != first]
    if unlike:
        paths = [
            os.path.join(matching.folder, os.fsdecode(matching.names[number]))
            for number in (unlike[0], 0)
        ]
        other = contents[unlike[0]].format
        advice = ""
        if other.scale_attributes != first.scale_attributes:
            advice = f"; {WRITE_PHYSICAL}"
        count = ""
        if len(contents) > 2:
            count = f": {len(unlike):,} of {len(contents):,} files differ from the first"
        raise UsageError(f"{paths[0]} holds {other}, but {paths[1]} {first}{count}{advice}")
    return Index(
        format=first,
        names=matching.names,
        sizes=matching.sizes,
        modified=matching.modified,
        changed=matching.changed,
        rows=np.array([content.rows for content in contents]),
        offsets=np.array([content.offset for content in contents]),
        chunk_rows=np.array([content.chunk_rows for content in contents]),
        crc32=np.array([content.crc32 for content in contents], np.uint32),
        notes=np.array([content.notes for content in contents]),
        labels=np.concatenate([content.labels for content in contents]),
        target_places=np.array([content.target_places for content in contents], np.int64).reshape(
            len(contents), -1, 2
        ),
    )


def read_index(path: Path) -> Index | None:
    """Read an index; None if there is none, or if it is damaged."""
    try:
        with open(path, "rb") as file, np.load(file, allow_pickle=False) as arrays:
            columns = {name: arrays[name] for name in Index._fields}  # compares their CRC-32
    except (OSError, EOFError, ValueError, KeyError, zipfile.BadZipFile):
        return None
    facts = FileFormat(*json.loads(str(columns.pop("format"))))
    if is_numbered(columns["labels"]):
        columns["labels"] = columns["labels"].astype(np.int64)
    facts = facts._replace(
        shape=as_tuples(facts.shape),
        columns=as_tuples(facts.columns),
        targets=as_tuples(facts.targets),
    )
    return Index(format=facts, **columns)


def is_numbered(labels: np.ndarray) -> bool:
    """Whether labels are integers, (N,), and no strings or targets (N, K)."""
    return labels.ndim == 1 and labels.dtype.kind != "U"


def as_tuples(value: Any) -> Any:
    """Return lists, also those in lists, as tuples."""
    if isinstance(value, list | tuple):
        return tuple(map(as_tuples, value))
    return value


def write_index(path: Path, index: Index) -> None:
    """Write an index atomically. Raises OSError."""
    labels = index.labels
    if is_numbered(labels):
        ends = (labels.min(), labels.max())
        labels = labels.astype(np.result_type(*map(np.min_scalar_type, ends)))
    columns = index._replace(labels=labels)._asdict() | {
        "format": np.array(json.dumps(index.format))
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    remove_left_behind(path)
    with whole_file(path, point="index") as file:
        np.savez(file, **columns)
