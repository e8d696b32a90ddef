"""Each flag of Config does what it says: the whole way from the flag to what a run computes."""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path

import numpy as np
import pytest
import torch

from hpctrain.config import Config
from hpctrain.data.augment import IMAGENET_MEAN, IMAGENET_STD
from hpctrain.data.pack import write_pack
from hpctrain.errors import UsageError
from hpctrain.models import read_model, save_model
from hpctrain.plan import Plan
from hpctrain.plan_text import describe_plan
from hpctrain.report.record import read_records
from hpctrain.training import train as loop
from hpctrain.training.loop import train_epochs
from hpctrain.training.setup import Job, make_model, set_up
from tests.support.packs import make_pack, order_of, places
from tests.training.runs import make_run, short_run

pytestmark = pytest.mark.mpi
ROWS, SHAPE, CLASSES, BATCH = 53, (12, 11, 3), 5, 16
STEPS = 4  # of an epoch: 16, 16, 16 and 5 rows
LR = 0.05
FLAGS = {}  # name of a flag -> its check
ELSEWHERE = {  # flag -> where it is tested
    "data": "tests/data/test_builtin.py",
    "cache_dir": "tests/data/test_builtin.py",
    **dict.fromkeys(
        ("images", "labels", "layout", "split", "max_value"),
        "tests/training/test_external.py",
    ),
    "run": "tests/contract/test_run_folder.py",
    "runs_dir": "tests/contract/test_run_folder.py",
    "progress": "tests/tools/test_progress.py",
    "validate_every": "below",
    "tensorboard": "below",
    "dry_run": "below",
    "deterministic": "tests/training/test_deterministic.py",
    "worker_load": "tests/training/test_deterministic.py",
    "task": "tests/runs/test_denoise.py",
    "noise": "tests/runs/test_denoise.py",
    "noise_level": "tests/runs/test_denoise.py",
    "shuffle": "tests/numerics/test_orders.py",
    "balanced_sampling": "tests/numerics/test_balanced_order.py",
    "comm_dtype": "tests/numerics/test_bf16.py",
    "overlap": "tests/numerics/test_overlap.py",
    "reduce": "tests/runs/test_devices.py",
    "read_buffer": "tests/data/test_loader.py",
    "random_crop": "tests/training/test_jpeg.py",
    "stage": "tests/runs/test_staging.py",
    "verify": "tests/contract/test_pack.py",
    **dict.fromkeys(("loss", "augment", "metric"), "tests/runs/test_own_functions.py"),
    "patience": "tests/runs/test_validation.py",
    "final": "tests/runs/test_validation.py",
    "checkpoint_every": "tests/runs/test_checkpoints.py",
    "keep_checkpoints": "tests/runs/test_checkpoints.py",
    "compile": "tests/training/test_backward.py",
    "cuda_graphs": "tests/training/test_backward.py",
    "resume": "tests/runs/test_continue.py",
    "time_limit": "tests/runs/test_notices.py",
    "hang_timeout": "tests/runs/test_hangs.py",
    "test": "tests/runs/test_validation.py",
    **dict.fromkeys(
        (
            "freeze",
            "lr_factors",
            "no_decay",
            "min_lr",
            "ema",
        ),
        "tests/training/test_finetune.py",
    ),
}


@dataclasses.dataclass
class Seen:
    """What a run did, as a recorder sees it."""

    job: Job
    batches: list  # of this rank in the first epoch
    weights: list  # before the first step, and after each
    steps: list  # facts of each recorded step

    def step(self, **facts):
        self.steps.append(facts)
        self.weights.append(self.job.trainer.message.weights.detach().clone())

    def epoch(self, **facts):
        pass

    @property
    def images(self):
        """(n, C, H, W) of this rank in the first epoch."""
        return torch.cat([b.images for step in self.batches for b in step])

    @property
    def rates(self):
        return [step["learning_rate"] for step in self.steps]

    @property
    def loss(self):
        """Of the first step."""
        return self.steps[0]["loss"]

    def update(self, step):
        """What this step, from 1, added to the weights."""
        return self.weights[step] - self.weights[step - 1]


def of(*flags):
    """Make a function the check of these flags."""

    def register(check):
        for flag in flags:
            FLAGS[flag] = check
        return check

    return register


@pytest.fixture
def settings(comm, shared_tmp):
    if comm.rank == 0:
        rows = {"train": ROWS, "validation": 7, "test": 11}
        make_pack(shared_tmp / "pack.h5", rows, SHAPE, CLASSES)
    comm.Barrier()
    return short_run(
        shared_tmp,
        "pack.h5",
        run="a",
        model="digits",
        batch_size=BATCH,
        shards=4,
        lr=LR,
        momentum=0.0,
        validate_every="0",
        device="cpu",
        threads=1,
    )


@pytest.fixture
def seen(comm, settings):
    """A function that runs with these flags, all else being equal, and tells what it did."""

    def run(training=True, **flags):
        job = set_up(dataclasses.replace(settings, **flags), comm)
        start = job.trainer.message.weights.detach().clone()
        result = Seen(job, list(job.loader.epoch(0)), [start], [])
        if not training:
            return result
        train_epochs(make_run(job, comm, result))
        return result

    return run


@of("flip", "shift")
def augmentation(seen, comm):
    plain, flipped, shifted = seen(), seen(flip=True), seen(shift=2)
    mirrored = moved = 0
    for before, after in zip(plain.images, flipped.images, strict=True):
        assert torch.equal(after, before) or torch.equal(after, before.flip(2))
        mirrored += not torch.equal(after, before)
    for before, after in zip(plain.images, shifted.images, strict=True):
        wide = torch.nn.functional.pad(before, (2, 2, 2, 2))  # (C, H + 4, W + 4)
        cuts = [wide[:, y : y + 12, x : x + 11] for y in range(5) for x in range(5)]
        assert any(torch.equal(after, cut) for cut in cuts)
        moved += not torch.equal(after, before)
    assert 10 < comm.allreduce(mirrored) < ROWS - 10
    assert 40 < comm.allreduce(moved) <= ROWS
    assert plain.loss != flipped.loss != shifted.loss != plain.loss


@of("normalize")
def normalization(seen, comm):
    unit, pack = seen(), seen(normalize="pack")
    assert 0 <= unit.images.min() < 0.05 < 0.7 < unit.images.max() <= 1
    own = (pack.job.pack.mean, pack.job.pack.std)
    imagenet = seen(normalize="imagenet")
    for run, (mean, std) in ((pack, own), (imagenet, (IMAGENET_MEAN, IMAGENET_STD))):
        mean, std = torch.tensor(mean)[:, None, None], torch.tensor(std)[:, None, None]
        torch.testing.assert_close(run.images, (unit.images - mean) / std, rtol=1e-5, atol=1e-5)
        evaluated = run.job.prepare(torch.zeros(1, *SHAPE, dtype=torch.uint8), 0)
        torch.testing.assert_close(evaluated[0, :, :1, :1], -mean / std)
        assert run.loss != unit.loss


@of("model", "small_stem")
def network(seen, comm):
    for name, kind in (("digits", "DigitsNet"), ("tests.support.nets:norm_first", "Sequential")):
        job = seen(training=False, model=name).job
        assert type(job.trainer.model).__name__ == kind
        assert job.plan.model == name
    with pytest.raises(UsageError, match="--small-stem is for"):
        seen(small_stem=True)
    for small, kernel in ((False, (7, 7)), (True, (3, 3))):
        job = seen(training=False, model="resnet18", small_stem=small).job
        assert type(job.trainer.model).__name__ == "ResNet"
        assert job.trainer.model.conv1.kernel_size == kernel


@of("init")
def first_weights(seen, comm):
    plain = seen(training=False)
    path = Path(plain.job.config.data).parent / "init.safetensors"
    other, _ = make_model(dataclasses.replace(plain.job.config, seed=5), plain.job.pack)
    other.bn2.running_mean.fill_(0.25)
    if comm.rank == 0:
        save_model(path, other, {})
    comm.Barrier()
    given = seen(training=False, init=str(path))
    state = given.job.trainer.model.state_dict()
    for name, value in other.state_dict().items():
        assert torch.equal(state[name], value)
    assert not torch.equal(given.weights[0], plain.weights[0])
    assert given.job.init.fresh == given.job.init.adapted == {}


@of("batch_norm")
def batch_norm(seen, comm):
    modes = ("exact", "running", "average")
    runs = {mode: seen(batch_norm=mode) for mode in modes}
    variances = {}
    for mode, run in runs.items():
        assert run.job.trainer.norms.mode == run.job.plan.batch_norm == mode
        variances[mode] = run.job.trainer.model.bn1.running_var.clone()
        assert torch.equal(run.weights[-1], runs["exact"].weights[-1])  # statistics alone differ
    for a in modes:
        for b in modes:
            if a != b:
                assert not torch.allclose(variances[a], variances[b], rtol=1e-5)
    own = comm.allgather({mode: v.numpy().tobytes() for mode, v in variances.items()})
    for mode in modes:
        assert len({values[mode] for values in own}) == 1


@of("epochs", "batch_size", "batch_per_rank")
def lengths(seen, comm):
    assert [s["rows"] for s in seen().steps] == [16, 16, 16, 5]
    assert [s["rows"] for s in seen(epochs=2, batch_size=30).steps] == [30, 23, 30, 23]
    per_rank = seen(batch_size=None, batch_per_rank=12)
    assert per_rank.steps[0]["rows"] == min(12 * 4, ROWS)  # of 4 shards


@of("shards")
def shards(seen, comm):
    for count in (4, 7):
        run = seen(shards=count)
        shards_of_ranks = comm.allgather([[b.shard for b in step] for step in run.batches])
        for step in range(STEPS - 1):
            assert [j for steps in shards_of_ranks for j in steps[step]] == list(range(count))
        assert [s["rows"] for s in run.steps] == [16, 16, 16, 5]  # one update for all shards


@of("seed")
def seed(seen, comm):
    zero, again, one = seen(), seen(), seen(seed=1)
    assert torch.equal(zero.weights[-1], again.weights[-1])
    assert not torch.equal(zero.weights[0], one.weights[0])
    assert not torch.equal(zero.images, one.images)
    order = [sorted(image.flatten().tolist() for image in run.images) for run in (zero, one)]
    assert order[0] == order[1]  # the same rows in another order
    assert zero.batches[0][0].key == again.batches[0][0].key != one.batches[0][0].key


@of("optimizer")
def optimizer(seen, comm):
    sgdm, adam, adamw = (seen(optimizer=name) for name in ("sgdm", "adam", "adamw"))
    kinds = [type(run.job.trainer.optimizer).__name__ for run in (sgdm, adam, adamw)]
    assert kinds == ["SGD", "Adam", "AdamW"]
    gradient = sgdm.update(1) / -LR
    large = gradient.abs() > 1e-4
    assert large.sum() > 1000
    for run in (adam, adamw):  # the first step of Adam is the sign of the gradient
        torch.testing.assert_close(
            run.update(1)[large], -LR * gradient[large].sign(), rtol=1e-3, atol=1e-5
        )


@of("lr")
def rate(seen, comm):
    low, high = seen(), seen(lr=4 * LR)
    assert low.rates == [LR] * STEPS
    assert high.rates == [4 * LR] * STEPS
    torch.testing.assert_close(high.update(1), 4 * low.update(1), rtol=1e-4, atol=1e-6)
    assert seen(lr=None).rates == [0.01] * STEPS
    assert seen(lr=None, optimizer="adam").rates == [0.001] * STEPS


@of("momentum")
def momentum(seen, comm):
    without, heavy = seen(), seen(momentum=0.5)
    assert torch.equal(without.update(1), heavy.update(1))
    carried = heavy.update(2) - without.update(2)
    assert carried.norm() > 1e-3
    torch.testing.assert_close(carried, 0.5 * without.update(1), rtol=1e-4, atol=1e-6)


@of("weight_decay")
def weight_decay(seen, comm):
    for name, decoupled in (("sgdm", True), ("adamw", True), ("adam", False)):
        plain, decayed = seen(optimizer=name), seen(optimizer=name, weight_decay=0.5)
        start = plain.weights[0]
        assert torch.equal(start, decayed.weights[0])
        difference = decayed.update(1) - plain.update(1)
        assert difference.norm() > 1e-3
        assert torch.allclose(difference, -LR * 0.5 * start, rtol=1e-3, atol=1e-5) == decoupled


@of("scale_lr", "warmup_epochs")
def growing_rate(seen, comm):
    scaled = seen(scale_lr="sqrt", batch_per_rank=4, batch_size=None, warmup_epochs=0.0)
    assert scaled.rates == pytest.approx([LR * 2] * len(scaled.rates))  # four shards
    rates = seen(epochs=2, warmup_epochs=1.0).rates
    assert rates[:5] == pytest.approx([LR * share for share in (0.1, 0.325, 0.55, 0.775, 1.0)])
    assert rates[4:] == [LR] * 4


@of("schedule", "step_epochs")
def schedule(seen, comm):
    assert seen(epochs=2).rates == [LR] * 8
    cosine = [LR * (1 + math.cos(math.pi * t / 8)) / 2 for t in range(8)]
    assert seen(epochs=2, schedule="cosine").rates == pytest.approx(cosine)
    assert seen(epochs=2, schedule="step").rates == [LR] * 8  # 30 epochs a step
    steps = seen(epochs=3, schedule="step", step_epochs=1)
    assert steps.rates == pytest.approx([LR] * 4 + [LR / 10] * 4 + [LR / 100] * 4)
    dropped = seen(epochs=3, schedule="step", step_epochs=2)
    assert dropped.rates == pytest.approx([LR] * 8 + [LR / 10] * 4)
    # The optimizer takes the rate that is recorded: same weights, a tenth of the fifth update.
    constant = seen(epochs=3)
    assert torch.equal(steps.weights[4], constant.weights[4])
    torch.testing.assert_close(steps.update(5), constant.update(5) / 10, rtol=1e-3, atol=1e-7)


@of("clip_norm")
def clip_norm(seen, comm):
    free, clipped, loose = seen(), seen(clip_norm=0.01), seen(clip_norm=1e6)
    assert free.update(1).norm() > 2 * LR * 0.01
    for step in range(1, STEPS + 1):
        assert clipped.update(step).norm() == pytest.approx(LR * 0.01, rel=1e-3)
    direction = free.update(1) / free.update(1).norm()
    torch.testing.assert_close(clipped.update(1), direction * LR * 0.01, rtol=1e-3, atol=1e-7)
    assert torch.equal(free.weights[-1], loose.weights[-1])


@of("label_smoothing")
def label_smoothing(seen, comm):
    none, some, more = (seen(label_smoothing=s) for s in (0.0, 0.2, 0.4))
    assert abs(some.loss - none.loss) > 1e-3
    assert more.loss - none.loss == pytest.approx(2 * (some.loss - none.loss), rel=1e-3)
    assert none.steps[0]["accuracy"] == more.steps[0]["accuracy"]
    assert not torch.equal(none.update(1), some.update(1))


@of("class_weights")
def class_weights(seen, comm):
    weights = [0.5, 2.0, 1.0, 1.0, 4.0]
    alike, weighed = seen(), seen(class_weights="0.5,2,1,1,4")
    source = alike.job.reading.source
    counts = np.bincount(source.labels, minlength=CLASSES)
    balanced = seen(training=False, class_weights="balanced").job.plan.class_weights
    assert balanced == pytest.approx(ROWS / (CLASSES * counts))
    assert (alike.job.plan.class_weights, weighed.job.plan.class_weights) == ((), tuple(weights))
    lines = "\n".join(describe_plan(weighed.job.plan))
    assert "class weights  0.5, 2, 1, 1, 4" in lines
    assert "class weights" not in "\n".join(describe_plan(alike.job.plan))
    assert alike.job.plan.digest() != weighed.job.plan.digest()
    message = weighed.job.trainer.message
    last = [np.take(weights, batch.targets).sum() for batch in weighed.batches[-1]]
    assert message.totals().weight == pytest.approx(comm.allreduce(sum(last)))
    assert alike.job.trainer.message.totals().weight == 0
    assert len(message.tensor) == len(alike.job.trainer.message.tensor)
    assert not torch.allclose(alike.update(1), weighed.update(1), rtol=1e-2)
    equal = seen(class_weights="3,3,3,3,3")  # a common factor cancels
    torch.testing.assert_close(equal.update(1), alike.update(1), rtol=1e-4, atol=1e-6)
    assert equal.loss == pytest.approx(alike.loss, rel=1e-5)


@of("precision")
def precision(seen, comm):
    usual, full, rounded, half = (
        seen(precision=name) for name in ("default", "fp32", "tf32", "bf16")
    )
    assert usual.loss == full.loss and usual.job.plan == full.job.plan  # on a CPU
    assert rounded.loss == pytest.approx(full.loss, rel=1e-3)  # on a CPU mostly the same
    assert full.loss != half.loss
    assert half.loss == pytest.approx(full.loss, rel=0.05)
    assert full.weights[0].dtype == half.weights[-1].dtype == torch.float32


@of("channels_last")
def memory_format(seen, comm):
    for flag, memory in ((True, torch.channels_last), (False, torch.contiguous_format)):
        run = seen(channels_last=flag)
        weight = run.job.trainer.model.conv2.weight
        image = run.batches[0][0].images
        prepared = run.job.prepare(torch.zeros(2, *SHAPE, dtype=torch.uint8), 0)
        message = run.job.trainer.message
        own = next(s for s in message.layout.segments if s.name == "conv2.weight")
        for tensor in (weight, own.of(message.gradients), image, prepared):
            assert tensor.is_contiguous(memory_format=memory)
            assert tensor.is_contiguous() == (not flag)


@of("threads")
def threads(seen, comm):
    try:
        for count in (2, 1):
            plan = seen(training=False, threads=count).job.plan
            assert plan.threads == torch.get_num_threads() == count
    finally:
        torch.set_num_threads(1)


@of("device")
def device(seen, comm):
    job = seen(training=False, device="cpu").job
    assert job.plan.device == job.trainer.message.device.type == "cpu"
    if not torch.cuda.is_available():
        with pytest.raises(UsageError, match="--device cuda, but torch .* sees no GPU"):
            seen(training=False, device="cuda")


@pytest.mark.parametrize("check", dict.fromkeys(FLAGS.values()), ids=lambda check: check.__name__)
def test_each_flag_does_what_it_says(seen, comm, check):
    check(seen, comm)


def test_every_flag_is_tested():
    fields = {field.name for field in dataclasses.fields(Config)}
    assert FLAGS.keys() | ELSEWHERE.keys() == fields
    assert not FLAGS.keys() & ELSEWHERE.keys()


@pytest.mark.parametrize(
    ("every", "expected"),
    [("0", [3]), ("1epoch", [1, 2, 3]), ("2epochs", [2, 3]), ("3epochs", [3])],
)
def test_validate_every(comm, settings, every, expected):
    loop.train(dataclasses.replace(settings, epochs=3, validate_every=every), comm)
    if comm.rank == 0:
        records = list(read_records(Path(settings.runs_dir) / "a"))
        found = [r["epoch"] for r in records if r.get("split") == "validation"]
        assert found == expected
        assert [r["epoch"] for r in records if r.get("split") == "test"] == [3]


@pytest.mark.parametrize("wanted", [False, True])
def test_tensorboard(comm, settings, wanted):
    pytest.importorskip("tensorboard")
    loop.train(dataclasses.replace(settings, tensorboard=wanted), comm)
    if comm.rank == 0:
        assert bool(list((Path(settings.runs_dir) / "a").rglob("*tfevents*"))) == wanted


def test_a_dry_run_prints_the_plan_and_leaves_nothing(comm, settings, capsys):
    assert loop.train(dataclasses.replace(settings, dry_run=True), comm) == 0
    printed = capsys.readouterr().out
    if comm.rank == 0:
        assert "shards         4, partitions of " in printed
        assert "steps          1 epoch x 4 = 4; last step of an epoch 5 images" in printed
    else:
        assert printed == ""
    comm.Barrier()
    assert not Path(settings.runs_dir).exists()


def statistics(images: np.ndarray, plan: Plan, within_shards: bool) -> tuple:
    """Running mean and variance, (C,) each, after an epoch over `images` (N, H, W, C) uint8.

    Each step takes all rows of a mini-batch as one. `within_shards` takes the mean of the
    variances of its shards instead.
    """
    values = images.astype(np.float64) / 255
    mean, variance = np.zeros(images.shape[3]), np.ones(images.shape[3])
    orders = [order_of(plan.partition, plan.seed, 0, j) for j in range(plan.shards)]
    for step in range(plan.steps_per_epoch):
        parts = [values[orders[j][places(plan.partition, step, j)]] for j in range(plan.shards)]
        union = np.concatenate(parts)
        new = union.var((0, 1, 2), ddof=1)
        if within_shards:
            filled = [part for part in parts if len(part)]
            shares = [len(part) / len(union) for part in filled]
            new = sum(s * p.var((0, 1, 2), ddof=1) for s, p in zip(shares, filled, strict=True))
        mean = 0.9 * mean + 0.1 * union.mean((0, 1, 2))
        variance = 0.9 * variance + 0.1 * new
    return mean, variance


def test_saved_batch_norm_statistics_are_those_of_whole_mini_batches(comm, settings):
    rng = np.random.default_rng(2)
    light = rng.integers(0, 200, (ROWS, 1, 1, 3))  # makes shards differ
    images = (light + rng.integers(0, 56, (ROWS, *SHAPE))).astype(np.uint8)
    path = Path(settings.runs_dir).parent / "light.h5"
    if comm.rank == 0:
        splits = {"train": (images, rng.integers(0, 3, ROWS)), "test": (images[:3], np.arange(3))}
        write_pack(path, splits, ("a", "b", "c"), {"source": "test"})
    comm.Barrier()
    config = dataclasses.replace(settings, data=str(path), model="tests.support.nets:norm_first")
    plan = set_up(config, comm).plan
    assert plan.shards == 4
    loop.train(config, comm)
    if comm.rank == 0:
        tensors, _ = read_model(Path(settings.runs_dir) / "a" / "model.safetensors")
        mean, variance = statistics(images, plan, within_shards=False)
        np.testing.assert_allclose(tensors["0.running_mean"].numpy(), mean, rtol=2e-6)
        np.testing.assert_allclose(tensors["0.running_var"].numpy(), variance, rtol=2e-6)
        _, within = statistics(images, plan, within_shards=True)
        assert not np.allclose(within, variance, rtol=1e-3)
