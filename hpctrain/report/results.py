"""Output of evaluate and predict: tables, predictions as CSV, sheets of images."""

from __future__ import annotations

import csv
import math
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import numpy as np

from hpctrain.files import as_text, remove_left_behind, whole_file, writing
from hpctrain.report.outputs import PROGRAM, SOFTWARE
from hpctrain.text import brief, check_output, say

if TYPE_CHECKING:
    from rich.table import Table

SIDE = 84  # approximate pixels of the shorter side: images are enlarged by an integer factor
LARGEST = 240  # pixels of the longer side of an image with a caption
GAP = 4  # pixels between images
LINE = 16  # pixels of a line of a caption
NARROWEST = 120  # pixels of a caption below a narrower image
IN_A_ROW = 8
COLUMNS = (  # of answers
    "file",
    "row",
    "source",
    "class",
    "label",
    "prediction",
    "probability",
)

Row = Sequence[str]


def print_tables(tables: Iterable[Table], text: str) -> None:
    """Print tables, and a line of text below them."""
    from hpctrain.report.console import make_console  # imports rich: most ranks do not need it

    console = make_console()
    for table in tables:
        console.print(table)
    console.print(text, soft_wrap=True)


def answer_columns(classes: Sequence[str]) -> tuple[str, ...]:
    """Return the columns of the classes' probabilities, distinct from all others of a table."""
    return tuple(f"{name} ({k})" if name in COLUMNS else name for k, name in enumerate(classes))


@contextmanager
def open_table(output: str, header: Sequence[str]) -> Iterator[Callable[[Iterable[Row]], None]]:
    """Yield a function that writes rows below a header to a CSV file, or for "-" prints them.

    The file is renamed into place when the block ends without an error. Raises RunError if it
    cannot be written.
    """
    where = "standard output" if output == "-" else output
    with ExitStack() as stack:
        file: Any = SimpleNamespace(write=print_line)
        if output != "-":
            stack.enter_context(writing(output))  # closing the file may fail, even after an error
            remove_left_behind(Path(output))
            binary = stack.enter_context(whole_file(Path(output)))
            file = stack.enter_context(as_text(binary))
        table = csv.writer(file, lineterminator="\n")

        def write(rows: Iterable[Row]) -> None:
            with writing(where):
                table.writerows(rows)

        write([header])
        yield write


def print_line(line: str) -> None:
    """Print a line of a table. Raises OSError if standard output cannot be written."""
    say(line.removesuffix("\n"))
    check_output()


def draw_captioned(
    images: np.ndarray,
    captions: Sequence[tuple[str, ...]],
    marked: Collection[int] = (),
    title: str = "",
) -> np.ndarray:
    """Draw images (n, H, W, 1 or 3) in rows, each above the lines of its caption.

    Images are uint8, or floats in [0, 1]. They are enlarged or shrunk to a readable size. Returns
    an array (h, w, 3) of uint8, with the `title` above all of them. Lines wider than 240 pixels are
    shortened. The last two lines below the images with the numbers `marked` are red.
    """
    from PIL import Image, ImageDraw, ImageFont

    scale = max(1, SIDE // min(images.shape[1:3]))
    tiles = [_image(image.repeat(scale, 0).repeat(scale, 1)) for image in images]
    for tile in tiles:
        tile.thumbnail((LARGEST, LARGEST))  # shrinks larger ones only
    height = tiles[0].height + LINE * len(captions[0]) + 3 * GAP
    font = ImageFont.load_default(size=LINE - 3)
    longest = max(font.getlength(line) for lines in captions for line in lines)
    width = max(tiles[0].width, NARROWEST, min(LARGEST, math.ceil(longest))) + 2 * GAP
    columns = min(len(tiles), IN_A_ROW)
    rows = -(-len(tiles) // columns)
    head = 0
    across = columns * width
    if title:
        head = LINE + GAP
        across = max(across, math.ceil(font.getlength(title)) + 2 * GAP)
    sheet = Image.new("RGB", (across, head + rows * height), "white")
    draw = ImageDraw.Draw(sheet)
    draw.text((GAP, GAP), title, fill="black", font=font)
    for number, (tile, lines) in enumerate(zip(tiles, captions, strict=True)):
        row, column = divmod(number, columns)
        left = GAP + column * width
        top = head + GAP + row * height
        sheet.paste(tile, (left, top))
        for place, line in enumerate(lines):
            shorter = (brief(line, most) for most in range(len(line), 2, -1))
            text = next((t for t in shorter if font.getlength(t) <= width - 2 * GAP), line)
            is_marked = number in marked and place >= len(lines) - 2
            draw.text(
                (left, top + tile.height + GAP + place * LINE),
                text,
                fill="crimson" if is_marked else "black",
                font=font,
            )
    return np.asarray(sheet)


def write_image(path: Path, image: np.ndarray) -> None:
    """Write an image (H, W, C), uint8, gray uint16 or floats in [0, 1], as PNG. Raises RunError."""
    from PIL.PngImagePlugin import PngInfo

    info = PngInfo()
    info.add_text(SOFTWARE, PROGRAM)
    with writing(path), whole_file(path) as file:
        _image(image).save(file, format="PNG", pnginfo=info)


def _image(values: np.ndarray) -> Any:
    """Convert (H, W, C), uint8, gray uint16 or floats in [0, 1], to an image of Pillow."""
    from PIL import Image

    if values.dtype.kind == "f":
        values = (values.clip(0, 1) * 255).round().astype(np.uint8)
    if values.shape[2] != 3:
        values = values[:, :, 0]
    return Image.fromarray(values)
