"""Mean, deviation and range of the training images of an external file.

``--normalize pack`` needs them, and transforms of libraries, which take values in [0, 1].

The ranks read a part each, in the order of the file. Sums are exact, so the result depends neither
on the order nor on the number of ranks, and equals that of a pack of the same images. The plan
keeps it: a resumed run reads nothing.
"""

from __future__ import annotations

import sys
import time
from typing import NamedTuple

import numpy as np

from hpctrain.data.partition import READ_BYTES
from hpctrain.data.scale import Ranges, Scale
from hpctrain.data.split import Split
from hpctrain.data.statistics import ChannelStatistics
from hpctrain.parallel.mpi import Comm, allgather, on_all
from hpctrain.text import say
from hpctrain.watchdog import doing

SAY_EVERY = 10.0  # seconds between two lines of progress


class Measured(NamedTuple):
    """What is known of all training images."""

    mean: tuple[float, ...]  # (C,), of divided values
    std: tuple[float, ...]
    stored_range: Ranges


def measure_training_images(train: Split, comm: Comm) -> Measured:
    """Return the statistics of all images of a split.

    Collective. Raises the same error on all ranks for images that cannot be used.
    """
    order = np.arange(len(train))
    if train.info.rows is not None:
        order = np.argsort(train.info.rows, kind="stable")
    start = len(train) * comm.rank // comm.size
    stop = len(train) * (comm.rank + 1) // comm.size
    with on_all(comm):
        mine = add_images(train, order[start:stop], is_shown=comm.rank == 0)
    total, *others = allgather(comm, mine)
    for other in others:
        total.merge(other)
    mean, std = total.mean_and_std(train.divisor)
    return Measured(mean, std, (tuple(total.low.tolist()), tuple(total.high.tolist())))


def describe_range(stored_range: Ranges | None, probed: Scale) -> str:
    """Return a note if values go beyond the range of the probed images by more than its width."""
    if stored_range is None:
        return ""
    measured = probed.with_ranges(*stored_range)
    low = measured.low
    high = measured.high
    width = probed.high - probed.low
    if probed.low - low <= width and high - probed.high <= width:
        return ""
    return (
        f"the values of all training images are from {low:g} to {high:g}, those of the few that"
        f" were read before from {probed.low:g} to {probed.high:g}: if some of them mark missing"
        " data, give --nodata"
    )


def add_images(train: Split, samples: np.ndarray, is_shown: bool) -> ChannelStatistics:
    """Return the statistics of these samples (n,), as stored. Raises RunError."""
    statistics = ChannelStatistics(train.image_shape[2], train.nodata)
    at_a_time = max(1, READ_BYTES // max(1, train.pack.image_bytes))
    buffer = np.empty((min(at_a_time, len(samples)), *train.image_shape), train.dtype)
    said = time.monotonic()
    for first in range(0, len(samples), at_a_time):
        doing(f"computing statistics: image {first:,} of {len(samples):,}")
        part = samples[first : first + at_a_time]
        statistics.add(train.gather(part, buffer[: len(part)]))
        if is_shown and time.monotonic() - said > SAY_EVERY:
            said = time.monotonic()
            share = (first + len(part)) / len(samples)
            say(f"{share:.0%} of the training images read: range, mean and std", sys.stderr)
    return statistics
