"""Ranks simulated by threads of this process: sums over any number of ranks, without MPI."""

from __future__ import annotations

import itertools
import queue
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

from tests.support.api import Transport


class SimulatedRank(Transport):
    """The transport of one of `size` ranks; `sent` holds the bytes of each message it has sent."""

    def __init__(self, rank, size, messages):
        super().__init__(SimpleNamespace(rank=rank, size=size))
        self.messages, self.sent = messages, []

    def allreduce(self, vector):
        raise NotImplementedError("its order of additions would be a matter of chance")

    def prepare(self, sends, receives):
        return lambda: self.exchange(sends, receives)

    def exchange(self, sends, receives):
        own = self.comm.rank
        for peer, vectors in sends:
            if peer != own:
                self.sent.append(sum(vector.nbytes for vector in vectors))
            self.messages[own, peer].put([vector.clone() for vector in vectors])
        for peer, vectors in receives:
            arrived = self.messages[peer, own].get(timeout=60)
            assert arrived is not None, f"rank {peer} failed"
            for vector, values in zip(vectors, arrived, strict=True):
                vector.copy_(values)


def on_simulated_ranks(size, work):
    """Return what ``work(transport)`` returns on each of `size` ranks."""
    pairs = itertools.product(range(size), repeat=2)
    messages = {pair: queue.SimpleQueue() for pair in pairs}

    def on_rank(rank):
        try:
            return work(SimulatedRank(rank, size, messages))
        except BaseException:
            for peer in range(size):  # which would wait for this rank
                messages[rank, peer].put(None)
            raise

    with ThreadPoolExecutor(size) as threads:
        return list(threads.map(on_rank, range(size)))
