"""A copy of what one host reads of a pack, on its own disk: a sparse file with the pack's length,
in which every byte that was copied lies where it lies in the pack.

Blocks are compared with their CRC-32 on the way. Training rows that nobody on the host reads are
left out; all that is small, and all other splits, are there.
"""

from __future__ import annotations

import errno
import os
import pwd
import shutil
import stat
import zlib
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from hpctrain.data.checks import Sums, open_file, read_exactly
from hpctrain.data.pack_format import Pack
from hpctrain.errors import Failure, RunError, UsageError
from hpctrain.files import left_behind, open_itself, temporary_name, write_at
from hpctrain.watchdog import doing

PIECE = 1 << 20  # bytes copied at a time where no checksum says more
HELD = ("images", "bytes")  # columns of which a host may need a part


class Piece(NamedTuple):
    """Bytes `start` to `stop` of a pack, and their CRC-32 where it is known."""

    start: int
    stop: int
    checksum: int | None = None
    name: str = ""

    @property
    def length(self) -> int:
        """Bytes."""
        return self.stop - self.start


def pieces(pack: Pack, sums: Sums, extent: tuple[int, int]) -> list[Piece]:
    """All that is needed of a pack to read `extent`, bytes of the training split's images, in the
    order of the file.
    """
    blocks: list[Piece] = []
    wanted: list[Piece] = []
    for split in pack.splits:
        for kind, column in pack.columns(split).items():
            checksums, block_rows = sums[split, kind]
            size = block_rows * column.row_bytes
            end = column.rows * column.row_bytes
            partly = split == "train" and kind in HELD
            low, high = extent if partly else (0, end)
            for number, checksum in enumerate(checksums.tolist()):
                start, stop = number * size, min(end, (number + 1) * size)
                name = f"{split}/{kind}: block {number}"
                block = Piece(column.offset + start, column.offset + stop, checksum, name)
                blocks.append(block)
                if start < high and low < stop:
                    wanted.append(block)
    return sorted([*wanted, *_between(sorted(blocks), pack.file_size)])


def _between(blocks: list[Piece], end: int) -> Iterator[Piece]:
    """What no column covers: HDF5's own bytes and the checksums."""
    at = 0
    for block in [*blocks, Piece(end, end)]:
        for start in range(at, block.start, PIECE):
            yield Piece(start, min(start + PIECE, block.start))
        at = max(at, block.stop)


def staged_name(pack: Pack, extent: tuple[int, int]) -> str:
    """The name of the copy: another part or another pack has another."""
    return f"hpctrain-{pack.uuid}-{extent[0]}-{extent[1]}.staged"


def make_folder(folder: Path) -> None:
    """Make the folder of the copies, or find it. UsageError where that cannot be, or where others
    could put there what is then taken for a copy.
    """
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        owners = {os.lstat(folder).st_uid, os.stat(folder).st_uid}
        mode = stat.S_IMODE(os.stat(folder).st_mode)
    except FileExistsError:
        raise UsageError(f"--stage {folder} is a file: name a folder") from None
    except OSError as error:
        raise UsageError(f"--stage {folder}: {error.strerror}") from None
    others = owners - {os.geteuid()}
    if others or mode & (stat.S_IWGRP | stat.S_IWOTH):
        number = min(others or owners)
        try:
            owner = pwd.getpwuid(number).pw_name
        except KeyError:
            owner = f"user {number}"
        raise UsageError(
            f"--stage {folder} belongs to {owner} and has mode {mode:04o}: others could change the"
            f" copies there; name a folder that only you may write, such as {folder / 'mine'}"
        )


def remove_copies(folder: str | None) -> None:
    """Remove the copies of a job that is cancelled, where their folder is of this job alone: it is
    named by the job's number at its end.
    """
    job = os.environ.get("SLURM_JOB_ID", "")
    if folder and job.isdigit() and folder.endswith(f"-{job}"):
        with suppress(OSError):  # other ranks of the host do the same
            for copied in Path(folder).glob("hpctrain-*.staged"):
                copied.unlink(missing_ok=True)
            Path(folder).rmdir()


def make_room(folder: Path, name: str, needed: int) -> None:
    """Remove what killed copiers of this name left. UsageError where that cannot be, RunError where
    the folder has less room than `needed`.
    """
    try:
        for left in left_behind(folder / name):
            left.unlink(missing_ok=True)
        free = shutil.disk_usage(folder).free
    except OSError as error:
        raise UsageError(f"--stage {folder}: {error.strerror}") from None
    if needed > free:
        raise RunError(
            f"--stage {folder}: {free / 2**20:,.0f} MiB are free, the host's part of the pack needs"
            f" {needed / 2**20:,.0f} MiB"
        )


def copy(pack: Pack, target: Path, part: Sequence[Piece]) -> None:
    """Copy pieces into the file `target`, compared on the way. RunError for a corrupt block, a pack
    that was cut short and a full disk.
    """
    with open(open_file(pack.path), "rb", buffering=0) as source:
        try:
            with open(target, "r+b", buffering=0, opener=open_itself) as into:
                for piece in part:
                    doing(f"staging byte {piece.start:,}")
                    data = read_piece(pack.path, source.fileno(), piece)
                    write_at(into.fileno(), data, piece.start)
                os.fsync(into.fileno())
        except OSError as error:
            raise _failed(target, error) from None


def compare(pack: Pack, copied: Path, part: Sequence[Piece]) -> bool:
    """Whether these pieces of an earlier copy are what they should be."""
    try:
        with open(open_file(str(copied)), "rb", buffering=0) as there:
            found = os.fstat(there.fileno())
            if (found.st_size, found.st_uid) != (pack.file_size, os.geteuid()):
                return False
            for piece in part:
                doing(f"comparing staged byte {piece.start:,}")
                if piece.checksum is not None:
                    read_piece(str(copied), there.fileno(), piece)
    except Failure:
        return False
    return True


def read_piece(path: str, descriptor: int, piece: Piece) -> memoryview:
    """The bytes of a piece. RunError where they are not there or not those of its checksum."""
    data = memoryview(bytearray(piece.length))
    read_exactly(path, descriptor, [data], piece.start)
    if piece.checksum is not None and zlib.crc32(data) != piece.checksum:
        raise RunError(f"{path}: {piece.name} is corrupt; copy or pack it again")
    return data


def begin(folder: Path, pack: Pack, name: str) -> Path:
    """An empty file of the pack's length, under a name of its own, to copy into. RunError."""
    target = temporary_name(folder / name)
    try:
        with open(target, "xb", opener=open_itself) as file:
            file.truncate(pack.file_size)
    except OSError as error:
        target.unlink(missing_ok=True)
        raise _failed(target, error) from None
    return target


def finish(target: Path, final: Path) -> None:
    """Give the copy its name, now that it is whole. RunError."""
    try:
        os.replace(target, final)
    except OSError as error:
        raise _failed(target, error) from None


def _failed(target: Path, error: OSError) -> RunError:
    if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
        return RunError(f"--stage: no room left in {target.parent}: nothing kept")
    return RunError(f"--stage: writing {target} failed: {error.strerror}")
