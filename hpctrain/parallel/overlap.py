"""Overlap: segments of the gradients are summed while backward still computes the others.

Backward gives the gradients of the last parameters first. So the gradients are cut at borders
between parameters, and all ranks sum the segments in one order, from the last to the first, then
the rest of the message (moments, scalars, slots): collectives meet whatever the order in which
gradients come. A segment goes as soon as its gradients are there and all segments before it went,
in the last batch that the rank has in a step; earlier ones only add to it. What backward did not
complete (a parameter without a part in it, a rank without rows) goes when backward is over.

A hook of each parameter counts; a segment that is complete is added to the message. torch calls it
once in a backward, after all that the parameter gave in its several places is in `.grad`, but once
more in each backward within backward (reentrant checkpoints). How often is enough is seen in the
batches before; one call more, after the segment went, is an error and not a wrong sum.

One thread makes the calls that wait. Nothing else in a process communicates meanwhile, so it is
enough if MPI lets threads call it in turn. On a GPU the thread has a stream of its own, which waits
for what backward had queued when a segment was complete, and the step's stream waits for it.

--overlap auto: whether gradients are summed in segments while backward runs, by measurement.

The first STEPS steps of a launch run with one Allreduce. From the medians of their computation and
reduction follows how many segments could hide most of the reduction (`best_segments`); where they
could save GAIN of a step, the next STEPS steps run with them, and they stay if those were shorter
by as much. All ranks share what they measured, once after each of the two: all choose the same.

With --deterministic the bits are the same either way. Ranks and machines may be others after a
resume, so each launch measures for itself, and its record says what it chose.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import NamedTuple

import torch

from hpctrain.errors import RunError
from hpctrain.parallel.message import Layout, Message
from hpctrain.parallel.mpi import check_threads
from hpctrain.parallel.reduce import Reduce
from hpctrain.streams import Event, Stream, current_stream, record_event


def cut(layout: Layout, parts: int) -> list[range]:
    """The gradients in at most `parts` segments of about equal size, the last one first.

    Each begins where a parameter does: fewer where a parameter is larger than its part.
    """
    starts = [segment.offset for segment in layout.segments]
    wanted = [layout.length * part // parts for part in range(parts)]
    borders = sorted({min(starts, key=lambda start: abs(start - place)) for place in wanted})
    ends = [*borders[1:], layout.length]
    return [range(*border) for border in zip(borders, ends, strict=True)][::-1]


class Overlapped(Reduce):
    """A reduction made of several: one for each segment of the gradients, one for the rest."""

    def __init__(self, message: Message, spans: Sequence[range], parts: Sequence[Reduce]) -> None:
        """`parts` sum the `spans` of the gradients, in this order, and then the rest.

        UsageError where MPI may be called by one thread only.
        """
        check_threads("--overlap")
        self.transport, self._parts, self._device = parts[0].transport, parts, message.device
        self._message = message
        segments = message.layout.segments
        self._names = [segment.name for segment in segments]
        self._part = [sum(span.start > s.offset for span in spans) for s in segments]
        self._members = [
            [number for number, of in enumerate(self._part) if of == part]
            for part in range(len(parts))
        ]
        self._enough = [0] * len(segments)  # calls in a batch, by parameter; 0 = not known yet
        self._shards: list[int] = []  # of this rank, still to come in this step
        self._sent = 0  # parts, in this step
        self._last: Future[None] = Future()  # of the part that was sent last
        self._last.set_result(None)
        self._forget()
        self._thread = ThreadPoolExecutor(1, "overlap")
        self._stream = Stream(message.device)
        self._hooks = [
            message.parameters[name].register_post_accumulate_grad_hook(
                partial(self._count, number)
            )
            for number, name in enumerate(self._names)
        ]

    def begin(self, shards: Sequence[int]) -> None:
        """A step begins in which this rank works through `shards`, one batch of each."""
        self._shards = list(shards)
        self._forget()

    def accumulate(self, shard: int) -> None:
        """The message holds what this rank's shards gave so far, `shard` being the last of them."""
        self._enough = list(map(max, self._enough, self._calls))
        *segments, rest = self._parts
        if self._shards == [shard]:
            while self._sent < len(segments):
                self._send(shard)
        else:
            for part in segments:
                part.accumulate(shard)
        rest.accumulate(shard)
        self._shards = self._shards[1:]
        self._forget()

    def __call__(self) -> None:
        """Sum what is not under way yet, and wait for all, in this thread's stream. Collective."""
        while self._sent < len(self._parts):
            self._send(None)
        self._last.result()
        current_stream(self._device).wait_stream(self._stream)
        self._sent = 0

    def close(self) -> None:
        """Let hooks and thread go; what is under way is not waited for."""
        for hook in self._hooks:
            hook.remove()
        self._thread.shutdown(wait=False, cancel_futures=True)

    def _forget(self) -> None:
        """Count anew. The rest, which has no gradients, is never complete."""
        self._calls = [0] * len(self._part)
        self._missing = [self._part.count(number) for number in range(len(self._parts) - 1)] + [1]

    def _count(self, number: int, parameter: torch.Tensor) -> None:
        """The hook of a parameter: its gradient holds what this backward gave so far."""
        part = self._part[number]
        if part < self._sent:
            raise RunError(
                f"the gradient of {self._names[number]} grew after it was summed: a backward within"
                " backward (a reentrant checkpoint) came that was not in the batches before; use"
                " --overlap 0"
            )
        self._calls[number] += 1
        self._missing[part] -= self._calls[number] == self._enough[number]
        while len(self._shards) == 1 and not self._missing[self._sent]:
            self._message.add_gradients(self._members[self._sent])
            self._send(self._shards[0])

    def _send(self, shard: int | None) -> None:
        """Have the next part summed; `shard`, if any, was not taken into it yet."""
        now, before = record_event(self._device), self._last
        self._last = self._thread.submit(self._sum, self._parts[self._sent], shard, now, before)
        self._sent += 1

    def _sum(self, part: Reduce, shard: int | None, ready: Event, before: Future[None]) -> None:
        before.result()  # after a failure nothing goes out: the others wait for that part
        with self._stream.select():
            self._stream.wait_event(ready)
            if shard is not None:
                part.accumulate(shard)
            part()


STEPS, SKIPPED = 12, 4  # of a phase, and those of them in which libraries still warm up
GAIN = 0.03  # of a step's time, below which one Allreduce stays
BACKWARD = 2 / 3  # of forward and backward: a product forward makes two backward
SEGMENTS = (2, 4, 8, 16)


class Times(NamedTuple):
    """Medians of a phase, in seconds."""

    step: float
    compute: float  # of the slowest rank: forward and backward
    reduce: float  # on this rank, waiting for the others included


def exposed(times: Times, segments: int) -> float:
    """Seconds of the reduction that are left after backward. Segment k of n is complete k / n of
    the way through backward, each takes reduce / n, and one is summed at a time.
    """
    backward = BACKWARD * times.compute
    return max(times.reduce / segments, times.reduce - backward * (segments - 1) / segments)


def best_segments(times: Times) -> int:
    """The fewest segments that leave little more of the reduction than any number; 0 where they
    would save less than GAIN of a step.
    """
    least = min(exposed(times, segments) for segments in SEGMENTS)
    if times.reduce - least < GAIN * times.step:
        return 0
    near = least + GAIN * times.step
    return next(segments for segments in SEGMENTS if exposed(times, segments) <= near)


class OverlapTrial:
    """What a launch has measured, and what follows."""

    def __init__(self, first: int) -> None:
        """After `first` steps of earlier launches."""
        self._due = first + STEPS  # the step after which there is something to decide
        self._measured: list[Times] = []
        self._without: Times | None = None
        self.segments = 0

    def add(self, step: float, compute: float, reduce: float) -> None:
        """One step's seconds."""
        self._measured.append(Times(step, compute, reduce))

    def follows(self, step: int) -> bool:
        """Whether something is decided after this step, as all ranks know beforehand."""
        return step == self._due

    def times(self) -> Times:
        """The medians of this phase."""
        columns = zip(*self._measured[SKIPPED:], strict=True)
        return Times(*(statistics.median(column) for column in columns))

    def decide(self, by_rank: list[Times]) -> str | None:
        """Choose `segments` from what all ranks measured in this phase; what it came to, where that
        stays.
        """
        # Who computed longest waited least: the shortest reduction is the one without waiting.
        found = by_rank[0]._replace(reduce=min(times.reduce for times in by_rank))
        self._measured.clear()
        if self._without is None:
            self._without, self.segments = found, best_segments(found)
            self._due += STEPS
            if self.segments:
                return None
            self._due = -1
            return f"{_without(found)}: segments could save less than {GAIN:.0%}"
        self._due, tried, before = -1, self.segments, self._without
        gain = 1 - found.step / before.step
        self.segments = tried if gain >= GAIN else 0
        kept = f"{tried} segments" if self.segments else "one Allreduce"
        return f"{_without(before)}, {_ms(found.step)} with {tried} segments ({gain:+.0%}): {kept}"


def _without(times: Times) -> str:
    return (
        f"--overlap auto: a step took {_ms(times.step)} with one Allreduce (computation"
        f" {_ms(times.compute)}, reduction {_ms(times.reduce)})"
    )


def _ms(seconds: float) -> str:
    return f"{1000 * seconds:,.1f} ms"
