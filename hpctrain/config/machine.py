"""Settings of the subcommands that examine a machine: doctor and bench."""

from __future__ import annotations

from dataclasses import dataclass

from hpctrain.config.data import DATA_DIR
from hpctrain.config.option import AT_LEAST_1, option


@dataclass(frozen=True)
class DoctorConfig:
    """Settings of ``hpctrain doctor``, facts about this machine with a verdict each: none."""


@dataclass(frozen=True)
class BenchConfig:
    """Settings of ``hpctrain bench``: training, reading, Allreduce."""

    case: str = option(
        "digits",
        "measure training (digits, resnet50), reading (data) or Allreduce (allreduce)",
        "Case",
        choices=("digits", "resnet50", "data", "allreduce"),
        positional=True,
    )
    data: str | None = option(
        None, "read this pack of pixels; default: digits, or random images of 100x100x3", "Case"
    )
    data_dir: str = option(*DATA_DIR, "Case")
    ranks: int = option(2, "start each job with N ranks of 1 CPU thread each", "Case", AT_LEAST_1)
    rounds: int = option(
        3, "run all contestants N times in turn, and report medians", "Case", AT_LEAST_1
    )
