"""The targets of a pack: what its samples are, or have, beside their images.

kind      stored, of a split              a sample's target
class     (N,) int32                      its class, 0 ... K-1
classes   (N, K) uint8, 0 or 1            which of K classes it has; 255 = unknown
values    (N, T) float32                  T numbers, in columns with names; NaN = unknown
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Mapping, Sequence
from typing import Any, Literal, NamedTuple

import numpy as np

from hpctrain.errors import UsageError
from hpctrain.text import brief, counted, listed, printable

TargetKind = Literal["class", "classes", "values"]

UNKNOWN = 255  # an entry of classes
HELD_BYTES = 16  # longer targets of a sample are not held in memory, but read on demand
STORED = {"class": "<i4", "classes": "|u1", "values": "<f4"}  # types by kind
READ = {"class": np.int64, "classes": np.uint8, "values": np.float32}  # what `Split` returns


def target_kind(name: str) -> TargetKind:
    """Return a kind of targets, by default that of one class an image."""
    kinds: dict[str, TargetKind] = {"classes": "classes", "values": "values"}
    return kinds.get(name, "class")


class Targets(NamedTuple):
    """The kind of the targets of a pack, and the names of their classes or columns."""

    kind: TargetKind
    names: tuple[str, ...]  # of the K classes, or of the T columns of values

    @property
    def classes(self) -> tuple[str, ...]:
        """Names of the classes; of values, ()."""
        return () if self.kind == "values" else self.names

    @property
    def columns(self) -> tuple[str, ...]:
        """Names of the columns of values; of classes, ()."""
        return self.names if self.kind == "values" else ()

    @property
    def summary(self) -> str:
        """What they are, in a few words."""
        count = len(self.names)
        if self.kind == "values":
            return f"{counted(count, 'column')} of values"
        return f"{count} classes" + ", any number an image" * (self.kind == "classes")

    @property
    def dtype(self) -> np.dtype:
        """Type in which they are stored."""
        return np.dtype(STORED[self.kind])

    @property
    def read_dtype(self) -> np.dtype:
        """Type in which they are read."""
        return np.dtype(READ[self.kind])

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of a sample's target: (), (K,) or (T,)."""
        return () if self.kind == "class" else (len(self.names),)

    @property
    def buffered_bytes(self) -> int:
        """Bytes of a sample's target in the read buffer; 0 if it is held beside it."""
        size = self.dtype.itemsize * math.prod(self.shape)
        return size if size > HELD_BYTES else 0

    def seeds(self, stored: np.ndarray) -> list[int]:
        """Return with what the CRC-32 of each sample begins, for its target as stored (n, ...).

        It is the class, and of other kinds the CRC-32 of the target's bytes.
        """
        if self.kind == "class":
            return list[int](stored.tolist())
        return [zlib.crc32(row) for row in np.ascontiguousarray(stored, self.dtype)]

    @property
    def noun(self) -> str:
        """What each of the names is of."""
        return "column" if self.kind == "values" else "class"

    def count_known(self, targets: np.ndarray) -> np.ndarray:
        """Return how many of the targets (n, ...) are known to have each class, (K,) int64.

        Of values it is how many are known in each column, (T,).
        """
        if self.kind == "class":
            return np.bincount(targets, minlength=len(self.names))
        if self.kind == "classes":
            return np.count_nonzero(targets == 1, axis=0)
        return np.count_nonzero(~self.is_unknown(targets), axis=0)

    def is_unknown(self, targets: np.ndarray) -> np.ndarray:
        """Return which entries (n, ...) are unknown."""
        if self.kind == "values":
            return np.isnan(targets)
        return (targets == UNKNOWN) & (self.kind == "classes")

    def check_known(self, source: str, counts: np.ndarray, images: str) -> None:
        """Raise UsageError for classes or columns of which nothing is known in any image.

        counts: of how many images each is known, (K,); images: how many there are, in words.
        """
        names = [brief(self.names[number]) for number in np.flatnonzero(counts == 0)]
        if names:
            never_known = f"{self.noun} {listed(names, 3)} is unknown in all {images}"
            raise UsageError(f"{source}: {never_known}: leave it out, or give some of its targets")

    def is_invalid(self, targets: np.ndarray) -> np.ndarray:
        """Return which entries (n, ...) targets of this kind cannot have."""
        if self.kind == "class":
            return (targets < 0) | (targets >= len(self.names))
        if self.kind == "classes":
            return (targets > 1) & (targets != UNKNOWN)
        return np.isinf(targets)

    def replace_invalid(self, targets: np.ndarray) -> dict[int, str]:
        """Replace entries (n, ...) that targets of this kind cannot have by unknown, or class 0.

        Return what is wrong with the targets that have one, by their place in `targets`.
        """
        invalid = self.is_invalid(targets)
        if not invalid.any():
            return {}
        wrong: dict[int, str] = {}
        for place, *column in np.argwhere(invalid).tolist():
            value = targets[(place, *column)]
            text = f"its label is {value}, and there are {len(self.names)} classes"
            if self.kind == "classes":
                text = f"its target is {value} for {self.names[column[0]]}, not 0, 1 or {UNKNOWN}"
            elif self.kind == "values":
                text = f"its value of {self.names[column[0]]} is {value}"
            wrong.setdefault(place, text)
        targets[invalid] = {"class": 0, "classes": UNKNOWN, "values": np.nan}[self.kind]
        return wrong

    def as_json(self) -> dict[str, Any]:
        """Return the attribute ``targets`` of a pack."""
        if self.kind == "values":
            return {"kind": self.kind, "columns": list(self.names)}
        return {"kind": self.kind}

    @classmethod
    def from_json(cls, attribute: Mapping[str, Any], classes: Sequence[str]) -> Targets | None:
        """Return what the attributes of a pack describe; None if this version does not know it."""
        kind = attribute.get("kind")
        if kind not in STORED:
            return None
        targets = cls(kind, tuple(attribute.get("columns", classes)))
        if not targets.names or targets.as_json() != attribute:
            return None
        return cls(kind, tuple(printable(name, newlines=False) for name in targets.names))
