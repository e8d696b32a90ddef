"""Image files of all kinds as rows of a pack: colours, depths, transparency, orientation, size."""

import io

import h5py
import numpy as np
import pytest
from PIL import Image

import hpctrain as hp
from tests.support.odd_files import saved
from tests.support.pictures import arrays, class_folders, encode, facts, make_pack, picture

KINDS = {"JPEG": "jpg", "PNG": "png", "TIFF": "tif", "GIF": "gif", "WEBP": "webp"}


@pytest.fixture
def packed(tmp_path):
    """Pack the bytes of image files; returns their rows (n, H, W, C), in the order given."""

    def pack(files, size="13x11", **settings):
        for number, data in enumerate(files):
            folder = tmp_path / "images" / f"class{number:03}"
            folder.mkdir(parents=True, exist_ok=True)
            (folder / "image").write_bytes(data)
        path = make_pack(
            tmp_path / "images", tmp_path / "a.h5", split="1", size=size, overwrite=True, **settings
        )
        images, labels = arrays(path)
        return images[np.argsort(labels)]

    return pack


def gray_image(number=1):
    return Image.fromarray(picture(number, channels=1)[..., 0])


def test_lossless_files_come_back_bit_for_bit(packed):
    kinds = ("PNG", "BMP", "PPM", "TIFF")
    files = [encode(picture(n), kind) for n, kind in enumerate(kinds)]
    rows = packed([*files, encode(picture(4), "WEBP", lossless=True)])
    assert np.array_equal(rows, [picture(n) for n in range(5)])


def test_gray_becomes_colour_and_colour_becomes_gray(packed):
    gray = picture(1, channels=1)
    assert np.array_equal(packed([encode(gray), encode(picture(2))])[0], gray.repeat(3, axis=2))
    rows = packed([encode(gray), encode(picture(2))], channels=1)
    assert np.array_equal(rows[0], gray)
    luma = picture(2) @ np.array([0.299, 0.587, 0.114])
    assert np.abs(rows[1][..., 0] - luma).max() <= 1


def test_palettes_and_their_transparent_colours(packed):
    image = Image.fromarray(picture(1)).quantize(16)
    index, plain = np.asarray(image), np.asarray(image.convert("RGB"))
    hole = int(index[0, 0])
    files = [saved(image, "PNG"), saved(image, "GIF"), saved(image, "PNG", transparency=hole)]
    png, gif, with_hole = packed(files)
    assert np.array_equal(png, plain) and np.array_equal(gif, plain)
    assert np.array_equal(with_hole, np.where(index[..., None] == hole, 255, plain))


def test_files_without_colour_make_a_gray_pack(packed):
    bits = picture(1, channels=1)[..., 0] > 128
    gray, key = gray_image(), int(picture(1, channels=1)[3, 3, 0])
    grays = np.asarray(gray)
    alpha = np.full(grays.shape, 51, np.uint8)
    with_alpha = Image.merge("LA", [gray, Image.fromarray(alpha)])
    files = [
        saved(gray.convert("P"), "PNG"),
        saved(Image.fromarray(bits), "PNG"),
        saved(gray, "PNG", transparency=key),
        saved(with_alpha, "PNG"),
    ]
    palette, black_white, with_key, fifth = packed(files)[..., 0]
    assert np.array_equal(palette, grays) and np.array_equal(black_white, 255 * bits)
    assert np.array_equal(with_key, np.where(grays == key, 255, grays))
    assert np.abs(fifth.astype(int) - (grays / 5 + 255 * 4 / 5)).max() <= 1


@pytest.mark.parametrize(("background", "value"), [("white", 255), ("black", 0)])
def test_transparency_is_laid_over_the_background(packed, background, value):
    alpha = np.full((11, 13, 1), 51, np.uint8)  # a fifth
    alpha[0] = 0
    file = encode(np.concatenate([picture(1), alpha], axis=2))
    (row,) = packed([file], background=background).astype(int)
    assert (row[0] == value).all()
    assert np.abs(row[1:] - (picture(1)[1:] / 5 + value * 4 / 5)).max() <= 1


def test_cmyk_becomes_red_green_blue(packed):
    image = Image.new("CMYK", (13, 11), (0, 255, 255, 0))
    for red, green, blue in packed([saved(image, "JPEG"), saved(image, "TIFF")])[:, 5, 5]:
        assert red > 240 and green < 15 and blue < 15


def test_sixteen_bits_are_divided_by_257_on_request(packed):
    values = np.array([[0, 128, 129, 257, 65535, 32896]], np.uint16)
    files = [saved(Image.fromarray(values), kind) for kind in ("PNG", "TIFF")]
    rows = packed(files, "6x1", dtype="uint8")
    assert rows.shape == (2, 1, 6, 1)
    assert rows[..., 0].tolist() == [[[0, 0, 1, 1, 255, 128]]] * 2


@pytest.mark.parametrize("kind", ["JPEG", "PNG", "TIFF"])
@pytest.mark.parametrize("size", ["40x24", "20x12"])
def test_exif_orientation_is_applied(packed, kind, size):
    upright = np.zeros((24, 40, 3), np.uint8)
    upright[:8, :8] = 255  # the top left corner is white
    stored = {  # how a camera stores it under each orientation
        1: upright,
        2: upright[:, ::-1],
        3: upright[::-1, ::-1],
        4: upright[::-1],
        5: upright.transpose(1, 0, 2),
        6: np.rot90(upright, 1),
        7: np.rot90(upright.transpose(1, 0, 2), 2),
        8: np.rot90(upright, -1),
    }
    files = []
    for orientation, pixels in stored.items():
        exif = Image.Exif()
        exif[0x0112] = orientation
        quality = {"quality": 100} if kind == "JPEG" else {}
        image = Image.fromarray(np.ascontiguousarray(pixels))
        files.append(saved(image, kind, exif=exif, **quality))
    width, height = map(int, size.split("x"))
    expected = np.asarray(Image.fromarray(upright).resize((width, height), 2)).astype(int)
    assert np.abs(packed(files, size) - expected).max() <= 12


@pytest.mark.filterwarnings("ignore:Corrupt EXIF")
def test_damaged_exif_does_not_spoil_the_pixels(packed):
    data = encode(picture(1), "JPEG", exif=b"Exif\0\0MM\0*\xff\xff\xff\xff garbage")
    assert np.array_equal(packed([data])[0], np.asarray(Image.open(io.BytesIO(data))))


def test_images_are_stretched_or_cropped_to_size(packed):
    wide = np.zeros((10, 40, 3), np.uint8)
    wide[:, 15:25] = 255  # the centre square
    files = [encode(wide), encode(np.ascontiguousarray(wide.transpose(1, 0, 2)))]
    stretched, tall = packed(files, "8x8")
    assert stretched[:, 0].max() == 0 and stretched[:, 4].min() > 200 and tall.min() == 0
    stretched, tall = packed(files, "8x8", crop=True)
    assert stretched[:, 1:-1].min() == 255 and tall[1:-1].min() == 255


def test_shrinking_does_not_alias(packed):
    stripes = np.zeros((64, 64, 1), np.uint8)
    stripes[:, ::2] = 255
    assert np.ptp(packed([encode(stripes)], "8x8").astype(int)) <= 10


@pytest.mark.parametrize("crop", [False, True])
def test_a_large_jpeg_that_is_decoded_at_reduced_scale_stays_close(packed, crop):
    """With detail of the size of its pixels: at 1/4 scale here, at 1/8 it would be far off."""
    detail = np.random.default_rng(0).integers(40, 216, (92, 100, 3), np.uint8)
    pixels = Image.fromarray(detail).resize((970, 890), Image.Resampling.BILINEAR)
    data = encode(np.asarray(pixels), "JPEG", quality=95)
    whole = Image.open(io.BytesIO(data))
    settings = {"crop": True} if crop else {}
    small, full = packed([data, encode(np.asarray(whole))], "100x92", **settings).astype(int)
    assert 0 < np.abs(small - full).mean() < 2
    eighth = whole.reduce(8).resize((100, 92), Image.Resampling.BILINEAR)
    assert crop or np.abs(np.asarray(eighth).astype(int) - full).mean() > 6


def test_damaged_files_and_foreign_formats_are_listed(tmp_path, capfd):
    whole = {kind: encode(picture(1, 97, 89), kind) for kind in ("PNG", "JPEG", "GIF", "BMP")}
    bomb = io.BytesIO()
    Image.new("1", (20000, 20000)).save(bomb, "PNG")
    gray = np.asarray(gray_image())
    bad = {f"half.{kind}": data[: len(data) // 2] for kind, data in whole.items()}
    bad |= {
        "postscript": b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n",  # no program is started
        "bomb.png": bomb.getvalue(),
        "beyond.tif": saved(Image.fromarray(gray.astype(np.int32) * 999), "TIFF"),
        "empty": b"",
        "text": b"not an image",
    }
    (tmp_path / "images" / "a").mkdir(parents=True)
    for name, data in {**whole, **bad}.items():
        (tmp_path / "images" / "a" / name).write_bytes(data)
    path = make_pack(
        tmp_path / "images", tmp_path / "a.h5", size="7x5", split="1", skip_bad=True, jobs=2
    )
    skipped = facts(path)["provenance"]["skipped"]
    assert skipped["names"] == sorted(f"a/{name}" for name in bad) and len(arrays(path)[0]) == 4
    assert "0x" not in capfd.readouterr().err  # no memory address: equal runs say equal things


# Packs of JPEG files


def stored_files(path):
    """The JPEG files of a pack, by class."""
    with h5py.File(path) as file:
        data, ends = file["train/bytes"][:].tobytes(), file["train/offsets"][:].tolist()
        labels = file["train/targets"][:].tolist()
    return {label: data[ends[row] : ends[row + 1]] for row, label in enumerate(labels)}


def rotated(image, orientation):
    exif = Image.Exif()
    exif[0x0112] = orientation
    return saved(image, "JPEG", exif=exif, quality=95)


def test_upright_jpeg_files_are_kept_and_all_others_encoded_once(tmp_path):
    colour = Image.fromarray(picture(1, 41, 37))
    plain = saved(colour, "JPEG", quality=61)
    half = colour.convert("RGBA")
    half.putalpha(128)
    kept = [
        plain,
        saved(colour.convert("L"), "JPEG"),
        saved(colour, "JPEG", progressive=True),
        saved(colour, "JPEG", subsampling=2, comment=b"kept"),
        rotated(colour, 1),
        plain + b"after the end",
    ]
    others = [
        (saved(colour, "PNG"), "RGB", colour),
        (saved(colour.convert("CMYK"), "JPEG"), "RGB", colour),
        (saved(colour.quantize(250), "PNG"), "RGB", colour),
        (saved(colour.convert("L"), "PNG"), "L", colour.convert("L")),
        (rotated(colour, 6), "RGB", colour.transpose(Image.Transpose.ROTATE_270)),
        (saved(half, "PNG"), "RGB", colour.point(lambda v: v // 2 + 127)),
    ]
    for number, data in enumerate([*kept, *(data for data, _, _ in others)]):
        (tmp_path / f"images/{number:02}").mkdir(parents=True)
        (tmp_path / f"images/{number:02}/image").write_bytes(data)
    path = make_pack(tmp_path / "images", tmp_path / "a.h5", split="1", size="9x9", encoding="jpeg")
    found = stored_files(path)
    assert [found[number] for number in range(6)] == kept
    assert facts(path)["provenance"]["encoding"] == {"name": "jpeg", "kept": 6, "encoded_anew": 6}
    tables = Image.open(io.BytesIO(saved(colour, "JPEG", quality=95))).quantization
    for number, (_, mode, upright) in enumerate(others, start=6):
        image = Image.open(io.BytesIO(found[number]))
        assert (image.format, image.mode, image.size) == ("JPEG", mode, upright.size)
        assert image.getexif().get(0x0112, 1) == 1
        if mode == "RGB":
            assert {layer[1:3] for layer in image.layer} == {(1, 1)}  # 4:4:4
            assert image.quantization == tables
        assert np.abs(np.int16(image) - np.int16(upright)).mean() < 4


@pytest.mark.parametrize(
    ("size", "crop", "channels"),
    [("17x13", False, 3), ("17x13", True, 1), ("5x3", True, 3), ("97x101", True, 3)],
)
def test_jpeg_files_decode_to_the_rows_of_a_pack_of_pixels(tmp_path, size, crop, channels):
    root = class_folders(tmp_path / "images", {"a": 9, "b": 7}, ".jpg", width=41, height=37)
    settings = {"size": size, "channels": channels, "split": "1"} | ({"crop": True} if crop else {})
    images, labels = arrays(make_pack(root, tmp_path / "a.h5", **settings))
    path = make_pack(root, tmp_path / "b.h5", encoding="jpeg", **settings)
    with hp.Split(hp.read_pack(path), "train") as split:
        found = split.gather(np.arange(16), np.empty_like(images))
        assert np.array_equal(found, images) and np.array_equal(split.targets, labels)
    assert facts(path)["mean"].tolist() == facts(tmp_path / "a.h5")["mean"].tolist()
