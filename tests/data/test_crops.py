"""Random crops of JPEG files: where they lie, what they depend on, what scaled decoding leaves."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

import hpctrain as hp
from tests.support.api import draw_crops, make_order
from tests.support.pictures import class_folders, encode, make_pack

ROWS = 66


def detailed(width, height, seed=0):
    """An image with detail of all sizes."""
    rng = np.random.default_rng(seed)
    coarse = Image.fromarray(rng.integers(40, 216, (24, 24, 3), np.uint8))
    fine = rng.integers(-40, 40, (height, width, 1))
    pixels = np.asarray(coarse.resize((width, height), Image.Resampling.BILINEAR)) + fine
    return pixels.clip(0, 255).astype(np.uint8)


def plain_box(least, numbers, width, height):
    """RandomResizedCrop of torchvision: the first of ten tries that fits, else the centre."""
    for share, ratio in zip(numbers[0:20:2], numbers[1:20:2], strict=True):
        area = width * height * (least + share * (1 - least))
        ratio = math.exp(math.log(3 / 4) + ratio * (math.log(4 / 3) - math.log(3 / 4)))
        w, h = round(math.sqrt(area * ratio)), round(math.sqrt(area / ratio))
        if 0 < w <= width and 0 < h <= height:
            left, top = int(numbers[20] * (width - w + 1)), int(numbers[21] * (height - h + 1))
            return left, top, left + w, top + h
    w, h = min(width, max(1, round(height * 4 / 3))), min(height, max(1, round(width * 4 / 3)))
    left, top = (width - w) // 2, (height - h) // 2
    return left, top, left + w, top + h


@given(
    width=st.integers(1, 2000),
    height=st.integers(1, 2000),
    least=st.sampled_from([1e-6, 0.08, 0.5, 1.0]),
    key=st.integers(0, 2**63 - 1),
)
def test_crops_are_those_of_the_formula(width, height, least, key):
    for crop in draw_crops(least, 20, key):
        left, top, right, bottom = crop.box(width, height)
        assert 0 <= left < right <= width and 0 <= top < bottom <= height
        assert (left, top, right, bottom) == plain_box(least, crop.numbers, width, height)


def test_a_crop_depends_on_key_and_place_alone_for_ever():
    few, many = draw_crops(0.08, 7, 5), draw_crops(0.08, 101, 5)
    assert many[:7] == few and len({crop.box(500, 375) for crop in many}) > 95
    assert draw_crops(0.08, 7, 6)[0] != few[0] and draw_crops(0.08, 0, 5) == []
    numbers = [round(n, 12) for n in few[0].numbers[:3]]
    assert numbers == [0.733745955445, 0.590520644573, 0.207808940662]


def packed(folder, images, size="17x13", quality=95):
    """A pack of these images as JPEG files; each is a class."""
    for number, image in enumerate(images):
        (folder / f"images/{number:03}").mkdir(parents=True)
        (folder / f"images/{number:03}/a.jpg").write_bytes(encode(image, "JPEG", quality=quality))
    path = make_pack(
        folder / "images", folder / "a.h5", size=size, encoding="jpeg", channels=3, split="1"
    )
    return hp.Split(hp.read_pack(path), "train")


@pytest.mark.parametrize("size", [(41, 37), (333, 251), (1201, 907)])
def test_a_crop_has_the_detail_that_its_size_can_show(size, tmp_path):
    """Files are decoded at 1/2, 1/4 or 1/8 scale; Pillow here decodes them whole."""
    image = detailed(*size)
    with packed(tmp_path, [image]) as split:
        whole = Image.open(tmp_path / "images/000/a.jpg").convert("RGB")
        for crop in draw_crops(0.02, 40, 9):
            found = split.gather(np.array([0]), np.empty((1, 13, 17, 3), np.uint8), [crop])[0]
            box = crop.box(*size)
            plain = whole.resize((17, 13), Image.Resampling.BILINEAR, box=box)
            apart = np.abs(np.int16(found) - np.int16(plain))
            if size == (41, 37) or min(box[2] - box[0], box[3] - box[1]) < 2 * 2 * 13:
                assert apart.max() == 0  # not scaled
            else:
                assert apart.mean() < 2 and apart.max() < 16
    blurred = whole.reduce(16).resize((17, 13), Image.Resampling.BILINEAR)  # a control
    plain = whole.resize((17, 13), Image.Resampling.BILINEAR)
    assert size[0] > 1000 or np.abs(np.int16(blurred) - np.int16(plain)).mean() > 4


@pytest.fixture(scope="module")
def jpegs(tmp_path_factory):
    root = tmp_path_factory.mktemp("source")
    folder = class_folders(root / "images", {"a": 37, "b": 29}, ".jpg", width=97, height=83)
    words = {"size": "17x13", "encoding": "jpeg", "split": "1"}
    return hp.read_pack(make_pack(folder, root / "a.h5", **words))


def batches(pack, least, shards=(0, 1, 2), epoch=1, order="partition", seed=4, threads=2, **how):
    """(shard, images, labels) of every batch of an epoch."""
    partition = hp.cut_epoch(ROWS, 16, 3)
    order = make_order(order, partition, seed, block_rows=5, window_blocks=2)
    with hp.Split(pack, "train", threads) as split:
        loader = hp.Loader(split, order, shards, options=hp.ReadOptions(random_crop=least, **how))
        steps = list(loader.epoch(epoch))
    return [(b.shard, b.images.numpy(), b.targets.tolist()) for step in steps for b in step]


def is_equal(first, second):
    return len(first) == len(second) and all(
        a[0] == b[0] and np.array_equal(a[1], b[1]) and a[2] == b[2]
        for a, b in zip(first, second, strict=True)
    )


@pytest.mark.parametrize("order", ["partition", "global", "blocks"])
def test_batches_are_the_same_however_samples_are_read_and_shards_carried(jpegs, order):
    whole = batches(jpegs, 0.08, order=order)
    assert sum(len(images) for _, images, _ in whole) == ROWS
    assert is_equal(whole, batches(jpegs, 0.08, order=order, threads=1, read_buffer=1))
    for shard in range(3):
        own = [batch for batch in whole if batch[0] == shard]
        assert is_equal(own, batches(jpegs, 0.08, [shard], order=order, read_buffer=9000))
    for other in ({"epoch": 2}, {"seed": 5}):
        assert not is_equal(whole, batches(jpegs, 0.08, order=order, **other))
    uncropped = batches(jpegs, 0.0, order=order)
    assert [labels for *_, labels in uncropped] == [labels for *_, labels in whole]
    assert not is_equal(whole, uncropped)


def test_every_image_is_cropped_anew_in_every_step_and_epoch(tmp_path):
    """The same picture everywhere: images at one place would be equal if crops were."""
    image = detailed(97, 83)
    with packed(tmp_path, [image] * 18, quality=95) as split:
        order, options = hp.Order(hp.cut_epoch(18, 6, 2)), hp.ReadOptions(random_crop=0.1)
        loader = hp.Loader(split, order, range(2), options=options)
        found = [b.images for epoch in (0, 1) for step in loader.epoch(epoch) for b in step]
        seen = {each.numpy().tobytes() for images in found for each in images}
        assert len(seen) == 36
