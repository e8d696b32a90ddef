"""What pack says of changed images: each row of the table in docs/data.md."""

import re
from pathlib import Path

import numpy as np
import pytest
from PIL import Image, ImageCms

from tests.support.api import Fit, decode
from tests.support.odd_files import COLOUR_ALPHA, GRAY, png16, saved, tiff, tiff_page
from tests.support.pictures import arrays, class_folders, encode, facts, make_pack, picture

PIXELS = picture(1)
PICTURE = Image.fromarray(PIXELS)
GRAYS = picture(1, channels=1)[..., 0]
HALF = np.concatenate([PIXELS, np.full((11, 13, 1), 128, np.uint8)], axis=2)
SRGB = ImageCms.ImageCmsProfile(ImageCms.createProfile("sRGB")).tobytes()
ALIEN = SRGB.replace(b"sRGB", b"eRGB").replace("sRGB".encode("utf-16-be"), b"\0e\0R\0G\0B")
FRAMES = {"save_all": True, "append_images": [PICTURE.rotate(180)] * 2}
WHOLE = encode(picture(5, 60, 60))


def turned(orientation):
    exif = Image.Exif()
    exif[0x0112] = orientation
    return saved(PICTURE, "PNG", exif=exif)


def emptied():
    image = PICTURE.copy()
    image.putalpha(0)
    return saved(image, "PNG")


# Row of the table -> files by name, each with what is said of it
CHANGED = {
    "another size": {
        "tall.png": (encode(picture(2, 13, 31)), "stretched"),
        "small.png": (encode(picture(2, 6, 5)), "enlarged"),
    },
    "more than 8 bits": {
        "deep.png": (png16(GRAYS.astype(np.uint16) * 257, GRAY), "reduced to 8"),
        "deep.tif": (tiff(tiff_page(PIXELS.astype(np.uint16) * 257, 2)), "reduced to 8"),
    },
    "0 as white (WhiteIsZero of a TIFF), more than 8 bits": {
        "negative.tif": (tiff(tiff_page(GRAYS.astype(np.uint16) * 257, 0)), "inverted"),
    },
    "transparency": {
        "half.png": (encode(HALF), "laid over white"),
        "half16.png": (png16(HALF.astype(np.uint16) * 257, COLOUR_ALPHA), "laid over white"),
        "empty.png": (emptied(), "0 everywhere"),
    },
    "an EXIF orientation": {
        "turned.png": (turned(3), "turned upright"),
        "unknown.png": (turned(9), "taken as upright"),
    },
    "gray or colour": {"gray.png": (encode(GRAYS[..., None]), "repeated in 3 channels")},
    "channels beside colours and alpha": {
        "infrared.tif": (tiff(tiff_page(HALF, 2, t338=0)), "left out"),
    },
    "a palette, CMYK or YCbCr colours": {
        "ink.jpg": (saved(PICTURE.convert("CMYK"), "JPEG"), "converted to RGB"),
        "ink.tif": (saved(PICTURE.convert("CMYK"), "TIFF"), "converted to RGB"),
    },
    "a colour profile or gamma": {
        "alien.png": (saved(PICTURE, "PNG", icc_profile=ALIEN), "not applied"),
    },
    "a nodata value that the file states (GDAL_NODATA of a TIFF)": {
        "terrain.tif": (tiff(tiff_page(PIXELS, 2, t42113=b"-9999 ")), "GDAL_NODATA -9999"),
    },
    "several frames or images": {
        "moving.gif": (saved(PICTURE, "GIF", **FRAMES), "in all"),
        "moving.webp": (saved(PICTURE, "WEBP", **FRAMES), "first is kept"),
    },
}
REFUSED = {
    "signed or floating-point values": {
        "signed.tif": (tiff(tiff_page(GRAYS.astype(np.int8))), "signed 8-bit"),
        "floats.tif": (tiff(tiff_page(GRAYS.astype(np.float32))), "floating-point"),
    },
    "integers of more than 16 bits, or float64": {
        "large.tif": (tiff(tiff_page(GRAYS.astype(np.uint32) * 999)), "beyond 16 bits"),
    },
    "several pages of a TIFF, or images of a PPM": {
        "pages.tif": (tiff(tiff_page(PIXELS, 2), tiff_page(PIXELS, 2)), "2 pages"),
    },
    "damage": {
        "short.png": (WHOLE[:-40], "cut short"),
        "flipped.png": (WHOLE[:200] + bytes([WHOLE[200] ^ 4]) + WHOLE[201:], "CRC-32"),
        "short.jpg": (saved(PICTURE, "JPEG")[:-2], "cut short"),
    },
    "a layout that Pillow reads wrongly": {
        "planes.tif": (tiff(tiff_page(PIXELS.astype(np.uint16), 2, planar=True)), "planes"),
    },
    "another format": {
        "phone.jpg": (b"\0\0\0\x18ftypheic\0\0\0\0mif1heic" + bytes(99), "HEIC"),
        "page.png": (b"<!DOCTYPE html>", "HTML"),
    },
}
ELSEWHERE = {"very dark values", "8 bits beside files of 16"}  # of a whole pack


def write(folder, rows):
    folder.mkdir(parents=True)
    for files in rows.values():
        for name, (data, _) in files.items():
            (folder / name).write_bytes(data)


def test_every_row_of_the_table_is_said_and_counted(tmp_path, capfd):
    page = (Path(__file__).parents[2] / "docs" / "data.md").read_text()
    table = page.partition("| What an image has |")[2].partition("\n\n")[0]
    rows = set(re.findall(r"^\| ([^|]+?) \|", table, re.MULTILINE)) - {"---"}
    assert rows == {*CHANGED, *REFUSED, *ELSEWHERE}

    write(tmp_path / "images" / "a", {**CHANGED, **REFUSED})
    class_folders(tmp_path / "images", {"b": 12})
    path = make_pack(
        tmp_path / "images",
        tmp_path / "a.h5",
        size="13x11",
        channels=3,
        dtype="uint8",
        split="1",
        skip_bad=True,
    )
    lines = capfd.readouterr().err.splitlines()
    for files in CHANGED.values():
        for name, (_, text) in files.items():
            assert any(text in line and f"a/{name}" in line for line in lines), name
    refused = {name: text for files in REFUSED.values() for name, (_, text) in files.items()}
    bad = facts(path)["provenance"]["skipped"]
    assert bad["names"] == sorted(f"a/{name}" for name in refused)
    for name, text in refused.items():
        assert any(f"a/{name}" in line and text in line for line in lines)
    changed = facts(path)["provenance"]["changed"]
    assert changed == {
        "stretched": 2,
        "enlarged": 1,
        "sixteen_bits": 4,
        "transparency": 2,
        "empty_alpha": 1,
        "further_channels": 1,
        "orientation": 1,
        "bad_orientation": 1,
        "colour_space": 2,
        "colour_profile": 1,
        "nodata_stated": 1,
        "frames": 2,
        "gray_to_colour": 3,
        "inverted": 1,
    }
    assert facts(path)["provenance"]["background"] == "white"
    plain = class_folders(tmp_path / "plain", {"a": 9, "b": 9})
    assert facts(make_pack(plain, tmp_path / "b.h5"))["provenance"]["changed"] == {}


def test_all_images_are_changed_in_one_line_without_names(tmp_path, capfd):
    root = class_folders(tmp_path / "images", {"a": 9, "b": 9}, ".jpg")
    make_pack(root, tmp_path / "a.h5", size="20x20", channels=1, encoding="jpeg")
    said = capfd.readouterr().err
    assert re.search(r"stretched .*: 18 of 18 images$", said, re.MULTILINE)
    assert "gray by --channels 1: 18 of 18" in said and "encoded anew" not in said
    make_pack(root, tmp_path / "b.h5", size="7x7", crop=True)
    said = capfd.readouterr().err
    assert "cut at two sides by --crop: 18 of 18" in said and "stretched" not in said


@pytest.mark.parametrize(("bits", "option"), [(10, 1023), (12, 4095), (14, 16383)])
def test_few_bits_in_16_bit_files_are_not_reduced_to_8(tmp_path, refusal, bits, option):
    values = np.arange(2**bits, dtype=np.uint16)[:: 2 ** (bits - 8)].reshape(16, 16)
    values[0, 0] = option
    for number, pixels in enumerate((values, values.T)):
        folder = tmp_path / "images" / f"class{number}"
        folder.mkdir(parents=True)
        (folder / "x.png").write_bytes(png16(pixels, GRAY))
    said = refusal(tmp_path / "images", tmp_path / "a.h5", split="1", dtype="uint8")
    assert f"{option:,} of 65,535" in said and f"--max-value {option}" in said
    (tmp_path / "images" / "class0" / "y.png").write_bytes(png16(values * 0 + 65535, GRAY))
    make_pack(tmp_path / "images", tmp_path / "a.h5", split="1", dtype="uint8")


def test_few_bits_of_colour_are_refused_too(tmp_path, refusal):
    for number in range(2):
        folder = tmp_path / "images" / f"class{number}"
        folder.mkdir(parents=True)
        pixels = picture(number).astype(np.uint16) * 16
        (folder / "x.tif").write_bytes(tiff(tiff_page(pixels, 2)))
    said = refusal(tmp_path / "images", tmp_path / "a.h5", split="1", dtype="uint8")
    assert "--max-value 4095" in said


def test_masks_are_packed_with_a_note(tmp_path, capfd):
    for number in range(2):
        folder = tmp_path / "images" / f"class{number}"
        folder.mkdir(parents=True)
        (folder / "x.png").write_bytes(encode((picture(number, channels=1) > 128).astype(np.uint8)))
    path = make_pack(tmp_path / "images", tmp_path / "a.h5", split="1")
    said = capfd.readouterr().err
    assert "largest value of all images is 1 of 255" in said and "--max-value 1 " in said
    assert arrays(path)[0].max() == 1


def test_a_picture_of_pillow_is_laid_over_the_background_of_the_pack(tmp_path):
    """Decoding for a network is that of its pack, and the picture itself stays as it is."""
    image = Image.fromarray(HALF)
    for background, value in (("white", 255), ("black", 0)):
        pixels, _ = decode(image, Fit(13, 11, 3, background=background))
        found = np.frombuffer(pixels, np.uint8).reshape(11, 13, 3).astype(int)
        assert np.abs(found - (PIXELS * (128 / 255) + value * (127 / 255))).max() <= 1
    assert image.mode == "RGBA" and np.array_equal(np.asarray(image), HALF)


def test_files_encoded_as_jpeg_are_changed_and_counted_alike(tmp_path, capfd):
    folder = tmp_path / "images" / "a"
    folder.mkdir(parents=True)
    frames = {"save_all": True, "append_images": [PICTURE.rotate(180), PICTURE]}
    (folder / "moving.gif").write_bytes(saved(PICTURE, "GIF", **frames))
    (folder / "deep.png").write_bytes(png16(GRAYS.astype(np.uint16) * 257, GRAY))
    clear = np.concatenate([PIXELS, np.zeros((11, 13, 1), np.uint8)], axis=2)
    clear[0, 0, 3] = 255
    names = [f"clear{number}.png" for number in range(9)]
    for number, name in enumerate(names):
        clear[0, 0, 0] = number
        (folder / name).write_bytes(encode(clear))
    for encoding in ("raw", "jpeg"):
        path = make_pack(
            tmp_path / "images",
            tmp_path / f"{encoding}.h5",
            split="1",
            encoding=encoding,
            background="black",
            dtype="uint8",
        )
        said = capfd.readouterr().err
        assert "(3 in all)" in said and f"largest value {257 * int(GRAYS.max()):,}" in said
        listed = ", ".join(f"a/{name}" for name in names)
        assert f"laid over black (--background): 9 of 11 images: {listed}\n" in said
        assert facts(path)["provenance"]["background"] == "black"
    images = arrays(tmp_path / "raw.h5")[0]
    assert (images[:, 5, 5] == 0).all(axis=1).sum() == 9
