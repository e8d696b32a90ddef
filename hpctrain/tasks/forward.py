"""Pass images through a network, and explain the errors of its code."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from hpctrain.config.functions import own_code_error
from hpctrain.errors import Failure
from hpctrain.models.build import check_is_tensor, failing_layer, mode_of
from hpctrain.text import counted
from hpctrain.torch_errors import is_of_device


def network_output(model: nn.Module, inputs: Tensor, precision: str) -> Tensor:
    """Return the model's output for inputs (n, C, H, W), never as bfloat16.

    With precision "bf16" it is computed under autocast; numerics.py describes the others.
    Raises OwnCodeError as `explain_network` does, and UsageError if the output is no tensor.
    """
    autocast = torch.autocast(inputs.device.type, torch.bfloat16, precision == "bf16")
    with explain_network(model, len(inputs), "failed"), autocast:
        output: Tensor = model(inputs)
    check_is_tensor(model, output)
    return output.float() if output.dtype == torch.bfloat16 else output


@contextmanager
def explain_network(
    model: nn.Module, n: int, failed: str, find_place: Callable[[], str] = str
) -> Iterator[None]:
    """Raise OwnCodeError for an error of a network that is not hpctrain's, in a pass of n images.

    It names file and line, and the layer, or else what `find_place` returns. Errors of memory, of a
    GPU and of a setting are raised as they are.
    """
    try:
        yield
    except (Failure, MemoryError):
        raise
    except (Exception, SystemExit) as error:
        network = getattr(model, "_orig_mod", model)  # torch.compile wraps it
        if type(network).__module__.startswith("hpctrain.") or is_of_device(error):
            raise
        text = f"the network {failed} in {mode_of(model)} mode on {counted(n, 'image')}"
        place = failing_layer(error, network) or find_place()
        raise own_code_error(text, error, place) from error
