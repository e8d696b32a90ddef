"""HDF5 files: find out where a dataset is stored, read what has no offset, train on other files.

What HDF5 would read as zeros is refused: bytes beyond the end of the file, chunks that were never
written, and virtual or external data whose sources are missing, short or not mapped.

A file that is not a pack is read in place. Its splits are drawn from a seed as lists of rows. If
samples can be read one by one, each class is divided by the shares and every split is shuffled. If
they should be read in long blocks (chunks, or --shuffle blocks), whole blocks are drawn, and a
split has its blocks in random order. Rank 0 does all of this and sends the rows and labels of all
splits with the ``Pack``: for less than 256 classes and 2^32 images, 5 bytes of each.
"""

from __future__ import annotations

import json
import math
import os
import re
import threading
import unicodedata
import uuid
import zlib
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from itertools import accumulate, chain
from typing import NamedTuple

import h5py
import numpy as np

from hpctrain.config import Shares
from hpctrain.data.orders import assign, check_splits, cut, shuffled
from hpctrain.data.pack import (
    ALIASES,
    LAYOUTS,
    MOST_CHANNELS,
    SPLITS,
    External,
    Pack,
    SplitInfo,
    Stored,
)
from hpctrain.data.partition import READ_BYTES
from hpctrain.data.scale import FLOATS, FULL, Scale, is_unit
from hpctrain.data.split import NOT_FINITE, File, Split, as_bytes
from hpctrain.errors import RunError, UsageError, first_line
from hpctrain.text import brief, listed, printable

with suppress(ImportError):
    import hdf5plugin  # noqa: F401  # registers its filters: Blosc, Zstandard, Bitshuffle, ...

CACHE_BYTES = 64 << 20  # of HDF5's chunk cache, which holds all chunks of some rows
SLOTS = 10007  # of this cache
DEFAULT_SPLIT = "0.9,0.1"
TYPES = (*FULL, *FLOATS)  # little endian
MATLAB = b"MATLAB 7.3 MAT-file"  # first bytes of files of version 7.3; HDF5 follows
CONVENTIONS = ("scale_factor", "add_offset", "_FillValue", "missing_value")  # of netCDF
# Least number of blocks of a file, and per class: with fewer, shares and classes would be uneven.
MIN_BLOCKS = 1000
MIN_BLOCKS_OF_CLASS = 20


class Unusable(Exception):
    """The file was opened but its content cannot be used; the text gives the reason."""


@contextmanager
def open_hdf5(path: str) -> Iterator[h5py.File]:
    """Open the file for reading; any error in the block is a UsageError that names the file."""
    try:
        with h5py.File(path, "r", locking=False) as file:
            yield file
    except UsageError:
        raise
    except Unusable as error:
        raise UsageError(f"{path}: {error}") from None
    except Exception as error:  # of many types, for corrupt metadata
        number = error.errno if isinstance(error, OSError) else None
        reason = os.strerror(number) if number else first_line(error)
        raise UsageError(f"{path} is not a readable HDF5 file: {reason}") from None


def find_dataset(file: h5py.Group, name: str) -> h5py.Dataset:
    """Return the dataset of this path, which may be a link to another file. Raises Unusable."""
    for way in accumulate(name.strip("/").split("/"), "{}/{}".format):
        if way in file and file.get(way) is None:
            raise Unusable(f"{way} leads nowhere: {file.get(way, getlink=True)!r}")
    data = file.get(name)
    if data is None:
        raise Unusable(f"there is no dataset {name!r}; it holds {listed(file)}")
    if not isinstance(data, h5py.Dataset):
        raise Unusable(f"{name} is not a dataset")
    return data


def locate(data: h5py.Dataset, sizes: dict[str, int]) -> Stored:
    """Return where a dataset is stored; all of it must be there. Raises Unusable.

    The sizes of all files that hold it are added to `sizes`.
    """
    path = os.path.abspath(os.fsdecode(data.file.filename))
    name = data.name
    sizes[path] = os.path.getsize(path)
    stored = Stored(name, str(data.dtype), data.shape)
    if data.is_virtual:
        return stored._replace(chunk_rows=_check_sources(data, path, sizes))
    if data.external:
        _check_external(data, path, sizes)
        return stored
    if data.chunks:
        properties = data.id.get_create_plist()
        filters = [properties.get_filter(n)[0] for n in range(properties.get_nfilters())]
        if missing := [code for code in filters if not h5py.h5z.filter_avail(code)]:
            reason = f"{name} needs HDF5's filter {missing[0]}, which is not installed"
            raise Unusable(f"{reason}: pip install hdf5plugin may provide it")
        grid = zip(data.shape, data.chunks, strict=True)
        chunks = math.prod(-(-n // c) for n, c in grid)
        written = data.id.get_num_chunks()
        if written != chunks:
            raise Unusable(f"{name} is incomplete: {written:,} of {chunks:,} chunks")
        return stored._replace(chunk_rows=int(data.chunks[0]))
    offset = data.id.get_offset()
    if offset is None and not data.id.get_storage_size():
        raise Unusable(f"{name} was never written: the file does not hold its values")
    return stored._replace(offset=offset or 0)  # 0: compact, inside the metadata


def _check_external(data: h5py.Dataset, path: str, sizes: dict[str, int]) -> None:
    """Raise Unusable unless the raw files of a dataset hold all its bytes."""
    missing = data.size * data.id.get_type().get_size()
    prefix = os.environ.get("HDF5_EXTFILE_PREFIX", "").replace("${ORIGIN}", os.path.dirname(path))
    for name, offset, size in data.external:
        raw = os.path.abspath(os.path.join(prefix, name))
        sizes[raw] = os.path.getsize(raw) if os.path.isfile(raw) else 0
        size = min(size, missing)  # the last one may be unlimited
        if offset + size > sizes[raw]:
            where = f"{data.name} is stored in {raw}"
            raise Unusable(f"{where}, which is missing or has not {offset + size:,} bytes")
        missing -= size


def _check_sources(data: h5py.Dataset, path: str, sizes: dict[str, int]) -> int:
    """Check the sources of a virtual dataset; return the most rows of a chunk of one.

    Raises Unusable for a source that is missing or too short, and for values that none holds.
    """
    if prefix := os.environ.get("HDF5_VDS_PREFIX"):  # HDF5 then looks at several places
        raise Unusable(f"sources may be elsewhere by HDF5_VDS_PREFIX={prefix}: unset it")
    rows = 0
    mapped = h5py.h5s.create_simple(data.shape)
    mapped.select_none()
    for space, name, dataset, chosen in data.virtual_sources():
        places = (os.path.join(os.path.dirname(path), name), name)  # where HDF5 looks
        holder = path if name == "." else next(filter(os.path.isfile, places), None)
        where = f"{data.name} is made of other datasets, and {name}"
        if holder is None:
            raise Unusable(f"{where} is missing")
        with open_hdf5(os.path.abspath(holder)) as file:
            source = find_dataset(file, dataset)
            if chosen.shape:
                last = chosen.get_select_bounds()[1]
                is_within = len(last) == source.ndim and (np.array(last) < source.shape).all()
            else:  # all of the source
                is_within = source.size == space.get_select_npoints()
            if not is_within:
                raise Unusable(f"{where} has too few values: {source.name} is {source.shape}")
            rows = max(rows, locate(source, sizes).chunk_rows)
        if space.get_select_type() == h5py.h5s.SEL_ALL:
            mapped.select_all()
        elif space.is_regular_hyperslab():
            start, stride, count, block = space.get_regular_hyperslab()
            mapped.select_hyperslab(start, count, stride, block, h5py.h5s.SELECT_OR)
        else:
            raise Unusable(f"{where} has a selection that is not a regular hyperslab")
    covered = mapped.get_select_npoints()
    if covered != data.size:
        raise Unusable(f"{data.name} has {data.size:,} values, and its sources hold {covered:,}")
    return rows


class Rows:
    """The rows of a dataset that is not stored in one piece, read by h5py. Thread-safe.

    The file must not change while it is read: HDF5 returns zeros for bytes that are missing.
    (Sources of virtual datasets and raw files are compared when it is opened, and not again.)
    """

    def __init__(self, path: str, stored: Stored, sizes: dict[str, int]) -> None:
        """Open the file. Raises UsageError if it or a source is not the one that was checked."""
        for name, size in sizes.items():
            File(name, size).close()
        self._path = path
        self._lock = threading.Lock()
        # HDF5 caches what was read last, of each source of a virtual dataset: calls continue there.
        cached = max(CACHE_BYTES, 2 * stored.chunk_rows * stored.row_bytes) // len(sizes)
        self._file = h5py.File(path, "r", locking=False, rdcc_nbytes=cached, rdcc_nslots=SLOTS)
        self._data = self._file[stored.dataset]
        self._state = self._read_state()

    def read(self, rows: np.ndarray, out: np.ndarray) -> None:
        """Read `rows` (n,), in that order, into `out` (n, ...), as stored. Raises RunError."""
        order = np.argsort(rows, kind="stable")  # file order
        cuts = np.flatnonzero(np.diff(rows[order]) != 1) + 1
        with self._lock:
            for places in np.split(order, cuts) if len(rows) else ():
                first = int(rows[places[0]])
                out[places] = self._read_run(first, first + len(places))
            self._check_unchanged()

    def close(self) -> None:
        with self._lock:
            self._file.close()

    def _read_run(self, start: int, stop: int) -> np.ndarray:
        try:
            return np.asarray(self._data[start:stop])
        except Exception as error:  # of many types, from HDF5 and h5py
            self._check_unchanged()
            for row in range(start, stop) if stop - start > 1 else ():
                self._read_run(row, row + 1)  # raises the error of the first that has one
            where = f"{self._path}: row {start:,} of {self._data.name}"
            raise RunError(f"{where} cannot be read: {first_line(error)}") from None

    def _read_state(self) -> tuple[int, int]:
        state = os.fstat(self._file.id.get_vfd_handle())
        return state.st_size, state.st_mtime_ns

    def _check_unchanged(self) -> None:
        if self._read_state() != self._state:
            raise RunError(f"{self._path} was changed or cut short while in use")


class Content(NamedTuple):
    """What an external file holds, by split; the first is train."""

    infos: dict[str, SplitInfo]
    labels: dict[str, np.ndarray]  # (N,), as stored
    layout: str
    sizes: dict[str, int]  # of all files that hold the data, by path
    notes: list[str]


def read_external(path: str | os.PathLike[str], how: External) -> Pack:
    """Check, split and identify an external file and return it as a `Pack`. Raises UsageError.

    Labels are mapped to 0 ... K-1 in ascending order, strings sorted; they name the classes.
    """
    path = os.path.abspath(path)
    with open_hdf5(path) as file:
        infos, labels, layout, sizes, notes = read_content(file, how)
    first = next(iter(infos))
    images = infos[first].images
    values = np.unique(labels[first])
    for split, info in infos.items():
        kind = info.images.shape[1:], info.images.dtype
        train_kind = images.shape[1:], images.dtype
        if kind != train_kind:
            raise UsageError(f"{path}: images of {split} are {kind}, those of train {train_kind}")
        others = np.setdiff1d(labels[split], values)
        if len(others):
            raise UsageError(f"{path}: class {others[0]} has no image in train")
    height, width, channels = (*(images.shape[axis] for axis in LAYOUTS[layout][1:]), 1)[:3]
    block_rows = choose_block_rows(images, len(values), how.block_rows)
    pack = Pack(
        path,
        "",
        (height, width, channels),
        tuple(printable(str(value), newlines=False) for value in values.tolist()),
        {"train": infos[first]},
        sizes,
        provenance={
            "source": os.path.basename(path),
            "images": images.dataset,
            "notes": notes,
        },
        layout=layout,
        scale=Scale(images.dtype, how.max_value or FULL.get(images.dtype, 1.0)),
        block_rows=block_rows,
        external=how._replace(layout=layout, block_rows=block_rows)._asdict(),
    )
    probes = {split: _probe(pack, info, how.max_value is not None) for split, info in infos.items()}
    scale = pack.scale._replace(low=probes[first].low, high=probes[first].high)
    splits = dict[str, SplitInfo]()
    identity = [layout, pack.divisor, how.labels]  # of the content, not of the path
    for split, info in infos.items():
        probe = probes[split]
        scale_of_split = pack.scale._replace(low=probe.low, high=probe.high)
        if scale_of_split.is_unlike(scale):
            notes.append(f"{split} has {scale_of_split}, and train {scale}")
        identity += [info.images.dtype, info.images.shape, info.images.dataset]
        identity += [zlib.crc32(as_bytes(labels[split])), probe.crc32]
        classes = np.searchsorted(values, labels[split]).astype(np.min_scalar_type(len(values)))
        for name, rows in draw(pack, split, classes, how).items():
            splits[name] = info._replace(
                samples=len(rows),
                labels=classes[rows],
                rows=rows.astype(np.min_scalar_type(info.samples)),
                probe=probe.crc32,
            )
    number = uuid.uuid5(uuid.NAMESPACE_OID, json.dumps(identity))
    return replace(pack, uuid=str(number), splits=splits, scale=scale)


def read_content(file: h5py.File, how: External) -> Content:
    """Locate the images of all splits, and read the labels. Raises Unusable."""
    content = Content({}, {}, how.layout or "", {}, [])
    for split, name in find_splits(file, how).items():
        images = find_dataset(file, how.images.replace("{split}", name))
        labels = find_dataset(file, how.labels.replace("{split}", name))
        content = content._replace(layout=choose_layout(images, content.layout))
        stored = locate(images, content.sizes)
        values = read_labels(labels, len(images))
        path = os.path.abspath(os.fsdecode(images.file.filename))
        content.infos[split] = SplitInfo(path, len(images), stored, values)
        content.labels[split] = values
        unused = [attribute for attribute in CONVENTIONS if attribute in images.attrs]
        if unused:
            content.notes.append(f"{listed(unused)} of {images.name} are not applied")
    return content


def find_splits(file: h5py.File, how: External) -> dict[str, str]:
    """Return what stands for "{split}" in the file, by split; {"": ""} without it.

    Raises Unusable if there are no images of train.
    """
    before, mark, after = how.images.partition("{split}")
    if not mark:
        return {"": ""}
    if how.split:
        raise Unusable(f"--split {how.split} draws splits, but --images {how.images} has its own")
    name_of: dict[str, str] = {}
    for split, aliases in ALIASES.items():
        names = [alias for alias in aliases if before + alias + after.partition("/")[0] in file]
        if len(names) > 1:
            raise Unusable(f"{' and '.join(names)} are both {split}: rename one")
        if names:
            name_of[split] = names[0]
    if "train" not in name_of:
        words = ", ".join(chain(*ALIASES.values()))
        raise Unusable(f"--images {how.images}: none of train; {{split}} stands for {words}")
    return name_of


def choose_layout(data: h5py.Dataset, layout: str) -> str:
    """Return the layout of the images, by default the usual one of so many dimensions.

    Raises Unusable if it does not fit or may be another, or for images of another type.
    """
    name = f"the images {data.name}"
    shape = data.shape or ()
    check_type(data)
    with open(data.file.filename, "rb") as file:
        usual = {3: "NWH", 4: "NCWH"} if file.read(len(MATLAB)) == MATLAB else {3: "NHW"}
    chosen = layout or usual.get(len(shape), "NHWC")
    if len(shape) not in (3, 4):
        way = f"write them anew, {reshaped(data, '.reshape(N, H, W)')}, or (N, H, W, C)"
        raise Unusable(f"{name} have shape {shape}: {way}")
    if 0 in shape:
        raise Unusable(f"{name} have shape {shape}: they hold nothing")
    if len(shape) != len(LAYOUTS[chosen]):
        raise Unusable(f"{name} have shape {shape}, which is not {chosen}: say --layout")
    if not layout and len(shape) == 4 and shape[LAYOUTS[chosen][3]] > MOST_CHANNELS:
        ways = "--layout NHWC, NCHW or (of MATLAB) NCWH"
        raise Unusable(f"{name} have shape {shape}: say {ways}")
    return chosen


def check_type(data: h5py.Dataset) -> None:
    """Raise Unusable for images of a type that is not read, with what to do instead."""
    kind = data.dtype
    size = data.id.get_type().get_size()
    what = f"the images {data.name} are {kind} of {size} bytes, not one of {', '.join(TYPES)}"
    if kind in TYPES and kind.isnative:
        if size != kind.itemsize:  # h5py names bfloat16 float32
            raise Unusable(f"{what}: write them as float32")
        return
    if kind.kind not in "biuf":
        raise Unusable(f"{what}: write pixels, as uint8 (N, H, W, C); hp.write_pack does so")
    wanted = str(kind.newbyteorder("="))
    if wanted == "bool":
        wanted = "uint8"
    elif wanted not in TYPES:
        wanted = "float32" if kind.itemsize <= 2 else "float64"
    raise Unusable(f"{what}: write them anew, {reshaped(data, f'.astype({wanted!r})')}")


def reshaped(data: h5py.Dataset, how: str) -> str:
    """Return what writes a changed copy of a dataset in Python."""
    return f"file['new'] = file['{data.name}'][:]{how}"


def read_labels(data: h5py.Dataset, samples: int) -> np.ndarray:
    """Read all labels, (N,) int64, or strings. Raises Unusable."""
    locate(data, {})
    name = f"the labels {data.name}"
    if h5py.check_string_dtype(data.dtype):
        return read_names(data, samples)
    values = data[...]
    names_of = h5py.check_enum_dtype(data.dtype)
    if names_of:
        by_value = {value: name for name, value in names_of.items()}
        texts = [by_value.get(value, str(value)) for value in values.reshape(-1).tolist()]
        return one_each(np.array(texts), name, samples)
    if values.dtype.kind not in "biuf":
        raise Unusable(f"{name} are {values.dtype}: write integers, truth values or strings")
    if values.ndim == 2 and len(values) == samples and values.shape[1] > 1:
        hot = ((values == 1).sum(axis=1) == 1) & ((values != 0).sum(axis=1) == 1)
        if not hot.all():
            row = int(hot.argmin())
            why = f"row {row} is {brief(values[row].tolist())}, not a single 1"
            raise Unusable(f"{name} are not one-hot: {why}; write the class of each image, (N,)")
        values = values.argmax(axis=1)
    values = one_each(values, name, samples)
    with np.errstate(invalid="ignore"):  # of NaN
        labels = np.array(values.astype(np.int64))
    whole = (labels == values) & (values.dtype.kind != "f" or np.abs(values) < 2**53)
    if not whole.all():
        row = int(whole.argmin())
        raise Unusable(f"{name} are not whole numbers of 64 bits: row {row} is {values[row]:g}")
    return labels


def read_names(data: h5py.Dataset, samples: int) -> np.ndarray:
    """Read labels that are strings, (N,); strings of whole numbers as int64. Raises Unusable."""
    name = f"the labels {data.name}"
    try:
        texts = data.asstr("utf-8")[...]
    except UnicodeDecodeError as error:
        raise Unusable(f"{name} are not UTF-8, such as {error.object!r}: write them anew") from None
    names = one_each(np.array(texts, str), name, samples)
    empty = names == ""
    if empty.any():
        raise Unusable(f"{name} are incomplete: row {empty.argmax()} is an empty string")
    distinct = np.unique(names).tolist()
    spellings: dict[str, str] = {}
    for text in distinct:
        other = spellings.setdefault(unicodedata.normalize("NFC", text.strip()), text)
        if other != text:
            ways = "which differ in spaces around them or in Unicode normalization alone"
            raise Unusable(f"{name} hold {other!a} and {text!a}, {ways}: write them alike")
    is_numbered = all(re.fullmatch("0|[1-9][0-9]{0,17}", text) for text in distinct)
    return names.astype(np.int64) if is_numbered else names


def one_each(values: np.ndarray, name: str, samples: int) -> np.ndarray:
    """Return labels of one value per image as (N,), whatever axes there are. Raises Unusable."""
    if values.size != samples or max(values.shape) != samples:
        wanted = f"({samples},) or one-hot ({samples}, K)"
        raise Unusable(f"{name} have shape {values.shape}, and {samples:,} images need {wanted}")
    return values.reshape(-1)


def choose_block_rows(images: Stored, classes: int, wanted: int | None) -> int:
    """Return the samples per block: whole chunks of about READ_BYTES, less in a small file."""
    unit = images.chunk_rows or 1
    rows = images.shape[0]
    if wanted == 0 and not images.chunk_rows:
        return 0
    if wanted and 0 < wanted <= rows and wanted % unit == 0:
        return wanted
    units = -(-rows // unit)
    blocks = max(MIN_BLOCKS, MIN_BLOCKS_OF_CLASS * classes)
    return unit * max(1, min(READ_BYTES // (unit * images.row_bytes), units // blocks))


def draw(pack: Pack, split: str, labels: np.ndarray, how: External) -> dict[str, np.ndarray]:
    """Draw the rows of every split of a file, given the labels (N,); of a `split`, shuffle them.

    Raises what `check_splits` raises.
    """
    everything = np.arange(len(labels))
    block_rows = pack.block_rows
    if split:
        return {split: _in_random_order(everything, block_rows, how.seed, split)}
    shares = Shares(how.split or DEFAULT_SPLIT)
    way = advice = ""
    images = pack.splits["train"].images
    if block_rows:
        splits = _assign_blocks(labels, shares, block_rows, how.seed)
        way = f", drawn in blocks of {block_rows:,} images"
        if images.chunk_rows > 1:
            advice = chunk_advice(images, pack.splits["train"].path)
    else:
        splits = assign(labels, shares, how.seed)
    drawn = {
        name: _in_random_order(everything[splits == position], block_rows, how.seed, name)
        for position, name in enumerate(SPLITS)
    }
    wanted = [name for name, share in zip(SPLITS, shares, strict=True) if share]
    check_splits(drawn, labels, pack.classes, wanted, pack.path, way, advice)
    return {name: rows for name, rows in drawn.items() if len(rows)}


def chunk_advice(images: Stored, path: str) -> str:
    """Return what helps where the chunks of a file are too large to draw splits from."""
    chunk = "x".join(map(str, (1, *images.shape[1:])))
    repack = f"h5repack -l {images.dataset}:CHUNK={chunk} {path} new.h5"
    cause = f"its chunks of {images.chunk_rows:,} images are read whole"
    return f"{cause}: write smaller ones, '{repack}', or a pack with hp.write_pack"


def _assign_blocks(labels: np.ndarray, shares: Shares, block_rows: int, seed: int) -> np.ndarray:
    """Divide whole blocks by the shares; return the split (N,) of each sample.

    Blocks are sorted by the class of their middle sample, in random order within a class, and the
    splits take them in turn: each gets its share of every class, even in a file ordered by class.
    """
    blocks = -(-len(labels) // block_rows)
    order = shuffled(np.arange(blocks), seed, "pack split")
    middles = np.minimum(np.arange(blocks) * block_rows + block_rows // 2, len(labels) - 1)
    order = order[np.argsort(labels[middles][order], kind="stable")]
    counts = cut(blocks, shares)
    turns = np.concatenate([(np.arange(count) + 0.5) / max(1, count) for count in counts])
    splits = np.empty(blocks, np.int32)
    splits[order] = np.repeat(np.arange(len(counts)), counts)[np.argsort(turns, kind="stable")]
    return np.repeat(splits, block_rows)[: len(labels)]


def _in_random_order(rows: np.ndarray, block_rows: int, seed: int, split: str) -> np.ndarray:
    """Shuffle the ascending rows (n,) of a split: its samples, or its blocks, a short one last.

    So the blocks that `orders.BlockOrder` counts from the first sample are those of the file.
    """
    if not block_rows:
        return shuffled(rows, seed, "pack order", split)
    whole, rest = np.split(rows, [len(rows) // block_rows * block_rows])
    blocks = shuffled(whole.reshape(-1, block_rows), seed, "blocks", split)
    return np.concatenate([blocks.ravel(), rest])


class ProbedImages(NamedTuple):
    """Some images of a file: their CRC-32, by which other ranks recognise it, and their range."""

    crc32: int
    low: float  # smallest and largest stored value
    high: float


def _probe(pack: Pack, info: SplitInfo, has_max_value: bool) -> ProbedImages:
    """Read some images of a file.

    Raises UsageError if they are not finite, or beyond [0, 1] and --max-value was not given.
    """
    where = f"{info.path}: {info.images.dataset}"
    try:
        with Split(replace(pack, splits={"train": info}), "train") as split:
            rows, images = split.read_probe()
    except RunError as error:
        raise UsageError(str(error)) from None
    finite = np.isfinite(images).all(axis=(1, 2, 3))
    if not finite.all():
        raise UsageError(f"{where}[{rows[finite.argmin()]}] {NOT_FINITE}")
    low = float(images.min())
    high = float(images.max())
    if not has_max_value and images.dtype.kind == "f" and not is_unit(low, high):
        divisor = next((f"{d:g}" for d in FULL.values() if high <= d), f"{high:g}")
        way = f"--max-value {divisor}, which divides them by {divisor}, or " if low >= 0 else ""
        text = f"{where} has values from {low:g} to {high:g}, not from 0 to 1"
        raise UsageError(f"{text}: train with {way}--max-value 1, which takes them as they are")
    limits = (float(f"{value * (pack.divisor or 1):.6g}") for value in (low, high))
    return ProbedImages(zlib.crc32(as_bytes(images)), *limits)
