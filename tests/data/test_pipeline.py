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


# Values that are no data, and images that are normalized each by itself

STORED = ("u1", "u2", "i1", "i2", "i4", "i8", "f2", "f4", "f8")


def stored_values(dtype, n=9, shape=(6, 5, 3), nodata=None):
    """Stored images of a type, with a fifth of their values without data."""
    random = np.random.default_rng(3)
    values = random.integers(1, 120, (n, *shape))
    if nodata is not None:
        values = values.astype(dtype)
        values[random.random(values.shape) < 0.2] = nodata
    return values.astype(dtype)


def by_image(values, missing):
    """Each channel of each image by itself, the plain way, (n, H, W, C) float64."""
    result = np.zeros(values.shape)
    for image, hidden, out in zip(values.astype("f8"), missing, result, strict=True):
        for channel in range(values.shape[3]):
            there = ~hidden[..., channel]
            shown = image[..., channel][there]
            deviation = shown.std() if len(shown) else 0
            if deviation:
                out[there, channel] = (shown - shown.mean()) / deviation
    return result


def inputs_of(values, **settings):
    """What the pipeline makes of stored values, (n, H, W, C) as float64."""
    made = hp.Pipeline(**settings).inputs(torch.from_numpy(values), KEY)
    return made.permute(0, 2, 3, 1).double().numpy()


@pytest.mark.parametrize("channels_last", [True, False])
@pytest.mark.parametrize("dtype", STORED)
def test_each_channel_of_each_image_is_normalized_by_itself(dtype, channels_last):
    nodata = np.nan if dtype == "f4" else 7
    values = stored_values(dtype, nodata=nodata)
    values[2, :, :, 1] = 3  # a constant channel
    values[3, :, :, 2] = nodata
    missing = np.isnan(values) if dtype == "f4" else values == nodata
    settings = {"normalization": "image", "nodata": nodata, "channels_last": channels_last}
    found = inputs_of(values, **settings)
    assert np.allclose(found, by_image(values, missing), rtol=1e-6, atol=1e-6)
    assert (found[missing] == 0).all() and (found[2, :, :, 1] == 0).all()
    exact = inputs_of(values, **settings, dtype=torch.float64)
    assert np.allclose(exact, by_image(values, missing), rtol=1e-13, atol=1e-13)
    without = inputs_of(np.nan_to_num(values), normalization="image")
    plain = np.nan_to_num(values)
    assert np.allclose(without, by_image(plain, np.zeros(plain.shape, bool)), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("dtype", ["u1", "f4", "f8", "i8"])
def test_an_image_normalized_by_itself_has_the_same_bits_in_any_batch(dtype):
    """Also where a batch is computed in parts, and where sums of floats are rounded."""
    random = np.random.default_rng(0)
    values = (random.normal(size=(37, 61, 67, 1)) * 30 + 100).astype(dtype)
    settings = {"normalization": "image", "dtype": torch.float64}  # which shows the last bits
    alone = np.concatenate([inputs_of(values[n : n + 1], **settings) for n in range(37)])
    assert np.array_equal(inputs_of(values, **settings), alone)
    assert np.array_equal(inputs_of(values[5:20], **settings), alone[5:20])


@pytest.mark.parametrize("transform", [None, lambda inputs, key: inputs])
def test_mean_and_deviation_of_an_image_are_those_before_flips_and_shifts(transform):
    stored = images().double().permute(0, 3, 1, 2)
    mean = stored.mean((2, 3), keepdim=True)
    std = stored.std((2, 3), correction=0, keepdim=True)
    pipeline = hp.Pipeline(
        normalization="image", augmentation=FLIPS_AND_SHIFTS, transform=transform
    )
    expected = (moved(images()).double() * 255 - mean) / std
    assert torch.allclose(pipeline.inputs(images(), KEY).double(), expected, atol=1e-5)


def test_a_constant_channel_is_0_whatever_its_value():
    """They have no exact sum: mean and value must not differ by a rounding."""
    values = np.ones((2, 7, 11, 3)) * np.random.default_rng(0).random((99, 2, 1, 1, 3))
    values = values.reshape(-1, *values.shape[2:])
    assert not inputs_of(values, normalization="image").any()
    assert not inputs_of(values.astype("f4") * 1e30, normalization="image").any()


@pytest.mark.parametrize("dtype", STORED)
@pytest.mark.parametrize("normalization", [None, SCALING])
@pytest.mark.parametrize("transform", [None, lambda inputs, key: inputs.flip(3)])
def test_values_without_data_are_0(dtype, normalization, transform):
    """Also after a transform that moves them; all other values are as without `nodata`."""
    nodata = np.nan if dtype == "f8" else 200 if dtype in ("u1", "u2") else -100
    values = stored_values(dtype, nodata=nodata)
    missing = np.isnan(values) if dtype == "f8" else values == nodata
    settings = {"normalization": normalization, "transform": transform}
    found = inputs_of(values, **settings, nodata=nodata)
    plain = inputs_of(values, **settings)
    if transform is not None:
        missing = missing[:, :, ::-1]
    assert missing.any() and (found[missing] == 0).all()
    assert np.allclose(found[~missing], plain[~missing], rtol=1e-5, atol=1e-5)
    if transform is None:
        assert np.array_equal(found[~missing], plain[~missing])


def test_a_transform_is_given_the_mean_in_place_of_values_without_data():
    values = stored_values("u1", nodata=200)
    seen = []

    def look(inputs, key):
        seen.append(inputs.permute(0, 2, 3, 1).numpy().copy())
        return inputs

    for normalization in (None, SCALING, "image"):
        found = inputs_of(values, normalization=normalization, nodata=200, transform=look)
        assert (found[values == 200] == 0).all()
    assert (seen[0][values == 200] == 0).all()
    for channel in range(3):
        missing = values[..., channel] == 200
        assert np.allclose(seen[1][..., channel][missing], SCALING[0][channel])
        for image, hidden, shown in zip(values, missing, seen[2], strict=True):
            mean = image[..., channel][~hidden].mean() / 255
            assert np.allclose(shown[..., channel][hidden], mean)
    plain = inputs_of(values, normalization="image", nodata=200)
    assert np.allclose(plain, found, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(("dtype", "nodata"), [("u2", 65535), ("i2", -5), ("f4", np.nan)])
def test_a_shift_uncovers_values_without_data(dtype, nodata):
    values = stored_values(dtype)
    moves = {"augmentation": Augmentation(flip=False, shift=3)}
    bordered = inputs_of(values, **moves)
    found = inputs_of(values, **moves, nodata=nodata, normalization=SCALING)
    assert (found[bordered == 0] == 0).all() and (bordered == 0).mean() > 0.2
    normalized = inputs_of(values, **moves, normalization=SCALING)
    assert np.array_equal(found[bordered != 0], normalized[bordered != 0])


def test_no_type_is_compared_with_a_number_that_it_cannot_hold():
    for dtype in STORED:
        for nodata in (-1e30, 0.5, np.nan, 1e300):
            values = stored_values(dtype)
            assert np.array_equal(inputs_of(values, nodata=nodata), inputs_of(values))


@pytest.mark.parametrize("channels_last", [True, False])
@pytest.mark.parametrize("dtype", ["i4", "i8", "f8"])
def test_a_large_offset_does_not_cost_precision(dtype, channels_last):
    """Mean and deviation are applied in float64 to values that float32 would round."""
    base = 2**30
    values = stored_values(dtype) + np.array(base, dtype)
    scaling = ((base + 50.0,) * 3, (20.0,) * 3)
    settings = {"channels_last": channels_last, "normalization": scaling}
    found = hp.Pipeline(**settings).inputs(torch.from_numpy(values), divisor=1.0)
    expected = (values.astype("f8") - base - 50) / 20
    assert np.allclose(found.permute(0, 2, 3, 1).numpy(), expected, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("dtype", ["i1", "i2", "i4", "i8", "f2", "f8"])
def test_all_types_are_moved_as_8_bits_are(dtype):
    values = stored_values(dtype)
    moved_bytes = inputs_of(values.astype("u1"), augmentation=FLIPS_AND_SHIFTS) * 255
    assert np.allclose(inputs_of(values, augmentation=FLIPS_AND_SHIFTS), moved_bytes)


def halved_sum(values):
    """The sum of values (m, C): of those left when the second half is added to the first."""
    while len(values) > 1:
        half = len(values) // 2
        values = np.concatenate([values[:half] + values[half : 2 * half], values[2 * half :]])
    return values[0]


def test_statistics_of_an_image_are_sums_in_one_order():
    """That of a library depends on its version, the device, and the images beside it."""
    images = np.random.default_rng(0).lognormal(0, 4, (2, 37, 53, 3))
    pipeline = hp.Pipeline(dtype=torch.float64, normalization="image")
    inputs = pipeline.inputs(torch.from_numpy(images), divisor=1.0)
    for number, image in enumerate(images):
        pixels = image.reshape(-1, 3)
        above = pixels - pixels.min(0)
        mean = halved_sum(above) / len(pixels)
        deviations = above - mean
        std = np.sqrt(halved_sum(deviations * deviations) / len(pixels))
        expected = (image - (pixels.min(0) + mean)) * (1 / std)
        assert np.array_equal(inputs[number].permute(1, 2, 0).numpy(), expected)
        assert (halved_sum(above) != above.sum(0)).any()
