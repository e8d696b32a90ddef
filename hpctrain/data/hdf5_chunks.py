"""Read the chunks of an untrusted HDF5 dataset raw, and decode them here.

HDF5 trusts the metadata of chunks: its Fletcher-32 filter ends the process with SIGSEGV if a chunk
is shorter than its checksum. So HDF5 only returns the stored bytes, and the filters are reversed
here, from the last to the first. No filter may produce more bytes than a chunk may have:

* fletcher32 (H5Zfletcher32.c): the data, followed by a checksum of four bytes, little endian, over
  their 16-bit words, big endian; an old HDF5 wrote both halves of the checksum byte-swapped;
* shuffle (H5Zshuffle.c): the first bytes of all numbers, then all second bytes, ...;
* deflate: a zlib stream (RFC 1950);
* lzf (filter 32000, by h5py): LibLZF's format. A control byte c < 32 is followed by c + 1 literal
  bytes. Any other is a back reference: its upper three bits are the length - 2 (if all are set, the
  next byte is added), its lower five bits and the following byte are the distance - 1.
"""

from __future__ import annotations

import ctypes
import math
import threading
import zlib
from collections import OrderedDict
from collections.abc import Callable
from functools import lru_cache
from itertools import pairwise, product
from typing import NamedTuple

import h5py
import numpy as np

from hpctrain.data.hdf5 import CorruptChunk, explain, file_size
from hpctrain.data.pack_format import ExternalFile
from hpctrain.errors import RunError

CACHE_BYTES = 64 << 20  # of cached slabs; the last one is kept whatever its size
WORDS = 1 << 14  # summed at a time for a checksum
FALLING = np.arange(WORDS, 0, -1)


class Filters(NamedTuple):
    """How the chunks of a dataset are stored."""

    codes: tuple[int, ...]  # in the order in which they were applied
    itemsize: int
    size: int  # bytes of a chunk, decoded


class StoredChunks:
    """A chunked dataset; its properties are read from HDF5 once."""

    def __init__(self, data: h5py.Dataset) -> None:
        self._id, self.shape, self.chunk, self.dtype = data.id, data.shape, data.chunks, data.dtype
        properties = data.id.get_create_plist()
        codes = tuple(properties.get_filter(i)[0] for i in range(properties.get_nfilters()))
        self.filters = Filters(
            codes, self.dtype.itemsize, math.prod(self.chunk) * self.dtype.itemsize
        )

    def read(self, start: int, stop: int, file_size: int) -> np.ndarray:
        """Read rows `start` (the first of a chunk) to `stop`; they may be read-only.

        Raises CorruptChunk, or any error of h5py.
        """
        shape = (stop, *self.shape[1:])
        firsts = (start, *(0 for _ in shape[1:]))
        if self.chunk[1:] == shape[1:] and stop - start <= self.chunk[0]:  # one chunk: no copy
            return self._read_chunk(firsts, file_size)[: stop - start]
        out = np.empty((stop - start, *self.shape[1:]), self.dtype)
        corners = (range(*limits) for limits in zip(firsts, shape, self.chunk, strict=True))
        for corner in product(*corners):
            decoded = self._read_chunk(corner, file_size)
            sizes = [min(n - at, c) for n, at, c in zip(shape, corner, self.chunk, strict=True)]
            there = tuple(slice(at, at + n) for at, n in zip(corner, sizes, strict=True))
            within = (slice(corner[0] - start, corner[0] - start + sizes[0]), *there[1:])
            out[within] = decoded[tuple(slice(n) for n in sizes)]
        return out

    def _read_chunk(self, corner: tuple[int, ...], file_size: int) -> np.ndarray:
        raw, skipped = self._read_stored(corner, file_size)
        try:
            values = decode(raw, self.filters, skipped)
        except CorruptChunk as error:
            raise CorruptChunk(f"the chunk at {corner}: {error}") from None
        return np.frombuffer(values, self.dtype).reshape(self.chunk)

    def _read_stored(self, corner: tuple[int, ...], file_size: int) -> tuple[bytes, int]:
        """Read the stored bytes of a chunk, and its filter mask: a set bit is a skipped filter."""
        found, size = self._id.get_chunk_info_by_coord(corner), self.filters.size
        checksums = 4 * self.filters.codes.count(h5py.h5z.FILTER_FLETCHER32)
        least, most = checksums + 1, 2 * size + 1024  # incompressible data grow only a little
        if not self.filters.codes:  # HDF5 allocates `size` bytes, whatever the index says
            least = most = size
        if found.byte_offset is None or found.byte_offset + found.size > file_size:
            raise CorruptChunk(f"the chunk at {corner} is not within the file")
        if not least <= found.size <= most:
            raise CorruptChunk(
                f"the chunk at {corner} is stored as {found.size:,} bytes and holds {size:,}"
            )
        skipped, raw = self._id.read_direct_chunk(corner)
        return raw, skipped


def decode(raw: bytes, filters: Filters, skipped: int = 0) -> bytes:
    """Decode a stored chunk; a set bit i of `skipped` skips filter i. Raises CorruptChunk."""
    limit = filters.size + 4 * filters.codes.count(h5py.h5z.FILTER_FLETCHER32)
    content = raw
    for number, code in reversed(list(enumerate(filters.codes))):
        if skipped >> number & 1:
            continue
        if code == h5py.h5z.FILTER_FLETCHER32:
            content = check_fletcher32(content)
        elif code == h5py.h5z.FILTER_DEFLATE:
            content = inflate(content, limit)
        elif code == h5py.h5z.FILTER_LZF:
            content = expand_lzf(content, limit)
        else:
            content = unshuffle(content, filters.itemsize)
    if len(content) != filters.size:
        raise CorruptChunk(f"{len(content):,} bytes were stored, not {filters.size:,}")
    return content


def check_fletcher32(content: bytes) -> bytes:
    """Verify the checksum at the end and return the bytes before it. Raises CorruptChunk."""
    if len(content) < 4:
        raise CorruptChunk(f"{len(content)} bytes are too few for a Fletcher-32 checksum")
    values, stored = content[:-4], int.from_bytes(content[-4:], "little")
    low, high = fletcher32(values)
    exchanged = [(half & 0xFF) << 8 | half >> 8 for half in (low, high)]
    if stored not in (high << 16 | low, exchanged[1] << 16 | exchanged[0]):
        raise CorruptChunk("its Fletcher-32 checksum does not agree")
    return values


def fletcher32(content: bytes) -> tuple[int, int]:
    """Return both sums of Fletcher's checksum modulo 65,535.

    A positive multiple of 65,535 gives 65,535; only a sum of 0 gives 0.
    """
    words = np.frombuffer(content + bytes(len(content) % 2), ">u2")
    plain = weighted = 0
    for first in range(0, len(words), WORDS):
        block = words[first : first + WORDS].astype(np.int64)
        count = len(block)
        weighted += count * plain + int(block @ FALLING[-count:])
        plain += int(block.sum())
    low, high = (total % 65535 or (65535 if total else 0) for total in (plain, weighted))
    return low, high


def inflate(content: bytes, limit: int) -> bytes:
    """Decompress a zlib stream to at most `limit` bytes. Raises CorruptChunk."""
    stream = zlib.decompressobj()
    try:
        values = stream.decompress(content, limit + 1)
    except zlib.error as error:
        raise CorruptChunk(f"it is no whole gzip stream ({error})") from None
    if not stream.eof:
        raise CorruptChunk("its gzip stream is cut short, or is longer than a chunk")
    return values


def unshuffle(content: bytes, itemsize: int) -> bytes:
    """Reverse the shuffle filter; an incomplete number at the end is left in place."""
    whole = len(content) - len(content) % itemsize
    planes = np.frombuffer(content, np.uint8, whole).reshape(itemsize, -1)
    return planes.T.tobytes() + content[whole:]


def expand_lzf(content: bytes, limit: int) -> bytes:
    """Decompress an LZF stream to at most `limit` bytes. Raises CorruptChunk."""
    if (expand := _lzf_of_h5py()) is None:
        return expand_lzf_here(content, limit)
    buffer = ctypes.create_string_buffer(limit)
    count = expand(content, len(content), buffer, limit)
    if not count:
        raise CorruptChunk("it is no whole LZF stream, or one longer than a chunk")
    return buffer.raw[:count]


@lru_cache(maxsize=1)
def _lzf_of_h5py() -> Callable[[bytes, int, object, int], int] | None:
    """Return LibLZF's bounded decompression function, or None if h5py does not export it."""
    try:
        function = ctypes.CDLL(h5py.h5z.__file__).lzf_decompress
    except (OSError, AttributeError):
        return None
    function.argtypes = [ctypes.c_char_p, ctypes.c_uint, ctypes.c_void_p, ctypes.c_uint]
    function.restype = ctypes.c_uint
    return function


def expand_lzf_here(content: bytes, limit: int) -> bytes:
    """Decompress as `expand_lzf` does, in pure Python, which is much slower."""
    out, at = bytearray(), 0
    try:
        while at < len(content) and len(out) <= limit:
            control, at = content[at], at + 1
            if control < 32:
                out += content[at : at + control + 1]
                at += control + 1
                continue
            count = control >> 5
            if count == 7:
                count, at = count + content[at], at + 1
            back, at = ((control & 31) << 8) + content[at] + 1, at + 1
            if back > len(out):
                raise CorruptChunk("it is no whole LZF stream")
            piece = out[-back:]
            out += (piece * -(-(count + 2) // back))[: count + 2]
    except IndexError:
        raise CorruptChunk("its LZF stream is cut short") from None
    if len(out) > limit or at > len(content):
        raise CorruptChunk("it is no whole LZF stream, or one longer than a chunk")
    return bytes(out)


class Chunks:
    """The images of an external file, stored in chunks.

    A slab consists of all chunks that hold the same images. Every slab that a call needs is read
    once, and the most recent slabs are cached, because the next call often continues within one.
    HDF5 returns zeros for bytes missing at the end of a file, so the file's size is checked after
    every read.
    """

    def __init__(self, source: ExternalFile, file: h5py.File, data: h5py.Dataset) -> None:
        """Read from `data` in the open `file`; both have been checked."""
        self.source, self._file, self._data = source, file, StoredChunks(data)
        self._count = max(1, CACHE_BYTES // (source.chunk_rows * source.image_bytes))
        self._kept: OrderedDict[int, np.ndarray] = OrderedDict()  # by number, newest last
        self._lock = threading.Lock()

    def read(self, rows: np.ndarray, out: np.ndarray) -> None:
        """Read the images `rows` (n,), in that order, into `out` (n, H, W, C). Raises RunError."""
        step = self.source.chunk_rows
        order = np.argsort(rows, kind="stable")  # file order
        slabs = rows[order] // step
        cuts = [0, *(np.flatnonzero(np.diff(slabs)) + 1).tolist(), len(rows)]
        with self._lock:
            for first, stop in pairwise(cuts if len(rows) else ()):
                places, slab = order[first:stop], int(slabs[first])
                images = self._read_slab(slab)  # (m, H, W, C)
                out[places] = self.source.scaled(images[rows[places] - slab * step])
            self._check_size()

    def close(self) -> None:
        """Close the file."""
        with self._lock:
            self._kept.clear()
            self._file.close()

    def _read_slab(self, slab: int) -> np.ndarray:
        """Return the images of a slab, (m, H, W, C), from the cache or the file."""
        if slab in self._kept:
            self._kept.move_to_end(slab)
            return self._kept[slab]
        source, step = self.source, self.source.chunk_rows
        start, stop = slab * step, min(source.rows, (slab + 1) * step)
        try:
            images = self._data.read(start, stop, source.file_size)
        except Exception as error:  # of many types, from HDF5 and h5py
            self._check_size()
            raise RunError(
                f"{source.path}: images {start:,} to {stop - 1:,} of {source.images} cannot be"
                f" read, the file {explain(error)}"
            ) from None
        self._kept[slab] = source.to_images(images)
        if len(self._kept) > self._count:
            self._kept.popitem(last=False)
        return self._kept[slab]

    def _check_size(self) -> None:
        there = file_size(self._file)
        if there < self.source.file_size:
            raise RunError(
                f"{self.source.path} has {there:,} bytes, {self.source.file_size - there:,} fewer"
                " than when it was opened: it was cut short while in use"
            )
