"""Settings of the subcommands that examine a machine: doctor, bench."""

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
    """Settings of ``hpctrain bench``: hpctrain against the communication-free limit and DDP."""

    case: str = option(
        "digits",
        "measure training (digits, resnet50), reading (data) or allreduce; or model many ranks"
        " (scale)",
        "Case",
        choices=("digits", "resnet50", "data", "allreduce", "scale"),
        positional=True,
    )
    data: str | None = option(
        None, "read this pack of pixels; default: digits, or made images of 100x100x3", "Case"
    )
    data_dir: str = option(*DATA_DIR, "Case")
    ranks: int = option(
        2,
        "ranks of each job, with 1 CPU thread each; scale: with an even share of the cores",
        "Case",
        AT_LEAST_1,
    )
    rounds: int = option(
        3, "rounds, in each of which all contestants run once; medians count", "Case", AT_LEAST_1
    )
    step_time: float | None = option(
        None,
        "assume steps of X seconds on one rank, without communication; default: measured with"
        " ResNet-50",
        "Scale",
        POSITIVE,
    )
    spread: float | None = option(
        None,
        "assume this standard deviation of the step time, in percent; default: measured, or 1 with"
        " --step-time",
        "Scale",
        Bounds(0, 100, "[]"),
    )
    parameters: int | None = option(
        None, "assume a network of N parameters; default: those of ResNet-50", "Scale", AT_LEAST_1
    )
    latency: float | None = option(
        None,
        "assume X microseconds for a short message; default: measured between --ranks ranks",
        "Scale",
        AT_LEAST_0,
    )
    bandwidth: float | None = option(
        None,
        "assume that a rank sends X GB/s (10^9 bytes); default: measured between --ranks ranks",
        "Scale",
        POSITIVE,
    )
    plot: str | None = option(None, "plot efficiency by ranks to this .png, .svg or .pdf", "Scale")


def check_bench(settings: BenchConfig) -> None:
    """Raise UsageError if settings of the case "scale" contradict each other, or have another."""
    if settings.case != "scale":
        for field in dataclasses.fields(settings):
            if field.metadata["group"] == "Scale" and getattr(settings, field.name) is not None:
                raise UsageError(f"{flag_of(field.name)} is for bench scale, not {settings.case}")
    elif settings.data is not None:
        raise UsageError(f"--data {settings.data}: bench scale reads no data")
    elif settings.parameters is not None and settings.step_time is None:
        raise UsageError(
            f"--parameters {settings.parameters}: a step of ResNet-50 would be measured; give the"
            " --step-time of your network, too"
        )
    elif settings.ranks == 1 and None in (settings.latency, settings.bandwidth):
        raise UsageError("--ranks 1 sends nothing: give --latency and --bandwidth, or more ranks")
