"""Read TIFF files of any type and number of samples by tifffile, the extra ``tiff``.

It reads what Pillow does not read or reads wrongly: 16-bit values with alpha or further channels,
planes that are stored one after the other, signed and floating-point samples, more than four
samples, and several pages. It is imported when the first such file is read.
"""

from __future__ import annotations

import io
import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from PIL.ExifTags import Base as Tag

from hpctrain.data.formats import MASK, OLD_THUMBNAIL, THUMBNAIL, WHITE_IS_ZERO, count_images
from hpctrain.data.images import BadImage
from hpctrain.data.samples import Samples

if TYPE_CHECKING:
    from tifffile import TiffFile, TiffPage

EXTRA = "to read it, pip install tifffile imagecodecs"
STATING = (  # kinds of metadata that state the order of pages, as tifffile calls them
    *("ome", "imagej", "shaped", "micromanager", "mmstack", "stk", "lsm", "fluoview"),
    *("ndtiff", "scanimage", "sis", "nih"),
)
UNKNOWN_AXES = "QI"  # as tifffile calls axes that a file does not name
PHOTOMETRIC = {0: 1, 1: 1, 2: 3}  # WhiteIsZero, BlackIsZero, RGB -> number of their channels


class PageOrder(NamedTuple):
    """In which order the pages of a file are its channels."""

    pages: list[Any]
    axes: str = ""  # as "Z 5 x C 2", the slowest first; "" if the file does not state them
    is_lost: bool = False  # whether metadata that state an order could not be used


class TiffContents(NamedTuple):
    """What a TIFF holds: size and channels as stored, and the function that reads its values."""

    width: int
    height: int
    channels: int
    dtype: np.dtype
    alpha: int  # ExtraSamples of the only channel beside gray or colours, or 0
    orientation: int
    tags: Mapping[int, Any]  # of the first page
    pages: PageOrder
    read: Callable[[], Samples]


def open_tiff(data: bytes, pages: bool, reason: str = "") -> TiffContents:
    """Open a TIFF file. With `pages`, all pages are read, as channels, and must agree.

    reason: why Pillow does not read it, for the error if tifffile is not installed. Raises BadImage
    and what tifffile raises.
    """
    try:
        import tifffile
    except ImportError:
        raise BadImage(f"{reason or 'several pages in one TIFF'}; {EXTRA}") from None

    with strict_logging():
        file = tifffile.TiffFile(io.BytesIO(data))
        pictures: list[Any] = [page for page in file.pages if is_picture(page)]
        if not pictures:
            raise BadImage("a TIFF that holds thumbnails only")
        first = pictures[0]
        tags = {tag.code: tag.value for tag in first.tags}
        count = max(len(pictures), count_images(tags))
        if count > 1 and not pages:
            raise BadImage(f"{count:,} pages in one TIFF: --pages channels makes channels of them")
        check_pages(pictures)
        height, width, samples = shape_of(first)
        colours = PHOTOMETRIC.get(int(first.photometric))
        if colours is None:
            raise BadImage(f"a TIFF of {first.photometric.name} colours: convert it to RGB or gray")
        extra = [int(sample) for sample in first.extrasamples]
        alpha = extra[0] if len(extra) == 1 and count == 1 and samples == colours + 1 else 0
        orientation = int(tags.get(Tag.Orientation, 1))
    order = order_pages(file, pictures) if count > 1 else PageOrder(pictures)

    def read() -> Samples:
        with strict_logging():
            values = read_values(file, order.pages, count)
        if int(first.photometric) == WHITE_IS_ZERO:
            values = invert(values, first.bitspersample)
        return Samples(
            values=values,
            colours=colours,
            alpha=alpha,
            orientation=orientation if orientation in range(1, 9) else 1,
        )

    return TiffContents(
        width=width,
        height=height,
        channels=samples * count,
        dtype=first.dtype,
        alpha=alpha,
        orientation=orientation,
        tags=tags,
        pages=order,
        read=read,
    )


def is_picture(page: Any) -> bool:
    """Whether a page is neither a thumbnail nor a mask of another one."""
    kind = page.tags.valueof(Tag.NewSubfileType, 0)
    is_thumbnail = page.tags.valueof(Tag.SubfileType) == OLD_THUMBNAIL
    return not (kind & (THUMBNAIL | MASK) or is_thumbnail)


def check_pages(pages: list[Any]) -> None:
    """Raise BadImage unless all pages have one shape and one type that NumPy has."""
    first = pages[0]
    for number, page in enumerate(pages, start=1):
        if page.dtype is None:
            raise BadImage(f"values of {page.bitspersample} bits: convert them to 8, 16 or 32")
        if (page.shape, page.dtype) != (first.shape, first.dtype):
            raise BadImage(
                f"page {number} is {page.dtype} of shape {page.shape}, and page 1 {first.dtype} of"
                f" shape {first.shape}: channels must agree"
            )


def order_pages(file: TiffFile, pages: list[Any]) -> PageOrder:
    """Return the order of the pages that the metadata of the file state.

    Such metadata are those of OME, ImageJ, Micro-Manager, MetaMorph, LSM and others. Without them,
    or if they are damaged or of other pages, the order is that of the file.
    """
    try:
        with strict_logging():
            series = file.series
    except Exception:  # of many types: the metadata are damaged, but the pages are not
        return PageOrder(pages, is_lost=True)
    numbers = [page.index if page else None for images in series for page in images.pages]
    by_number = {page.index: page for page in pages}
    is_stated = any(getattr(file, f"is_{kind}", False) for kind in STATING)
    if {*numbers} != {*by_number} or len(numbers) != len(pages):
        return PageOrder(pages, is_lost=is_stated)
    if is_stated and not {images.kind for images in series} & {*STATING}:
        return PageOrder(pages, is_lost=True)
    ordered = [by_number[number] for number in numbers]
    if len({(images.axes, images.shape) for images in series}) > 1:
        return PageOrder(ordered)
    first = series[0]
    axes = [
        (axis, length)
        for axis, length in zip(first.axes, first.shape, strict=True)
        if axis not in "YX" and length > 1
    ]
    if any(axis in UNKNOWN_AXES for axis, _ in axes):
        return PageOrder(ordered)
    if len(series) > 1:
        axes.insert(0, ("series", len(series)))
    return PageOrder(ordered, " x ".join(f"{axis} {length}" for axis, length in axes))


def are_other_axes(axes: str, expected: str) -> bool:
    """Whether pages of these axes, as of `PageOrder`, have another order than expected.

    The name of a single axis is not compared: a program that knows no channels calls them slices.
    """
    return bool(axes) and axes != expected and (" x " in axes or " x " in expected)


def shape_of(page: TiffPage) -> tuple[int, int, int]:
    """Return (H, W, samples) of a page. Raises BadImage for volumes."""
    if page.imagedepth > 1:
        raise BadImage(f"a volume of {page.imagedepth:,} layers in one page: write them as pages")
    return page.imagelength, page.imagewidth, page.samplesperpixel


def read_values(file: TiffFile, pages: list[Any], count: int) -> np.ndarray:
    """Return the values (H, W, C) of all pages; `count` images may be stored in the first one."""
    height, width, samples = shape_of(pages[0])
    if count > len(pages):
        stack = file.series[0].asarray().reshape(count, height, width, samples)
        return np.moveaxis(stack, 0, -2).reshape(height, width, count * samples)
    images = []
    for page in pages:
        values = page.asarray()
        if "S" in page.axes:
            values = np.moveaxis(values, page.axes.index("S"), -1)
        images.append(values.reshape(height, width, samples))
    return np.concatenate(images, axis=2)


def invert(values: np.ndarray, bits: int) -> np.ndarray:
    """Return values that grow towards white, of those that grow towards black.

    Raises BadImage for types in which no value is white.
    """
    if values.dtype.kind != "u":
        raise BadImage(f"{values.dtype} values that grow towards black (WhiteIsZero): invert them")
    return values.dtype.type(2**bits - 1) - values


@contextmanager
def strict_logging() -> Iterator[None]:
    """Raise BadImage if tifffile reports damage, on which it goes on without the missing part."""
    reports: list[str] = []
    logger = logging.getLogger("tifffile")
    handler = ReportHandler(reports)
    was_propagating = logger.propagate
    logger.addHandler(handler)
    logger.propagate = False
    try:
        yield
    finally:
        logger.removeHandler(handler)
        logger.propagate = was_propagating
    if reports:
        raise BadImage(f"damaged: {reports[0]}")


class ReportHandler(logging.Handler):
    """Collects the texts of errors."""

    def __init__(self, reports: list[str]) -> None:
        super().__init__(logging.ERROR)
        self._reports = reports

    def emit(self, record: Any) -> None:
        """Implement `logging.Handler`."""
        self._reports.append(record.getMessage())
