"""Choice of the reduction of a run."""

from __future__ import annotations

from collections.abc import Sequence

from hpctrain.parallel.message import Message
from hpctrain.parallel.mpi import Comm
from hpctrain.parallel.overlap import Overlapped, cut
from hpctrain.parallel.reduce import Bfloat16Reduce, Reduce
from hpctrain.parallel.transport import HostMemory, Pinned, Transport
from hpctrain.parallel.tree import TreeReduce


def choose_reduce(
    comm: Comm,
    message: Message,
    runs: Sequence[range] | None = None,
    comm_dtype: str = "fp32",
    transport: Transport | None = None,
    overlap: int = 0,
) -> Reduce:
    """Make the reduction for this message; by default one Allreduce.

    With `runs`, the shards that each rank carries, it sums in tree order. With `comm_dtype` "bf16",
    gradients are sent in half the bytes. `overlap` is the largest number of gradient segments that
    are summed while backward runs. The default `transport` is MPI, from a GPU through pinned host
    memory. Raises UsageError if the reduction is not possible.
    """
    on_gpu, length = message.device.type == "cuda", message.layout.length
    way = transport or (Pinned(comm) if on_gpu else HostMemory(comm))

    def over(span: range) -> Reduce:
        vector = message.tensor[span.start : span.stop]
        if runs is not None:
            return TreeReduce(way, vector, runs)
        if comm_dtype == "bf16":
            return Bfloat16Reduce(way, vector, len(range(span.start, min(span.stop, length))))
        return Reduce(way, vector)

    if not overlap:
        return over(range(len(message.tensor)))
    spans = cut(message.layout, overlap)
    rest = range(length, len(message.tensor))
    return Overlapped(message, spans, [over(span) for span in (*spans, rest)])
