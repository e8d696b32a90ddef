"""Random parts of JPEG files: where they lie, what they depend on, what scaled decoding leaves."""

import io
import math

import numpy as np
import pytest
from PIL import Image, JpegImagePlugin

from hpctrain.data import jpeg
from hpctrain.data.images import BadImage, Fit, decode
from hpctrain.data.jpeg import NUMBERS, Crop, decode_file, draw_crops
from hpctrain.data.loader import Loader, read_samples
from hpctrain.data.orders import ORDERS, make_order
from hpctrain.data.packed import read_pack
from hpctrain.data.partition import cut_epoch, random_key
from hpctrain.data.split import Split
from hpctrain.errors import UsageError
from tests.data.pictures import class_folders, encode, pack, picture
from tests.support.packs import make_pack

SIZES = [(41, 37), (500, 375), (375, 500), (7, 5), (1, 1), (2, 97), (97, 2), (1000, 3)]


def detailed(width, height, seed=0):
    """A JPEG file with detail of all sizes."""
    rng = np.random.default_rng(seed)
    pixels = picture(seed, width, height).astype(np.int16) + rng.integers(
        -60, 60, (height, width, 1)
    )
    return encode(pixels.clip(0, 255).astype(np.uint8), "JPEG", quality=95)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("least", [0.08, 0.5, 1.0, 1e-6])
def test_parts_are_never_outside_and_of_the_share_and_ratio_asked(size, least):
    width, height = size
    for crop in draw_crops(least, 500, 3):
        left, top, right, bottom = crop.box(width, height)
        assert 0 <= left < right <= width and 0 <= top < bottom <= height
        w, h = right - left, bottom - top
        if min(w, h) > 20:  # else rounding counts
            assert 0.7 < w / h < 1.42
            assert w * h > 0.93 * least * width * height or (w, h) == fallback(width, height)


def fallback(width, height):
    return min(width, round(height * 4 / 3)), min(height, round(width * 4 / 3))


def test_the_first_try_that_fits_counts():
    numbers = [0.0] * NUMBERS
    half = [0.5] * 2 * 9

    def box(numbers, width=400, height=300, least=0.25):
        return Crop(least, numbers).box(width, height)

    # share 0.25 + 0.5 * 0.75 = 0.625, ratio 1: sqrt(75000) = 273.86
    assert box([0.5, 0.5, *half, 0.0, 0.0]) == (0, 0, 274, 274)
    assert box([0.5, 0.5, *half, 0.999, 0.999]) == (126, 26, 400, 300)
    assert box([0.5, 0.5, *half, 0.5, 0.5]) == (63, 13, 337, 287)
    # ratio 4/3: sqrt(0.25 * 120000 * 4/3) = 200, and 150 high; ratio 3/4 the other way round
    assert box([0.0, 1.0, *half, 0.0, 0.0]) == (0, 0, 200, 150)
    assert box([0.0, 0.0, *half, 0.0, 0.0]) == (0, 0, 150, 200)
    # the whole area at ratio 1 is 346 x 346: not in 300 lines, so the second try
    assert box([1.0, 0.5, 0.0, 0.0, *half[2:], 0.0, 0.0]) == (0, 0, 150, 200)
    # ten that do not fit: the centre
    numbers = [1.0, 0.5] * 10 + [0.0, 0.0]
    assert box(numbers) == (0, 0, 400, 300)
    assert box(numbers, 900, 300) == (250, 0, 650, 300)
    assert box(numbers, 300, 900) == (0, 250, 300, 650)


def test_shares_and_ratios_are_spread_as_published():
    boxes = [crop.box(3000, 3000) for crop in draw_crops(0.08, 4000, 1)]
    w, h = np.array([(b[2] - b[0], b[3] - b[1]) for b in boxes]).T
    small = w * h < 0.5 * 3000 * 3000  # there every try fits
    share, ratio = (w * h / 9e6)[small], np.log(w / h)[small]
    assert abs(share.mean() - 0.29) < 0.01 and share.min() > 0.079
    assert abs(ratio.mean()) < 0.02 and abs(ratio.std() - math.log(16 / 9) / math.sqrt(12)) < 0.01
    left = np.array([b[0] for b in boxes])[small] / (3000 - w[small])
    assert abs(left.mean() - 0.5) < 0.02 and left.min() < 0.01 and left.max() > 0.99


def test_a_part_depends_on_key_and_place_alone():
    few, many = draw_crops(0.08, 7, 5), draw_crops(0.08, 101, 5)
    assert many[:7] == few and len({crop.box(500, 375) for crop in many}) > 95
    assert draw_crops(0.08, 7, 6)[0] != few[0]
    assert draw_crops(0.08, 0, 5) == []
    # the numbers themselves: runs must not change with a new NumPy
    assert [round(n, 12) for n in few[0].numbers[:3]] == [
        0.733745955445,
        0.590520644573,
        0.207808940662,
    ]


@pytest.mark.parametrize("fit", [Fit(17, 13, 3), Fit(17, 13, 1), Fit(17, 13, 3, crop=True)])
def test_a_whole_image_is_decoded_as_packing_does(fit):
    for width, height in ((41, 37), (150, 120), (700, 500)):
        data = detailed(width, height)
        assert decode_file(data, fit) == decode(data, fit)


@pytest.mark.parametrize("size", [(41, 37), (333, 251), (1201, 907)])
def test_a_part_has_the_detail_that_its_size_can_show(size, monkeypatch):
    data, fit = detailed(*size), Fit(17, 13, 3)
    whole = Image.open(io.BytesIO(data)).convert("RGB")
    resize = Image.Image.resize
    boxes = []

    def told(image, *args, box, **options):
        boxes.append(box)
        return resize(image, *args, box=box, **options)

    monkeypatch.setattr(Image.Image, "resize", told)
    scales = set()
    for crop in draw_crops(0.02, 40, 9):
        left, top, right, bottom = crop.box(*size)
        found = np.frombuffer(decode_file(data, fit, crop), np.uint8).reshape(13, 17, 3)
        box = boxes.pop()
        scale = (right - left) / (box[2] - box[0])
        assert box == (left / scale, top / scale, right / scale, bottom / scale)
        scales.add(scale)
        if scale > 1:
            assert box[2] - box[0] >= 2 * 17 and box[3] - box[1] >= 2 * 13
        part = resize(whole, (17, 13), Image.Resampling.BILINEAR, box=(left, top, right, bottom))
        apart = np.abs(np.int16(found) - np.int16(part))
        assert (apart.max() == 0) if scale == 1 else (apart.mean() < 2 and apart.max() < 16)
    if size == (41, 37):
        assert scales == {1}
    else:
        assert scales <= {1, 2, 4, 8} and 8 in scales and len(scales) > 1


def test_scaled_decoding_is_used_and_would_show_if_it_were_coarser(monkeypatch):
    """Negative control of the test above: 1/8 where 1/1 is needed is far off."""
    data, fit, crop = detailed(333, 251), Fit(170, 130, 3), draw_crops(1.0, 1, 0)[0]
    right = np.frombuffer(decode_file(data, fit, crop), np.uint8)
    draft = JpegImagePlugin.JpegImageFile.draft
    monkeypatch.setattr("hpctrain.data.jpeg.REACH", 0.1)
    sizes = []
    monkeypatch.setattr(
        JpegImagePlugin.JpegImageFile,
        "draft",
        lambda image, *args: sizes.append(args[1]) or draft(image, *args),
    )
    coarse = np.frombuffer(decode_file(data, fit, crop), np.uint8)
    assert sizes == [(41, 31)]
    assert np.abs(np.int16(coarse) - np.int16(right)).mean() > 8


def test_damage_is_a_bad_image():
    for data in (b"", b"no picture", detailed(41, 37)[:-200], encode(picture(1))):
        for crop in (None, draw_crops(0.5, 1, 0)[0]):
            with pytest.raises(BadImage):
                decode_file(data, Fit(17, 13, 3), crop)


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    root = tmp_path_factory.mktemp("source")
    folder = class_folders(root / "images", {"a": 37, "b": 29}, ".jpg", width=97, height=83)
    return pack(folder, root / "a.h5", size="17x13", encoding="jpeg")


def batches(rows, least, shards=(0, 1, 2), epoch=1, order="partition", buffer=1 << 20, seed=4):
    """(shard, images) of every batch of an epoch."""
    partition = cut_epoch(len(rows.labels), 16, shards=3)
    loader = Loader(
        rows,
        partition,
        shards,
        seed,
        order=make_order(order, partition, seed, 5, 2),
        read_buffer=buffer,
        random_crop=least,
    )
    return [(b.shard, b.images, b.targets) for step in loader.epoch(epoch) for b in step]


def same(first, second):
    return len(first) == len(second) and all(
        a[0] == b[0] and (a[1] == b[1]).all() and (a[2] == b[2]).all()
        for a, b in zip(first, second, strict=True)
    )


@pytest.mark.parametrize("order", ORDERS)
def test_batches_are_the_same_however_rows_are_read_and_carried(made, order):
    with Split(made, "train", 1) as one, Split(made, "train", 3) as rows:
        all_of = batches(rows, 0.08, order=order)
        assert sum(len(images) for _, images, _ in all_of) == 59
        assert same(all_of, batches(one, 0.08, order=order))
        assert same(all_of, batches(rows, 0.08, order=order, buffer=1))  # nothing is kept
        for shard in range(3):
            own = [batch for batch in all_of if batch[0] == shard]
            assert same(own, batches(rows, 0.08, [shard], order=order, buffer=9000))
        for other in ({"epoch": 2}, {"seed": 5}):
            assert not same(all_of, batches(rows, 0.08, order=order, **other))
        assert not same(all_of, batches(rows, 0.5, order=order))
        whole = batches(rows, 0.0, order=order)
        assert [t.tolist() for _, _, t in whole] == [t.tolist() for _, _, t in all_of]
        assert not same(all_of, whole)


def test_every_batch_has_its_own_key(made, monkeypatch):
    """Else the image at a place would be cut alike in every step or epoch."""
    keys = []
    with Split(made, "train") as rows:
        draw = jpeg.draw_crops
        monkeypatch.setattr(
            jpeg, "draw_crops", lambda least, n, key: keys.append(key) or draw(least, n, key)
        )
        for epoch in (1, 2):
            batches(rows, 0.08, epoch=epoch)
    assert keys == [
        random_key(random_key(4, "batch", epoch, step, shard), "crop")
        for epoch in (1, 2)
        for step in range(4)
        for shard in range(3)
    ]
    assert len(set(keys)) == 24


def test_the_whole_area_at_the_ratio_of_the_image_is_the_image(made):
    """Share 1 leaves 4/3 of a 97x83 image: whole but for what the ratio cuts. And it is the row."""
    with Split(made, "train") as rows:
        cut, whole = batches(rows, 1.0), batches(rows, 0.0)
    for (_, a, _), (_, b, _) in zip(cut, whole, strict=True):
        assert (a - b).abs().mean() < 0.1


def test_rows_that_are_looked_at_without_a_loader_are_whole(made):
    with Split(made, "train") as rows:
        images = rows.gather(np.arange(9), np.empty((9, 13, 17, 3), np.uint8))
        list(Loader(rows, cut_epoch(59, 16, shards=1), [0], random_crop=0.08).epoch(0))
        seen = read_samples(rows, range(9))
        assert np.allclose(seen.permute(0, 2, 3, 1).numpy() * 255, images, atol=1e-3)


def test_pixels_cannot_be_cropped(tmp_path):
    with Split(read_pack(make_pack(tmp_path / "a.h5", {"train": 31})), "train") as rows:
        with pytest.raises(UsageError, match="--random-crop cuts image files"):
            Loader(rows, cut_epoch(31, 16, shards=1), [0], random_crop=0.08)
        Loader(rows, cut_epoch(31, 16, shards=1), [0], random_crop=0)
