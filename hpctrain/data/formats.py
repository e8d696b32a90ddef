"""Open image files: which formats are read, which are refused by name, and whether a file is whole.

Pillow identifies and decodes the files, but some of what it reads is wrong or incomplete, without
an error. The remedies here:

* PNG: the CRC-32 of every chunk is compared (PNG 1.2, section 3.4).
* JPEG: libjpeg only warns of damaged data. Of a file with a single scan, the decoder must need
  exactly the compressed data (`ScanFile`). In others, markers that cannot stand there, missing
  scans and a missing end are found (ITU-T T.81, annex B); damage within one of several scans, or
  between restart markers, may stay unnoticed.
* JPEG 2000: of more than 8 bits, it is read if it is 16-bit gray: Pillow rounds others beyond 255.
* TIFF: layouts that Pillow reads wrongly are refused; one page must be the picture. The Adler-32 of
  deflated data is compared, before which libtiff may stop (this doubles the time of decoding).

Others hold no checksums: they are whole if they are not cut short.
"""

from __future__ import annotations

import importlib
import importlib.util
import io
import logging
import math
import re
import struct
import zlib
from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any

from PIL import Image
from PIL.ExifTags import Base as Tag
from PIL.ImageFile import ImageFile

from hpctrain.errors import first_line

# Pillow logs what it does not decode, which tifffile does; logging prints what nobody handles.
logging.getLogger("PIL").addHandler(logging.NullHandler())

READ = ("JPEG", "PNG", "GIF", "BMP", "PPM", "TIFF", "WEBP", "JPEG2000")
HAS_AVIF = importlib.util.find_spec("PIL.AvifImagePlugin") is not None  # Pillow 11.3
FORMATS = (*READ, "AVIF") if HAS_AVIF else READ
PREPARED = (b"\xff\xd8", b"\x89PNG", b"GIF8", b"BM", b"P")  # starts of what Pillow always reads
PLUGINS = ("Tiff", "WebP", "Jpeg2K", *["Avif"] * HAS_AVIF)  # of the other FORMATS

CONVERT = "convert it to PNG or JPEG"
DEVELOP = "develop it to JPEG or PNG"
EXTRACT = "extract its frames as PNG or JPEG"
ARRAYS = "write its values into an HDF5 file"
EXPORT = "save it as OME-TIFF, or pack its values by hpctrain.write_pack"
FETCH = "fetch the image itself"
MARKUP = rb"(\xef\xbb\xbf)?\s*"  # a byte-order mark and white space may come first
UNPACK = "unpack it, and give the folder"
FOREIGN = (  # a pattern of the first bytes, what it is, what to do
    (rb".{4}ftyp(hei[cxms]|hev[cxms]|mif1|msf1)", "HEIC", CONVERT),
    (rb".{4}ftypavi[fs]", "a damaged AVIF, or one that Pillow does not read", CONVERT),
    (rb"\xff\x0a|\0\0\0\x0cJXL ", "JPEG XL", CONVERT),
    (rb".{4}ftypcrx |II\*\0.{4}CR|FUJIFILMCCD-RAW|II(RO|RS|U\0)|MMOR|FOVb", "camera raw", DEVELOP),
    (rb".{4}ftyp|.{4}moov|RIFF.{4}AVI |\x1aE\xdf\xa3|\0\0\x01[\xb3\xba]|FLV", "video", EXTRACT),
    (rb".{128}DICM", "DICOM", ARRAYS),
    (rb".{344}(n\+1|ni1)\0|.{4}n\+2\0", "NIfTI", ARRAYS),
    (rb"SIMPLE  =", "FITS", ARRAYS),
    (rb"CDF[\x01\x02\x05]", "netCDF-3", "'nccopy -k nc4 old.nc new.nc' makes it HDF5"),
    (rb"\x0e\x03\x13\x01|GRIB", "HDF4 or GRIB", ARRAYS),
    (rb"v/1\x01", "OpenEXR", ARRAYS),
    (rb"#\?RADIANCE", "Radiance HDR", ARRAYS),
    (rb"\x93NUMPY|MATLAB 5.0", "arrays of NumPy or MATLAB", "hpctrain.write_pack packs them"),
    (rb"\x89HDF", "HDF5", "train on it by --data"),
    (rb"PAR1", "a table of Parquet", "save it as CSV"),
    (rb"%PDF-", "PDF", CONVERT),
    (rb"%!PS|\xc5\xd0\xd3\xc6", "PostScript", CONVERT),
    (rb"8BPS", "Photoshop", CONVERT),
    (rb"P7\n", "PAM", CONVERT),
    (rb"\0\0[\x01\x02]\0", "ICO, CUR or TGA", CONVERT),
    (rb"DDS |qoif|BPG\xfb|\x8aMNG|gimp xcf", "DDS, QOI, BPG, MNG or XCF", CONVERT),
    (rb"7z\xbc\xaf", "a .7z archive", UNPACK),
    (rb"Rar!", "a .rar archive", UNPACK),
    (rb"\x04\x22\x4d\x18|LZIP|\x1f\x9d", "compressed by LZ4, lzip or compress", UNPACK),
    (rb"\x28\xb5\x2f\xfd", "compressed by Zstandard", UNPACK),
    (rb"PK\x03\x04|\x1f\x8b|BZh|\xfd7zXZ", "a compressed file", "unpack it"),
    (rb"\0\x05\x16\x07", "AppleDouble (metadata of macOS)", "remove it"),
    (rb"version https://git-lfs", "pointer of Git LFS", FETCH),
    (rb"ZISRAWFILE|\xda\xce\xbe\n|p\0{3}.{4}\*", "CZI, ND2 or LIF of a microscope", EXPORT),
    (rb"\xd0\xcf\x11\xe0", "OIB or ZVI of a microscope, or a document of Office", EXPORT),
    (rb"NRRD0|(ObjectType|NDims) = ", "NRRD or MetaImage", ARRAYS),
    (
        MARKUP + rb"(<\?xml[^>]*>\s*)?(<!--.*?-->\s*)?(<!DOCTYPE svg[^>]*>\s*)?<svg",
        "SVG",
        CONVERT,
    ),
    (
        MARKUP + rb"<(!doctype html|html|head|body|script|\?xml|\?xpacket|x:xmpmeta)",
        "HTML or XML",
        f"remove it, or {FETCH}",
    ),
)
UNIDENTIFIED = (  # likewise, if Pillow cannot identify it
    (rb"\xff\xd8\xff", "a JPEG of 12 bits, or a damaged one", CONVERT),
    (
        rb"II[*+]\0|MM\0[*+]",
        "a TIFF of a kind that Pillow does not read, or a damaged one",
        CONVERT,
    ),
    (rb"\x89PNG|GIF8|BM|RIFF.{4}WEBP|\0\0\0\x0cjP", "a damaged image", FETCH),
)
SIGNATURE_BYTES = 1024

TIFF_START = re.compile(rb"II[*+]\0|MM\0[*+]")
PNG_START = b"\x89PNG\r\n\x1a\n"
read_chunk_start = struct.Struct(">I4s").unpack_from
read_crc32 = struct.Struct(">I").unpack_from

Box = tuple[float, float, float, float]  # left, top, right, bottom

# The marker of a segment, with fill bytes and restart markers before it; not a stuffed byte.
MARKER = re.compile(rb"(?:\xff+[\xd0-\xd7])*\xff+[^\x00\xff\xd0-\xd7]")
START_OF_SCAN = b"\xff\xda"
END_OF_IMAGE = b"\xff\xd9"
SEGMENTS = {*range(0xC0, 0xD0), *range(0xDA, 0xF0), 0xFE}  # those that may stand in a JPEG file
OTHER_CODING = re.compile(rb"\xff[\xc3\xc9-\xcb]")  # lossless, or arithmetic coding
PADDING = 16  # zeros that may follow a scan
LOOK_AHEAD = 8  # bytes that libjpeg reads beyond those it needs: 64 bits

DEEP = re.compile(";16[BLN]$")  # not "BGR;16", which is 5, 6 and 5 bits
SRGB_PRIMARIES = (1, 2)  # or unspecified
SRGB_TRANSFERS = (1, 2, 6, 13)  # also that of television, which is decoded as sRGB everywhere

DEEP_TRANSPARENCY = "transparency of 16 bits"  # our key in `Image.info`

THUMBNAIL = 1  # bits of NewSubfileType
MASK = 4
OLD_THUMBNAIL = 2  # SubfileType
PLANAR = 2  # PlanarConfiguration
SIGNED = 2  # SampleFormat
METAMORPH_PLANES = 33629  # UIC2tag: of each plane, its place and time; tifffile makes a dict of it
DEFLATE = (8, 32946)  # Compression
REVERSED = 2  # FillOrder
BITS_OF_PPM = {
    "1": 1,
    "L": 8,
    "RGB": 24,
    "I": 16,
    "I;16": 16,
    "I;16B": 16,
}  # bits of a pixel, by mode
WHITE_IS_ZERO = 0  # PhotometricInterpretation
YCBCR = 6


class TiffOnly(ValueError):
    """A TIFF that Pillow does not read, or reads wrongly; tifffile may read it (``tiff.py``)."""


class ScanFile(io.BytesIO):
    """A JPEG file that tells whether the decoder of its only scan needs the scan exactly.

    In place of the end marker stand the bytes that libjpeg reads ahead: a decoder that needs more
    than the scan finds the file truncated. The last byte of the scan comes in a read of its own,
    with the zeros behind it that some encoders append: a decoder that finishes earlier never asks
    for it. Both are exact but for the bytes read ahead.
    """

    def __init__(self, data: bytes, end: int) -> None:
        """Take the file and where its compressed data end."""
        super().__init__(data)
        padded = data[max(0, end - PADDING) : end]
        self._last = end - 1 - len(padded) + len(padded.rstrip(b"\0"))
        self._tail = data[self._last : end] + bytes(LOOK_AHEAD)

    @property
    def is_needed(self) -> bool:
        """Whether all of the scan was read."""
        return not self._tail

    def read(self, size: int | None = -1) -> bytes:
        """Read as any file, up to the last byte of the scan, and then what follows."""
        remaining = self._last - self.tell()
        if remaining > 0:
            if size is None or size < 0:
                size = remaining
            return super().read(min(size, remaining))
        tail = self._tail
        self._tail = b""
        return tail


def open_image(data: bytes) -> ImageFile:
    """Open an image file at its picture, which is not decoded yet.

    Raises ValueError for what is no image, or is refused by name (TiffOnly if tifffile may read
    it), and what Pillow raises.
    """
    if not data.startswith(PREPARED):
        import_plugins()
    try:
        image = Image.open(io.BytesIO(data), formats=FORMATS)
    except Exception as error:  # of many types
        kind = TiffOnly if TIFF_START.match(data) else ValueError
        raise kind(explain_error(data, error)) from error
    if image.format == "TIFF":
        choose_page(image)
        check_tiff(image)
    if image.format == "PPM":
        check_single(image, data)
    if image.format == "PNG" and "transparency" in image.info:
        scale_transparent_value(image)
    if image.format == "JPEG2000" and is_deep(image, data):
        raise ValueError(
            f"a JPEG 2000 of more than 8 bits, whose white Pillow turns black: {CONVERT}"
        )
    return image


@cache
def import_plugins() -> None:
    """Import Pillow's readers of the other formats: to find one, it would import all of its own."""
    for name in PLUGINS:
        importlib.import_module(f"PIL.{name}ImagePlugin")


def check_single(image: ImageFile, data: bytes) -> None:
    """Raise ValueError if a PPM file holds several images, as Netpbm's formats allow.

    Pillow reads the first. Those of plain text, and of unusual largest values, are not counted.
    """
    codec, _, offset, *_ = image.tile[0]
    bits = BITS_OF_PPM.get(image.mode, 0)
    if codec != "raw" or not bits:
        return
    end = offset + image.height * -(-image.width * bits // 8)
    if re.match(rb"\s*P[1-7]\s", data[end : end + 16]):
        raise ValueError("several images in one PPM: write each as a file of its own")


def load_whole(image: ImageFile, data: bytes, reach: int = 0) -> tuple[ImageFile, Box]:
    """Decode the opened image of the file `data`; return it and its box, which may be fractional.

    With `reach`, a JPEG may be decoded at a scale that leaves both sides so many pixels. Raises
    ValueError if the file is damaged.
    """
    box = draft(image, reach)
    if image.format in ("JPEG", "MPO"):
        return load_jpeg(image, data, reach), box
    if image.format == "PNG":
        check_png(data)
    if image.format == "TIFF":
        check_deflated(tiff_tags(image), data)
    try:
        image.load()
    except OSError as error:
        if "decoder error" not in str(error):  # as Pillow calls what libtiff refuses
            raise
        raise ValueError(f"not a readable image but {name_format(data, UNIDENTIFIED)}") from error
    return image, (0, 0, *image.size)  # a TIFF may be turned


def draft(image: ImageFile, reach: int) -> Box:
    """Choose the scale of an opened JPEG for `load_whole`; return the box that it will have."""
    drafted = image.draft(None, (reach, reach)) if reach else None
    return drafted[1] if drafted else (0, 0, *image.size)


def load_jpeg(image: ImageFile, data: bytes, reach: int) -> ImageFile:
    """Decode an opened JPEG; return it, or one that was opened again. Raises ValueError.

    Most files end with their scan: only others, and damaged ones, are searched for markers.
    """
    header = image.fp.tell() if image.fp else 0  # which Pillow has read
    at = max(2, data.rfind(START_OF_SCAN, 0, header))
    is_sequential = "progressive" not in image.info and not OTHER_CODING.search(data, 0, at)
    if image.format == "JPEG" and is_sequential and data.endswith(END_OF_IMAGE):
        if is_decoded_from(image, ScanFile(data, len(data) - len(END_OF_IMAGE))):
            return image
        image = Image.open(io.BytesIO(data), formats=("JPEG",))
        draft(image, reach)
    end, scans = find_scan_end(data, at)
    if "progressive" in image.info:
        check_progression(data, scans, len(image.getbands()))
    if len(scans) != 1 or not is_sequential:
        image.load()
    elif not is_decoded_from(image, ScanFile(data, end)):
        raise ValueError("damaged: the JPEG's compressed data do not end with the image")
    return image


def is_decoded_from(image: ImageFile, file: ScanFile) -> bool:
    """Decode an opened JPEG from `file`, and return whether this needed the scan exactly."""
    image.fp = file
    try:
        image.load()
    except OSError:  # the file is truncated
        return False
    return file.is_needed


def explain_error(data: bytes, error: Exception) -> str:
    """Return why Pillow, which raised this error, does not open a file."""
    if not data:
        return "the file is empty"
    reason = first_line(error)
    signatures: Sequence[tuple[bytes, str, str]] = FOREIGN
    if isinstance(error, Image.UnidentifiedImageError):
        reason = "not an image of a known format"
        signatures = (*FOREIGN, *UNIDENTIFIED)
    name = name_format(data, signatures)
    if name:
        return f"not a readable image but {name}"
    return reason


def name_format(data: bytes, signatures: Sequence[tuple[bytes, str, str]] = FOREIGN) -> str:
    """Return which format a file is by its first bytes, and what to do with it, or ""."""
    start = data[:SIGNATURE_BYTES]
    for pattern, name, advice in signatures:
        if re.match(pattern, start, re.DOTALL | re.IGNORECASE):
            return f"{name}: {advice}"
    return ""


def check_png(data: bytes) -> None:
    """Raise ValueError if a PNG file is cut short, or the CRC-32 of a chunk differs."""
    at = len(PNG_START)
    kind = b""
    try:
        while kind != b"IEND":
            length, kind = read_chunk_start(data, at)
            end = at + 8 + length
            if zlib.crc32(data[at + 4 : end]) != read_crc32(data, end)[0]:
                raise ValueError(f"damaged: the CRC-32 of the PNG's chunk {kind!r} differs")
            at = end + 4
    except struct.error:
        raise ValueError("cut short: the PNG has no end") from None


def check_deflated(tags: Mapping[int, Any], data: bytes) -> None:
    """Raise zlib.error if a strip or tile of a deflated TIFF is damaged, which libtiff ignores."""
    if not is_deflated(tags):
        return
    offsets = tags.get(Tag.StripOffsets) or tags.get(Tag.TileOffsets, ())
    sizes = tags.get(Tag.StripByteCounts) or tags.get(Tag.TileByteCounts, ())
    for offset, size in zip(offsets, sizes, strict=True):
        zlib.decompress(data[offset : offset + size])


def is_deflated(tags: Mapping[int, Any]) -> bool:
    """Whether the strips or tiles of a TIFF are streams that zlib decompresses."""
    return tags.get(Tag.Compression) in DEFLATE and tags.get(Tag.FillOrder) != REVERSED


def find_scan_end(data: bytes, at: int) -> tuple[int, list[int]]:
    """Return where the data of a JPEG's last scan end, and where each scan from `at` on begins.

    Raises ValueError for a damaged file.
    """
    scans = list[int]()
    end = at
    is_in_scan = False
    while True:
        marker = MARKER.search(data, at)
        if marker is None:
            raise ValueError("cut short: the JPEG has no end")
        if is_in_scan:
            end = marker.start()
        at = marker.end()
        code = marker[0][-2:]
        if code == END_OF_IMAGE:
            return end, scans
        if code[1] not in SEGMENTS:
            raise ValueError("damaged: the JPEG's compressed data hold an invalid marker")
        is_in_scan = code == START_OF_SCAN
        if is_in_scan:
            scans.append(at)
        at += int.from_bytes(data[at : at + 2])


def check_progression(data: bytes, scans: list[int], components: int) -> None:
    """Raise ValueError if scans are missing that hold the last bits of a progressive JPEG."""
    exact = set[tuple[int, int]]()  # components and coefficients that are sent to the last bit
    for at in scans:
        count = data[at + 2]  # ITU-T T.81, B.2.3
        first, last, bits = data[at + 3 + 2 * count : at + 6 + 2 * count]
        if not bits & 15:  # the successive approximation bit position
            names = data[at + 3 : at + 3 + 2 * count : 2]
            exact.update((name, number) for name in names for number in range(first, last + 1))
    if len(exact) < 64 * components:
        raise ValueError("cut short: the JPEG lacks scans")


def choose_page(image: Image.Image) -> None:
    """Go to the only page of a TIFF that is no thumbnail. Raises ValueError if there are others.

    Stacks of ImageJ, tifffile and MetaMorph may hold all images in one page, of which Pillow reads
    the first.
    """
    is_camera_raw = Tag.DNGVersion in tiff_tags(image)
    pages = []
    sizes = set()
    for number in range(count_frames(image)):
        image.seek(number)
        tags = tiff_tags(image)
        kind = tags.get(Tag.NewSubfileType, 0)
        is_thumbnail = tags.get(Tag.SubfileType) == OLD_THUMBNAIL
        if not (kind & (THUMBNAIL | MASK) or is_thumbnail):
            pages.append(number)
            sizes.add(image.size)
    if is_camera_raw or (not pages and Tag.SubIFDs in tiff_tags(image)):
        raise ValueError(f"not a readable image but thumbnails, or camera raw: {DEVELOP}")
    image.seek(pages[0] if pages else 0)
    count = max(len(pages), count_images(tiff_tags(image)))
    if len(sizes) > 1:
        listed = ", ".join(f"{width:,}x{height:,}" for width, height in sorted(sizes, reverse=True))
        raise ValueError(
            f"{count:,} images of several sizes in one TIFF ({listed} pixels), as of a slide in"
            " several resolutions: write the one to use as a file of its own"
        )
    if count > 1:
        raise ValueError(
            f"{count:,} pages in one TIFF: write each as a file of its own, or make channels of"
            " them by pack --pages channels"
        )


def count_images(tags: Mapping[int, Any]) -> int:
    """Return how many images a page of ImageJ, tifffile or MetaMorph holds, by its metadata."""
    planes = tags.get(METAMORPH_PLANES)
    if planes is not None:
        return len(planes["ZDistance"] if isinstance(planes, dict) else planes)
    text = tags.get(Tag.ImageDescription)
    if not isinstance(text, str):
        return 1
    images = re.match(r"ImageJ=.*?^images=(\d+)", text, re.DOTALL | re.MULTILINE)
    if images:
        return int(images[1])
    shape = re.match(r'{"shape": \[([\d, ]+)\]', text)
    if shape is None:
        return 1
    values = math.prod(map(int, shape[1].split(",")))
    samples = tags.get(Tag.SamplesPerPixel, 1)
    return values // max(1, tags[Tag.ImageWidth] * tags[Tag.ImageLength] * samples)


def check_tiff(image: Image.Image) -> None:
    """Raise ValueError for a TIFF whose pixels Pillow cannot convert, TiffOnly if it reads them
    wrongly.
    """
    tags = tiff_tags(image)
    bits = max(tags.get(Tag.BitsPerSample, (1,)))
    is_planar = tags.get(Tag.PlanarConfiguration) == PLANAR and tags.get(Tag.SamplesPerPixel, 1) > 1
    is_subsampled = tags.get(Tag.YCbCrSubSampling, (2, 2)) != (1, 1)
    is_raw = image.info.get("compression") == "raw"
    reason = ""
    kind: type[ValueError] = TiffOnly
    if max(tags.get(Tag.SampleFormat, (1,))) == SIGNED and bits == 8:
        reason = "signed 8-bit values"
    if is_planar and (image.mode in ("LA", "La") or (is_raw and bits > 8)):
        reason = f"planes of {bits} bits that are stored one after the other"
    if image.mode == "LAB":
        reason = "CIELab colours"
        kind = ValueError
    if is_raw and is_subsampled and tags.get(Tag.PhotometricInterpretation) == YCBCR:
        reason = "subsampled YCbCr colours without compression"
        kind = ValueError
    if reason:
        raise kind(f"a TIFF of {reason}: convert it to 8-bit gray or RGB")


def scale_transparent_value(image: Image.Image) -> None:
    """Scale a PNG's transparent value as Pillow scales the pixels (not those of 16-bit gray)."""
    value = image.info.get("transparency")
    raw = raw_mode(image)
    if raw == "RGB;16B" and isinstance(value, tuple):
        image.info["transparency"] = tuple(v >> 8 for v in value)
        image.info[DEEP_TRANSPARENCY] = value
    if raw in ("L;2", "L;4") and isinstance(value, int):
        image.info["transparency"] = value * 255 // (2 ** int(raw[2:]) - 1)


def raw_mode(image: Image.Image) -> str:
    """Return how the pixels of an opened image are stored, in Pillow's words, such as "RGB;16B"."""
    arguments = tile_arguments(image)
    return str(arguments[0]) if arguments else ""


def tile_arguments(image: Image.Image) -> tuple[Any, ...]:
    """Return what Pillow's decoder of an opened image is told; nothing once it is decoded."""
    tiles = getattr(image, "tile", None)
    if not tiles:
        return ()
    arguments = tiles[0][3]
    if not isinstance(arguments, tuple):
        arguments = (arguments,)
    return arguments


def tiff_tags(image: Image.Image) -> Mapping[int, Any]:
    """Return the tags of a TIFF's page; none for other formats."""
    return getattr(image, "tag_v2", {})


def is_deep(image: Image.Image, data: bytes) -> bool:
    """Whether an opened image has colours of more than 8 bits, of which Pillow keeps the upper 8.

    16-bit gray, which Pillow keeps, is not counted.
    """
    if image.format == "JPEG2000":
        size = data.find(b"\xff\x4f\xff\x51")  # ITU-T T.800, A.5.1: SOC, SIZ
        return size >= 0 and (data[size + 42] & 127) > 7 and not image.mode.startswith("I")
    if image.format == "AVIF":
        codec = data.find(b"av1C")  # the box of its configuration
        return codec >= 0 and bool(data[codec + 6] & 64)  # high_bitdepth
    if image.format == "PPM":
        return image.mode == "RGB" and max(tile_arguments(image)[1:], default=0) > 255
    return bool(DEEP.search(raw_mode(image))) and not image.mode.startswith("I")


def has_further_channels(image: Image.Image) -> bool:
    """Whether an opened TIFF has channels beside its colours and alpha, which Pillow leaves out."""
    return 0 in tiff_tags(image).get(Tag.ExtraSamples, ())


def has_white_at_zero(image: Image.Image) -> bool:
    """Whether the values of a TIFF grow towards black, which Pillow ignores for 16 bits."""
    return tiff_tags(image).get(Tag.PhotometricInterpretation) == WHITE_IS_ZERO


def gray_bits(image: Image.Image) -> int:
    """Return how many bits the values of a gray image of more than 8 have: 16, or 12 of a TIFF."""
    return min(16, *tiff_tags(image).get(Tag.BitsPerSample, (16,)))


def states_white(image: Image.Image, data: bytes) -> bool:
    """Whether a file says itself what is white, and not 255 or 65,535: TIFF of 12 bits, and PGM."""
    if image.format == "PPM":
        header = re.match(rb"P[2356](?:\s|#.*\n)+\d+(?:\s|#.*\n)+\d+(?:\s|#.*\n)+(\d+)\s", data)
        return header is not None and header[1] not in (b"255", b"65535")
    return image.mode.startswith("I") and gray_bits(image) < 16


def has_foreign_profile(image: Image.Image, data: bytes) -> bool:
    """Whether a file states a colour profile, or a gamma, that is not that of sRGB."""
    profile = image.info.get("icc_profile")
    if profile:
        return b"sRGB" not in profile and "sRGB".encode("utf-16-be") not in profile
    if image.format == "AVIF":
        at = data.find(b"colrnclx") + 8  # ITU-T H.273: colour primaries, transfer function
        primaries = data[at + 1]
        transfer = data[at + 3]
        return at > 8 and not (primaries in SRGB_PRIMARIES and transfer in SRGB_TRANSFERS)
    gamma = image.info.get("gamma")
    return gamma is not None and "srgb" not in image.info and abs(gamma - 1 / 2.2) > 0.01


def count_frames(image: Image.Image) -> int:
    """Return the number of frames or pages of an opened image."""
    if image.format == "TIFF" and not tiff_tags(image).next:  # type: ignore[attr-defined]
        return 1  # without reading its only page again
    try:
        return getattr(image, "n_frames", 1)
    except Exception as error:  # of many types
        kind = TiffOnly if image.format == "TIFF" else ValueError
        raise kind("damaged: the frames of the file cannot be counted") from error
