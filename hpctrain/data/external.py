"""Train on an HDF5 file that is not a pack, in place: check it, split it and identify it.

Such a file has samples but no splits. Splits are drawn from a seed; a split is a list of rows, and
nothing is copied. If samples can be read one by one, each class is divided by the shares and every
split is shuffled, so the file may be ordered by class. If samples should be read in long blocks
(chunks, or --shuffle blocks), whole blocks are drawn, and a split has its blocks in random order.

Rank 0 does all of this. The other ranks receive the rows and labels of all splits with the
``Pack``: for less than 256 classes and 2^32 images, 5 bytes of each.
"""

from __future__ import annotations

import json
import math
import os
import uuid
import zlib
from collections.abc import Sequence
from dataclasses import replace
from itertools import chain
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from hpctrain.config import split_shares
from hpctrain.data.draws import Shares, assign, check_splits, cut, shuffled
from hpctrain.data.orders import random_order
from hpctrain.data.pack import ALIASES, LAYOUTS, SPLITS, Pack, SplitInfo, Stored
from hpctrain.data.partition import READ_BYTES, random_key
from hpctrain.data.split import Split, as_bytes, probed_rows
from hpctrain.errors import RunError, UsageError
from hpctrain.text import listed

if TYPE_CHECKING:
    import h5py

DEFAULT_SPLIT = "0.9,0.1"
UINT16_MAX = 65535.0
TYPES = ("uint8", "uint16", "float16", "float32", "float64")  # little endian
MATLAB = b"MATLAB 7.3 MAT-file"  # first bytes of files of version 7.3; HDF5 follows
USUAL_CHANNELS = 4  # with more, a layout has to be given
FEW_BLOCKS = 32  # fewer blocks per window do not mix the classes of an ordered file
# Least number of blocks of a file, and per class: with fewer, shares and classes would be uneven.
MIN_BLOCKS, MIN_BLOCKS_OF_CLASS = 1000, 20


class External(NamedTuple):
    """What to read of an HDF5 file of another program, and how. It is saved with networks."""

    images: str  # path of a dataset; may contain "{split}": then each split has its own
    labels: str
    layout: str | None = None  # one of LAYOUTS; None = the usual one of so many dimensions
    split: str | None = None  # shares as for the packer; None = 0.9,0.1
    seed: int = 0
    block_rows: int | None = None  # samples drawn together; 0 = one by one, stratified by class;
    # None = a number that suits the file. Chunks are never divided.
    max_value: float | None = None  # that images are divided by; None = 65,535 for uint16, else 1


class LabeledImages(NamedTuple):
    """The images and labels of a file, or of one of its splits."""

    path: str  # of the file with the images
    images: Stored
    layout: str
    labels_name: str
    labels: np.ndarray  # (N,) int64, as stored

    @property
    def image_shape(self) -> tuple[int, int, int]:
        """(H, W, C)."""
        shape = self.images.shape
        height, width, channels = (*(shape[axis] for axis in LAYOUTS[self.layout][1:]), 1)[:3]
        return height, width, channels


def read_external(path: str | os.PathLike[str], how: External) -> Pack:
    """Check, split and identify an external file and return it as a `Pack`.

    Labels are mapped to 0 ... K-1 in ascending order; classes are named by their labels. Raises
    UsageError (one line that names the file and the cause).
    """
    from hpctrain.data.hdf5 import open_hdf5  # imports h5py

    shares, path = split_shares(how.split or DEFAULT_SPLIT), os.path.abspath(path)
    if "{split}" in how.images and how.split:
        raise UsageError(f"--split {how.split} draws splits, but --images {how.images} has its own")
    sizes: dict[str, int] = {}
    with open_hdf5(path) as file:
        names = find_splits(path, file, how) if "{split}" in how.images else {"": how[:2]}
        found = {name: inspect(file, *names[name], how.layout, sizes) for name in names}
    first = next(iter(found.values()))
    for name, source in found.items():
        if (source.image_shape, source.images.dtype) != (first.image_shape, first.images.dtype):
            raise UsageError(
                f"{path}: the images of {name} are {source.image_shape} {source.images.dtype},"
                f" those of train {first.image_shape} {first.images.dtype}"
            )
    values = _class_values(path, [source.labels for source in found.values()])
    classes = tuple(map(str, values.tolist()))
    block_rows = choose_block_rows(first.images, len(values), how.block_rows)
    splits: dict[str, SplitInfo] = {}
    for name, source in found.items():
        labels = np.searchsorted(values, source.labels).astype(np.min_scalar_type(len(values)))
        drawn = {name: _in_random_order(np.arange(len(labels)), block_rows, how.seed, name)}
        if not name:
            drawn = draw(source, labels, classes, shares, block_rows, how.seed)
        kind = np.min_scalar_type(len(labels))
        drawn = {split: of.astype(kind) for split, of in drawn.items()}
        splits |= {
            split: SplitInfo(source.path, len(of), source.images, labels[of], rows=of)
            for split, of in drawn.items()
        }
    pack = Pack(
        first.path,
        "",
        first.image_shape,
        classes,
        splits,
        sizes,
        provenance={"source": os.path.basename(path), "images": first.images.dataset},
        layout=first.layout,
        max_value=_divisor(first.images.dtype, how.max_value),
        block_rows=block_rows,
        external=how._replace(layout=first.layout, block_rows=block_rows)._asdict(),
    )
    return _identified(pack, found, values, how.max_value)


def inspect(
    file: h5py.File, images: str, labels: str, layout: str | None, sizes: dict[str, int]
) -> LabeledImages:
    """Find and check the images and labels of a file; add the sizes of its files to `sizes`.

    Raises Unusable.
    """
    from hpctrain.data.hdf5 import find_dataset, locate

    data = find_dataset(file, images)
    _check_type(data)
    layout = _choose_layout(data, layout, _is_matlab(data.file.filename))
    path, stored = os.path.abspath(data.file.filename), locate(data, sizes)
    data = find_dataset(file, labels)
    return LabeledImages(path, stored, layout, data.name, _read_labels(data, stored))


def find_splits(path: str, file: h5py.File, how: External) -> dict[str, tuple[str, str]]:
    """Return the images and labels of each split that the file has, where "{split}" is its name.

    Raises UsageError if there are no images of train.
    """
    from hpctrain.data.hdf5 import has_name

    found: dict[str, tuple[str, str]] = {}
    for split, aliases in ALIASES.items():
        names = [alias for alias in aliases if has_name(file, how.images.replace("{split}", alias))]
        if len(names) > 1:
            raise UsageError(f"{path}: {' and '.join(names)} are both {split}: rename one")
        for name in names:
            found[split] = how.images.replace("{split}", name), how.labels.replace("{split}", name)
    if "train" not in found:
        raise UsageError(
            f"{path}: --images {how.images}: there is no such dataset of train; {{split}} stands"
            f" for {', '.join(chain(*ALIASES.values()))}"
        )
    return found


def _is_matlab(path: str) -> bool:
    with open(path, "rb") as file:
        return file.read(len(MATLAB)) == MATLAB


def _check_type(data: h5py.Dataset) -> None:
    """Raise Unusable for images of a type that is not read."""
    import h5py

    from hpctrain.data.hdf5 import Unusable

    # h5py gives types without an equal in NumPy, such as bfloat16, the name of a wider one.
    is_own = h5py.h5t.py_create(data.dtype).equal(data.id.get_type())
    if str(data.dtype) not in TYPES or not (is_own or data.dtype.itemsize == 1):
        raise Unusable(
            f"the images {data.name} are {'' if is_own else 'of a type that HDF5 converts to '}"
            f"{data.dtype}, which is not read: only {', '.join(TYPES)}, little endian"
        )


def _choose_layout(data: h5py.Dataset, layout: str | None, matlab: bool) -> str:
    """Return the layout of the images. Raises Unusable if it does not fit, or might be another."""
    from hpctrain.data.hdf5 import Unusable

    shape: tuple[int, ...] = data.shape or ()
    usual = {3: "NWH", 4: "NCWH"} if matlab else {3: "NHW", 4: "NHWC"}
    given, layout = layout, layout or usual.get(len(shape), "NHWC")
    axes = LAYOUTS[layout]
    if len(shape) != len(axes) or 0 in shape:
        raise Unusable(
            f"the images {data.name} have shape {shape}, which is not {layout}:"
            " (N, H, W, C), (N, C, H, W) with --layout NCHW, or (N, H, W)"
        )
    if given is None and len(axes) == 4 and shape[axes[3]] > USUAL_CHANNELS:
        raise Unusable(
            f"the images {data.name} have shape {shape}: are they (N, H, W, C) with"
            f" {shape[3]} channels, or (N, C, H, W) with {shape[1]}? Say which it is with --layout"
            " NHWC or --layout NCHW"
        )
    return layout


def _read_labels(data: h5py.Dataset, images: Stored) -> np.ndarray:
    """Read all labels, (N,) int64. Raises Unusable."""
    from hpctrain.data.hdf5 import Unusable, locate

    shape: tuple[int, ...] = data.shape or ()
    name, samples = data.name, images.shape[0]
    if data.dtype.kind not in "iuf":
        raise Unusable(f"the labels {name} are {data.dtype}, not numbers")
    flat = math.prod(shape) == samples and max(shape, default=0) == samples
    if not flat and (len(shape) != 2 or shape[0] != samples or shape[1] < 2):
        raise Unusable(
            f"the labels {name} have shape {shape}, not ({samples},) or one-hot ({samples}, K), as"
            f" there are {samples:,} images in {images.dataset}"
        )
    locate(data, {})
    values = data[...]
    if not flat:
        is_hot = ((values == 1).sum(axis=1) == 1) & ((values != 0).sum(axis=1) == 1)
        if len(wrong := np.flatnonzero(~is_hot)):
            raise Unusable(f"the labels {name} are not one-hot: row {wrong[0]} is not a single 1")
        values = values.argmax(axis=1)
    values = values.reshape(-1)
    if values.dtype.kind == "f":
        whole = np.isfinite(values) & (np.abs(values) < 2**53) & (values == np.round(values))
        if not whole.all():
            row = int(np.flatnonzero(~whole)[0])
            raise Unusable(f"the labels {name} are not whole numbers: row {row} is {values[row]:g}")
    elif int(values.max()) > np.iinfo(np.int64).max:
        raise Unusable(f"the labels {name} go up to {int(values.max())}, beyond 64 bits")
    return np.array(values, np.int64)


def _class_values(path: str, labels: list[np.ndarray]) -> np.ndarray:
    """Return the labels of all splits, (K,) int64, ascending. Raises UsageError."""
    values = np.unique(np.concatenate([np.unique(some) for some in labels]))
    if len(missing := np.setdiff1d(values, labels[0])):
        raise UsageError(f"{path}: class {missing[0]} has no image in train")
    return values


def _divisor(dtype: str, max_value: float | None) -> float:
    """Return the divisor of the values of the images; 0 if they are used unchanged."""
    if max_value is None:
        return UINT16_MAX if dtype == "uint16" else 0.0
    return 0.0 if max_value == 1 and dtype != "uint16" else max_value


def choose_block_rows(images: Stored, classes: int, wanted: int | None) -> int:
    """Return the samples per block: whole chunks of about READ_BYTES, less in a small file."""
    unit, rows = images.chunk_rows or 1, images.shape[0]
    if wanted == 0 and not images.chunk_rows:
        return 0
    if wanted and 0 < wanted <= rows and wanted % unit == 0:
        return wanted
    units, blocks = -(-rows // unit), max(MIN_BLOCKS, MIN_BLOCKS_OF_CLASS * classes)
    return unit * max(1, min(READ_BYTES // (unit * images.row_bytes), units // blocks))


def draw(
    source: LabeledImages,
    labels: np.ndarray,
    classes: Sequence[str],
    shares: Shares,
    block_rows: int,
    seed: int,
) -> dict[str, np.ndarray]:
    """Draw the rows of every split by the shares, given the labels (N,).

    Raises UsageError if a split with a share gets no sample, or a class has no sample in train.
    """
    if block_rows:
        splits = _assign_blocks(labels, shares, block_rows, seed)
        way = f", drawn in blocks of {block_rows:,} images"
    else:
        splits, way = assign(labels, shares, seed), ""
    drawn = {
        name: _in_random_order(np.flatnonzero(splits == position), block_rows, seed, name)
        for position, name in enumerate(SPLITS)
    }
    wanted = [name for name, share in zip(SPLITS, shares, strict=True) if share]
    check_splits(drawn, labels, classes, wanted, source.path, way)
    return {name: rows for name, rows in drawn.items() if len(rows)}


def _assign_blocks(labels: np.ndarray, shares: Shares, block_rows: int, seed: int) -> np.ndarray:
    """Divide whole blocks by the shares; return the split (N,) of each sample.

    Blocks are sorted by the class of their middle sample, in random order within a class. The
    splits take blocks in turn, in proportion to their shares, so each split gets its share of every
    class even if the file is ordered by class.
    """
    blocks = -(-len(labels) // block_rows)
    order = random_order(blocks, random_key(seed, "pack split"))
    middles = np.minimum(np.arange(blocks) * block_rows + block_rows // 2, len(labels) - 1)
    order = order[np.argsort(labels[middles][order], kind="stable")]
    counts = cut(blocks, shares)
    turns = np.concatenate([(np.arange(count) + 0.5) / max(1, count) for count in counts])
    splits = np.empty(blocks, np.int32)
    splits[order] = np.repeat(np.arange(len(counts)), counts)[np.argsort(turns, kind="stable")]
    return np.repeat(splits, block_rows)[: len(labels)]


def _in_random_order(rows: np.ndarray, block_rows: int, seed: int, split: str) -> np.ndarray:
    """Shuffle the ascending rows (n,) of a split: its blocks, or its samples if that is 0.

    The blocks of `orders.BlockOrder`, counted from the first sample of the split, are then blocks
    of the file: a short one comes last.
    """
    if not block_rows:
        return shuffled(rows, seed, split)
    whole = len(rows) // block_rows
    order = random_order(whole, random_key(seed, "blocks", split))
    blocks = rows[: whole * block_rows].reshape(whole, block_rows)[order]
    return np.concatenate([blocks.ravel(), rows[whole * block_rows :]])


def _identified(
    pack: Pack, found: dict[str, LabeledImages], values: np.ndarray, max_value: float | None
) -> Pack:
    """Return the pack with its UUID, which depends on the content, not on the path.

    Raises UsageError.
    """
    mapped = values.tolist() if values.tolist() != [*range(len(values))] else []
    known, splits = [], dict(pack.splits)
    for name, source in found.items():
        probe, stored = _probe(pack, source, max_value), source.images
        for split in [name] if name else splits:
            splits[split] = splits[split]._replace(probe=probe)
        labels = zlib.crc32(source.labels.data.cast("B"))
        one: list[Any] = [stored.dtype, stored.shape, source.layout, stored.dataset]
        known.append([*one, source.labels_name, labels, probe, pack.max_value, mapped])
    identity = uuid.uuid5(uuid.NAMESPACE_OID, json.dumps(known))
    return replace(pack, uuid=str(identity), splits=splits)


def _probe(pack: Pack, source: LabeledImages, max_value: float | None) -> int:
    """Return the CRC-32 of some images of the file, which every rank compares (`Split.probe`).

    Raises UsageError if their values are wrong.
    """
    stored = source.images
    rows = probed_rows(stored.shape[0])
    whole = {"train": SplitInfo(source.path, stored.shape[0], stored, source.labels)}
    try:
        with Split(replace(pack, splits=whole), "train") as split:
            images = split.gather(rows, np.empty((len(rows), *pack.image_shape), pack.dtype))
    except RunError as error:
        raise UsageError(str(error)) from None
    low, high = float(images.min()), float(images.max())
    if max_value is None and images.dtype.kind == "f" and not 0 <= low <= high <= 1:
        divisor = next((f"{d:g}" for d in (255, UINT16_MAX) if high <= d), f"{high:g}")
        way = f"--max-value {divisor} divides them by {divisor}, " if low >= 0 else ""
        raise UsageError(
            f"{source.path}: the values of {stored.dataset} go from {low:g} to {high:g}, not from 0"
            f" to 1: {way}--max-value 1 takes them as they are"
        )
    return zlib.crc32(as_bytes(images))


def images_note(pack: Pack) -> str | None:
    """Return a note for the record on how an external file is understood, or None."""
    if pack.external is None:
        return None
    height, width, channels = pack.image_shape
    images, classes = pack.splits["train"].images, len(pack.classes)
    labels = f"labels {listed(pack.classes, 5)}"
    if pack.classes != tuple(map(str, range(classes))):
        labels += f", mapped to 0 ... {classes - 1}"
    return (
        f"{images.dataset} is read as {images.shape[0]:,} images of {height} rows, {width} columns"
        f" and {channels} channel{'s' * (channels > 1)} ({pack.layout}), of {classes:,} classes:"
        f" {labels}"
    )


def window_note(pack: Pack, window_blocks: int) -> str | None:
    """Return a note for the record if windows of an external file hold few blocks, or None."""
    if pack.external is None or not 0 < window_blocks < FEW_BLOCKS:
        return None
    return (
        f"a window of --shuffle blocks holds {window_blocks} blocks of {pack.block_rows:,} images:"
        " if the file is ordered by class, batches are too; a larger --read-buffer helps"
    )
