"""Write arrays, or data sets of h5py, as a pack."""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from hpctrain.data.packing.decode import write_span
from hpctrain.data.packing.write import PackFacts, PackWriter, lay_out, writing
from hpctrain.errors import UsageError
from hpctrain.files import whole_file
from hpctrain.text import brief

SLAB_BLOCKS = 8  # blocks of about 1 MiB that are read at a time


def write_pack(
    path: str | os.PathLike[str],
    splits: Mapping[str, tuple[Any, Any]],
    classes: Sequence[str],
    provenance: Mapping[str, Any] | None = None,
    overwrite: bool = False,
) -> None:
    """Write arrays of images and labels as a pack, in the order given.

    splits: by name, (images, labels). One split is named train; validation and test are those that
        training knows, others can be evaluated by name.
    images: uint8, (N, H, W, C) or (N, H, W), of one shape in all splits: an array or an h5py data
        set, which is read about 8 MiB at a time.
    labels: (N,) integers 0 ... K-1, the indices of `classes`.
    classes: K different names.
    provenance: what the images are, a dictionary that can be written as JSON.

    The pack gets its name when it is complete; with `overwrite`, it replaces an existing file.
    Call this function in one process only. Raises UsageError if the arrays do not fit together or
    the file exists or cannot be written, RunError if the disk is full.
    """
    output, provenance = Path(path), dict(provenance or {})
    if output.exists() and not overwrite:
        raise UsageError(f"{output} exists: give another path, or replace it with overwrite=True")
    if "train" not in splits:
        raise UsageError(f"the splits are {[*splits]}: one must be named train")
    names = _checked_classes(classes)
    labels = {name: _checked_labels(name, *splits[name], len(names)) for name in splits}
    shapes = {name: (*images.shape[1:], 1)[:3] for name, (images, _) in splits.items()}
    shape = shapes["train"]
    if len(set(shapes.values())) > 1:
        raise UsageError(f"the splits differ in image shape: {shapes}")
    try:
        json.dumps(provenance, allow_nan=False)
    except (TypeError, ValueError) as error:
        raise UsageError(f"the provenance cannot be written as JSON: {error}") from None
    rows = {name: len(values) for name, values in labels.items()}
    with writing(output), whole_file(output) as file:
        writer = PackWriter(file, lay_out(rows, shape))
        for span in writer.spans(SLAB_BLOCKS):
            slab = np.ascontiguousarray(splits[span.split][0][span.start : span.stop], np.uint8)
            data = slab.reshape(span.stop - span.start, *shape).data.cast("B")
            writer.add(write_span(data, span))
        writer.finish(PackFacts(shape, names, provenance), labels)


def _checked_classes(classes: Sequence[str]) -> tuple[str, ...]:
    """Return the names of the classes. Raises UsageError unless they are different texts."""
    names = tuple(classes)
    if not names or not all(isinstance(name, str) and name for name in names):
        raise UsageError(f"classes {brief(list(names))}: give the name of each class")
    if twice := [name for name, count in Counter(names).items() if count > 1]:
        raise UsageError(f"two classes have the name {twice[0]!r}: rename one")
    return names


def _checked_labels(split: str, images: Any, labels: Any, classes: int) -> np.ndarray:
    """Return the labels (N,) int64 of a split. Raises UsageError unless they fit to its images."""
    if not split or "/" in split or split == ".":
        raise UsageError(f"a split cannot have the name {split!r}")
    kind: Any = getattr(images, "dtype", type(images).__name__)
    shape: tuple[int, ...] = tuple(getattr(images, "shape", ()))
    if kind != np.uint8 or len(shape) not in (3, 4) or 0 in shape:
        raise UsageError(
            f"images of {split} are {kind} of shape {shape}: expected uint8, (N, H, W, C) or"
            " (N, H, W)"
        )
    values = np.asarray(labels)
    if values.dtype.kind not in "iu" or values.shape != shape[:1]:
        raise UsageError(
            f"labels of {split} are {values.dtype} of shape {values.shape}: expected {shape[0]:,}"
            " integers, one per image"
        )
    lowest, highest = int(values.min()), int(values.max())
    if lowest < 0 or highest >= classes:
        raise UsageError(
            f"labels of {split} are {lowest} to {highest}, but {classes:,} classes are numbered 0"
            f" to {classes - 1}"
        )
    return values.astype(np.int64)
