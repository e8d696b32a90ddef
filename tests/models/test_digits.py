"""The digits network: layers, shapes, and the linear layer that follows the memory format."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from hpctrain.errors import UsageError
from hpctrain.models.small import digits, flat_linear


def test_layers_are_those_of_the_reference() -> None:
    model = digits((28, 28, 1), 10)
    assert {name: tuple(p.shape) for name, p in model.named_parameters()} == {
        "conv1.weight": (20, 1, 5, 5),
        "bn1.weight": (20,),
        "bn1.bias": (20,),
        "conv2.weight": (20, 20, 3, 3),
        "bn2.weight": (20,),
        "bn2.bias": (20,),
        "conv3.weight": (20, 20, 3, 3),
        "bn3.weight": (20,),
        "bn3.bias": (20,),
        "fc.weight": (10, 20 * 24 * 24),
        "fc.bias": (10,),
    }
    assert sum(isinstance(m, nn.BatchNorm2d) for m in model.modules()) == 3


@pytest.mark.parametrize("shape", [(28, 28, 1), (17, 11, 3), (5, 5, 1)])
def test_forward_for_any_image_shape(shape: tuple[int, int, int]) -> None:
    height, width, channels = shape
    scores = digits(shape, 7)(torch.rand(3, channels, height, width))
    assert scores.shape == (3, 7)


def test_too_small_an_image_is_refused_with_numbers() -> None:
    with pytest.raises(UsageError, match="at least 5x5 pixels; these are 7x4"):
        digits((4, 7, 1), 10)


@pytest.mark.parametrize("memory", [torch.channels_last, torch.contiguous_format])
def test_flat_linear_is_flatten_and_linear(memory: torch.memory_format) -> None:
    layer = nn.Linear(7 * 5 * 3, 11).double()
    x = torch.rand(13, 7, 5, 3, dtype=torch.float64).to(memory_format=memory)
    results = []
    for function in (flat_linear, lambda x, layer: layer(x.flatten(1))):
        leaf = x.clone(memory_format=torch.preserve_format).requires_grad_()
        layer.zero_grad()
        y = function(leaf, layer)
        y.square().sum().backward()
        assert leaf.grad is not None and layer.weight.grad is not None
        results.append((y.detach(), leaf.grad, layer.weight.grad.clone()))
    for ours, plain in zip(*results, strict=True):
        torch.testing.assert_close(ours, plain, rtol=1e-12, atol=1e-12)
    wrong = layer(x.permute(0, 2, 3, 1).flatten(1))
    assert not torch.allclose(results[0][0], wrong)
