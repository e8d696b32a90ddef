import io

import numpy as np
import pytest
from PIL import Image

from hpctrain.data.images import BadImage, Fit, WrongSize, decode, fit_pixels, probe, read_image
from tests.data.pictures import encode, picture


def decoded(data: bytes, width=13, height=11, channels=3, **more) -> np.ndarray:
    pixels = decode(data, Fit(width, height, channels, **more))
    return np.frombuffer(pixels, np.uint8).reshape(height, width, channels)


def saved(image: Image.Image, kind: str, **options) -> bytes:
    file = io.BytesIO()
    image.save(file, kind, **options)
    return file.getvalue()


def test_lossless_files_come_back_bit_for_bit():
    pixels = picture(1)
    for kind in ("PNG", "BMP", "PPM", "TIFF"):
        assert (decoded(encode(pixels, kind)) == pixels).all(), kind
    webp = encode(pixels, "WEBP", lossless=True)
    assert (decoded(webp) == pixels).all()
    assert not (decoded(encode(picture(2))) == pixels).all()


def test_gray_becomes_colour_and_colour_becomes_gray():
    gray = picture(1, channels=1)
    assert (decoded(encode(gray)) == gray).all()  # all three channels
    assert (decoded(encode(gray), channels=1) == gray).all()
    colour = picture(1)
    luma = decoded(encode(colour), channels=1)[..., 0]
    expected = colour @ np.array([0.299, 0.587, 0.114])
    assert np.abs(luma - expected).max() <= 1


def test_palettes():
    image = Image.fromarray(picture(1)).quantize(16)
    assert (decoded(saved(image, "PNG")) == np.asarray(image.convert("RGB"))).all()
    assert (decoded(saved(image, "GIF")) == np.asarray(image.convert("RGB"))).all()
    assert probe(saved(image, "PNG")).colour
    grays = Image.fromarray(picture(1, channels=1)[..., 0]).convert("P")
    assert not probe(saved(grays, "PNG")).colour
    assert (decoded(saved(grays, "PNG"), channels=1) == picture(1, channels=1)).all()


def test_black_and_white():
    bits = picture(1, channels=1)[..., 0] > 128
    assert (decoded(saved(Image.fromarray(bits), "PNG"), channels=1)[..., 0] == 255 * bits).all()


def test_transparency_is_laid_over_black():
    colour = picture(1).astype(int)
    alpha = np.full(colour.shape[:2], 51)  # a fifth
    alpha[0] = 0
    rgba = np.dstack([colour, alpha]).astype(np.uint8)
    result = decoded(encode(rgba)).astype(int)
    assert (result[0] == 0).all()
    assert np.abs(result[1:] - colour[1:] / 5).max() <= 1
    gray = np.dstack([colour[..., 0], alpha]).astype(np.uint8)
    image = Image.merge("LA", [Image.fromarray(gray[..., i]) for i in (0, 1)])
    result = decoded(saved(image, "PNG"), channels=1)[..., 0].astype(int)
    assert np.abs(result - colour[..., 0] * alpha / 255).max() <= 1
    assert not probe(saved(image, "PNG")).colour


def test_transparent_palette_and_colour_key():
    image = Image.fromarray(picture(1)).quantize(16)
    index = np.asarray(image)
    hole = int(index[0, 0])
    result = decoded(saved(image, "PNG", transparency=hole))
    assert (result[index == hole] == 0).all()
    assert (result[index != hole] == np.asarray(image.convert("RGB"))[index != hole]).all()
    gray = picture(1, channels=1)[..., 0]
    key = int(gray[3, 3])
    result = decoded(saved(Image.fromarray(gray), "PNG", transparency=key), channels=1)[..., 0]
    assert (result == np.where(gray == key, 0, gray)).all()


def test_cmyk():
    image = Image.new("CMYK", (13, 11), (0, 255, 255, 0))
    for kind in ("JPEG", "TIFF"):
        red, green, blue = decoded(saved(image, kind))[5, 5].tolist()
        assert red > 240 and green < 15 and blue < 15, kind
    assert probe(saved(image, "JPEG")).colour


def test_sixteen_bits_are_scaled():
    values = np.array([[0, 128, 129, 257, 65535, 32896]], np.uint16)
    for kind in ("PNG", "TIFF"):
        result = decoded(saved(Image.fromarray(values), kind), 6, 1, 1)
        assert result[0, :, 0].tolist() == [0, 0, 1, 1, 255, 128], kind
    assert not probe(saved(Image.fromarray(values), "PNG")).colour
    with pytest.raises(BadImage, match="beyond 16 bits"):
        decoded(saved(Image.fromarray(values.astype(np.int32) * 9), "TIFF"), 6, 1, 1)
    with pytest.raises(BadImage, match="floating"):
        decoded(saved(Image.fromarray(values.astype(np.float32)), "TIFF"), 6, 1, 1)


@pytest.mark.parametrize("kind", ["JPEG", "PNG", "TIFF"])
def test_exif_orientation(kind):
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
    for orientation, pixels in stored.items():
        exif = Image.Exif()
        exif[0x0112] = orientation
        options = {"exif": exif} if kind != "JPEG" else {"exif": exif, "quality": 100}
        data = saved(Image.fromarray(np.ascontiguousarray(pixels)), kind, **options)
        assert probe(data)[:2] == (40, 24), orientation
        for width, height in ((40, 24), (20, 12)):
            result = decoded(data, width, height).astype(int)
            expected = np.asarray(Image.fromarray(upright).resize((width, height), 2)).astype(int)
            assert np.abs(result - expected).max() <= 12, (orientation, width)
        assert decoded(data, 40, 24, exact=True)[2, 2].min() > 240, orientation


@pytest.mark.filterwarnings("ignore:Corrupt EXIF")
def test_damaged_exif_does_not_spoil_the_pixels():
    data = encode(picture(1), "JPEG", exif=b"Exif\0\0MM\0*\xff\xff\xff\xff garbage")
    assert decoded(data).shape == (11, 13, 3)


def test_stretch_and_crop():
    wide = np.zeros((10, 40, 3), np.uint8)
    wide[:, 15:25] = 255  # the centre square
    data = encode(wide)
    stretched = decoded(data, 8, 8)
    assert stretched[:, 0].max() == 0 and stretched[:, 4].min() > 200
    assert decoded(data, 8, 8, crop=True)[:, 1:-1].min() == 255
    tall = encode(np.ascontiguousarray(wide.transpose(1, 0, 2)))
    assert decoded(tall, 8, 8, crop=True)[1:-1].min() == 255
    assert decoded(tall, 8, 8).min() == 0


def test_shrinking_does_not_alias():
    stripes = np.zeros((64, 64, 1), np.uint8)
    stripes[:, ::2] = 255
    assert np.ptp(decoded(encode(stripes), 8, 8, 1).astype(int)) <= 10


def test_a_large_jpeg_decoded_at_reduced_scale_stays_close():
    pixels = np.asarray(Image.fromarray(picture(3, 97, 89)).resize((970, 890), 3))
    data = encode(pixels, "JPEG", quality=95)
    for options in ({}, {"crop": True}):
        result = decoded(data, 53, 47, **options).astype(int)
        full = fit_pixels(
            np.asarray(Image.open(io.BytesIO(data))).tobytes(),
            (890, 970, 3),
            Fit(53, 47, 3, **options),
        )
        difference = np.abs(result.ravel() - np.frombuffer(full, np.uint8))
        assert difference.mean() < 0.6 and difference.max() <= 4


def test_exact_size():
    data = encode(picture(1))
    assert (decoded(data, exact=True) == picture(1)).all()
    with pytest.raises(WrongSize) as caught:
        decode(data, Fit(11, 13, 3, exact=True))
    assert caught.value.size == (13, 11)
    with pytest.raises(WrongSize):
        fit_pixels(picture(1).tobytes(), (11, 13, 3), Fit(12, 11, 3, exact=True))


def test_damaged_files_say_why():
    whole = {kind: encode(picture(1, 97, 89), kind) for kind in ("PNG", "JPEG", "GIF", "BMP")}
    for kind, data in whole.items():
        with pytest.raises(BadImage):
            decoded(data[: len(data) // 2])
        assert decoded(data).shape == (11, 13, 3), kind
    for data in (b"", b"\0" * 99, b"GIF89a", b"not an image"):
        with pytest.raises(BadImage) as caught:
            probe(data)
        assert "0x" not in str(caught.value)  # no memory address: equal runs say equal things
    with pytest.raises(BadImage, match="known format"):
        decoded(b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n")  # would start Ghostscript


def test_a_decompression_bomb_is_refused():
    file = io.BytesIO()
    Image.new("1", (20000, 20000)).save(file, "PNG")
    with pytest.raises(BadImage, match="exceeds limit"):
        decoded(file.getvalue())


def test_only_the_first_frame_counts():
    frames = [Image.fromarray(picture(n)).quantize(64) for n in (1, 2)]
    data = saved(frames[0], "GIF", save_all=True, append_images=frames[1:])
    assert (decoded(data) == np.asarray(frames[0].convert("RGB"))).all()


def test_read_image(tmp_path):
    path = tmp_path / "a.png"
    path.write_bytes(encode(picture(1)))
    image = read_image(str(path), (11, 13, 3))
    assert (image == picture(1)).all() and image.flags.writeable
    assert read_image(str(path), (5, 7, 1), crop=True).shape == (5, 7, 1)
    path.write_bytes(b"?")
    with pytest.raises(BadImage):
        read_image(str(path), (11, 13, 3))
    with pytest.raises(FileNotFoundError):
        read_image(str(tmp_path / "none.png"), (11, 13, 3))
