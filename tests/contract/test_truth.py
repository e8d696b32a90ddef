"""Training on any number of ranks is plain torch on the global batch, to 1e-12 in float64.

`plain_torch` is what a user of torch alone writes: one process, one model, one backward per global
batch. Only batch norm knows of shards: it normalises each by itself, and its running statistics are
those of all of them. hpctrain is told how to train by its settings, or as in the README by a loop
over its public parts.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from torch.nn import functional as F
from torch.optim import lr_scheduler

import hpctrain as hp

pytestmark = pytest.mark.ranks
MODEL = "tests.contract.test_truth:network"
SHAPE, CLASSES = (6, 5, 2), 3
ROWS, BATCH, SHARDS, EPOCHS = 53, 17, 5, 2  # unequal shards; a last batch of 2 for 5 shards
STEPS = 4 * EPOCHS
WEIGHTS = (0.2, 1.0, 7.5)  # of the classes


class Network(nn.Module):
    """Two batch norms of different momentum, and layers for some images and for none."""

    def __init__(self, channels: int, classes: int) -> None:
        super().__init__()
        self.stem, self.bn = nn.Conv2d(channels, 6, 3, bias=False), nn.BatchNorm2d(6)
        self.middle, self.norm = nn.Conv2d(6, 6, 3, padding=1), nn.GroupNorm(2, 6)
        self.rare, self.never = nn.Linear(6, 6), nn.Linear(6, 6)
        self.last, self.head = nn.BatchNorm2d(6, momentum=0.3), nn.Linear(6, classes)

    def forward(self, x):
        first = x[:, 0, 0, 0] * 255 < 9  # (n,)
        x = torch.tanh(self.bn(self.stem(x)))
        x = x + torch.tanh(self.norm(self.middle(x)))
        x = torch.relu(self.last(x)).mean((2, 3))
        if first.any():  # among these images
            x = x + first[:, None] * self.rare(x)
        return self.head(x)


def network(image_shape, classes):
    with torch.random.fork_rng():
        torch.manual_seed(5)
        return Network(image_shape[2], classes).double()


def arrays(seed: int, rows: int) -> tuple[np.ndarray, np.ndarray]:
    """Images whose first value is their number, and labels."""
    rng = np.random.default_rng(seed)
    images = rng.integers(0, 256, (rows, *SHAPE), dtype=np.uint8)
    images[:, 0, 0, 0] = np.arange(rows)
    return images, rng.integers(0, CLASSES, rows)


IMAGES, LABELS = arrays(1, ROWS)
TEST = arrays(2, 19)


def as_input(images: np.ndarray) -> torch.Tensor:
    return torch.from_numpy(images).permute(0, 3, 1, 2).double() / 255


def undecayed(name: str) -> bool:
    return name.endswith("bias") or name.startswith(("bn.", "norm.", "last."))


@dataclass(frozen=True)
class Case:
    """Settings of hpctrain, and the same for plain torch."""

    settings: dict[str, Any]
    optimizer: Any = lambda groups: torch.optim.SGD(groups, 0.1, momentum=0.9)
    schedule: Any = None  # of the optimizer: a scheduler of torch
    factor: Any = lambda name: 1.0
    decay: Any = lambda name: 0.0
    frozen: tuple[str, ...] = ()
    loss: Any = F.cross_entropy
    clip: float = float("inf")
    average: float = 0.0
    first: Any = None  # weights
    norms: str = "exact"


def adam(groups):
    return torch.optim.Adam(groups, 0.1)


def adamw(groups):
    return torch.optim.AdamW(groups, 0.1)


def weighted(scores, labels, smoothing=0.0):
    weights = torch.tensor(WEIGHTS, dtype=torch.float64)
    return F.cross_entropy(scores, labels, weights, label_smoothing=smoothing)


def summed(scores, labels):
    weights = torch.tensor([0.2, 1, 0.5], dtype=torch.float64)
    return F.cross_entropy(scores, labels, weights, reduction="sum", label_smoothing=0.1)


def other_weights() -> dict[str, torch.Tensor]:
    """Weights of a network for other classes, trained elsewhere."""
    with torch.random.fork_rng():
        torch.manual_seed(6)
        return Network(SHAPE[2], 11).double().state_dict()


CASES = {
    "momentum": Case({}),
    "clipped, smoothed": Case(
        {"momentum": 0.0, "clip_norm": 0.3, "label_smoothing": 0.1},
        lambda groups: torch.optim.SGD(groups, 0.1),
        loss=lambda *pair: F.cross_entropy(*pair, label_smoothing=0.1),
        clip=0.3,
    ),
    "adam": Case({"optimizer": "adam", "weight_decay": 0.1}, adam, decay=lambda name: 0.1),
    "groups": Case(
        {
            "optimizer": "adamw",
            "weight_decay": 0.3,
            "no_decay": "norm,bias",
            "lr_factors": "*=0.5,middle=0.25,head.bias=2",
            "overlap": 3,
        },
        adamw,
        factor=lambda n: 2 if n == "head.bias" else 0.25 if n.startswith("middle") else 0.5,
        decay=lambda n: 0.0 if undecayed(n) else 0.3,
    ),
    "class weights": Case(
        {"class_weights": list(WEIGHTS), "clip_norm": 0.3, "label_smoothing": 0.1},
        loss=lambda *pair: weighted(*pair, smoothing=0.1),
        clip=0.3,
    ),
    "fine-tuning": Case(
        {"init": "other.pth", "freeze": "stem,bn,middle.bias", "lr_factors": "head=2"},
        factor=lambda n: 2 if n.startswith("head") else 1,
        frozen=("stem.", "bn.", "middle.bias"),
        first=other_weights,
    ),
    "average": Case(
        {"optimizer": "adamw", "ema": 0.8, "final": "ema", "freeze": "bn"},
        adamw,
        decay=lambda name: 0.0,
        frozen=("bn.",),
        average=0.8,
    ),
    "a loss of torch.nn": Case(
        {"loss": "torch:CrossEntropyLoss(label_smoothing=0.1, weight=[0.2, 1, 0.5])"},
        loss=lambda *pair: summed(*pair) / len(pair[1]),
    ),
    "running": Case({"batch_norm": "running"}, norms="running"),
    "average of statistics": Case({"batch_norm": "average"}, norms="average"),
}
#: A new version may choose other rates, and says so.
SCHEDULES = {
    "warm-up": Case(
        {"warmup_epochs": 1.0},
        schedule=lambda o: lr_scheduler.LinearLR(o, 0.1, 1.0, STEPS // EPOCHS),
    ),
    "cosine": Case(
        {"schedule": "cosine", "min_lr": 0.02},
        schedule=lambda o: lr_scheduler.CosineAnnealingLR(o, STEPS - 1, 0.02),
    ),
    "warm-up, cosine": Case(
        {"schedule": "cosine", "min_lr": 0.02, "warmup_epochs": 1.0},
        schedule=lambda o: lr_scheduler.SequentialLR(
            o,
            [
                lr_scheduler.LinearLR(o, 0.1, 1.0, STEPS // EPOCHS),
                lr_scheduler.CosineAnnealingLR(o, STEPS - STEPS // EPOCHS - 1, 0.02),
            ],
            [STEPS // EPOCHS],
        ),
    ),
    "step": Case(
        {"schedule": "step", "step_epochs": 1},
        schedule=lambda o: lr_scheduler.StepLR(o, STEPS // EPOCHS, 0.1),
    ),
    "one cycle": Case(
        {"schedule": "one-cycle"},
        schedule=lambda o: lr_scheduler.OneCycleLR(o, 0.1, STEPS, cycle_momentum=False),
    ),
}


def plain_torch(
    case: Case, steps: list[list[list[int]]], targets: np.ndarray = LABELS
) -> tuple[dict, list[float]]:
    """Train on `steps`, of the rows of each shard: the weights, and the loss of each step.

    It is NaN, and nothing changes, where no entry of the `targets` (N, ...) is known.
    """
    model, losses = network(SHAPE, CLASSES), []
    if case.first:
        model.load_state_dict({n: t for n, t in case.first().items() if "head" not in n}, False)
    groups, norms = [], {}
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(not name.startswith(case.frozen))
        options = {"lr": 0.1 * case.factor(name), "weight_decay": case.decay(name)}
        groups += [{"params": [parameter], **options}] * parameter.requires_grad
        parameter.grad = torch.zeros_like(parameter)  # where no gradient arrives it is zero
    for name, layer in model.named_modules():
        if isinstance(layer, nn.BatchNorm2d):
            layer.train(not f"{name}.".startswith(case.frozen))
            norms[layer] = layer.momentum, []
            layer.momentum = 0.0  # statistics of all shards: below
            layer.register_forward_pre_hook(lambda layer, x: norms[layer][1].append(x[0].detach()))
    optimizer = case.optimizer(groups)
    scheduler = case.schedule and case.schedule(optimizer)
    average = {name: value.clone() for name, value in model.state_dict().items()}
    for shards in steps:
        optimizer.zero_grad(set_to_none=False)
        scores = torch.cat([model(as_input(IMAGES[rows])) for rows in shards])
        loss = case.loss(scores, torch.from_numpy(targets[np.concatenate(shards)]))
        losses.append(loss.item())
        if loss.isnan():
            for _, inputs in norms.values():
                inputs.clear()
            continue
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), case.clip)
        optimizer.step()
        if scheduler:
            scheduler.step()
        for layer, (momentum, inputs) in norms.items():
            if layer.training:
                update_statistics(layer, momentum, inputs, case.norms)
            inputs.clear()
        for name, value in model.state_dict().items():
            average[name] = case.average * average[name] + (1 - case.average) * value
    return average, losses


def update_statistics(layer: nn.BatchNorm2d, phi: float, shards: list, mode: str) -> None:
    """The running statistics after a step whose shards had these inputs."""
    own = layer.running_mean, layer.running_var
    if mode == "exact":
        found = statistics(torch.cat(shards))
        moved = (torch.lerp(*pair, phi) for pair in zip(own, found, strict=True))
        layer.running_mean, layer.running_var = moved
        return
    # every shard has updated its own, which are then pooled
    share = torch.tensor([len(x) for x in shards]).double()[:, None] / sum(map(len, shards))
    each = [
        [torch.lerp(*pair, phi) for pair in zip(own, statistics(x), strict=True)] for x in shards
    ]
    means, variances = (torch.stack(values) for values in zip(*each, strict=True))
    layer.running_mean = (share * means).sum(0)
    between = (share * (means - layer.running_mean) ** 2).sum(0) if mode == "running" else 0.0
    layer.running_var = (share * variances).sum(0) + between


def statistics(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return x.mean((0, 2, 3)), x.var((0, 2, 3), unbiased=True)


@pytest.fixture
def data(tmp_path):
    """A pack, and the file of the weights of a network for other classes."""
    splits = {"train": (IMAGES, LABELS), "validation": TEST, "test": TEST}
    hp.write_pack(tmp_path / "pack.h5", splits, ["a", "b", "c"])
    torch.save(other_weights(), tmp_path / "other.pth")
    return tmp_path


def rows_of_steps(data: Path) -> list[list[list[int]]]:
    """The rows of each step and shard, in the order of the training; every row once per epoch."""
    with hp.Split(hp.read_pack(data / "pack.h5"), "train") as split:
        partition = hp.cut_epoch(ROWS, BATCH, SHARDS)
        loader = hp.Loader(split, hp.Order(partition), range(SHARDS), epochs=EPOCHS)
        epochs = [
            [
                [(batch.images[:, 0, 0, 0] * 255).round().int().tolist() for batch in step]
                for step in loader.epoch(epoch)
            ]
            for epoch in range(EPOCHS)
        ]
        loader.close()
    for steps in epochs:
        assert [sum(map(len, shards)) for shards in steps] == [17, 17, 17, 2]
        assert sorted(row for step in steps for rows in step for row in rows) == [*range(ROWS)]
    return [step for steps in epochs for step in steps]


def difference(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> float:
    """The largest one of any weight or running statistic."""
    assert found.keys() == expected.keys()
    names = [name for name in expected if found[name].is_floating_point()]
    return max((found[name] - expected[name]).abs().max().item() for name in names)


@pytest.mark.parametrize("name", [*CASES, *SCHEDULES])
def test_a_run_learns_what_plain_torch_learns_on_the_global_batch(comm, data, name):
    case = (CASES | SCHEDULES)[name]
    settings = dict(case.settings)
    if "init" in settings:
        settings["init"] = str(data / settings["init"])
    how = {"shards": SHARDS, "batch_size": BATCH, "epochs": EPOCHS, "lr": 0.1, "threads": 1}
    files = {"data": str(data / "pack.h5"), "runs_dir": str(data), "run": "a"}
    result = hp.train(model=MODEL, **files, **({**how, **settings}), progress="none")
    steps = rows_of_steps(data)
    expected, losses = plain_torch(case, steps)
    found = load_file(Path(result.folder) / "model.safetensors")
    assert difference(found, expected) < 1e-12
    updates = {int(n) for name, n in found.items() if name.endswith("num_batches_tracked")}
    assert updates <= {STEPS, 0} and found["last.num_batches_tracked"] == STEPS
    if comm.rank == 0:
        check_figures(result, case, steps, expected, losses)
    others = [CASES["momentum"], CASES["adam"]]
    assert all(difference(found, plain_torch(c, steps)[0]) > 1e-4 for c in others if c != case)


def check_figures(result, case: Case, steps: list, expected: dict, losses: list[float]) -> None:
    """The recorded loss of each epoch, and the loss of the test images, without smoothing."""
    labels = [LABELS[np.concatenate(shards)] for shards in steps]
    weights = np.array(WEIGHTS if "class_weights" in case.settings else (1, 1, 1))
    parts = [weights[each].sum() for each in labels]
    by_epoch = np.average(np.reshape(losses, (EPOCHS, -1)), 1, np.reshape(parts, (EPOCHS, -1)))
    record = hp.history(result.folder)
    np.testing.assert_allclose(record.epochs["loss"], by_epoch, rtol=1e-12)
    model = network(SHAPE, CLASSES).eval()
    model.load_state_dict(expected)
    with torch.no_grad():
        scores, answers = model(as_input(TEST[0])), torch.from_numpy(TEST[1])
    unsmoothed = weighted if weights[0] < 1 else F.cross_entropy
    loss = (case.loss if "loss" in case.settings else unsmoothed)(scores, answers).item()
    assert result.figures["test_loss"] == pytest.approx(loss, rel=1e-12)
    correct = (scores.argmax(1) == answers).double().mean().item()
    assert result.figures["test_accuracy"] == pytest.approx(correct)


# Targets of several entries, of which some are unknown

SCALES = np.float32([1, 50, 0.25]), np.float32([0, 100, -3])  # of values: deviation and mean
SMOOTHED = {"task": "multilabel", "label_smoothing": 0.2, "overlap": 3}
ENTRIES = {
    "classes": Case({"task": "multilabel", "optimizer": "sgdm", "patience": 0}),
    "classes, weighted": Case(
        {"task": "multilabel", "class_weights": list(WEIGHTS), "clip_norm": 0.05, "patience": 0},
        adam,
        clip=0.05,
    ),
    "classes, smoothed": Case({**SMOOTHED, "weight_decay": 0.1}, adam, decay=lambda name: 0.1),
    "values": Case({"task": "regress", "optimizer": "sgdm", "clip_norm": 0.2}, clip=0.2),
    "values, average": Case(
        {"task": "regress", "optimizer": "adamw", "ema": 0.8, "final": "ema"},
        adamw,
        average=0.8,
    ),
    "classes, a loss of torch.nn": Case(
        {
            "task": "multilabel",
            "loss": f"torch:BCEWithLogitsLoss(pos_weight={list(WEIGHTS)})",
            "patience": 0,
        },
        adam,
    ),
    "values, a loss of torch.nn": Case(
        {"task": "regress", "loss": "torch:HuberLoss(delta=0.5)", "clip_norm": 0.2}, adam, clip=0.2
    ),
    "values as they are": Case({"task": "regress", "target_scale": "none"}, adam),
}


def entries(task: str, rows: int, unknown: list[int]) -> np.ndarray:
    """Targets (rows, 3) as they are stored; of the `unknown` rows, nothing is known."""
    rng = np.random.default_rng(rows)
    is_unknown = rng.random((rows, CLASSES)) < 0.4
    is_unknown[unknown] = True
    if task == "multilabel":
        targets = rng.integers(0, 2, (rows, CLASSES), dtype=np.uint8)
        targets[is_unknown] = 255
        return targets
    deviation, mean = SCALES
    values = (rng.normal(size=(rows, CLASSES)) * deviation + mean).astype(np.float32)
    values[is_unknown] = np.nan
    return values


def mean_over_known(case: Case, train: np.ndarray) -> Any:
    """The loss of a case, as a user of torch writes it: a mean over known entries."""
    task = case.settings["task"]
    values = train.astype(float)  # else nanstd rounds to float32
    mean, deviation = np.nanmean(values, 0), np.nanstd(values, 0)
    if case.settings.get("target_scale") == "none":
        mean, deviation = np.zeros(CLASSES), np.ones(CLASSES)

    of_training = case.settings.get("label_smoothing", 0.0)

    def loss(outputs, targets, smoothing=of_training):
        if task == "regress":
            known = ~targets.isnan()
            scaled = (targets.double() - torch.from_numpy(mean)) / torch.from_numpy(deviation)
            if "loss" in case.settings:
                return F.huber_loss(outputs[known], scaled[known], delta=0.5)
            return F.mse_loss(outputs[known], scaled[known])
        known = targets != 255
        usual = WEIGHTS if "loss" in case.settings else [1] * CLASSES
        weights = np.float64(case.settings.get("class_weights", usual))
        smoothed = targets.double() * (1 - smoothing) + smoothing / 2
        weights = torch.from_numpy(weights).expand(outputs.shape)[known]
        pair = outputs[known], smoothed[known]
        return F.binary_cross_entropy_with_logits(*pair, pos_weight=weights)

    return loss


@pytest.mark.parametrize("name", ENTRIES)
def test_a_loss_is_a_mean_over_the_known_entries_of_the_global_batch(comm, data, name):
    """The second step has no known entry, and changes nothing; in the first, a shard has none."""
    case = ENTRIES[name]
    steps = rows_of_steps(data)
    unknown = [*np.concatenate(steps[1]), *steps[0][2]]
    targets = entries(case.settings["task"], ROWS, unknown)
    tested = entries(case.settings["task"], len(TEST[0]), [0, 5])
    kind = {"columns" if case.settings["task"] == "regress" else "classes": ["a", "b", "c"]}
    others = TEST[0], tested
    splits = {"train": (IMAGES, targets), "validation": others, "test": others}
    if comm.rank == 0:
        hp.write_pack(data / "entries.h5", splits, **kind)
    comm.Barrier()
    how = {"shards": SHARDS, "batch_size": BATCH, "epochs": EPOCHS, "lr": 0.1, "threads": 1}
    files = {"data": str(data / "entries.h5"), "runs_dir": str(data), "run": name}
    result = hp.train(model=MODEL, **files, **how, **case.settings, progress="none")
    loss = mean_over_known(case, targets)
    expected, losses = plain_torch(replace(case, loss=loss), steps, targets)
    assert [step for step, value in enumerate(losses) if np.isnan(value)] == [1]
    found = load_file(Path(result.folder) / "model.safetensors")
    assert difference(found, expected) < 1e-12
    assert found["last.num_batches_tracked"] == STEPS - 1
    if comm.rank == 0:
        known = [(targets[np.concatenate(shards)] < 254).sum() for shards in steps]
        if case.settings["task"] == "regress":
            known = [(~np.isnan(targets[np.concatenate(shards)])).sum() for shards in steps]
        shape = EPOCHS, -1
        by_epoch = np.average(np.reshape(np.nan_to_num(losses), shape), 1, np.reshape(known, shape))
        record = hp.history(result.folder)
        np.testing.assert_allclose(record.epochs["loss"], by_epoch, rtol=1e-12)
        model = network(SHAPE, CLASSES).eval()
        model.load_state_dict(expected)
        with torch.no_grad():
            of_test = loss(model(as_input(TEST[0])), torch.from_numpy(tested), smoothing=0.0)
        assert result.figures["test_loss"] == pytest.approx(of_test.item(), rel=1e-12)


def nesterov(groups):
    return torch.optim.SGD(groups, 0.1, momentum=0.9, nesterov=True)


def own_loop(comm, data: Path) -> dict[str, torch.Tensor]:
    """The loop of the README in float64; the network's tensors at the end."""
    pack = hp.read_pack(data / "pack.h5")
    split, pipeline = hp.Split(pack, "train"), hp.Pipeline(dtype=torch.float64)
    model = hp.build(MODEL, pack.image_shape, len(pack.classes))
    norms = hp.BatchNorms(model, "exact")
    first = hp.read_samples(split, range(32), pipeline)
    norms.start(norms.probe(lambda: model(first), 32))
    message = hp.Message(model, norms.channels, comm.rank, comm.size)
    allreduce = hp.choose_reduce(comm, message)
    optimizer = nesterov([message.weights])
    partition = hp.cut_epoch(len(split), BATCH, SHARDS)
    mine = np.array_split(range(SHARDS), comm.size)[comm.rank].tolist()
    loader = hp.Loader(split, hp.Order(partition), mine, pipeline, epochs=EPOCHS)
    for epoch in range(EPOCHS):
        for step, batches in enumerate(loader.epoch(epoch)):
            total = partition.total(step)
            message.zero()
            for batch in batches:
                rows = len(batch.targets)
                loss = F.cross_entropy(model(batch.images), batch.targets, reduction="sum") / total
                loss.backward()
                message.add_gradients()
                norms.collect(message.moments, rows, total)
                message.add_sums(rows, loss=loss * total)
            allreduce()
            norms.merge(message.moments, total, message.finite())
            optimizer.step()
            assert message.totals().rows == total
    loader.close()
    split.close()
    return {name: value.clone() for name, value in model.state_dict().items()}


def test_a_loop_of_the_public_parts_learns_what_plain_torch_learns(comm, data):
    expected, _ = plain_torch(Case({}, nesterov), rows_of_steps(data))
    assert difference(own_loop(comm, data), expected) < 1e-12
