"""The plan: defaults by device and network, refusals with numbers, a digest over all of it."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest

from hpctrain.config import Config, check_settings
from hpctrain.errors import UsageError
from hpctrain.plan import VERSION, Facts, resolve
from hpctrain.plan_check import check_recorded, go_on, read_plan
from hpctrain.plan_text import describe_plan, describe_shares

FACTS = Facts(
    ranks=4,
    device="cpu",
    threads=2,
    rows=3301,
    image_shape=(100, 100, 3),
    value_bytes=1,
    classes=5,
    pack_uuid="u",
    min_samples=1,
)


def test_the_defaults_of_the_reference():
    plan = resolve(Config(), FACTS)
    assert (plan.model, plan.epochs, plan.batch_size, plan.learning_rate) == (
        "resnet50",
        100,
        128,
        0.01,
    )
    digits = resolve(Config(), dataclasses.replace(FACTS, image_shape=(28, 28, 1)))
    assert (digits.model, digits.epochs) == ("digits", 20)
    assert resolve(Config(optimizer="adam"), FACTS).learning_rate == 0.001
    assert resolve(Config(optimizer="adamw"), FACTS).learning_rate == 0.001
    assert resolve(Config(lr=0.5), FACTS).learning_rate == 0.5
    denoise = resolve(Config(task="denoise"), FACTS)
    assert (denoise.model, denoise.optimizer, denoise.batch_size) == ("autoencoder", "adam", 500)
    assert (denoise.epochs, denoise.patience) == (5, 5)


def test_worker_loads_make_shards_and_runs():
    def runs(**flags):
        plan = resolve(Config(**flags), dataclasses.replace(FACTS, ranks=2))
        return plan.shards, plan.runs

    assert runs(worker_load="3,1") == (4, ((0, 3), (3, 4)))
    assert runs(worker_load="3,1", shards=8) == (8, ((0, 6), (6, 8)))
    assert runs(shards=8) == (8, ((0, 4), (4, 8)))
    for wrong in ("3", "3,1,1"):
        with pytest.raises(UsageError, match="--worker-load names"):
            runs(worker_load=wrong, shards=8)
    for wrong in ("3,x", "3,0", "3,-1", "", "inf,1", "auto"):
        with pytest.raises(UsageError, match="a positive number for every rank"):
            check_settings(Config(worker_load=wrong))


def test_the_digest_of_a_plan_does_not_depend_on_this_launch():
    few, many = (dataclasses.replace(FACTS, ranks=ranks) for ranks in (2, 4))
    plan = resolve(Config(shards=8), few)
    assert plan.digest() == resolve(Config(shards=8), many).digest()
    assert plan.digest() != resolve(Config(shards=7), few).digest()
    assert plan.digest() != resolve(Config(shards=8, deterministic=True), few).digest()


def test_deterministic_fixes_one_thread():
    assert resolve(Config(), FACTS).threads == 2
    assert resolve(Config(deterministic=True), FACTS).threads == 1
    assert resolve(Config(deterministic=True, threads=3), FACTS).threads == 3


def test_blocks_of_an_evaluation_are_larger_on_gpus_unless_images_are_large():
    def block(device, shape, ranks=4):
        facts = dataclasses.replace(FACTS, device=device, image_shape=shape, ranks=ranks)
        return resolve(Config(), facts).evaluation_rows

    small, usual, large, huge = (28, 28, 1), (224, 224, 3), (384, 384, 3), (2048, 2048, 3)
    assert {block("cpu", shape) for shape in (small, usual, large, huge)} == {64}
    assert [block("cuda", shape) for shape in (small, usual, large, huge)] == [256, 256, 151, 64]
    assert {block("cuda", large, ranks) for ranks in (1, 2, 7)} == {151}


def test_a_run_on_gpus_that_was_begun_with_blocks_of_64_rows_keeps_them():
    facts = dataclasses.replace(FACTS, device="cuda")
    begun = dataclasses.replace(resolve(Config(), facts), evaluation_rows=64)
    again = go_on(read_plan(json.loads(begun.to_json())), Config(), facts)
    assert again == begun and resolve(Config(), facts).evaluation_rows == 256


def test_the_mini_batch_grows_with_gpus_but_not_with_cpu_ranks():
    on_gpus = dataclasses.replace(FACTS, device="cuda")
    assert resolve(Config(), on_gpus).batch_size == 512
    assert resolve(Config(batch_size=64), on_gpus).batch_size == 64
    assert resolve(Config(batch_per_rank=32), FACTS).batch_size == 128


def test_shards_default_to_ranks_and_do_not_change_the_batch():
    plan = resolve(Config(shards=12), FACTS)
    assert (plan.shards, plan.batch_size, len(plan.shares)) == (12, 128, 12)
    assert resolve(Config(), FACTS).shards == 4


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (Config(batch_size=3), "mini-batches of 3,.* 4 shards"),
        (Config(batch_size=8, batch_per_rank=2), "exclude"),
        (Config(shards=3), "4 ranks cannot carry 3 shards"),
    ],
)
def test_what_does_not_fit_is_refused_with_the_numbers(config, message):
    with pytest.raises(UsageError, match=message):
        resolve(config, FACTS)


@pytest.mark.parametrize("given", [{"batch_size": 5}, {"batch_per_rank": 1}])
def test_shards_of_too_few_images_are_refused(given):
    facts = dataclasses.replace(FACTS, min_samples=2)
    with pytest.raises(UsageError, match="mini-batches of 5, .* 5 shards of 2 or more images"):
        resolve(Config(shards=5, **given), facts)
    assert resolve(Config(shards=5, batch_size=13), facts).batch_size == 13


@pytest.mark.parametrize("flag", ["epochs", "threads", "batch_size", "batch_per_rank", "shards"])
@pytest.mark.parametrize("value", [0, -1])
def test_numbers_out_of_range_are_refused_before_anything_is_read(flag, value):
    words = f"--{flag.replace('_', '-')} {value}: give 1 or more"
    with pytest.raises(UsageError, match=words):
        check_settings(Config(data="/nowhere", **{flag: value}))


def test_the_digest_changes_with_every_field():
    plan = resolve(Config(), FACTS)
    assert plan.digest() == resolve(Config(), FACTS).digest()
    for change in (Config(seed=1), Config(batch_size=127), Config(lr=0.02), Config(shards=5)):
        assert resolve(change, FACTS).digest() != plan.digest()


def test_a_plan_of_another_version_is_told_and_not_continued():
    plan = resolve(Config(), FACTS)
    assert go_on(read_plan(json.loads(plan.to_json())), Config(), FACTS) == plan
    other = dataclasses.replace(plan, version=VERSION + 1)
    words = f"rows in another order .its plan has version {VERSION + 1},.* finish it with the one"
    with pytest.raises(UsageError, match=words):
        go_on(read_plan(json.loads(other.to_json())), Config(), FACTS)


def test_a_plan_is_that_of_the_record():
    plan, path = resolve(Config(), FACTS), Path("plan.json")
    longer = dataclasses.replace(plan, epochs=plan.epochs + 1, threads=plan.threads + 2)
    launch = {"plan": plan.digest(), "epochs": plan.epochs, "threads": plan.threads}
    for fine in (launch, {}, {"plan": plan.digest()}):
        check_recorded(plan, path, fine)
    check_recorded(longer, path, launch)  # its launch died before it was recorded
    for other in (Config(seed=1), Config(lr=0.5), Config(shards=5)):
        with pytest.raises(UsageError, match=r"plan.json is not the plan that .* Put the file"):
            check_recorded(resolve(other, FACTS), path, launch)
    with pytest.raises(UsageError, match="is not the plan"):
        check_recorded(plan, path, {**launch, "plan": "0" * 16})


def test_a_digest_that_is_not_the_plans_is_refused():
    fields = json.loads(resolve(Config(), FACTS).to_json())
    with pytest.raises(ValueError, match="its digest is [0-9a-f]{16}, and not 0000 as it says"):
        read_plan({**fields, "digest": "0000"})
    del fields["digest"]
    with pytest.raises(ValueError, match="and not None as it says"):
        read_plan(fields)


def test_the_plan_can_be_read():
    text = "\n".join(describe_plan(resolve(Config(), FACTS)))
    for part in ("resnet50", "100x100x3", "3,301", "4 on cpu", "shares of 32", "last step"):
        assert part in text


@pytest.mark.parametrize(
    ("ranks", "size", "told"),
    [
        (3, 128, "43, 43, 42 by rank"),
        (16, 128, ", ".join(["8"] * 16) + " by rank"),
        (17, 128, "7 to 8 a rank"),
        (19, 38, "2 a rank"),
    ],
)
def test_the_share_of_every_rank_is_told(ranks, size, told):
    plan = resolve(Config(batch_size=size), dataclasses.replace(FACTS, ranks=ranks))
    assert describe_shares(plan) == told
    assert any(
        line.startswith("mini-batch") and line.endswith(told) for line in describe_plan(plan)
    )
    assert describe_shares(resolve(Config(shards=5, batch_size=17), FACTS)) == "8, 3, 3, 3 by rank"


@pytest.mark.parametrize(
    ("flags", "rate", "steps", "first"),
    [
        ({}, 0.01, 0, 0.1),
        ({"batch_size": 512, "scale_lr": "linear"}, 0.04, 35, 0.25),
        ({"batch_size": 512, "scale_lr": "sqrt"}, 0.02, 35, 0.5),
        ({"batch_per_rank": 64, "scale_lr": "linear", "lr": 0.1}, 0.4, 65, 0.25),
        ({"batch_size": 64, "scale_lr": "linear"}, 0.005, 0, 0.1),
        ({"batch_size": 512, "warmup_epochs": 2.0}, 0.01, 14, 0.1),
        ({"batch_size": 512, "scale_lr": "linear", "warmup_epochs": 0.0}, 0.04, 0, 0.25),
    ],
)
def test_the_learning_rate_grows_with_the_mini_batch_after_a_warm_up(flags, rate, steps, first):
    plan = resolve(Config(**flags), FACTS)
    assert plan.learning_rate == pytest.approx(rate)
    assert (plan.warmup_steps, plan.warmup_from) == (steps, pytest.approx(first))


def test_on_gpus_the_mini_batch_grows_with_the_ranks():
    plan = resolve(Config(scale_lr="linear"), dataclasses.replace(FACTS, device="cuda"))
    assert (plan.batch_size, plan.learning_rate) == (512, pytest.approx(0.04))


@pytest.mark.parametrize("deterministic", [False, True])
def test_the_usual_precision_is_that_of_torch_on_gpus_alone(deterministic):
    def found(device, **given):
        config = Config(deterministic=deterministic, **given)
        return resolve(config, dataclasses.replace(FACTS, device=device))

    assert found("cpu") == found("cpu", precision="fp32")
    assert found("cuda").precision == "default"
    assert "precision      default (TF32 in convolutions), NHWC" in describe_plan(found("cuda"))
    assert found("cuda").digest() != found("cuda", precision="fp32").digest()


def test_a_plan_is_read_back_as_it_was_written():
    plan = resolve(Config(shards=7, random_crop=0.5), FACTS)
    assert read_plan(json.loads(plan.to_json())) == plan


@pytest.mark.parametrize("name, value", [("epochs", 0), ("last", [-1, 24, 24, 24])])
def test_a_plan_whose_numbers_were_changed_is_refused(name, value):
    fields = {**json.loads(resolve(Config(), FACTS).to_json()), name: value}
    with pytest.raises(ValueError, match="its digest is"):
        read_plan(fields)


def test_numbers_that_no_file_of_a_run_could_say_are_refused():
    with pytest.raises(UsageError, match="--seed 9223372036854775808: give at most"):
        check_settings(Config(seed=2**63))
    check_settings(Config(seed=-(2**63) + 1))
