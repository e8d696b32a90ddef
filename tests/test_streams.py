"""What is asked of CUDA, on a faked torch.cuda, and that the CPU is never waited for."""

from __future__ import annotations

import contextlib
import time
from unittest.mock import Mock, call

import pytest
import torch

from hpctrain.streams import GraphRecorder, Stream, current_stream, record_event

CPU, GPU = torch.device("cpu"), torch.device("cuda", 1)


@pytest.fixture
def cuda(monkeypatch):
    """Notes every call."""
    cuda = Mock()

    @contextlib.contextmanager
    def stream(chosen):
        cuda.enter(chosen)
        yield
        cuda.leave()

    monkeypatch.setattr(torch.cuda, "stream", stream)
    for name in ("Stream", "Event", "set_device", "current_stream"):
        monkeypatch.setattr(torch.cuda, name, getattr(cuda, name))
    return cuda


def test_a_thread_that_waits_for_a_gpu_sleeps(cuda):
    """Events spin by default, and so does a stream that is synchronised by itself."""
    event = cuda.Event.return_value
    for stream in (Stream(GPU), current_stream(GPU)):
        cuda.reset_mock()
        stream.synchronize()
        assert cuda.mock_calls == [
            call.Event(enable_timing=False, blocking=True),
            call.Event().record(stream._stream),
            call.Event().synchronize(),
        ]
    cuda.reset_mock()
    seen = record_event(GPU, timing=True)
    assert seen.query() is event.query.return_value
    assert seen.elapsed_time(seen) is event.elapsed_time.return_value
    assert cuda.mock_calls == [
        call.current_stream(GPU),
        call.Event(enable_timing=True, blocking=True),
        call.Event().record(cuda.current_stream.return_value),
        call.Event().query(),
        call.Event().elapsed_time(event),
    ]


def test_tensors_of_another_stream_are_waited_for_and_kept(cuda):
    """By the stream, not by the host; their memory stays until that stream is done with it."""
    own, user = cuda.Stream.return_value, cuda.current_stream.return_value
    made, tensors = Stream(GPU).record_event(), [Mock(), Mock()]
    cuda.reset_mock()
    current_stream(GPU).wait_event(made, iter(tensors))
    assert cuda.mock_calls == [
        call.current_stream(GPU),
        call.current_stream().wait_event(cuda.Event.return_value),
    ]
    assert [t.mock_calls for t in tensors] == [[call.record_stream(user)]] * 2
    cuda.reset_mock()
    current_stream(GPU).wait_stream(Stream(GPU))
    assert cuda.mock_calls[2:] == [
        call.Event(enable_timing=False, blocking=True),
        call.Event().record(own),
        call.current_stream().wait_event(cuda.Event.return_value),
    ]


def test_a_selected_stream_makes_its_gpu_that_of_the_thread(cuda):
    """Else torch goes back to the first when the block is left."""
    stream = Stream(GPU)
    for _ in range(2):
        cuda.reset_mock()
        with stream.select():
            cuda.work()
        enter = call.enter(cuda.Stream.return_value)
        assert cuda.mock_calls == [call.set_device(GPU), enter, call.work(), call.leave()]


def test_on_the_cpu_everything_is_done(cuda):
    stream, tensor = Stream(CPU), Mock()
    with stream.select():
        begun = stream.record_event(timing=True)
        time.sleep(0.02)
    current_stream(CPU).wait_event(begun, [tensor])
    current_stream(CPU).wait_stream(stream)
    stream.synchronize()
    ended = record_event(CPU, timing=True)
    assert begun.query() and ended.query()
    assert 20 <= begun.elapsed_time(ended) < 2000  # milliseconds
    assert (cuda.mock_calls, tensor.mock_calls) == ([], [])


def test_a_graph_is_warmed_up_and_recorded_on_one_stream_beside_the_current(cuda, monkeypatch):
    """What crosses between the two is waited for by streams, and kept until they are done."""
    current, own = cuda.current_stream.return_value, cuda.Stream.return_value
    found = Mock(), Mock()

    @contextlib.contextmanager
    def graph(recorded, pool, stream, capture_error_mode):
        cuda.capture(pool, stream, capture_error_mode)
        yield

    monkeypatch.setattr(torch.cuda, "graph", graph)
    monkeypatch.setattr(torch.cuda, "CUDAGraph", cuda.CUDAGraph)
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: "pool")
    record = GraphRecorder(GPU)
    assert record.warm_up(lambda: cuda.work() and found) is found
    event = cuda.Event.return_value
    order = [name for name, *_ in cuda.mock_calls if name in ("enter", "work", "leave")]
    assert order == ["enter", "work", "leave"] and cuda.enter.mock_calls == [call(own)]
    assert event.record.mock_calls == [call(current), call(own)]
    own.wait_event.assert_called_once_with(event)
    current.wait_event.assert_called_once_with(event)
    assert [t.record_stream.mock_calls for t in found] == [[call(current)]] * 2
    for _ in range(2):
        assert record(lambda: found) == (found, cuda.CUDAGraph.return_value.replay)
    assert cuda.capture.mock_calls == [call("pool", own, "thread_local")] * 2
