"""A stream that notes what is asked of it: who copies, waits and hands over, in which order."""

from __future__ import annotations

import contextlib
import threading

import torch


class Recorder:
    """Stands in for a stream beside the current one; `log` holds (what, of which mark) in order."""

    pinned = False

    def __init__(self):
        self.log, self.marks, self.inside, self.taken = [], 0, None, []

    @contextlib.contextmanager
    def current(self):
        self.inside = threading.get_ident()
        yield
        self.inside = None

    def note(self, what, number=None):
        """Whether on this stream too: prefixed by "+" within `current`."""
        on_it = self.inside == threading.get_ident()
        self.log.append(("+" * on_it + what, number))

    def mark(self):
        number, self.marks = self.marks, self.marks + 1
        self.note("mark", number)
        return Mark(self, number)

    def hand_over(self, mark, tensors):
        self.taken.append((mark.number, list(tensors)))
        self.note("hand over", mark.number)


class Mark:
    def __init__(self, stream, number):
        self.stream, self.number = stream, number

    def synchronize(self):
        self.stream.note("wait", self.number)


def watched(upload, stream):
    """Let the stream note the copies of a buffer."""

    class Buffer(torch.Tensor):
        def to(self, *args, **kwargs):
            stream.note("copy", kwargs["non_blocking"])
            return super().to(*args, **kwargs).as_subclass(torch.Tensor)

    upload._buffer = upload._buffer.as_subclass(Buffer)


def noted(stream, what, function):
    """The function, noted by the stream as `what` before it runs."""

    def call(*args):
        stream.note(what)
        return function(*args)

    return call
