"""What becomes of odd image files: pixels, what is said to be changed, and what is refused."""

import io
import re
import struct
import zlib

import numpy as np
import pytest
from PIL import Image, ImageCms, features

from tests.support.api import BadImage, Fit, decode, names_of_changes, read_header
from tests.support.odd_files import (
    COLOUR,
    COLOUR_ALPHA,
    DEEP_AVIF,
    DEEP_JPEG_2000,
    GRAY,
    GRAY_ALPHA,
    LOSSLESS_JPEG,
    deflated_tiff,
    png,
    png16,
    saved,
    tiff,
    tiff_of_12_bits,
    tiff_page,
)
from tests.support.pictures import encode, picture

WIDTH, HEIGHT = 13, 11
PIXELS = picture(1, WIDTH, HEIGHT)  # (H, W, 3) uint8
GRAYS = picture(1, WIDTH, HEIGHT, channels=1)[..., 0]  # (H, W) uint8
DEEP = GRAYS.astype(np.uint16) * 257  # the same in 16 bits
PICTURE, OTHER = Image.fromarray(PIXELS), Image.fromarray(picture(2, WIDTH, HEIGHT))
SMALL = tiff_page(PIXELS[:3, :4], 2, t254=1)  # a page for thumbnails
FOUR = np.array([[0, 1, 300, 65535]], np.uint16)

HAS_AVIF = "avif" in features.get_supported()  # from Pillow 11.3 on
NEEDS_NEW_PILLOW = (
    "lossless jpeg",
    "PA tiff",
    "associated alpha of gray",
    "run lengths",
    "mpo of 3 images",
)

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")  # of Pillow, on metadata


def result(data: bytes, channels: int = 0, **fit) -> tuple[np.ndarray, set[str], object]:
    """The pixels (H, W, C) of a file in its own size, the names of its changes, and all of them."""
    width, height, colours, *_ = read_header(data, Fit(0, 0, 3))
    channels = channels or colours
    pixels, changes = decode(data, Fit(width, height, channels, **fit))
    pixels = np.frombuffer(pixels, np.uint8).reshape(height, width, channels)
    return pixels, names_of_changes(changes), changes


def skip_with_old_pillow(name):
    if name in NEEDS_NEW_PILLOW and not HAS_AVIF:
        pytest.skip("this Pillow refuses such files, or writes them wrongly")


def exif(orientation: int) -> Image.Exif:
    found = Image.Exif()
    found[0x0112] = orientation
    return found


# Transparency

HALF = np.array([[[10, 20, 30, 0], [40, 50, 60, 128], [70, 80, 90, 255]]], np.uint8)
BLENDED = [[255, 255, 255], [147, 152, 157], [70, 80, 90]]
RGBA = Image.fromarray(HALF)
KINDS = {
    "PNG": {},
    "TIFF": {},
    "WEBP": {"lossless": True, "exact": True},
    "JPEG2000": {},
    **({"AVIF": {"quality": 100}} if HAS_AVIF else {}),
}


@pytest.mark.parametrize("kind", KINDS)
def test_transparent_pixels_are_white_whatever_the_format(kind):
    pixels, changed, _ = result(saved(RGBA, kind, **KINDS[kind]))
    assert np.abs(pixels[0].astype(int) - BLENDED).max() <= 1
    assert changed == {"TRANSPARENCY"}


@pytest.mark.parametrize("kind", KINDS)
def test_an_alpha_channel_that_is_0_everywhere_is_none(kind):
    clear = RGBA.copy()
    clear.putalpha(0)
    pixels, changed, _ = result(saved(clear, kind, **KINDS[kind]))
    assert np.abs(pixels[0].astype(int) - HALF[0, :, :3]).max() <= 1
    assert changed == {"EMPTY_ALPHA"}
    clear.putalpha(255)
    assert result(saved(clear, kind, **KINDS[kind]))[1] == set()


def test_16_bit_gray_of_which_all_is_transparent_is_kept():
    values = np.full((2, 3), 25700, np.uint16)
    pixels, changed, _ = result(png16(values, GRAY, tRNS=struct.pack(">H", 25700)))
    assert (pixels == 100).all() and changed == {"SIXTEEN_BITS", "EMPTY_ALPHA"}


GRAY_HALF = [[[255], [151], [78]]]
PREMULTIPLIED = np.array([[[64, 0, 0, 128], [0, 0, 0, 0]]], np.uint8)
TRANSPARENT = {
    "LA png": (saved(RGBA.convert("LA"), "PNG"), GRAY_HALF),
    "LA tiff": (saved(RGBA.convert("LA"), "TIFF"), GRAY_HALF),
    "LA jpeg 2000": (saved(RGBA.convert("LA"), "JPEG2000"), GRAY_HALF),
    "PA tiff": (saved(RGBA.convert("PA"), "TIFF"), [BLENDED]),
    "gif": (saved(RGBA, "GIF"), [[[255, 255, 255], [40, 50, 60], [70, 80, 90]]]),
    "associated alpha": (
        tiff(tiff_page(PREMULTIPLIED, 2, t338=1)),
        [[[191, 127, 127], [255, 255, 255]]],
    ),
    "associated alpha of gray": (
        tiff(tiff_page(np.array([[[64, 128], [0, 0]]], np.uint8), 1, t338=1)),
        [[[191], [255]]],
    ),
    "2 bits": (png([bytes([0b00011011])], 4, 2, GRAY, tRNS=b"\0\1"), [[[0], [255], [170], [255]]]),
    "4 bits": (png([b"\x01\x8f"], 4, 4, GRAY, tRNS=b"\0\1"), [[[0], [255], [136], [255]]]),
    "16 bits": (png16(FOUR, GRAY, tRNS=struct.pack(">H", 1)), [[[0], [255], [1], [255]]]),
    "16 bits, colour": (
        png16(np.array([[[1, 2, 771], [770] * 3]], np.uint16), COLOUR, tRNS=b"\3\2" * 3),
        [[[0, 0, 3], [255, 255, 255]]],
    ),
    "16 bits, gray with alpha": (
        png16(np.array([[[25700, 65535], [65535, 0]]], np.uint16), GRAY_ALPHA),
        [[[100], [255]]],
    ),
    "16 bits, colour with alpha": (
        png16(np.array([[[257, 514, 771, 65535], [9, 9, 9, 0]]], np.uint16), COLOUR_ALPHA),
        [[[1, 2, 3], [255, 255, 255]]],
    ),
}


@pytest.mark.parametrize("name", TRANSPARENT)
def test_transparency_of_every_kind_is_white(name):
    skip_with_old_pillow(name)
    data, expected = TRANSPARENT[name]
    pixels, changed, _ = result(data)
    assert changed - {"SIXTEEN_BITS"} == {"TRANSPARENCY"} and pixels.tolist() == expected


def test_what_the_first_frame_of_a_gif_does_not_cover_is_transparent():
    dots = Image.new("P", (2, 1))
    dots.putpalette([200, 0, 0, 0, 200, 0])
    dots.putdata([1, 0])
    file = bytearray(saved(dots, "GIF"))
    file[6:10] = struct.pack("<HH", 4, 1)  # the size of all
    place = file.index(b",\0\0\0\0")
    file[place + 1 : place + 3] = struct.pack("<H", 1)  # the left end of the frame
    pixels, changed, _ = result(bytes(file))
    white = [255, 255, 255]
    assert pixels.tolist() == [[white, [0, 200, 0], [200, 0, 0], white]]
    assert changed == {"TRANSPARENCY"}


# Depth, and what Pillow reads wrongly

DEPTHS = {
    "16-bit png": png16(DEEP, GRAY),
    "16-bit tiff": tiff(tiff_page(DEEP)),
    "16-bit tiff, big-endian": tiff(tiff_page(DEEP), order=">"),
    "16-bit tiff, white is 0": tiff(tiff_page(65535 - DEEP, 0)),
    "16-bit tiff, white is 0, lzw": saved(
        Image.open(io.BytesIO(tiff(tiff_page(65535 - DEEP, 0)))),
        "TIFF",
        tiffinfo={262: 0},
        compression="tiff_lzw",
    ),
    "16-bit jpeg 2000": saved(Image.fromarray(DEEP), "JPEG2000"),
    "16-bit pgm": b"P5 13 11 65535\n" + DEEP.astype(">u2").tobytes(),
    "12-bit pgm": b"P5 13 11 4095\n" + (DEEP // 16).astype(">u2").tobytes(),
    "12-bit tiff": tiff_of_12_bits(DEEP // 16),
    "32-bit tiff": tiff(tiff_page(DEEP.astype(np.uint32))),
}


@pytest.mark.parametrize("name", DEPTHS)
def test_16_bit_gray_is_reduced_to_the_same_8_bits(name):
    pixels, changed, changes = result(DEPTHS[name])
    assert ("INVERTED" in changed) == ("white is 0" in name)
    assert changed - {"INVERTED"} == {"SIXTEEN_BITS"}
    assert np.abs(pixels[..., 0].astype(int) - GRAYS).max() <= 1
    assert changes.largest > 2**15


WIDE = PIXELS.astype(np.uint16) * 257
COLOURS = {
    "png": png16(WIDE, COLOUR),
    "tiff": tiff(tiff_page(WIDE, 2)),
    "ppm": b"P6 13 11 65535\n" + WIDE.astype(">u2").tobytes(),
    "ascii ppm": b"P3 13 11 65535\n" + b" ".join(b"%d" % v for v in WIDE.ravel()) + b"\n",
}


@pytest.mark.parametrize("name", COLOURS)
def test_16_bit_colour_is_reduced_and_said_to_be(name):
    pixels, changed, changes = result(COLOURS[name])
    assert ("INVERTED" in changed) == ("white is 0" in name)
    assert (
        changed - {"INVERTED"} == {"SIXTEEN_BITS"}
        and np.abs(pixels.astype(int) - PIXELS).max() <= 1
    )
    assert changes.largest == 257 * int(PIXELS.max())


@pytest.mark.skipif(not HAS_AVIF, reason="this Pillow does not read AVIF")
def test_avif_of_more_than_8_bits_is_said_to_be():
    """Written by libaom."""
    pixels, changed, changes = result(DEEP_AVIF)
    steps = np.arange(64).reshape(8, 8, 1).repeat(3, axis=2) * 4
    assert np.abs(pixels.astype(int) - steps).max() <= 4
    assert changed == {"SIXTEEN_BITS"} and changes.largest > 250 * 257


REVERSED = bytes(int(f"{byte:08b}"[::-1], 2) for byte in zlib.compress(GRAYS.tobytes()))
MASKS = struct.pack("<3I", 0xF800, 0x7E0, 0x1F)  # of red, green and blue
BITMAP_565 = (
    b"BM"
    + struct.pack("<3I", 70, 0, 66)
    + struct.pack("<3i2H6I", 40, 2, 1, 1, 16, 3, 4, 0, 0, 0, 0)
    + MASKS
    + struct.pack("<2H", 0xF800, 0x7E0)
)
SAME = {
    "5, 6 and 5 bits": (BITMAP_565, np.array([[[255, 0, 0], [0, 255, 0]]])),
    "lossless jpeg": (LOSSLESS_JPEG, np.arange(64).reshape(8, 8) * 4),
    "8 bits, white is 0": (tiff(tiff_page(255 - GRAYS, 0)), GRAYS),
    "planes of 8 bits": (tiff(tiff_page(PIXELS, 2, planar=True)), PIXELS),
    "several strips": (saved(PICTURE, "TIFF", tiffinfo={278: 2}, compression="tiff_lzw"), PIXELS),
    "deflated": (saved(PICTURE, "TIFF", compression="tiff_adobe_deflate"), PIXELS),
    "deflated, bits reversed": (deflated_tiff(GRAYS, REVERSED, t266=2), GRAYS),
    "deflated, with more": (deflated_tiff(GRAYS, zlib.compress(GRAYS.tobytes() + b"x")), GRAYS),
    "packed bits": (saved(PICTURE, "TIFF", compression="packbits"), PIXELS),
    "BigTIFF": (saved(PICTURE, "TIFF", big_tiff=True), PIXELS),
    "thumbnail after": (tiff(tiff_page(PIXELS, 2), SMALL), PIXELS),
    "thumbnail before": (tiff(SMALL, tiff_page(PIXELS, 2)), PIXELS),
    "pgm of maximum 100": (b"P5 2 1 100\n" + bytes([100, 20]), np.array([[255, 51]])),
    "run lengths": (
        b"BM" + struct.pack("<IHHI", 78, 0, 0, 62)
        + struct.pack("<IiiHHIIiiII", 40, 4, 1, 1, 8, 1, 0, 0, 0, 2, 0)
        + bytes([0, 0, 0, 0, 255, 255, 255, 0, 3, 1, 1, 0, 0, 1]),
        np.array([[[255] * 3] * 3 + [[0] * 3]])[..., 0],
    ),
    "rows from the top": (
        b"BM" + struct.pack("<IHHI", 62, 0, 0, 54)
        + struct.pack("<IiiHHIIiiII", 40, 1, -2, 1, 32, 0, 0, 0, 0, 0, 0)
        + bytes([1, 2, 3, 0, 4, 5, 6, 0]),
        np.array([[[3, 2, 1]], [[6, 5, 4]]]),
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", SAME)
def test_ordinary_files_of_unusual_layout_are_read_as_they_are(name):
    skip_with_old_pillow(name)
    data, expected = SAME[name]
    pixels, changed, _ = result(data)
    assert changed == set() and pixels.squeeze().tolist() == expected.squeeze().tolist()


# What is changed beside

SRGB = ImageCms.ImageCmsProfile(ImageCms.createProfile("sRGB")).tobytes()
ALIEN = SRGB.replace(b"sRGB", b"eRGB").replace("sRGB".encode("utf-16-be"), b"\0e\0R\0G\0B")
FRAMES = {"save_all": True, "append_images": [OTHER, PICTURE.rotate(180)]}
CMYK = Image.new("CMYK", (WIDTH, HEIGHT), (0, 255, 255, 0))
CHANGED = {
    "gif of 3 frames": (saved(PICTURE, "GIF", **FRAMES), {"FRAMES"}),
    "webp of 3 frames": (saved(PICTURE, "WEBP", **FRAMES), {"FRAMES"}),
    "png of 3 frames": (saved(PICTURE, "PNG", **FRAMES), {"FRAMES"}),
    "mpo of 3 images": (saved(PICTURE, "MPO", **FRAMES), {"FRAMES"}),
    "cmyk jpeg": (saved(CMYK, "JPEG"), {"COLOUR_SPACE"}),
    "cmyk tiff": (saved(CMYK, "TIFF"), {"COLOUR_SPACE"}),
    "profile": (saved(PICTURE, "PNG", icc_profile=ALIEN), {"COLOUR_PROFILE"}),
    "profile of sRGB": (saved(PICTURE, "JPEG", icc_profile=SRGB), set()),
    "profile of sRGB, version 2": (saved(PICTURE, "PNG", icc_profile=b"desc sRGB IEC61966"), set()),
    "profile, version 2": (saved(PICTURE, "PNG", icc_profile=b"desc P3"), {"COLOUR_PROFILE"}),
    "gamma": (png([b"\1\2"], 2, 8, GRAY, gAMA=struct.pack(">I", 100000)), {"COLOUR_PROFILE"}),
    "gamma of sRGB": (png([b"\1\2"], 2, 8, GRAY, gAMA=struct.pack(">I", 45455)), set()),
    "infrared": (tiff(tiff_page(HALF, 2, t338=0)), {"FURTHER_CHANNELS"}),
    "orientation 6": (saved(PICTURE, "PNG", exif=exif(6)), {"ORIENTATION"}),
    "orientation 6 of webp": (saved(PICTURE, "WEBP", exif=exif(6)), {"ORIENTATION"}),
    "orientation 6 of tiff": (tiff(tiff_page(PIXELS, 2, t274=6)), {"ORIENTATION"}),
    "orientation 6, 16 bits": (
        tiff(tiff_page(DEEP, 1, t274=6)),
        {"ORIENTATION", "SIXTEEN_BITS"},
    ),
    "orientation 1": (saved(PICTURE, "PNG", exif=exif(1)), set()),
    "orientation 0": (saved(PICTURE, "PNG", exif=exif(0)), {"BAD_ORIENTATION"}),
    "orientation 9": (saved(PICTURE, "JPEG", exif=exif(9)), {"BAD_ORIENTATION"}),
    "damaged exif": (
        saved(PICTURE, "JPEG", exif=b"Exif\0\0MM\0*\xff\xff\xff\xff garbage"),
        {"BAD_ORIENTATION"},
    ),
    "empty exif": (saved(PICTURE, "JPEG", exif=b"Exif\0\0"), set()),
}
if HAS_AVIF:
    CHANGED["avif of 3 frames"] = saved(PICTURE, "AVIF", **FRAMES), {"FRAMES"}
    CHANGED["avif, turned"] = saved(PICTURE, "AVIF", exif=exif(6)), {"ORIENTATION"}
    CHANGED["avif"] = saved(PICTURE, "AVIF"), set()
    bright = DEEP_AVIF.replace(b"nclx\0\2\0\2", b"nclx\0\x09\0\x10")  # BT.2020, PQ
    CHANGED["avif of high dynamic range"] = bright, {"SIXTEEN_BITS", "COLOUR_PROFILE"}


@pytest.mark.parametrize("name", CHANGED)
def test_changes_are_said(name):
    skip_with_old_pillow(name)
    data, expected = CHANGED[name]
    pixels, changed, changes = result(data)
    assert changed == expected and changes.frames == (3 if "FRAMES" in expected else 0)
    upright = np.asarray(Image.open(io.BytesIO(data)).convert("RGB"))
    if "ORIENTATION" in expected:
        upright = np.rot90(upright, -1) if upright.shape[:2] == (HEIGHT, WIDTH) else upright
    if "SIXTEEN_BITS" not in expected:
        assert pixels.tolist() == upright[..., : pixels.shape[2]].tolist()


@pytest.mark.parametrize(
    ("fit", "expected"),
    [
        (Fit(26, 22, 3), {"ENLARGED", "RESIZED"}),
        (Fit(13, 12, 3), {"STRETCHED", "ENLARGED", "RESIZED"}),
        (Fit(5, 5, 3, crop=True), {"CROPPED", "RESIZED"}),
        (Fit(13, 11, 1), {"COLOUR_TO_GRAY"}),
        (Fit(13, 11, 3), set()),
    ],
)
def test_resizing_is_said(fit, expected):
    _, changes = decode(encode(PIXELS), fit)
    assert names_of_changes(changes) == expected
    _, changes = decode(encode(GRAYS[..., None]), Fit(13, 11, 3))
    assert names_of_changes(changes) == {"GRAY_TO_COLOUR"}


# What is refused

LARGE = np.random.default_rng(0).integers(0, 255, (80, 90, 3), np.uint8)
JPEG = encode(LARGE, "JPEG", quality=80)
SCAN = JPEG.index(b"\xff\xda") + 14  # where its compressed data begin
MIDDLE = (SCAN + len(JPEG)) // 2
PNG = encode(LARGE)
LZW = encode(LARGE, "TIFF", compression="tiff_lzw")
PROGRESSIVE = encode(LARGE, "JPEG", progressive=True)
NOISE2 = np.random.default_rng(2).bytes(len(PROGRESSIVE))
LONG = zlib.compress(GRAYS.tobytes() + bytes(9))  # libtiff stops before the Adler-32
NOISE = np.random.default_rng(1).bytes(len(JPEG)).replace(b"\xff", b"\xfe")
DAMAGED = {
    "png: a byte": (PNG[:900] + bytes([PNG[900] ^ 1]) + PNG[901:], "CRC-32"),
    "png: zeros": (PNG[:9000] + bytes(len(PNG) - 9012) + PNG[-12:], "CRC-32"),
    "png: no end": (PNG[:-12], "no end"),
    "png: half": (PNG[: len(PNG) // 2], "no end"),
    "jpeg: no end": (JPEG[:-2], "no end"),
    "jpeg: half": (JPEG[: len(JPEG) // 2], "no end"),
    "jpeg: zeros": (JPEG[:MIDDLE] + bytes(len(JPEG) - MIDDLE - 2) + JPEG[-2:], "damaged|truncated"),
    "jpeg: too short": (JPEG[:MIDDLE] + JPEG[-2:], "damaged"),
    "jpeg: noise": (JPEG[:MIDDLE] + NOISE[MIDDLE:-2] + JPEG[-2:], "damaged|truncated"),
    "jpeg: a part lost": (JPEG[:MIDDLE] + JPEG[MIDDLE + 99 :], "damaged|truncated"),
    "jpeg: a part twice": (JPEG[:MIDDLE] + JPEG[MIDDLE - 99 :], "damaged|truncated"),
    "jpeg: a marker": (JPEG[:MIDDLE] + b"\xff\x17" + JPEG[MIDDLE + 2 :], "invalid marker"),
    "progressive: noise": (PROGRESSIVE[:2000] + NOISE2[2000:-2] + b"\xff\xd9", "invalid marker"),
    "progressive: last scans": (PROGRESSIVE[:3000] + b"\xff\xd9", "lacks scans"),
    "progressive: no end": (PROGRESSIVE[:-2], "no end"),
    "LZW tiff: zeros": (LZW[:600] + bytes(60) + LZW[660:], "TIFF of a kind.* or a damaged one"),
    "deflated tiff": (deflated_tiff(GRAYS, LONG[:-1] + b"x"), "decompressing"),
    **{f"half of {kind}": (encode(LARGE, kind)[:4000], "") for kind in ("GIF", "TIFF", "BMP")},
    **{f"half of {kind}": (encode(LARGE, kind)[:4000], "") for kind in ("WEBP", "JPEG2000", "PPM")},
}  # fmt: skip
PGM = b"P5\n%d %d\n255\n" % (WIDTH, HEIGHT) + GRAYS.tobytes()
PBM = b"P4\n9 2\n" + bytes(4)
REFUSED = {
    "two PGM": (PGM + PGM, "several images"),
    "two PBM": (PBM + PBM, "several images"),
    "two PPM": (encode(LARGE, "PPM") + b"\n" + encode(LARGE, "PPM"), "several images"),
    "floats": (tiff(tiff_page(GRAYS.astype(np.float32))), "floating-point"),
    "doubles": (tiff(tiff_page(GRAYS.astype(np.float64))), "TIFF of a kind"),
    "signed 8 bits": (tiff(tiff_page(GRAYS.astype(np.int8))), "signed 8-bit"),
    "below 0": (tiff(tiff_page(np.array([[-1, 5]], np.int16))), "beyond 16 bits"),
    "above 65,535": (tiff(tiff_page(np.array([[70000, 5]], np.uint32))), "beyond 16 bits"),
    "16-bit planes": (tiff(tiff_page(WIDE, 2, planar=True)), "planes of 16 bits"),
    "white is 0, big-endian": (tiff(tiff_page(DEEP, 0), order=">"), "TIFF of a kind"),
    "CIELab": (tiff(tiff_page(PIXELS, 8)), "CIELab"),
    "YCbCr": (tiff(tiff_page(PIXELS, 6)), "subsampled YCbCr"),
    "5 channels": (tiff(tiff_page(np.zeros((4, 4, 5), np.uint8))), "TIFF of a kind"),
    "2 pages": (tiff(tiff_page(PIXELS, 2), tiff_page(PIXELS, 2)), "2 pages"),
    "slide": (
        tiff(tiff_page(PIXELS, 2), tiff_page(PIXELS[:3, :2], 2), tiff_page(PIXELS, 2)),
        r"3 images of several sizes in one TIFF \(13x11, 2x3 pixels\), as of a slide",
    ),
    "deep colour": (DEEP_JPEG_2000, "JPEG 2000 of more than 8 bits"),
    "preview of a raw file": (tiff({**SMALL, "t330": [8]}), "camera raw"),
    "pixmap of floats": (b"Pf 1 1 -1.0\n" + bytes(4), "floating-point"),
    "no width": (png([b""], 0, 8, GRAY), "damaged image"),
    "12-bit jpeg": (JPEG.replace(b"\xff\xc0\0\x11\x08", b"\xff\xc1\0\x11\x0c"), "JPEG of 12 bits"),
    "bomb": (encode(np.zeros((20000, 20000), bool)), "400000000 pixels"),
    "empty": (b"", "empty"),
    "text": (b"not an image", "not an image of a known format"),
    "html": (b"\n<!DOCTYPE html><title>404</title>", "HTML"),
    "sidecar": (b"\xef\xbb\xbf<?xpacket begin=''><x:xmpmeta>", "XML: remove it"),
    "microscope": (b"ZISRAWFILE" + bytes(99), "CZI.*OME-TIFF"),
    "leica": (b"p\0\0\0\x10\x27\0\0*\1\0\0\0", "LIF.*OME-TIFF"),
    "olympus": (b"\xd0\xcf\x11\xe0\xa1\xb1\x1a\xe1", "OIB or ZVI"),
    "svg": (b"<?xml version='1.0'?>\n<!-- a -->\n<svg xmlns=''>", "SVG"),
    "git lfs": (b"version https://git-lfs.github.com/spec/v1\noid", "Git LFS"),
    "heic": (b"\0\0\0\x18ftypheic\0\0\0\0mif1heic" + bytes(99), "HEIC"),
    "heif": (b"\0\0\0\x18ftypmif1\0\0\0\0mif1heic" + bytes(99), "HEIC"),
    "jpeg xl": (b"\xff\x0a" + bytes(9), "JPEG XL"),
    "jpeg xl, boxed": (b"\0\0\0\x0cJXL \r\n\x87\n", "JPEG XL"),
    "canon": (b"II*\0\x10\0\0\0CR\2\0" + bytes(99), "camera raw"),
    "fuji": (b"FUJIFILMCCD-RAW 0201", "camera raw"),
    "dicom": (bytes(128) + b"DICM", "DICOM"),
    "nifti": (bytes(344) + b"n+1\0", "NIfTI"),
    "fits": (b"SIMPLE  =     T", "FITS"),
    "exr": (b"v/1\1\2", "OpenEXR"),
    "numpy": (b"\x93NUMPY\1\0", "NumPy"),
    "hdf5": (b"\x89HDF\r\n", "HDF5"),
    "pdf": (b"%PDF-1.7", "PDF"),
    "eps": (b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n", "PostScript"),
    "psd": (b"8BPS\0\1", "Photoshop"),
    "ico": (b"\0\0\1\0\1\0", "ICO"),
    "mp4": (b"\0\0\0\x20ftypisom", "video"),
    "avi": (b"RIFF\1\1\1\1AVI LIST", "video"),
    "matroska": (b"\x1aE\xdf\xa3", "video"),
    "zip": (b"PK\3\4", "compressed"),
    "gzip": (b"\x1f\x8b\x08", "compressed"),
}


@pytest.mark.parametrize("name", {**DAMAGED, **REFUSED})
def test_damaged_and_foreign_files_are_refused_by_name(name):
    data, reason = {**DAMAGED, **REFUSED}[name]
    with pytest.raises(BadImage) as refused:
        decode(data, Fit(7, 5, 3))
    said = str(refused.value)
    assert re.search(reason, said) and "\n" not in said and "0x" not in said


COMMENT = b"\xff\xfe\0\x07after"  # of a JPEG


def test_whole_jpeg_files_of_all_kinds_are_read():
    """What some encoders append to a scan, restart markers, scans, further images."""
    whole = np.asarray(Image.open(io.BytesIO(JPEG)))
    for data in (JPEG, JPEG + b"after the end", JPEG + JPEG):
        assert np.array_equal(result(data)[0], whole)
    for options in ({"progressive": True}, {"restart_marker_rows": 1}, {"optimize": True}):
        data = encode(LARGE, "JPEG", **options)
        assert np.array_equal(result(data)[0], np.asarray(Image.open(io.BytesIO(data))))
    for size in range(4, 40):  # every length of the last code
        data = encode(LARGE[:size, : 2 * size], "JPEG", quality=30)
        assert np.array_equal(result(data)[0], np.asarray(Image.open(io.BytesIO(data))))
        for appended in (bytes(1), bytes(15), b"\xff", b"\xff" * 900, b"\xff\xd0", COMMENT):
            longer = data[:-2] + appended + data[-2:]
            assert np.array_equal(result(longer)[0], result(data)[0])
    gray = encode(np.zeros((8, 8), np.uint8), "JPEG")  # a scan of some bits
    assert not result(gray)[0].any()
