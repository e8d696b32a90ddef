"""Choose what all images of a pack have in common: size, number of channels and type.

They follow from the options and from the header of the first file. The others are compared when
they are decoded (`images.OtherKind`): only if one differs, or if files are cut into tiles, are all
headers read.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from contextlib import closing
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from hpctrain.config import PackConfig, Size
from hpctrain.data.images import BadImage, Fit
from hpctrain.data.pack import TYPES
from hpctrain.data.scale import can_hold
from hpctrain.data.tiff import are_other_axes
from hpctrain.data.values import Header, read_header
from hpctrain.errors import UsageError
from hpctrain.packing import workers
from hpctrain.packing.decoding import Conversion
from hpctrain.packing.sources import Source
from hpctrain.packing.tiles import check_tiles, too_small
from hpctrain.packing.workers import RunTasks
from hpctrain.text import listed_names

FLOWERS_SIZE = Size("100x100")
IMAGES_PER_TASK = 64  # of a task that reads; one that decodes has fewer
FIRST_IMAGES = 4  # likewise, where the first header decides
COLOUR = 3  # channels


class Kinds:
    """The types, or numbers of channels, of files: of each, the names of these files."""

    def __init__(self) -> None:
        self.names: dict[Any, list[str]] = {}

    def add(self, kind: Any, name: str) -> None:
        """Add a file."""
        self.names.setdefault(kind, []).append(name)

    def listed(self, word: str) -> str:
        """Return all kinds: "12 with 3 channels (a.png), 2 with 5 channels (b.tif, c.tif)".

        Of the kind of most files, one is named: the others are those to mend.
        """
        most = max(map(len, self.names.values()))
        texts = []
        for kind, names in sorted(self.names.items()):
            examples = names[:1] if len(names) == most else names
            texts.append(f"{len(names):,} {word.format(kind)} ({listed_names(examples)})")
        return ", ".join(texts)


class Choice(NamedTuple):
    """What was chosen, and from what."""

    conversion: Conversion
    headers: list[Header | BadImage]  # of the first files, or of all
    is_final: bool  # whether all headers were read


def check_options(config: PackConfig) -> None:
    """Raise UsageError for options that exclude each other."""
    if config.crop and not config.size:
        raise UsageError("--crop cuts to a size: give one, as in --size 100x100")
    if not config.tiles:
        return
    check_tiles(config.tiles, config.overlap)
    for name in ("size", "crop"):
        if getattr(config, name):
            raise UsageError(
                f"--{name} resizes images, and --tiles cuts them as they are: give one"
            )
    if config.encoding == "jpeg":
        raise UsageError("--encoding jpeg keeps whole files, and --tiles cuts them: give one")


def choose_conversion(
    config: PackConfig, source: Source, run_tasks: RunTasks, is_final: bool = False
) -> Choice:
    """Return the size, channels and type of the pack by the first header, or if `is_final` by all.

    Without --size, all images must have the size of the first readable one; without --channels,
    there are 3 if any image has colour, or as many as all have. Raises UsageError.
    """
    check_options(config)
    size = requested_size(config)
    is_exact = not size and not config.tiles
    is_final = is_final or config.tiles is not None
    width, height = size or (0, 0)
    fit = Fit(
        width=width,
        height=height,
        channels=config.channels or 0,
        crop=config.crop,
        background=config.background,
        exact=is_exact or config.nodata is not None,
        pages=config.pages is not None,
        white=config.max_value,
    )
    first = ""  # name of the image that gives the size
    types = Kinds()
    channels = Kinds()
    axes = Kinds()
    headers: list[Header | BadImage] = []
    rows = np.arange(len(source.names))
    reading = read_source(
        source,
        rows,
        run_tasks,
        workers.apply_to_files,
        partial(read_header, fit=fit),
        step=IMAGES_PER_TASK if is_final else FIRST_IMAGES,
    )
    with closing(reading) as results:
        for name, header in zip(source.names, results, strict=True):
            if isinstance(header, Header) and config.tiles and too_small(header, config.tiles):
                header = BadImage(too_small(header, config.tiles))
            headers.append(header)
            if isinstance(header, BadImage):  # found again when it is decoded
                continue
            if not first:
                first = name
                width = width or header.width
                height = height or header.height
            if is_exact and (header.width, header.height) != (width, height):
                raise UsageError(
                    f"source {source.name}: images differ in size, {first} has {width}x{height}"
                    f" pixels, {name} {header.width}x{header.height}: give one by --size, or cut"
                    " them by --tiles"
                )
            types.add(header.dtype, name)
            channels.add(header.channels, name)
            axes.add(header.axes, name)
            if not is_final:
                break
    if first:
        fit = fit._replace(channels=config.channels or choose_channels(config, source, channels))
    if config.pages:
        fit = fit._replace(axes=choose_axes(source, axes))
    if config.tiles:
        width, height = config.tiles
    return Choice(
        conversion=Conversion(
            fit=fit._replace(width=width, height=height),
            dtype=choose_type(config, source, types),
            is_reduced=config.dtype == "uint8",
            is_tiled=config.tiles is not None,
            is_gray=config.channels is None and fit.channels == 1,
            nodata=None if config.nodata is None else float(config.nodata),
            max_value=config.max_value,
        ),
        headers=headers,
        is_final=len(headers) == len(source.names),
    )


def requested_size(config: PackConfig) -> Size | None:
    """Return the size that images are resized to, or None."""
    if not config.size and not config.tiles and config.source == "flowers":
        return FLOWERS_SIZE
    return config.size


def choose_channels(config: PackConfig, source: Source, channels: Kinds) -> int:
    """Return the number of channels of the pack. Raises UsageError if those of files differ."""
    numbers = {*channels.names}
    if numbers <= {1, COLOUR}:
        return max(numbers)
    if len(numbers) > 1:
        advice = "give files of one kind, or --channels 1 or 3 for pictures"
        if config.pages:
            advice = "give files of equal numbers of pages"
        raise UsageError(
            f"source {source.name}: images differ in channels: {channels.listed('with {:,}')}:"
            f" {advice}"
        )
    if config.encoding == "jpeg":
        raise UsageError(
            f"--encoding jpeg is for 1 or 3 channels, and images have {max(numbers):,}: leave it"
            " out"
        )
    return max(numbers)


def choose_axes(source: Source, axes: Kinds) -> str:
    """Return the axes of the pages, "" if no file states them. Raises UsageError if they differ."""
    stated = sorted({*axes.names} - {""})
    if not stated:
        return ""
    if any(are_other_axes(text, stated[0]) for text in stated):
        raise UsageError(
            f"source {source.name}: images differ in the axes of their pages:"
            f" {axes.listed('as {}')}: write them in one order"
        )
    return str(stated[0])


def choose_type(config: PackConfig, source: Source, types: Kinds) -> str:
    """Return the type of the pack's values. Raises UsageError for types that cannot be joined."""
    names = {*types.names} & {*TYPES}
    if config.dtype == "uint8":
        return check_type("uint8", config)
    if not names:  # no file can be kept: each is refused with the reason
        return "uint8"
    if names == {"uint8", "uint16"}:
        if config.max_value is not None or config.nodata is not None:
            option = "max-value" if config.max_value is not None else "nodata"
            raise UsageError(
                f"source {source.name}: --{option} is one value, and images differ in type:"
                f" {types.listed('of {}')}: give files of one type"
            )
        return check_type("uint16", config)
    if len(names) > 1:
        raise UsageError(
            f"source {source.name}: images differ in type: {types.listed('of {}')}: convert them to"
            " one type"
        )
    return check_type(min(names), config)


def check_type(dtype: str, config: PackConfig) -> str:
    """Return this type of a pack. Raises UsageError if options do not fit to it."""
    if config.encoding == "jpeg" and dtype != "uint8":
        raise UsageError(
            f"--encoding jpeg keeps 8 bits, and images are {dtype}: leave it out, or reduce them by"
            " --dtype uint8"
        )
    if config.nodata is not None and not can_hold(np.dtype(dtype), config.nodata):
        raise UsageError(f"--nodata {config.nodata:g}: no value of {dtype} images is this")
    return dtype


def read_source(
    source: Source,
    rows: np.ndarray,
    run_tasks: RunTasks,
    function: Callable[..., list[Any]],
    *options: Any,
    step: int = IMAGES_PER_TASK,
    columns: Sequence[np.ndarray] = (),
) -> Generator[Any]:
    """Yield the results of a function of slices for these images, `step` of them a task.

    columns: what the function takes besides, each (N,) for all images of the source.
    """
    parts = (rows[at : at + step] for at in range(0, len(rows), step))
    tasks = (
        (source.slices(part), *(column[part].tolist() for column in columns), *options)
        for part in parts
    )
    for results in run_tasks("reading", function, tasks, len(rows)):
        yield from results
