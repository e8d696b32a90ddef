"""Copy the part of a pack that one host reads to its local disk.

The copy is a sparse file of the pack's length, with every copied byte at its offset in the pack.
Blocks are verified with their CRC-32 while they are copied. Of the training split, only the blocks
that hold samples of the host's ranks are copied: of their images, labels and offsets. All other
splits, HDF5's metadata and the checksums are copied whole.
"""

from __future__ import annotations

import errno
import os
import shutil
import zlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from hpctrain.data.checks import Sums, open_file, read_exactly
from hpctrain.data.pack_format import Pack, Part
from hpctrain.errors import Failure, RunError, UsageError
from hpctrain.fault import fault
from hpctrain.files import temporary_name, write_at
from hpctrain.watchdog import doing

PIECE = 1 << 20  # bytes copied at a time where there are no checksums


class Piece(NamedTuple):
    """Bytes `start` to `stop` of a pack, and their CRC-32 if it is known."""

    start: int
    stop: int
    checksum: int | None = None
    name: str = ""

    @property
    def length(self) -> int:
        """Number of bytes."""
        return self.stop - self.start


def pieces(pack: Pack, sums: Sums, part: Part) -> list[Piece]:
    """Return the pieces of a pack to copy, in file order; blocks are copied whole.

    They are the blocks of the training split that hold rows of `part`, and all bytes that are not
    of the training split.
    """
    columns: list[Piece] = []
    blocks: list[Piece] = []
    for split in pack.splits:
        for kind, column in pack.columns(split).items():
            checksums, block_rows = sums[split, kind]
            rows = part.rows(kind) if split == "train" else range(column.rows)
            numbers = range(rows.start // block_rows, -(-rows.stop // block_rows))
            known = checksums[numbers.start : numbers.stop].tolist()
            size = block_rows * column.row_bytes
            end = column.offset + column.rows * column.row_bytes
            columns.append(Piece(column.offset, end))
            for number, checksum in zip(numbers, known, strict=True):
                start, name = column.offset + number * size, f"{split}/{kind}: block {number}"
                blocks.append(Piece(start, min(end, start + size), checksum, name))
    return sorted([*blocks, *_between(sorted(columns), pack.file_size)])


def _between(columns: list[Piece], end: int) -> Iterator[Piece]:
    """Yield the bytes that no column covers: HDF5's metadata and the checksums."""
    at = 0
    for column in [*columns, Piece(end, end)]:
        for start in range(at, column.start, PIECE):
            yield Piece(start, min(start + PIECE, column.start))
        at = max(at, column.stop)


def staged_name(pack: Pack, part: Part) -> str:
    """Return the name of the copy, which is unique for the pack and the part."""
    return f"hpctrain-{pack.uuid}-{part.samples.start}-{part.samples.stop}.staged"


def make_folder(folder: Path) -> None:
    """Make the folder of the copies if it does not exist. Raises UsageError."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except FileExistsError:
        raise UsageError(f"--stage {folder} is a file: name a folder") from None
    except OSError as error:
        raise UsageError(f"--stage {folder}: {error.strerror}") from None


def check_room(folder: Path, needed: int) -> None:
    """Raise RunError if fewer than `needed` bytes are free in the folder."""
    free = shutil.disk_usage(folder).free
    if needed > free:
        raise RunError(
            f"--stage {folder}: {free / 2**20:,.0f} MiB are free, the host's part of the pack needs"
            f" {needed / 2**20:,.0f} MiB"
        )


def copy(pack: Pack, target: Path, share: Sequence[Piece]) -> None:
    """Copy pieces into the file `target` and verify them on the way.

    Raises RunError for a corrupt block, a truncated pack or a full disk.
    """
    with open(open_file(pack.path), "rb", buffering=0) as source:
        try:
            with open(target, "r+b", buffering=0) as into:
                for piece in share:
                    doing(f"staging byte {piece.start:,}")
                    data = read_piece(pack.path, source.fileno(), piece)
                    write_at(into.fileno(), data, piece.start)
                fault("stage.written")
                os.fsync(into.fileno())
        except OSError as error:
            raise _failed(target, error) from None


def compare(pack: Pack, copied: Path, share: Sequence[Piece]) -> bool:
    """Whether an earlier copy has the right size, and these pieces of it are intact.

    Pieces without a checksum, which are few, are compared with those of the pack.
    """
    try:
        with (
            open(open_file(str(copied)), "rb", buffering=0) as there,
            open(open_file(pack.path), "rb", buffering=0) as original,
        ):
            if os.fstat(there.fileno()).st_size != pack.file_size:
                return False
            for piece in share:
                doing(f"comparing staged byte {piece.start:,}")
                data = read_piece(str(copied), there.fileno(), piece)
                known = piece.checksum is not None
                if not known and data != read_piece(pack.path, original.fileno(), piece):
                    return False
    except Failure:
        return False
    return True


def read_piece(path: str, descriptor: int, piece: Piece) -> memoryview:
    """Read the bytes of a piece. Raises RunError if they are missing or corrupt."""
    data = memoryview(bytearray(piece.length))
    read_exactly(path, descriptor, [data], piece.start)
    if piece.checksum is not None and zlib.crc32(data) != piece.checksum:
        raise RunError(f"{path}: {piece.name} is corrupt; copy or pack it again")
    return data


def begin(folder: Path, pack: Pack, name: str) -> Path:
    """Make an empty file of the pack's length with a temporary name. Raises RunError."""
    target = temporary_name(folder / name)
    try:
        with open(target, "xb") as file:
            file.truncate(pack.file_size)
    except OSError as error:
        target.unlink(missing_ok=True)
        raise _failed(target, error) from None
    return target


def finish(target: Path, final: Path) -> None:
    """Rename the complete copy to its final name. Raises RunError."""
    try:
        os.replace(target, final)
        fault("stage.renamed")
    except OSError as error:
        raise _failed(target, error) from None


def _failed(target: Path, error: OSError) -> RunError:
    if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
        return RunError(f"--stage: no room left in {target.parent}: nothing kept")
    return RunError(f"--stage: writing {target} failed: {error.strerror}")
