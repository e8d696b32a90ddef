"""Samples in memory, for the loader; it stands in for hp.Split."""

from __future__ import annotations

import threading
import weakref
from types import SimpleNamespace

import numpy as np

import hpctrain as hp


class Source:
    """So many samples of random bytes; notes what is asked for, and how."""

    def __init__(self, rows=101, shape=(5, 7, 3), dtype=np.uint8, fails_at=None):
        """Cannot be read any more from the call of `gather` with the number `fails_at` on."""
        rng = np.random.default_rng(1)
        self.images = rng.integers(0, 256, (rows, *shape)).astype(dtype)
        self.targets = rng.integers(0, 10, rows)
        self.image_shape, self.dtype, self.fails_at = shape, self.images.dtype, fails_at
        self.divisor = None  # that of the type
        self.asked, self.buffers = [], []
        self.gate = threading.Event()  # `gather` waits until it is open
        self.gate.set()
        self.pack = SimpleNamespace(fit="", sample_bytes=self.images[0].nbytes)

    def read_targets(self, indices, bad=None):
        return self.targets[indices]

    def hold(self, samples):
        pass

    def gather(self, indices, out, crops=None, bad=None):
        if len(self.asked) == self.fails_at:
            raise hp.RunError("the pack was cut short")
        assert self.gate.wait(60)
        self.asked.append(indices.copy())
        self.buffers.append(weakref.ref(out.base if out.base is not None else out))
        out[:] = self.images[indices]
        return out
