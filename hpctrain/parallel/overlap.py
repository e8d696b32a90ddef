"""Overlap: gradients are summed in segments while backward still computes the remaining ones.

Backward computes the gradients of the last parameters first. The gradients are therefore split at
borders between parameters. All ranks sum the segments in one order, that in which backward is
likely to complete them, and then the rest of the message (moments, scalars, seconds), so that
collectives match in whatever order gradients become ready. A segment is sent as soon as its
gradients are complete and all segments before it have been sent, in the last batch that the rank
has in a step; earlier batches only accumulate. Segments that backward does not complete (a
parameter that it does not reach, a rank without samples) are sent after backward.

torch calls a hook of a parameter when the gradients of all its uses are in `.grad`. It calls the
hook again for each backward within backward (a reentrant checkpoint) that uses the parameter too.
If its segment was sent by then, this is an error instead of a wrong sum.

One thread makes the blocking calls. Nothing else in the process communicates at that time, so
MPI_THREAD_SERIALIZED is sufficient. On a GPU the thread has its own stream, which waits for the
work that backward had queued when a segment was complete; the step's stream waits for it.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future
from functools import partial

import torch

from hpctrain.errors import RunError, UsageError
from hpctrain.parallel.message import Layout, Message
from hpctrain.parallel.mpi import MPI, Comm, library
from hpctrain.parallel.reduce import Bfloat16Reduce, Reduce
from hpctrain.parallel.transport import HostMemory, Pinned, Transport
from hpctrain.parallel.tree import TreeReduce
from hpctrain.streams import Event, new_stream, record_event, start_thread, use_stream


def split_gradients(layout: Layout, parts: int) -> list[range]:
    """Split the gradients into at most `parts` segments of about equal size.

    Each begins at a parameter, so there are fewer if a parameter is larger than its part. They are
    in the order in which backward completes them if it computes the model's parameters from the
    last to the first.
    """
    starts = [segment.offset for segment in layout.segments]
    borders = set()
    for part in range(parts):
        wanted = layout.length * part // parts
        borders.add(min(starts, key=lambda start: abs(start - wanted)))
    begins = sorted(borders)
    ends = [*begins[1:], layout.length]
    first = {  # of the model's parameters in each: backward computes its gradient last
        span: min(segment.number for segment in layout.segments if segment.offset in span)
        for span in map(range, begins, ends)
    }
    return sorted(first, key=lambda span: -first[span])


class Overlapped(Reduce):
    """A reduction composed of several: one for each segment of the gradients, one for the rest."""

    def __init__(self, message: Message, spans: Sequence[range], parts: Sequence[Reduce]) -> None:
        """`parts` sum the `spans` of the gradients, in this order, and then the rest.

        Raises UsageError if MPI may be called by one thread only.
        """
        if MPI.Query_thread() < MPI.THREAD_SERIALIZED:
            raise UsageError(
                f"--overlap needs MPI_THREAD_SERIALIZED, without which {library()} was started:"
                " leave it out"
            )
        super().__init__(parts[0].transport, message.tensor)
        self._message = message
        self._parts = parts
        # the parameters in each part, by their number in the layout
        self._members = [
            [
                number
                for number, segment in enumerate(message.layout.segments)
                if segment.offset in span
            ]
            for span in spans
        ]
        self._hooks = [
            message.parameters[number].register_post_accumulate_grad_hook(
                partial(self._complete, part, number)
            )
            for part, members in enumerate(self._members)
            for number in members
        ]
        self._thread = start_thread("overlap", message.device)
        self._stream = new_stream(message.device)
        self._sums: list[Future[None]] = []  # of the parts that were sent in this step
        self.begin([])

    def begin(self, shards: Sequence[int]) -> None:
        """Begin a step in which this rank processes one batch of each of `shards`."""
        self._shards = [*shards]  # the remaining ones of this step
        self._missing = [{*members} for members in self._members]  # gradients, of the batch

    def accumulate(self, shard: int) -> None:
        """Accumulate what the message holds after this rank has processed `shard`."""
        *segments, rest = self._parts
        if self._shards == [shard]:
            while len(self._sums) < len(segments):
                self._send(shard)
        else:
            for part in segments:
                part.accumulate(shard)
        rest.accumulate(shard)
        self.begin(self._shards[1:])

    def __call__(self) -> None:
        """Send the remaining parts; the current stream waits for all sums. Collective."""
        while len(self._sums) < len(self._parts):
            self._send(None)
        self._sums[-1].result()
        record_event(self._message.device, stream=self._stream).wait()
        self._sums = []

    def close(self) -> None:
        """Remove the hooks and end the thread, without waiting for sums in progress."""
        for hook in self._hooks:
            hook.remove()
        self._thread.shutdown(wait=False, cancel_futures=True)

    def _complete(self, part: int, number: int, parameter: torch.Tensor) -> None:
        """Hook of a parameter, called when backward has accumulated its gradient."""
        if part < len(self._sums):
            raise RunError(
                f"the gradient of {self._message.layout.segments[number].name} grew after it was"
                " summed: a layer is used by two backward passes within the one (reentrant"
                " checkpoints); use --overlap 0"
            )
        self._missing[part].discard(number)
        if len(self._shards) == 1:
            while (sent := len(self._sums)) < len(self._members) and not self._missing[sent]:
                self._message.add_gradients(self._members[sent])
                self._send(self._shards[0])

    def _send(self, shard: int | None) -> None:
        """Queue the sum of the next part, after accumulating `shard` into it, if given."""
        part = self._parts[len(self._sums)]
        ready = record_event(self._message.device)
        future = self._thread.submit(self._sum, part, shard, ready, before=self._sums[-1:])
        self._sums.append(future)

    def _sum(
        self,
        part: Reduce,
        shard: int | None,
        ready: Event,
        before: list[Future[None]],
    ) -> None:
        for earlier in before:
            earlier.result()  # after a failure nothing is sent: the others wait for that part
        with use_stream(self._stream):
            ready.wait()
            if shard is not None:
                part.accumulate(shard)
            part()


def choose_reduce(
    comm: Comm,
    message: Message,
    shards: Sequence[range] | None = None,
    comm_dtype: str = "fp32",
    transport: Transport | None = None,
    overlap: int = 0,
) -> Reduce:
    """Make the reduction for this message; by default one Allreduce.

    With the `shards` that each rank carries, it sums in tree order. With `comm_dtype` "bf16",
    gradients are sent in half the bytes. `overlap` is the largest number of gradient segments that
    are summed while backward runs. The default `transport` is MPI, from a GPU through pinned host
    memory. Raises UsageError if the reduction is not possible.
    """
    length = message.layout.length
    if transport is None:
        transport = Pinned(comm) if message.device.type == "cuda" else HostMemory(comm)

    def make_sum(span: range) -> Reduce:
        vector = message.tensor[span.start : span.stop]
        if shards is not None:
            return TreeReduce(transport, vector, shards)
        if comm_dtype == "bf16":
            gradients = len(range(span.start, min(span.stop, length)))
            return Bfloat16Reduce(transport, vector, gradients)
        return Reduce(transport, vector)

    if not overlap:
        return make_sum(range(len(message.tensor)))
    spans = split_gradients(message.layout, overlap)
    rest = range(length, len(message.tensor))
    parts = [make_sum(span) for span in (*spans, rest)]
    return Overlapped(message, spans, parts)
