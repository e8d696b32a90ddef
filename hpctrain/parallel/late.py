"""What the host learns of the device without holding it up: numbers, and seconds.

The host of a GPU queues work and runs ahead of it. What a step came to is copied to the host in
that queue and read when it is there; seconds are those between events in the queue. On the CPU
everything is done as soon as it was asked for, and the same calls give it at once.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from typing import Any, TypeVar

import numpy as np
import torch

from hpctrain.streams import Event, record_event

Name = TypeVar("Name")
LATE = {"cpu": 0, "cuda": 1}  # steps or blocks that are begun before what one came to is read


class Snapshot:
    """A copy of a small tensor, on its way to the host."""

    def __init__(self, tensor: torch.Tensor) -> None:
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


def read_late(
    queued: Iterator[tuple[Name, torch.Tensor]], device: torch.device
) -> Iterator[tuple[Name, np.ndarray]]:
    """What was `queued` on the device, on the host: in order, each when LATE more are queued."""
    waiting: deque[tuple[Name, Snapshot]] = deque()
    for name, tensor in queued:
        waiting.append((name, Snapshot(tensor)))
        if len(waiting) > LATE[device.type]:
            name, snapshot = waiting.popleft()
            yield name, snapshot.array()
    for name, snapshot in waiting:
        yield name, snapshot.array()


class Clock:
    """Seconds of a step's computation and of its reduction, by the device: those of the newest
    step that it has done. On the CPU that is this one; nobody waits for a GPU to tell.
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
