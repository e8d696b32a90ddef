"""Image files that Pillow does not write: PNG of any depth, TIFF of any layout, damaged ones."""

from __future__ import annotations

import base64
import io
import struct
import zlib

import numpy as np
from PIL import Image

GRAY, COLOUR, INDEXED, GRAY_ALPHA, COLOUR_ALPHA = 0, 2, 3, 4, 6  # colour types of PNG

# 8 x 8 pixels of 0, 4, 8, ..., 252: gray, and colour of 16 and of 10 bits
LOSSLESS_JPEG = base64.b64decode(
    "/9j/xAAXAAEBAQEAAAAAAAAAAAAAAAAFBgMI/8MACwgACAAIAQARAP/aAAgBAAAGAADn/TTTTTTSgQQQQQQQoEEE"
    "EEEEKBBBBBBBCgQQQQQQQoEEEEEEEKBBBBBBBCgQQQQQQQD/2Q=="
)

DEEP_JPEG_2000 = base64.b64decode(
    "/0//UQAvAAAAAAAIAAAACAAAAAAAAAAAAAAACAAAAAgAAAAAAAAAAAADDwEBDwEBDwEB/1IADAAAAAEBAAQEAAH/"
    "XAAEQID/ZAAlAAFDcmVhdGVkIGJ5IE9wZW5KUEVHIHZlcnNpb24gMi41LjT/kAAKAAAAAAB6AAH/k9/4kzASLEKn"
    "l5WxQw7WKD/e6CnFSLg0VhLheQ6YkYVPQ9GYfhKbzjvDebhZvXb2Yx5whgSAqmCP1G8SEhKbN4JiVfKRZVO90IAD"
    "MAoAAdEZdUjzFOGC1xn2uspq4TrgHDYbDYbDYbDX40uAgP/Z"
)

DEEP_AVIF = base64.b64decode(
    "AAAAIGZ0eXBhdmlmAAAAAGF2aWZtaWYxbWlhZk1BMUEAAADrbWV0YQAAAAAAAAAhaGRscgAAAAAAAAAAcGljdAAA"
    "AAAAAAAAAAAAAAAAAAAOcGl0bQAAAAAAAQAAAB5pbG9jAAAAAEQAAAEAAQAAAAEAAAETAAAAZAAAAChpaW5mAAAA"
    "AAABAAAAGmluZmUCAAAAAAEAAGF2MDFDb2xvcgAAAABqaXBycAAAAEtpcGNvAAAAFGlzcGUAAAAAAAAACAAAAAgA"
    "AAAQcGl4aQAAAAADCgoKAAAADGF2MUOBIEAAAAAAE2NvbHJuY2x4AAIAAgAAgAAAABdpcG1hAAAAAAAAAAEAAQQB"
    "AoMEAAAAbG1kYXQSAAoIOAi/5wICAJAyVhAAAPYAxJMbQeq1P4reDDvZ4jV3W9gK2JeQsxkvc5+vZ0EnBgLkkeby"
    "T7qWzTZgzjgJecd3ajcM0bW+1gh7/PKwF7oX+xGXa5/ZqxipcK/f2YvlmBSA"
)


def saved(image: Image.Image, kind: str, **options) -> bytes:
    """The bytes of an image file that Pillow writes."""
    file = io.BytesIO()
    image.save(file, kind, **options)
    return file.getvalue()


def png_chunk(kind: bytes, data: bytes) -> bytes:
    """A chunk of a PNG file."""
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))


def png(rows: list[bytes], width: int, depth: int, colour: int, **chunks: bytes) -> bytes:
    """A PNG file of these packed rows, with further chunks before them: ``tRNS=b"..."``."""
    header = struct.pack(">IIBBBBB", width, len(rows), depth, colour, 0, 0, 0)
    further = b"".join(png_chunk(name.encode(), data) for name, data in chunks.items())
    pixels = zlib.compress(b"".join(b"\0" + row for row in rows))
    parts = png_chunk(b"IHDR", header), further, png_chunk(b"IDAT", pixels), png_chunk(b"IEND", b"")
    return b"\x89PNG\r\n\x1a\n" + b"".join(parts)


def png16(values: np.ndarray, colour: int, **chunks: bytes) -> bytes:
    """A 16-bit PNG file of (H, W) or (H, W, C) values."""
    rows = [row.astype(">u2").tobytes() for row in values]
    return png(rows, values.shape[1], 16, colour, **chunks)


def tiff_page(pixels: np.ndarray, photometric: int = 1, **tags: object) -> dict:
    """A page of `tiff`: (H, W) or (H, W, C) pixels of any type.

    Further tags, or others, are those of TIFF 6.0 by number: ``t254=1``, or a text as bytes. With
    ``planar=True``, each channel is stored as a plane of its own.
    """
    return {"pixels": pixels, "photometric": photometric, **tags}


def tiff(*pages: dict, order: str = "<") -> bytes:
    """An uncompressed TIFF file of pages, each in one strip or one strip per plane."""
    out = bytearray((b"II*\0" if order == "<" else b"MM\0*") + bytes(4))
    link = 4
    for page in pages:
        tags = dict(page)
        pixels, planar = tags.pop("pixels"), tags.pop("planar", False)
        photometric = tags.pop("photometric")
        kind = {"u": 1, "i": 2, "f": 3}[pixels.dtype.kind]
        height, width = pixels.shape[:2]
        samples = pixels.shape[2] if pixels.ndim == 3 else 1
        planes = [pixels[..., i] for i in range(samples)] if planar else [pixels]
        strips = []
        for plane in planes:
            data = np.ascontiguousarray(plane, plane.dtype.newbyteorder(order)).tobytes()
            strips.append((len(out), len(data)))
            out += data
        entries = {
            256: ("I", [width]),
            257: ("I", [height]),
            258: ("H", [8 * pixels.dtype.itemsize] * samples),
            259: ("H", [1]),
            262: ("H", [photometric]),
            273: ("I", [offset for offset, _ in strips]),
            277: ("H", [samples]),
            278: ("I", [height]),
            279: ("I", [size for _, size in strips]),
            284: ("H", [2 if planar else 1]),
            339: ("H", [kind] * samples),
        }
        for name, value in tags.items():
            entries[int(name[1:])] = ("H", value if isinstance(value, list) else [value])
            if isinstance(value, bytes):
                entries[int(name[1:])] = ("B", [*value, 0])
        table = struct.pack(order + "H", len(entries))
        for tag, (code, values) in sorted(entries.items()):
            raw = struct.pack(f"{order}{len(values)}{code}", *values)
            if len(raw) > 4:
                out += bytes(len(out) % 2)
                offset = len(out)
                out += raw
                raw = struct.pack(order + "I", offset)
            fields = tag, {"B": 2, "H": 3, "I": 4}[code], len(values)
            table += struct.pack(order + "HHI", *fields) + raw.ljust(4, b"\0")
        out += bytes(len(out) % 2)
        out[link : link + 4] = struct.pack(order + "I", len(out))
        out += table
        link = len(out)
        out += bytes(4)
    return bytes(out)


def tiff_of_12_bits(values: np.ndarray) -> bytes:
    """An uncompressed TIFF file of (H, W) values below 4,096, two of which are three bytes."""
    rows = []
    for row in values.astype(int).tolist():
        bits = "".join(f"{value:012b}" for value in row)
        bits += "0" * (-len(bits) % 8)
        rows.append(int(bits, 2).to_bytes(len(bits) // 8))
    packed = np.array([[*row] for row in rows], np.uint8)
    return tiff(tiff_page(packed, t256=values.shape[1], t258=12))


def deflated_tiff(pixels: np.ndarray, stream: bytes, **others: int) -> bytes:
    """A TIFF file of (H, W) or (H, W, C) pixels, whose only strip is this zlib stream."""
    height, width = pixels.shape[:2]
    tags = {"t256": width, "t257": height, "t259": 8, "t278": height, **others}
    return tiff(tiff_page(np.frombuffer(stream, np.uint8)[None], **tags))
