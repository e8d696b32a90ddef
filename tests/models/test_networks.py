"""The networks of the package: layers as written down here, independently of the modules."""

from __future__ import annotations

import pytest
import torch

import hpctrain as hp

DEPTHS = {"resnet18": (2, 2, 2, 2), "resnet34": (3, 4, 6, 3), "resnet50": (3, 4, 6, 3)}
PARAMETERS = {"resnet18": 11_689_512, "resnet34": 21_797_672, "resnet50": 25_557_032}


def batch_norm(name, channels):
    vectors = ("weight", "bias", "running_mean", "running_var")
    return [(f"{name}.{v}", (channels,)) for v in vectors] + [(f"{name}.num_batches_tracked", ())]


def torchvision_state(name, classes=1000):
    """Keys and shapes of torchvision's state dict, in its order, for RGB images."""
    wide = name == "resnet50"
    spec = [("conv1.weight", (64, 3, 7, 7)), *batch_norm("bn1", 64)]
    channels = 64
    for stage, depth in enumerate(DEPTHS[name]):
        width = 64 * 2**stage
        out = 4 * width if wide else width
        for block in range(depth):
            prefix = f"layer{stage + 1}.{block}"
            kernels = (
                [(width, channels, 1, 1), (width, width, 3, 3), (out, width, 1, 1)]
                if wide
                else [(width, channels, 3, 3), (width, width, 3, 3)]
            )
            for number, kernel in enumerate(kernels, 1):
                spec += [(f"{prefix}.conv{number}.weight", kernel)]
                spec += batch_norm(f"{prefix}.bn{number}", kernel[0])
            if channels != out:
                spec += [(f"{prefix}.downsample.0.weight", (out, channels, 1, 1))]
                spec += batch_norm(f"{prefix}.downsample.1", out)
            channels = out
    return [*spec, ("fc.weight", (classes, channels)), ("fc.bias", (classes,))]


def state_of(model):
    return [(name, tuple(value.shape)) for name, value in model.state_dict().items()]


@pytest.mark.parametrize("name", DEPTHS)
def test_names_and_shapes_are_torchvisions(name):
    with torch.device("meta"):
        model = hp.build(name, (100, 100, 3), 1000)
        other = hp.build(name, (100, 100, 3), 1000, small_stem=True)
    assert state_of(model) == torchvision_state(name)
    assert state_of(other) != torchvision_state(name)
    assert sum(p.numel() for p in model.parameters()) == PARAMETERS[name]


def test_bottlenecks_stride_in_the_3x3_convolution():
    with torch.device("meta"):
        block = hp.build("resnet50", (100, 100, 3), 5).get_submodule("layer2.0")
    strides = [block.get_submodule(f"conv{k}").stride for k in (1, 2, 3)]
    assert strides == [(1, 1), (2, 2), (1, 1)]


def test_small_stem_keeps_the_resolution():
    sizes = []
    for small_stem in (False, True):
        model = hp.build("resnet18", (32, 32, 1), 5, small_stem)
        model.get_submodule("layer1").register_forward_hook(
            lambda module, inputs, output: sizes.append(tuple(output.shape[2:]))
        )
        model.eval()(torch.zeros(2, 1, 32, 32))
    assert sizes == [(8, 8), (32, 32)]


def test_convolutions_start_by_he_fan_out():
    torch.manual_seed(0)
    model = hp.build("resnet18", (32, 32, 3), 5)
    weight = model.get_parameter("layer4.0.conv1.weight")  # 512 x 256 x 3 x 3
    assert weight.std().item() == pytest.approx((2 / (512 * 9)) ** 0.5, rel=0.01)
    assert model.get_parameter("layer4.1.bn2.weight").eq(1).all()


def test_a_residual_block_adds_its_input():
    block = hp.build("resnet50", (32, 32, 3), 5).get_submodule("layer1.1").eval()
    with torch.no_grad():
        block.get_parameter("bn3.weight").zero_()
        x = torch.rand(2, 256, 5, 5)
        torch.testing.assert_close(block(x), x)
        block.get_parameter("bn3.weight").fill_(1)
        assert not torch.allclose(block(x), x)


def test_layers_are_those_of_the_reference_with_weights_from_torchs_generator():
    torch.manual_seed(1)
    first = hp.build("digits", (28, 28, 1), 10)
    norm, conv = [(20,), (20,)], (20, 20, 3, 3)
    shapes = [(20, 1, 5, 5), *norm, conv, *norm, conv, *norm, (10, 20 * 24 * 24), (10,)]
    assert [tuple(p.shape) for p in first.parameters()] == shapes
    torch.manual_seed(1)
    for same in (True, False):
        other = hp.build("digits", (28, 28, 1), 10)
        assert (
            torch.equal(first.get_parameter("fc.weight"), other.get_parameter("fc.weight")) == same
        )


def test_too_small_an_image_is_refused_with_numbers():
    with pytest.raises(hp.UsageError, match="5x5 pixels at least, not 7x4"):
        hp.build("digits", (4, 7, 1), 10)
    assert hp.build("digits", (5, 5, 1), 7)(torch.rand(3, 1, 5, 5)).shape == (3, 7)


def plain(model, x):
    """The layers as they are written down, on values in the order of their indices."""
    for number in (1, 2, 3):
        conv, norm = model.get_submodule(f"conv{number}"), model.get_submodule(f"bn{number}")
        x = torch.relu(norm(conv(x.contiguous())))
    return model.get_submodule("fc")(x.flatten(1).contiguous())


@pytest.mark.parametrize("memory", [torch.channels_last, torch.contiguous_format])
def test_the_linear_layer_takes_values_in_the_order_of_their_indices(memory):
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
