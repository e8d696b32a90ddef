"""How rows reach a device behind the computation's back.

On a GPU they lie in pinned memory, go there by one asynchronous copy a batch, and are made into the
network's input on a stream of their own, beside the kernels that train. The stream that uses a
batch waits for an event; the thread that queues its kernels never waits. On the CPU the same calls
find everything done. Streams, events, pinned memory and `record_stream`:
https://docs.pytorch.org/docs/stable/notes/cuda.html
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from typing import Protocol, TypeVar

import numpy as np
import torch
from torch import Tensor

Made = TypeVar("Made")


class Mark(Protocol):
    """That everything queued on a stream so far is done."""

    def synchronize(self) -> None:
        """Let this thread wait for it."""


class Stream(Protocol):
    """A queue of copies and kernels beside the current one."""

    pinned: bool  # whether its copies want pinned memory

    def current(self) -> AbstractContextManager:
        """What is queued by this thread within goes to this stream."""

    def mark(self) -> Mark:
        """When all is done that was queued here until now."""

    def hand_over(self, mark: Mark, tensors: Iterable[Tensor]) -> None:
        """Let this thread's current stream use tensors that are complete at `mark`: it waits, the
        thread does not.
        """


class CudaStream:
    """A stream of a GPU."""

    pinned = True

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device)

    def current(self) -> AbstractContextManager:
        """As in Stream. The stream's GPU becomes this thread's for good: a new thread's is the
        first, whatever the rank's, and torch would go back to it and start a context there.
        """
        torch.cuda.set_device(self._stream.device)
        return torch.cuda.stream(self._stream)

    def mark(self) -> torch.cuda.Event:
        """As in Stream. Who waits for it sleeps: a spinning thread would take the core from that
        which trains, where a launcher binds a rank to one.
        """
        event = torch.cuda.Event(blocking=True)
        event.record(self._stream)
        return event

    def hand_over(self, mark: Mark, tensors: Iterable[Tensor]) -> None:
        """As in Stream. The memory comes from this stream's pool, which would otherwise use it
        again as soon as the tensors are dropped, with their user's kernels still queued.
        """
        user = torch.cuda.current_stream(self._stream.device)
        user.wait_event(mark)  # type: ignore[arg-type]
        for tensor in tensors:
            tensor.record_stream(user)


class Done:
    """The CPU as a stream, and its only mark: what was called is done."""

    pinned = False

    def current(self) -> AbstractContextManager:
        """As in Stream."""
        return nullcontext()

    def mark(self) -> Done:
        """As in Stream."""
        return self

    def synchronize(self) -> None:
        """As in Mark."""

    def hand_over(self, mark: Mark, tensors: Iterable[Tensor]) -> None:
        """As in Stream."""


def make_stream(device: torch.device) -> Stream:
    """A stream of the device beside its current one."""
    return CudaStream(device) if device.type == "cuda" else Done()


class Upload:
    """One thread's way to a device: a buffer for rows, and a stream that takes them there. Another
    thread may take what was made.
    """

    def __init__(
        self, shape: tuple[int, ...], dtype: np.dtype, device: torch.device | str = "cpu"
    ) -> None:
        """A buffer of `shape`, (most rows, H, W, C)."""
        self.device = torch.device(device)
        self._stream = make_stream(self.device)
        kind = torch.from_numpy(np.empty(0, dtype)).dtype
        self._buffer = torch.empty(shape, dtype=kind, pin_memory=self._stream.pinned)
        self._copied = self._stream.mark()

    def room(self, count: int) -> np.ndarray:
        """Memory for rows, (count, H, W, C), to be filled; waits until what lay there is copied."""
        self._copied.synchronize()
        return self._buffer[:count].numpy()

    def make(self, count: int, work: Callable[[Tensor], Made]) -> Made:
        """What `work` makes of the first `count` rows, on the device, to be used after `mark`.

        Nothing of it may share memory with the rows: on the CPU they are those of the buffer.
        """
        with self._stream.current():
            rows = self._buffer[:count].to(self.device, non_blocking=True)
            self._copied = self._stream.mark()
            return work(rows)

    def mark(self) -> Mark:
        """When all is done that was made until now."""
        return self._stream.mark()

    def take(self, mark: Mark, tensors: Iterable[Tensor]) -> None:
        """Let this thread's current stream use tensors that were made before `mark`."""
        self._stream.hand_over(mark, tensors)


def sent(tensor: Tensor, device: torch.device) -> Tensor:
    """A small tensor of the CPU on `device`, without waiting: on its way to a GPU it lies in pinned
    memory, which torch keeps until it is copied.
    """
    if device.type == "cpu":
        return tensor
    return tensor.pin_memory().to(device, non_blocking=True)
