"""A stream that notes what is asked of it: who copies, waits and hands over, in which order."""

from __future__ import annotations

import contextlib
import threading

import torch

from hpctrain import streams


class Recorder:
    """Stands in for an upload's stream and for the current one; `log` holds (what, of which event)
    in order.
    """

    def __init__(self, monkeypatch):
        self.log, self.events, self.inside, self.taken = [], 0, None, []
        monkeypatch.setattr(streams, "Stream", lambda device: self)
        monkeypatch.setattr(streams, "current_stream", lambda device: self)
        # Snapshots and clocks go on without it.
        monkeypatch.setattr(streams, "record_event", lambda *_, **__: streams.Event(None))

    @contextlib.contextmanager
    def select(self):
        self.inside = threading.get_ident()
        yield
        self.inside = None

    def note(self, what, number=None):
        """Whether on this stream too: prefixed by "+" within `select`."""
        on_it = self.inside == threading.get_ident()
        self.log.append(("+" * on_it + what, number))

    def record_event(self):
        number, self.events = self.events, self.events + 1
        self.note("event", number)
        return Event(self, number)

    def wait_event(self, event, tensors):
        self.taken.append((event.number, list(tensors)))
        self.note("hand over", event.number)


class Event:
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
