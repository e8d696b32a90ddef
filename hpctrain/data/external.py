"""Train on HDF5 files that are not packs, which are read in place: on one, or many as one set.

Their splits are drawn from a seed as lists of rows. If samples can be read one by one, each class
is divided by the shares and every split is shuffled. If they should be read in long blocks (chunks,
or --shuffle blocks), whole blocks are drawn, and a split has its blocks in random order. Rank 0
does all of this and sends the rows and labels of all splits with the ``Pack``: for less than 256
classes and 2^32 images, 5 bytes of each.

Many files may be read as one set (``external_files.py``). A block then lies within one file, and
--group file draws whole files.
"""

from __future__ import annotations

import json
import os
import re
import unicodedata
import uuid
import zlib
from collections.abc import Mapping
from dataclasses import replace
from itertools import chain
from types import MappingProxyType
from typing import Any, NamedTuple

import h5py
import numpy as np

from hpctrain.config import Shares
from hpctrain.data.external_targets import (
    FILL_VALUES,
    SCALE_ATTRIBUTES,
    FileTargets,
    check_known,
    dataset_names,
    read_file_targets,
)
from hpctrain.data.file_set import FileSet
from hpctrain.data.hdf5 import Unusable, find_dataset, locate_dataset, open_hdf5
from hpctrain.data.orders import block_starts, shuffled
from hpctrain.data.outliers import Outlier, find_outlier
from hpctrain.data.pack import (
    ALIASES,
    DEFAULT_SPLIT,
    LAYOUTS,
    MOST_CHANNELS,
    ONE_SAMPLE,
    SPLITS,
    WRITE_PHYSICAL,
    ExternalOptions,
    Pack,
    SplitInfo,
)
from hpctrain.data.partition import READ_BYTES
from hpctrain.data.scale import (
    FLOATS,
    STORED,
    Scale,
    can_hold,
    channel_ranges,
    is_nodata,
    read_type,
    usual_divisor,
)
from hpctrain.data.split import Split, find_unusable, probe_checksum, probe_rows
from hpctrain.data.stored import Stored, as_bytes
from hpctrain.data.strata import (
    ByClass,
    Strata,
    assign,
    assign_groups,
    check_splits,
    divide_by_shares,
    strata_of,
)
from hpctrain.data.target_rows import ExternalTargets, TargetColumns, mark_unknown
from hpctrain.data.targets import HELD_BYTES, Targets
from hpctrain.errors import RunError, UsageError
from hpctrain.text import brief, counted, listed, printable

MATLAB = b"MATLAB 7.3 MAT-file"  # first bytes of files of version 7.3; HDF5 follows
USUAL = {3: "NHW", 4: "NHWC"}  # layouts by the number of dimensions
USUAL_OF_MATLAB = {3: "NWH", 4: "NCWH"}
# Least number of blocks of a file, and per class: with fewer, shares and classes would be uneven.
MIN_BLOCKS = 1000
MIN_BLOCKS_OF_CLASS = 20
# Classes that are likely values: so many different numbers, each of so few images.
MANY_CLASSES = 100
FEW_IMAGES = 10
LEARN_VALUES = "--task regress learns values"


class ExternalContent(NamedTuple):
    """The content of an external file, by split; the first is train."""

    infos: dict[str, SplitInfo]
    labels: dict[str, np.ndarray]  # (N,), as stored; empty if they are not read; of several
    # classes, or values, (N, K) as a pack stores them
    layout: str
    scale_attributes: str  # as `describe_scale_attributes` returns them
    sizes: dict[str, int]  # bytes of all files that hold the data, by path
    notes: list[str]
    columns: tuple[str, ...] = ()  # names of several classes, or of columns of values
    parts: Mapping[str, tuple[TargetColumns, ...]] = MappingProxyType({})  # where, by split


class DrawnBy(NamedTuple):
    """What of the targets of a split its samples are drawn by, and what becomes of them."""

    strata: Strata
    targets: np.ndarray  # (N, ...) as they are held
    stored: ExternalTargets | None  # where they are read, if they are not held


def read_external(path: str | os.PathLike[str], options: ExternalOptions) -> Pack:
    """Check, split and identify an external file and return it as a `Pack`. Raises UsageError."""
    path = os.path.abspath(path)
    if options.group:
        raise UsageError(f"--group {options.group}: {path} is one file, no pattern of several")
    with open_hdf5(path) as file:
        content = read_content(file, options)
    return make_pack(path, content, options)


def make_pack(path: str, content: ExternalContent, options: ExternalOptions) -> Pack:
    """Split and identify the content of an external file, or of a set of files. Raises UsageError.

    Labels are mapped to 0 ... K-1 in ascending order, strings sorted; they name the classes.
    """
    train = next(iter(content.infos))  # its name, which is "" without given splits
    values = np.empty(0, np.int64)
    if options.kind == "class":
        values = np.unique(content.labels[train])
        targets = name_classes(values)
        most = max(MANY_CLASSES, len(content.labels[train]) // FEW_IMAGES)
        if values.dtype.kind == "i" and len(values) > most:
            content.notes.append(
                f"its {len(values):,} different labels are taken for classes: {LEARN_VALUES}"
            )
    else:
        targets = Targets(options.kind, content.columns)
        content.notes.extend(check_known(path, targets, content.labels[train]))
    check_alike(path, content, train, values)
    pack = describe_file(
        path,
        content=content,
        train=train,
        targets=targets,
        options=options,
    )
    probes = {split: _probe_images(pack, info) for split, info in content.infos.items()}
    scales = {split: probe.scale for split, probe in probes.items()}
    splits: dict[str, SplitInfo] = {}
    divided_by = pack.scale.divisor if pack.scale.is_divided else 0.0
    identity = [content.layout, divided_by, options.labels]  # describes the content, not the path
    if options.nodata is not None:
        identity.append(str(options.nodata))
    if options.kind != "class":
        identity += [options.kind, content.columns]
    outliers = [probe.outlier for probe in probes.values() if probe.outlier is not None]
    if outliers and not any("--nodata=" in note for note in content.notes):
        content.notes.append(outliers[0].note("--nodata="))
    for split, info in content.infos.items():
        if scales[split].is_unlike(scales[train]):
            content.notes.append(f"{split} has {scales[split]}, and train {scales[train]}")
        elif unlike := scales[split].unlike_channels(scales[train]):
            content.notes.append(f"{split} has {listed(unlike, separator='; ')} as in train")
        labels = content.labels[split]
        identity += [
            pack.dtype.name,
            info.images.shape,
            info.images.dataset,
            zlib.crc32(as_bytes(labels)),
            probes[split].crc32,
        ]
        if info.files is not None:
            identity.append(info.files.identity())
            if pack.block_rows:  # splits, too, follow from chunks
                bounds = info.files.block_bounds(pack.block_rows)
                identity.append(zlib.crc32(as_bytes(bounds)))
        drawn_by = choose_strata(pack, content, split, values)
        for name, rows in draw_splits(pack, split, drawn_by.strata, options).items():
            splits[name] = info._replace(
                samples=len(rows),
                targets=drawn_by.stored or drawn_by.targets[rows],
                rows=rows.astype(np.min_scalar_type(info.samples)),
                probe=probes[split].crc32,
            )
    return replace(
        pack,
        uuid=str(uuid.uuid5(uuid.NAMESPACE_OID, json.dumps(identity))),
        splits=splits,
        scale=scales[train],
    )


def name_classes(values: np.ndarray) -> Targets:
    """Return the targets of images that have one class each, whose labels are `values` (K,)."""
    return Targets(
        "class", tuple(printable(str(value), newlines=False) for value in values.tolist())
    )


def choose_strata(pack: Pack, content: ExternalContent, split: str, values: np.ndarray) -> DrawnBy:
    """Return what the samples of a split are drawn by; `values` (K,) are the labels of classes."""
    targets = content.labels[split]
    kind = pack.targets.kind
    if kind == "class":
        targets = np.searchsorted(values, targets).astype(np.min_scalar_type(len(values)))
    strata = strata_of(pack.targets, targets)
    if targets[:1].nbytes <= HELD_BYTES:
        return DrawnBy(strata, targets, None)
    probe = np.ascontiguousarray(targets[probe_rows(len(targets))])
    stored = ExternalTargets(kind, content.parts[split], zlib.crc32(as_bytes(probe)))
    return DrawnBy(strata, targets, stored)


def check_alike(path: str, content: ExternalContent, train: str, values: np.ndarray) -> None:
    """Raise UsageError for a split with other images than train, or other labels than `values`."""
    images = content.infos[train].images
    train_kind = images.shape[1:], np.dtype(images.dtype).name
    for split, info in content.infos.items():
        kind = info.images.shape[1:], np.dtype(info.images.dtype).name
        if kind != train_kind:
            raise UsageError(f"{path}: images of {split} are {kind}, those of train {train_kind}")
        if content.columns:
            continue
        others = np.setdiff1d(content.labels[split], values)
        if len(others):
            raise UsageError(f"{path}: class {others[0]} has no image in train")


def describe_file(
    path: str,
    content: ExternalContent,
    train: str,
    targets: Targets,
    options: ExternalOptions,
) -> Pack:
    """Return what is known of a file before its splits are drawn, with train alone."""
    images = content.infos[train].images
    sides = [images.shape[axis] for axis in LAYOUTS[content.layout][1:]]
    height, width, channels = [*sides, 1][:3]
    block_rows = choose_block_rows(
        images,
        classes=len(targets.names),
        wanted=options.block_rows,
        files=content.infos[train].files,
    )
    layout = options.layout if options.layout in ONE_SAMPLE else content.layout
    stored_type = np.dtype(images.dtype)
    if options.nodata is not None and not can_hold(stored_type, options.nodata):
        raise UsageError(
            f"--nodata {options.nodata:g}: {path} holds {stored_type.name}, which has no such value"
        )
    provenance: dict[str, Any] = {
        "source": os.path.basename(path),
        "images": images.dataset,
        "notes": content.notes,
    }
    if content.scale_attributes:
        provenance["scale_attributes"] = content.scale_attributes
    return Pack(
        path=path,
        uuid="",
        image_shape=(height, width, channels),
        targets=targets,
        splits={"train": content.infos[train]},
        sizes=content.sizes,
        provenance=provenance,
        layout=content.layout,
        max_value=options.max_value,
        scale=Scale(
            dtype=read_type(images.dtype).name,
            divisor=options.max_value or usual_divisor(images.dtype),
            nodata=options.nodata,
        ),
        block_rows=block_rows,
        external=options._replace(layout=layout, block_rows=block_rows).as_json(),
    )


def read_content(file: h5py.File, options: ExternalOptions) -> ExternalContent:
    """Locate the images of all splits, and read the labels. Raises Unusable."""
    content = ExternalContent(
        infos={},
        labels={},
        layout=options.layout or "",
        scale_attributes="",
        sizes={},
        notes=[],
    )
    for split, name in find_splits(file, options).items():
        images = find_dataset(file, options.images.replace("{split}", name))
        attributes = describe_scale_attributes(images)
        if content.infos and attributes != content.scale_attributes:
            raise Unusable(
                f"the images {images.name} are stored with {attributes or 'no scale_factor'}, those"
                f" of train with {content.scale_attributes or 'no scale_factor'}: {WRITE_PHYSICAL}"
            )
        content = content._replace(
            layout=choose_layout(images, content.layout), scale_attributes=attributes
        )
        stored = locate_dataset(images, content.sizes)
        content.labels[split] = np.empty(0, np.int64)
        if options.kind != "class":
            names = dataset_names(options.labels, name)
            read = read_file_targets(file, names, len(images), options.kind, content.sizes)
            content = add_targets(content, split, read)
        elif options.labels:
            labels = find_dataset(file, options.labels.replace("{split}", name))
            refuse_other_axis(images, labels)
            content.labels[split] = number_names(
                read_all_labels(labels, len(images)), f"the labels {labels.name}"
            )
        content.infos[split] = SplitInfo(
            path=os.path.abspath(os.fsdecode(images.file.filename)),
            samples=len(images),
            images=stored,
            targets=content.labels[split],
        )
        content.notes.extend(describe_attributes(images, options.nodata))
    return content


def add_targets(content: ExternalContent, split: str, read: FileTargets) -> ExternalContent:
    """Return the content with the targets of a split. Raises Unusable if train has others."""
    names = tuple(printable(name, newlines=False) for name in read.names)
    if content.columns and len(content.columns) != len(names):
        raise Unusable(
            f"the targets of {split} are of {len(names)} columns, and those of train of"
            f" {len(content.columns)}"
        )
    content.labels[split] = read.targets
    content.notes.extend(read.notes)
    parts = {**content.parts, split: read.parts}
    return content._replace(columns=content.columns or names, parts=parts)


def describe_scale_attributes(images: h5py.Dataset) -> str:
    """Return the attributes of netCDF by which stored values become physical ones, or ""."""
    parts = []
    for name in SCALE_ATTRIBUTES:
        values = np.asarray(images.attrs.get(name, ())).reshape(-1)
        parts += [f"{name} {value}" for value in values.tolist()]
    return ", ".join(parts)


def describe_attributes(
    images: h5py.Dataset, nodata: float | None, option: str = "--nodata="
) -> list[str]:
    """Return notes on attributes of netCDF that are not applied; `option` applies fill values."""
    notes = []
    unused = [attribute for attribute in SCALE_ATTRIBUTES if attribute in images.attrs]
    if unused:
        verb = "is" if len(unused) == 1 else "are"
        notes.append(f"{listed(unused)} of {images.name} {verb} not applied")
    for attribute in FILL_VALUES:
        values = np.asarray(images.attrs.get(attribute, ())).reshape(-1)
        for value in values.tolist():
            if not isinstance(value, int | float):
                notes.append(f"{attribute} of {images.name} is no number, and not applied")
            elif nodata is None or not is_nodata(values, nodata).all():
                notes.append(f"{attribute} of {images.name} is not applied: {option}{value!r}")
    return notes


def find_splits(file: h5py.File, options: ExternalOptions) -> dict[str, str]:
    """Return what stands for "{split}" in the file, by split; {"": ""} without it.

    Raises Unusable if there are no images of train.
    """
    before, mark, after = options.images.partition("{split}")
    if not mark:
        return {"": ""}
    if options.split:
        raise Unusable(
            f"--split {options.split} draws splits, but --images {options.images} has its own"
        )
    name_of: dict[str, str] = {}
    for split, aliases in ALIASES.items():
        names = [alias for alias in aliases if before + alias + after.partition("/")[0] in file]
        if len(names) > 1:
            raise Unusable(f"{' and '.join(names)} are both {split}: rename one")
        if names:
            name_of[split] = names[0]
    if "train" not in name_of:
        raise Unusable(
            f"--images {options.images}: none of train; {{split}} stands for"
            f" {', '.join(chain(*ALIASES.values()))}"
        )
    return name_of


def choose_layout(data: h5py.Dataset, layout: str) -> str:
    """Return the layout of the images, by default the usual one of so many dimensions.

    That of a sample gets an axis N. Raises Unusable if it does not fit or may be another, or for
    images of another type.
    """
    name = f"the images {data.name}"
    shape = data.shape or ()
    check_type(data)
    if layout in ONE_SAMPLE:
        if len(shape) != len(layout):
            raise Unusable(describe_other_axes(name, shape, layout))
        if 0 in shape:
            raise Unusable(f"{name} have shape {shape}: they hold nothing")
        return f"N{layout}"
    with open(data.file.filename, "rb") as file:
        is_matlab = file.read(len(MATLAB)) == MATLAB
    usual = USUAL_OF_MATLAB if is_matlab else USUAL
    chosen = layout or usual.get(len(shape), "NHWC")
    if len(shape) not in (3, 4):
        way = ""
        if len(shape) == 2:
            way = "say --layout HW if a file is one image, or "
        raise Unusable(
            f"{name} have shape {shape}: {way}write them anew,"
            f" {reshaped(data, '.reshape(N, H, W)')}, or (N, H, W, C)"
        )
    if 0 in shape:
        raise Unusable(f"{name} have shape {shape}: they hold nothing")
    if len(shape) != len(LAYOUTS[chosen]):
        raise Unusable(describe_other_axes(name, shape, chosen))
    if not layout and len(shape) == 4 and shape[LAYOUTS[chosen][3]] > MOST_CHANNELS:
        raise Unusable(f"{name} have shape {shape}: say --layout NHWC, NCHW or (of MATLAB) NCWH")
    return chosen


def describe_other_axes(name: str, shape: tuple[int, ...], layout: str) -> str:
    """Return why images of this shape have not the axes of a layout, and which have so many."""
    fitting = [other for other in (*LAYOUTS, *ONE_SAMPLE) if len(other) == len(shape)]
    advice = f": layouts of {len(shape)} axes are {listed(fitting)}" if fitting else ""
    return f"{name} have shape {shape}, which is not {layout}{advice}"


def check_type(data: h5py.Dataset) -> None:
    """Raise Unusable for images of a type that is not read, with what to do instead."""
    dtype = data.dtype
    stored = data.id.get_type()
    what = (
        f"the images {data.name} are {dtype} of {stored.get_size()} bytes, not one of"
        f" {', '.join(STORED)}"
    )
    if h5py.check_enum_dtype(dtype):
        raise Unusable(f"{what}, but an enumeration: write its values anew as {dtype.name}")
    if dtype.name in STORED:
        if not is_plain(dtype, stored):
            raise Unusable(f"{what} as NumPy has them: write them anew as float32 or integers")
        return
    if dtype.kind != "f":
        raise Unusable(f"{what}: write pixels, as uint8 (N, H, W, C); hp.write_pack does so")
    raise Unusable(f"{what}: write them anew, {reshaped(data, f'.astype({FLOATS[-1]!r})')}")


def is_plain(dtype: np.dtype, stored: h5py.h5t.TypeID) -> bool:
    """Whether HDF5 stores values as NumPy does: h5py calls bfloat16 float32, and 12 bits int16."""
    if dtype.kind == "b":  # an enumeration
        return bool(stored.get_size() == dtype.itemsize)
    if stored.get_class() == h5py.h5t.BITFIELD:
        return bool(stored.get_precision() == 8 * dtype.itemsize)
    return bool(stored.equal(h5py.h5t.py_create(dtype)))


def reshaped(data: h5py.Dataset, how: str) -> str:
    """Return what writes a changed copy of a dataset in Python."""
    return f"file['new'] = file['{data.name}'][:]{how}"


def read_all_labels(
    data: h5py.Dataset, samples: int, sizes: dict[str, int] | None = None
) -> np.ndarray:
    """Read all labels, (N,) int64, or strings as they are. Raises Unusable.

    The sizes of all files that hold them are added to `sizes`.
    """
    locate_dataset(data, {} if sizes is None else sizes)
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
    if values.size == samples:
        refuse_missing(data, values.reshape(-1))
    if samples == 1 and values.ndim == 1:
        values = values[np.newaxis]
    if values.ndim == 2 and len(values) == samples and values.shape[1] > 1:
        hot = ((values == 1).sum(axis=1) == 1) & ((values != 0).sum(axis=1) == 1)
        if not hot.all():
            row = int(hot.argmin())
            raise Unusable(
                f"{name} are not one-hot: row {row} is {brief(values[row].tolist())}, not a single"
                f" 1; {ask_for_task(values)}"
            )
        values = values.argmax(axis=1)
    values = one_each(values, name, samples)
    if values.dtype.kind == "f":
        values = values.astype(np.float64)  # 2**53 is infinite as float16
    with np.errstate(invalid="ignore"):  # NaN is refused below
        labels = np.array(values.astype(np.int64))
    whole = (labels == values) & (values.dtype.kind != "f" or np.abs(values) < 2**53)
    if not whole.all():
        row = int(whole.argmin())
        question = f"; {ask_for_task(values)}" if values.dtype.kind == "f" else ""
        raise Unusable(
            f"{name} are not whole numbers of 64 bits: row {row} is {values[row]:g}{question}"
        )
    return labels


def ask_for_task(values: np.ndarray) -> str:
    """Return which task learns what labels (N,) or (N, K) may be, if they name no classes."""
    advice = "if these are values, give --task regress; for a class of each image, write it, (N,)"
    if values.ndim == 2 and np.isin(values[~mark_unknown("classes", values, ())], (0, 1)).all():
        return f"if an image has any number of these classes, give --task multilabel; {advice}"
    return advice


def refuse_other_axis(images: h5py.Dataset, labels: h5py.Dataset) -> None:
    """Raise Unusable for labels of another axis of the images than their first, as of (H, W, N)."""
    shape = labels.shape or (1,)
    count = max(shape) if labels.size == max(shape) else shape[0]
    axes = [axis for axis, length in enumerate(images.shape) if length == count]
    if 1 in (count, len(images)) or not axes or 0 in axes:
        return
    labelled = " or ".join(f"axis {axis}" for axis in axes)
    move = f"numpy.moveaxis(file['{images.name}'][:], {axes[-1]}, 0)"
    raise Unusable(
        f"the labels {labels.name} have shape {labels.shape}, and the images {images.name}"
        f" {images.shape}: the images are along their first axis (axis 0), but {labelled} has"
        f" {count:,}; write them anew, file['new'] = {move}"
    )


def refuse_missing(data: h5py.Dataset, values: np.ndarray) -> None:
    """Raise Unusable if any of the values (N,) of labels is one that marks missing ones.

    Attributes of netCDF name such values.
    """
    for attribute in FILL_VALUES:
        for fill in np.asarray(data.attrs.get(attribute, ())).reshape(-1).tolist():
            is_missing = values == fill
            if isinstance(fill, int | float) and is_missing.any():
                count = counted(int(is_missing.sum()), "time")
                raise Unusable(
                    f"the labels {data.name} hold {fill:g}, their {attribute}, {count}, first in"
                    f" row {is_missing.argmax()}: take these images out of the file"
                )


def read_names(data: h5py.Dataset, samples: int) -> np.ndarray:
    """Read labels that are strings, (N,). Raises Unusable."""
    name = f"the labels {data.name}"
    try:
        if data.dtype == "S1" and data.ndim and data.shape[-1] > 1 and data.size > samples:
            joined = np.ascontiguousarray(data[...]).view(f"S{data.shape[-1]}")  # as in netCDF-3
            texts = np.char.decode(joined, "utf-8")
        else:
            texts = data.asstr("utf-8")[...]
    except UnicodeDecodeError as error:
        raise Unusable(f"{name} are not UTF-8, such as {error.object!r}: write them anew") from None
    names = one_each(np.array(texts, str), name, samples)
    empty = names == ""
    if empty.any():
        raise Unusable(f"{name} are incomplete: row {empty.argmax()} is an empty string")
    return names


def number_names(names: np.ndarray, where: str) -> np.ndarray:
    """Return all labels (N,) of `where`: strings of whole numbers, if all are, as int64.

    Raises Unusable for two spellings of a name.
    """
    if names.dtype.kind != "U":
        return names
    distinct = np.unique(names).tolist()
    spellings: dict[str, str] = {}
    for text in distinct:
        other = spellings.setdefault(unicodedata.normalize("NFC", text.strip()), text)
        if other != text:
            raise Unusable(
                f"{where} hold {other!a} and {text!a}, which differ in spaces around them or in"
                " Unicode normalization alone: write them alike"
            )
    is_numbered = all(re.fullmatch("0|[1-9][0-9]{0,17}", text) for text in distinct)
    return names.astype(np.int64) if is_numbered else names


def one_each(values: np.ndarray, name: str, samples: int) -> np.ndarray:
    """Return labels of one value per image as (N,), whatever axes there are. Raises Unusable."""
    if values.size != samples or max(values.shape, default=1) != samples:
        way = ""
        if values.size == 1:
            way = "; if a file is one image, say --layout HWC, CHW or HW"
        raise Unusable(
            f"{name} have shape {values.shape}, and {samples:,} images need ({samples},) or one-hot"
            f" ({samples}, K){way}"
        )
    return values.reshape(-1)


def choose_block_rows(
    images: Stored, classes: int, wanted: int | None, files: FileSet | None = None
) -> int:
    """Return the samples per block: whole chunks of about READ_BYTES, less in a small file.

    Of a set of `files`, no more than its largest file has.
    """
    unit = images.chunk_rows or 1
    rows = images.shape[0]
    if wanted == 0 and not images.chunk_rows:
        return 0
    if wanted and 0 < wanted <= rows and wanted % unit == 0:
        return wanted
    units = -(-rows // unit)
    blocks = max(MIN_BLOCKS, MIN_BLOCKS_OF_CLASS * classes)
    most = READ_BYTES // (unit * images.row_bytes)
    if files is not None:
        most = min(most, -(-int(np.diff(files.starts).max()) // unit))
    return unit * max(1, min(most, units // blocks))


def draw_splits(
    pack: Pack, split: str, strata: Strata, options: ExternalOptions
) -> dict[str, np.ndarray]:
    """Draw the rows of every split of a file of N samples; of a `split`, shuffle them.

    Raises what `check_splits` raises.
    """
    everything = np.arange(len(strata))
    block_rows = pack.block_rows
    files = pack.splits["train"].files
    if split:
        return {split: _in_random_order(everything, block_rows, options.seed, split)}
    shares = Shares(options.split or DEFAULT_SPLIT)
    way = ""
    advice = ""
    images = pack.splits["train"].images
    bounds = np.append(np.arange(0, len(strata), block_rows or len(strata)), len(strata))
    if files is not None and block_rows:
        bounds = files.block_bounds(block_rows)
    if options.group and files is not None:
        splits = _assign_whole(strata, files.files_of(everything), shares, options.seed)
        way = ", drawn as whole files by --group file"
        advice = f"give more than {counted(len(files.names), 'file')}, or leave out --group"
    elif block_rows:
        splits = _assign_blocks(strata, shares, bounds, block_rows, options.seed)
        way = f", drawn in blocks of {block_rows:,} images"
        if images.chunk_rows > 1:
            one_of_them = files.path(0) if files is not None else pack.splits["train"].path
            advice = chunk_advice(images, one_of_them)
    else:
        splits = assign(strata, shares, options.seed)
        if any(LEARN_VALUES in note for note in pack.provenance["notes"]):
            count = f"{len(pack.classes):,} different labels"
            advice = f"give it a larger share; {count} are taken for classes: {LEARN_VALUES}"
    drawn: dict[str, np.ndarray] = {}
    for position, name in enumerate(SPLITS):
        rows = everything[splits == position]
        if files is not None and block_rows:
            drawn[name] = _blocks_in_random_order(rows, bounds, options.seed, name)
        else:
            drawn[name] = _in_random_order(rows, block_rows, options.seed, name)
    wanted = [name for name, share in zip(SPLITS, shares, strict=True) if share]
    notes = check_splits(
        drawn,
        strata=strata,
        classes=pack.classes,
        wanted=wanted,
        source=pack.path,
        way=way,
        advice=advice,
    )
    pack.provenance["notes"].extend(notes)
    return {name: rows for name, rows in drawn.items() if len(rows)}


def chunk_advice(images: Stored, path: str) -> str:
    """Return what helps where the chunks of a file are too large to draw splits from."""
    chunk = "x".join(map(str, (1, *images.shape[1:])))
    return (
        f"its chunks of {images.chunk_rows:,} images are read whole: write smaller ones,"
        f" 'h5repack -l {images.dataset}:CHUNK={chunk} {path} new.h5', or a pack with hp.write_pack"
    )


def _assign_whole(strata: Strata, groups: np.ndarray, shares: Shares, seed: int) -> np.ndarray:
    """Divide whole groups by the shares; return the split (N,) of each sample.

    `groups` (N,) are the numbers of those.
    """
    rows = shuffled(np.arange(len(strata)), seed, "pack split")
    splits = np.empty(len(strata), np.int32)
    splits[rows] = assign_groups(strata.take(rows), groups[rows], shares, balanced=True)
    return splits


def _assign_blocks(
    strata: Strata, shares: Shares, bounds: np.ndarray, block_rows: int, seed: int
) -> np.ndarray:
    """Divide whole blocks by the shares; return the split (N,) of each sample.

    `bounds` (B + 1,) are the first sample of each block, which has `block_rows` at most, and N.

    With one class a sample, blocks are sorted by the class of their middle sample, in random order
    within a class, and the splits take them in turn: each gets its share of every class, even in a
    file ordered by class. With several, blocks are groups.
    """
    blocks = len(bounds) - 1
    sizes = np.diff(bounds)
    if not isinstance(strata, ByClass):
        return _assign_whole(strata, np.repeat(np.arange(blocks), sizes), shares, seed)
    order = shuffled(np.arange(blocks), seed, "pack split")
    middles = np.minimum(bounds[:-1] + block_rows // 2, bounds[1:] - 1)
    order = order[np.argsort(strata.labels[middles][order], kind="stable")]
    counts = divide_by_shares(blocks, shares)
    turns = np.concatenate([(np.arange(count) + 0.5) / max(1, count) for count in counts])
    splits = np.empty(blocks, np.int32)
    splits[order] = np.repeat(np.arange(len(counts)), counts)[np.argsort(turns, kind="stable")]
    return np.repeat(splits, sizes)


def _blocks_in_random_order(
    rows: np.ndarray, bounds: np.ndarray, seed: int, split: str
) -> np.ndarray:
    """Shuffle the blocks, of any size, in the ascending rows (n,) of a split."""
    starts = block_starts(rows, bounds)
    order = shuffled(np.arange(len(starts) - 1), seed, "blocks", split)
    sizes = np.diff(starts)[order]
    first = np.repeat(starts[:-1][order], sizes)
    within = np.arange(len(rows)) - np.repeat(np.cumsum(sizes) - sizes, sizes)
    return rows[first + within]


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
    """Some images of a file: their CRC-32, by which other ranks recognise it, and their scale."""

    crc32: int
    scale: Scale
    outlier: Outlier | None  # a value that may mark missing data


def _probe_images(pack: Pack, info: SplitInfo) -> ProbedImages:
    """Read some images of a file. Raises UsageError if one cannot be used."""
    scale = pack.scale
    try:
        with Split(replace(pack, splits={"train": info}), "train") as split:
            rows, stored = split.read_probe()
    except RunError as error:
        raise UsageError(str(error)) from None
    unusable = find_unusable(stored, scale.divisor, scale.nodata)
    if unusable:
        place = min(unusable)
        where = f"{info.images.dataset}[{rows[place]}]"
        if info.files is not None:
            where = info.files.place_of(int(rows[place]), info.images.dataset)
        raise UsageError(f"{info.path}: {where} {unusable[place]}")
    lows, highs = channel_ranges(stored, scale.nodata)
    if stored.dtype.kind == "f":
        lows = tuple(float(f"{low:.6g}") for low in lows)
        highs = tuple(float(f"{high:.6g}") for high in highs)
    return ProbedImages(
        crc32=probe_checksum(stored, scale.divisor),
        scale=scale.with_ranges(lows, highs),
        outlier=find_outlier(stored, scale.nodata),
    )
