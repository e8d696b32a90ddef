"""The networks: plain torch modules, built by name, and their weights in safetensors files."""

from hpctrain.models.build import (
    build,
    check_forward,
    check_types,
    evaluating,
    input_like,
)
from hpctrain.models.init import InitialWeights, load_init
from hpctrain.models.library import own_input
from hpctrain.models.weights import as_bytes, load_weights, read_model, save_model, snapshot
