"""Which rows of a file of somebody else go to which split: pure arithmetic, from a seed.

Where rows can be read one by one, each class is dealt by the shares and every split is put into
random order, so that a file ordered by class does no harm. Where rows should be read in long runs
(chunks, or --shuffle blocks), whole runs are dealt, and a split keeps the file's order:
``orders.Blocks`` then deals the runs to the shards at random.
"""

from __future__ import annotations

from fractions import Fraction

import numpy as np

from hpctrain.data.pack_format import SPLITS, Foreign
from hpctrain.data.packing.split import LEFT_OUT, assign, cut, parse_split
from hpctrain.data.partition import RUN_BYTES
from hpctrain.data.permute import random_order
from hpctrain.errors import UsageError
from hpctrain.keys import random_key

RUNS, RUNS_OF_CLASS = 1000, 20  # that a file has before they grow: shares and classes stay even

Shares = tuple[Fraction, Fraction, Fraction]  # of train, validation, test


def run_rows_of(foreign: Foreign, classes: int, wanted: int | None) -> int:
    """Rows that are dealt together: whole chunks of about RUN_BYTES, fewer in a small file."""
    unit = foreign.chunk_rows or 1
    if wanted == 0 and not foreign.chunk_rows:
        return 0
    if wanted and 0 < wanted <= foreign.rows and wanted % unit == 0:
        return wanted
    units, runs = -(-foreign.rows // unit), max(RUNS, RUNS_OF_CLASS * classes)
    return unit * max(1, min(RUN_BYTES // (unit * foreign.row_bytes), units // runs))


def deal(foreign: Foreign, labels: np.ndarray) -> dict[str, np.ndarray]:
    """The rows of every split, from labels (N,). Raises UsageError where a split that has a share
    gets none, or a class is in no row of train.
    """
    shares = parse_split(foreign.split)
    draw = _draw_runs if foreign.run_rows else _draw_rows
    drawn = draw(foreign, labels, shares)
    for name, share in zip(SPLITS, shares, strict=True):
        if share and not len(drawn[name]):
            raise UsageError(
                f"--split {foreign.split} leaves no image of {foreign.path} for {name}: there are"
                f" {foreign.rows:,} images, dealt {_by(foreign)}; give {name} a larger share,"
                " or train on all of them with --split 1"
            )
    missing = np.setdiff1d(labels, labels[drawn["train"]])
    if len(missing):
        raise UsageError(
            f"class {missing[0]} of {foreign.path} has {int((labels == missing[0]).sum()):,} images"
            f" and none of them in train, dealt {_by(foreign)}: give train a larger share, or"
            " another --seed"
        )
    return {name: rows for name, rows in drawn.items() if len(rows)}


def _by(foreign: Foreign) -> str:
    if not foreign.run_rows:
        return "class by class"
    return f"in {'whole chunks' if foreign.chunk_rows else 'runs'} of {foreign.run_rows:,} rows"


def _draw_rows(foreign: Foreign, labels: np.ndarray, shares: Shares) -> dict[str, np.ndarray]:
    """Each class by the shares; every split in random order."""
    nothing_given = np.full(len(labels), LEFT_OUT, np.int8)
    splits = assign(labels, nothing_given, np.arange(len(labels)), shares, foreign.seed)
    drawn = {name: np.flatnonzero(splits == position) for position, name in enumerate(SPLITS)}
    return {
        name: rows[random_order(len(rows), random_key(foreign.seed, "pack order", name))]
        for name, rows in drawn.items()
    }


def _draw_runs(foreign: Foreign, labels: np.ndarray, shares: Shares) -> dict[str, np.ndarray]:
    """Whole runs by the shares; every split in the order of the file.

    Runs are sorted by the class of their middle row, at random within a class, and the splits take
    turns, so that in a file ordered by class each split gets its share of every class's runs.
    """
    firsts = np.arange(0, foreign.rows, foreign.run_rows)
    order = random_order(len(firsts), random_key(foreign.seed, "pack split"))
    middle = labels[np.minimum(firsts + foreign.run_rows // 2, foreign.rows - 1)]
    order = order[np.argsort(middle[order], kind="stable")]
    counts = cut(len(firsts), shares)
    turns = np.concatenate([(np.arange(count) + 0.5) / max(1, count) for count in counts])
    splits = np.repeat(np.arange(len(counts)), counts)[np.argsort(turns, kind="stable")]
    drawn = {}
    for position, name in enumerate(SPLITS):
        chosen = firsts[np.sort(order[splits == position])]
        rows = (chosen[:, None] + np.arange(foreign.run_rows)).ravel()
        drawn[name] = rows[rows < foreign.rows]  # the last run may be short
    return drawn
