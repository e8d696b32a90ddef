"""Tree order: the same bits on any number of ranks, whatever each of them carries."""

from __future__ import annotations

import itertools
import math
import queue
import random
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from hpctrain.errors import UsageError
from hpctrain.parallel.halving import additions, subtrees
from hpctrain.parallel.placement import assign_shards
from hpctrain.parallel.transport import HostMemory, Transport
from hpctrain.parallel.tree import Subtrees, TreeAllreduce

LENGTH = 101


def tree_sum(leaves):
    """The definition: split after the largest power of two below the number of leaves."""
    if len(leaves) == 1:
        return leaves[0]
    half = 2 ** math.ceil(math.log2(len(leaves)) - 1)
    return tree_sum(leaves[:half]) + tree_sum(leaves[half:])


def leaves_of(shards, missing=()):
    """Numbers of very different size, so that every order of summation gives other bits."""
    rng = np.random.default_rng(shards)
    values = rng.standard_normal((shards, LENGTH)) * 10 ** rng.uniform(-3, 3, (shards, LENGTH))
    values[list(missing)] = 0
    return values.astype(np.float32)


def layouts(shards):
    """Runs of shards of all ranks: every number of ranks, and uneven loads."""
    for size in range(1, shards + 1):
        yield assign_shards(shards, size)
        for loads in ([3] + [1] * (size - 1), [1] * (size - 1) + [5]):
            yield assign_shards(shards, size, loads)


@pytest.mark.parametrize("shards", range(1, 10))
def test_however_shards_are_carried_the_additions_are_those_of_the_tree(shards):
    names = [str(j) for j in range(shards)]

    def written(names):
        if len(names) == 1:
            return names[0]
        half = 2 ** math.ceil(math.log2(len(names)) - 1)
        return f"({written(names[:half])}+{written(names[half:])})"

    for runs in layouts(shards):
        spans = [span for run in runs for span in subtrees(run, (0, shards))]
        assert list(itertools.chain(*(range(*span) for span in spans))) == list(range(shards))
        rows = [written(names[lo:hi]) for lo, hi in spans]
        for i, j in additions(spans, [(0, shards)]):
            rows[i] = f"({rows[i]}+{rows[j]})"
        assert rows[0] == written(names)


@pytest.mark.parametrize("shards", [1, 2, 3, 6, 7, 8])
@pytest.mark.parametrize("missing", [(), (0,), (1, 2), (5, 6, 7), range(8)], ids=str)
def test_a_ranks_subtrees_are_summed_in_tree_order(shards, missing):
    missing = [j for j in missing if j < shards]
    leaves = leaves_of(shards, missing)
    for runs in layouts(shards):
        for run in runs:
            spans = subtrees(run, (0, shards))
            message = torch.zeros(LENGTH)
            sums = Subtrees(run, spans, message)
            for _ in range(2):  # the second time in buffers that hold old numbers
                message.zero_()
                for shard in run:
                    if shard not in missing:
                        message += torch.from_numpy(leaves[shard])
                        sums.accumulate(shard)
                message[0] += 1e-8  # what a rank writes after its last shard stays in
                found = sums.finish()
                assert found[-1] is message
                for (lo, hi), row in zip(spans, found, strict=True):
                    expected = tree_sum(leaves[lo:hi])
                    assert row[1:].numpy().tobytes() == expected[1:].tobytes()
                sums.release(found)


def test_the_buffers_of_a_rank_are_few():
    for shards, size in ((8, 1), (8, 2), (8, 4), (8, 8), (64, 4)):
        run = assign_shards(shards, size)[-1]
        message = torch.zeros(3)
        sums = Subtrees(run, subtrees(run, (0, shards)), message)
        for shard in run:
            sums.accumulate(shard)
        sums.release(sums.finish())
        assert len(sums._free) == math.log2(shards / size)


@pytest.mark.mpi
@pytest.mark.parametrize("shards", [4, 5, 6, 7, 8, 13])
@pytest.mark.parametrize("uneven", [False, True])
def test_all_ranks_get_the_sum_in_tree_order(comm, shards, uneven):
    leaves = leaves_of(shards)
    runs = assign_shards(shards, comm.size, range(comm.size, 0, -1) if uneven else ())
    spans = subtrees(runs[comm.rank], (0, shards))
    sums = [torch.from_numpy(tree_sum(leaves[lo:hi]).copy()) for lo, hi in spans]
    TreeAllreduce(HostMemory(comm), runs, sums[-1])(sums)
    expected = tree_sum(leaves)
    assert sums[-1].numpy().tobytes() == expected.tobytes()
    one_by_one = sum(leaves[1:], start=leaves[0])
    assert one_by_one.tobytes() != expected.tobytes(), "these leaves show nothing"


@pytest.mark.mpi
def test_a_message_shorter_than_the_ranks_is_summed_too(comm):
    runs = assign_shards(comm.size, comm.size)
    sums = [torch.full((1,), comm.rank + 1.0)]
    TreeAllreduce(HostMemory(comm), runs, sums[0])(sums)
    assert sums[0] == comm.size * (comm.size + 1) / 2


class Queues(Transport):
    """A transport between threads of this process."""

    def __init__(self, rank, size, queues):
        super().__init__(SimpleNamespace(rank=rank, size=size))
        self._queues = queues

    def exchange(self, sends, receives):
        for peer, vectors in sends:
            self._queues[self.comm.rank, peer].put([vector.clone() for vector in vectors])
        for peer, vectors in receives:
            for vector, sent in zip(
                vectors, self._queues[peer, self.comm.rank].get(timeout=20), strict=True
            ):
                vector.copy_(sent)


@pytest.mark.parametrize("size", [5, 7, 11])
@pytest.mark.parametrize("more", [0, 3, 40])
def test_more_ranks_than_here_get_the_sum_in_tree_order(size, more):
    """From 5 ranks on, two of them may send a rank its slice of the same subtrees."""
    shards, leaves = size + more, leaves_of(size + more)
    runs = assign_shards(shards, size, [1 + rank % 3 for rank in range(size)])
    queues = {(a, b): queue.Queue() for a in range(size) for b in range(size)}

    def work(rank):
        spans = subtrees(runs[rank], (0, shards))
        sums = [torch.from_numpy(tree_sum(leaves[lo:hi]).copy()) for lo, hi in spans]
        TreeAllreduce(Queues(rank, size, queues), runs, sums[-1])(sums)
        return sums[-1].numpy().tobytes()

    with ThreadPoolExecutor(size) as pool:
        assert set(pool.map(work, range(size))) == {tree_sum(leaves).tobytes()}


def old_carried(shards, size, loads):
    """The definition: every shard to the rank that would have the least to do with it."""
    counts = [1] * size
    for _ in range(shards - size):
        counts[min(range(size), key=lambda r: (counts[r] + 1) / loads[r])] += 1
    return counts


def test_every_shard_goes_to_the_rank_with_the_least_to_do():
    draw = random.Random(5)
    for _ in range(300):
        size = draw.randint(1, 13)
        shards = size + draw.randint(0, 60)
        values = draw.choice([[1], [1, 2, 3], [0.1, 0.3, 7.0], [draw.random() + 1e-9]])
        loads = [draw.choice(values) for _ in range(size)]
        runs = assign_shards(shards, size, loads)
        assert [len(run) for run in runs] == old_carried(shards, size, loads)
        assert [j for run in runs for j in run] == list(range(shards))
        if set(loads) == {1}:
            assert runs == assign_shards(shards, size)


def test_shards_go_to_ranks_in_proportion_to_their_loads():
    def counts(*arguments):
        return [len(run) for run in assign_shards(*arguments)]

    assert counts(8, 3) == [3, 3, 2]
    assert counts(4, 2, [3, 1]) == [3, 1]
    assert counts(8, 2, [3, 1]) == [6, 2]
    assert counts(5, 2, [100, 1]) == [4, 1]
    assert counts(12, 3, [1, 2, 3]) == [2, 4, 6]
    for shards, size in ((7, 3), (8, 8), (13, 5)):
        runs = assign_shards(shards, size, range(1, size + 1))
        assert list(itertools.chain(*runs)) == list(range(shards))
    with pytest.raises(UsageError, match="9 ranks cannot carry 8 shards"):
        assign_shards(8, 9)
    with pytest.raises(UsageError, match="--worker-load names 2 ranks, but there are 3"):
        assign_shards(8, 3, [1, 1])
