"""Random crops of stored pixels: against Pillow and NumPy, however they are read."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

import hpctrain as hp
from tests.support.api import draw_crops, make_order
from tests.support.external import read, write
from tests.support.pictures import class_folders, make_pack

TYPES = ("u1", "i1", "u2", "i2", "i4", "i8", "f2", "f4", "f8")
LEAST = 0.1
N = 23


@pytest.fixture(scope="module")
def file(tmp_path_factory):
    """An HDF5 file of a few floats; what is cropped does not depend on them."""
    path = tmp_path_factory.mktemp("file") / "a.h5"
    return write(path, np.ones((5, 4, 4, 1)), np.arange(5) % 2)


def crop(file, images, key=3, nodata=None, threads=1, least=LEAST):
    """Crops of stored images (n, H, W, C), and their boxes."""
    crops = draw_crops(least, len(images), key)
    _, height, width, _ = images.shape
    with hp.Split(read(file, split="1", nodata=nodata), "train", threads) as split:
        cropped = images.copy()
        split.crop(cropped, crops)
    return cropped, [crop.box(width, height) for crop in crops]


def weights(start, stop, size):
    """A matrix (size, size): the weights of all pixels in each pixel of an enlarged part."""
    places = start + (stop - start) * (np.arange(size) + 0.5) / size - 0.5
    low = np.floor(places).astype(int)
    matrix = np.zeros((size, size))
    rows = np.arange(size)
    np.add.at(matrix, (rows, low.clip(0, size - 1)), 1 - (places - low))
    np.add.at(matrix, (rows, (low + 1).clip(0, size - 1)), places - low)
    return matrix


def enlarge(values, box):
    """The part `box` of values (H, W, C) in their size, in float64."""
    height, width, _ = values.shape
    left, top, right, bottom = box
    down = weights(top, bottom, height)
    across = weights(left, right, width)
    return np.einsum("yv,xu,vuc->yxc", down, across, values.astype("f8"))


def draw(dtype, shape, seed=0):
    """Images of numbers of a type that float64 holds exactly."""
    rng = np.random.default_rng(seed)
    if np.dtype(dtype).kind == "f":
        return (rng.normal(0, 100, shape)).astype(dtype)
    limits = np.iinfo(dtype)
    values = rng.integers(limits.min, limits.max, shape, dtype, endpoint=True)
    return values >> 11 if dtype == "i8" else values


@pytest.mark.parametrize("channels", [1, 3])
@pytest.mark.parametrize("size", [(7, 9), (32, 32), (64, 33)])
def test_pictures_of_8_bits_are_resized_as_pillow_resizes_parts(file, channels, size):
    images = np.random.default_rng(1).integers(0, 256, (N, *size, channels), "u1")
    cropped, boxes = crop(file, images)
    for image, result, box in zip(images, cropped, boxes, strict=True):
        for channel in range(channels):
            plane = Image.fromarray(image[..., channel])
            resized = plane.resize(size[::-1], Image.Resampling.BILINEAR, box=box)
            assert np.array_equal(result[..., channel], np.asarray(resized))


@pytest.mark.parametrize("channels", [1, 2, 3, 60])
@pytest.mark.parametrize("dtype", TYPES)
def test_values_of_any_type_are_interpolated_in_float64(file, dtype, channels):
    images = draw(dtype, (N, 9, 14, channels))
    before = images.copy()
    cropped, boxes = crop(file, images)
    expected = np.array([enlarge(*pair) for pair in zip(images, boxes, strict=True)])
    assert cropped.dtype == images.dtype and np.array_equal(images, before)
    if images.dtype.kind == "f":
        rounding = {2: 1e-3, 4: 1e-7, 8: 1e-15}[images.itemsize]
        np.testing.assert_allclose(cropped, expected, rtol=rounding, atol=1e3 * rounding)
    else:  # Pillow rounds pictures of 8 bits twice
        is_picture = dtype == "u1" and channels in (1, 3)
        large = np.abs(expected).max()
        assert np.abs(cropped - expected).max() <= (1.01 if is_picture else 0.5 + 1e-14 * large)
    assert not np.array_equal(cropped, images)


@pytest.mark.parametrize("dtype", TYPES)
def test_equal_values_and_whole_images_stay_as_they_are(file, dtype):
    images = draw(dtype, (N, 8, 8, 3))
    constant = np.broadcast_to(images[:, :1, :1], images.shape)
    cropped, _ = crop(file, constant)
    if dtype in ("i8", "f8"):
        np.testing.assert_allclose(cropped, constant, rtol=1e-15)
    else:
        assert np.array_equal(cropped, constant)
    whole, boxes = crop(file, images, least=1.0)
    is_whole = [box == (0, 0, 8, 8) for box in boxes]
    assert any(is_whole) and np.array_equal(whole[is_whole], images[is_whole])


def test_the_largest_values_stay_in_their_type(file):
    for dtype in ("i8", "u2", "i1", "f4"):
        limits = np.finfo(dtype) if dtype == "f4" else np.iinfo(dtype)
        images = np.full((N, 8, 8, 2), limits.max, dtype)
        cropped, _ = crop(file, images)
        assert (cropped.astype("f8") >= limits.max * (1 - 1e-15)).all()


@pytest.mark.parametrize("nodata", [100.0, -3.0, 0.0])
@pytest.mark.parametrize("dtype", ["u1", "i2", "i4", "f4", "f8"])
def test_no_data_have_no_weight_and_no_other_pixel_becomes_them(file, dtype, nodata):
    """Values on both sides of it, of which the mean would be it."""
    if dtype == "u1" and nodata < 0:
        nodata = 7.0
    rng = np.random.default_rng(4)
    images = (nodata + rng.choice([-1, 1], (N, 11, 9, 3))).astype(dtype)
    images[images < 0] = 1 if dtype == "u1" else images[images < 0]
    missing = rng.random(images.shape) < 0.3
    missing[0] = False
    images[missing] = nodata
    cropped, boxes = crop(file, images, nodata=nodata)
    for image, result, box, gone in zip(images, cropped, boxes, missing, strict=True):
        present = enlarge(~gone, box)
        with np.errstate(invalid="ignore"):
            means = enlarge(np.where(gone, 0, image), box) / present
        is_missing = result == nodata
        unsure = np.abs(present - 0.5) < 1e-12
        assert (is_missing == (present < 0.5))[~unsure].all()
        apart = np.abs(result - means)[~is_missing]
        assert (apart <= (1 + 1e-9 if image.dtype.kind != "f" else 1e-5)).all()
    assert (cropped[1:] == nodata).any() and (cropped[0] != nodata).all()


def test_no_data_that_are_nan_do_not_spread(file):
    images = draw("f4", (N, 9, 9, 2))
    images[:, 2:5, 3:6] = np.nan
    cropped, _ = crop(file, images, nodata=np.nan)
    shares = np.isnan(cropped).mean(axis=(1, 2, 3))
    assert 0 < shares.mean() < 0.5 and np.nanmax(cropped) <= np.nanmax(images)


@given(
    dtype=st.sampled_from(TYPES),
    height=st.integers(1, 12),
    width=st.integers(1, 12),
    channels=st.sampled_from([1, 3, 4]),
    key=st.integers(0, 2**63 - 1),
)
def test_crops_lie_between_the_values_of_their_image(file, dtype, height, width, channels, key):
    images = draw(dtype, (3, height, width, channels), seed=key)
    cropped, _ = crop(file, images, key)
    axes = (1, 2)
    margin = 1e-15 * np.abs(images.astype("f8")).max()
    assert (cropped <= images.max(axes, keepdims=True) + margin).all()
    assert (cropped >= images.min(axes, keepdims=True) - margin).all()


@pytest.mark.parametrize("dtype", ["u1", "u2", "f8"])
def test_bits_do_not_depend_on_threads(file, dtype):
    images = draw(dtype, (N, 96, 96, 3))
    one, _ = crop(file, images)
    many, _ = crop(file, images, threads=5)
    before = torch.get_num_threads()
    torch.set_num_threads(7)
    try:
        of_torch, _ = crop(file, images)
    finally:
        torch.set_num_threads(before)
    assert one.tobytes() == many.tobytes() == of_torch.tobytes()


# The loader

ROWS = 66


def batches(pack, least, shards=(0, 1, 2), epoch=1, order="partition", **how):
    """(shard, images, targets) of every batch of an epoch."""
    partition = hp.cut_epoch(ROWS, 16, 3)
    order = make_order(order, partition, 4, block_rows=5, window_blocks=2)
    with hp.Split(pack, "train", 2) as split:
        options = hp.ReadOptions(random_crop=least, **how)
        steps = list(hp.Loader(split, order, shards, options=options).epoch(epoch))
    return [(b.shard, b.images.numpy(), b.targets.tolist()) for step in steps for b in step]


def assert_equal(first, second):
    assert len(first) == len(second) > 0
    for one, other in zip(first, second, strict=True):
        assert one[0] == other[0] and np.array_equal(one[1], other[1]) and one[2] == other[2]


@pytest.fixture(scope="module")
def packs(tmp_path_factory):
    """The same JPEG files of equal size: as such, as pixels, and as arrays in other HDF5 files."""
    root = tmp_path_factory.mktemp("source")
    folder = class_folders(root / "images", {"a": 37, "b": 29}, ".jpg", width=17, height=13)
    made = {}
    for encoding in ("jpeg", "raw"):
        words = {"size": "17x13", "encoding": encoding, "split": "1"}
        made[encoding] = hp.read_pack(make_pack(folder, root / f"{encoding}.h5", **words))
    with hp.Split(made["raw"], "train") as split:
        images = split.gather(np.arange(ROWS), np.empty((ROWS, 13, 17, 3), "u1"))
        labels = split.targets
    planes = np.ascontiguousarray(images.transpose(0, 3, 1, 2))
    for layout, values in (("NHWC", images), ("NCHW", planes)):
        path = write(root / f"{layout}.h5", values, labels, chunks=(4, *values.shape[1:]))
        made[layout] = read(path, layout=layout, split="1")
    return made


@pytest.mark.parametrize("order", ["partition", "global", "blocks"])
def test_pixels_are_cropped_as_jpeg_files_of_their_size_are(packs, order):
    """Whether they are kept, read in windows, or one by one; for any shards of a rank."""
    expected = batches(packs["jpeg"], LEAST, order=order)
    for buffer in (1 << 20, 30_000, 1):
        assert_equal(expected, batches(packs["raw"], LEAST, order=order, read_buffer=buffer))
    for shard in range(3):
        alone = [batch for batch in expected if batch[0] == shard]
        assert_equal(alone, batches(packs["raw"], LEAST, [shard], order=order))


def test_hdf5_files_are_cropped_in_place(packs):
    """Whatever the order of their axes; targets and their order stay."""
    for epoch in (0, 1):
        expected = batches(packs["NHWC"], LEAST, epoch=epoch)
        assert_equal(expected, batches(packs["NCHW"], LEAST, epoch=epoch, read_buffer=1))
        whole = batches(packs["NHWC"], 0.0, epoch=epoch)
        for (_, cropped, targets), (_, images, same) in zip(expected, whole, strict=True):
            assert targets == same and cropped.shape == images.shape
            changed = (cropped != images).any(axis=(1, 2, 3))
            assert changed.mean() > 0.5  # few crops are whole images


def test_every_image_is_cropped_anew_in_every_step_and_epoch(packs):
    pack = packs["raw"]
    with hp.Split(pack, "train") as split:
        order = hp.Order(hp.cut_epoch(ROWS, 6, 2))
        options = hp.ReadOptions(random_crop=LEAST)
        loader = hp.Loader(split, order, range(2), options=options)
        steps = [step for epoch in range(3) for step in loader.epoch(epoch)]
    images = [image.numpy().tobytes() for step in steps for batch in step for image in batch.images]
    seen = {*images}
    assert len(images) == 3 * ROWS
    assert 3 * ROWS - 5 < len(seen) <= 3 * ROWS  # few crops are whole images
