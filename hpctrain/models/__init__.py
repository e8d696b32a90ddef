"""The networks: plain torch modules, built by name, and their weights in safetensors files."""

from hpctrain.models.build import NETWORKS, build, check_forward
from hpctrain.models.tensors import as_bytes
from hpctrain.models.weights import (
    describe_fresh_layer,
    load_init,
    load_weights,
    read_model,
    save_model,
    save_tensors,
    snapshot,
)

__all__ = [
    "NETWORKS",
    "as_bytes",
    "build",
    "check_forward",
    "describe_fresh_layer",
    "load_init",
    "load_weights",
    "read_model",
    "save_model",
    "save_tensors",
    "snapshot",
]
