"""The networks: plain torch modules, built by name, and their weights in safetensors files."""

from hpctrain.models.build import (
    NETWORKS,
    build,
    check_forward,
    check_names,
    checked_output,
    evaluating,
    own_input,
)
from hpctrain.models.init import InitialWeights, load_init
from hpctrain.models.weights import (
    as_bytes,
    load_weights,
    read_model,
    save_model,
    snapshot,
)

__all__ = [
    "NETWORKS",
    "InitialWeights",
    "as_bytes",
    "build",
    "check_forward",
    "check_names",
    "checked_output",
    "evaluating",
    "load_init",
    "load_weights",
    "own_input",
    "read_model",
    "save_model",
    "snapshot",
]
