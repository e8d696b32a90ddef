"""The plan: defaults by device and network, shards by rank, a digest of all that a run keeps."""

from __future__ import annotations

import dataclasses
import json
import os
from types import SimpleNamespace

import numpy as np
import pytest

import hpctrain as hp
from hpctrain import Config, UsageError
from tests.support.api import (
    Facts,
    assign_shards,
    check_memory,
    extend_plan,
    read_plan,
    resolve_plan,
)
from tests.support.ranks import command

FACTS = Facts(
    ranks=4,
    device="cpu",
    threads=2,
    rows=3301,
    image_shape=(100, 100, 3),
    row_bytes=30000,
    targets="5 classes",
    pack_uuid="u",
    min_samples=1,
)


def plan(facts=None, **settings):
    return resolve_plan(Config(**settings), dataclasses.replace(FACTS, **(facts or {})))


GPUS = {"device": "cuda"}


def test_defaults_go_by_task_images_and_optimizer():
    found = plan()
    assert (found.model, found.epochs, found.batch_size) == ("resnet50", 100, 128)
    digits = plan({"image_shape": (28, 28, 1)})
    assert (digits.model, digits.epochs) == ("digits", 20)
    denoise = plan(task="denoise")
    assert (denoise.model, denoise.optimizer, denoise.batch_size) == ("autoencoder", "adam", 500)
    assert (denoise.epochs, denoise.patience) == (5, 5)
    rates = {"sgdm": 0.01, "adam": 0.001, "adamw": 0.001}
    assert {name: plan(optimizer=name).learning_rate for name in rates} == rates
    assert plan(lr=0.5).learning_rate == 0.5


def test_the_batch_grows_with_gpus_but_not_with_ranks_on_cpus():
    assert (plan().batch_size, plan(GPUS).batch_size) == (128, 512)
    assert plan(GPUS, batch_size=64).batch_size == 64
    assert plan(batch_per_rank=32).batch_size == 128
    grown = plan(GPUS, scale_lr="linear")
    assert (grown.batch_size, grown.learning_rate) == (512, pytest.approx(0.04))


@pytest.mark.parametrize(
    ("settings", "shards", "runs"),
    [
        ({"worker_load": "3,1"}, 4, ((0, 3), (3, 4))),
        ({"worker_load": "3,1", "shards": 8}, 8, ((0, 6), (6, 8))),
        ({"shards": 8}, 8, ((0, 4), (4, 8))),
        ({}, 2, ((0, 1), (1, 2))),
    ],
)
def test_shards_are_assigned_to_ranks_in_proportion(settings, shards, runs):
    found = plan({"ranks": 2}, **settings)
    assert (found.shards, found.batch_size) == (shards, 128)
    loads = [float(load) for load in settings.get("worker_load", "1,1").split(",")]
    assert assign_shards(shards, 2, loads) == [range(*run) for run in runs]


def test_shards_have_as_many_images_as_batch_norm_needs():
    for given in ({"batch_size": 5}, {"batch_per_rank": 1}):
        with pytest.raises(UsageError, match=r"\b5 shards"):
            plan({"min_samples": 2}, shards=5, **given)
    assert plan({"min_samples": 2}, shards=5, batch_size=13).batch_size == 13


def test_one_thread_a_rank_is_used_where_bits_count():
    assert (plan().threads, plan(deterministic=True).threads) == (0, 1)
    assert plan(deterministic=True, threads=3).threads == 3
    assert (plan(GPUS).device, plan(GPUS, deterministic=True).device) == ("", "cuda")


def test_blocks_of_an_evaluation_are_larger_on_gpus_unless_images_are_large():
    shapes = [(28, 28, 1), (224, 224, 3), (384, 384, 3), (2048, 2048, 3)]
    for device, rows in (("cpu", [64] * 4), ("cuda", [256, 256, 151, 64])):
        for ranks in (1, 2, 7):
            facts = [{"device": device, "image_shape": shape, "ranks": ranks} for shape in shapes]
            assert [plan(each).evaluation_rows for each in facts] == rows


@pytest.mark.parametrize("deterministic", [False, True])
def test_the_usual_precision_differs_from_fp32_on_gpus_alone(deterministic):
    same = {"deterministic": deterministic}
    assert plan(**same) == plan(precision="fp32", **same)
    assert plan(GPUS, **same).precision == "default"
    assert plan(GPUS, **same).digest() != plan(GPUS, precision="fp32", **same).digest()


@pytest.mark.parametrize(
    ("settings", "rate", "steps", "first"),
    [
        ({}, 0.01, 0, 0.1),
        ({"batch_size": 512, "scale_lr": "linear"}, 0.04, 35, 0.25),
        ({"batch_size": 512, "scale_lr": "sqrt"}, 0.02, 35, 0.5),
        ({"batch_per_rank": 64, "scale_lr": "linear", "lr": 0.1}, 0.4, 65, 0.25),
        ({"batch_size": 64, "scale_lr": "linear"}, 0.005, 0, 0.1),
        ({"batch_size": 512, "warmup_epochs": 2.0}, 0.01, 14, 0.1),
        ({"batch_size": 512, "scale_lr": "linear", "warmup_epochs": 0.0}, 0.04, 0, 0.25),
        ({"batch_size": 512, "scale_lr": "linear", "schedule": "one-cycle"}, 0.04, 0, 0.25),
    ],
)
def test_the_learning_rate_grows_with_the_batch_after_a_warm_up(settings, rate, steps, first):
    found = plan(**settings)
    assert found.learning_rate == pytest.approx(rate)
    assert (found.warmup_steps, found.warmup_from) == (steps, pytest.approx(first))


@pytest.mark.parametrize("settings", [{"warmup_epochs": 3.5}, {"scale_lr": "linear"}])
def test_a_warm_up_longer_than_the_run_is_refused(settings):
    with pytest.raises(UsageError, match=r"warm-up of (3\.5|5) epochs .* run of 3 epochs"):
        plan(batch_size=512, epochs=3, **settings)
    assert plan(epochs=3, warmup_epochs=3.0).warmup_steps == plan(epochs=3).steps


def test_the_digest_is_of_all_that_a_run_keeps_and_of_nothing_of_the_launch():
    few, many = (plan({"ranks": ranks}, shards=8) for ranks in (2, 4))
    usual = plan({"ranks": 8, "device": "cpu"}, shuffle="partition", lr=0.01)
    assert few.digest() == many.digest() == usual.digest() == json.loads(few.to_json())["digest"]
    changes = [{"seed": 1}, {"batch_size": 127}, {"lr": 0.02}, {"shards": 5}]
    changes += [{"deterministic": True}, {"label_smoothing": 0.1}]
    digests = {plan(**change).digest() for change in ({}, *changes)}
    assert len(digests) == 1 + len(changes)


def test_a_setting_or_field_that_is_added_does_not_change_the_digest_at_its_default():
    (seed,) = (field for field in dataclasses.fields(Config) if field.name == "seed")

    class Later(Config):
        sharpness: int = dataclasses.field(default=0, metadata=seed.metadata)

    old, new, other = (
        resolve_plan(config, FACTS) for config in (Config(), Later(), Later(sharpness=1))
    )
    assert old.digest() == new.digest() != other.digest()

    @dataclasses.dataclass(frozen=True)
    class LaterPlan(type(old)):
        sharpness: int = 0

    later = LaterPlan(**{name: getattr(old, name) for name in vars(old) if name != "partition"})
    assert old.digest() == later.digest() != dataclasses.replace(later, sharpness=1).digest()


#: plan.json of a run of --task regress, and where that of one of multilabel differs.
PLAN = {
    "batch_size": 20,
    "block_rows": 29128,
    "chosen": ["data", "model", "epochs", "batch_size", "deterministic", "run", "task"],
    "class_weights": [],
    "device": "cpu",
    "digest": "41e2c95b7270b2e5",
    "epochs": 1,
    "evaluation_rows": 64,
    "image_shape": [12, 12, 1],
    "last": [10, 10],
    "learning_rate": 0.001,
    "model": "resnet18",
    "optimizer": "adam",
    "pack_uuid": "d55bc3be-b7d5-ad5b-8b7d-6d01a2e6453e",
    "patience": 10,
    "precision": "fp32",
    "rows": 40,
    "scaling": [],
    "settings": "d3ff417c1b86db96",
    "shards": 2,
    "shuffle": "partition",
    "split_seed": None,
    "stored_range": None,
    "target_scaling": [
        [0.2183015454464998, 0.05380326639860868],
        [1.0701521625762225, 0.9818420633326272],
    ],
    "threads": 1,
    "version": 3,
    "warmup_from": 0.1,
    "warmup_steps": 0,
    "window_blocks": 15,
}
OF_MULTILABEL = {
    "class_weights": [0.6, 1.105263157894737, 1.6666666666666667],
    "digest": "e2f31f9dbf9edea7",
    "pack_uuid": "782ffece-644f-0c1c-3ad7-88771c963006",
    "settings": "97158758ea707b7b",
    "target_scaling": None,
}


@pytest.mark.parametrize("changed", [{}, OF_MULTILABEL])
def test_a_plan_is_read_with_what_is_measured_of_the_targets(changed):
    """A file may lack what another task measures, or have null for it, and lacks later fields."""
    fields = PLAN | changed
    written = json.loads(read_plan(dict(fields)).to_json())
    assert {name: written.get(name) for name in fields} == fields
    assert not [name for name in written.keys() - fields.keys() if written[name]]


def test_a_run_goes_on_only_with_what_was_measured_for_it():
    begun = plan({"measured": {"class_weights": (1.0, 2.0), "spread": 3}})
    same = dataclasses.replace(FACTS, measured=begun.measured)
    assert extend_plan(begun, Config(), same) == begun
    for measured, text in (
        (
            {"class_weights": (1.0, 3.0), "spread": 3},
            r"class weights \(1.0, 2.0\), not \(1.0, 3.0\)",
        ),
        ({"class_weights": (1.0, 2.0)}, "spread 3, not None"),
    ):
        other = dataclasses.replace(FACTS, measured=measured)
        with pytest.raises(UsageError, match=f"the run was begun with {text}: it cannot go on"):
            extend_plan(begun, Config(), other)


def test_a_later_launch_may_have_more_epochs_and_another_device_unless_bits_count():
    longer = extend_plan(plan(GPUS), Config(epochs=200), FACTS)
    assert longer == dataclasses.replace(plan(GPUS), epochs=200)
    assert extend_plan(longer, Config(epochs=3), FACTS) == longer
    with pytest.raises(UsageError, match="begun with device cuda, not cpu"):
        extend_plan(plan(GPUS, deterministic=True), Config(deterministic=True), FACTS)


def test_global_order_says_what_it_keeps_of_all_samples_before_it_does(monkeypatch):
    """10^9 of 4 bytes a label, 4 a checksum, 8 an offset and 1 for whether it was compared."""
    pages = {"SC_PHYS_PAGES": 16 << 18, "SC_PAGE_SIZE": 4096}  # 16 GiB
    monkeypatch.setattr(os, "sysconf", pages.get)
    labels, crc32, offsets = (np.empty(0, dtype) for dtype in ("<i4", "<u4", "<i8"))
    columns = {"targets": labels, "crc32": crc32, "offsets": offsets}

    def check(verify=True, ranks=1, samples=10**9, columns=columns, **settings):
        info = SimpleNamespace(samples=samples, **columns)
        config = Config(verify=verify, **settings)
        return check_memory(config, plan(**settings), info, ranks)

    everything = {"shuffle": "global"}
    pixels = columns | {"offsets": None}
    assert check() == check(shuffle="blocks") == ""
    assert check(**everything, samples=10**8 // 2) == ""
    assert "1,000,000,000 samples: 15.8 GiB on each rank" in check(**everything)
    assert "8.4 GiB on each rank" in check(**everything, columns=pixels)
    assert "3.7 GiB" in check(verify=False, ranks=4, **everything, columns=pixels)
    with pytest.raises(UsageError, match="3.7 GiB on each rank, and this host has 16.0 GiB for 5"):
        check(verify=False, ranks=5, **everything, columns=pixels)
    with pytest.raises(UsageError, match="53.1 GiB on each rank"):
        check(**everything, columns=pixels, balanced_sampling=True)
    half = {**everything, "samples": 10**9 // 2}
    for count, held in ((16, "9.8"), (17, "2.3")):  # the longer ones are read on demand
        classes = SimpleNamespace(dtype="|u1", shape=(0, count))
        assert f"{held} GiB" in check(**half, columns=pixels | {"targets": classes})
    in_memory = np.empty((0, 17), "u1")  # of an external file
    assert "10.2 GiB" in check(**half, columns=pixels | {"targets": in_memory})


def test_classes_that_shards_cannot_draw_equally_often_are_noted_with_numbers(tmp_path):
    """10 images a shard: the first one draws 10/3 of each class, the others 5 of two classes."""
    labels = np.arange(40) % 2
    labels[3] = 2
    images = np.random.default_rng(0).integers(0, 256, (40, 28, 28, 1), np.uint8)
    hp.write_pack(tmp_path / "rare.h5", {"train": (images, labels)}, ["a", "b", "rare"])
    words = ["train", "--data", tmp_path / "rare.h5", "--batch-size", "8", "--shards", "4"]
    words += ["--balanced-sampling", "--dry-run"]
    for size in (1, 3):
        said = command(size, *words).out
        assert "4 shards lack a class and cannot draw it: rare 3 (3 images an epoch)" in said
        assert "up to 18 images are drawn an epoch; --shuffle global draws" in said
        assert said.count("cannot draw it") == 1
    assert "cannot draw" not in command(1, *words, "--shuffle", "global").out
    assert "cannot draw" not in command(1, *words, "--shards", "1").out
