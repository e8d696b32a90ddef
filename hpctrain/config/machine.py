"""Settings of the subcommands that examine a machine: doctor and bench."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

from hpctrain.config.data import DATA_DIR
from hpctrain.config.option import (
    AT_LEAST_0,
    AT_LEAST_1,
    POSITIVE,
    Bounds,
    flag_of,
    option,
)
from hpctrain.errors import UsageError


@dataclass(frozen=True)
class DoctorConfig:
    """Settings of ``hpctrain doctor``: facts about this machine, each with a verdict."""

    mib: int = option(64, "largest message of the bandwidth test, in MiB", "Test", AT_LEAST_1)


@dataclass(frozen=True)
class BenchConfig:
    """Settings of ``hpctrain bench``: training, reading, Allreduce, and a scaling model."""

    case: str = option(
        "digits",
        "measure training (digits, resnet50), reading (data) or Allreduce (allreduce), or estimate"
        " the efficiency on many ranks (scale)",
        "Case",
        choices=("digits", "resnet50", "data", "allreduce", "scale"),
        positional=True,
    )
    data: str | None = option(
        None, "read this pack of pixels; default: digits, or random images of 100x100x3", "Case"
    )
    data_dir: str = option(*DATA_DIR, "Case")
    ranks: int = option(
        2,
        "start each job with N ranks of 1 CPU thread each; scale: the cores are divided evenly",
        "Case",
        AT_LEAST_1,
    )
    rounds: int = option(
        3, "run all contestants N times in turn, and report medians", "Case", AT_LEAST_1
    )
    step_time: float | None = option(
        None,
        "assume that a step takes X seconds on one rank, without communication; default: measured"
        " with ResNet-50",
        "Scale",
        POSITIVE,
    )
    spread: float | None = option(
        None,
        "assume a standard deviation of X percent of the step time; default: measured, or 1 with"
        " --step-time",
        "Scale",
        Bounds(0, 100, "[]"),
    )
    parameters: int | None = option(
        None,
        "assume a network of N parameters, with --step-time; default: ResNet-50",
        "Scale",
        AT_LEAST_1,
    )
    latency: float | None = option(
        None,
        "assume a latency of X microseconds per message; default: measured between --ranks ranks",
        "Scale",
        AT_LEAST_0,
    )
    bandwidth: float | None = option(
        None,
        "assume a bandwidth of X GB/s (10^9 bytes) per rank; default: measured between --ranks"
        " ranks",
        "Scale",
        POSITIVE,
    )
    plot: str | None = option(
        None, "plot the efficiency by number of ranks to this .png, .svg or .pdf file", "Scale"
    )


def check_bench(settings: BenchConfig) -> None:
    """Raise UsageError if settings of "scale" contradict each other or the case is another one."""
    if settings.case != "scale":
        for field in dataclasses.fields(settings):
            if field.metadata["group"] == "Scale" and getattr(settings, field.name) is not None:
                raise UsageError(f"{flag_of(field.name)} is for bench scale, not {settings.case}")
    elif settings.data is not None:
        raise UsageError(f"--data {settings.data}: bench scale reads no data")
    elif settings.parameters is not None and settings.step_time is None:
        raise UsageError(
            f"--parameters {settings.parameters} needs --step-time: only ResNet-50 can be measured"
        )
    elif settings.ranks == 1 and None in (settings.latency, settings.bandwidth):
        raise UsageError(
            "--ranks 1 sends no messages: give --latency and --bandwidth, or more ranks"
        )
