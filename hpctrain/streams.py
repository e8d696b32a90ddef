"""Streams and events of a device, and the utilities built on them.

    Event, Stream                   the order of work on the device, and synchronization with it
    Upload, copy_to_device          copies to the device, concurrent with the training kernels
    Snapshot, copy_to_host          copies from the device, without waiting for the current step
    Clock                           seconds measured on the device
    GraphRecorder                   CUDA graphs

A stream of a GPU is a queue of copies and kernels; an event marks a position in one:
https://docs.pytorch.org/docs/stable/notes/cuda.html. All synchronization of the package with a GPU
is in this file. The host queues work and runs ahead of the device. On the CPU all work is done
when the call returns, and the same methods return immediately.

A thread that waits for an event sleeps (cudaEventBlockingSync). CUDA's default is to spin, which
takes the core from the threads that read and decode if a launcher binds a rank to one core.
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
IN_FLIGHT = {"cpu": 0, "cuda": 1}  # steps or blocks queued before results are read


class Event:
    """A marker in a stream, complete once all work that was queued before it is complete."""

    def __init__(self, stream: torch.cuda.Stream | None, timing: bool = False) -> None:
        """Record the event on `stream` now; None for the CPU."""
        self._time, self._event = time.perf_counter(), None
        if stream is not None:
            self._event = torch.cuda.Event(enable_timing=timing, blocking=True)
            self._event.record(stream)

    def query(self) -> bool:
        """Whether the event is complete."""
        return self._event is None or self._event.query()

    def synchronize(self) -> None:
        """Block this thread until the event is complete."""
        if self._event is not None:
            self._event.synchronize()

    def wait(self, stream: torch.cuda.Stream) -> None:
        """Make a GPU stream wait for the event, without blocking this thread."""
        if self._event is not None:
            stream.wait_event(self._event)

    def elapsed_time(self, end: Event) -> float:
        """Return milliseconds to `end`. Both are of one device, complete, and have `timing`."""
        if self._event is None or end._event is None:
            return 1000 * (end._time - self._time)
        return self._event.elapsed_time(end._event)


class Stream:
    """A queue of copies and kernels of `device`."""

    def __init__(self, device: torch.device, stream: torch.cuda.Stream | None = None) -> None:
        """Create a stream beside the current one, or wrap torch's `stream`."""
        self.device, self._stream = device, stream
        if stream is None and device.type == "cuda":
            self._stream = torch.cuda.Stream(device)

    @contextmanager
    def select(self) -> Iterator[None]:
        """Make this the current stream of this thread within the block.

        Its GPU remains the thread's current device afterwards: a new thread has the first GPU,
        whichever the rank uses, and torch would switch back to it and create a context there.
        """
        if self._stream is None:
            yield
            return
        torch.cuda.set_device(self.device)
        with torch.cuda.stream(self._stream):
            yield

    def record_event(self, timing: bool = False) -> Event:
        """Record an event that completes when all work queued here so far is complete."""
        return Event(self._stream, timing)

    def wait_event(self, event: Event, tensors: Iterable[Tensor] = ()) -> None:
        """Make all work queued here from now on wait for `event`.

        It may use `tensors` of another stream: their memory is not reused before this stream has
        finished with them.
        """
        if self._stream is None:
            return
        event.wait(self._stream)
        for tensor in tensors:
            tensor.record_stream(self._stream)

    def wait_stream(self, other: Stream) -> None:
        """Make all work queued here from now on wait for all work queued on `other` so far."""
        self.wait_event(other.record_event())

    def synchronize(self) -> None:
        """Block this thread until all work queued here is complete."""
        self.record_event().synchronize()


def current_stream(device: torch.device) -> Stream:
    """Return this thread's current stream of `device`."""
    return Stream(device, torch.cuda.current_stream(device) if device.type == "cuda" else None)


def record_event(device: torch.device, timing: bool = False) -> Event:
    """Record an event on this thread's current stream of `device`."""
    return current_stream(device).record_event(timing)


class Upload:
    """A host buffer for samples of one thread, and a stream that copies them to a device.

    Another thread may use the results, after `take`.
    """

    def __init__(
        self, shape: tuple[int, ...], dtype: np.dtype, device: torch.device | str = "cpu"
    ) -> None:
        """Allocate a buffer of `shape`, (largest count, H, W, C); pinned for a GPU."""
        self.device = torch.device(device)
        self._stream = Stream(self.device)
        kind = torch.from_numpy(np.empty(0, dtype)).dtype
        self._buffer = torch.empty(shape, dtype=kind, pin_memory=self.device.type == "cuda")
        self._copied = self._stream.record_event()  # nothing was queued yet

    def buffer(self, count: int) -> np.ndarray:
        """Return the buffer to fill, (count, H, W, C), after waiting for its previous copy."""
        self._copied.synchronize()
        return self._buffer[:count].numpy()

    def make(self, count: int, work: Callable[[Tensor], Made]) -> Made:
        """Copy the first `count` samples to the device and return the result of `work` on them.

        The result must not share memory with the samples, which on the CPU are in the buffer.
        Other streams may use it after `take`.
        """
        with self._stream.select():
            rows = self._buffer[:count].to(self.device, non_blocking=True)
            self._copied = self._stream.record_event()
            return work(rows)

    def record_event(self) -> Event:
        """Record an event that completes when all results so far are complete."""
        return self._stream.record_event()

    def take(self, made: Event, tensors: Iterable[Tensor]) -> None:
        """Make this thread's current stream wait for `made` before it uses these tensors."""
        current_stream(self.device).wait_event(made, tensors)


def copy_to_device(tensor: Tensor, device: torch.device) -> Tensor:
    """Copy a small CPU tensor to `device` without waiting.

    It is copied to a GPU from pinned memory, which torch keeps until the copy is complete.
    """
    if device.type == "cpu":
        return tensor
    return tensor.pin_memory().to(device, non_blocking=True)


class Snapshot:
    """An asynchronous copy of a small tensor to the host."""

    def __init__(self, tensor: Tensor) -> None:
        self._host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=tensor.is_cuda)
        self._host.copy_(tensor, non_blocking=True)
        self._copied = record_event(tensor.device)

    @property
    def arrived(self) -> bool:
        """Whether the copy is complete."""
        return self._copied.query()

    def array(self) -> np.ndarray:
        """Wait for the copy; return it as an array of the tensor's shape."""
        self._copied.synchronize()
        return self._host.numpy()

    def numbers(self) -> Any:
        """Wait for the copy; return it as a Python number or a list of numbers."""
        return self.array().tolist()


def copy_to_host(
    queued: Iterator[tuple[Name, Tensor]], device: torch.device
) -> Iterator[tuple[Name, np.ndarray]]:
    """Copy tensors to the host in the order in which they are `queued` on the device.

    Each is read after IN_FLIGHT more have been queued, so that the device always has work.
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
    """Measures the seconds of a step's computation and of its reduction on the device.

    They are those of the newest completed step: on the CPU the current one. Nothing waits for a
    GPU.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._laps: deque[list[Event]] = deque()  # events of a step: begun, computed, reduced
        self.compute = self.reduce = 0.0

    def begin(self) -> None:
        """Mark the beginning of a step."""
        self._laps.append([record_event(self._device, timing=True)])

    def computed(self) -> float:
        """Mark the end of the step's computation; return the newest seconds of a computation."""
        self._laps[-1].append(record_event(self._device, timing=True))
        self._look()
        return self.compute

    def reduced(self) -> None:
        """Mark the end of the step's reduction."""
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
    """Captures work as CUDA graphs that share one memory pool: they run one after another.

    Warm-up and capture use one side stream, as in torch.cuda.make_graphed_callables. Autograd's
    AccumulateGrad nodes keep the stream on which they were created, so nodes created by a warm-up
    on the default stream would queue work there during the capture, which invalidates it.
    """

    def __init__(self, device: torch.device) -> None:
        self._pool: Any = None
        self._stream = Stream(device)

    def warm_up(self, work: Callable[[], Tensors]) -> Tensors:
        """Run `work` on the stream on which it will be captured, in order with the current one.

        The current stream waits for it, so tensors that `work` only reads need no record_stream.
        """
        current = current_stream(self._stream.device)
        self._stream.wait_stream(current)
        with self._stream.select():
            found = work()
        current.wait_event(self._stream.record_event(), found)
        return found

    def __call__(self, work: Callable[[], Tensors]) -> tuple[Tensors, Callable[[], None]]:
        """Capture `work`, which must be warmed up, without running it; return results and replay.

        Every replay writes to the memory of these results and is queued on the current stream.
        Other threads may use the GPU during the capture.
        """
        self._pool = self._pool or torch.cuda.graph_pool_handle()
        graph = torch.cuda.CUDAGraph()
        how = {"pool": self._pool, "stream": self._stream._stream}
        with torch.cuda.graph(graph, **how, capture_error_mode="thread_local"):
            found = work()
        return found, graph.replay
