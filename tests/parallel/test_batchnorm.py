"""Pooled batch-norm statistics against float64 numpy on the concatenated activations."""

from __future__ import annotations

import copy

import numpy as np
import pytest
import torch
from torch import nn

from hpctrain.errors import UsageError
from hpctrain.parallel.batchnorm import BatchNorms
from hpctrain.parallel.choose import choose_reduce
from hpctrain.parallel.message import Message
from hpctrain.parallel.placement import assign_shards

pytestmark = pytest.mark.ranks
C = 3


def layer_of(dim, momentum=0.1):
    return {1: nn.BatchNorm1d, 2: nn.BatchNorm2d, 3: nn.BatchNorm3d}[dim](C, momentum=momentum)


def activations(counts, dim, ratio, skew=0.0, seed=0):
    """One float32 array (m_j, C, ...) a shard with mean/std = ratio; skew moves shards' means."""
    rng = np.random.default_rng(seed)
    space = {1: (), 2: (5, 7), 3: (2, 3, 5)}[dim]
    return [
        (rng.standard_normal((m, C, *space)) + ratio + skew * j).astype(np.float32)
        for j, m in enumerate(counts)
    ]


def run_steps(comm, model, steps, mode):
    """Train-mode forwards of `steps` (lists of one array a shard) over all ranks; no weights."""
    model.train()
    norms = BatchNorms(model, mode)
    message = Message(model, norms.channels, comm.rank, comm.size)
    reduce = choose_reduce(comm, message)
    first = torch.from_numpy(next(a for a in steps[0] if len(a) > 1))
    norms.start(norms.probe(lambda: model(first), len(first)))
    for arrays in steps:
        total = sum(len(a) for a in arrays)
        message.zero()
        for shard in assign_shards(len(arrays), comm.size)[comm.rank]:
            rows = len(arrays[shard])
            if rows:
                model(torch.from_numpy(arrays[shard]))
                norms.collect(message.moments, rows, total)
        reduce()
        norms.merge(message.moments, total, message.finite())
    return norms


def channels(array):
    """(n, C, ...) -> (C, n ...) in float64."""
    return np.moveaxis(array.astype(np.float64), 1, 0).reshape(C, -1)


def expected(steps, mode, momentum, size):
    """The running statistics by each mode's own definition, in float64."""
    mean, var = np.zeros(C), np.ones(C)
    for k, arrays in enumerate(steps):
        phi = 1 / (k + 1) if momentum is None else momentum
        data = channels(np.concatenate(arrays))
        total = sum(len(a) for a in arrays)
        shards = [(len(a) / total, channels(a)) for a in arrays if len(a)]
        if mode == "exact":
            new_mean, new_var = data.mean(1), data.var(1, ddof=1)
            mean, var = (1 - phi) * mean + phi * new_mean, (1 - phi) * var + phi * new_var
            continue
        states = [
            (s, (1 - phi) * mean + phi * x.mean(1), (1 - phi) * var + phi * x.var(1, ddof=1))
            for s, x in shards
        ]
        mean = sum(s * m for s, m, _ in states)
        between = 1 if mode == "running" else 0
        var = sum(s * (v + between * (m - mean) ** 2) for s, m, v in states)
    return mean, var


COUNTS = [[7, 4, 2, 5, 3], [13, 1, 0, 6, 3]]  # unequal; then one sample and an empty shard


@pytest.mark.parametrize("mode", ["exact", "running", "average"])
@pytest.mark.parametrize("momentum", [0.1, None])
@pytest.mark.parametrize("dim", [2, 3])
def test_running_statistics_follow_the_definition_of_the_mode(comm, mode, momentum, dim):
    steps = [activations(c, dim, 2.0, skew=0.7, seed=i) for i, c in enumerate(COUNTS)]
    model = nn.Sequential(layer_of(dim, momentum))
    run_steps(comm, model, steps, mode)
    mean, var = expected(steps, mode, momentum, comm.size)
    np.testing.assert_allclose(model[0].running_mean.numpy(), mean, rtol=2e-6)
    np.testing.assert_allclose(model[0].running_var.numpy(), var, rtol=1e-5)
    assert model[0].num_batches_tracked.item() == len(steps)
    for other in {"exact", "running", "average"} - {mode}:  # each mode is a different number
        assert np.abs(expected(steps, other, momentum, comm.size)[1] / var - 1).max() > 1e-3


def test_one_value_per_row(comm):
    steps = [activations([7, 4, 2, 5, 3], 1, 2.0, skew=0.7)]
    model = nn.Sequential(layer_of(1))
    run_steps(comm, model, steps, "exact")
    mean, var = expected(steps, "exact", 0.1, comm.size)
    np.testing.assert_allclose(model[0].running_var.numpy(), var, rtol=1e-5)
    np.testing.assert_allclose(model[0].running_mean.numpy(), mean, rtol=1e-6)


@pytest.mark.parametrize(
    ("ratio", "bound"), [(0, 1e-5), (1, 1e-5), (10, 1e-5), (100, 1e-5), (1e4, 5e-4)]
)
@pytest.mark.parametrize("skew", [0.0, 1.0])
@pytest.mark.parametrize("steps", [1, 3])
def test_variance_is_accurate_far_from_zero_from_the_first_step_on(comm, ratio, bound, skew, steps):
    rows = [37, 31, 29, 41, 23]
    data = [activations(rows, 2, ratio, skew, seed=i) for i in range(steps)]
    model = nn.Sequential(layer_of(2, momentum=1.0))
    run_steps(comm, model, data, "exact")
    _, var = expected(data, "exact", 1.0, comm.size)
    error = np.abs(model[0].running_var.numpy() / var - 1).max()
    assert error < bound


def test_the_shift_follows_a_mean_that_moves(comm):
    """The third step is accurate because the second one moved the shift."""
    ratios = (0, 1e4, 1e4)
    data = [activations([37, 31, 29, 41, 23], 2, ratio, seed=i) for i, ratio in enumerate(ratios)]
    model = nn.Sequential(layer_of(2, momentum=1.0))
    run_steps(comm, model, data, "exact")
    _, var = expected(data, "exact", 1.0, comm.size)
    assert np.abs(model[0].running_var.numpy() / var - 1).max() < 5e-4


def test_without_a_shift_the_variance_would_cancel(comm):
    """Negative control of the test above: r = 0 loses everything at mean/std = 1e4."""
    data = [activations([37, 31, 29, 41, 23], 2, 1e4)]
    model = nn.Sequential(layer_of(2, momentum=1.0))
    model.train()
    norms = BatchNorms(model, "exact")
    message = Message(model, norms.channels, comm.rank, comm.size)
    norms.elements.fill_(35)
    message.zero()
    for shard in assign_shards(5, comm.size)[comm.rank]:
        model(torch.from_numpy(data[0][shard]))
        norms.collect(message.moments, len(data[0][shard]), 161)
    choose_reduce(comm, message)()
    norms.merge(message.moments, 161, message.finite())
    _, var = expected(data, "exact", 1.0, comm.size)
    assert np.abs(model[0].running_var.numpy() / var - 1).max() > 1e-2


def test_one_shard_equals_plain_torch_in_every_mode(comm):
    if comm.size > 1:
        return
    steps = [activations([11], 2, 3.0, seed=i) for i in range(4)]
    plain = nn.Sequential(layer_of(2))
    for (array,) in steps:
        plain(torch.from_numpy(array))
    for mode in ("exact", "running", "average"):
        model = nn.Sequential(layer_of(2))
        run_steps(comm, model, steps, mode)
        torch.testing.assert_close(model[0].running_mean, plain[0].running_mean)
        torch.testing.assert_close(model[0].running_var, plain[0].running_var)
        assert torch.equal(model[0].num_batches_tracked, plain[0].num_batches_tracked)


def test_equal_bits_on_all_ranks(comm):
    steps = [activations(c, 2, 1.0, skew=0.5, seed=i) for i, c in enumerate(COUNTS)]
    for mode in ("exact", "running", "average"):
        model = nn.Sequential(layer_of(2))
        run_steps(comm, model, steps, mode)
        bits = comm.allgather(model[0].running_var.numpy().tobytes())
        assert len(set(bits)) == 1


def test_a_step_that_is_not_finite_leaves_no_trace(comm):
    good = activations([7, 4, 2, 5, 3], 2, 1.0)
    bad = copy.deepcopy(good)
    bad[3][0, 1] = np.nan
    once = nn.Sequential(layer_of(2))
    run_steps(comm, once, [good], "exact")
    again = nn.Sequential(layer_of(2))
    run_steps_with_gate(comm, again, [good, bad])
    assert torch.equal(once[0].running_mean, again[0].running_mean)
    assert torch.equal(once[0].running_var, again[0].running_var)
    assert again[0].num_batches_tracked.item() == 1


def run_steps_with_gate(comm, model, steps):
    """Like run_steps, with a loss that carries NaN into the message's gate."""
    norms = BatchNorms(model.train(), "exact")
    message = Message(model, norms.channels, comm.rank, comm.size)
    first = torch.from_numpy(steps[0][0])
    norms.start(norms.probe(lambda: model(first), len(first)))
    for arrays in steps:
        total = sum(len(a) for a in arrays)
        message.zero()
        for shard in assign_shards(len(arrays), comm.size)[comm.rank]:
            loss = model(torch.from_numpy(arrays[shard])).square().sum()
            norms.collect(message.moments, len(arrays[shard]), total)
            message.add_counts(loss, 0, len(arrays[shard]))
        choose_reduce(comm, message)()
        norms.merge(message.moments, total, message.finite())


@pytest.mark.parametrize(("drift", "least", "most"), [(0, 0, 2e-6), (1, 0, 4e-6), (50, 1e-4, 3e-3)])
def test_the_bound_holds_while_the_mean_drifts_less_than_its_deviation(comm, drift, least, most):
    """The shift is the mean of the step before; beyond, the error grows with its square."""
    worst = 0.0
    for seed in range(7):
        steps = [activations([13] * 5, 2, ratio, seed=seed) for ratio in (100 - drift, 100)]
        model = nn.Sequential(layer_of(2, momentum=1.0))
        run_steps(comm, model, steps, "exact")
        truth = channels(np.concatenate(steps[1])).var(1, ddof=1)
        found = model[0].running_var.double().numpy()
        worst = max(worst, float(np.abs(found / truth - 1).max()))
    assert least < worst < most


def test_the_probe_leaves_no_trace(comm):
    class Odd(nn.Module):
        def __init__(self):
            super().__init__()
            self.norm = nn.BatchNorm2d(C)
            self.register_buffer("seen", torch.zeros(1))

        def forward(self, x):
            self.seen += 1
            return self.norm(x)

    model = Odd().train()
    model.norm.running_mean.fill_(5.0)
    norms = BatchNorms(model, "exact")
    x = torch.randn(4, C, 5, 5) + 3
    probe = norms.probe(lambda: model(x), 4)
    assert model.seen.item() == 0
    assert probe.elements == [25]
    torch.testing.assert_close(probe.means, x.mean((0, 2, 3)))
    assert torch.equal(model.norm.running_mean, torch.full((C,), 5.0))
    assert model.norm.num_batches_tracked.item() == 0
    assert model.seen.item() == 0


def test_layers_that_cannot_be_pooled_are_refused_by_name(comm):
    shared = nn.BatchNorm2d(C)
    twice = nn.Sequential(shared, nn.ReLU(), shared).train()
    norms = BatchNorms(twice, "exact")
    x = torch.randn(4, C, 5, 5)
    with pytest.raises(UsageError, match="layer 0 runs 2 times"):
        norms.probe(lambda: twice(x), 4)
    with pytest.raises(UsageError, match="SyncBatchNorm"):
        BatchNorms(nn.Sequential(nn.SyncBatchNorm(C)).train(), "exact")


def test_frozen_layers_keep_their_statistics(comm):
    model = nn.Sequential(nn.BatchNorm2d(C), nn.BatchNorm2d(C)).train()
    model[0].eval()
    norms = BatchNorms(model, "exact")
    assert list(norms.layers) == ["1"]


def test_buffers_stay_tensors_of_their_own(comm):
    """No views of one vector: kernels find each aligned, compilers none that alias."""
    model = nn.Sequential(nn.BatchNorm2d(3), nn.BatchNorm2d(5), nn.BatchNorm2d(3)).train()
    before = dict(model.named_buffers())
    run_steps(comm, nn.Sequential(model[0]), [activations([7, 4, 2, 5, 3], 2, 2.0)], "exact")
    BatchNorms(model)
    buffers = dict(model.named_buffers())
    assert all(buffers[name] is before[name] for name in before)
    assert len({b.untyped_storage().data_ptr() for b in buffers.values()}) == len(buffers) == 9
    assert all(b.storage_offset() == 0 and b.data_ptr() % 64 == 0 for b in buffers.values())
