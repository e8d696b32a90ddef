"""What the user asks for: one flat frozen dataclass per subcommand.

A dataclass here is the only source of a subcommand's flags, TOML keys, defaults and help
(``cli.py`` builds the parser from it). Nothing here depends on ranks, the machine or the
data: ``plan.py`` resolves that. A default of None means "decided by the plan"; the help says how.
"""

from hpctrain.config.optimizer import validate_optimizer
from hpctrain.config.option import as_words, command_line, to_toml, toml_value
from hpctrain.config.others import (
    BenchConfig,
    CompareConfig,
    DoctorConfig,
    EvaluateConfig,
    NetworkConfig,
    PackConfig,
    PlotConfig,
    PredictConfig,
    StopConfig,
    SweepConfig,
    WatchConfig,
)
from hpctrain.config.ranges import (
    Interval,
    byte_count,
    check_ranges,
    duration,
    segments,
    worker_loads,
)
from hpctrain.config.train import DEFAULT_LEARNING_RATES, PRECISIONS, Config

__all__ = [
    "DEFAULT_LEARNING_RATES",
    "PRECISIONS",
    "BenchConfig",
    "CompareConfig",
    "Config",
    "DoctorConfig",
    "EvaluateConfig",
    "Interval",
    "NetworkConfig",
    "PackConfig",
    "PlotConfig",
    "PredictConfig",
    "StopConfig",
    "SweepConfig",
    "WatchConfig",
    "as_words",
    "byte_count",
    "check_ranges",
    "command_line",
    "duration",
    "segments",
    "to_toml",
    "toml_value",
    "validate_optimizer",
    "worker_loads",
]
