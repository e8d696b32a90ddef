"""Follow the record of a run as it grows: `poll` reads only what was added since.

Works on files of other machines too: nothing is asked of the file system but open, fstat and read.
A resumed launch replaces the file by a shorter one (``jsonlines.cut_back``): the bytes before the
place are then others (times are in them), and the file is read anew.
Of very many steps read at once only some are decoded: every n-th, and those near the end.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, BinaryIO, Generic, Protocol, TypeVar

from hpctrain.errors import UsageError
from hpctrain.files import open_regular
from hpctrain.report.jsonlines import BEGINNING, FILE_NAME, LONGEST_LINE, decode

BLOCK = 1 << 20  # bytes read at a time
STEP_BYTES = 350  # of a step's line, about
MOST_DECODED = 8000  # steps of one reading, about, besides those near the end
NEAR_END = 1 << 16  # bytes
KNOWN_BY = 64  # bytes before the place that must still be there
STEP, DIGEST = (BEGINNING + b'"%s"' % kind for kind in (b"step", b"digest"))


class Taker(Protocol):
    """Takes the records of a run in order."""

    @property
    def wants_step(self) -> bool | None:
        """Whether it wants the next step, not only some of them; None = it never wants any."""

    def add(self, record: Mapping[str, Any]) -> None:
        """Take one record."""


Taken = TypeVar("Taken", bound=Taker)


class Follower(Generic[Taken]):
    """Gives the record in a run's folder to what `make` makes, anew where it was replaced. Bounded
    in memory.
    """

    def __init__(self, folder: Path, make: Callable[[], Taken]) -> None:
        self.path, self._make = folder / FILE_NAME, make
        self.taken = make()
        self.unreadable = 0  # lines
        self.damage: str | None = None  # what is wrong with the first of them
        self.problem: str | None = None  # why the file cannot be read, as it stands
        self.decoded = 0  # lines, in all
        self.version = 0  # grows with every change
        self._forget()

    def poll(self) -> bool:
        """Read what was added; whether anything changed."""
        before = (self.version, self.problem)
        try:
            # Anew: NFS asks its server then.
            with open(self.path, "rb", opener=open_regular) as file:
                self._read(file)
        except FileNotFoundError:
            if self._size:
                self._restart()
            self.problem = None
        except OSError as error:
            self.problem = f"cannot read {self.path}: {error.strerror}"
        except UsageError as error:
            self.problem = str(error)
        return (self.version, self.problem) != before

    def _forget(self) -> None:
        self._place = 0  # behind the last whole line read
        self._known = b""  # the bytes before that
        self._size = 0
        self._lines = self._steps = 0  # lines, and those of steps, seen
        self._is_record = False  # by its first lines

    def _restart(self) -> None:
        self._forget()
        self.taken, self.unreadable, self.damage = self._make(), 0, None
        self.version += 1

    def _read(self, file: BinaryIO) -> None:
        size = os.fstat(file.fileno()).st_size
        if not self._is_same(file):
            self._restart()
        elif size == self._size:
            return  # nothing, or the same torn line
        self.problem = None
        self._size = size
        self._read_lines(file, size, 1 + (size - self._place) // STEP_BYTES // MOST_DECODED)

    def _is_same(self, file: BinaryIO) -> bool:
        start = self._place - len(self._known)
        return os.pread(file.fileno(), len(self._known), start) == self._known

    def _read_lines(self, file: BinaryIO, size: int, every: int) -> None:
        """Read up to `size`, whole lines only, decoding one step in `every`."""
        at, torn = self._place, b""
        while at < size:
            rare = size - NEAR_END - at
            data = os.pread(file.fileno(), min(BLOCK, rare if rare > 0 else size - at), at)
            if not data:
                break  # cut off meanwhile: the next poll sees it
            at += len(data)
            whole, newline, rest = data.rpartition(b"\n")
            if not newline:
                torn += data
                if len(torn) > LONGEST_LINE or (not self._place and not _may_begin(torn)):
                    decode(b"{}", 1, self.path)
                continue
            lines = torn + whole + newline
            torn = rest
            self._place = at - len(rest)
            self._known = (self._known + lines)[-KNOWN_BY:]
            self._add(lines, every if rare > 0 else 1)

    def _add(self, lines: bytes, every: int) -> None:
        for line in lines.split(b"\n")[:-1]:
            self._lines += 1
            if line.startswith(STEP):
                self._steps += 1
                wanted = self.taken.wants_step
                if wanted is None or (self._steps % every and not wanted):
                    continue
            elif line.startswith(DIGEST):
                continue
            elif not line.startswith(BEGINNING) and not self._is_record:
                decode(b"{}", self._lines, self.path)  # no record at all
            self._is_record = True
            self._tell(line)
        self.version += 1

    def _tell(self, line: bytes) -> None:
        self.decoded += 1
        try:
            self.taken.add(decode(line, self._lines, self.path))
        except UsageError as error:  # lost in a power failure
            self.unreadable += 1
            self.damage = self.damage or str(error)


def _may_begin(torn: bytes) -> bool:
    return torn.startswith(BEGINNING[: len(torn)])
