"""A network's answer depends on its input alone: what changes from call to call is found before
the first step, named and refused, and looking for it leaves no trace.
"""

from __future__ import annotations

import dataclasses
import random

import pytest
import torch

from hpctrain.errors import RunError, UsageError
from hpctrain.models import build
from hpctrain.parallel.batchnorm import BatchNorms
from hpctrain.training import loop as inner
from hpctrain.training import train as loop
from hpctrain.training.probe import check_repeats
from hpctrain.training.setup import set_up
from hpctrain.training.step import checksum
from tests.training.runs import digest

pytestmark = pytest.mark.mpi
STEPS = 14  # of a run


@pytest.fixture
def settings(settings):
    return dataclasses.replace(settings, test=False)


def odd(settings, kind, **changes):
    """A run of this odd network."""
    model = f"tests.support.nets:remembering_{kind}"
    return dataclasses.replace(settings, model=model, **changes)


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        ("queue", "output"),
        ("hidden", "output"),
        ("hidden_cycle", "output"),
        ("counting_buffer", "buffer late"),
        ("evaluation_buffer", "buffer late"),
        ("made_later", "buffer mask"),
        ("draws", r"output \(does it draw random numbers from elsewhere than torch"),
    ],
)
def test_what_changes_from_call_to_call_is_refused_at_the_start(comm, settings, kind, words):
    with pytest.raises(UsageError, match=f"the network's {words}.* changed from one forward"):
        set_up(odd(settings, kind), comm)


def test_a_buffer_that_only_rank_0_has_made_is_refused_by_name(comm, settings):
    with pytest.raises(UsageError, match="buffer mask is made in its first pass in training"):
        set_up(odd(settings, "made_in_training"), comm)


def test_a_tuple_in_training_alone_is_refused_in_one_sentence(comm, settings):
    with pytest.raises(UsageError, match="must return a tensor, not tuple, in training mode$"):
        set_up(odd(settings, "tuple"), comm)


@pytest.mark.parametrize("kind", ["none", "none_in_training"])
def test_a_buffer_that_is_none_at_first_is_refused_by_name(comm, settings, kind):
    """The file of the weights could not be read again."""
    with pytest.raises(UsageError, match="^mask of the network is not there before"):
        set_up(odd(settings, kind), comm)


@pytest.mark.parametrize("kind", ["counter", "flag", "cache", "made_once", "drops", "frozen"])
def test_what_follows_from_the_input_alone_is_trained(comm, settings, kind):
    config = odd(settings, kind, checkpoint_every="3steps")
    assert loop.train(config, comm) == 0
    more = dataclasses.replace(config, epochs=3)
    assert loop.train(more, comm) == 0, "resumed"


def test_a_buffer_that_changes_later_on_one_rank_is_named_before_a_checkpoint(
    comm, settings, monkeypatch
):
    def spoil(trainer, *args):
        if comm.rank == comm.size - 1:
            trainer.model.late[1] += 1
        return step(trainer, *args)

    step = inner.train_step
    monkeypatch.setattr(inner, "train_step", spoil)
    config = odd(settings, "drops", checkpoint_every="3steps")
    if comm.size == 1:
        assert loop.train(config, comm) == 0
        return
    with pytest.raises(RunError, match="after step 3 .*they differ in late$"):
        loop.train(config, comm)


@pytest.mark.parametrize("name", ["frozen", "linear.bias", "norm.running_var"])
def test_all_of_the_state_is_compared_at_the_end_and_named(comm, settings, monkeypatch, name):
    """After the last checkpoint and validation."""
    if comm.size == 1:
        return

    def spoil(run):
        if comm.rank == 1:
            with torch.no_grad():
                run.job.trainer.model.state_dict()[name].view(-1)[-1] += 1
            norm = run.job.trainer.model.norm
            own = torch.stack([norm.running_mean, norm.running_var])
            run.job.trainer.norms.running.copy_(own)
        return compare(run)

    compare = loop.compare_ranks
    monkeypatch.setattr(loop, "compare_ranks", spoil)
    words = "rank 1 of 3 held other" if comm.size == 3 else "did not hold the same|held other"
    with pytest.raises(RunError, match=f"after step {STEPS} .*({words}).*they differ in {name}$"):
        loop.train(odd(settings, "frozen", epochs=2), comm)


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"deterministic": True, "shards": 4},
        {"comm_dtype": "bf16"},
        {"comm_dtype": "bf16", "overlap": 2},
    ],
)
def test_ranks_with_different_weights_are_named_at_the_next_digest(
    comm, settings, monkeypatch, changes
):
    """One sum shows that digests differ; the ranks then gather them."""
    if comm.size == 1:
        return

    def spoil(trainer, batches, *args):
        report = step(trainer, batches, *args)
        if comm.rank == comm.size - 1:
            trainer.message.parameters["linear.bias"].data[0] += 1
        return report

    step = inner.train_step
    monkeypatch.setattr(inner, "train_step", spoil)
    words = (
        rf"rank {comm.size - 1} of {comm.size} held other weights .*\(digest [0-9a-f]{{16}}, not"
    )
    if comm.size == 2:
        words = r"did not hold the same weights \(digests by rank: [0-9a-f]{16}, [0-9a-f]{16}\)"
    with pytest.raises(RunError, match=f"after step 3 .*{words}.*they differ in linear.bias"):
        loop.train(odd(settings, "frozen", checkpoint_every="3steps", **changes), comm)


@pytest.mark.parametrize("changes", [{}, {"deterministic": True, "shards": 4}])
def test_comparing_leaves_no_trace(comm, settings, changes):
    """The digest of weights, buffers, optimizer and all figures, however often ranks compare."""
    config = odd(settings, "drops", run=None, test=True, **changes)
    assert comm.size < 5
    found = {
        digest(dataclasses.replace(config, checkpoint_every=n), comm, n)
        for n in ("10m", "1step", "4steps")
    }
    assert len(found) == 1 or (not changes and comm.size > 2), "MPI may add in another order"


@pytest.mark.parametrize("mode", [True, False])
def test_the_check_puts_statistics_and_generators_back(mode):
    torch.manual_seed(1)
    model = build("tests.support.nets:remembering_drops", (5, 7, 1), 3).train()
    norms = BatchNorms(model)
    model.train(mode)
    images = torch.rand(11, 1, 5, 7)
    before = {name: t.clone() for name, t in model.state_dict().items()}
    generator = torch.get_rng_state()
    check_repeats(norms, lambda x: model(x).detach(), images, 1, True)
    assert torch.equal(torch.get_rng_state(), generator)
    after = model.state_dict()
    assert after.keys() == before.keys()
    assert all(torch.equal(after[name], before[name]) for name in before)


class Noisy(torch.nn.Module):
    """Adds in another order each time, as atomic additions of a GPU may; may count, too."""

    def __init__(self, counts: bool):
        super().__init__()
        self.linear, self.counts = torch.nn.Linear(35, 3), counts
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))

    def forward(self, x):
        self.calls += self.counts
        return self.linear(x.flatten(1)) + 1e-7 * random.random()


@pytest.mark.parametrize("counts", [False, True])
def test_where_sums_come_in_any_order_only_buffers_count(counts):
    model = Noisy(counts).train()
    images, norms = torch.rand(5, 1, 5, 7), BatchNorms(model)
    if counts:
        with pytest.raises(UsageError, match="the network's buffer calls changed"):
            check_repeats(norms, model, images, 3, False)
    else:
        check_repeats(norms, model, images, 3, False)
    with pytest.raises(UsageError, match="output .* changed"):
        check_repeats(norms, model, images, 3, True)


def test_an_output_that_is_not_a_number_is_the_same_again():
    model = torch.nn.Linear(35, 3)
    check_repeats(BatchNorms(model), lambda x: x * torch.nan, torch.rand(5, 3), 3, True)


def test_a_checksum_is_of_any_type():
    for kind in (torch.complex128, torch.complex64, torch.float8_e4m3fn, torch.bool, torch.float16):
        tensor = torch.tensor([1, 0, 1]).to(kind)
        other = torch.tensor([1, 0, 0]).to(kind)
        assert checksum(tensor) == checksum(tensor.clone()) != checksum(other)
    assert checksum(torch.tensor([1j]).conj()) == checksum(torch.tensor([1j]).conj().resolve_conj())


def test_a_tensor_that_training_alone_makes_is_named_at_the_start(comm, settings):
    """Evaluation does not meet it: the saved network could not be read again."""
    model = "tests.support.nets:scaling_in_training"
    with pytest.raises(UsageError, match="scale of the network is not there before its first forw"):
        set_up(dataclasses.replace(settings, model=model), comm)
