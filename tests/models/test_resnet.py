"""ResNets against torchvision's names and shapes, written down independently of the modules."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import hpctrain as hp
from tests.support.api import check_forward

DEPTHS = {"resnet18": (2, 2, 2, 2), "resnet34": (3, 4, 6, 3), "resnet50": (3, 4, 6, 3)}
PARAMETERS = {
    "resnet18": (62, 20, 11_689_512),
    "resnet34": (110, 36, 21_797_672),
    "resnet50": (161, 53, 25_557_032),
}

Spec = list[tuple[str, tuple[int, ...]]]


def batch_norm(name: str, channels: int) -> Spec:
    vectors = ("weight", "bias", "running_mean", "running_var")
    return [(f"{name}.{v}", (channels,)) for v in vectors] + [(f"{name}.num_batches_tracked", ())]


def torchvision_state(name: str, classes: int = 1000) -> Spec:
    """Keys and shapes of torchvision's state dict, in its order, for RGB images."""
    wide = name == "resnet50"
    spec: Spec = [("conv1.weight", (64, 3, 7, 7)), *batch_norm("bn1", 64)]
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


def state_of(model: nn.Module) -> Spec:
    return [(name, tuple(value.shape)) for name, value in model.state_dict().items()]


@pytest.mark.parametrize("name", DEPTHS)
def test_names_and_shapes_are_torchvisions(name: str) -> None:
    with torch.device("meta"):
        model = hp.build(name, (100, 100, 3), 1000)
        other = hp.build(name, (100, 100, 3), 1000, small_stem=True)
    assert state_of(model) == torchvision_state(name)
    assert state_of(other) != torchvision_state(name)
    norms = sum(isinstance(module, nn.BatchNorm2d) for module in model.modules())
    numbers = sum(p.numel() for p in model.parameters())
    assert (len(list(model.parameters())), norms, numbers) == PARAMETERS[name]


def test_bottlenecks_stride_in_the_3x3_convolution() -> None:
    with torch.device("meta"):
        block = hp.build("resnet50", (100, 100, 3), 5).get_submodule("layer2.0")
    strides = [block.get_submodule(f"conv{k}").stride for k in (1, 2, 3)]
    assert strides == [(1, 1), (2, 2), (1, 1)]


@pytest.mark.parametrize("small_stem", [False, True])
@pytest.mark.parametrize("name", ["resnet18", "resnet50"])
def test_forward_at_100_and_32_pixels(name: str, small_stem: bool) -> None:
    for shape in ((100, 100, 3), (32, 32, 1)):
        check_forward(hp.build(name, shape, 5, small_stem), shape, (5,))


def test_small_stem_keeps_the_resolution() -> None:
    sizes = []
    for small_stem in (False, True):
        model = hp.build("resnet18", (32, 32, 1), 5, small_stem)
        model.get_submodule("layer1").register_forward_hook(
            lambda module, inputs, output: sizes.append(tuple(output.shape[2:]))
        )
        model.eval()(torch.zeros(2, 1, 32, 32))
    assert sizes == [(8, 8), (32, 32)]


def test_convolutions_start_by_he_fan_out() -> None:
    torch.manual_seed(0)
    model = hp.build("resnet18", (32, 32, 3), 5)
    weight = model.get_parameter("layer4.0.conv1.weight")  # 512 x 256 x 3 x 3
    assert weight.std().item() == pytest.approx((2 / (512 * 9)) ** 0.5, rel=0.01)
    assert model.get_parameter("layer4.1.bn2.weight").eq(1).all()


def test_a_residual_block_adds_its_input() -> None:
    block = hp.build("resnet50", (32, 32, 3), 5).get_submodule("layer1.1").eval()
    with torch.no_grad():
        block.get_parameter("bn3.weight").zero_()
        x = torch.rand(2, 256, 5, 5)
        torch.testing.assert_close(block(x), x)
        block.get_parameter("bn3.weight").fill_(1)
        assert not torch.allclose(block(x), x)
