"""Values of image files of every type and number of channels, as they are stored."""

import io
import logging
import re
import struct
import sys
import zlib

import numpy as np
import pytest
from PIL import Image

from tests.support.api import BadImage, Fit, decode, decode_stored, names_of_changes, read_header
from tests.support.odd_files import (
    COLOUR,
    COLOUR_ALPHA,
    DEEP_JPEG_2000,
    GRAY,
    GRAY_ALPHA,
    deflated_tiff,
    png16,
    saved,
    tiff,
    tiff_of_12_bits,
    tiff_page,
)
from tests.support.pictures import encode, picture

OWN = Fit(0, 0, 0)  # the size and the channels of the file
DRAWN = np.random.default_rng(0)
COLOURS = DRAWN.integers(0, 65536, (11, 13, 3)).astype(np.uint16)  # all 16 bits
GRAYS = COLOURS[..., 0].copy()
FEW = GRAYS >> 4  # of 12 bits
SIGNED = GRAYS.view(np.int16)
FLOATS = DRAWN.standard_normal((11, 13)).astype(np.float32)
BYTES = picture(1)
FIVE = DRAWN.integers(0, 65536, (11, 13, 5)).astype(np.uint16)
THIRTEEN = DRAWN.standard_normal((11, 13, 13)).astype(np.float32)


def npy(values: np.ndarray) -> bytes:
    file = io.BytesIO()
    np.save(file, values, allow_pickle=values.dtype == object)
    return file.getvalue()


def ascii_words(values: np.ndarray) -> bytes:
    return b" ".join(b"%d" % value for value in values.ravel())


def deflated(values: np.ndarray, **tags) -> bytes:
    """A deflated TIFF of 16-bit values."""
    stream = zlib.compress(values.tobytes())
    samples = values.shape[2] if values.ndim == 3 else 1
    return deflated_tiff(values, stream, t258=[16] * samples, t277=samples, **tags)


KEPT = {
    "png, gray": (png16(GRAYS, GRAY), GRAYS),
    "png, colour": (png16(COLOURS, COLOUR), COLOURS),
    "tiff": (tiff(tiff_page(GRAYS)), GRAYS),
    "tiff, big-endian": (tiff(tiff_page(GRAYS), order=">"), GRAYS),
    "tiff, lzw": (saved(Image.fromarray(GRAYS), "TIFF", compression="tiff_lzw"), GRAYS),
    "tiff, white is 0": (tiff(tiff_page(65535 - GRAYS, 0)), GRAYS),
    "tiff, white is 0, big-endian": (tiff(tiff_page(65535 - GRAYS, 0), order=">"), GRAYS),
    "tiff of 12 bits": (tiff_of_12_bits(FEW), FEW),
    "tiff, colour": (tiff(tiff_page(COLOURS, 2)), COLOURS),
    "tiff, colour, big-endian": (tiff(tiff_page(COLOURS, 2), order=">"), COLOURS),
    "tiff, colour, deflated": (deflated(COLOURS, t262=2), COLOURS),
    "tiff, planes": (tiff(tiff_page(COLOURS, 2, planar=True)), COLOURS),
    "tiff, planes, big-endian": (tiff(tiff_page(COLOURS, 2, planar=True), order=">"), COLOURS),
    "tiff, signed": (tiff(tiff_page(SIGNED)), SIGNED),
    "tiff, signed, big-endian": (tiff(tiff_page(SIGNED), order=">"), SIGNED),
    "tiff, floats": (tiff(tiff_page(FLOATS)), FLOATS),
    "tiff, floats, big-endian": (tiff(tiff_page(FLOATS), order=">"), FLOATS),
    "tiff, half floats": (tiff(tiff_page(FLOATS.astype(np.float16))), FLOATS.astype(np.float16)),
    "tiff, signed bytes": (tiff(tiff_page(SIGNED.astype(np.int8))), SIGNED.astype(np.int8)),
    "tiff, 2 channels": (tiff(tiff_page(FIVE[..., :2])), FIVE[..., :2]),
    "tiff, 5 channels": (tiff(tiff_page(FIVE)), FIVE),
    "tiff, 5 planes": (tiff(tiff_page(FIVE, planar=True)), FIVE),
    "tiff, 5 channels of bytes": (tiff(tiff_page(FIVE.astype(np.uint8))), FIVE.astype(np.uint8)),
    "tiff, 13 channels of floats": (tiff(tiff_page(THIRTEEN)), THIRTEEN),
    "tiff, signed colours": (tiff(tiff_page(COLOURS.view(np.int16), 2)), COLOURS.view(np.int16)),
    "tiff, near infrared": (
        tiff(tiff_page(FIVE[..., :4].astype(np.uint8), 2, t338=0)),
        FIVE[..., :4].astype(np.uint8),
    ),
    "tiff, near infrared, 16 bits": (tiff(tiff_page(FIVE[..., :4], 2, t338=0)), FIVE[..., :4]),
    "tiff, thumbnail before": (tiff(tiff_page(BYTES[:3], 2, t254=1), tiff_page(FIVE)), FIVE),
    "ppm": (b"P6 13 11 65535\n" + COLOURS.astype(">u2").tobytes(), COLOURS),
    "ppm of text": (b"P3 13 11 # size\n65535\n" + ascii_words(COLOURS) + b"\n", COLOURS),
    "pgm": (b"P5 13 11 65535\n" + GRAYS.astype(">u2").tobytes(), GRAYS),
    "pgm of 12 bits": (b"P5 13 11 4095\n" + FEW.astype(">u2").tobytes(), FEW),
    "pgm of text": (b"P2 13 11 4095\n" + ascii_words(FEW) + b"\n", FEW),
    "pixmap of floats": (b"Pf 13 11 -1.0\n" + FLOATS[::-1].tobytes(), FLOATS),
    "jpeg 2000": (saved(Image.fromarray(GRAYS), "JPEG2000"), GRAYS),
    "array": (npy(FIVE), FIVE),
    "array, big-endian, by columns": (npy(np.asfortranarray(FIVE.astype(">u2"))), FIVE),
    "array of floats": (npy(FLOATS), FLOATS),
    "array of bytes": (npy(BYTES), BYTES),
    "array of signed bytes": (npy(SIGNED.astype(np.int8)), SIGNED.astype(np.int8)),
    "array of truth values": (npy(FLOATS > 0), FLOATS > 0),
    "picture": (encode(BYTES), BYTES),
    "picture of grays": (encode(BYTES[..., 0]), BYTES[..., 0]),
}  # fmt: skip
STORED_AS = {"bool": "uint8", "int8": "int16", "float16": "float32"}


@pytest.mark.parametrize("name", KEPT)
def test_files_come_back_as_they_are_stored(name):
    data, expected = KEPT[name]
    values, changes = decode_stored(data, OWN)
    dtype = STORED_AS.get(expected.dtype.name, expected.dtype.name)
    assert values.dtype.name == dtype and values.dtype.isnative
    shape = (*expected.shape, 1)[:3]
    assert values.shape == shape and np.array_equal(values, expected.reshape(shape))
    assert names_of_changes(changes) == ({"INVERTED"} if "white is 0" in name else set())
    assert read_header(data, OWN) == (13, 11, shape[2], dtype, "")


WHITE = 65535
DEEP_BLENDED = {
    "gray with alpha": (
        png16(np.array([[[25700, 65535], [1000, 0], [1000, 13107]]], np.uint16), GRAY_ALPHA),
        [[25700], [WHITE], [52628]],
    ),
    "colour with alpha": (
        png16(np.array([[[257, 515, 771, 65535], [9, 9, 9, 0]]], np.uint16), COLOUR_ALPHA),
        [[257, 515, 771], [WHITE] * 3],
    ),
    "tiff with alpha": (
        tiff(tiff_page(np.array([[[257, 515, 771, 65535], [9, 9, 9, 0]]], np.uint16), 2, t338=2)),
        [[257, 515, 771], [WHITE] * 3],
    ),
    "tiff with associated alpha": (
        tiff(tiff_page(np.array([[[500, 13107], [7, 65535]]], np.uint16), 1, t338=1)),
        [[500 + 52428], [7]],
    ),
    "transparent value": (
        png16(np.array([[[1, 2, 771], [770] * 3]], np.uint16), COLOUR, tRNS=b"\3\2" * 3),
        [[1, 2, 771], [WHITE] * 3],
    ),
    "transparent gray": (
        png16(np.array([[5, 300]], np.uint16), GRAY, tRNS=struct.pack(">H", 5)),
        [[WHITE], [300]],
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", DEEP_BLENDED)
def test_transparency_of_16_bits_is_laid_over_the_background_in_16_bits(name):
    data, expected = DEEP_BLENDED[name]
    values, changes = decode_stored(data, OWN)
    assert values.dtype == np.uint16 and values.tolist() == [expected]
    assert names_of_changes(changes) == {"TRANSPARENCY"}
    assert read_header(data, OWN).channels == len(expected[0])
    black, _ = decode_stored(data, OWN._replace(background="black"))
    assert WHITE not in black


def test_transparent_pixels_become_the_white_of_max_value():
    """Not the largest value of the type, which is beyond it."""
    deep = np.full((1, 3, 4), 1000, np.uint16)
    deep[0, :, 3] = [0, WHITE, WHITE // 5]
    keyed = png16(np.array([[5, 300]], np.uint16), GRAY, tRNS=struct.pack(">H", 5))
    fit = OWN._replace(white=4095.0)
    values, _ = decode_stored(png16(deep, COLOUR_ALPHA), fit)
    assert values[..., 0].tolist() == [[4095, 1000, 3476]]
    assert decode_stored(keyed, fit)[0].tolist() == [[[4095], [300]]]
    assert decode_stored(keyed, fit._replace(background="black"))[0].tolist() == [[[0], [300]]]
    shallow = np.full((2, 3, 4), 50, np.uint8)
    shallow[..., 3] = [0, 255, 51]
    for fit in (OWN._replace(white=100.0), Fit(3, 2, 3, white=100.0)):
        assert decode_stored(encode(shallow), fit)[0][0, :, 0].tolist() == [100, 50, 90]
    beyond = OWN._replace(white=300.0)
    assert (decode_stored(encode(shallow[..., :3]), beyond)[0] == 50).all()
    for data, white in ((encode(shallow), 300.0), (keyed, 70_000.0)):
        with pytest.raises(BadImage, match=f"as --max-value {white:g} is beyond .*: --background"):
            decode_stored(data, OWN._replace(white=white))


def test_an_alpha_channel_that_is_0_everywhere_is_ignored():
    clear = np.concatenate([COLOURS, np.zeros((11, 13, 1), np.uint16)], axis=2)
    for data in (png16(clear, COLOUR_ALPHA), tiff(tiff_page(clear, 2, t338=2))):
        values, changes = decode_stored(data, OWN)
        assert np.array_equal(values, COLOURS) and names_of_changes(changes) == {"EMPTY_ALPHA"}


@pytest.mark.parametrize("orientation", range(1, 9))
@pytest.mark.parametrize("kind", ["png", "tiff", "tiff by tifffile"])
def test_every_orientation_is_turned_upright(kind, orientation):
    exif = Image.Exif()
    exif[0x0112] = orientation
    if kind == "png":
        stored = GRAYS
        data = saved(Image.fromarray(GRAYS), "PNG", exif=exif)
    else:
        stored = GRAYS if kind == "tiff" else FIVE
        data = tiff(tiff_page(stored, t274=orientation))
    rgb = np.repeat(stored.reshape(11, 13, -1)[..., :1] >> 8, 3, axis=2).astype(np.uint8)
    upright, _ = decode(saved(Image.fromarray(rgb), "PNG", exif=exif), OWN.of_size(13, 11))
    width, height, *_ = read_header(data, OWN)
    assert (width, height) == ((11, 13) if orientation > 4 else (13, 11))
    upright, _ = decode(saved(Image.fromarray(rgb), "PNG", exif=exif), Fit(width, height, 1))
    values, changes = decode_stored(data, OWN)
    assert (values[..., 0] >> 8).tobytes() == np.frombuffer(upright, np.uint8).astype(
        "u2"
    ).tobytes()
    assert names_of_changes(changes) == ({"ORIENTATION"} if orientation > 1 else set())


def test_values_are_resized_as_bytes_are():
    """In each channel, and for all types: so far as bytes can tell, to one."""
    large = picture(3, 61, 47)
    for fit in (Fit(17, 20, 3), Fit(17, 20, 3, crop=True), Fit(80, 70, 3)):
        pixels, changes = decode(encode(large), fit)
        expected = np.frombuffer(pixels, np.uint8).reshape(fit.height, fit.width, 3).astype(float)
        for data, unit in (
            (npy(large), 1),
            (png16(large.astype(np.uint16) * 257, COLOUR), 257),
            (tiff(tiff_page((large.astype(np.int16) - 128) * 200, 2)), 200),
            (npy(large.astype(np.float32)), 1),
        ):
            values, resized = decode_stored(data, fit)
            assert resized.kinds == changes.kinds
            offset = 128 if values.dtype == np.int16 else 0
            assert np.abs(values / unit + offset - expected).max() <= 1.01
    assert np.array_equal(decode_stored(npy(large), Fit(17, 20, 3))[0], decode_own(large, 17, 20))


def decode_own(pixels, width, height):
    data, _ = decode(encode(pixels), Fit(width, height, 3))
    return np.frombuffer(data, np.uint8).reshape(height, width, 3)


def test_integers_are_rounded_to_the_nearest_when_resized():
    pair = np.array([[0, 1], [1, 1]], np.uint16) * 3  # their mean is 2.25
    assert decode_stored(npy(pair), Fit(1, 1, 1))[0].tolist() == [[[2]]]
    assert decode_stored(npy(-pair.astype(np.int16)), Fit(1, 1, 1))[0].tolist() == [[[-2]]]
    assert decode_stored(npy(pair.astype(np.float32)), Fit(1, 1, 1))[0].tolist() == [[[2.25]]]


def test_gray_and_colour_become_each_other_and_other_channels_do_not():
    values, changes = decode_stored(npy(GRAYS), Fit(13, 11, 3))
    assert np.array_equal(values, GRAYS[..., None].repeat(3, axis=2))
    assert names_of_changes(changes) == {"GRAY_TO_COLOUR"}
    values, changes = decode_stored(png16(COLOURS, COLOUR), Fit(13, 11, 1))
    luma = COLOURS @ np.array([0.299, 0.587, 0.114])
    assert np.abs(values[..., 0] - luma).max() <= 0.5
    assert names_of_changes(changes) == {"COLOUR_TO_GRAY"}
    infrared = tiff(tiff_page(FIVE[..., :4], 2, t338=0))
    values, changes = decode_stored(infrared, Fit(13, 11, 3))
    assert np.array_equal(values, FIVE[..., :3])
    assert names_of_changes(changes) == {"FURTHER_CHANNELS"}
    for data in (npy(FIVE), tiff(tiff_page(FIVE))):
        with pytest.raises(BadImage, match="^5 channels, not 3$"):
            decode_stored(data, Fit(13, 11, 3))
    with pytest.raises(BadImage, match="^3 channels, not 5$"):
        decode_stored(encode(BYTES), Fit(13, 11, 5))


SIX = np.random.default_rng(2).integers(0, 4096, (3, 2, 11, 13), dtype=np.uint16)
PAGES = [tiff_page(FIVE[..., i]) for i in range(5)]


def test_pages_of_a_tiff_become_channels():
    fit = OWN._replace(pages=True)
    thumbnail = tiff_page(BYTES[:3], 2, t254=1)
    for data in (tiff(*PAGES), tiff(thumbnail, *PAGES, order=">")):
        values, changes = decode_stored(data, fit)
        assert np.array_equal(values, FIVE) and changes.kinds == 0
        assert read_header(data, fit) == (13, 11, 5, "uint16", "")
    colours = tiff(tiff_page(FIVE[..., :3], 2), tiff_page(FIVE[..., 2:], 2))
    assert np.array_equal(decode_stored(colours, fit)[0], FIVE[..., [0, 1, 2, 2, 3, 4]])
    assert np.array_equal(decode_stored(tiff(tiff_page(FIVE)), fit)[0], FIVE)  # one page
    assert np.array_equal(decode_stored(encode(BYTES), fit)[0], BYTES)


@pytest.mark.parametrize("options", [{"imagej": True}, {"metadata": {"axes": "ZYX"}}])
@pytest.mark.parametrize("truncate", [False, True])
def test_stacks_that_one_page_holds_are_not_taken_for_one_image(options, truncate):
    import tifffile

    file = io.BytesIO()
    planes = np.moveaxis(FIVE, -1, 0)
    if truncate:
        options = {**options, "truncate": True}
    tifffile.imwrite(file, planes, photometric="minisblack", **options)
    assert np.array_equal(decode_stored(file.getvalue(), OWN._replace(pages=True))[0], FIVE)
    for fit in (OWN, Fit(13, 11, 1)):
        with pytest.raises(BadImage, match="^5 pages in one TIFF.*--pages channels"):
            decode_stored(file.getvalue(), fit)


def stack(axes, planes=SIX, **options):
    """A TIFF file whose metadata state the axes of its pages."""
    import tifffile

    file = io.BytesIO()
    options["metadata"] = {"axes": axes, **options.get("metadata", {})}
    tifffile.imwrite(file, planes, photometric="minisblack", **options)
    return file.getvalue()


@pytest.mark.parametrize("kind", ["ome", "imagej"])
def test_the_axes_of_pages_are_those_of_the_metadata(kind):
    fit = OWN._replace(pages=True)
    options = {kind: True}
    for planes, axes, expected in [
        (SIX, "ZCYX", "Z 3 x C 2"),
        (SIX[:, 0], "CYX", "C 3"),
        (SIX[:, 0], "ZYX", "Z 3"),
        (SIX[None], "TZCYX", "Z 3 x C 2"),
    ]:
        data = stack(axes, planes, **options)
        assert read_header(data, fit).axes == expected
        channels = np.moveaxis(planes.reshape(-1, 11, 13), 0, -1)
        values, changes = decode_stored(data, fit._replace(axes=expected))
        assert np.array_equal(values, channels) and changes.kinds == 0
    with pytest.raises(BadImage, match="^the axes of its pages are Z 3 x C 2, not C 2 x Z 3$"):
        decode_stored(stack("ZCYX", **options), fit._replace(axes="C 2 x Z 3"))
    with pytest.raises(BadImage, match="x C 2, and those of others are not stated$"):
        decode_stored(stack("ZCYX", **options), fit._replace(axes=""))
    slices = stack("ZYX", SIX[:, 0], **options)  # as programs call them that know no channels
    assert decode_stored(slices, fit._replace(axes="C 3"))[0].shape == (11, 13, 3)


def test_pages_have_the_order_that_ome_states():
    data = stack("CYX", SIX[:, 0], ome=True)
    one = b'<TiffData IFD="0" PlaneCount="3"/>'
    places = b"".join(b'<TiffData IFD="%d" FirstC="%d"/>' % (2 - c, c) for c in range(3))
    room = len(data) - len(data.replace(one, b""))
    assert room == len(one)
    xml = data[data.index(b"<?xml") : data.index(b"</OME>") + 6]
    pages = [tiff_page(plane) for plane in SIX[:, 0]]
    pages[0]["t270"] = xml.replace(one, places)
    fit = OWN._replace(pages=True)
    values, changes = decode_stored(tiff(*pages), fit)
    assert np.array_equal(values, np.moveaxis(SIX[::-1, 0], 0, -1)) and changes.kinds == 0
    elsewhere = b'<TiffData IFD="0"><UUID FileName="b.tif">urn:uuid:b</UUID></TiffData>'
    for damaged in (
        xml.replace(b"</Pixels>", b"</Pixels"),
        xml.replace(one, elsewhere),
        xml.replace(b'SizeC="3"', b'SizeC="2"').replace(b'PlaneCount="3"', b'PlaneCount="2"'),
    ):
        assert damaged != xml
        pages[0]["t270"] = damaged
        values, changes = decode_stored(tiff(*pages), fit)
        assert np.array_equal(values, np.moveaxis(SIX[:, 0], 0, -1))
        assert names_of_changes(changes) == {"ORDER_LOST"}
        assert read_header(tiff(*pages), fit).axes == ""


def test_a_single_page_is_no_stack_without_its_other_pages():
    fit = OWN._replace(pages=True, channels=3)
    with pytest.raises(BadImage, match="^1 channel, not 3$"):
        decode_stored(tiff(PAGES[0]), fit)
    assert np.array_equal(decode_stored(tiff(*PAGES[:3]), fit)[0], FIVE[..., :3])


def test_planes_of_metamorph_are_in_one_page():
    import tifffile

    file = io.BytesIO()
    planes = SIX[:, 0]
    uic1 = (33628, 5, 3, [1] * 6, True)
    uic2 = (33629, 5, 3, [1] * 6, True)  # which has 18 numbers: the rest is in the next tag
    rest = (65000, 4, 12, [1] * 12, True)
    tifffile.imwrite(
        file,
        planes[0],
        photometric="minisblack",
        extratags=[uic1, uic2, rest],
        metadata=None,
        software="",
    )
    data = file.getvalue() + planes[1:].tobytes()
    values, changes = decode_stored(data, OWN._replace(pages=True))
    assert np.array_equal(values, np.moveaxis(planes, 0, -1)) and changes.kinds == 0
    for fit in (OWN, Fit(13, 11, 1)):
        with pytest.raises(BadImage, match="^3 pages in one TIFF.*--pages channels"):
            decode_stored(data, fit)


def test_stored_values_in_which_0_is_white_are_inverted_which_is_noted():
    import tifffile

    compressed = io.BytesIO()
    tifffile.imwrite(compressed, GRAYS, photometric="miniswhite", compression="lzw", metadata=None)
    for data in (tiff(tiff_page(GRAYS, 0)), compressed.getvalue()):
        for fit in (OWN, OWN._replace(pages=True)):
            values, changes = decode_stored(data, fit)
            assert np.array_equal(values[..., 0], 65535 - GRAYS)
            assert names_of_changes(changes) == {"INVERTED"}


def test_pages_must_agree_and_be_there():
    fit = OWN._replace(pages=True)
    with pytest.raises(BadImage, match=r"^page 2 is uint16 of shape \(10, 13\), and page 1"):
        decode_stored(tiff(PAGES[0], tiff_page(GRAYS[:10])), fit)
    with pytest.raises(BadImage, match="^page 2 is int16"):
        decode_stored(tiff(PAGES[0], tiff_page(SIGNED)), fit)
    whole = tiff(*PAGES)
    for size in (len(whole) - 40, len(whole) - 300, len(whole) // 2):
        with pytest.raises(BadImage):
            decode_stored(whole[:size], fit)


LONG = GRAYS.astype(np.int64)
REFUSED = {
    "int32 that is 16 bits": (tiff(tiff_page(GRAYS.astype(np.int32))), "convert it to uint16"),
    "uint32 that is 8 bits": (tiff(tiff_page(GRAYS.astype(np.uint32) >> 8)), "to uint8"),
    "int32 that is signed": (npy(SIGNED.astype(np.int32)), "^int32 .* convert it to int16"),
    "int64": (npy(LONG - 40000), r"^int64 values from -\d\d,\d{3} to .*float32"),
    "uint64": (npy(GRAYS.astype(np.uint64) << 40), "^uint64 values .*float32"),
    "above 2^31": (tiff(tiff_page(np.array([[2**31 + 9, 5]], np.uint32))), "2,147,483,657"),
    "doubles": (tiff(tiff_page(FLOATS.astype(np.float64))), "^float64 values .* to float32"),
    "array of doubles": (npy(FLOATS.astype(np.float64)), "^float64 values .* to float32"),
    "array of complex numbers": (npy(FLOATS.astype(np.complex64)), "only integers"),
    "array of objects": (npy(np.array([[None]])), "allow_pickle"),
    "channels first": (npy(np.moveaxis(THIRTEEN.repeat(9, 0).repeat(9, 1), -1, 0)), "transpose"),
    "four axes": (npy(np.zeros((2, 3, 4, 1), np.uint8)), r"expected \(H, W\)"),
    "no pixels": (npy(np.zeros((0, 3), np.uint8)), "none of them 0"),
    "half an array": (npy(FIVE)[:600], ""),
    "signed, white is 0": (tiff(tiff_page(SIGNED, 0)), "WhiteIsZero"),
    "floats, white is 0": (tiff(tiff_page(FLOATS, 0)), "WhiteIsZero"),
    "CIELab": (tiff(tiff_page(BYTES, 8)), "CIELab"),
    "2 pages": (tiff(*PAGES[:2]), "^2 pages in one TIFF"),
    "half a ppm": (b"P6 13 11 65535\n" + COLOURS.tobytes()[:-1], "^cut short: 428 of 429 values"),
    "deep colours of jpeg 2000": (DEEP_JPEG_2000, "JPEG 2000 of more than 8 bits"),
    "half a tiff": (tiff(tiff_page(FIVE))[:900], ""),
    "a changed png": (png16(GRAYS, GRAY).replace(b"IDAT", b"IDAT\1", 1), ""),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_kept_is_refused_with_its_range_and_what_holds_it(name):
    data, reason = REFUSED[name]
    with pytest.raises(BadImage) as refused:
        decode_stored(data, OWN)
    text = str(refused.value)
    assert re.search(reason, text) and "\n" not in text and "0x" not in text


def test_values_that_are_no_numbers_are_not_spread_by_resizing():
    holes = FLOATS.copy()
    holes[2, 3] = np.nan
    holes[4, 5] = np.inf
    values, _ = decode_stored(npy(holes), Fit(13, 11, 1))
    assert np.array_equal(values[..., 0], holes, equal_nan=True)
    with pytest.raises(BadImage, match="^2 values are NaN or infinite"):
        decode_stored(npy(holes), Fit(7, 5, 1))


LAYOUTS = [
    {},
    {"tile": (16, 16)},
    {"rowsperstrip": 5},
    {"compression": "lzw"},
    {"compression": "zlib", "rowsperstrip": 5},
    {"compression": "zlib", "rowsperstrip": 5, "predictor": True},
    {"compression": "zstd", "tile": (16, 16)},
    {"compression": "packbits"},
    {"bigtiff": True},
]


@pytest.mark.parametrize("dtype", ["u1", "u2", "i1", "i2", "f2", "f4"])
def test_a_tiff_of_any_layout_is_read_as_tifffile_writes_it(dtype):
    """Of which Pillow reads some wrongly, such as big-endian int16 that are compressed."""
    import tifffile

    for channels in (1, 2, 3, 5):
        stored = DRAWN.integers(0, 65536, (20, 21, channels)).astype("u2").astype(dtype)
        for options in LAYOUTS:
            for order in "<>":
                file = io.BytesIO()
                tifffile.imwrite(
                    file,
                    stored.squeeze().astype(order + dtype),
                    photometric="rgb" if channels == 3 else "minisblack",
                    planarconfig="contig" if channels > 1 else None,
                    byteorder=order,
                    metadata=None,
                    **options,
                )
                values, changes = decode_stored(file.getvalue(), OWN)
                assert np.array_equal(values, stored, equal_nan=dtype[0] == "f"), (options, order)
                assert changes.kinds == 0


def test_an_exact_fit_refuses_other_sizes():
    for data in (encode(BYTES), npy(FIVE)):
        fit = Fit(13, 11, 0, exact=True)
        decode_stored(data, fit)
        with pytest.raises(BadImage, match="^13x11 pixels, not 26x22"):
            decode_stored(data, fit._replace(width=26, height=22))


def test_the_fit_of_a_pack_follows_from_its_provenance():
    facts = {"fit": "crop", "background": "black", "pages": "channels"}
    facts["axes"] = "C 5"
    expected = Fit(13, 11, 5, crop=True, background="black", pages=True, axes="C 5")
    assert Fit.of_pack((11, 13, 5), facts) == expected
    assert Fit.of_pack((11, 13, 5), {"white": 4095.0}) == Fit(13, 11, 5, white=4095.0)
    assert Fit.of_pack((11, 13, 5), {"fit": "tiles"}) == Fit(13, 11, 5, exact=True)
    assert Fit.of_pack((11, 13, 5), {"fit": "stretch"}, -9999.0) == Fit(13, 11, 5, exact=True)


def test_files_that_need_tifffile_name_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "tifffile", None)
    for data in (tiff(tiff_page(FIVE)), tiff(tiff_page(COLOURS, 2, planar=True))):
        with pytest.raises(BadImage, match=r"pip install tifffile imagecodecs"):
            decode_stored(data, OWN)
    with pytest.raises(BadImage, match=r"pip install tifffile imagecodecs"):
        decode_stored(tiff(*PAGES), OWN._replace(pages=True))
    assert np.array_equal(decode_stored(tiff(tiff_page(COLOURS, 2)), OWN)[0], COLOURS)


def test_images_of_pillow_are_decoded_like_their_files():
    for image in (Image.fromarray(GRAYS), Image.fromarray(BYTES), Image.fromarray(FLOATS)):
        values, _ = decode_stored(image, OWN)
        assert np.array_equal(values.squeeze(), np.asarray(image))
    with pytest.raises(BadImage, match="^int32 values"):
        decode_stored(Image.fromarray(GRAYS.astype(np.int32)), OWN)


def test_what_pillow_does_not_decode_is_not_printed(monkeypatch, capfd):
    """It logs an error for each TIFF of more than 6 samples, which tifffile reads."""
    monkeypatch.setattr(logging.root, "handlers", [])  # those of pytest
    values, _ = decode_stored(tiff(tiff_page(THIRTEEN)), OWN)
    assert np.array_equal(values, THIRTEEN)
    assert capfd.readouterr() == ("", "")
