"""How rows reach a device behind the computation's back.

On a GPU they lie in pinned memory, go there by one asynchronous copy a step, and are made into the
network's input on a stream of their own, beside the kernels that train. The stream that uses a
batch waits for an event; the thread that queues its kernels never waits.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TypeVar

import numpy as np
import torch
from torch import Tensor

from hpctrain.streams import Event, Stream, current_stream

Made = TypeVar("Made")


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
        self._copied = Event(None)  # nothing was queued yet

    def room(self, count: int) -> np.ndarray:
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


def sent(tensor: Tensor, device: torch.device) -> Tensor:
    """A small tensor of the CPU on `device`, without waiting: on its way to a GPU it lies in pinned
    memory, which torch keeps until it is copied.
    """
    if device.type == "cpu":
        return tensor
    return tensor.pin_memory().to(device, non_blocking=True)
