"""Streams and events of a device, and what is built on them.

A stream of a GPU is a queue of copies and kernels; an event marks a position in one:
https://docs.pytorch.org/docs/stable/notes/cuda.html. All other files synchronize with a GPU by
these functions. On the CPU all work is done when the call returns, and they return immediately.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import TYPE_CHECKING, TypeVar, cast

import numpy as np
import torch
from torch import Tensor

from hpctrain.cores import make_pool
from hpctrain.memory import empty_on_host

if TYPE_CHECKING:
    from concurrent.futures import ThreadPoolExecutor

Event = torch.cuda.Event  # of a GPU; CpuEvent has the same methods
Stream = torch.cuda.Stream | None  # None: on the CPU
Name = TypeVar("Name")
Key = TypeVar("Key")
Made = TypeVar("Made")
Outputs = TypeVar("Outputs", bound=Mapping[str, Tensor])
IN_FLIGHT = {"cpu": 0, "cuda": 1}  # steps or blocks queued before results are read


class CpuEvent(torch.cpu.Event):
    """An event of the CPU, complete when it is recorded. Unlike torch's it has a time."""

    def __init__(self) -> None:
        self._time = time.perf_counter()

    def elapsed_time(self, end: CpuEvent) -> float:
        """Return milliseconds to `end`."""
        return 1000 * (end._time - self._time)


def record_event(device: torch.device, timing: bool = False, stream: Stream = None) -> Event:
    """Record an event on a stream of `device`, by default the current one of this thread.

    A thread that waits for it sleeps (cudaEventBlockingSync). CUDA's default is to spin, which
    takes the core from the threads that read and decode if a launcher binds a rank to one core.
    """
    if device.type == "cpu":
        return cast(Event, CpuEvent())
    event = torch.cuda.Event(enable_timing=timing, blocking=True)
    event.record(stream or torch.cuda.current_stream(device))
    return event


def set_device(device: torch.device) -> None:
    """Make `device` the current one of this thread; nothing on the CPU.

    A new thread has the first GPU, whichever the rank uses. A call of CUDA there, even one that
    waits for an event of another GPU, creates a context on the first GPU: 0.5 GiB of its memory for
    every rank of the node.
    """
    if device.type == "cuda":
        torch.cuda.set_device(device)


def start_thread(name: str, device: torch.device) -> ThreadPoolExecutor:
    """Return a pool of one thread that queues work on `device`, which is its current device."""
    return make_pool(1, name, partial(set_device, device))


def new_stream(device: torch.device) -> Stream:
    """Create a stream beside the current one of `device`; None on the CPU."""
    if device.type == "cuda":
        return torch.cuda.Stream(device)
    return None


def use_stream(stream: Stream) -> AbstractContextManager[None]:
    """Return a context in which `stream` is the current one of this thread.

    The thread's current device must be the GPU of the stream: torch would switch back to another
    one at the end, and create a context there (`set_device`).
    """
    if stream is None:
        return nullcontext()
    return torch.cuda.stream(stream)


class Upload:
    """A host buffer for samples of one thread, and a stream that copies them to a device.

    Another thread may use the results, after `take`.
    """

    def __init__(
        self,
        shape: tuple[int, ...],
        dtype: np.dtype,
        device: torch.device | str = "cpu",
    ) -> None:
        """Allocate a buffer of `shape`, (largest count, H, W, C); pinned for a GPU."""
        self.device = torch.device(device)
        if self.device == torch.device("cuda"):  # the current GPU: another thread has another
            self.device = torch.device("cuda", torch.cuda.current_device())
        self._stream = new_stream(self.device)
        torch_dtype = torch.from_numpy(np.empty(0, dtype)).dtype
        self._buffer = empty_on_host(shape, torch_dtype, self.device)
        self._copied = self.record_event()  # nothing was queued yet

    def buffer(self, count: int) -> np.ndarray:
        """Return the buffer to fill, (count, H, W, C), after waiting for its previous copy."""
        self._copied.synchronize()
        return self._buffer[:count].numpy()

    def make(self, count: int, work: Callable[[Tensor], Made]) -> Made:
        """Copy the first `count` samples to the device and return the result of `work` on them.

        The result must not share memory with the samples, which on the CPU are in the buffer.
        """
        with use_stream(self._stream):
            rows = self._buffer[:count].to(self.device, non_blocking=True)
            self._copied = self.record_event()
            return work(rows)

    def record_event(self) -> Event:
        """Record an event that completes when all results so far are complete."""
        return record_event(self.device, stream=self._stream)

    def take(self, made: Event, tensors: Iterable[Tensor]) -> None:
        """Make this thread's current stream wait for `made` before it uses these tensors.

        Their memory is not reused before that stream has finished with them.
        """
        if self._stream is not None:
            current = torch.cuda.current_stream(self.device)
            made.wait(current)
            for tensor in tensors:
                tensor.record_stream(current)


def copy_to_device(tensor: Tensor, device: torch.device) -> Tensor:
    """Copy a small CPU tensor to `device` without waiting."""
    if device.type == "cpu":
        return tensor
    return tensor.pin_memory().to(device, non_blocking=True)  # torch keeps it until it is copied


class Snapshot:
    """An asynchronous copy of a small tensor to the host, and the event that it is `copied`."""

    def __init__(self, tensor: Tensor, timing: bool = False) -> None:
        self._host = empty_on_host(tensor.shape, tensor.dtype, tensor.device)
        self._host.copy_(tensor, non_blocking=True)
        self.copied = record_event(tensor.device, timing)

    def array(self) -> np.ndarray:
        """Wait for the copy; return it as an array of the tensor's shape."""
        self.copied.synchronize()
        return self._host.numpy()


def copy_to_host(
    queued: Iterator[tuple[Name, dict[Key, Tensor]]],
    device: torch.device,
) -> Iterator[tuple[Name, dict[Key, np.ndarray]]]:
    """Copy tensors to the host in the order in which they are `queued` on the device.

    Each is read after IN_FLIGHT more have been queued, so that the device always has work.
    """
    waiting: deque[tuple[Name, dict[Key, Snapshot]]] = deque()
    for name, tensors in queued:
        waiting.append((name, {key: Snapshot(tensor) for key, tensor in tensors.items()}))
        if len(waiting) > IN_FLIGHT[device.type]:
            name, copies = waiting.popleft()
            yield name, {key: copy.array() for key, copy in copies.items()}
    for name, copies in waiting:
        yield name, {key: copy.array() for key, copy in copies.items()}


class Clock:
    """Measures the seconds of a step's computation and of its reduction on the device.

    They are those of the newest step that is complete: nothing waits for a GPU.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._steps: deque[list[Event]] = deque()  # events of each: begun, computed, reduced
        self.compute = 0.0
        self.reduce = 0.0

    def begin(self) -> None:
        """Mark the beginning of a step."""
        self._steps.append([record_event(self._device, timing=True)])

    def mark(self) -> None:
        """Mark the end of the step's computation, and then that of its reduction."""
        self._steps[-1].append(record_event(self._device, timing=True))
        while self._steps:
            begun, *later = self._steps[0]
            if later and later[0].query():
                self.compute = begun.elapsed_time(later[0]) / 1000
            if len(later) < 2 or not later[1].query():
                return
            self.reduce = later[0].elapsed_time(later[1]) / 1000
            self._steps.popleft()


class GraphRecorder:
    """Captures work as CUDA graphs that share one memory pool: they run one after another.

    Warm-up and capture use one side stream, as in torch.cuda.make_graphed_callables. Autograd's
    AccumulateGrad nodes keep the stream on which they were created, so nodes created by a warm-up
    on the default stream would queue work there during the capture, which invalidates it.
    """

    def __init__(self, device: torch.device) -> None:
        self._pool = torch.cuda.graph_pool_handle()
        self._stream = torch.cuda.Stream(device)

    def warm_up(self, work: Callable[[], Outputs]) -> Outputs:
        """Run `work` on the stream on which it will be captured, in order with the current one.

        The current stream waits for it, so tensors that `work` only reads need no record_stream.
        """
        current = torch.cuda.current_stream(self._stream.device)
        self._stream.wait_stream(current)
        with use_stream(self._stream):
            outputs = work()
        current.wait_stream(self._stream)
        for tensor in outputs.values():
            tensor.record_stream(current)
        return outputs

    def __call__(self, work: Callable[[], Outputs]) -> tuple[Outputs, Callable[[], None]]:
        """Capture `work`, which must be warmed up, without running it; return results and replay.

        Every replay writes to the memory of these results and is queued on the current stream.
        Other threads may use the GPU during the capture.
        """
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(
            graph,
            pool=self._pool,
            stream=self._stream,
            capture_error_mode="thread_local",
        ):
            outputs = work()
        return outputs, graph.replay
