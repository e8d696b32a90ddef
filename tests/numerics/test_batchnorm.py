"""Pooled batch-norm statistics against float64 NumPy on the concatenated activations."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import nn

import hpctrain as hp
from tests.support.api import assign_shards

pytestmark = pytest.mark.ranks
C = 3
MODES = ("exact", "running", "average")


def network(dim=2, momentum=0.1):
    layer = {1: nn.BatchNorm1d, 2: nn.BatchNorm2d, 3: nn.BatchNorm3d}[dim]
    return nn.Sequential(layer(C, momentum=momentum))


def activations(counts, dim, ratio, skew=0.0, seed=0):
    """One float32 array (m_j, C, ...) a shard with mean/std = ratio; skew moves shards' means."""
    rng = np.random.default_rng(seed)
    space = {1: (), 2: (5, 7), 3: (2, 3, 5)}[dim]
    return [
        (rng.standard_normal((m, C, *space)) + ratio + skew * j).astype(np.float32)
        for j, m in enumerate(counts)
    ]


def run_steps(comm, model, steps, mode="exact"):
    """Training forwards of `steps` (lists of one array a shard) over all ranks; no weights."""
    norms = hp.BatchNorms(model.train(), mode)
    message = hp.Message(model, norms.channels, comm.rank, comm.size)
    reduce = hp.choose_reduce(comm, message)
    first = torch.from_numpy(next(a for a in steps[0] if len(a) > 1))
    norms.start(norms.probe(lambda: model(first), len(first)))
    for arrays in steps:
        total = sum(map(len, arrays))
        message.zero()
        for shard in assign_shards(len(arrays), comm.size)[comm.rank]:
            if rows := len(arrays[shard]):
                loss = model(torch.from_numpy(arrays[shard])).square().sum()
                norms.collect(message.moments, rows, total)
                message.add_sums(rows, loss=loss)
        reduce()
        norms.merge(message.moments, total, message.finite())


def channels(array):
    """(n, C, ...) -> (C, n ...) in float64."""
    return np.moveaxis(array.astype(np.float64), 1, 0).reshape(C, -1)


def expected(steps, mode="exact", momentum=0.1):
    """The running statistics by each mode's own definition, in float64."""
    mean, var = np.zeros(C), np.ones(C)
    for k, arrays in enumerate(steps):
        phi = 1 / (k + 1) if momentum is None else momentum
        data, total = channels(np.concatenate(arrays)), sum(map(len, arrays))
        if mode == "exact":
            new_mean, new_var = data.mean(1), data.var(1, ddof=1)
            mean, var = (1 - phi) * mean + phi * new_mean, (1 - phi) * var + phi * new_var
            continue
        shards = [(len(a) / total, channels(a)) for a in arrays if len(a)]
        states = [
            (s, (1 - phi) * mean + phi * x.mean(1), (1 - phi) * var + phi * x.var(1, ddof=1))
            for s, x in shards
        ]
        mean = sum(s * m for s, m, _ in states)
        between = 1 if mode == "running" else 0
        var = sum(s * (v + between * (m - mean) ** 2) for s, m, v in states)
    return mean, var


def error_of_variance(model, steps):
    """The largest relative error; the momentum is 1."""
    found = model[0].running_var.double().numpy()
    return np.abs(found / expected(steps, momentum=1.0)[1] - 1).max()


COUNTS = [[7, 4, 2, 5, 3], [13, 1, 0, 6, 3]]  # unequal; then one sample and an empty shard


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(("dim", "momentum"), [(3, None), (2, None), (1, 0.1)])
def test_running_statistics_follow_the_definition_of_the_mode(comm, mode, momentum, dim):
    counts = COUNTS if dim > 1 else [[7, 4, 2, 5, 3]]  # of one value, torch refuses one sample
    steps = [activations(c, dim, 2.0, skew=0.7, seed=i) for i, c in enumerate(counts)]
    model = network(dim, momentum)
    run_steps(comm, model, steps, mode)
    mean, var = expected(steps, mode, momentum)
    np.testing.assert_allclose(model[0].running_mean.numpy(), mean, rtol=2e-6)
    np.testing.assert_allclose(model[0].running_var.numpy(), var, rtol=1e-5)
    assert model[0].num_batches_tracked.item() == len(steps)
    for other in {*MODES} - {mode}:  # each mode is a different number
        assert np.abs(expected(steps, other, momentum)[1] / var - 1).max() > 1e-3
    assert len(set(comm.allgather(model[0].running_var.numpy().tobytes()))) == 1


@pytest.mark.parametrize("skew", [0.0, 1.0])
@pytest.mark.parametrize(
    ("ratios", "bound"),
    [([0, 0], 1e-5), ([10], 1e-5), ([100] * 3, 1e-5), ([1e4], 5e-4), ([0, 1e4, 1e4], 5e-4)],
)
def test_the_variance_is_accurate_far_from_zero_from_the_first_step_on(comm, ratios, bound, skew):
    """Where the mean moves, the step after the next one is: the shift has followed."""
    steps = [activations([37, 31, 29, 41, 23], 2, r, skew, n) for n, r in enumerate(ratios)]
    model = network(momentum=1.0)
    run_steps(comm, model, steps)
    assert error_of_variance(model, steps) < bound


@pytest.mark.parametrize(("drift", "least", "most"), [(0, 0, 2e-6), (1, 0, 4e-6), (50, 1e-4, 3e-3)])
def test_the_bound_holds_while_the_mean_drifts_less_than_its_deviation(comm, drift, least, most):
    """The shift is the mean of the step before; beyond, the error grows with its square."""
    worst = 0.0
    for seed in range(7):
        steps = [activations([13] * 5, 2, ratio, seed=seed) for ratio in (100 - drift, 100)]
        model = network(momentum=1.0)
        run_steps(comm, model, steps)
        worst = max(worst, error_of_variance(model, steps))
    assert least < worst < most


def test_the_first_forward_that_measures_the_shift_leaves_no_trace(comm):
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
    norms, x = hp.BatchNorms(model), torch.randn(4, C, 5, 5) + 3
    probe = norms.probe(lambda: model(x), 4)
    assert probe.elements == [25]
    torch.testing.assert_close(probe.means, x.mean((0, 2, 3)))
    assert torch.equal(model.norm.running_mean, torch.full((C,), 5.0))
    assert model.norm.num_batches_tracked.item() == model.seen.item() == 0


def test_layers_that_cannot_be_pooled_are_refused_by_name(comm):
    shared = nn.BatchNorm2d(C)
    twice, x = nn.Sequential(shared, nn.ReLU(), shared).train(), torch.randn(4, C, 5, 5)
    norms = hp.BatchNorms(twice)
    with pytest.raises(hp.UsageError, match="layer 0 runs 2 times"):
        norms.probe(lambda: twice(x), 4)
    with pytest.raises(hp.UsageError, match="no image passes batch-norm layer 0: .* --freeze"):
        norms.probe(lambda: twice[1](x), 4)
    with pytest.raises(hp.UsageError, match="SyncBatchNorm"):
        hp.BatchNorms(nn.Sequential(nn.SyncBatchNorm(C)).train())


def test_buffers_stay_tensors_of_their_own(comm):
    """No views of one vector: kernels find each aligned, compilers none that alias."""
    model = nn.Sequential(nn.BatchNorm2d(3), nn.BatchNorm2d(5), nn.BatchNorm2d(3)).train()
    before = dict(model.named_buffers())
    hp.BatchNorms(model)
    buffers = dict(model.named_buffers())
    assert all(buffers[name] is before[name] for name in before)
    assert len({b.untyped_storage().data_ptr() for b in buffers.values()}) == len(buffers) == 9
    assert all(b.storage_offset() == 0 and b.data_ptr() % 64 == 0 for b in buffers.values())
