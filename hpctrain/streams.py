"""Streams and events of a device, and what is built on them.

    Event, Stream                   in which order the device works, and where the host waits for it
    Upload, copy_to_device          to the device, beside the kernels that train
    Snapshot, copy_to_host          from the device, without a wait for the step that is under way
    Clock                           seconds by the device
    GraphRecorder                   CUDA graphs

A stream of a GPU is a queue of copies and kernels, an event a place in one:
https://docs.pytorch.org/docs/stable/notes/cuda.html. All waits of the package for a GPU are here.
The host queues work and runs ahead of it. On the CPU everything is done when the call returns, and
the same calls find nothing to wait for.

A thread that waits for an event sleeps (cudaEventBlockingSync). CUDA's default is to spin, which
takes the core from the threads that read and decode, where a launcher binds a rank to one.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor

Name = TypeVar("Name")
Made = TypeVar("Made")
Tensors = TypeVar("Tensors", bound=tuple[Tensor, ...])
IN_FLIGHT = {"cpu": 0, "cuda": 1}  # steps or blocks that are queued before results are read


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

    def wait_event(self, event: Event, tensors: Iterable[Tensor] = ()) -> None:
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


class Upload:
    """One thread's way to a device: a buffer for rows, and a stream that takes them there. Another
    thread may take what was made.
    """

    def __init__(
        self, shape: tuple[int, ...], dtype: np.dtype, device: torch.device | str = "cpu"
    ) -> None:
        """A buffer of `shape`, (most rows, H, W, C)."""
        self.device = torch.device(device)
        self._stream = Stream(self.device)
        kind = torch.from_numpy(np.empty(0, dtype)).dtype
        self._buffer = torch.empty(shape, dtype=kind, pin_memory=self.device.type == "cuda")
        self._copied = self._stream.record_event()  # nothing was queued yet

    def buffer(self, count: int) -> np.ndarray:
        """Memory for rows, (count, H, W, C), to be filled; waits until what lay there is copied."""
        self._copied.synchronize()
        return self._buffer[:count].numpy()

    def make(self, count: int, work: Callable[[Tensor], Made]) -> Made:
        """What `work` makes of the first `count` rows, on the device, to be used by `take`.

        Nothing of it may share memory with the rows: on the CPU they are those of the buffer.
        """
        with self._stream.select():
            rows = self._buffer[:count].to(self.device, non_blocking=True)
            self._copied = self._stream.record_event()
            return work(rows)

    def record_event(self) -> Event:
        """When all is done that was made until now."""
        return self._stream.record_event()

    def take(self, made: Event, tensors: Iterable[Tensor]) -> None:
        """Let this thread's current stream use tensors that were made before the event `made`."""
        current_stream(self.device).wait_event(made, tensors)


def copy_to_device(tensor: Tensor, device: torch.device) -> Tensor:
    """A small tensor of the CPU on `device`, without waiting: on its way to a GPU it lies in pinned
    memory, which torch keeps until it is copied.
    """
    if device.type == "cpu":
        return tensor
    return tensor.pin_memory().to(device, non_blocking=True)


class Snapshot:
    """A copy of a small tensor, on its way to the host."""

    def __init__(self, tensor: Tensor) -> None:
        self._host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=tensor.is_cuda)
        self._host.copy_(tensor, non_blocking=True)
        self._copied = record_event(tensor.device)

    @property
    def arrived(self) -> bool:
        """Whether they are there."""
        return self._copied.query()

    def array(self) -> np.ndarray:
        """The numbers, of the tensor's shape; waits until they are there."""
        self._copied.synchronize()
        return self._host.numpy()

    def numbers(self) -> Any:
        """A number of Python, or a list of them; waits until they are there."""
        return self.array().tolist()


def copy_to_host(
    queued: Iterator[tuple[Name, Tensor]], device: torch.device
) -> Iterator[tuple[Name, np.ndarray]]:
    """Copy tensors to the host in the order in which they are `queued` on the device. Each is read
    when IN_FLIGHT more have been queued, so that the device always has work.
    """
    waiting: deque[tuple[Name, Snapshot]] = deque()
    for name, tensor in queued:
        waiting.append((name, Snapshot(tensor)))
        if len(waiting) > IN_FLIGHT[device.type]:
            name, snapshot = waiting.popleft()
            yield name, snapshot.array()
    for name, snapshot in waiting:
        yield name, snapshot.array()


class Clock:
    """Seconds of a step's computation and of its reduction, by the device: those of the newest
    step that it has done. On the CPU that is this one; nothing waits for a GPU.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._laps: deque[list[Event]] = deque()  # begun, computed, reduced
        self.compute = self.reduce = 0.0

    def begin(self) -> None:
        """A step begins."""
        self._laps.append([record_event(self._device, timing=True)])

    def computed(self) -> float:
        """Here its computation ends; seconds of a computation."""
        self._laps[-1].append(record_event(self._device, timing=True))
        self._look()
        return self.compute

    def reduced(self) -> None:
        """Here its reduction ends."""
        self._laps[-1].append(record_event(self._device, timing=True))
        self._look()

    def _look(self) -> None:
        while self._laps:
            begun, *later = self._laps[0]
            if later and later[0].query():
                self.compute = begun.elapsed_time(later[0]) / 1000
            if len(later) < 2 or not later[1].query():
                return
            self.reduce = later[0].elapsed_time(later[1]) / 1000
            self._laps.popleft()


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

    def warm_up(self, work: Callable[[], Tensors]) -> Tensors:
        """Run `work` on the stream on which it will be recorded, in order with the current one:
        as that one waits for it, tensors that `work` only reads need no record_stream.
        """
        current = current_stream(self._stream.device)
        self._stream.wait_stream(current)
        with self._stream.select():
            found = work()
        current.wait_event(self._stream.record_event(), found)
        return found

    def __call__(self, work: Callable[[], Tensors]) -> tuple[Tensors, Callable[[], None]]:
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
