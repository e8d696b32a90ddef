"""Who is measured by ``hpctrain bench``, and what came out: medians, ratios, targets, the machine.

A ratio is one median over another, of the same format (precision and memory layout) unless the
column says otherwise.
"""

from __future__ import annotations

import os
import platform
import statistics
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING, NamedTuple

from hpctrain import __version__
from hpctrain.hardware import processor_name

if TYPE_CHECKING:
    from rich.table import Table

START_RANKS = 4


@dataclass(frozen=True)
class Contestant:
    """One line of the table."""

    kind: str  # hpctrain, limit, ddp, loader or start
    precision: str = "fp32"
    channels_last: bool = False
    workers: int = 0  # of the DataLoader

    @property
    def format(self) -> str:
        """Precision and memory layout."""
        return f"{self.precision} {'NHWC' if self.channels_last else 'NCHW'}"

    @property
    def name(self) -> str:
        """What the reader sees."""
        workers = f", {self.workers} workers" if self.workers else ""
        return {
            "hpctrain": "hpctrain, all included",
            "limit": "limit: no loading, no communication",
            "ddp": "DDP, no loading",
            "loader": f"DDP as written, DataLoader{workers}",
            "start": f"mpirun -n {START_RANKS} to the first step",
        }[self.kind]

    @property
    def unit(self) -> str:
        """Of its figures."""
        return "s" if self.kind == "start" else "images/s"


FORMATS = (("fp32", False), ("fp32", True), ("bf16", True))
DEFAULT, BF16 = Contestant("hpctrain", "fp32", True), Contestant("hpctrain", "bf16", True)
WRITTEN = Contestant("loader")
START = Contestant("start", "fp32", True)
TRAINERS = (
    *(Contestant(kind, *form) for kind in ("hpctrain", "limit", "ddp") for form in FORMATS),
    WRITTEN,
    Contestant("loader", workers=2),
)

Results = dict[Contestant, list[float]]  # by round, in the contestant's unit


class Target(NamedTuple):
    """`who` is to reach at least `factor` times `against`."""

    who: Contestant
    factor: float
    against: Contestant


def targets(case: str) -> list[Target]:
    """What hpctrain is to reach on this case."""

    def same_format(kind: str, factor: float) -> list[Target]:
        return [
            Target(Contestant("hpctrain", *form), factor, Contestant(kind, *form))
            for form in FORMATS
        ]

    if case == "digits":
        return [Target(DEFAULT, 1.5, WRITTEN), *same_format("limit", 0.95)]
    written = [Target(DEFAULT, 1.15, WRITTEN), Target(BF16, 1.9, WRITTEN)]
    return [*written, *same_format("ddp", 1.0), *same_format("limit", 0.88)]


SLOWEST_START = 6.0  # seconds, on two cores


def ratio(results: Results, who: Contestant, against: Contestant) -> float | None:
    """Median over median; None where one was not measured."""
    if not results.get(who) or not results.get(against):
        return None
    return statistics.median(results[who]) / statistics.median(results[against])


def table(case: str, results: Results) -> Table:
    """All contestants: median, range, and ratios to DDP as written, to DDP and to the limit."""
    from rich.table import Table

    rounds = max(map(len, results.values()), default=0)
    made = Table(title=f"{case}, 2 ranks of 1 thread, medians over {rounds} round(s)")
    made.add_column("contestant", no_wrap=True)
    made.add_column("format", no_wrap=True)
    for heading in ("images/s", "min - max", "/ as written", "/ DDP", "/ limit"):
        made.add_column(heading, justify="right", no_wrap=True)
    before = None
    for who, values in results.items():
        if who.kind != before:
            made.add_section()
        made.add_row(*row(results, who, values))
        before = who.kind
    return made


def row(results: Results, who: Contestant, values: list[float]) -> list[str]:
    """One line of the table, as text."""
    unit = " s" if who.kind == "start" else ""
    spread = f"{number_text(min(values))} - {number_text(max(values))}"
    cells = [who.name, who.format, number_text(statistics.median(values)) + unit, spread]
    for against in (
        WRITTEN,
        Contestant("ddp", who.precision, who.channels_last),
        Contestant("limit", who.precision, who.channels_last),
    ):
        found = ratio(results, who, against) if who.kind != "start" else None
        cells.append("" if found is None or who == against else f"{found:.3f}")
    return cells


def target_lines(case: str, results: Results) -> list[str]:
    """A line per target: what is wanted, what was reached."""
    lines = []
    for who, factor, against in targets(case):
        found = ratio(results, who, against)
        if found is not None:
            wanted = f"hpctrain {who.format} >= {factor:.2f} x {against.name}"
            lines.append(f"{'reached' if found >= factor else 'MISSED '} {found:.3f}  {wanted}")
    if results.get(START):
        seconds = statistics.median(results[START])
        verdict = "reached" if seconds < SLOWEST_START else "MISSED "
        lines.append(f"{verdict} {seconds:.2f}   {START.name} < {SLOWEST_START:.0f} s on 2 cores")
    if any(len(values) < 3 for values in results.values()):
        lines.append("fewer than 3 rounds: nothing to quote")
    return lines


def number_text(number: float) -> str:
    """Whole numbers from 100 on, below that one or two decimals."""
    decimals = 0 if number >= 100 else 1 if number >= 10 else 2
    return f"{number:,.{decimals}f}"


def machine_lines() -> list[str]:
    """Processor, cores, load and versions: a figure without them means little."""
    versions = ", ".join(f"{name} {_version(name)}" for name in ("torch", "mpi4py", "h5py"))
    load = os.getloadavg()[0]
    return [
        f"{processor_name()}, {len(os.sched_getaffinity(0))} cores allowed, load {load:.1f} before",
        f"hpctrain {__version__}, Python {platform.python_version()}, {versions}",
    ]


def _version(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return "?"
