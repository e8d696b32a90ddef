"""What the files of a set hold, which together are as one external file (``external.py``).

Each is opened once, by rank 0: its datasets are located, its labels read, and its images probed.
The rest is done without HDF5, but for images that are not stored in one piece (``file_set.py``).
"""

from __future__ import annotations

import glob
import os
import zlib
from collections import Counter
from collections.abc import Sequence
from contextlib import closing
from functools import partial
from itertools import chain
from typing import TYPE_CHECKING

import numpy as np

from hpctrain.data import file_index
from hpctrain.data.external import (
    ExternalContent,
    choose_layout,
    describe_attributes,
    describe_file,
    describe_scale_attributes,
    make_pack,
    number_names,
    read_all_labels,
    read_content,
    read_external,
    refuse_other_axis,
)
from hpctrain.data.external_targets import (
    FileTargets,
    columns_of_set,
    dataset_names,
    describe_columns,
    read_file_targets,
    stored_format,
)
from hpctrain.data.file_set import FileSet, absolute_pattern, is_pattern, split_pattern
from hpctrain.data.hdf5 import Unusable, find_dataset, locate_dataset, open_hdf5
from hpctrain.data.pack import ONE_SAMPLE, ExternalOptions, Pack, SplitInfo
from hpctrain.data.split import probe_rows
from hpctrain.data.stored import File, Stored, as_bytes
from hpctrain.data.target_rows import TargetColumns
from hpctrain.data.targets import Targets
from hpctrain.errors import UsageError
from hpctrain.text import counted

if TYPE_CHECKING:
    import h5py

NOTE_END = "; "  # between two notes on one file
PROBE_BYTES = 256 << 10  # of the images of a file, by which it is recognized


def open_external(
    path: str | os.PathLike[str], options: ExternalOptions, cache_dir: str = ""
) -> Pack:
    """Check, split and identify an external file and return it as a `Pack`. Raises UsageError.

    `path` may be a pattern of files, which are read as one set; their index is kept in `cache_dir`,
    if it is given.
    """
    pattern = os.fspath(path)
    if not is_pattern(pattern):
        if options.layout not in ONE_SAMPLE:
            return read_external(path, options)
        pattern = glob.escape(pattern)
    pattern = absolute_pattern(pattern)
    return make_pack(pattern, read_set(pattern, options, cache_dir), options)


def read_set(pattern: str, options: ExternalOptions, cache_dir: str) -> ExternalContent:
    """Read what the files of an absolute pattern hold, in the order of their names.

    Raises UsageError, also if the files differ in more than their numbers of samples.
    """
    if "{split}" in options.images + options.labels:
        raise UsageError(
            f"--images {options.images} has splits of its own, and those of a set of files are"
            " drawn: name datasets that each file has, and give --split"
        )
    folder, _ = split_pattern(pattern)
    key = (options.images, options.labels, options.layout, str(options.nodata), options.kind)
    read = partial(read_file_of_set, options=options)
    index, note = file_index.index_files(pattern, key, cache_dir, read)
    content = join_files(pattern, index, folder, options)
    if note:
        content.notes.insert(0, note)
    return content


def open_rows(paths: Sequence[str], options: ExternalOptions) -> Pack:
    """Return the rows of all HDF5 files, in this order, as train of a `Pack` without classes.

    Labels are not read. Raises UsageError.
    """
    options = options._replace(labels="", kind="class")
    path = os.path.abspath(paths[0])
    if len(paths) == 1 and options.layout not in ONE_SAMPLE:
        with open_hdf5(path) as file:
            content = read_content(file, options)
    else:
        matching = file_index.match_files(paths)
        contents = file_index.read_changed(
            matching, None, partial(read_file_of_set, options=options)
        )
        index = file_index.join_contents(matching, contents)
        content = join_files(path, index, matching.folder, options)
    return describe_file(
        path,
        content=content,
        train="",
        targets=Targets("class", ()),
        options=options._replace(nodata=None),  # any type may hold rows without missing data
    )


def join_files(
    path: str, index: file_index.Index, folder: str, options: ExternalOptions
) -> ExternalContent:
    """Return what the files of an index, relative to `folder`, hold together. Raises UsageError.

    `path` stands for all of them in messages.
    """
    labels = index.labels
    try:
        if options.kind == "class":
            labels = number_names(labels, f"the labels {options.labels}")
    except Unusable as error:
        raise UsageError(f"{path}: {error}") from None
    files = index.file_set(folder, is_sample=options.layout in ONE_SAMPLE)
    samples = int(files.starts[-1])
    images = Stored(
        dataset=index.format.dataset,
        dtype=index.format.dtype,
        shape=(samples, *index.format.shape),
        chunk_rows=int(files.chunk_rows.max()),
    )
    notes = list[str]()
    all_notes = chain.from_iterable(text.split(NOTE_END) for text in index.notes.tolist() if text)
    for text, count in Counter(all_notes).items():
        notes.append(f"{text} (in {count:,} of {counted(len(files.names), 'file')})")
    info = SplitInfo(
        path=path,
        samples=samples,
        images=images,
        targets=labels,
        files=files,
    )
    return ExternalContent(
        infos={"": info},
        labels={"": labels},
        layout=index.format.layout,
        scale_attributes=index.format.scale_attributes,
        sizes={},
        notes=notes,
        columns=index.format.columns,
        parts={"": locate_in_files(path, index, files)},
    )


def locate_in_files(
    path: str, index: file_index.Index, files: FileSet
) -> tuple[TargetColumns, ...]:
    """Return where the files of an index hold targets of several classes, or values."""
    places = index.target_places  # (F, D, 2)
    parts = columns_of_set(path, index.format.targets, int(files.starts[-1]))
    return tuple(
        part._replace(
            files=files._replace(offsets=places[:, number, 0], chunk_rows=places[:, number, 1])
        )
        for number, part in enumerate(parts)
    )


def read_file_of_set(path: str, options: ExternalOptions) -> file_index.FileContent:
    """Read what one file of a set holds, but for its images. Raises UsageError."""
    with open_hdf5(path) as file:
        images = find_dataset(file, options.images)
        sizes: dict[str, int] = {}
        is_sample = options.layout in ONE_SAMPLE
        layout = choose_layout(images, options.layout or "")
        stored = locate_dataset(images, sizes)
        if is_sample:
            stored = stored._replace(shape=(1, *stored.shape), chunk_rows=0)
        rows = stored.shape[0]
        texts = np.empty(0, np.int64)
        label_type = ""
        names = [images.name]
        targets = FileTargets((), np.empty((rows, 0)), (), [])
        if options.kind != "class":
            datasets = dataset_names(options.labels, "")
            names += datasets
            targets = read_file_targets(file, datasets, rows, options.kind, sizes)
            texts = targets.targets
            label_type = describe_columns(targets.parts)
        elif options.labels:
            labels = find_dataset(file, options.labels)
            names.append(labels.name)
            if not is_sample:
                refuse_other_axis(images, labels)
            texts = read_all_labels(labels, rows, sizes)
            label_type = "strings" if texts.dtype.kind == "U" else "integers"
            if labels.size > rows:
                label_type = f"one-hot of {labels.size // rows}"
        if [*sizes] != [path]:
            raise Unusable(
                f"{' or '.join(names)} is stored in another file: a set is of files that hold all"
                " of theirs"
            )
        notes = describe_attributes(images, options.nodata) if len(images.attrs) else []
        crc32 = probe_file(images, stored, path)
        if options.kind != "class":
            crc32 = zlib.crc32(as_bytes(texts), crc32)
        else:
            for text in texts.tolist():
                crc32 = zlib.crc32(f"{text}\n".encode(), crc32)
        return file_index.FileContent(
            format=file_index.FileFormat(
                dataset=stored.dataset,
                dtype=stored.dtype,
                layout=layout,
                shape=stored.shape[1:],
                scale_attributes=describe_scale_attributes(images) if len(images.attrs) else "",
                labels=label_type,
                columns=targets.names,
                targets=tuple(map(stored_format, targets.parts)),
            ),
            rows=rows,
            offset=stored.offset,
            chunk_rows=min(stored.chunk_rows, rows) if rows > 1 else 0,
            crc32=crc32,
            notes=NOTE_END.join([*notes, *targets.notes]),
            labels=texts,
            target_places=tuple(
                (part.stored.offset, part.stored.chunk_rows) for part in targets.parts
            ),
        )


def probe_file(data: h5py.Dataset, stored: Stored, path: str) -> int:
    """Return the CRC-32 of up to PROBE_BYTES of the images (N, ...) of a file.

    They are middle parts, along the first axis of a sample, of up to PROBED samples.
    """
    rows = probe_rows(stored.shape[0]).tolist()
    lines = stored.shape[1]
    line_bytes = stored.row_bytes // lines
    count = min(lines, max(1, PROBE_BYTES // (len(rows) * line_bytes)))
    first = (lines - count) // 2
    crc32 = 0
    if stored.offset:
        buffer = np.empty(count * line_bytes, np.uint8)
        with closing(File(path, os.path.getsize(path))) as file:
            for row in rows:
                file.read(buffer.data, stored.byte_range(row, row + 1).start + first * line_bytes)
                crc32 = zlib.crc32(buffer.data, crc32)
        return crc32
    part = slice(first, first + count)
    for row in rows:
        place = (row, part) if data.ndim == len(stored.shape) else (part,)
        crc32 = zlib.crc32(as_bytes(np.ascontiguousarray(data[place])), crc32)
    return crc32
