"""Count the operators of one step of hpctrain and of a plain torch loop, and print a table.

    python -m scripts.benchmarks.operators [--device cuda]

Both train the same network on the same batch, with SGD, momentum and weight decay, in the foreach
implementation that torch uses on GPUs. On a GPU every operator except views and allocations
launches one or more kernels. For a small network or batch their number determines the time of a
step.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from hpctrain.models import build
from hpctrain.parallel.device import place
from scripts.benchmarks.gpu.case import CLASSES, Case, first_batches, made_pack, ready
from scripts.benchmarks.peers import plain_step

CASES = {"ResNet-50": ("resnet50", (64, 64, 3), 1.08), "digits": ("digits", (28, 28, 1), 1.5)}
ROWS, WARM = 8, 4
ALLOCATIONS = ("empty", "empty_like", "empty_strided", "new_empty", "_unsafe_view")


class Count(NamedTuple):
    """The number of operators in a step."""

    dispatched: int  # all operators that torch dispatched
    computing: int  # the same without views and allocations
    names: Counter[str]


class Dispatched(TorchDispatchMode):
    """Counts the operators that torch dispatches."""

    def __init__(self) -> None:
        super().__init__()
        self.names: Counter[str] = Counter()
        self.computing = 0

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        schema = function._schema
        if not schema.name.startswith("profiler::"):
            self.names[str(function)] += 1
            views = any(r.alias_info and not r.alias_info.is_write for r in schema.returns)
            allocates = schema.name.partition("::")[2] in ALLOCATIONS
            self.computing += not (views or allocates)
        return function(*args, **(kwargs or {}))


def count_step(step: Callable[[], object]) -> Count:
    """Count the operators of a call of `step`, after WARM calls that are not counted."""
    for _ in range(WARM):
        step()
        if torch.cuda.is_available():
            torch.cuda.synchronize()  # first steps do more, until results of the device arrive
    with Dispatched() as found:
        step()
    return Count(found.names.total(), found.computing, found.names)


def make_steps(
    folder: Path, network: str, shape: tuple[int, int, int], device: str, *flags: str
) -> dict[str, Callable[[], object]]:
    """Return functions for a step of hpctrain, with these `flags`, and for one of the plain loop.

    Both train on ROWS images, (H, W, C).
    """

    case = Case(folder, rehearsal=device)
    words = ["--data", made_pack(case, ROWS, shape), "--model", network, "--weight-decay", "1e-4"]
    job = ready(case, *words, "--batch-size", str(ROWS), *flags)
    ((batch,),) = first_batches(job)

    def ours() -> object:
        return job.trainer.step([batch], ROWS)  # which copies its totals to the host

    model = place(build(network, shape, CLASSES).train(), torch.device(device), channels_last=True)
    plain = plain_step(model, "fp32", fused=None, foreach=True, weight_decay=1e-4)
    return {"hpctrain": ours, "plain torch": lambda: plain(batch.images, batch.targets)}


def main() -> int:
    """Count, print a line for each network; return 1 if one has more operators than allowed."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"), help="where to count")
    device, wrong = parser.parse_args().device, 0
    print("network      hpctrain, plain torch, ratio, at most; without views and allocations")
    for name, (network, shape, most) in CASES.items():
        with tempfile.TemporaryDirectory() as folder:
            steps = make_steps(Path(folder), network, shape, device)
            ours, plain = (count_step(step) for step in steps.values())
        ratio = ours.dispatched / plain.dispatched
        wrong += ratio > most
        few = f"{ours.computing:5} {plain.computing:5} {ours.computing / plain.computing:6.3f}"
        dispatched = f"{ours.dispatched:5} {plain.dispatched:5} {ratio:6.3f} {most:5.2f}"
        print(f"{name:12} {dispatched}   {few}")
    return min(wrong, 1)


if __name__ == "__main__":
    sys.exit(main())
