"""Each setting of a run does what it says: the whole way from the setting to what is computed."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import json
import re
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

import hpctrain as hp
from tests.support.launch import ROOT
from tests.support.short import images as make_images
from tests.support.short import records

pytestmark = pytest.mark.ranks(3)
ROWS, SHAPE, CLASSES, BATCH = 53, (12, 11, 3), 5, 16
STEPS = 4  # of an epoch: 16, 16, 16 and 5 rows
LR = 0.05
SETTINGS = {}  # name of a setting -> its check
#: Settings whose checks are in other files.
ELSEWHERE = """
    augment balanced_sampling batch_norm best_by cache_dir checkpoint_every class_weights clip_norm
    comm_dtype compile cuda_graphs data deterministic ema final freeze group hang_timeout images
    keep_checkpoints label_smoothing labels layout loss lr_factors max_value metric min_lr
    momentum no_decay optimizer overlap patience progress random_crop read_buffer reduce
    resume rotate90 run runs_dir schedule shuffle split stage step_epochs target_scale targets task
    tensorboard test threshold
    nodata split_seed time_limit validate_every verify weight_decay worker_load
"""
IMAGENET = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)  # mean, standard deviation


class Seen:
    """What happened in a run on this rank, as torch saw it, and what the run recorded."""

    def __init__(self):
        self.kind = ""  # class of the network
        self.weights = []  # before the first step, and after each
        self.parts = [[]]  # for each step, the images of each shard, (n, C, H, W)
        self.tested = []  # images of evaluations
        self.layers = []  # the convolutions
        self.threads = set()

    def forward(self, module, inputs):
        self.kind = self.kind or type(module).__name__
        if isinstance(module, nn.Conv2d) and inputs[0].shape[1] == SHAPE[2]:
            self.layers.append(module)
            if inputs[0].any():  # zeros only try the network
                (self.parts[-1] if module.training else self.tested).append(inputs[0].detach())
        self.threads.add(torch.get_num_threads())

    def before_step(self, optimizer, *_):
        if not self.weights:
            self.weights.append(weights_of(optimizer))

    def after_step(self, optimizer, *_):
        self.weights.append(weights_of(optimizer))
        self.parts.append([])

    def read(self, settings):
        self.folder = Path(settings["runs_dir"]) / settings["run"]
        self.records = records(settings)
        self.plan = json.loads((self.folder / "plan.json").read_text())
        steps = [record for record in self.records if record["kind"] == "step"]
        self.rates, self.rows = ([s[key] for s in steps] for key in ("learning_rate", "rows"))
        self.loss = steps[0]["loss"]
        self.parts.pop()
        second = self.parts[min(1, len(self.parts) - 1)]
        self.parts[0] = self.parts[0][-len(second) :]  # the network was tried before
        first_epoch = [part for step in self.parts[:STEPS] for part in step]
        self.images = torch.cat(first_epoch) if first_epoch else None  # of this rank


def weights_of(optimizer):
    groups = optimizer.param_groups
    return torch.cat([p.detach().flatten().clone() for g in groups for p in g["params"]])


def of(*settings):
    """Make a function the check of these settings."""

    def register(check):
        for setting in settings:
            SETTINGS[setting] = check
        return check

    return register


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    """Settings of one epoch."""
    folder = tmp_path_factory.mktemp("settings")
    splits = {name: make_images(n, SHAPE, CLASSES) for name, n in (("train", ROWS), ("test", 11))}
    splits["validation"] = make_images(7, SHAPE, CLASSES)
    hp.write_pack(folder / "pack.h5", splits, tuple("abcde"))
    how = {"model": "digits", "epochs": 1, "batch_size": BATCH, "shards": 4, "lr": LR}
    how |= {"momentum": 0.0, "validate_every": "0", "checkpoint_every": "0", "test": False}
    how |= {"device": "cpu", "threads": 1, "progress": "none"}
    return {"data": str(folder / "pack.h5"), "runs_dir": str(folder / "runs"), **how}


@pytest.fixture
def settings(base, tmp_path):
    """The same, with a folder for the runs of one test."""
    return base | {"runs_dir": str(tmp_path / "runs"), "run": "a"}


def runner(comm, settings):
    """A function that trains with these settings, all else being equal, and tells what it saw."""
    numbers = itertools.count()

    def run(**given):
        how, seen = settings | {"run": f"r{next(numbers)}"} | given, Seen()
        with contextlib.ExitStack() as stack:
            stack.enter_context(register_module_forward_pre_hook(seen.forward))
            stack.enter_context(register_optimizer_step_pre_hook(seen.before_step))
            stack.enter_context(register_optimizer_step_post_hook(seen.after_step))
            status = hp.train(**how).status
        comm.Barrier()
        if status == "done":  # and not planned
            seen.read(how)
        return seen

    return run


@of("flip", "flip_vertical", "shift")
def augmentation(seen, comm):
    plain, shifted = seen(), seen(shift=2)
    moved = 0
    for axis, setting in ((2, "flip"), (1, "flip_vertical")):
        mirrored = 0
        flipped = seen(**{setting: True})
        for before, after in zip(plain.images, flipped.images, strict=True):
            assert torch.equal(after, before) or torch.equal(after, before.flip(axis))
            mirrored += not torch.equal(after, before)
        assert 10 < comm.allreduce(mirrored) < ROWS - 10
    for before, after in zip(plain.images, shifted.images, strict=True):
        wide = nn.functional.pad(before, (2, 2, 2, 2))  # (C, H + 4, W + 4)
        cuts = [wide[:, y : y + 12, x : x + 11] for y in range(5) for x in range(5)]
        assert any(torch.equal(after, cut) for cut in cuts)
        moved += not torch.equal(after, before)
    assert 40 < comm.allreduce(moved) <= ROWS
    assert plain.loss != flipped.loss != shifted.loss != plain.loss


@of("normalize")
def normalization(seen, comm):
    unit, pack, imagenet = (seen(normalize=n, test=True) for n in ("unit", "pack", "imagenet"))
    everywhere = torch.cat(comm.allgather(unit.images)).double()
    assert len(everywhere) == ROWS and 0 <= everywhere.min() < 0.05 < 0.7 < everywhere.max() <= 1
    own = everywhere.mean((0, 2, 3)), everywhere.std((0, 2, 3), correction=0)
    for run, (mean, std) in ((pack, own), (imagenet, IMAGENET)):
        mean, std = (torch.as_tensor(x).float()[:, None, None] for x in (mean, std))
        torch.testing.assert_close(run.images, (unit.images - mean) / std, rtol=1e-4, atol=1e-4)
        for before, after in zip(unit.tested, run.tested, strict=True):
            torch.testing.assert_close(after, (before - mean) / std, rtol=1e-4, atol=1e-4)
        assert run.loss != unit.loss


@of("model", "small_stem")
def network(seen, comm):
    for name, kind in (("digits", "DigitsNet"), ("tests.support.nets:frozen", "Sequential")):
        run = seen(model=name)
        assert (run.kind, run.plan["model"]) == (kind, name)
    for small, kernel in ((False, (7, 7)), (True, (3, 3))):
        run = seen(model="resnet18", small_stem=small, dry_run=True)
        assert (run.kind, run.layers[0].kernel_size) == ("ResNet", kernel)


@of("init")
def first_weights(seen, comm):
    plain, other = seen(), seen(seed=5)
    given = seen(init=str(other.folder))
    assert torch.equal(given.weights[0], other.weights[-1])
    assert not torch.equal(given.weights[0], plain.weights[0])
    kept = seen(init=str(other.folder), freeze="conv*,bn*").folder
    frozen, before = (load_file(path / "model.safetensors") for path in (kept, other.folder))
    for name, value in before.items():
        assert torch.equal(frozen[name], value) == (not name.startswith("fc")), name


@of("epochs", "batch_size", "batch_per_rank", "shards")
def lengths(seen, comm):
    assert seen().rows == [16, 16, 16, 5]
    assert seen(epochs=2, batch_size=30).rows == [30, 23, 30, 23]
    assert seen(batch_size=None, batch_per_rank=12).rows[0] == 12 * 4  # of 4 shards
    for count in (4, 7):
        run = seen(shards=count)
        assert run.plan["shards"] == count
        assert all(comm.allreduce(len(parts)) == count for parts in run.parts[: STEPS - 1])
        assert run.rows == [16, 16, 16, 5]  # one update for all shards


@of("seed")
def seed(seen, comm):
    zero, again, one = seen(), seen(), seen(seed=1)
    assert torch.equal(zero.weights[-1], again.weights[-1])
    assert not torch.equal(zero.weights[0], one.weights[0])
    assert not torch.equal(zero.images, one.images)
    order = [sorted(image.flatten().tolist() for image in run.images) for run in (zero, one)]
    assert order[0] == order[1]  # the same rows in another order


@of("lr", "scale_lr", "warmup_epochs")
def rates(seen, comm):
    low, high = seen(), seen(lr=4 * LR)
    assert low.rates == [LR] * STEPS
    assert high.rates == [4 * LR] * STEPS
    updates = [run.weights[1] - run.weights[0] for run in (low, high)]
    torch.testing.assert_close(updates[1], 4 * updates[0], rtol=1e-4, atol=1e-6)
    assert seen(lr=None).rates == [0.01] * STEPS
    assert seen(lr=None, optimizer="adam").rates == [0.001] * STEPS
    scaled = seen(scale_lr="sqrt", batch_per_rank=4, batch_size=None, warmup_epochs=0.0)
    assert scaled.rates == pytest.approx([LR * 2] * len(scaled.rates))  # four shards
    rates = seen(epochs=2, warmup_epochs=1.0).rates
    assert rates[:5] == pytest.approx([LR * share for share in (0.1, 0.325, 0.55, 0.775, 1.0)])
    assert rates[4:] == [LR] * 4


@of("precision")
def precision(seen, comm):
    runs = (seen(precision=name) for name in ("default", "fp32", "tf32", "bf16"))
    usual, full, rounded, half = runs
    assert usual.loss == full.loss and usual.plan == full.plan  # on a CPU
    assert rounded.loss == pytest.approx(full.loss, rel=1e-3)  # on a CPU mostly the same
    assert full.loss != half.loss
    assert half.loss == pytest.approx(full.loss, rel=0.05)
    assert full.weights[0].dtype == half.weights[-1].dtype == torch.float32


@of("channels_last")
def memory_format(seen, comm):
    for flag, memory in ((True, torch.channels_last), (False, torch.contiguous_format)):
        run = seen(channels_last=flag, test=True)
        for tensor in (run.layers[0].weight, run.images[:1], *run.tested):
            assert tensor.is_contiguous(memory_format=memory)
        assert run.parts[0][0].is_contiguous() == (not flag)


@of("device", "threads")
def machine(seen, comm):
    for count in (2, 1):
        run = seen(threads=count)
        assert (run.records[0]["threads"], run.threads) == (count, {count})
        assert run.records[0]["device"] == run.images.device.type == "cpu"


@of("noise", "noise_level")
def noise(seen, comm):
    clean = seen().images
    for level in (0.1, 0.5):
        flags = {"task": "denoise", "model": "autoencoder", "noise_level": level}
        salted = seen(noise="salt-pepper", **flags).images[..., : SHAPE[1]]  # it pads
        changed = salted != clean
        assert set(salted[changed].unique().tolist()) <= {0.0, 1.0}
        assert changed.double().mean().item() == pytest.approx(level, rel=0.2)
        blurred = seen(noise="gaussian", **flags).images[..., : SHAPE[1]]
        assert (blurred != clean).double().mean() > 0.5 and 0 <= blurred.min() < blurred.max() <= 1
        inner = (blurred > 0) & (blurred < 1) & (clean > 0.2) & (clean < 0.5)
        assert ((blurred - clean)[inner].std() < 0.15) == (level == 0.1)


@pytest.mark.parametrize(
    "check", dict.fromkeys(SETTINGS.values()), ids=lambda check: check.__name__
)
def test_each_setting_does_what_it_says(comm, settings, check):
    check(runner(comm, settings), comm)


def test_a_dry_run_prints_the_plan_and_leaves_nothing(comm, settings, capsys):
    assert hp.train(**settings | {"dry_run": True}).status == "planned"
    printed = capsys.readouterr().out
    assert bool(re.search(r"shards +4, partitions of ", printed)) == (comm.rank == 0)
    comm.Barrier()
    assert not Path(settings["runs_dir"]).exists()


SETTINGS["dry_run"] = test_a_dry_run_prints_the_plan_and_leaves_nothing


@pytest.mark.ranks(1)
def test_every_setting_is_tested(comm):
    """Here, or under its name in another file that is no table of refusals."""
    fields = {field.name for field in dataclasses.fields(hp.Config)}
    others = ELSEWHERE.split()
    assert sorted([*SETTINGS, *others]) == sorted(fields)
    tables = {"test_refused.py", "test_settings.py"}
    files = [path for path in (ROOT / "tests").rglob("test_*.py") if path.name not in tables]
    text = "\n".join(path.read_text() for path in files)
    for name in others:
        flag = name.replace("_", "-")
        assert re.search(rf"--{flag}\b|\b{name} ?=|[\"']{name}[\"']", text), name
