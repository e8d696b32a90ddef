"""Streams and events: in which order a device works, and where the host waits for it.

A stream of a GPU is a queue of copies and kernels, an event a place in one:
https://docs.pytorch.org/docs/stable/notes/cuda.html. All waits of the package for a GPU are here.
On the CPU everything is done when the call returns, and the same calls find nothing to wait for.

A thread that waits for an event sleeps (cudaEventBlockingSync). CUDA's default is to spin, which
takes the core from the threads that read and decode, where a launcher binds a rank to one.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import torch

Made = TypeVar("Made", bound=tuple[torch.Tensor, ...])


class Event:
    """A place in a stream: done once all that was queued before it is done."""

    def __init__(self, stream: torch.cuda.Stream | None, timing: bool = False) -> None:
        """Recorded here and now on `stream`, None for the CPU."""
        self._time, self._event = time.perf_counter(), None
        if stream is not None:
            self._event = torch.cuda.Event(enable_timing=timing, blocking=True)
            self._event.record(stream)

    def query(self) -> bool:
        """Whether it is done."""
        return self._event is None or self._event.query()

    def synchronize(self) -> None:
        """Let this thread wait for it."""
        if self._event is not None:
            self._event.synchronize()

    def wait(self, stream: torch.cuda.Stream) -> None:
        """Let a stream of a GPU wait for it, and no thread."""
        if self._event is not None:
            stream.wait_event(self._event)

    def elapsed_time(self, end: Event) -> float:
        """Milliseconds to `end`. Both are done, of one device, and recorded with `timing`."""
        if self._event is None or end._event is None:
            return 1000 * (end._time - self._time)
        return self._event.elapsed_time(end._event)


class Stream:
    """A queue of copies and kernels of `device`, beside its current stream."""

    def __init__(self, device: torch.device, stream: torch.cuda.Stream | None = None) -> None:
        """A new one, or torch's `stream`."""
        self.device, self._stream = device, stream
        if stream is None and device.type == "cuda":
            self._stream = torch.cuda.Stream(device)

    @contextmanager
    def select(self) -> Iterator[None]:
        """What this thread queues in the block goes to this stream. Its GPU becomes this thread's
        for good: a new thread's is the first, whatever the rank's, and torch would go back to it
        and start a context there.
        """
        if self._stream is None:
            yield
            return
        torch.cuda.set_device(self.device)
        with torch.cuda.stream(self._stream):
            yield

    def record_event(self, timing: bool = False) -> Event:
        """When all is done that was queued here until now."""
        return Event(self._stream, timing)

    def wait_event(self, event: Event, tensors: Iterable[torch.Tensor] = ()) -> None:
        """What is queued here from now on comes after `event`, and may use `tensors` of another
        stream: their memory is not used again before this stream is done with them.
        """
        if self._stream is None:
            return
        event.wait(self._stream)
        for tensor in tensors:
            tensor.record_stream(self._stream)

    def wait_stream(self, other: Stream) -> None:
        """What is queued here from now on comes after all that is queued on `other` now."""
        self.wait_event(other.record_event())

    def synchronize(self) -> None:
        """Let this thread wait for all that was queued here."""
        self.record_event().synchronize()


def current_stream(device: torch.device) -> Stream:
    """The stream of `device` to which this thread queues now."""
    return Stream(device, torch.cuda.current_stream(device) if device.type == "cuda" else None)


def record_event(device: torch.device, timing: bool = False) -> Event:
    """When all is done that was queued on the current stream of `device` until now."""
    return current_stream(device).record_event(timing)


class GraphRecorder:
    """Records work as CUDA graphs, which share one pool of memory: they run one after another.

    Warm-up and recording use one stream beside the current one, as
    torch.cuda.make_graphed_callables does. Autograd's AccumulateGrad nodes keep the stream on which
    they were created, so nodes of a warm-up on the default stream would queue work there during the
    capture, which invalidates it.
    """

    def __init__(self, device: torch.device) -> None:
        self._pool: Any = None
        self._stream = Stream(device)

    def warm_up(self, work: Callable[[], Made]) -> Made:
        """Run `work` on the stream on which it will be recorded, in order with the current one:
        as that one waits for it, tensors that `work` only reads need no record_stream.
        """
        current = current_stream(self._stream.device)
        self._stream.wait_stream(current)
        with self._stream.select():
            found = work()
        current.wait_event(self._stream.record_event(), found)
        return found

    def __call__(self, work: Callable[[], Made]) -> tuple[Made, Callable[[], None]]:
        """Record `work`, which was warmed up and does not run now: its results, which lie where
        every replay puts them, and the replay, queued on the current stream. Other threads may use
        the GPU meanwhile.
        """
        self._pool = self._pool or torch.cuda.graph_pool_handle()
        graph = torch.cuda.CUDAGraph()
        how = {"pool": self._pool, "stream": self._stream._stream}
        with torch.cuda.graph(graph, **how, capture_error_mode="thread_local"):
            found = work()
        return found, graph.replay
