"""The pipeline from stored images to inputs and targets: its stages, their order and their keys."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import hpctrain as hp
from tests.support.api import Augmentation, task_class

KEY = 5
FLIPS_AND_SHIFTS = Augmentation(flip=True, shift=2)
SCALING = ((0.1, 0.2, 0.3), (0.5, 0.6, 0.7))


def images(n=31, shape=(7, 5, 3)):
    generator = torch.Generator().manual_seed(11)
    return torch.randint(1, 256, (n, *shape), generator=generator).to(torch.uint8)


def moved(before):
    """The images after flips and shifts, (n, C, H, W) in [0, 1]."""
    return hp.Pipeline(augmentation=FLIPS_AND_SHIFTS).inputs(before, KEY)


def test_each_stage_is_given_what_the_one_before_made_and_the_key_of_the_batch():
    seen = []

    def transform(inputs, key):
        seen.append((inputs.clone(), key))
        return inputs + 1

    def stage(inputs, targets, key):
        seen.append((inputs.clone(), key))
        return inputs * 2, targets + 1

    pipeline = hp.Pipeline(augmentation=FLIPS_AND_SHIFTS, transform=transform, stage=stage)
    inputs, targets = pipeline.make(images(), torch.arange(31), KEY)
    assert torch.equal(seen[0][0], moved(images()))
    assert torch.equal(seen[1][0], moved(images()) + 1)
    assert torch.equal(inputs, (moved(images()) + 1) * 2)
    assert targets.tolist() == list(range(1, 32))
    assert [key for _, key in seen] == [KEY, KEY]
    assert torch.equal(pipeline.inputs(images(), KEY), moved(images()) + 1)


@pytest.mark.parametrize("channels_last", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_a_transform_is_given_values_in_0_to_1_and_its_result_is_normalized(dtype, channels_last):
    seen = []

    def darken(inputs, key):
        seen.append(inputs.clone())
        return inputs * 0.5

    settings = {"dtype": dtype, "channels_last": channels_last, "augmentation": FLIPS_AND_SHIFTS}
    result = hp.Pipeline(**settings, normalization=SCALING, transform=darken).inputs(images(), KEY)
    unit = hp.Pipeline(**settings).inputs(images(), KEY)
    assert torch.equal(seen[0], unit) and unit.max() == 1
    mean, std = (torch.tensor(values).double()[:, None, None] for values in SCALING)
    expected = (unit.double() * 0.5 - mean) / std
    rounding = {torch.float32: 1e-6, torch.float64: 1e-13, torch.bfloat16: 1e-2}[dtype]
    torch.testing.assert_close(result.double(), expected, rtol=rounding, atol=rounding)
    assert (result.dtype, result.stride()) == (dtype, unit.stride())
    none = hp.Pipeline(normalization=SCALING, transform=darken).inputs(images(0))
    assert none.shape == (0, 3, 7, 5)


def test_what_a_transform_keeps_of_its_result_is_not_changed_by_normalization():
    gray = torch.full((31, 3, 7, 5), 0.5).contiguous(memory_format=torch.channels_last)
    pipeline = hp.Pipeline(normalization=SCALING, transform=lambda inputs, key: gray)
    assert torch.equal(pipeline.inputs(images(), 1), pipeline.inputs(images(), 2))
    assert gray.unique().tolist() == [0.5]


def test_an_evaluation_leaves_out_augmentation_alone():
    pipeline = hp.Pipeline(
        dtype=torch.float64,
        channels_last=False,
        normalization=SCALING,
        augmentation=FLIPS_AND_SHIFTS,
        transform=lambda inputs, key: inputs + 1,
        stage=lambda inputs, targets, key: (inputs * 2, targets),
    )
    inputs, _ = pipeline.plain().make(images(), torch.arange(31), KEY)
    scaled = hp.Pipeline(dtype=torch.float64, channels_last=False, normalization=SCALING)
    assert torch.equal(inputs, scaled.inputs(images()) * 2)
    assert inputs.stride() == scaled.inputs(images()).stride()


def test_without_stages_targets_stay_and_inputs_share_no_memory_with_images():
    before = images()
    inputs, targets = hp.Pipeline().make(before, torch.arange(31), KEY)
    kept = inputs.clone()
    before.zero_()
    assert torch.equal(inputs, kept) and targets.tolist() == list(range(31))


EVERY_VALUE = np.arange(1 << 16).reshape(16, 64, 64, 1)


@pytest.mark.parametrize("dtype", ["u1", "u2", "f2", "f4", "f8"])
@pytest.mark.parametrize("divisor", [None, 0.3, 1.0, 3.0, 240.0, 255.0, 4095.0, 65535.0, 1e9])
def test_stored_values_are_multiplied_by_the_inverse_of_the_divisor_in_float32(dtype, divisor):
    """With the bits of NumPy, on which the digests of runs on HDF5 files rest."""
    stored = EVERY_VALUE.astype(dtype) if dtype != "f2" else EVERY_VALUE.astype("u2").view("f2")
    inputs = hp.Pipeline().inputs(torch.from_numpy(stored), divisor=divisor)
    divisor = divisor or {"u1": 255.0, "u2": 65535.0}.get(dtype, 1.0)
    with np.errstate(over="ignore", invalid="ignore"):
        expected = stored.astype(np.float32) * np.float32(1 / divisor)
    assert np.array_equal(inputs.permute(0, 2, 3, 1).numpy(), expected, equal_nan=True)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_picture_has_the_same_bits_in_8_bits_whatever_stands_for_1(dtype):
    """Division and normalization are one multiplication and one addition."""
    pipeline = hp.Pipeline(dtype=dtype, normalization=SCALING)
    inputs = pipeline.inputs(images())
    words = torch.from_numpy(images().numpy().astype(np.uint16))
    assert torch.equal(pipeline.inputs(words, divisor=255), inputs)
    assert torch.equal(pipeline.inputs(images().float(), divisor=255), inputs)
    mean, std = (torch.tensor(values).double()[:, None, None] for values in SCALING)
    scale = (1 / (4095 * std)).to(dtype)
    expected = words.permute(0, 3, 1, 2).to(dtype) * scale + (-mean / std).to(dtype)
    assert torch.equal(pipeline.inputs(words, divisor=4095), expected)


@pytest.mark.parametrize("flip", [True, False])
@pytest.mark.parametrize("shift", [0, 2])
def test_16_bits_are_moved_as_8_bits_are(flip, shift):
    pipeline = hp.Pipeline(dtype=torch.float64, augmentation=Augmentation(flip, shift))
    words = torch.from_numpy(images().numpy().astype(np.uint16) * 257)
    of_bytes = pipeline.inputs(images(), KEY) * 255
    of_words = pipeline.inputs(words, KEY) * 65535
    assert torch.equal(of_words.round(), of_bytes.round() * 257)
    assert words.dtype == torch.uint16 and words.view(torch.int16).min() < 0


def test_noise_is_on_the_augmented_image_which_is_the_target():
    task = task_class("denoise")(noise="salt-pepper", level=0.3)
    pipeline = hp.Pipeline(augmentation=FLIPS_AND_SHIFTS, stage=task.stage)
    noisy, clean = pipeline.make(images(), torch.arange(31), KEY)
    assert torch.equal(clean, moved(images()))
    changed = noisy != clean
    assert noisy[changed].unique().tolist() == [0, 1]
    assert 0.2 < changed.double().mean().item() < 0.35  # some values are 0 in the image, too


def test_a_classifier_has_the_labels_as_targets():
    given = images(3).float(), torch.arange(3)
    inputs, targets = task_class("classify")().stage(*given, KEY)
    assert inputs is given[0] and targets is given[1]
