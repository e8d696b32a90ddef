"""Graphs on the emulated GPU: what a capture keeps, what a replay does, and what is refused."""

from __future__ import annotations

import threading

import pytest
import torch

pytestmark = [
    pytest.mark.emulated_gpu,
    pytest.mark.filterwarnings("default"),  # torch tells of prototypes, and of graphs left empty
]
LENGTH = 1009


def captured(work, **options):
    """A graph of `work`, and what it returned."""
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, **options):
        made = work()
    return graph, made


@pytest.mark.parametrize("order", ["early", "late", "1"])
def test_a_replay_computes_anew_on_the_same_memory(order):
    import emulated_gpu

    emulated_gpu.set_order(order)
    x = torch.ones(LENGTH, device="cuda")
    graph, y = captured(lambda: (x * 2).add_(1).sum())
    for number in range(1, 4):
        x.fill_(number)
        graph.replay()
        assert y.item() == (2 * number + 1) * LENGTH
    emulated_gpu.set_order("free")


def test_a_replay_draws_the_next_random_numbers():
    torch.cuda.manual_seed(5)
    x = torch.ones(LENGTH, device="cuda")
    graph, y = captured(lambda: torch.nn.functional.dropout(x, 0.5) + torch.rand_like(x))
    pair, (one, other) = captured(lambda: (torch.rand_like(x), torch.rand_like(x)))
    pair.replay()
    assert not torch.equal(one, other)
    torch.cuda.manual_seed(5)
    graph.replay()
    first = y.clone()
    graph.replay()
    assert not torch.equal(first, y)
    torch.cuda.manual_seed(5)
    graph.replay()
    assert torch.equal(first, y)


def test_a_stream_that_joins_is_captured_too():
    side, x = torch.cuda.Stream(), torch.zeros(LENGTH, device="cuda")

    def work(joins):
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            x.add_(1)
        if joins:
            torch.cuda.current_stream().wait_stream(side)

    graph, _ = captured(lambda: work(True))
    graph.replay()
    assert x.sum().item() == LENGTH
    with pytest.raises(RuntimeError, match="unjoined work"):
        captured(lambda: work(False))


FORBIDDEN = {
    "a number for the host": lambda x, event: x.sum().item(),
    "a wait for the stream": lambda x, event: torch.cuda.current_stream().synchronize(),
    "a wait for the device": lambda x, event: torch.cuda.synchronize(),
    "a question for an event": lambda x, event: event.query(),
    "a wait for an event": lambda x, event: event.synchronize(),
    "a copy from pageable memory": lambda x, event: x.copy_(torch.ones(LENGTH)),
    "a shape that numbers tell": lambda x, event: x.nonzero(),
    "work outside of the capture": lambda x, event: torch.cuda.current_stream().wait_event(event),
}


@pytest.mark.parametrize("name", FORBIDDEN)
def test_what_no_capture_allows_is_an_error(name):
    x = torch.ones(LENGTH, device="cuda")
    event = torch.cuda.Stream().record_event()
    with pytest.raises(RuntimeError, match="captur") as found:
        captured(lambda: FORBIDDEN[name](x, event))
    assert "emulated GPU" not in str(found.value)
    torch.cuda.synchronize()  # and nothing is left of it
    assert (x + 1).sum().item() == 2 * LENGTH


@pytest.mark.parametrize("mode", ["global", "thread_local"])
def test_other_threads_are_held_by_a_global_capture_only(mode):
    ready, done = threading.Event(), threading.Event()
    found = []

    def query():
        ready.wait()
        try:
            found.append(torch.cuda.Stream().record_event().query())
        except RuntimeError as error:
            found.append(str(error))
        done.set()

    thread = threading.Thread(target=query)
    thread.start()
    x = torch.ones(LENGTH, device="cuda")

    def work():
        ready.set()
        done.wait()
        return x * 2

    if mode == "global":
        with pytest.raises(RuntimeError, match="captur"):
            captured(work, capture_error_mode=mode)
        assert "captur" in str(found[0])
    else:
        captured(work, capture_error_mode=mode)
        assert found[0] in (True, False)
    thread.join()
