"""Settings: one flat frozen dataclass per subcommand.

A dataclass here is the only source of a subcommand's flags, TOML keys, defaults, help and checks
(``parse.py`` builds the parser from it). Settings do not depend on the ranks, the machine or the
data; ``plan.py`` resolves them. A default of None means "decided by the plan"; the help says how.
"""

from hpctrain.config.imports import own_functions, require_trust
from hpctrain.config.inference import (
    EvaluateConfig,
    ExportConfig,
    NetworkConfig,
    PredictConfig,
)
from hpctrain.config.interval import Interval, checkpoint_interval, validation_interval
from hpctrain.config.optimizer import optimizer_and_rate
from hpctrain.config.option import (
    byte_count,
    duration,
    fold_number,
    image_size,
    split_shares,
    to_toml,
    toml_value,
    worker_loads,
)
from hpctrain.config.others import (
    CompareConfig,
    DoctorConfig,
    PackConfig,
    PlotConfig,
    StopConfig,
    SuperviseConfig,
    SweepConfig,
    WatchConfig,
)
from hpctrain.config.parse import (
    check_settings,
    load_toml,
    parse_settings,
    read_table,
)
from hpctrain.config.patterns import learning_rate_factors, patterns
from hpctrain.config.train import PRECISIONS, Config
