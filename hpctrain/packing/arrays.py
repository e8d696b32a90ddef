"""``hp.write_pack``: arrays, or data sets of h5py, or images that come one by one, as a pack.

Images are read once, in slabs of about 8 MiB. What they hold is kept: a type that packs do not have
is widened without loss, or refused with what converts it.
"""

from __future__ import annotations

import json
import math
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import h5py
import numpy as np

from hpctrain.config.values import DIVISORS, LARGEST_DIVISOR, LEAST_DIVISOR
from hpctrain.data.external import FILL_VALUES, describe_attributes, describe_scale_attributes
from hpctrain.data.hdf5 import Unusable, locate_dataset
from hpctrain.data.outliers import outlier_of_pack
from hpctrain.data.pack import (
    LAYOUTS,
    MOST_CHANNELS,
    TYPES,
    WIDENED,
    WRITE_PHYSICAL,
    checksum,
    ordered,
    range_note,
    read_pack,
    scale_of,
)
from hpctrain.data.scale import can_hold, is_nodata, is_not_finite
from hpctrain.data.statistics import BeyondMaximum, ChannelStatistics
from hpctrain.data.targets import Targets
from hpctrain.errors import RunError, UsageError, first_line
from hpctrain.files import whole_file, write_at
from hpctrain.packing.array_targets import check_targets
from hpctrain.packing.write import PackWriter, writing_file
from hpctrain.text import counted, listed, say

SLAB_BYTES = 8 << 20  # of images that are written at a time
NARROWER = {  # what makes packable images of others, and what it needs
    "uint": ".astype('uint16') of values up to 65,535, else .astype('float32')",
    "int": ".astype('int16') of values from -32,768 to 32,767, else .astype('float32')",
    "float": ".astype('float32'), which keeps 24 bits of each value",
}


class SplitImages(NamedTuple):
    """The images of a split, before they are read."""

    name: str  # in messages
    dtype: np.dtype  # as they come
    shape: tuple[int, int, int]  # (H, W, C)
    slabs: Callable[[], Iterator[np.ndarray]]  # (n, H, W, C) each, as they come; called once
    scale_attributes: str = ""  # of a dataset, as `describe_scale_attributes` returns them


class Values(NamedTuple):
    """What the stored values of a pack mean."""

    dtype: np.dtype  # of the pack
    max_value: float | None  # becomes 1.0
    nodata: float | None


class Written:
    """What is known of the samples of a pack while they are written."""

    def __init__(
        self, targets: Targets, stored: np.ndarray, channels: int, nodata: float | None
    ) -> None:
        """Begin with the targets (N, ...) of all samples, as they are `stored`."""
        self.targets = targets
        self.stored = stored
        self.crc32 = np.zeros(len(stored), np.uint32)
        self.statistics = ChannelStatistics(channels, nodata)  # of train
        self.row = 0  # of the next sample
        self.beyond = BeyondMaximum()


def write_pack(
    path: str | os.PathLike[str],
    splits: Mapping[str, tuple[Any, Any]],
    classes: Sequence[str] | None = None,
    provenance: Mapping[str, Any] | None = None,
    overwrite: bool = False,
    *,
    columns: Sequence[str] | None = None,
    layout: str | None = None,
    max_value: float | None = None,
    nodata: float | None = None,
) -> None:
    """Write arrays of images and labels as a pack, in the order given.

    splits: by name, (images, labels). One split is named train; validation and test are those that
        training knows, others can be evaluated by name.
    images: (N, H, W, C) or (N, H, W), of one shape and type in all splits: an array, a memory map
        or a dataset of h5py, which is read about 8 MiB at a time; or an iterable of images (or of
        arrays of several), with as many images as labels. Packs keep uint8, uint16, int16 and
        float32; bool, int8 and float16 are kept as wider types.
    labels: (N,) integers 0 ... K-1 or truth values, the indices of `classes`: one class an image;
        or (N, K) of 0 and 1, for each class whether an image has it, and NaN or 255 where that is
        unknown; or with `columns`, (N, T) numbers, NaN where unknown (or (N,) of one column), which
        are kept as float32.
    classes: K different names.
    columns: T different names, in place of classes.
    provenance: what the images are, a dictionary that can be written as JSON.
    layout: the axes of arrays of images, NHWC, NCHW, NHW, or of MATLAB NCWH or NWH; images of more
        than 4 channels need it.
    max_value: the stored value that becomes 1.0; None = 255 for uint8, 65,535 for uint16, and 1.
    nodata: the stored value, or NaN, that marks missing data: it is left out of mean, standard
        deviation and range.

    The pack gets its name when it is complete; with `overwrite`, it replaces an existing file.
    Lines on standard error say what was widened or rounded, how many values are beyond `max_value`,
    whether the largest value is far below what becomes 1.0, and how many labels are unknown. Call
    this function in one process only.
    Raises UsageError if the arrays do not fit together, images hold NaN, infinity or nothing but
    `nodata`, labels are infinite or, of a class or column, unknown in all of train, or the file
    exists or cannot be written; RunError if the disk is full.
    """
    output = Path(path)
    provenance = dict(provenance or {})
    if output.exists() and not overwrite:
        raise UsageError(f"{output} exists: give another path, or replace it with overwrite=True")
    if "train" not in splits:
        raise UsageError(f"the splits are {[*splits]}: one must be named train")
    if layout is not None and layout not in LAYOUTS:
        raise UsageError(f"layout {layout!r} is not one of {', '.join(LAYOUTS)}")
    try:
        json.dumps(provenance, allow_nan=False)
    except (TypeError, ValueError) as error:
        raise UsageError(f"the provenance cannot be written as JSON: {error}") from None
    labels_of: dict[str, Any] = {}
    images_of: dict[str, SplitImages] = {}
    samples: dict[str, int | None] = {}
    for name in ordered(splits):
        images, labels_of[name] = splits[name]
        _check_name(name)
        images_of[name] = _open_images(name, images, layout, nodata)
        samples[name] = len(images) if hasattr(images, "shape") else None
    _check_written(labels_of)
    targets, rows_of, notes = check_targets(labels_of, samples, classes, columns)
    notes += _check_attributes(labels_of, targets, rows_of)
    _check_alike(images_of)
    train = images_of["train"]
    values = _choose_values(train, max_value, nodata)
    for text in notes:
        _note(f"{output}: {text}")
    counts = {name: len(rows) for name, rows in rows_of.items()}
    stored = np.concatenate([*rows_of.values()])
    written = Written(targets, stored, train.shape[2], values.nodata)
    with writing_file(output), whole_file(output) as file:
        writer = PackWriter(file, counts, stored, train.shape, values.dtype)
        for name, count in counts.items():
            _write_split(file, images_of[name], count, writer, written, values)
        writer.finish(
            crc32=written.crc32,
            statistics=written.statistics,
            targets=targets,
            provenance=provenance,
            max_value=values.max_value,
        )
    _say_range(output, written, values)
    outlier = outlier_of_pack(read_pack(output))
    if outlier is not None:
        _note(f"{output}: {outlier.note('nodata=')}")


def _check_written(labels_of: Mapping[str, Any]) -> None:
    """Raise UsageError for datasets of which HDF5 would read what was never written, as zeros."""
    for split, labels in labels_of.items():
        if isinstance(labels, h5py.Dataset) and os.path.isfile(labels.file.filename):
            try:
                locate_dataset(labels, {})
            except Unusable as error:
                raise UsageError(f"labels of {split}: {error}") from None


def _check_attributes(
    labels_of: Mapping[str, Any], targets: Targets, rows_of: Mapping[str, np.ndarray]
) -> list[str]:
    """Return notes on attributes of netCDF that datasets of labels have, and are not applied.

    Raises UsageError if labels are one of the values that their attributes call missing, and known
    as `rows_of` are stored.
    """
    notes = list[str]()
    for split, labels in labels_of.items():
        if not isinstance(labels, h5py.Dataset):
            continue
        scale = describe_scale_attributes(labels)
        if scale:
            notes.append(f"labels of {split}: {scale} of {labels.name} is not applied")
        known = ~targets.is_unknown(rows_of[split])
        for name in FILL_VALUES:
            fills = np.asarray(labels.attrs.get(name, ())).reshape(-1)
            is_missing = np.isin(labels[...].reshape(known.shape), fills) & known
            if is_missing.any():
                raise UsageError(
                    f"labels of {split}: {labels.name} holds {listed(fills.tolist())}, its {name},"
                    f" {counted(int(is_missing.sum()), 'time')}, first in row"
                    f" {np.argwhere(is_missing)[0][0]:,}: leave these images out, or where several"
                    " labels of an image may be unknown, write NaN"
                )
    return notes


def _write_split(
    file: BinaryIO,
    images: SplitImages,
    count: int,
    writer: PackWriter,
    written: Written,
    values: Values,
) -> None:
    """Write the `count` images of a split. Raises UsageError for values that cannot be kept."""
    end = written.row + count
    size = math.prod(images.shape) * values.dtype.itemsize
    first = written.row
    for stored in images.slabs():
        stop = written.row + len(stored)
        if stop > end:
            raise UsageError(f"{images.name} are more than its {count:,} labels")
        slab = np.ascontiguousarray(stored, values.dtype.newbyteorder("<"))
        _check_slab(slab, images.name, written.row - first, values)
        written.beyond.add(slab, values.max_value, values.nodata)
        data = slab.data.cast("B")
        write_at(file.fileno(), data, int(writer.places[written.row]))
        seeds = written.targets.seeds(written.stored[written.row : stop])
        for at, seed in zip(range(0, len(data), size), seeds, strict=True):
            written.crc32[written.row] = checksum(data[at : at + size], seed)
            written.row += 1
        if first == 0:  # train comes first
            written.statistics.add(slab)
    if written.row < end:
        raise UsageError(
            f"{images.name} ended after {written.row - first:,}, and there are {count:,} labels"
        )


def _check_slab(slab: np.ndarray, name: str, first: int, values: Values) -> None:
    """Raise UsageError for images (n, H, W, C) with NaN or infinity, or of nothing but nodata.

    `first` is the row of the first one in its split.
    """
    if values.nodata is not None:
        is_empty = is_nodata(slab, values.nodata).all(axis=(1, 2, 3))
        if is_empty.any():
            row = first + int(is_empty.argmax())
            raise UsageError(
                f"{name}[{row}] holds nothing but nodata, {values.nodata:g}: leave it out"
            )
    if slab.dtype.kind == "f":
        wrong = is_not_finite(slab, values.nodata)
        in_image = wrong.sum(axis=(1, 2, 3))
        if in_image.any():
            number = int(in_image.argmax())
            advice = "write finite ones"
            if np.isnan(slab[wrong]).all():
                advice = "if NaN marks missing data, nodata=float('nan') leaves it out"
            raise UsageError(
                f"{name}[{first + number}] holds {int(in_image[number]):,} values that are NaN or"
                f" infinite: {advice}"
            )


def _say_range(output: Path, written: Written, values: Values) -> None:
    """Print lines on values beyond max_value, and on a range that is not that of [0, 1]."""
    statistics = written.statistics
    if values.max_value is not None:
        beyond = written.beyond.note(f"max_value={values.max_value:g}")
        if beyond:
            _note(f"{output}: {beyond}")
        return
    scale = scale_of(values.dtype.name, None, statistics)
    unused = range_note(statistics, scale, "max_value=")
    if unused:
        _note(f"{output}: {unused}")
    elif not scale.is_full:
        _note(
            f"{output}: values from {scale.low:g} to {scale.high:g} are kept as they are: training"
            " needs --max-value, or --normalize pack"
        )


def _choose_values(train: SplitImages, max_value: float | None, nodata: float | None) -> Values:
    """Return what the stored values mean. Raises UsageError."""
    name = train.dtype.name
    wider = WIDENED.get(name, name)
    if wider != name:
        text = f"images are {name}, which packs do not have: kept as {wider}, without loss"
        if name == "bool" and max_value is None:
            max_value = 1.0
            text += ", with max_value=1"
        _note(text)
    if max_value is not None:
        max_value = float(max_value)
        if not LEAST_DIVISOR <= max_value <= LARGEST_DIVISOR:
            raise UsageError(f"max_value={max_value:g}: give a number in {DIVISORS}")
    dtype = np.dtype(wider)
    if nodata is not None:
        nodata = float(nodata)
        if not can_hold(dtype, nodata):
            raise UsageError(f"nodata={nodata:g} is no value of {dtype}")
    return Values(dtype, max_value, nodata)


def _check_alike(images_of: Mapping[str, SplitImages]) -> None:
    """Raise UsageError if the images of a split differ in shape or type from those of others."""
    shapes = {name: images.shape for name, images in images_of.items()}
    if len({*shapes.values()}) > 1:
        raise UsageError(f"the splits differ in image shape: {shapes}")
    types = {name: images.dtype.name for name, images in images_of.items()}
    if len({*types.values()}) > 1:
        raise UsageError(f"the splits differ in type: {types}: give all the same")
    attributes = {name: images.scale_attributes or "none" for name, images in images_of.items()}
    if len({*attributes.values()}) > 1:
        raise UsageError(
            f"the splits differ in scale_factor or add_offset: {attributes}: {WRITE_PHYSICAL}"
        )


def _check_name(split: str) -> None:
    if not split or "/" in split or split in (".", "identity"):
        raise UsageError(f"a split cannot have the name {split!r}")


def _refuse_masked(what: str, values: Any) -> None:
    if isinstance(values, np.ma.MaskedArray):
        advice = "fill it, as in .filled(0)"
        if what.startswith("images"):
            advice += ", and say by nodata=0 that this value marks missing data"
        raise UsageError(f"{what} are a masked array: {advice}")


def _open_images(split: str, images: Any, layout: str | None, nodata: float | None) -> SplitImages:
    """Return the images of a split. Raises UsageError if they cannot be packed."""
    name = f"images of {split}"
    _refuse_masked(name, images)
    if hasattr(images, "shape"):
        return _open_array(name, images, layout, nodata)
    if not isinstance(images, Iterable) or isinstance(images, str | bytes | Mapping):
        raise UsageError(f"{name} are {type(images).__name__}: expected an array, or an iterable")
    return _open_iterable(name, images, layout)


def _open_array(name: str, images: Any, layout: str | None, nodata: float | None) -> SplitImages:
    """Return the images of an array (N, ...), or of what is sliced like one."""
    shape = tuple(images.shape or ())  # that of an empty dataset is None
    what = f"{name} are {images.dtype} of shape {shape}"
    dtype = _check_type(what, images.dtype)
    layout = _check_layout(what, shape, layout)
    attributes = ""
    if isinstance(images, h5py.Dataset) and os.path.isfile(images.file.filename):
        try:
            locate_dataset(images, {})  # HDF5 reads what was never written as zeros
        except Unusable as error:
            raise UsageError(f"{name}: {error}") from None
        for text in describe_attributes(images, nodata, "nodata="):
            _note(f"{name}: {text}")
        attributes = describe_scale_attributes(images)
    step = max(1, SLAB_BYTES // (math.prod(shape[1:]) * dtype.itemsize))
    source = getattr(images, "filename", None)  # of a memory map
    if isinstance(images, h5py.Dataset):
        source = f"{images.file.filename}: {images.name}"
    if source:
        name += f", {source}"

    def slabs() -> Iterator[np.ndarray]:
        for start in range(0, len(images), step):
            yield _as_nhwc(np.asarray(images[start : start + step]), layout)

    return SplitImages(
        name=name,
        dtype=dtype,
        shape=_as_nhwc(np.empty((0, *shape[1:])), layout).shape[1:],
        slabs=slabs,
        scale_attributes=attributes,
    )


def _open_iterable(name: str, images: Iterable[Any], layout: str | None) -> SplitImages:
    """Return the images of an iterable, of which the first item is read."""
    items = _read_items(iter(images), name)
    first = next(items, None)
    if first is None:
        raise UsageError(f"{name} are none")
    if not hasattr(first, "shape"):
        raise UsageError(
            f"{name} are a {type(images).__name__} of {type(first).__name__}: give an array, or an"
            " iterable of arrays, as numpy.asarray makes them"
        )
    what = f"{name} begin with {first.dtype} of shape {tuple(first.shape)}"
    dtype = _check_type(what, first.dtype)
    dims = len(layout or "NHWC")
    shape = _as_slab(first, dims).shape
    chosen = _check_layout(what, shape, layout)

    def slabs() -> Iterator[np.ndarray]:
        waiting: list[np.ndarray] = []
        number = 0
        for item in chain([first], items):
            _refuse_masked(f"{name}[{number}]", item)
            slab = _as_slab(item, dims)
            if slab.dtype.name != dtype.name or slab.shape[1:] != shape[1:]:
                raise UsageError(
                    f"{name}[{number}] is {slab.dtype} of shape {slab.shape[1:]}, and the first is"
                    f" {dtype} of shape {shape[1:]}"
                )
            waiting.append(slab)
            number += len(slab)
            if len(waiting) * slab.nbytes >= SLAB_BYTES:
                yield _as_nhwc(np.concatenate(waiting), chosen)
                waiting = []
        if waiting:
            yield _as_nhwc(np.concatenate(waiting), chosen)

    image = np.empty((0, *shape[1:]))
    return SplitImages(name, dtype, _as_nhwc(image, chosen).shape[1:], slabs)


def _as_slab(item: Any, dims: int) -> np.ndarray:
    """Return an image, or an array of several that has `dims` dimensions, as images (n, ...)."""
    slab = np.asarray(item)
    if slab.ndim < dims:
        return slab[None]
    return slab


def _read_items(items: Iterator[Any], name: str) -> Iterator[Any]:
    """Yield the items; a system error in the caller's code is not one of writing the pack."""
    while True:
        try:
            item = next(items)
        except StopIteration:
            return
        except OSError as error:
            raise RunError(f"{name} cannot be read: {first_line(error)}") from error
        yield item


def _check_type(what: str, dtype: Any) -> np.dtype:
    """Return the type of images. Raises UsageError if packs cannot hold them."""
    kept = f"expected {', '.join((*TYPES, *WIDENED))}"
    if str(dtype).startswith("torch."):
        raise UsageError(f"{what}: {kept}; of a tensor, images.numpy()")
    try:
        dtype = np.dtype(dtype)
    except TypeError:  # of another library
        raise UsageError(f"{what}: {kept}; give arrays, as numpy.asarray makes them") from None
    if dtype.name in (*TYPES, *WIDENED):
        return dtype
    advice = NARROWER.get(dtype.name.rstrip("0123456789"), "")
    if advice:
        advice = f"; images{advice}"
    raise UsageError(f"{what}: {kept}{advice}")


def _check_layout(what: str, shape: tuple[int, ...], layout: str | None) -> str:
    """Return the layout of images of this shape, (N, ...). Raises UsageError if it is not clear."""
    if len(shape) not in (3, 4) or 0 in shape:
        raise UsageError(f"{what}: expected (N, H, W, C) or (N, H, W), none of them 0")
    if layout is None and len(shape) == 4 and shape[3] > MOST_CHANNELS:
        raise UsageError(f"{what}: say layout='NHWC' (the last axis are channels), or 'NCHW'")
    chosen = layout or {3: "NHW", 4: "NHWC"}[len(shape)]
    if len(chosen) != len(shape):
        raise UsageError(f"{what}, which is not {chosen}")
    return chosen


def _as_nhwc(images: np.ndarray, layout: str) -> np.ndarray:
    """Return a view (n, H, W, C) of images of this layout."""
    images = images.transpose(LAYOUTS[layout])
    return images.reshape((*images.shape, 1)[:4]) if images.ndim == 3 else images


def _note(text: str) -> None:
    """Print a line on standard error."""
    say(text, sys.stderr)
