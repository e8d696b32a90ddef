"""All rows of HDF5 files, with labels or without, as images for a trained network.

A file is read as those of the training: the network's metadata say by which dataset and layout. Of
a pack, all splits are read.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import groupby
from typing import Any, NamedTuple

import numpy as np

from hpctrain.data.pack import WRITE_PHYSICAL, ExternalOptions, Pack, SplitInfo, is_pack, read_pack
from hpctrain.data.scale import Scale, present_values, value_range
from hpctrain.data.split import Bad, Split, probe_rows
from hpctrain.errors import RunError, UsageError
from hpctrain.text import say


class Dataset(NamedTuple):
    """Which dataset holds the images of HDF5 files that are no packs; None: as in the training."""

    images: str | None = None
    layout: str | None = None


class Part(NamedTuple):
    """One split of a pack, or all rows of HDF5 files that are no packs."""

    paths: Sequence[str]  # of these files, as they were given
    pack: Pack
    split: str  # "train" if it is no pack

    @property
    def info(self) -> SplitInfo:
        return self.pack.splits[self.split]

    @property
    def is_pack(self) -> bool:
        return self.pack.external is None


class Place(NamedTuple):
    """Where a row is stored: these are columns of a table."""

    file: str
    split: str  # of a pack
    row: int  # of the split, or the dataset


def list_parts(paths: Sequence[str], metadata: Mapping[str, Any], dataset: Dataset) -> list[Part]:
    """Open HDF5 files for the network with these metadata. Raises UsageError.

    Their images must have its shape, one type, and values that have a meaning in its scale.
    Attributes that are not applied are printed, if the training had none of them.
    """
    parts = open_parts(paths, metadata, dataset)
    if dataset != Dataset() and all(part.is_pack for part in parts):
        raise UsageError(f"--images and --layout are not of packs, as {paths[0]}: leave them out")
    trained = [without_count(note) for note in metadata["provenance"].get("notes", ())]
    for part in parts:
        if part.is_pack:
            continue
        for note in part.pack.provenance["notes"]:
            if without_count(note) not in trained:
                note = note.replace("--nodata", "train with --nodata")
                say(f"{part.paths[0]}: {note}", sys.stderr)
    return parts


def find_unusable(
    paths: Sequence[str], metadata: Mapping[str, Any], dataset: Dataset
) -> dict[str, str]:
    """Return why HDF5 files cannot be used, by path: alone, or beside the first that can be."""
    usable: list[str] = []
    unusable: dict[str, str] = {}
    for path in paths:
        try:
            open_parts([*(usable or [path]), path], metadata, dataset)
        except UsageError as error:
            unusable[path] = str(error)
        else:
            usable = usable or [path]
    return unusable


def open_parts(paths: Sequence[str], metadata: Mapping[str, Any], dataset: Dataset) -> list[Part]:
    """Open and check HDF5 files as `list_parts` does. Raises UsageError."""
    scale = Scale(**metadata["scale"])
    parts = list[Part]()
    for are_packs, group in groupby(paths, is_pack):
        if are_packs:
            for path in group:
                pack = read_pack(path)
                splits = [name for name, info in pack.splits.items() if info.samples]
                parts += [Part([path], pack, split) for split in splits]
        else:
            parts.append(open_external_rows([*group], metadata, dataset, scale.nodata))
    for part in parts:
        check_part(part, metadata, scale)
        if part.pack.dtype != parts[0].pack.dtype:
            raise UsageError(
                f"{part.paths[0]} holds {part.pack.dtype} images, and {parts[0].paths[0]}"
                f" {parts[0].pack.dtype}: predict them one after the other"
            )
    return parts


def check_part(part: Part, metadata: Mapping[str, Any], scale: Scale) -> None:
    """Raise UsageError unless a network with these metadata can be given the images of a part."""
    pack = part.pack
    shape = tuple(metadata["image_shape"])
    check_nodata(pack, scale)
    check_scale_attributes(pack, metadata)
    if pack.image_shape != shape:
        raise UsageError(
            f"{part.paths[0]} holds images {pack.image_shape} (H, W, C), read as {pack.layout},"
            f" and this network takes {shape}"
        )
    try:
        scale.divisor_for(pack.dtype.name, *probe_range(part, scale.nodata), is_whole=True)
    except UsageError as error:
        raise UsageError(f"{part.paths[0]}: {error}") from None


def probe_range(part: Part, nodata: float | None) -> tuple[float, float]:
    """Return the smallest and the largest stored value of some rows; of a pack, of all of train."""
    if part.is_pack:
        return range_of(part.pack)
    with Split(part.pack, part.split, check_values=False) as split:
        rows = probe_rows(len(split))
        images, bad = read_usable(split, rows)
    low, high, _ = value_range(present_values(images[~np.isin(rows, [*bad])], nodata))
    return low, high


def range_of(pack: Pack) -> tuple[float, float]:
    """Return the smallest and the largest stored value: in a pack, of all training images."""
    statistics = pack.statistics
    if statistics is None or not statistics.count.any():
        return pack.scale.low, pack.scale.high
    return float(statistics.low.min()), float(statistics.high.max())


def open_external_rows(
    paths: Sequence[str], metadata: Mapping[str, Any], dataset: Dataset, nodata: float | None
) -> Part:
    """Open HDF5 files that are no packs. Raises UsageError."""
    from hpctrain.data.external_files import open_rows  # imports h5py

    options = ExternalOptions(images="", labels="")
    if metadata["external"]:
        options = ExternalOptions(**metadata["external"])
    options = options._replace(
        images=dataset.images or options.images,
        layout=dataset.layout or options.layout,
        nodata=nodata,
    )
    if not options.images or "{split}" in options.images:
        why = "the training was on a pack"
        if options.images:
            why = f"--images {options.images} has a dataset for each split"
        raise UsageError(
            f"{paths[0]}: {why}: name the dataset to predict, as in --images x; in Python, give an"
            " array of it"
        )
    return Part(paths, open_rows(paths, options), "train")


def without_count(note: str) -> str:
    """Return a note on files without the number of those that it is about."""
    return note.partition(" (in ")[0]


def check_scale_attributes(pack: Pack, metadata: Mapping[str, Any]) -> None:
    """Raise UsageError for an external file with other scale attributes than the training had."""
    if pack.external is None:
        return
    attributes = pack.provenance.get("scale_attributes", "")
    trained = metadata["provenance"].get("scale_attributes", "")
    if attributes != trained:
        raise UsageError(
            f"{pack.path} is stored with {attributes or 'no scale_factor'}, the images of the"
            f" training with {trained or 'no scale_factor'}: {WRITE_PHYSICAL}"
        )


def check_nodata(pack: Pack, scale: Scale) -> None:
    """Raise UsageError if another value than the network's is no data in a pack."""
    nodata = pack.scale.nodata
    if nodata is None:
        return
    if scale.nodata is None or not np.array_equal(nodata, scale.nodata, equal_nan=True):
        raise UsageError(
            f"{pack.path} holds {pack.scale}, and the training was on {scale}: give data with the"
            " same nodata value"
        )


class Rows:
    """The rows of all parts, one after another, as stored. Reading is thread-safe."""

    def __init__(self, parts: Sequence[Part], threads: int | None = None) -> None:
        """Open all files; `threads` decode those of JPEG. Raises UsageError."""
        self.dtype = parts[0].pack.dtype
        self.image_shape = parts[0].pack.image_shape
        self._parts = parts
        self._starts = np.cumsum([0, *(part.info.samples for part in parts)])
        self._splits: list[Split] = []
        try:
            for part in parts:
                split = Split(part.pack, part.split, threads, check_values=False)
                self._splits.append(split)
        except BaseException:
            self.close()
            raise

    def __len__(self) -> int:
        return int(self._starts[-1])

    def close(self) -> None:
        """Close all files."""
        for split in self._splits:
            split.close()

    def read(self, rows: np.ndarray, bad: Bad) -> np.ndarray:
        """Return the images of rows (n,), (n, H, W, C); describe in `bad` those that are corrupt or
        cannot be read.
        """
        images = np.empty((len(rows), *self.image_shape), self.dtype)
        numbers = self._part_of(rows)
        for number in np.unique(numbers).tolist():
            places = np.flatnonzero(numbers == number)
            start = int(self._starts[number])
            values, unusable = read_usable(self._splits[number], rows[places] - start)
            images[places] = values
            bad |= {start + index: why for index, why in unusable.items()}
        return images

    def name_of(self, row: int) -> str:
        """Return the name of a row, as "new.h5:/x[5]"."""
        place = self.place_of(row)
        part = self._parts[self._part_of(row)]
        if part.is_pack:
            return f"{place.file}:/{place.split}[{place.row}]"
        name = f"{place.file}:{part.info.images.dataset}"
        if part.info.files is not None and part.info.files.is_sample:
            return name
        return f"{name}[{place.row}]"

    def place_of(self, row: int) -> Place:
        """Return where a row is stored."""
        number = self._part_of(row)
        part = self._parts[number]
        index = row - int(self._starts[number])
        if part.is_pack:
            return Place(part.paths[0], part.split, index)
        file = 0
        if part.info.files is not None:
            file = int(part.info.files.files_of(np.array(index)))
            index -= int(part.info.files.starts[file])
        return Place(part.paths[file], "", index)

    def columns(self) -> dict[str, Callable[[int], str]]:
        """Return what a table says of a row, by the name of the column."""
        names = ["file", "row"]
        if any(part.is_pack for part in self._parts):
            names = ["file", "split", "row"]
        columns: dict[str, Callable[[int], str]] = {
            name: partial(self._cell, name) for name in names
        }
        if any(part.info.names is not None for part in self._parts):
            columns["source"] = self._packed_from
        return columns

    def _cell(self, name: str, row: int) -> str:
        return str(getattr(self.place_of(row), name))

    def _packed_from(self, row: int) -> str:
        """Return the name of the file that a row of a pack was made of, or ""."""
        number = self._part_of(row)
        if not self._parts[number].is_pack:
            return ""
        return self._splits[number].source_of(row - int(self._starts[number]))

    def _part_of(self, rows: Any) -> Any:
        """Return the numbers of the parts with these rows."""
        return np.searchsorted(self._starts, rows, "right") - 1


def read_usable(split: Split, indices: np.ndarray) -> tuple[np.ndarray, Bad]:
    """Return samples (n, H, W, C) of a split, and those that are corrupt or cannot be read."""
    bad = Bad()
    images = np.empty((len(indices), *split.image_shape), split.dtype)
    try:
        split.gather(indices, images, bad=bad)
    except RunError as error:
        if len(indices) == 1:
            return images, {int(indices[0]): str(error)}
        for place in range(len(indices)):
            chosen = slice(place, place + 1)
            images[chosen], unusable = read_usable(split, indices[chosen])
            bad |= unusable
    return images, bad
