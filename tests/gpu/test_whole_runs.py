"""On GPUs: whole runs by the public command. The same bits, learning, images/s, several GPUs.

    python -m pytest tests/gpu --junitxml=gpu.xml     # all figures are properties of the tests

HPCTRAIN_TEST_FLOWERS names a pack of the flowers; without one that test is skipped. On an emulated
GPU, sizes are tiny, and speeds are not judged.
"""

from __future__ import annotations

import datetime
import itertools
import os
import time

import numpy as np
import pytest
import torch

import hpctrain as hp
from tests.gpu.emulator import EMULATED
from tests.support.api import read_records
from tests.support.launch import ROOT, run_cli, run_mpi
from tests.support.packs import make_pack

pytestmark = [pytest.mark.gpu, pytest.mark.slow, pytest.mark.timeout(600)]
SAME = ["--reduce", "host", "--deterministic", "--shards", "4", "--batch-size", "32"]
WAYS = [*itertools.product(([], ["--cuda-graphs"], ["--overlap", "3"]), (1, 4, 2))]
BF16 = ["--precision", "bf16"]
ARITHMETIC = {
    "default": [],
    "fp32": ["--precision", "fp32"],
    "tf32": ["--precision", "tf32"],
    "bf16": BF16,
    "graphs": [*BF16, "--cuda-graphs"],
    "compile": [*BF16, "--compile"],
}
BATCH, STEPS, EPOCHS = (4, 2, 3) if EMULATED else (128, 8, 10)
NETWORK, SIDES = ("digits", (28,)) if EMULATED else ("resnet50", (100, 224))
GROWTH, NO_SLOWER = 0.9, 0.98  # of P times one GPU; of bf16 alone
FLOWERS_REFERENCE, DIGITS_TARGET = 0.6649, 0.999
numbers = itertools.count()


def train(folder, *flags, ranks=1):
    """Train a run; return its records."""
    name = f"run{next(numbers)}"
    words = ["-m", "hpctrain", "train", "--device", "cuda", "--runs-dir", folder, "--run", name]
    words = [*map(str, (*words, "--progress", "none", *flags))]
    done = run_mpi(ranks, words, 300) if ranks > 1 else run_cli(words[2:], 300)
    assert done.returncode == 0, done.stderr
    return list(read_records(folder / name))


@pytest.fixture(scope="module")
def work(tmp_path_factory):
    """A folder, flags for short deterministic runs in it, and the digest of one on one rank."""
    folder = tmp_path_factory.mktemp("work")
    rows, shape = (101, (28, 28, 1)) if EMULATED else (413, (64, 64, 3))
    pack = make_pack(folder / "pack.h5", {"train": rows}, shape)
    network = "digits" if EMULATED else "resnet18"
    flags = ["--data", pack, "--model", network, "--flip", "--shift", 2, "--epochs", 1, *SAME]
    return folder, flags, train(folder, *flags)[-1]["digest"]


@pytest.mark.parametrize(("more", "ranks"), WAYS)
def test_digests_are_equal_on_ranks_that_share_a_gpu(work, more, ranks):
    folder, flags, digest = work
    assert train(folder, *flags, *more, ranks=ranks)[-1]["digest"] == digest


def test_the_digest_of_another_seed_is_another(work):
    folder, flags, digest = work
    assert train(folder, *flags, "--seed", 1)[-1]["digest"] != digest


def accuracy_of(folder, record_property, *flags):
    """Train; return the accuracy on the test images."""
    began = time.perf_counter()
    records = train(folder, *flags)
    record_property("seconds", time.perf_counter() - began)
    (test,) = [r for r in records if r["kind"] == "evaluation" and r["split"] == "test"]
    record_property("accuracy", test["accuracy"])
    return test["accuracy"]


def test_the_digits_are_learnt(tmp_path, record_property):
    flags = ["--epochs", "1"] if EMULATED else []
    words = ["--model", "digits", "--cache-dir", tmp_path, *flags]
    found = accuracy_of(tmp_path, record_property, *words)
    assert found >= (0.5 if EMULATED else DIGITS_TARGET)


@pytest.mark.skipif("HPCTRAIN_TEST_FLOWERS" not in os.environ, reason="needs a pack of flowers")
def test_the_flowers_are_learnt_better_than_by_the_reference(tmp_path, record_property):
    pack = os.environ["HPCTRAIN_TEST_FLOWERS"]
    # A pack of pixels has no files to cut other parts out of.
    pixels = [] if hp.read_pack(pack).fit else ["--random-crop", "0", "--shift", "10"]
    words = ["--config", ROOT / "scripts/recipes/flowers.toml", "--data", pack, *pixels]
    assert accuracy_of(tmp_path, record_property, *words) > FLOWERS_REFERENCE


def rate(folder, side, *flags, ranks=1):
    """images/s of ResNet-50 after two epochs of warm-up, from a pack kept in memory."""
    rows = BATCH * STEPS * ranks
    images = np.random.default_rng(0).integers(256, size=(rows, side, side, 3), dtype=np.uint8)
    pack = folder / f"{rows}-{side}.h5"
    hp.write_pack(pack, {"train": (images, np.arange(rows) % 5)}, "abcde", overwrite=True)
    words = ["--data", pack, "--model", NETWORK, "--batch-per-rank", BATCH, "--epochs", EPOCHS]
    records = train(folder, *words, "--validate-every", 0, *flags, ranks=ranks)
    steps = [r for r in records if r["kind"] == "step"]
    ends = [datetime.datetime.fromisoformat(steps[n]["time"]) for n in (2 * STEPS - 1, -1)]
    return sum(s["rows"] for s in steps[2 * STEPS :]) / (ends[1] - ends[0]).total_seconds()


@pytest.mark.parametrize("side", SIDES)
def test_faster_arithmetic_is_not_slower(tmp_path, side, record_property):
    found = {}
    for way, flags in ARITHMETIC.items():
        if not (EMULATED and way == "compile"):  # only a real GPU runs compiled kernels
            found[way] = rate(tmp_path, side, *flags)
            record_property(f"images/s, {way}", found[way])
    slower = {
        way for way in ("graphs", "compile") if found.get(way, 1e9) < NO_SLOWER * found["bf16"]
    }
    assert EMULATED or not slower, found


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs 2 GPUs")
def test_several_gpus_scale_and_have_the_same_bits(work, tmp_path, record_property):
    """One rank each, by NCCL; overlap does not make it slower."""
    folder, flags, digest = work
    ranks, nccl = torch.cuda.device_count(), ["--reduce", "nccl"]
    assert train(folder, *flags, *nccl, ranks=min(4, ranks))[-1]["digest"] == digest
    alone = rate(tmp_path, SIDES[0], *BF16)
    together = rate(tmp_path, SIDES[0], *BF16, *nccl, ranks=ranks)
    overlapped = rate(tmp_path, SIDES[0], *BF16, *nccl, "--overlap", 3, ranks=ranks)
    record_property("growth", together / (ranks * alone))
    record_property("gain of overlap", overlapped / together)
    assert EMULATED or together >= GROWTH * ranks * alone
    assert EMULATED or overlapped >= NO_SLOWER * together
