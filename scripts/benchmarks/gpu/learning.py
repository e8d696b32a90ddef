"""Whole runs that learn: the flowers by their recipe, the digits by default."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

from hpctrain.errors import Failure
from hpctrain.launch import ROOT
from scripts.benchmarks.gpu.case import Case, made_pack, train
from scripts.benchmarks.gpu.result import Result, judged, not_run, shown

RECIPE = ROOT / "scripts" / "recipes" / "flowers.toml"
PIXELS = ("--random-crop", "0", "--shift", "10")  # of the recipe, where a pack holds no JPEG files
FLOWERS_REFERENCE, DIGITS_TARGET = 0.6649, 0.999
TINY = ("--model", "digits", "--epochs", "1", "--batch-size", "16", "--precision", "fp32")


def flowers(case: Case) -> Iterator[Result]:
    """Accuracy over the test images, to beat the reference's; seconds of the whole command."""
    what = "flowers by scripts/recipes/flowers.toml"
    try:
        pack = flower_pack(case)
    except Failure as error:
        yield not_run(what, f"no flowers: {error}")
        return
    flags = ["--config", str(RECIPE), "--data", pack, *adapted(pack), *case.size((), TINY)]
    records, seconds = timed(case, *flags)
    epochs, accuracy, rows = tested(records)
    yield shown(
        f"{what}, test accuracy after {epochs} epochs",
        accuracy > FLOWERS_REFERENCE,
        f"{accuracy:.4f}",
        f"> {FLOWERS_REFERENCE}",
        n=rows,
    )
    yield judged(f"{what}, whole command", seconds, "s", n=1)


def digits(case: Case) -> Iterator[Result]:
    """Accuracy over the test images with the defaults; seconds of the whole command."""
    data = ["--data-dir", str(case.folder)] if not case.rehearsal else ["--data", tiny(case, 1)]
    records, seconds = timed(case, "--model", "digits", *data, *case.size((), TINY))
    epochs, accuracy, rows = tested(records)
    what = f"digits, test accuracy after {epochs} epochs"
    yield judged(what, accuracy, least=DIGITS_TARGET, n=rows)
    yield judged("digits, whole command", seconds, "s", n=1)


def flower_pack(case: Case) -> str:
    """The pack that was named; else the built-in one, downloaded; made images in a rehearsal."""
    from hpctrain.data.builtin import locate

    if case.rehearsal and case.data is None:
        return tiny(case, 3)
    return str(locate(case.data or "flowers", "data"))


def tiny(case: Case, channels: int) -> str:
    """A pack of a few made images, in train and test."""
    return made_pack(case, 48, (28, 28, channels), smooth=True, test=16)


def adapted(pack: str) -> tuple[str, ...]:
    """The flags that fit the recipe to a pack of pixels; none for one of JPEG files."""
    from hpctrain.data.packed import read_pack

    return () if read_pack(pack).encoded else PIXELS


def timed(case: Case, *flags: str) -> tuple[list[dict[str, Any]], float]:
    """The records of a run and the seconds of the command."""
    began = time.perf_counter()
    records = train(case, *flags)
    return records, time.perf_counter() - began


def tested(records: list[dict[str, Any]]) -> tuple[int, float, int]:
    """Epochs that were trained, accuracy over the test images, and their number."""
    tests = [r for r in records if r["kind"] == "evaluation" and r["split"] == "test"]
    epochs = sum(record["kind"] == "epoch" for record in records)
    return epochs, tests[-1]["accuracy"], tests[-1]["rows"]
