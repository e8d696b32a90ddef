"""Segments that are summed while backward runs: the same sums, whatever backward does."""

from __future__ import annotations

import contextlib
import threading

import pytest
import torch
from mpi4py import MPI
from torch import nn
from torch.utils.checkpoint import CheckpointFunction

import hpctrain as hp
from tests.support.api import Transport, assign_shards
from tests.support.transports import MAKERS

pytestmark = pytest.mark.ranks
WIDTH = 9
MANY = 64  # segments: more than there are parameters


class Layers(nn.Module):
    """Some layers, one after another; `barrier` is called in backward before the first's gradient,
    `repeats` how often the second is used.
    """

    def __init__(self, depth=4, barrier=lambda: None, repeats=1):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(depth))
        self.barrier, self.repeats = barrier, repeats

    def forward(self, x):
        first, second, *others = self.layers
        x = first(x)
        x.register_hook(lambda gradient: self.barrier())
        for _ in range(self.repeats):
            x = second(x).tanh()
        for layer in others:
            x = layer(x).tanh()
        return x


class Shared(Layers):
    """One parameter is in two layers, and one layer is used three times."""

    def __init__(self):
        super().__init__(repeats=3)
        self.layers[3].weight = self.layers[0].weight


class Unused(Layers):
    """The last parameters take no part."""

    def __init__(self):
        super().__init__()
        self.unused = nn.Linear(WIDTH, 3)


class Sometimes(Layers):
    """Every other batch leaves the last layers out."""

    def forward(self, x):
        self.repeats = 3 - self.repeats
        return super().forward(x) if self.repeats == 2 else self.layers[0](x)


class Nested(Layers):
    """The second layer's gradient grows in `repeats` backward passes within the one."""

    def forward(self, x):
        x = self.layers[0](x)
        for _ in range(self.repeats):
            x = CheckpointFunction.apply(self.layers[1], True, x)  # checkpoint imports the compiler
        return self.layers[3](self.layers[2](x))


def inputs(step, shard, dtype):
    generator = torch.Generator().manual_seed(100 * step + shard)
    x = torch.randn(5, WIDTH, generator=generator, dtype=torch.float64)
    return (x * 10 ** (shard % 3)).to(dtype)


def steps(comm, model, overlap, number=3, shards=None, tree=False, missing=(), **how):
    """The message after each of some steps; (step, shard) that is `missing` has no rows."""
    message = model.message = hp.Message(model, 5, comm.rank, comm.size)
    runs = assign_shards(shards or comm.size, comm.size)
    reduce = hp.choose_reduce(comm, message, runs if tree else None, overlap=overlap, **how)
    try:
        for step in range(number):
            message.zero()
            mine = [shard for shard in runs[comm.rank] if (step, shard) not in missing]
            reduce.begin(mine)
            for shard in mine:
                x = inputs(step, shard, message.layout.dtype).to(message.device)
                model(x).square().sum().backward()
                message.add_gradients()
                message.moments.add_(x.mean())
                message.add_sums(len(x), loss=x.sum())
                reduce.accumulate(shard)
            message.set_seconds(0.1 * (comm.rank + step), 0.3)
            reduce()
            yield message.tensor.clone()
    except Exception:  # of all ranks, here; segments are under way
        with contextlib.suppress(Exception):
            reduce()
        raise
    finally:
        reduce.close()


def sums(comm, net, dtype, *arguments, **how):
    torch.manual_seed(3)
    return list(steps(comm, net().to(dtype), *arguments, **how))


def same(left, right):
    return all(torch.equal(a, b) for a, b in zip(left, right, strict=True))


@pytest.mark.parametrize("transport", MAKERS)
def test_the_sums_of_segments_are_those_of_the_whole(comm, transport):
    """In tree order and in bfloat16 with the same bits."""
    way, shards = MAKERS[transport](comm), 2 * comm.size + 3
    for how in ({"tree": True, "shards": shards}, {"comm_dtype": "bf16"}, {"shards": shards}):
        how |= {"transport": way, "missing": [(1, 0)], "number": 2}
        whole, parts = (sums(comm, Layers, torch.float32, n, **how) for n in (0, 3))
        close = all(torch.allclose(a, b, rtol=1e-5) for a, b in zip(whole, parts, strict=True))
        assert close if "shards" in how and "tree" not in how else same(whole, parts)


@pytest.mark.parametrize("overlap", [1, 2, 3, 7, MANY])
def test_any_number_of_segments_has_the_same_bits_in_tree_order(comm, overlap):
    shards = 2 * comm.size + 3
    missing = [(1, 0), (2, shards - 1), (2, shards - 2), *((3, shard) for shard in range(5))]
    how = {"number": 5, "shards": shards, "missing": missing}
    for net, dtype in ((Layers, torch.float64), (Shared, torch.float32)):
        whole = sums(comm, net, dtype, 0, tree=True, **how)
        assert same(sums(comm, net, dtype, overlap, tree=True, **how), whole)
        assert not same(sums(comm, net, dtype, overlap, **how), whole), "any order will do"


@pytest.mark.parametrize("overlap", [1, 2, 3, 7, MANY])
def test_any_number_of_segments_has_the_same_plain_sums_within_rounding(comm, overlap):
    how = {"shards": 2 * comm.size, "missing": [(1, comm.size)]}
    whole, parts = (sums(comm, Layers, torch.float64, n, **how) for n in (0, overlap))
    for a, b in zip(whole, parts, strict=True):
        assert torch.allclose(a, b, rtol=1e-13, atol=1e-13 * float(a.abs().max()))
    assert same(whole, parts) or comm.size > 2  # the sum of two commutes
    assert len({tensor.numpy().tobytes() for tensor in parts}) == 3, "all steps are alike"


@pytest.mark.ranks(3)
def test_gradients_are_rounded_with_overlap_too(comm):
    narrow, wide = (
        sums(comm, Layers, torch.float32, 3, comm_dtype=dtype) for dtype in ("bf16", "fp32")
    )
    assert not same(narrow, wide)


@pytest.mark.parametrize("net", [Shared, Unused, Sometimes])
def test_whatever_backward_leaves_out_or_does_twice(comm, net):
    whole, parts = (
        sums(comm, net, torch.float64, n, number=6, shards=3 * comm.size, tree=True)
        for n in (0, MANY)
    )
    assert same(whole, parts)


def test_a_gradient_that_grows_after_it_was_summed_is_an_error(comm):
    """Checkpoints within backward are none if each layer is in one of them."""
    model = Nested().double()
    running = steps(comm, model, MANY, number=9)
    next(running), next(running)
    model.repeats = 2
    with pytest.raises(hp.RunError, match=r"layers.1.\w+ grew after it was summed"):
        next(running)


class Watched(Transport):
    """Another transport; `on_call` is called with the vectors of each of its calls, after it."""

    def __init__(self, way, on_call):
        super().__init__(way.comm)
        self.way, self.on_call = way, on_call

    def allreduce(self, vector):
        self.way.allreduce(vector)
        self.on_call(vector)

    def prepare(self, sends, receives):
        exchange = self.way.prepare(sends, receives)

        def watched():
            exchange()
            self.on_call(*(vector for _, vectors in sends for vector in vectors))

        return watched


@pytest.mark.ranks(2, 3)
@pytest.mark.parametrize("shards_each", [1, 2])
@pytest.mark.parametrize("tree", [False, True])
@pytest.mark.parametrize("overlap", [0, 1, 2, MANY])
def test_segments_travel_before_backward_ends(comm, overlap, tree, shards_each):
    """The first layer's backward waits until the last layers' gradients are sent: not while another
    batch will add to them.
    """
    sent, seen = threading.Event(), []
    early = overlap > 1  # else nothing travels before the end
    expected = [early, early] if shards_each == 1 else [False, early, False, early]
    model = Layers(barrier=lambda: seen.append(sent.wait(60 if expected[len(seen)] else 0.05)))
    transport = Watched(MAKERS["host memory"](comm), lambda *vectors: sent.set())
    running = steps(
        comm, model, overlap, 2, shards_each * comm.size, tree=tree, transport=transport
    )
    for _ in range(2):
        sent.clear()
        next(running)
    running.close()
    assert seen == expected


class Branches(nn.Module):
    """Two branches; gradients come in the order opposite to that of the forward."""

    def __init__(self, swapped):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.order, self.came = (range(3, -1, -1) if swapped else range(4)), []
        for number, layer in enumerate(self.layers):
            layer.weight.register_post_accumulate_grad_hook(lambda p, n=number: self.came.append(n))

    def forward(self, x):
        return torch.stack([self.layers[number](x) for number in self.order])


def test_all_ranks_sum_in_one_order(comm):
    """That in which most networks' backward goes, from the last parameter to the first."""
    model, places = Branches(swapped=comm.rank % 2 == 1), []

    def note(vector):
        start = (vector.data_ptr() - model.message.tensor.data_ptr()) // vector.element_size()
        places.append((start, start + len(vector)))

    transport = Watched(MAKERS["host memory"](comm), note)
    list(steps(comm, model, MANY, number=2, transport=transport))
    message = model.message
    *segments, rest = places[: len(places) // 2]
    assert places == [*segments, rest] * 2
    assert rest == (message.layout.length, len(message.tensor))
    assert [start for start, _ in segments] == [end for _, end in segments[1:]] + [0]
    assert len(segments) == 8 and segments[0][1] == message.layout.length
    assert len(set(comm.allgather(str(places)))) == 1
    assert len(set(map(tuple, comm.allgather(model.came)))) == min(2, comm.size)


def test_segments_begin_with_a_parameter_and_are_about_equal(comm):
    def lengths(overlap):
        found = []
        net = nn.Sequential(*(nn.Linear(64, 64, bias=False) for _ in range(8)))
        message = hp.Message(net, 0, comm.rank, comm.size)
        transport = Watched(MAKERS["host memory"](comm), lambda vector: found.append(len(vector)))
        reduce = hp.choose_reduce(comm, message, transport=transport, overlap=overlap)
        reduce()
        reduce.close()
        return [length // 4096 for length in found[:-1]]

    assert lengths(1) == [8] and lengths(2) == [4, 4] and lengths(3) == [3, 2, 3]
    assert lengths(64) == [1] * 8


def test_what_fails_in_the_thread_reaches_the_step(comm):
    calls = []

    def fail(vector):
        calls.append(vector)
        if len(calls) == 7:
            raise ZeroDivisionError("call 7")

    transport = Watched(MAKERS["host memory"](comm), fail)
    running = steps(comm, Layers(), 4, transport=transport)
    next(running)
    assert len(calls) == 5
    with pytest.raises(ZeroDivisionError, match="call 7"):
        next(running)
    assert len(calls) == 7, "nothing goes out after a failure"


def test_nothing_stays_after_the_last_step(comm):
    model, before = Layers(), {*threading.enumerate()}
    reduce = hp.choose_reduce(comm, hp.Message(model, 0, comm.rank, comm.size), overlap=3)
    reduce()
    (thread,) = {*threading.enumerate()} - before
    assert all(p._post_accumulate_grad_hooks for p in model.parameters())
    reduce.close()
    thread.join(60)
    assert not thread.is_alive()
    assert not any(p._post_accumulate_grad_hooks for p in model.parameters())


def test_an_mpi_that_one_thread_may_call_is_refused(comm, monkeypatch):
    message = hp.Message(Layers(), 0, comm.rank, comm.size)
    monkeypatch.setattr(MPI, "Query_thread", lambda: MPI.THREAD_FUNNELED)
    with pytest.raises(hp.UsageError, match="--overlap"):
        hp.choose_reduce(comm, message, overlap=2)
    hp.choose_reduce(comm, message)()
    monkeypatch.setattr(MPI, "Query_thread", lambda: MPI.THREAD_SERIALIZED)
    hp.choose_reduce(comm, message, overlap=2).close()
