"""Segments that are summed while backward runs: the same sums, whatever backward does."""

from __future__ import annotations

import threading
import time
from concurrent.futures import wait

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from hpctrain.config import Config, check_settings
from hpctrain.data.partition import cut_epoch
from hpctrain.errors import RunError, UsageError
from hpctrain.parallel import mpi
from hpctrain.parallel.choose import choose_reduce
from hpctrain.parallel.device import choose_device
from hpctrain.parallel.layout import lay_out
from hpctrain.parallel.message import Message
from hpctrain.parallel.overlap import cut
from hpctrain.parallel.placement import assign_shards
from hpctrain.parallel.transport import HostMemory
from hpctrain.parallel.tree import TreeAllreduce
from tests.parallel.test_transport import MAKERS
from tests.training.test_step import ROWS, Arrays, make_trainer, parameters, small_model, train

pytestmark = pytest.mark.mpi
WIDTH = 9
MANY = 64  # segments: more than there are parameters


@pytest.fixture(params=list(MAKERS))
def transport(request, comm):
    return MAKERS[request.param](comm)


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
    """The second layer's gradient grows in two backward passes within the one."""

    def __init__(self):
        super().__init__(repeats=2)

    def forward(self, x):
        x = self.layers[0](x)
        for _ in range(self.repeats):
            x = checkpoint(self.layers[1], x, use_reentrant=True)
        return self.layers[3](self.layers[2](x))


class Alternating(Nested):
    """In every other batch it grows once only."""

    def forward(self, x):
        self.repeats = 3 - self.repeats
        return super().forward(x)


def inputs(step, shard, dtype):
    generator = torch.Generator().manual_seed(100 * step + shard)
    x = torch.randn(5, WIDTH, generator=generator, dtype=torch.float64)
    return (x * 10 ** (shard % 3)).to(dtype)


def steps(comm, model, overlap, number=3, shards=None, tree=False, missing=(), **how):
    """The message after each of some steps; (step, shard) that is `missing` has no rows."""
    message = model.message = Message(model, 5, comm.rank, comm.size)
    runs = assign_shards(shards or comm.size, comm.size)
    in_order = runs if tree else None
    reduce = choose_reduce(comm, message, in_order, overlap=overlap, **how)
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
                message.add_counts(x.sum(), shard, len(x))
                reduce.accumulate(shard)
            message.set_seconds(0.1 * (comm.rank + step), 0.3)
            reduce()
            yield message.tensor.clone()
    finally:
        if overlap:  # after a failure, which here is one of all ranks, segments are under way
            wait([reduce._last])
        reduce.close()


def sums(comm, net, dtype, *arguments, **how):
    torch.manual_seed(3)
    return list(steps(comm, net().to(dtype), *arguments, **how))


def same(left, right):
    return all(torch.equal(a, b) for a, b in zip(left, right, strict=True))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("overlap", [1, 2, 3, 7, MANY])
def test_the_same_bits_in_tree_order(comm, transport, overlap, dtype):
    shards = 2 * comm.size + 3
    missing = [(1, 0), (2, shards - 1), (2, shards - 2), *((3, shard) for shard in range(5))]
    for net in (Layers, Shared):
        how = {"number": 5, "shards": shards, "missing": missing, "transport": transport}
        whole = sums(comm, net, dtype, 0, tree=True, **how)
        assert same(sums(comm, net, dtype, overlap, tree=True, **how), whole)
        assert not same(sums(comm, net, dtype, overlap, **how), whole), "any order will do"


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("overlap", [1, 2, 3, 7, MANY])
def test_plain_sums_are_the_same_within_rounding(comm, transport, overlap, dtype):
    how = {"shards": 2 * comm.size, "transport": transport, "missing": [(1, comm.size)]}
    whole, parts = (sums(comm, Layers, dtype, n, **how) for n in (0, overlap))
    tolerance = 1e-5 if dtype == torch.float32 else 1e-13
    for a, b in zip(whole, parts, strict=True):
        assert torch.allclose(a, b, rtol=tolerance, atol=tolerance * float(a.abs().max()))
    assert same(whole, parts) or comm.size > 2  # the sum of two commutes
    assert len({tensor.numpy().tobytes() for tensor in parts}) == 3, "all steps are alike"


@pytest.mark.parametrize("overlap", [1, 3, MANY])
def test_the_same_bits_in_bfloat16(comm, transport, overlap):
    how = {"comm_dtype": "bf16", "transport": transport}
    whole = sums(comm, Layers, torch.float32, 0, **how)
    assert same(sums(comm, Layers, torch.float32, overlap, **how), whole)
    wide = sums(comm, Layers, torch.float32, overlap, transport=transport)
    assert comm.size == 1 or not same(wide, whole)


@pytest.mark.parametrize("net", [Shared, Unused, Sometimes, Nested, Alternating])
def test_whatever_backward_leaves_out_or_does_twice(comm, net):
    shards = 3 * comm.size
    whole, parts = (
        sums(comm, net, torch.float64, n, number=6, shards=shards, tree=True) for n in (0, MANY)
    )
    assert same(whole, parts)


def test_a_gradient_that_grows_after_it_was_summed_is_an_error(comm):
    model = Nested().double()
    model.repeats = 1
    running = steps(comm, model, MANY, number=9)
    next(running), next(running)
    model.repeats = 2
    with pytest.raises(RunError, match=r"gradient of layers.1.\w+ grew after it was summed"):
        next(running)


def announce(transport, event, monkeypatch):
    """Let `event` be set where a sum is complete."""

    def announcing(call):
        return lambda *arguments: (call(*arguments), event.set())

    transport.allreduce = announcing(transport.allreduce)
    monkeypatch.setattr(TreeAllreduce, "__call__", announcing(TreeAllreduce.__call__))


@pytest.mark.parametrize("shards_each", [1, 2])
@pytest.mark.parametrize("tree", [False, True])
@pytest.mark.parametrize("overlap", [0, 1, 2, MANY])
def test_segments_are_summed_before_backward_ends(
    comm, transport, overlap, tree, shards_each, monkeypatch
):
    """The first layer's backward waits until the last layers' gradients are summed: not before
    their first backward is over, and not while another batch will add to them.
    """
    summed, seen = threading.Event(), []
    announce(transport, summed, monkeypatch)
    early = overlap > 1  # else nothing travels before the end
    expected = [False, early] if shards_each == 1 else [False, early, False, early]
    model = Layers(barrier=lambda: seen.append(summed.wait(20 if expected[len(seen)] else 0.05)))
    how = {"shards": shards_each * comm.size, "tree": tree, "transport": transport}
    running = steps(comm, model, overlap, 2, **how)
    for _ in range(2):
        summed.clear()
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
    class Noting(HostMemory):
        lengths = ()

        def allreduce(self, vector):
            self.lengths += ((vector.data_ptr() - self.start) // vector.element_size(),)
            super().allreduce(vector)

    model, transport = Branches(swapped=comm.rank % 2 == 1), Noting(comm)
    running = steps(comm, model, MANY, number=4, transport=transport)
    transport.start = 0
    next(running)
    transport.start = model.message.gradients.data_ptr()
    transport.lengths = ()
    list(running)
    spans = cut(lay_out(model), MANY)
    expected = [*(span.start for span in spans), lay_out(model).length]
    assert transport.lengths == (*expected,) * 3
    assert len(set(comm.allgather(transport.lengths))) == 1
    assert len(set(map(tuple, comm.allgather(model.came)))) == min(2, comm.size)


def test_what_fails_in_the_thread_reaches_the_step(comm):
    class Failing(HostMemory):
        calls = 0

        def allreduce(self, vector):
            self.calls += 1
            if self.calls == 7:
                raise ZeroDivisionError(f"call {self.calls}")
            super().allreduce(vector)

    transport = Failing(comm)
    running = steps(comm, Layers(), 4, transport=transport)
    next(running)
    assert transport.calls == 5
    with pytest.raises(ZeroDivisionError, match="call 7"):
        next(running)
    assert transport.calls == 7, "nothing goes out after a failure"


def threads():
    return [thread for thread in threading.enumerate() if thread.name.startswith("overlap")]


def test_nothing_stays_after_the_last_step(comm):
    for thread in threads():
        thread.join(10)
    model = Layers()
    reduce = choose_reduce(comm, Message(model, 0, comm.rank, comm.size), overlap=3)
    reduce()
    assert len(threads()) == 1
    assert all(p._post_accumulate_grad_hooks for p in model.parameters())
    reduce.close()
    until = time.monotonic() + 10
    while threads() and time.monotonic() < until:
        time.sleep(0.01)
    assert not threads()
    assert not any(p._post_accumulate_grad_hooks for p in model.parameters())


@pytest.mark.parametrize("tree", [False, True])
def test_twenty_steps_of_training(comm, tree):
    """23 rows in batches of 7: four steps an epoch, the last of two rows."""
    shards = 2 * comm.size if tree else comm.size
    partition, found = cut_epoch(ROWS, 7, min(7, shards)), []
    runs = assign_shards(len(partition.shares), comm.size) if tree else None
    for overlap in (0, 3):
        trainer, sent = make_trainer(small_model(), comm, runs=runs, overlap=overlap), [0]
        first = next(trainer.model.parameters())  # its gradient comes last
        hook = first.register_post_accumulate_grad_hook(
            lambda p, sent=sent, reduce=trainer.reduce: sent.append(getattr(reduce, "_sent", 0))
        )
        train(trainer, Arrays(), partition, comm, epochs=5)
        trainer.close()
        hook.remove()
        assert (max(sent) > 0) == (overlap > 0)
        found.append(parameters(trainer))
    assert (found[0] - found[1]).abs().max() < 1e-12
    assert torch.equal(*found) or not (tree or comm.size <= 2)
    assert (found[0] - parameters(make_trainer(small_model(), comm))).abs().max() > 1e-3


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
def test_segments_in_the_memory_of_a_gpu(comm):
    """The thread's own stream waits for backward's, and the step's for it."""
    device = choose_device("cuda", comm.rank)

    def net():
        return Layers(depth=12).to(device)

    how = {"number": 6, "shards": 2 * comm.size, "tree": True}
    whole, parts = (sums(comm, net, torch.float32, n, **how) for n in (0, 5))
    assert same(whole, parts)


def test_segments_begin_with_a_parameter_and_are_about_equal():
    layout = lay_out(nn.Sequential(*(nn.Linear(64, 64, bias=False) for _ in range(8))))
    assert cut(layout, 1) == [range(8 * 4096)]
    assert cut(layout, 2) == [range(4 * 4096, 8 * 4096), range(4 * 4096)]
    assert [len(span) // 4096 for span in cut(layout, 3)] == [3, 2, 3]
    assert [len(span) // 4096 for span in cut(layout, 99)] == [1] * 8
    uneven = lay_out(nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 640), nn.Linear(640, 1)))
    for parts in (1, 2, 3, 5, 64):
        spans = cut(uneven, parts)
        starts = {segment.offset for segment in uneven.segments}
        assert {span.start for span in spans} <= starts and len(spans) <= min(parts, 6)
        assert [i for span in reversed(spans) for i in span] == list(range(uneven.length))


def test_what_is_asked_for_wrongly_is_one_line(comm, monkeypatch):
    for wrong in (-1, 65):
        with pytest.raises(UsageError, match=f"--overlap {wrong}: give a number in .0, 64."):
            check_settings(Config(overlap=wrong))
    monkeypatch.setattr(mpi.MPI, "Query_thread", lambda: mpi.MPI.THREAD_FUNNELED)
    message = Message(Layers(), 0, comm.rank, comm.size)
    with pytest.raises(UsageError, match="--overlap calls MPI from a thread of its own"):
        choose_reduce(comm, message, overlap=2)
    choose_reduce(comm, message)()
    monkeypatch.setattr(mpi.MPI, "Query_thread", lambda: mpi.MPI.THREAD_SERIALIZED)
    choose_reduce(comm, message, overlap=2).close()
