"""The parts that the rows of ``scripts/gpu_check`` share.

These are the device (a GPU, or any device in a rehearsal), packs of generated images, a network
ready for its first step, whole runs, and results.
"""

from __future__ import annotations

import itertools
import shlex
import sys
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

from hpctrain import launch
from hpctrain.cli import parse
from hpctrain.config import check_settings
from hpctrain.errors import UsageError, first_line
from scripts.benchmarks.harness import number_text, run_job

if TYPE_CHECKING:
    from hpctrain.data.loader import Batch
    from hpctrain.training.run import Run

T = TypeVar("T")
CLASSES = 5
OK, MISSED, FAILED, NOT_RUN = "ok", "MISSED", "FAILED", "not run"
_numbers = itertools.count()


@dataclass(frozen=True)
class Case:
    """Where a row measures. A rehearsal runs the same code with tiny sizes, on the CPU or a GPU."""

    folder: Path  # for packs and runs of this row alone
    rehearsal: str | None = None  # its device: "cpu" or "cuda"
    data: str | None = None  # pack of the flowers; without one the built-in set is downloaded

    @property
    def device(self) -> str:
        """The device, as --device and torch name it."""
        return self.rehearsal or "cuda"

    @property
    def on_gpu(self) -> bool:
        """Whether the device is a GPU, in the check itself or in a rehearsal."""
        return self.device == "cuda"

    def size(self, real: T, tiny: T) -> T:
        """Return `tiny` in a rehearsal, else `real`."""
        return tiny if self.rehearsal else real


def made_pack(
    case: Case, rows: int, shape: tuple[int, int, int], smooth: bool = False, test: int = 0
) -> str:
    """Write a pack of generated images of five classes; return its path.

    It has `rows` images, (H, W, C), to train on and `test` images to test on: noise, or patches of
    colour if `smooth`.
    """
    import numpy as np

    from hpctrain.packing.write import write_pack

    draw = np.random.default_rng(0)
    height, width, channels = shape
    grid = (4, 4) if smooth else (height, width)
    images = draw.integers(256, size=(rows + test, *grid, channels), dtype=np.uint8)
    if smooth:
        images = images.repeat(-(-height // 4), 1).repeat(-(-width // 4), 2)[:, :height, :width]
    labels = np.arange(rows + test) % CLASSES
    splits = {"train": (np.ascontiguousarray(images[:rows]), labels[:rows])}
    if test:
        splits["test"] = (np.ascontiguousarray(images[rows:]), labels[rows:])
    path = case.folder / f"{rows}-{height}x{width}x{channels}.h5"
    write_pack(path, splits, "abcde", {"source": "scripts/gpu_check"}, overwrite=True)
    return str(path)


def ready(case: Case, *flags: str, device: str = "") -> Run:
    """Set up ``train`` with these flags up to its first step, in this process alone.

    Raises UsageError for invalid flags.
    """
    from hpctrain.parallel.mpi import start_mpi
    from hpctrain.training.setup import set_up

    _, config = parse(["train", *flags, "--device", device or case.device, *_threads(case)])
    check_settings(config)
    return set_up(config, start_mpi())


def first_batches(job: Run, count: int = 1) -> list[list[Batch]]:
    """Return the batches of the first `count` steps, on the device of the network."""
    return list(itertools.islice(job.loader.epoch(0), count))


def train(case: Case, *flags: str, ranks: int = 1) -> list[dict[str, Any]]:
    """Train one whole run; return its records.

    Raises UsageError for invalid flags, RunError if the run fails.
    """
    from hpctrain.report.record import read_records

    name = f"run{next(_numbers)}"
    words = ["train", *flags, "--device", case.device, *_threads(case)]
    words += ["--runs-dir", str(case.folder), "--run", name, "--progress", "none"]
    parse(words)  # raises an error of one line
    launcher = [launch.mpirun(), "-n", str(ranks)] if ranks > 1 else []
    command = [*launcher, sys.executable, "-m", "hpctrain", *words]
    print(shlex.join(command), flush=True)
    run_job(command, f"hpctrain on {ranks} rank(s)", launch.environment(launch.UNBOUND))
    return list(read_records(case.folder / name))


def _threads(case: Case) -> list[str]:
    return ["--threads", "1"] if case.rehearsal else []


class Result(NamedTuple):
    """One line of the table: the subject, the value found and the target."""

    what: str
    verdict: str  # OK, MISSED, FAILED (an error ended it) or NOT_RUN
    value: str = ""
    target: str = ""
    n: int | None = None  # measurements behind the value
    remark: str = ""  # why it was not run, or a note
    number: float | None = None  # the unrounded value, if it is a number


def judged(
    what: str,
    number: float,
    unit: str = "",
    least: float | None = None,
    most: float | None = None,
    n: int | None = None,
    remark: str = "",
) -> Result:
    """Return the result for a number that must be in [`least`, `most`]; None = no bound."""
    good = (least is None or number >= least) and (most is None or number <= most)
    bounds = [f">= {_text(least)}"] if least is not None else []
    bounds += [f"<= {_text(most)}"] if most is not None else []
    value = f"{_text(number)} {unit}".strip()
    return Result(what, OK if good else MISSED, value, ", ".join(bounds), n, remark, number)


def shown(
    what: str, good: bool, value: str, target: str, n: int | None = None, remark: str = ""
) -> Result:
    """Return the result for a value that is `good` or not."""
    return Result(what, OK if good else MISSED, value, target, n, remark)


def not_run(what: str, reason: str) -> Result:
    """Return a result that only gives the reason why there is no value."""
    return Result(what, NOT_RUN, remark=reason)


def attempt(what: str, measure: Callable[..., Result], *given: Any, **named: Any) -> Result:
    """Return the result of `measure(what, ...)`.

    After a UsageError (not possible here) the verdict is NOT_RUN. After any other error it is
    FAILED, and the traceback is written to the log.
    """
    try:
        return measure(what, *given, **named)
    except UsageError as error:
        return not_run(what, str(error))
    except Exception as error:
        traceback.print_exc()
        return Result(what, FAILED, remark=f"{type(error).__name__}: {first_line(error)}")


def _text(number: float) -> str:
    """Format a number as in the other benchmarks; small numbers with an exponent."""
    if number and abs(number) < 0.01:
        return f"{number:.1e}"
    return f"{number:.4f}".rstrip("0").rstrip(".") if abs(number) < 10 else number_text(number)
