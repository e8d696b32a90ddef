"""On a GPU: the gradient of a step against the same step in float64 on the CPU, and its batches.

The error is |g - g64| / |g64| over the whole gradient, after one step from the same weights on the
same images. The networks are smooth: softplus replaces ReLU, and average pooling max pooling. With
ReLU, a value near zero that rounds to the other side switches a whole path of the gradient, and the
error is arbitrary: on a CPU it is 8e-4 for float32 on the digits network and 9e-3 on ResNet-18, and
0.4 for bfloat16. For the smooth networks it is 4e-6 to 7e-6 and 5e-3 to 1.4e-2 there. The bounds
follow these with a margin for other orders of summation; TF32 has three bits more than bfloat16,
so an eighth of its error or more. Below the lower bound, the arithmetic is not the requested one.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import nn

import hpctrain as hp
from scripts.bench.steps import first_batches, ready
from tests.gpu.emulator import EMULATED
from tests.support.packs import make_pack

BOUNDS = {"fp32": (0.0, 2e-5), "tf32": (1e-4, 1e-2), "bf16": (1e-3, 5e-2)}
ROWS, STEPS = 32, 3


def smooth(module: nn.Module) -> nn.Module:
    """Replace ReLU and max pooling of a network in place by smooth layers; return the network."""
    for name, child in module.named_children():
        if isinstance(child, nn.ReLU):
            setattr(module, name, nn.Softplus())
        elif isinstance(child, nn.MaxPool2d):
            setattr(module, name, nn.AvgPool2d(child.kernel_size, child.stride, child.padding))
        else:
            smooth(child)
    return module


def digits(image_shape, classes):
    return smooth(hp.build("digits", image_shape, classes))


def resnet18(image_shape, classes):
    return smooth(hp.build("resnet18", image_shape, classes))


def digits_float64(image_shape, classes):
    return digits(image_shape, classes).double()


def resnet18_float64(image_shape, classes):
    return resnet18(image_shape, classes).double()


def gradient(pack, network, precision, device):
    """The gradient of one step on `device`, as float64 on the CPU."""
    flags = f"--data {pack} --model {__name__}:{network} --precision {precision} --device {device}"
    with ready(*flags.split(), "--batch-size", ROWS, "--normalize", "pack") as run:
        run.trainer.step(first_batches(run)[0], ROWS)
        return run.trainer.message.gradients.double().cpu()


@pytest.fixture(scope="module")
def packs(tmp_path_factory):
    """Patches of colour, which a gradient depends on smoothly, by network."""
    made, draw = {}, np.random.default_rng(0)
    for network, (side, channels) in {"digits": (28, 1), "resnet18": (64, 3)}.items():
        side = 32 if EMULATED else side
        images = draw.integers(256, size=(ROWS, 4, 4, channels), dtype=np.uint8)
        images = images.repeat(side // 4, 1).repeat(side // 4, 2)
        made[network] = tmp_path_factory.mktemp("packs") / f"{network}.h5"
        hp.write_pack(made[network], {"train": (images, np.arange(ROWS) % 5)}, "abcde")
    return made


def error(packs, network, precision, device):
    pack = packs[network]
    exact = gradient(pack, f"{network}_float64", "fp32", "cpu")
    return float((gradient(pack, network, precision, device) - exact).norm() / exact.norm())


@pytest.mark.gpu
@pytest.mark.parametrize("precision", BOUNDS)
@pytest.mark.parametrize("network", ["digits", "resnet18"])
def test_gradients_are_as_exact_as_their_precision(packs, network, precision, record_property):
    if EMULATED and precision == "tf32":
        pytest.skip("only a real GPU computes in TF32")
    found = error(packs, network, precision, "cuda")
    record_property("error", found)
    least, most = BOUNDS[precision]
    assert least <= found <= most


def test_other_arithmetic_than_asked_for_is_out_of_bounds(packs):
    """On a CPU, bf16 in place of fp32, and fp32 in place of bf16."""
    wide, narrow = (error(packs, "digits", precision, "cpu") for precision in ("fp32", "bf16"))
    assert wide < BOUNDS["tf32"][0] < BOUNDS["bf16"][0] < narrow < BOUNDS["bf16"][1]
    assert wide < BOUNDS["fp32"][1] < narrow


@pytest.mark.gpu
@pytest.mark.parametrize("flags", ["", "--flip --shift 3 --normalize pack"])
def test_batches_have_the_bits_of_those_on_the_cpu(tmp_path, flags):
    pack = make_pack(tmp_path / "pack.h5", {"train": 101}, (40, 36, 3))

    def tensors(device, *more):
        words = f"--data {pack} --model resnet18 --batch-size 32 --device {device} {flags}"
        with ready(*words.split(), *more) as run:
            batches = [batch for step in first_batches(run, STEPS) for batch in step]
        return [t.cpu() for batch in batches for t in (batch.images, batch.targets)]

    there, other = tensors("cpu"), tensors("cpu", "--seed", "1")
    assert all(map(torch.equal, tensors("cuda"), there))
    assert not any(map(torch.equal, there, other))
