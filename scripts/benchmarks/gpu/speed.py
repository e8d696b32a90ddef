"""images/s of ResNet-50 from a pack that stays in memory, by the wall clock of the run's record."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

from hpctrain.bench.harness import steps_rate
from scripts.benchmarks.gpu.case import Case, made_pack, steps_of, train
from scripts.benchmarks.gpu.result import Result, attempt, judged, not_run

BATCH, PACK_STEPS = 128, 8
EPOCHS, WARM_EPOCHS = 10, 2
SIDES = (100, 224)
BASE, NO_SLOWER = "bf16", 0.98  # of its images/s, for the ways that are to make it faster
WAYS = {
    "default": (),
    "fp32": ("--precision", "fp32"),
    "tf32": ("--precision", "tf32"),
    BASE: ("--precision", BASE),
    "bf16, graphs": ("--precision", BASE, "--graphs"),
    "bf16, compile": ("--precision", BASE, "--compile"),
}


def measure(case: Case) -> Iterator[Result]:
    """A line per way to compute and size of image; what takes longest to start comes last."""
    base: dict[int, float] = {}
    for way, flags in WAYS.items():
        for side in case.size(SIDES, (28,)):
            what = f"{network(case)} at {side}, {way}"
            if "--compile" in flags and case.rehearsal == "cuda":
                yield not_run(what, "only a real GPU runs compiled kernels")
                continue
            least = NO_SLOWER * base[side] if side in base else None
            result = attempt(what, partial(speed, case, what, side, flags, least))
            if way == BASE and result.number:
                base[side] = result.number
            yield result


def speed(case: Case, what: str, side: int, flags: tuple[str, ...], least: float | None) -> Result:
    """One line."""
    found, steps = rate(case, side, *flags)
    return judged(what, found, "images/s", least=least, n=steps)


def network(case: Case) -> str:
    """What is trained."""
    return case.size("resnet50", "digits")


def rate(case: Case, side: int, *flags: str, ranks: int = 1) -> tuple[float, int]:
    """images/s after the warm-up, of 128 images a rank and step, and the number of steps timed."""
    batch, steps, epochs = case.size((BATCH, PACK_STEPS, EPOCHS), (4, 2, 3))
    pack = made_pack(case, batch * steps * ranks, (side, side, 3))
    words = ["--data", pack, "--model", network(case), "--batch-per-rank", str(batch)]
    words += ["--epochs", str(epochs), "--evaluate-every", "0"]
    found = list(steps_of(train(case, *words, *flags, ranks=ranks)))
    warm = WARM_EPOCHS * steps
    return steps_rate(found, warm), len(found) - warm
