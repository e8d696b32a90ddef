"""A network's answer depends on its input alone: what changes from call to call is found, named and
refused, at the start or at the next digest, and looking for it leaves no trace.
"""

from __future__ import annotations

import dataclasses
import random

import pytest
import torch

from hpctrain.data.loader import Batch
from hpctrain.errors import RunError, UsageError
from hpctrain.inference.tasks import Classification
from hpctrain.models import ModelState, build
from hpctrain.parallel.batchnorm import BatchNorms
from hpctrain.training import loop as inner
from hpctrain.training import train as loop
from hpctrain.training.replay import Replay, Sample
from hpctrain.training.setup import set_up
from hpctrain.training.step import checksum
from tests.training.runs import digest

pytestmark = pytest.mark.mpi
STEPS = 14  # of a run; each rank does one forward a step


@pytest.fixture
def settings(settings):
    return dataclasses.replace(settings, checkpoint_every="5steps", test=False)


def odd(settings, kind, **changes):
    """A run of this odd network."""
    model = f"tests.odd_models:remembering_{kind}"
    return dataclasses.replace(settings, model=model, **changes)


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        ("counter", "attribute calls"),
        ("evaluation_counter", "attribute calls"),
        ("queue", "output .*attribute memory"),
        ("hidden", "output"),
        ("hidden_cycle", "output"),
        ("flag", "buffer late"),
        ("draws", "output .*random numbers from elsewhere than torch"),
    ],
)
def test_what_changes_from_call_to_call_is_refused_at_the_start(comm, settings, kind, words):
    with pytest.raises(UsageError, match=f"the network's {words}.* changed .*--local-buffers"):
        set_up(odd(settings, kind), comm)
    set_up(odd(settings, kind, local_buffers=True), comm)


def test_a_tuple_in_training_alone_is_refused_in_one_sentence(comm, settings):
    with pytest.raises(UsageError, match="must return a tensor, not tuple, in training mode$"):
        set_up(odd(settings, "tuple"), comm)


@pytest.mark.parametrize("kind", ["none", "none_in_training"])
def test_a_buffer_that_is_none_at_first_is_refused_by_name(comm, settings, kind):
    """Whatever the flags: the file of the weights could not be read again."""
    for local in (False, True):
        with pytest.raises(UsageError, match="^mask of the network is not there before"):
            set_up(odd(settings, kind, local_buffers=local), comm)


@pytest.mark.parametrize("kind", ["cache", "made_later", "drops", "frozen"])
def test_what_follows_from_the_input_alone_is_trained(comm, settings, kind):
    config = odd(settings, kind, checkpoint_every="1step")
    assert loop.train(config, comm) == 0
    more = dataclasses.replace(config, epochs=3)
    assert loop.train(more, comm) == 0, "resumed"


@pytest.mark.parametrize(
    ("kind", "name"), [("late_buffer", "buffer late"), ("late_output", "output")]
)
@pytest.mark.parametrize(("every", "step"), [(5, 10), (100, STEPS)])
def test_what_begins_to_change_later_is_named_at_the_next_digest(
    comm, settings, kind, name, every, step
):
    """On rank 0 from the seventh or eleventh step on: forwards to look at it count too."""
    where = rf"changed .* to the next \(after step {step} on rank 0 of {comm.size}"
    with pytest.raises(UsageError, match=f"the network's {name}.*{where}"):
        loop.train(odd(settings, kind, checkpoint_every=f"{every}steps", validate_every="0"), comm)
    allowed = odd(
        settings, kind, checkpoint_every=f"{every}steps", local_buffers=True, run="allowed"
    )
    assert loop.train(allowed, comm) == 0


def test_one_rank_alone_is_named(comm, settings, monkeypatch):
    """A buffer that changes on the last rank, by whatever."""

    def spoil(trainer, *args):
        if comm.rank == comm.size - 1:
            trainer.model.late[1] += 1
        return step(trainer, *args)

    step = inner.train_step
    monkeypatch.setattr(inner, "train_step", spoil)
    with pytest.raises(UsageError, match=rf"buffer late .*on rank {comm.size - 1} of {comm.size}"):
        loop.train(odd(settings, "drops"), comm)


@pytest.mark.parametrize("name", ["frozen", "linear.bias", "norm.running_var"])
def test_all_of_the_state_is_compared_at_the_end_and_named(comm, settings, monkeypatch, name):
    """After the last digest; under --local-buffers, where nothing is replayed."""
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
        loop.train(odd(settings, "frozen", local_buffers=True, epochs=2), comm)


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"deterministic": True, "shards": 4, "local_buffers": False},
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
        loop.train(
            odd(settings, "frozen", checkpoint_every="3steps", **{"local_buffers": True} | changes),
            comm,
        )


@pytest.mark.parametrize("changes", [{}, {"deterministic": True, "shards": 4}])
def test_looking_leaves_no_trace(comm, settings, changes):
    """The digest of weights, buffers, optimizer and all figures is that of a run without."""
    config = odd(settings, "drops", run=None, test=True, **changes)
    assert comm.size < 5
    found = {
        digest(dataclasses.replace(config, checkpoint_every=n), comm, n)
        for n in ("10m", "1step", "4steps")
    }
    assert len(found) == 1 or (not changes and comm.size > 2), "MPI may add in another order"


@pytest.mark.parametrize("kind", ["queue", "cache", "late_buffer", "made_later", "none"])
def test_a_replay_puts_everything_back(kind):
    torch.manual_seed(1)
    model = build(f"tests.odd_models:remembering_{kind}", (5, 7, 1), 3).train()
    model.memory += [torch.ones(3)]
    norms = BatchNorms(model)
    images, labels = torch.rand(11, 1, 5, 7), torch.arange(11) % 3
    before = {name: t.clone() for name, t in model.state_dict().items()}
    generator = torch.get_rng_state()
    samples = Sample(images[:5], labels[:5], 1), Sample(images[5:], labels[5:], 2)
    found = Replay(norms, Classification(classes=3), (3,), True, [])(*samples)
    assert bool(found.names()) == (kind == "queue")
    assert torch.equal(torch.get_rng_state(), generator)
    after = model.state_dict()
    assert after.keys() == before.keys()
    assert all(torch.equal(after[name], before[name]) for name in before)
    assert (model.mask, model.seen, model.calls) == (None, [], 0)
    assert [m.tolist() for m in model.memory] == [[1.0] * 3]


def test_a_state_is_put_back_in_place():
    """Who else holds a container of the module sees it as it was."""
    model = torch.nn.Linear(2, 3)
    model.items = {"list": [torch.zeros(2), {1, 2}], "tuple": (torch.ones(1), 7)}
    model.wide = torch.zeros(1).expand(4)
    held, inner_list = model.items, model.items["list"]
    state = ModelState(model)
    inner_list[0] += 1
    inner_list[1].add(3)
    inner_list.append(5)
    held["tuple"][0].fill_(9)
    held["more"] = model.more = 1
    model.items = None
    state.restore()
    assert model.items is held and held["list"] is inner_list and not hasattr(model, "more")
    assert held.keys() == {"list", "tuple"} and len(inner_list) == 2
    assert (inner_list[0].tolist(), inner_list[1]) == ([0, 0], {1, 2})
    assert held["tuple"][0].item() == 1


class Noisy(torch.nn.Module):
    """Adds in another order each time, as atomic additions of a GPU may; may count, too."""

    def __init__(self, counts: bool):
        super().__init__()
        self.linear, self.counts, self.calls = torch.nn.Linear(35, 3), counts, 0

    def forward(self, x):
        self.calls += self.counts
        self.last = self.linear(x.flatten(1)) + 1e-7 * random.random()
        return self.last


@pytest.mark.parametrize("counts", [False, True])
def test_where_sums_come_in_any_order_only_whole_numbers_count(counts):
    model = Noisy(counts).train()
    sample = Sample(torch.rand(5, 1, 5, 7), torch.zeros(5, dtype=torch.int64), 3)
    how = BatchNorms(model), Classification(classes=3), (3,)
    found = {exact: Replay(*how, exact, [])(sample, sample).names() for exact in (False, True)}
    assert found[False] == (["attribute calls"] if counts else [])
    assert any(name.startswith("output") for name in found[True])


def test_a_checksum_is_of_any_type():
    for kind in (torch.complex128, torch.complex64, torch.float8_e4m3fn, torch.bool, torch.float16):
        tensor = torch.tensor([1, 0, 1]).to(kind)
        other = torch.tensor([1, 0, 0]).to(kind)
        assert checksum(tensor) == checksum(tensor.clone()) != checksum(other)
    assert checksum(torch.tensor([1j]).conj()) == checksum(torch.tensor([1j]).conj().resolve_conj())


def test_rows_of_the_first_batches_are_kept(comm, settings):
    """Copies: the loader fills its memory anew."""
    job = set_up(settings, comm)
    found = loop.RunReplay(job.trainer, job.task, job.plan)
    images = torch.rand(13, 1, 28, 28)
    found.take([])
    found.take([Batch(0, images, torch.zeros(13, dtype=torch.int64), 5)])
    images.zero_()
    assert found._samples[0].inputs.max() > 0
    assert found().names() == []


def test_a_tensor_that_training_alone_makes_is_named_at_the_start(comm, settings):
    """Evaluation does not meet it: the saved network could not be read again."""
    model = "tests.odd_models:scaling_in_training"
    with pytest.raises(UsageError, match="scale of the network is not there before its first forw"):
        set_up(dataclasses.replace(settings, model=model, local_buffers=True), comm)
