"""Write a pack of JPEG files (``pack_format.py``, version 2), as ``write.py`` writes pixels."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import numpy as np

from hpctrain.data.images import Fit
from hpctrain.data.pack_file import read_exactly
from hpctrain.data.pack_format import ENCODED_VERSION, JPEG, content_uuid, ordered
from hpctrain.data.packing.decode import Files
from hpctrain.data.packing.write import Column, Fetch, describe, mean_std, new_file, numbers, store


class Chosen(NamedTuple):
    """One split to write: which files, in which order, and their labels, (n,) each."""

    rows: np.ndarray
    labels: np.ndarray


def write_encoded(
    path: Path,
    parts: dict[str, Chosen],
    scratch: BinaryIO,
    files: Files,
    fit: Fit,
    classes: tuple[str, ...],
    provenance: dict[str, Any],
    jobs: int = 1,
    advance: Callable[[int], None] = lambda rows: None,
) -> None:
    """Write all parts, whose `files` lie in the scratch file, with `jobs` threads; `advance` is
    told of files that are written."""
    image_shape, how = (fit.height, fit.width, fit.channels), "crop" if fit.crop else "stretch"
    sums: dict[str, tuple[int, list[np.ndarray]]] = {}
    with new_file(path) as file, ThreadPoolExecutor(jobs) as threads:
        for name in ordered(parts):
            rows = parts[name].rows
            labels = np.ascontiguousarray(parts[name].labels, "<i8")  # (n,)
            offsets = np.zeros(len(rows) + 1, "<i8")
            np.cumsum(files.sizes[rows], out=offsets[1:])
            fetch = _fetch(scratch, files.places[rows], offsets, advance)
            columns = (
                Column("bytes", np.uint8, (int(offsets[-1]),), fetch),
                numbers("offsets", offsets),
                numbers("labels", labels),
            )
            group = file.create_group(name)
            stored = [store(group, column, threads).checksums for column in columns]
            sums[name] = (len(rows), stored)
            if name == "train":
                pixels = len(rows) * image_shape[0] * image_shape[1]
                values, squares = (part[rows].sum(0) for part in (files.values, files.squares))
                file.attrs["mean"], file.attrs["std"] = mean_std(values, squares, pixels)
        identity = content_uuid(image_shape, classes, sums, how)
        describe(file, ENCODED_VERSION, identity, classes, provenance)
        file.attrs["encoding"] = np.bytes_(JPEG)
        file.attrs["image_shape"] = np.array(image_shape, "<i8")
        file.attrs["fit"] = np.bytes_(how)


def _fetch(
    source: BinaryIO, places: np.ndarray, offsets: np.ndarray, advance: Callable[[int], None]
) -> Fetch:
    """Reads bytes of the files that begin at `places` (n,) as if they lay in that order."""

    def fetch(start: int, stop: int) -> np.ndarray:
        block = np.empty(stop - start, np.uint8)
        first, last = np.searchsorted(offsets, (start, stop - 1), side="right") - 1
        for i in range(first, last + 1):
            begin, end = max(start, int(offsets[i])), min(stop, int(offsets[i + 1]))
            place = int(places[i]) + begin - int(offsets[i])
            part = block[begin - start : end - start].data
            read_exactly("the scratch file", source.fileno(), [part], place)
        advance(int(last - first) + (int(offsets[last + 1]) == stop))  # that end in this block
        return block

    return fetch
