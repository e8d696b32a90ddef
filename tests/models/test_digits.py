"""The digits network: layers, shapes, and the linear layer that follows the memory format."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import hpctrain as hp


def test_layers_are_those_of_the_reference() -> None:
    model = hp.build("digits", (28, 28, 1), 10)
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
    scores = hp.build("digits", shape, 7)(torch.rand(3, channels, height, width))
    assert scores.shape == (3, 7)


def test_too_small_an_image_is_refused_with_numbers() -> None:
    with pytest.raises(hp.UsageError, match="5x5 pixels at least, not 7x4"):
        hp.build("digits", (4, 7, 1), 10)


def plain(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    """The layers as they are written down, on values in the order of their indices."""
    for number in (1, 2, 3):
        conv, norm = model.get_submodule(f"conv{number}"), model.get_submodule(f"bn{number}")
        x = torch.relu(norm(conv(x.contiguous())))
    return model.get_submodule("fc")(x.flatten(1).contiguous())


@pytest.mark.parametrize("memory", [torch.channels_last, torch.contiguous_format])
def test_the_linear_layer_takes_values_in_the_order_of_their_indices(memory) -> None:
    """Whatever their order in memory: outputs and gradients."""
    model = hp.build("digits", (17, 11, 3), 7).double().to(memory_format=memory)
    x = torch.rand(13, 3, 17, 11, dtype=torch.float64).to(memory_format=memory)
    results = []
    for function in (model, lambda x: plain(model, x)):
        leaf = x.clone(memory_format=torch.preserve_format).requires_grad_()
        model.zero_grad()
        y = function(leaf)
        y.square().sum().backward()
        results.append((y.detach(), leaf.grad, model.get_parameter("fc.weight").grad.clone()))
    for ours, expected in zip(*results, strict=True):
        torch.testing.assert_close(ours, expected, rtol=1e-10, atol=1e-10)
    assert not torch.allclose(results[0][0], plain(model, x.flip(2)))
