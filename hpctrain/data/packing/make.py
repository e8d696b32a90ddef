"""Make one pack: the steps that the workers run, and the work between them.

Only after decoding is it known which images have equal pixels and which cannot be read. To write
every pixel only once, images are assigned to splits before decoding, under the assumption that all
can be read and that files of equal size and end have equal pixels, and are decoded directly into
their rows. If the assumption turns out to be wrong, they are assigned again and the rows are copied
to a second file.

The sizes of JPEG files are known only after decoding, too. So images are decoded first; then their
files are read again and written.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterable, Iterator
from contextlib import suppress
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from hpctrain.config import PackConfig, image_size, split_shares
from hpctrain.data.images import Fit
from hpctrain.data.pack_format import JPEG
from hpctrain.data.packing import report
from hpctrain.data.packing.decode import (
    BadFiles,
    Span,
    copy_rows,
    decode_files,
    decode_rows,
    read_fingerprints,
    read_headers,
    write_files,
)
from hpctrain.data.packing.layout import DECODED, ImageSource, jpeg_dtype
from hpctrain.data.packing.sources import open_source
from hpctrain.data.packing.split import assign_rows, equal_pixels
from hpctrain.data.packing.workers import PackTask, RunTasks, start_workers
from hpctrain.data.packing.write import (
    PackFacts,
    PackWriter,
    check_room,
    lay_out,
)
from hpctrain.errors import UsageError
from hpctrain.files import whole_file

FLOWERS_SIZE = "100x100"
MIN_IMAGES_PER_JOB = 16
FIRST_IMAGES = 256  # number of headers that are read first
IMAGES_PER_TASK, FINGERPRINTS_PER_TASK = 16, 256
TASKS_PER_WORKER, MAX_BLOCKS = 32, 8  # tasks that write; blocks of about 1 MiB per task


class Reordered(Exception):
    """The rows of a file are not in their final order; a second file has been made instead."""


def pack_images(config: PackConfig, path: Path, output: Path) -> None:
    """Make a pack of the images at `path`."""
    if config.crop and not asked_size(config):
        raise UsageError("--crop cuts to a size: give one, as in --size 100x100")
    with open_source(path, output.parent, config.manifest) as source:
        cores = len(os.sched_getaffinity(0))
        jobs = max(1, min(config.jobs or cores, len(source.images) // MIN_IMAGES_PER_JOB))
        with start_workers(jobs) as run:
            making = PackMaker(config, source, output, run, jobs)
            fit = making.choose_fit()
            if config.encoding == JPEG:
                making.write_files(fit)
            else:
                making.write_pixels(fit)


class PackMaker:
    """Makes one pack of a listed source."""

    def __init__(
        self, config: PackConfig, source: ImageSource, output: Path, run: RunTasks, jobs: int
    ) -> None:
        self._config, self._source, self._output = config, source, output
        self._run, self._jobs = run, jobs
        self._shares = split_shares(config.split)

    def choose_fit(self) -> Fit:
        """Return the size and channels of the pack, reading as few headers as necessary.

        Without --size, all images must have the size of the first readable one. Without --channels,
        there are 3 channels if any image has colour. Raises UsageError if no image can be read, or
        if sizes differ.
        """
        source, size = self._source, asked_size(self._config)
        channels, exact = self._config.channels, size is None
        count = len(source.images)
        headers = np.zeros((count, 3), np.int64)  # 0 = not read
        if not (size and channels):
            for start, stop in pairwise((0, min(FIRST_IMAGES, count), count)):
                tasks = self._batches(IMAGES_PER_TASK, start, stop)
                _fill(headers[start:stop], self._run("reading", read_headers, tasks, stop - start))
                if size and headers[:, 2].any():
                    break
        width, height = size or _only_size(source, headers[:, :2])
        channels = channels or (3 if headers[:, 2].any() else 1)
        return Fit(width, height, channels, self._config.crop, exact)

    def write_pixels(self, fit: Fit) -> None:
        """Write a pack of pixels."""
        shape, count = (fit.height, fit.width, fit.channels), len(self._source.images)
        check_room(self._output, count * math.prod(shape))
        guess = self._guess()
        with suppress(Reordered), whole_file(self._output, point="pack") as first:
            writer = PackWriter(first, lay_out(_lengths(guess), shape))
            tasks = (
                PackTask((self._source.take(s.of(guess)), fit, s), s.stop - s.start)
                for s in self._spans(writer)
            )
            decoded = np.zeros(count, DECODED)
            for found, bad, written in self._run("decoding", decode_rows, tasks, count):
                decoded[written.span.of(guess)] = found
                self._source.bad += bad
                writer.add(written)
            rows, facts = self._choose(decoded, fit)
            made = PackFacts(shape, self._source.classes, facts)
            if rows.keys() == guess.keys() and all(np.array_equal(rows[s], guess[s]) for s in rows):
                writer.finish(made, self._labels(rows))
                return
            places = np.zeros(count, np.int64)
            for data in writer.images():
                places[guess[data.split]] = data.offset + data.row_bytes * np.arange(data.shape[0])
            self._copy_rows(writer.path, places, rows, made)
            raise Reordered

    def write_files(self, fit: Fit) -> None:
        """Write a pack of JPEG files."""
        source, count = self._source, len(self._source.images)
        if source.kind != "folder":
            check_room(self._output, int(source.images["size"].sum()))
        batches = self._batches(IMAGES_PER_TASK, 0, count)
        tasks = (PackTask((*task.arguments, fit), task.images) for task in batches)
        decoded = np.zeros(count, jpeg_dtype(fit.channels))
        _fill(decoded, self._good_parts(self._run("decoding", decode_files, tasks, count)))
        rows, facts = self._choose(decoded, fit)
        kept, good = int(decoded["kept"].sum()), int(decoded["good"].sum())
        facts["encoding"] = {"name": JPEG, "kept": kept, "encoded_anew": good - kept}
        check_room(self._output, int(decoded["size"].sum()))
        offsets = {
            split: np.concatenate([[0], np.cumsum(decoded["size"][of])])
            for split, of in rows.items()
        }
        shape, how = (fit.height, fit.width, fit.channels), "crop" if fit.crop else "stretch"
        made = PackFacts(shape, source.classes, facts, how)
        with whole_file(self._output, point="pack") as file:
            ends = {split: int(of[-1]) for split, of in offsets.items()}
            writer = PackWriter(file, lay_out(_lengths(rows), shape, ends))
            for split, of in offsets.items():
                writer.write_numbers(split, "offsets", of)
            tasks = (
                self._files_task(decoded, rows[span.split], offsets[span.split], span)
                for span in self._spans(writer)
            )
            for written in self._run("writing", write_files, tasks, good):
                writer.add(written)
            in_train = np.zeros((count, 1, 1), bool)
            in_train[rows["train"]] = True
            sums = decoded["sums"].sum(axis=0, where=in_train)
            writer.finish(made, self._labels(rows), sums)

    def _files_task(
        self, decoded: np.ndarray, rows: np.ndarray, offsets: np.ndarray, span: Span
    ) -> PackTask:
        """Return the task that writes a span of the files of images `rows`, stored at `offsets`."""
        first, end = np.searchsorted(offsets[1:], (span.start, span.stop), side="right").tolist()
        images = rows[first : int(np.searchsorted(offsets[:-1], span.stop))]
        skip = span.start - int(offsets[first])
        given = self._source.take(images), decoded[images], skip, span
        return PackTask(given, end - first)

    def _copy_rows(
        self, path: str, places: np.ndarray, rows: dict[str, np.ndarray], made: PackFacts
    ) -> None:
        """Write a pack of these rows of the file `path`, where image i begins at `places[i]`."""
        row_bytes = math.prod(made.image_shape)
        images = sum(_lengths(rows).values())
        check_room(self._output, row_bytes * images)
        with whole_file(self._output, point="pack") as file:
            writer = PackWriter(file, lay_out(_lengths(rows), made.image_shape))
            tasks = (
                PackTask((path, places[s.of(rows)], row_bytes, s), s.stop - s.start)
                for s in self._spans(writer)
            )
            for written in self._run("writing", copy_rows, tasks, images):
                writer.add(written)
            writer.finish(made, self._labels(rows))

    def _guess(self) -> dict[str, np.ndarray]:
        """Assign every image to a split before decoding.

        It is assumed that all can be read, and that images with equal fingerprints, and no others,
        have equal pixels.
        """
        everything = np.arange(len(self._source.images))
        tasks = self._batches(FINGERPRINTS_PER_TASK, 0, len(everything))
        found = np.zeros(len(everything), np.int64)
        _fill(found, self._run("reading", read_fingerprints, tasks, len(everything)))
        for groups in (equal_pixels(found)[0], everything):
            with suppress(UsageError):  # raised again after decoding if it still applies
                rows = assign_rows(self._source, everything, groups, self._config, self._shares)
                if sum(map(len, rows.values())) == len(everything):
                    return rows
        return {"train": everything}

    def _choose(
        self, decoded: np.ndarray, fit: Fit
    ) -> tuple[dict[str, np.ndarray], dict[str, Any]]:
        """Return the images of every split in order, and the provenance. Raises UsageError."""
        source, config = self._source, self._config
        good = np.flatnonzero(decoded["good"])
        report.check_decoded(source, len(good), config.skip_bad)
        groups, equal = equal_pixels(decoded["digest"][good])
        rows = assign_rows(source, good, groups, config, self._shares)
        report.say_chosen(source, good, equal, rows)
        return rows, report.provenance(source, good, equal, config, fit, rows)

    def _good_parts(self, found: Iterator[tuple[np.ndarray, BadFiles]]) -> Iterator[np.ndarray]:
        for part, bad in found:
            self._source.bad += bad
            yield part

    def _batches(self, step: int, start: int, stop: int) -> Iterator[PackTask]:
        for first in range(start, stop, step):
            rows = np.arange(first, min(first + step, stop))
            yield PackTask((self._source.take(rows),), len(rows))

    def _spans(self, writer: PackWriter) -> Iterator[Span]:
        """Yield the datasets of images in parts of whole blocks."""
        blocks = sum(-(-data.shape[0] // data.block_rows) for data in writer.images())
        return writer.spans(min(max(blocks // (TASKS_PER_WORKER * self._jobs), 1), MAX_BLOCKS))

    def _labels(self, rows: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        return {split: self._source.images["label"][of] for split, of in rows.items()}


def _fill(target: np.ndarray, parts: Iterable[np.ndarray]) -> None:
    """Copy the parts into `target`, one after the other."""
    start = 0
    for part in parts:
        target[start : start + len(part)] = part
        start += len(part)


def _lengths(rows: dict[str, np.ndarray]) -> dict[str, int]:
    return {split: len(of) for split, of in rows.items()}


def asked_size(config: PackConfig) -> tuple[int, int] | None:
    """Return width and height of --size, 100x100 for the flowers; None = the size of the images."""
    text = config.size or (FLOWERS_SIZE if config.source == "flowers" else None)
    return image_size(text) if text else None


def _only_size(source: ImageSource, sizes: np.ndarray) -> tuple[int, int]:
    """Return the one size of all images, given `sizes` (N, 2), 0 if unreadable.

    Raises UsageError if sizes differ or no image can be read.
    """
    readable = np.flatnonzero(sizes[:, 0])
    if not len(readable):
        raise UsageError(
            f"source {source.name}: none of its {len(source.images):,} files is an image"
        )
    width, height = sizes[readable[0]].tolist()
    others = readable[(sizes[readable] != (width, height)).any(axis=1)]
    if len(others):
        one, other = source.names[readable[0]], source.names[others[0]]
        raise UsageError(
            f"source {source.name}: images differ in size, {one} has {width}x{height} pixels and"
            f" {other} {'x'.join(map(str, sizes[others[0]]))}: give one with --size,"
            f" at most {'x'.join(map(str, sizes[readable].min(axis=0)))} to enlarge none"
        )
    return width, height
