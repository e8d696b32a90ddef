"""Settings: one flat frozen dataclass per subcommand.

A dataclass here is the only source of a subcommand's flags, TOML keys, defaults, help and checks
(``option.py``). Settings do not depend on the ranks, the machine or the data; ``plan.py`` resolves
them. A default of None means "decided by the plan"; the help says how.
"""

from hpctrain.config.commands import (
    CompareConfig,
    EvaluateConfig,
    ExportConfig,
    NetworkConfig,
    PackConfig,
    PlotConfig,
    PredictConfig,
    StopConfig,
    SuperviseConfig,
    SweepConfig,
    WatchConfig,
)
from hpctrain.config.functions import require_trust
from hpctrain.config.option import Settings, from_table, load_toml, parse_settings, to_toml
from hpctrain.config.train import DEFAULT_LEARNING_RATES, Config, optimizer_and_rate
from hpctrain.config.values import ClassWeights, Every, Fold, Patterns, Shares, Size
