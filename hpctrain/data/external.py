"""Train on an HDF5 file that is not a pack, in place: split it and identify it.

Such a file has samples but no splits. Splits are drawn from a seed; a split is a list of indices,
and nothing is copied. If samples can be read one by one, each class is divided by the shares and
every split is shuffled, so the file may be ordered by class. If samples should be read in long
blocks (chunks, or --shuffle blocks), whole blocks are drawn and a split keeps the order of the
file: ``orders.BlockOrder`` then assigns the blocks to the shards at random.

``external_file.py`` checks the file, ``split.py`` reads the samples.
"""

from __future__ import annotations

import dataclasses
import json
import os
import uuid
import zlib
from functools import lru_cache
from typing import Any

import numpy as np

from hpctrain.config import split_shares
from hpctrain.data.checks import NOT_FINITE
from hpctrain.data.orders import random_order
from hpctrain.data.pack_format import EXTERNAL_ARGUMENTS as ARGUMENTS
from hpctrain.data.pack_format import SPLITS, ExternalFile, Pack, SplitLayout
from hpctrain.data.packing.split import Shares, assign, cut, shuffled
from hpctrain.data.partition import READ_BYTES, random_key
from hpctrain.data.split import WHOLE_FILE, Split
from hpctrain.errors import RunError, UsageError
from hpctrain.text import listed

DEFAULT_SPLIT = "0.9,0.1"
UINT16_MAX = 65535.0
PROBED = 64  # images whose checksum identifies the file
FEW_BLOCKS = 32  # fewer blocks per window do not mix the classes of an ordered file
# Least number of blocks of a file, and per class: with fewer, shares and classes would be uneven.
MIN_BLOCKS, MIN_BLOCKS_OF_CLASS = 1000, 20


def read_external(
    path: str | os.PathLike[str],
    images: str,
    labels: str,
    layout: str | None = None,
    split: str | None = None,
    seed: int = 0,
    block_rows: int | None = None,
    scale: float | None = None,
) -> Pack:
    """Check, split and identify an external file and return it as a `Pack`.

    `images` and `labels` are paths of datasets within the file, or FILE:DATASET of a file in the
    same folder; if they contain "{split}", each split has its own datasets. Otherwise `split` gives
    the shares as for the packer, and samples are drawn in blocks of `block_rows`; 0 = one by one,
    stratified by class; None = in blocks that suit the file. Chunks are never divided. Images are
    divided by `scale`; None = by 65,535 for uint16, else not at all. Labels are mapped to 0 ... K-1
    in ascending order; classes are named by their labels. Raises UsageError.
    """
    from hpctrain.data import external_file  # imports h5py

    split_shares(split or DEFAULT_SPLIT)  # before anything is opened
    scale, path, names = scale or None, os.path.abspath(path), {"": (images, labels)}
    if "{split}" in images and split:
        raise UsageError(f"--split {split} draws splits, but --images {images} has its own")
    if "{split}" in images:
        names = external_file.find_splits(path, images, labels)
    found = {name: external_file.inspect(path, *names[name], layout) for name in names}
    classes, values = _class_names(path, [labels for _, labels in found.values()])
    sources = {
        name: dataclasses.replace(
            source,
            scale=_divisor(source, scale),
            label_values=values,
            block_rows=choose_block_rows(source, len(classes), block_rows),
            split=name or split or DEFAULT_SPLIT,
            seed=seed,
        )
        for name, (source, _) in found.items()
    }
    first = next(iter(sources.values()))
    arguments = [images, labels, first.layout, "" if first.split in SPLITS else first.split, seed]
    arguments += [first.block_rows, scale or 0.0]
    pack = Pack(
        first.path,
        "",
        first.file_size,
        first.image_shape,
        classes,
        {},
        mean=(0.0,) * first.image_shape[2],
        std=(0.0,) * first.image_shape[2],
        provenance={"source": os.path.basename(first.path), "images": first.images},
        external=first,
        external_splits={} if "" in sources else sources,
        external_arguments=dict(zip(ARGUMENTS, arguments, strict=True)),
    )
    return _identified(pack, sources, scale)


def _identified(pack: Pack, sources: dict[str, ExternalFile], scale: float | None) -> Pack:
    """Return the pack with its uuid and the splits of its `sources`. Raises UsageError."""
    layouts: dict[str, SplitLayout] = {}
    known, first = [], next(iter(sources.values()))
    for name, source in sources.items():
        if (source.image_shape, source.dtype) != (first.image_shape, first.dtype):
            raise UsageError(
                f"{source.path}: the images of {name} are {source.image_shape} {source.dtype},"
                f" those of train {first.image_shape} {first.dtype}"
            )
        drawn = split_labels(source)[1]
        layouts |= {split: SplitLayout(split, len(of), -1, -1) for split, of in drawn.items()}
        known.append(_describe_content(pack, source, scale))
    text = known[0] if len(known) == 1 else json.dumps(known)
    identity = str(uuid.uuid5(uuid.NAMESPACE_OID, text))
    return dataclasses.replace(pack, uuid=identity, splits=layouts)


def _class_names(path: str, labels: list[np.ndarray]) -> tuple[tuple[str, ...], tuple[int, ...]]:
    """Return the names of all classes, and the labels that are mapped to 0 ... K-1, () for none.

    Raises UsageError.
    """
    values = sorted(set().union(*(np.unique(some).tolist() for some in labels)))
    if missing := set(values) - set(np.unique(labels[0]).tolist()):
        raise UsageError(f"{path}: class {min(missing)} has no image in train")
    return tuple(map(str, values)), () if values == list(range(len(values))) else tuple(values)


def _divisor(source: ExternalFile, scale: float | None) -> float:
    """Return the divisor of the values of the images; 0 if they are used unchanged."""
    if scale is None:
        return UINT16_MAX if source.dtype == "uint16" else 0.0
    return 0.0 if scale == 1 and source.dtype != "uint16" else scale


@lru_cache(maxsize=len(SPLITS))
def split_labels(source: ExternalFile) -> tuple[np.ndarray, dict[str, np.ndarray]]:
    """Return the classes (N,) of all samples and the samples of every split.

    The result is cached for the next split that is opened.
    """
    from hpctrain.data import external_file

    labels = external_file.read_labels(source)
    return labels, draw(source, labels)


def _describe_content(pack: Pack, source: ExternalFile, scale: float | None) -> str:
    """Describe the file's content as JSON, independent of its path. Raises UsageError."""
    count = min(PROBED, source.rows)
    rows = np.unique(np.arange(count) * (source.rows - 1) // max(1, count - 1))
    images = np.empty((len(rows), *source.image_shape), source.image_dtype)
    try:
        probed = dataclasses.replace(pack, external=source, external_splits={})
        with Split(probed, WHOLE_FILE) as samples:
            samples.gather(rows, images)
    except RunError as error:
        raise UsageError(str(error)) from None
    finite = np.isfinite(images).reshape(len(rows), -1).all(axis=1)
    if not finite.all():
        row = rows[~finite][0]
        raise UsageError(f"{source.path}: row {row} of {source.images} {NOT_FINITE}")
    low, high = float(images.min()), float(images.max())
    if scale is None and images.dtype.kind == "f" and not 0 <= low <= high <= 1:
        divisor = next((f"{d:g}" for d in (255, UINT16_MAX) if high <= d), f"{high:g}")
        way = f"--max-value {divisor} divides them by {divisor}, " if low >= 0 else ""
        raise UsageError(
            f"{source.path}: the values of {source.images} go from {low:g} to {high:g}, not from 0"
            f" to 1: {way}--max-value 1 takes them as they are"
        )
    probe = zlib.crc32(images.reshape(-1).view(np.uint8).data)
    shape = [source.rows, *source.stored_shape]
    known: list[Any] = [source.dtype, shape, source.layout, source.images, source.labels]
    known += [source.labels_crc32, probe]
    if source.scale or source.label_values:  # files without either keep the uuid they always had
        known += [source.scale, source.label_values]
    return json.dumps(known)


def choose_block_rows(source: ExternalFile, classes: int, wanted: int | None) -> int:
    """Return the samples per block: whole chunks of about READ_BYTES, less in a small file."""
    unit = source.chunk_rows or 1
    if wanted == 0 and not source.chunk_rows:
        return 0
    if wanted and 0 < wanted <= source.rows and wanted % unit == 0:
        return wanted
    units, blocks = -(-source.rows // unit), max(MIN_BLOCKS, MIN_BLOCKS_OF_CLASS * classes)
    return unit * max(1, min(READ_BYTES // (unit * source.image_bytes), units // blocks))


def draw(source: ExternalFile, labels: np.ndarray) -> dict[str, np.ndarray]:
    """Draw the samples of every split, given the labels (N,).

    Raises UsageError if a split with a share gets no sample, or a class has no sample in train.
    """
    if source.split in SPLITS:  # given by the file
        samples = np.arange(source.rows)
        in_order = source.block_rows > 0
        return {source.split: samples if in_order else shuffled(samples, source.seed, source.split)}
    shares = split_shares(source.split)
    drawn = (_draw_blocks if source.block_rows else _draw_samples)(source, labels, shares)
    how = "class by class"
    if source.block_rows:
        what = "whole chunks" if source.chunk_rows else "blocks"
        how = f"in {what} of {source.block_rows:,} images"
    for name, share in zip(SPLITS, shares, strict=True):
        if share and not len(drawn[name]):
            raise UsageError(
                f"--split {source.split} leaves no image of {source.path} for {name}: there are"
                f" {source.rows:,} images, drawn {how}; give {name} a larger share,"
                " or train on all of them with --split 1"
            )
    missing = np.setdiff1d(labels, labels[drawn["train"]])
    if len(missing):
        raise UsageError(
            f"class {missing[0]} of {source.path} has {int((labels == missing[0]).sum()):,} images"
            f" and none of them in train, drawn {how}: give train a larger share, or another --seed"
        )
    return {name: rows for name, rows in drawn.items() if len(rows)}


def _draw_samples(
    source: ExternalFile, labels: np.ndarray, shares: Shares
) -> dict[str, np.ndarray]:
    """Divide each class by the shares; every split is in random order."""
    splits = assign(labels, shares, source.seed)
    return {
        name: shuffled(np.flatnonzero(splits == position), source.seed, name)
        for position, name in enumerate(SPLITS)
    }


def _draw_blocks(source: ExternalFile, labels: np.ndarray, shares: Shares) -> dict[str, np.ndarray]:
    """Divide whole blocks by the shares; every split is in file order.

    Blocks are sorted by the class of their middle sample, in random order within a class. The
    splits take blocks in turn, in proportion to their shares, so each split gets its share of every
    class even if the file is ordered by class.
    """
    firsts = np.arange(0, source.rows, source.block_rows)
    order = random_order(len(firsts), random_key(source.seed, "pack split"))
    middle = labels[np.minimum(firsts + source.block_rows // 2, source.rows - 1)]
    order = order[np.argsort(middle[order], kind="stable")]
    counts = cut(len(firsts), shares)
    turns = np.concatenate([(np.arange(count) + 0.5) / max(1, count) for count in counts])
    splits = np.repeat(np.arange(len(counts)), counts)[np.argsort(turns, kind="stable")]
    drawn = {}
    for position, name in enumerate(SPLITS):
        chosen = firsts[np.sort(order[splits == position])]
        rows = (chosen[:, None] + np.arange(source.block_rows)).ravel()
        drawn[name] = rows[rows < source.rows]  # the last block may be short
    return drawn


def labels_note(pack: Pack) -> str | None:
    """Return a note for the record if the labels of the file are mapped to others, or None."""
    source = pack.external
    if source is None or not source.label_values:
        return None
    last = len(pack.classes) - 1
    return (
        f"{source.labels} has {last + 1:,} classes, with the labels {listed(pack.classes, 5)}: they"
        f" are mapped to 0 ... {last}"
    )


def reading_note(pack: Pack, shuffle: str, window_blocks: int) -> str | None:
    """Return a note for the record if the file is read in an order that does not suit it, or None.

    Such orders are chunks read sample by sample, and windows of few blocks.
    """
    source = pack.external
    if source is None:
        return None
    if shuffle == "blocks":
        if window_blocks >= FEW_BLOCKS:
            return None
        return (
            f"a window of --shuffle blocks holds {window_blocks} blocks of {source.block_rows:,}"
            f" images: if {source.images} is ordered by class, batches are too; a larger"
            " --read-buffer helps"
        )
    if not source.chunk_rows:
        return None
    size = source.chunk_rows * source.image_bytes
    return (
        f"{source.images} is stored in chunks of {source.chunk_rows:,} images ({size:,} bytes):"
        f" --shuffle {shuffle} reads a whole chunk for nearly every image that is not kept in"
        " --read-buffer; --shuffle blocks reads each once an epoch"
    )
