"""What the host learns of the device without holding it up: numbers, and seconds.

The host of a GPU queues work and runs ahead of it. What a step came to is copied to the host in
that queue and read when it is there; seconds are those between marks in the queue. On the CPU
everything is done as soon as it was asked for, and the same calls give it at once.
"""

from __future__ import annotations

import time
from collections import deque
from typing import Any

import torch

from hpctrain.parallel.device import queued_so_far


class Snapshot:
    """A copy of a small tensor, on its way to the host."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self._host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=tensor.is_cuda)
        self._host.copy_(tensor, non_blocking=True)
        self._copied = queued_so_far(tensor.device)

    @property
    def arrived(self) -> bool:
        """Whether they are there."""
        return self._copied.passed

    def numbers(self) -> Any:
        """A number of Python, or a list of them; waits until they are there."""
        self._copied.wait()
        return self._host.tolist()


class Mark:
    """A place in the device's queue."""

    def __init__(self, device: torch.device) -> None:
        self._at, self._event = time.perf_counter(), None
        if device.type == "cuda":
            self._event = torch.cuda.Event(enable_timing=True)
            self._event.record(torch.cuda.current_stream(device))

    @property
    def passed(self) -> bool:
        """Whether the device has come to it."""
        return self._event is None or self._event.query()

    def until(self, later: Mark) -> float:
        """Seconds to a later mark of the same device; both are passed."""
        if self._event is None or later._event is None:
            return later._at - self._at
        return self._event.elapsed_time(later._event) / 1000


class Clock:
    """Seconds of a step's computation and of its reduction, by the device: those of the newest
    step that it has done. On the CPU that is this one; nobody waits for a GPU to tell.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._laps: deque[list[Mark]] = deque()  # begun, computed, reduced
        self.compute = self.reduce = 0.0

    def begin(self) -> None:
        """A step begins."""
        self._laps.append([Mark(self._device)])

    def computed(self) -> float:
        """Here its computation ends; seconds of a computation."""
        self._laps[-1].append(Mark(self._device))
        self._look()
        return self.compute

    def reduced(self) -> None:
        """Here its reduction ends."""
        self._laps[-1].append(Mark(self._device))
        self._look()

    def _look(self) -> None:
        while self._laps:
            begun, *later = self._laps[0]
            if later and later[0].passed:
                self.compute = begun.until(later[0])
            if len(later) < 2 or not later[1].passed:
                return
            self.reduce = later[0].until(later[1])
            self._laps.popleft()
