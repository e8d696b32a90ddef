"""The step: gradients exact on any number of ranks, one Allreduce, nothing non-finite gets in."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from hpctrain.config import Config
from hpctrain.data.loader import Loader
from hpctrain.data.partition import Partition, cut_epoch, even_shares
from hpctrain.inference.tasks import Classification
from hpctrain.models import build
from hpctrain.parallel.batchnorm import BatchNorms
from hpctrain.parallel.choose import choose_reduce
from hpctrain.parallel.message import Message
from hpctrain.parallel.placement import assign_shards
from hpctrain.parallel.transport import HostMemory, Pinned
from hpctrain.training.compute import Eager
from hpctrain.training.control import StepFlags
from hpctrain.training.finetune import freeze, parameter_groups
from hpctrain.training.optimizer import make_optimizer
from hpctrain.training.step import Trainer, train_step
from tests.support.packs import order_of, places

pytestmark = pytest.mark.ranks
ROWS, SHAPE, CLASSES = 23, (6, 5, 2), 3


class Arrays:
    """Rows in memory, as a loader reads them."""

    def __init__(self, rows=ROWS, shape=SHAPE, classes=CLASSES):
        rng = np.random.default_rng(1)
        self.images = rng.integers(0, 256, (rows, *shape), dtype=np.uint8)
        self.image_shape, self.dtype = shape, np.dtype(np.uint8)
        self.labels = rng.integers(0, classes, rows)

    def read_labels(self, indices):
        return self.labels[indices]

    def hold(self, samples):
        pass

    def gather(self, indices, out):
        out[:] = self.images[indices]
        return out


def to_float64(images, key):
    return images.permute(0, 3, 1, 2).to(torch.float64) / 255


def small_model():
    torch.manual_seed(5)
    height, width, channels = SHAPE
    layers = [nn.Conv2d(channels, 4, 3), nn.ReLU(), nn.Flatten(), nn.Dropout(0.0)]
    return nn.Sequential(*layers, nn.Linear(4 * (height - 2) * (width - 2), CLASSES)).double()


def make_trainer(model, comm, config=None, weights=None, **how):
    config = config or Config(lr=0.1)
    freeze(model.train(), config.freeze)
    norms = BatchNorms(model, config.batch_norm)
    groups = parameter_groups(model, config)
    message = Message(model, norms.channels, comm.rank, comm.size, groups)
    return Trainer(
        model,
        message,
        norms,
        make_optimizer(config.optimizer or "sgdm", config.lr, config, message.groups),
        choose_reduce(comm, message, **how),
        Eager(model, Classification("fp32", config.label_smoothing, CLASSES, weights), message),
        config.clip_norm,
        class_weights=weights,
    )


def train(trainer, source, partition, comm, epochs=2, prepare=to_float64):
    """Epochs of steps as the training loop does them; the losses of all steps."""
    mine = assign_shards(len(partition.shares), comm.size)[comm.rank]
    loader = Loader(source, partition, mine, 7, prepare)
    losses = []
    for epoch in range(epochs):
        for number, batches in enumerate(loader.epoch(epoch)):
            train_step(trainer, batches, partition.total(number))
            totals = trainer.message.totals()
            assert totals.rows == partition.total(number)
            assert totals.irregular == 0
            losses.append(totals.mean_loss)
    return losses


def plain_torch(source, partition, config, epochs=2, weights=None):
    """The same mini-batches in one process with nothing of hpctrain's step."""
    model = small_model()
    optimizer = torch.optim.SGD(
        model.parameters(), lr=config.lr, momentum=0.9, weight_decay=config.weight_decay
    )
    shards = range(len(partition.shares))
    for epoch in range(epochs):
        orders = [order_of(partition, 7, epoch, j) for j in shards]
        for step in range(partition.steps):
            rows = np.concatenate([orders[j][places(partition, step, j)] for j in shards])
            optimizer.zero_grad()
            x = to_float64(torch.from_numpy(source.images[rows]), 0)
            loss = nn.functional.cross_entropy(
                model(x),
                torch.from_numpy(source.labels[rows]),
                weights,
                label_smoothing=config.label_smoothing,
            )
            loss.backward()
            if config.clip_norm:
                nn.utils.clip_grad_norm_(model.parameters(), config.clip_norm)
            optimizer.step()
    return torch.cat([p.detach().flatten() for p in model.parameters()])


def parameters(trainer):
    return torch.cat([p.detach().flatten() for p in trainer.model.parameters()])


CONFIGS = [
    Config(lr=0.1),
    Config(lr=0.1, weight_decay=1e-2, label_smoothing=0.1, clip_norm=0.3),
]


@pytest.mark.parametrize("config", CONFIGS)
@pytest.mark.parametrize("per_rank", [1, 2])
def test_gradients_are_exact(comm, config, per_rank):
    """23 samples in batches of 7: unequal shares, a short last batch, an empty shard."""
    source = Arrays()
    partition = cut_epoch(ROWS, 7, min(7, per_rank * comm.size))
    trainer = make_trainer(small_model(), comm, config)
    train(trainer, source, partition, comm)
    difference = (parameters(trainer) - plain_torch(source, partition, config)).abs().max()
    assert difference < 1e-12
    moved = (parameters(trainer) - parameters(make_trainer(small_model(), comm))).abs().max()
    assert moved > 1e-3, "nothing was trained"


def test_without_the_allreduce_the_result_differs(comm):
    """Negative control: what every rank would learn alone."""
    if comm.size == 1:
        return
    source, partition = Arrays(), cut_epoch(ROWS, 7, comm.size)
    alone = comm.Split(comm.rank)
    trainer = make_trainer(small_model(), comm, transport=HostMemory(alone))
    mine = assign_shards(comm.size, comm.size)[comm.rank]
    loader = Loader(source, partition, mine, 7, to_float64)
    for number, batches in enumerate(loader.epoch(0)):
        train_step(trainer, batches, partition.total(number))
    reference = plain_torch(source, partition, CONFIGS[0], epochs=1)
    assert (parameters(trainer) - reference).abs().max() > 1e-3


def test_weighting_by_nominal_shares_differs(comm):
    """Negative control: every shard counted alike although their rows differ."""
    if comm.size == 1:
        return
    source, partition = Arrays(), cut_epoch(ROWS, 7, comm.size)
    trainer = make_trainer(small_model(), comm)
    mine = assign_shards(comm.size, comm.size)[comm.rank]
    for batches in Loader(source, partition, mine, 7, to_float64).epoch(0):
        rows = len(batches[0].targets) if batches else 1
        train_step(trainer, batches, rows * comm.size)
    reference = plain_torch(source, partition, CONFIGS[0], epochs=1)
    assert (parameters(trainer) - reference).abs().max() > 1e-4


def test_a_staged_reduction_gives_the_same_bits(comm):
    """Small messages, so that the sums are the same: MPI chooses its algorithm by length."""
    results = []
    for transport in (HostMemory(comm), Pinned(comm), Pinned(comm, piece_bytes=100)):
        model = small_model()
        trainer = make_trainer(model, comm, transport=transport)
        source, partition = Arrays(), cut_epoch(ROWS, 7, comm.size)
        train(trainer, source, partition, comm)
        results.append(parameters(trainer))
    assert torch.equal(results[0], results[1])
    torch.testing.assert_close(results[0], results[2], rtol=0, atol=1e-14)


def test_all_ranks_hold_the_same_bits(comm):
    model = build("digits", (28, 28, 1), 10).to(memory_format=torch.channels_last)
    trainer = make_trainer(model, comm, Config(lr=0.01))
    source = Arrays(101, (28, 28, 1), 10)
    partition = cut_epoch(101, 32, comm.size)

    def prepare(images, key):
        return images.permute(0, 3, 1, 2).float() / 255

    losses = train(trainer, source, partition, comm, 2, prepare)
    state = {name: value.numpy().tobytes() for name, value in trainer.model.state_dict().items()}
    assert len(set(map(str, comm.allgather([state, losses])))) == 1
    assert len(set(losses)) == len(losses), "nothing was trained"


def test_a_last_step_with_fewer_rows_than_shards(comm):
    """33 rows in mini-batches of 16: the last step holds one row, most shards none."""
    source, partition = Arrays(33), cut_epoch(33, 16, comm.size)
    assert sum(partition.last) == 1
    trainer = make_trainer(small_model(), comm)
    train(trainer, source, partition, comm)
    reference = plain_torch(source, partition, CONFIGS[0])
    assert (parameters(trainer) - reference).abs().max() < 1e-12


@pytest.mark.parametrize("optimizer", ["sgdm", "adam", "adamw"])
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_step_that_is_not_finite_never_reaches_the_weights(comm, optimizer, bad):
    model = nn.Sequential(nn.Conv2d(2, 4, 3), nn.BatchNorm2d(4), nn.Flatten(), nn.Linear(48, 3))
    trainer = make_trainer(model.double(), comm, Config(lr=0.1, optimizer=optimizer))
    partition = Partition(14, even_shares(7, comm.size), even_shares(7, comm.size))
    worst = comm.size - 1

    def prepare(images, key):
        x = to_float64(images, key)
        if poison and comm.rank == worst:
            x[0, 0, 0, 0] = bad
        return x

    mine = assign_shards(comm.size, comm.size)[comm.rank]
    loader = Loader(Arrays(14), partition, mine, 7, prepare)
    poison = False
    for number, batches in enumerate(loader.epoch(0)):
        train_step(trainer, batches, partition.total(number))
    before = {name: value.clone() for name, value in model.state_dict().items()}
    poison = True
    batches = next(loader.epoch(1))
    train_step(trainer, batches, 7)
    totals = trainer.message.totals()
    assert not totals.finite
    assert comm.allgather(math.isfinite(totals.own)) == [r != worst for r in range(comm.size)]
    for name, value in model.state_dict().items():
        assert torch.equal(value, before[name]), name
    poison = False
    train_step(trainer, next(loader.epoch(1)), 7)
    assert not torch.equal(model.state_dict()["0.weight"], before["0.weight"])


def test_a_model_that_the_message_does_not_know_is_noticed(comm):
    trainer = make_trainer(small_model(), comm)
    trainer.model(torch.zeros(1, 2, 6, 5, dtype=torch.float64)).sum().backward()
    with pytest.raises(RuntimeError, match=r"0.weight is not in the message: call add_gradients"):
        trainer.message.zero()
    trainer.message.add_gradients()
    trainer.message.zero()
    middle = trainer.message.parameters["0.bias"]  # neither the first nor the last
    middle.grad = torch.zeros_like(middle)
    with pytest.raises(RuntimeError, match=r"0.bias is not in the message: call add_gradients"):
        trainer.message.zero()
    middle.grad, data = None, middle.data
    middle.data = data.clone()
    with pytest.raises(RuntimeError, match="0.bias is no longer a view"):
        trainer.message.zero()
    middle.data = data
    trainer.message.zero()


def test_stop_votes_and_clocks_arrive(comm):
    trainer = make_trainer(small_model(), comm)
    partition = cut_epoch(ROWS, 7, comm.size)
    mine = assign_shards(comm.size, comm.size)[comm.rank]
    batches = next(Loader(Arrays(), partition, mine, 7, to_float64).epoch(0))
    last = comm.size - 1
    told = StepFlags(1.0 + comm.rank, comm.rank == last, True, last == 0)
    train_step(trainer, batches, 7, told)
    totals = trainer.message.totals()
    assert (totals.stop, totals.preempted, totals.save) == (1, comm.size, last == 0)
    assert totals.data.tolist() == [1.0 + r for r in range(comm.size)]
    assert all(seconds > 0 for seconds in totals.compute)
    train_step(trainer, batches, 7)  # nothing stays of what was said before
    totals = trainer.message.totals()
    assert (totals.stop, totals.preempted, totals.save) == (0, 0, 0)
    assert totals.data.tolist() == [0.0] * comm.size


def test_what_nobody_asks_for_is_not_launched(comm):
    """On a GPU each operation is a kernel, and launching it takes longer than what it does."""
    message = make_trainer(small_model(), comm).message
    message.zero()

    def launched(work):
        with Launches() as found:
            work()
        return len(found.names)

    assert launched(lambda: message.set_flags(False)) == 0
    assert launched(lambda: message.set_flags(True, save=True)) == 2
    assert launched(message.finite) == launched(lambda: message.finite(lasting=True)) == 4


class Launches(TorchDispatchMode):
    """Notes the operations that compute."""

    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.names.append(str(function))
        return function(*args, **(kwargs or {}))


def test_random_numbers_belong_to_epoch_step_and_shard(comm):
    """Keys differ by all three, reach augmentation and dropout, and do not depend on ranks."""
    partition, mine = cut_epoch(ROWS, 7, 4), assign_shards(4, comm.size)[comm.rank]
    seen = []

    def prepare(images, key):
        seen.append(key)
        return to_float64(images, key)

    loader = Loader(Arrays(), partition, mine, 7, prepare)
    trainer = make_trainer(small_model(), comm)
    keys = {}
    for epoch in range(2):
        for step, batches in enumerate(loader.epoch(epoch)):
            keys |= {(epoch, step, b.shard): b.key for b in batches}
            train_step(trainer, batches, partition.total(step))
            if batches:
                assert torch.initial_seed() == batches[-1].key
    assert sorted(seen) == sorted(keys.values())
    everywhere = {k: v for part in comm.allgather(keys) for k, v in part.items()}
    assert (
        len(set(everywhere.values()))
        == len(everywhere)
        == 2 * (3 * 4 + sum(map(bool, partition.last)))
    )
    alone = Loader(Arrays(), partition, range(4), 7, to_float64)
    for step, batches in enumerate(alone.epoch(1)):
        assert [everywhere[1, step, b.shard] for b in batches] == [b.key for b in batches]


def test_dropout_draws_anew_in_every_step(comm):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Flatten(), nn.Dropout(0.5), nn.Linear(60, 3)).double()
    outputs = []
    model[1].register_forward_hook(lambda module, args, out: outputs.append((out != 0).flatten()))
    trainer, partition = make_trainer(model, comm), cut_epoch(ROWS, 7, comm.size)
    train(trainer, Arrays(), partition, comm, epochs=1)
    full = [o for o in outputs if len(o) == len(outputs[0])]
    assert not torch.equal(full[0], full[1])
