"""Rows of whole runs by the public command: determinism, accuracy, images/s, several GPUs."""

from __future__ import annotations

import time
from collections.abc import Iterator

import torch

from hpctrain.errors import Failure
from hpctrain.launch import ROOT
from scripts.benchmarks.gpu.case import (
    Case,
    Result,
    attempt,
    judged,
    made_pack,
    not_run,
    shown,
    train,
)
from scripts.benchmarks.harness import steps_rate

SHARDS = 4
SAME = ("--reduce", "host", "--deterministic", "--shards", str(SHARDS))
GRAPHS, OVERLAP = ("--cuda-graphs",), ("--overlap", "3")
WAYS = tuple((ranks, flags) for flags in ((), GRAPHS, OVERLAP) for ranks in (1, 4, 2))
FEW_WAYS = (WAYS[2], WAYS[3], WAYS[7])  # in a rehearsal

RECIPE = ROOT / "scripts" / "recipes" / "flowers.toml"
PIXELS = ("--random-crop", "0", "--shift", "10")  # in place of the recipe's, for packs of pixels
FLOWERS_REFERENCE, DIGITS_TARGET = 0.6649, 0.999
TINY = ("--model", "digits", "--epochs", "1", "--batch-size", "16", "--precision", "fp32")

BATCH, PACK_STEPS = 128, 8
EPOCHS, WARM_EPOCHS = 10, 2
SIDES, SIDE = (100, 224), 100
BF16, NO_SLOWER = ("--precision", "bf16"), 0.98  # minimum ratio to bf16 alone for faster ways
ARITHMETIC = {
    "default": (),
    "fp32": ("--precision", "fp32"),
    "tf32": ("--precision", "tf32"),
    "bf16": BF16,
    "bf16, graphs": (*BF16, "--cuda-graphs"),
    "bf16, compile": (*BF16, "--compile"),
}
GROWTH = 0.9  # of the speed of one GPU times their number


def digests(case: Case) -> Iterator[Result]:
    """Compare the digests at the end of deterministic runs.

    They must be equal when a run is repeated, on any number of ranks that share a GPU, with and
    without CUDA graphs and overlap, and different for another seed.
    """
    flags = workload(case)
    first = digest(case, *flags)
    other = digest(case, *flags, "--seed", "1")
    what, target = "digest of another seed (control)", f"not {first[:12]}"
    yield shown(what, other != first, other[:12], target, n=1)
    for ranks, more in case.size(WAYS, FEW_WAYS):
        start = "again on 1 rank" if ranks == 1 else f"on {ranks} ranks"
        what = " ".join(("digest", start, *more))
        yield attempt(what, same_digest, case, first, *flags, *more, ranks=ranks)


def workload(case: Case) -> list[str]:
    """Return flags for ResNet-18 (digits in a rehearsal) on noise, with an incomplete last step."""
    pack = made_pack(case, case.size(413, 101), case.size((64, 64, 3), (28, 28, 1)))
    model = case.size("resnet18", "digits")
    flags = ["--data", pack, "--model", model, "--batch-size", "32", "--flip", "--shift", "2"]
    return [*flags, "--epochs", "1", *SAME]


def digest(case: Case, *flags: str, ranks: int = 1) -> str:
    """Return the digest at the end of one run."""
    return str(train(case, *flags, ranks=ranks)[-1]["digest"])


def same_digest(what: str, case: Case, first: str, *flags: str, ranks: int) -> Result:
    """Compare the digest at the end of a run with that of the first run."""
    found = digest(case, *flags, ranks=ranks)
    return shown(what, found == first, found[:12], first[:12], n=1)


def flowers(case: Case) -> Iterator[Result]:
    """Measure the accuracy on the test images, against the reference's, and the total seconds."""
    what = "flowers by scripts/recipes/flowers.toml"
    try:
        pack = flower_pack(case)
    except Failure as error:
        yield not_run(what, f"no flowers: {error}")
        return
    flags = [
        "--config",
        str(RECIPE),
        "--data",
        pack,
        *adapted(pack),
        *case.size((), [*TINY, "--warmup-epochs", "1"]),
    ]
    epochs, accuracy, rows, seconds = tested(case, *flags)
    yield shown(
        f"{what}, test accuracy after {epochs} epochs",
        accuracy > FLOWERS_REFERENCE,
        f"{accuracy:.4f}",
        f"> {FLOWERS_REFERENCE}",
        n=rows,
    )
    yield judged(f"{what}, whole command", seconds, "s", n=1)


def digits(case: Case) -> Iterator[Result]:
    """Measure the accuracy on the test images with the defaults, and the total seconds."""
    data = ["--cache-dir", str(case.folder)] if not case.rehearsal else ["--data", tiny(case, 1)]
    epochs, accuracy, rows, seconds = tested(case, "--model", "digits", *data, *case.size((), TINY))
    what = f"digits, test accuracy after {epochs} epochs"
    yield judged(what, accuracy, least=DIGITS_TARGET, n=rows)
    yield judged("digits, whole command", seconds, "s", n=1)


def flower_pack(case: Case) -> str:
    """Return the given pack; without one generated images in a rehearsal, else download the set."""
    from hpctrain.packing.builtin import locate

    if case.rehearsal and case.data is None:
        return tiny(case, 3)
    return str(locate(case.data or "flowers", "data"))


def tiny(case: Case, channels: int) -> str:
    """Write a pack of a few generated images, in train and test; return its path."""
    return made_pack(case, 48, (28, 28, channels), smooth=True, test=16)


def adapted(pack: str) -> tuple[str, ...]:
    """Return the flags that adapt the recipe to a pack of pixels; none for one of JPEG files."""
    from hpctrain.data.pack import read_pack

    return () if read_pack(pack).fit else PIXELS


def tested(case: Case, *flags: str) -> tuple[int, float, int, float]:
    """Train one run; return its epochs, test accuracy, number of test images and seconds."""
    began = time.perf_counter()
    records = train(case, *flags)
    seconds = time.perf_counter() - began
    tests = [r for r in records if r["kind"] == "evaluation" and r["split"] == "test"]
    epochs = sum(record["kind"] == "epoch" for record in records)
    return epochs, tests[-1]["accuracy"], tests[-1]["rows"], seconds


def speed(case: Case) -> Iterator[Result]:
    """Measure the images/s of ResNet-50 by arithmetic and image size, from a pack kept in memory.

    Times are those of the run's record (wall clock). The slowest to start comes last.
    """
    base: dict[int, float] = {}
    for way, flags in ARITHMETIC.items():
        for side in case.size(SIDES, (28,)):
            what = f"{network(case)} at {side}, {way}"
            if "--compile" in flags and case.rehearsal == "cuda":
                yield not_run(what, "only a real GPU runs compiled kernels")
                continue
            least = NO_SLOWER * base[side] if side in base else None
            result = attempt(what, compare_rate, case, side, least, *flags)
            if way == "bf16" and result.number:
                base[side] = result.number
            yield result


def compare_rate(what: str, case: Case, side: int, least: float | None, *flags: str) -> Result:
    """Compare the images/s of one run with the minimum."""
    found, steps = rate(case, side, *flags)
    return judged(what, found, "images/s", least=least, n=steps)


def network(case: Case) -> str:
    """Return the name of the network to train."""
    return case.size("resnet50", "digits")


def rate(case: Case, side: int, *flags: str, ranks: int = 1) -> tuple[float, int]:
    """Return images/s after the warm-up, with 128 images per rank and step, and the timed steps."""
    batch, steps, epochs = case.size((BATCH, PACK_STEPS, EPOCHS), (4, 2, 3))
    pack = made_pack(case, batch * steps * ranks, (side, side, 3))
    words = ["--data", pack, "--model", network(case), "--batch-per-rank", str(batch)]
    words += ["--epochs", str(epochs), "--validate-every", "0", *flags]
    found = [record for record in train(case, *words, ranks=ranks) if record["kind"] == "step"]
    warm = WARM_EPOCHS * steps
    return steps_rate(found, warm), len(found) - warm


def several(case: Case) -> Iterator[Result]:
    """Run on all GPUs of this host, one rank each (two ranks in a rehearsal).

    Checks that NCCL gives the same bits, and measures the scaling and the gain of overlap.
    """
    ranks = torch.cuda.device_count() if case.on_gpu else 2
    if ranks < 2:
        yield not_run("NCCL, overlap and scaling on several GPUs", "needs 2 GPUs")
        return
    many = f"{ranks} {'GPUs' if case.on_gpu else 'ranks'}"
    nccl = ("--reduce", "nccl") if case.on_gpu else ()
    flags = workload(case)
    first = digest(case, *flags)
    what = f"digest on {many}, {'NCCL' if case.on_gpu else 'MPI'}, against one through the host"
    yield attempt(what, same_digest, case, first, *flags, *nccl, ranks=min(4, ranks))
    side = case.size(SIDE, 28)
    alone, _ = rate(case, side, *BF16)
    together, steps = rate(case, side, *BF16, *nccl, ranks=ranks)
    name = f"{network(case)} at {side}, bf16, {many}"
    growth = together / (ranks * alone)
    yield judged(f"{name} / {ranks} times one", growth, least=GROWTH, n=steps)

    def gain(what: str) -> Result:
        found, steps = rate(case, side, *BF16, *nccl, *OVERLAP, ranks=ranks)
        return judged(what, found / together, least=NO_SLOWER, n=steps)

    yield attempt(f"{name}, --overlap 3 / without", gain)
