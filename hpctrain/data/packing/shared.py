"""What the processes of a team share: one listed source, and the scratch file of decoded rows.

The root lists the source. Where others take part, whatever it unpacks to do so (.tgz, compressed
arrays) goes once into scratch files in the pack's folder, which all of them read, as they do the
scratch file of the rows. Folders and what can be read at random (.tar, .zip, arrays) are read in
place by every process. Scratch files have names until all have opened them; on several hosts until
the end, because network file systems take a file without a name away from the other hosts.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import BinaryIO, NamedTuple

from hpctrain.data.packing.layout import Source
from hpctrain.data.packing.scratch import Shelf, scratch_file
from hpctrain.data.packing.sources import open_source
from hpctrain.data.packing.team import Team, on_root, parts
from hpctrain.errors import UsageError
from hpctrain.files import open_itself


class Work(NamedTuple):
    """What one process packs: its part of the source into its rows of `store`."""

    source: Source | None  # all of it, on the root
    mine: Source
    store: BinaryIO
    counts: list[int]  # of the images of every process


class Listed(NamedTuple):
    """What the root has opened."""

    source: Source
    store: BinaryIO
    shelf: Shelf | None  # with the names of scratch files that others are to open


class Outline(NamedTuple):
    """What the others need to open the same; sizes in bytes tell that it is."""

    source: Source  # without items and files
    images: int
    root_size: int  # of the file `source.root`, where it is one
    files: list[tuple[str, int]]  # path and size
    store: str


@contextmanager
def shared_work(path: Path, output: Path, team: Team) -> Iterator[Work]:
    """List the source at `path` and give each process its part. Raises UsageError. Collective."""
    with on_root(team, lambda: _listed(path, output, team)) as listed, ExitStack() as stack:
        outline = team.call_on_root(lambda: _outline(listed))
        shares = parts(outline.images, team.size)
        items = listed.source.items if listed else []
        own = team.scatter([items[share.start : share.stop] for share in shares])
        opened = team.call_on_all(lambda: _opened(outline, listed, stack))
        if listed and listed.shelf and team.one_host:
            listed.shelf.remove_names()
        mine = dataclasses.replace(outline.source, items=own, files=opened[:-1])
        source = listed.source if listed else None
        yield Work(source, mine, opened[-1], [len(share) for share in shares])


def flush(store: BinaryIO, team: Team) -> None:
    """Bring what this process wrote where other hosts find it."""
    if not team.one_host:
        os.fsync(store.fileno())


def reread(store: BinaryIO, team: Team, stack: ExitStack) -> BinaryIO:
    """The same file, for reading what others have written: those on other hosts are sure to be
    seen only by opening it anew. It is closed with `stack`."""
    return (
        store if team.one_host else stack.enter_context(open(store.name, "rb", opener=open_itself))
    )


@contextmanager
def _listed(path: Path, output: Path, team: Team) -> Iterator[Listed]:
    shelf = Shelf(output) if team.size > 1 else None
    place = shelf or output.parent
    with ExitStack() as stack:
        if shelf:
            stack.callback(shelf.remove_names)
        source = stack.enter_context(open_source(path, place))
        store = stack.enter_context(scratch_file(place))
        for file in source.files:
            flush(file, team)
        yield Listed(source, store, shelf)


def _outline(listed: Listed | None) -> Outline:
    assert listed  # on the root it is
    source, store, _ = listed
    bare = dataclasses.replace(source, items=[], bad=[], notes=[], files=[])
    size = os.path.getsize(source.root) if source.kind == "zip" else 0
    return Outline(bare, len(source.items), size, _sizes(source.files), str(store.name))


def _sizes(files: list[BinaryIO]) -> list[tuple[str, int]]:
    return [(str(file.name), os.fstat(file.fileno()).st_size) for file in files]


def _opened(outline: Outline, listed: Listed | None, stack: ExitStack) -> list[BinaryIO]:
    """The source's open files, and last the scratch file of the rows."""
    if listed:
        return [*listed.source.files, listed.store]
    source = outline.source
    if source.kind == "folder" and not os.path.isdir(source.root):
        raise _not_there(source.root)
    try:
        if source.kind == "zip" and os.path.getsize(source.root) != outline.root_size:
            raise _not_there(source.root)
        paths = [Path(path) for path, _ in outline.files]
        files: list[BinaryIO] = [stack.enter_context(path.open("rb")) for path in paths]
        if _sizes(files) != outline.files:
            raise _not_there(source.name)
        return [*files, stack.enter_context(open(outline.store, "r+b", opener=open_itself))]
    except FileNotFoundError as error:
        raise _not_there(error.filename) from None


def _not_there(path: str) -> UsageError:
    return UsageError(
        f"{path} is not on this host what it is on rank 0's: the source and the folder of the pack"
        " must be where all hosts see them"
    )
