"""Random numbers of libraries that take no generator: `Drawing` passes one to torch for them.

Transforms of Kornia and torchvision draw from torch's process-wide generator. The network's dropout
draws from it too, in another thread, so that runs would depend on timing. In the context of a
`Drawing`, random functions of torch that are called in this thread draw from its own generators
instead (one for each device that asks), and no other generator changes.

Each call draws from a stream of its own, with a seed of the key and the number of calls before.
What an element gets depends on the elements before it alone, where torch draws one after another,
as it does on CPUs: the first sample has the same numbers in any batch.

A mode of torch does not see what its functions call inside. Functions that draw there, and take no
generator, are refused by name (`REFUSED`); so are operators that are called as torch.ops.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload, OpOverloadPacket
from torch.overrides import TorchFunctionMode

from hpctrain.data.partition import random_key

#: Functions of torch, methods of Tensor, and functions of torch.nn.init that take a generator.
DRAWN = {
    *("rand", "randn", "randint", "randperm", "normal", "bernoulli", "multinomial", "poisson"),
    *("binomial", "_standard_gamma", "_sample_dirichlet"),
    *("uniform_", "normal_", "bernoulli_", "random_", "exponential_", "cauchy_", "geometric_"),
    *("log_normal_", "kaiming_uniform_"),
}
#: Those that older versions of torch give no generator, as the method that fills an empty tensor.
FILLED_BY: Mapping[str, Callable[..., Tensor]] = {
    "rand_like": Tensor.uniform_,
    "randn_like": Tensor.normal_,
    "randint_like": Tensor.random_,
}
#: Those that draw, or may draw, where no generator can be passed to them.
REFUSED = {
    *("dropout", "dropout_", "dropout1d", "dropout2d", "dropout3d", "native_dropout"),
    *("alpha_dropout", "alpha_dropout_", "feature_dropout", "feature_dropout_"),
    *("feature_alpha_dropout", "feature_alpha_dropout_", "_fused_dropout"),
    *("_cudnn_init_dropout_state", "_fill_mem_eff_dropout_mask_"),
    *("rrelu", "rrelu_", "rrelu_with_noise", "rrelu_with_noise_", "gumbel_softmax"),
    *("fractional_max_pool2d", "fractional_max_pool2d_with_indices"),
    *("fractional_max_pool3d", "fractional_max_pool3d_with_indices"),
    *("scaled_dot_product_attention", "multi_head_attention_forward", "_fused_sdp_choice"),
    *("_scaled_dot_product_attention_math", "_scaled_dot_product_attention_math_for_mps"),
    *("_scaled_dot_product_cudnn_attention", "_scaled_dot_product_efficient_attention"),
    *("_scaled_dot_product_flash_attention", "_scaled_dot_product_flash_attention_for_cpu"),
    *("_cudnn_attention_forward", "_efficient_attention_forward", "_flash_attention_forward"),
    *("_triton_scaled_dot_attention", "_nested_tensor_softmax_with_shape"),
    "_flash_attention_forward_no_dropout_inplace",
    *("lstm", "gru", "rnn_relu", "rnn_tanh", "_cudnn_rnn", "miopen_rnn", "_lstm_mps"),
    *("svd_lowrank", "pca_lowrank", "get_approximate_basis", "lobpcg"),
}
OPTIONS = ("dtype", "layout", "device", "pin_memory", "memory_format", "requires_grad")


class DrawError(RuntimeError):
    """A function draws random numbers where it cannot be given a generator."""


class Drawing(TorchFunctionMode):
    """In this context, random functions of torch draw from generators that `key` seeds.

    It holds for the thread that entered it. Raises DrawError, in the context, for functions that
    draw from another generator.
    """

    def __init__(self, key: int) -> None:
        super().__init__()
        self._generators: dict[torch.device, torch.Generator] = {}
        self.restart(key)

    def restart(self, key: int) -> None:
        """Begin anew, with another key."""
        self._key = key
        self._calls = 0

    def __torch_function__(
        self,
        function: Any,
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Call a function of torch, with a generator if it draws."""
        kwargs = kwargs or {}
        name = getattr(function, "__name__", "")
        if isinstance(function, OpOverload | OpOverloadPacket):
            if may_draw(function):
                raise DrawError(f"torch.ops.{function} draws random numbers: call torch.{name}")
        elif name in FILLED_BY:
            return self._draw_like(name, *args, **kwargs)
        elif name in DRAWN:
            return function(*args, **self._with_generator(name, args, kwargs))
        elif name in REFUSED:
            raise DrawError(f"{name} draws random numbers and takes no generator")
        return function(*args, **kwargs)

    def _with_generator(
        self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> dict[str, Any]:
        """Return the keyword arguments of a call with the generator of its device."""
        given = [*args, *kwargs.values()]
        if any(isinstance(value, torch.Generator) for value in given):
            raise DrawError(f"{name} is given a generator of its own")
        tensors = [value for value in given if isinstance(value, Tensor)]
        device = kwargs.get("device")
        if device is None and tensors:
            device = tensors[0].device
        elif device is None:
            device = torch.get_default_device()
        return {**kwargs, "generator": self._generator(torch.device(device))}

    def _draw_like(self, name: str, like: Tensor, *limits: Any, **kwargs: Any) -> Tensor:
        """Return a tensor like another with random numbers: rand_like, randn_like, randint_like.

        `limits`: of integers, the largest but one, or the smallest and that.
        """
        options = {option: kwargs.pop(option) for option in OPTIONS if option in kwargs}
        requires_grad = options.pop("requires_grad", False)
        ends = [*limits]
        ends += [kwargs.pop(end) for end in ("low", "high") if end in kwargs]
        if name == "randint_like" and len(ends) == 1:
            ends.insert(0, 0)
        empty = torch.empty_like(like, **options)
        drawn = FILLED_BY[name](empty, *ends, **self._with_generator(name, (empty,), kwargs))
        return drawn.requires_grad_(requires_grad)

    def _generator(self, device: torch.device) -> torch.Generator:
        """Return the generator of a device, at the beginning of the next stream."""
        if device not in self._generators:
            self._generators[device] = torch.Generator(device)
        seed = random_key(self._key, self._calls)
        self._calls += 1
        return self._generators[device].manual_seed(seed)


def may_draw(operator: OpOverload | OpOverloadPacket) -> bool:
    """Whether the dispatcher knows this operator, or an overload of it, to draw."""
    overloads: list[Any] = [operator]
    if isinstance(operator, OpOverloadPacket):
        overloads = [getattr(operator, overload) for overload in operator.overloads()]
    return any(torch.Tag.nondeterministic_seeded in overload.tags for overload in overloads)
