"""Images of files, arrays and Pillow as the input of a network, and its answers to them.

They are resized as for the pack of the training. Nothing here uses MPI.
"""

from __future__ import annotations

import os
from collections.abc import Generator, Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from PIL import Image
from torch import Tensor

from hpctrain.data.images import SUFFIXES, BadImage, Fit, decode, decode_threads
from hpctrain.data.split import Bad, Split
from hpctrain.errors import RunError, UsageError
from hpctrain.inference.network import Block, Inference
from hpctrain.report.results import answer_columns
from hpctrain.tasks import network_output

if TYPE_CHECKING:
    from hpctrain.inference.network import TrainedNetwork

MOST_NAMED = 20  # unusable images listed in an error


class Images:
    """Images in the size of a network, read by row as the samples of a `Split`."""

    name = "images"

    def __init__(
        self, network: TrainedNetwork, images: Sequence[Path | np.ndarray | Image.Image]
    ) -> None:
        """Take paths, or arrays and images of Pillow, of any sizes. Raises UsageError.

        Arrays are (H, W) or (H, W, C) of uint8, or floats of the network's own size and range.
        """
        height, width, channels = self.image_shape = network.image_shape
        crop = network.metadata["provenance"].get("fit") == "crop"
        self._fit = Fit(width, height, channels, crop)
        others = Path | Image.Image
        given = [x if isinstance(x, others) else as_image(network, x) for x in images]
        types = {x.dtype if isinstance(x, np.ndarray) else np.dtype(np.uint8) for x in given}
        if len(types) > 1:
            raise UsageError(f"images of several types: {', '.join(sorted(map(str, types)))}")
        self._given, self.dtype = given, types.pop() if types else np.dtype(np.uint8)
        self.are_files = bool(given) and isinstance(given[0], Path)
        self.names = [str(x) if self.are_files else f"image {n}" for n, x in enumerate(given)]

    def __len__(self) -> int:
        return len(self._given)

    def source_of(self, index: int) -> str:
        """Return the name of the file, or the number of the image."""
        return self.names[index]

    def read_labels(self, indices: np.ndarray, bad: Bad) -> None:
        """Return None: no labels are known."""

    def gather(self, indices: np.ndarray, out: np.ndarray, *, bad: Bad) -> None:
        """Read rows (n,) in several threads into `out` (n, H, W, C); describe unusable ones."""

        def read(image: np.ndarray, row: int) -> None:
            given: Any = self._given[row]
            try:
                if isinstance(given, Path):
                    given = given.read_bytes()
                elif isinstance(given, np.ndarray) and given.shape != image.shape:
                    given = Image.fromarray(given[..., 0] if given.shape[2] == 1 else given)
                if not isinstance(given, np.ndarray):
                    given = np.frombuffer(decode(given, self._fit), np.uint8).reshape(image.shape)
                image[:] = given
            except (BadImage, OSError) as error:
                bad[row] = f"{self.names[row]} cannot be read as an image: {error}"

        with decode_threads() as threads:
            list(threads.map(read, out, indices.tolist()))


def as_image(network: TrainedNetwork, given: Any) -> np.ndarray:
    """Return (H, W, C): uint8 of any size, or floats of the network's. Raises UsageError."""
    array = np.asarray(given)
    array = array[..., None] if array.ndim == 2 else array
    if array.dtype.kind == "f" and array.shape == network.image_shape:
        low, high = array.min(), array.max()
        if (low < 0 or high > 1) and not network.metadata["external"]:
            raise UsageError(f"values from {low:g} to {high:g}: give uint8, or floats in [0, 1]")
        return array.astype(array.dtype.newbyteorder("="), copy=False)
    if array.dtype == np.uint8 and array.ndim == 3 and array.shape[2] in (1, 3) and array.size:
        return array
    raise UsageError(
        f"an image of {array.dtype} {array.shape}: give uint8 (H, W, C) of any size, C = 1 (gray)"
        f" or 3, or floats of the network's size, {network.image_shape}"
    )


def open_images(network: TrainedNetwork, given: Any) -> Images:
    """Return the images that a caller gave to `TrainedNetwork.predict`. Raises UsageError.

    They are files and folders (str or Path), an array (N, H, W, C), (N, H, W) of gray images or
    one image (H, W, C) or (H, W), an image of Pillow, or a sequence of images of any sizes.
    """
    if isinstance(given, str | os.PathLike | Image.Image):
        given = [given]
    elif hasattr(given, "__array__"):  # also of torch and pandas
        array = np.asarray(given)
        is_batch = array.ndim > 3 or array.dtype.kind in "OU"  # names of files
        if array.ndim == 3 and array.shape[2] not in (1, 3, 4):  # gray images, unless (C, H, W)
            is_batch = not array.shape[0] == network.image_shape[2] == 3
        given = array if is_batch else [array]
    given = list(given)
    files = [isinstance(each, str | os.PathLike) for each in given]
    if any(files) and not all(files):
        raise UsageError("files among arrays: give files only, or arrays only")
    return Images(network, list_images(given) if any(files) else given)


def list_images(targets: Sequence[str | os.PathLike[str]]) -> list[Path]:
    """List the given image files, and those in the given folders, each folder in sorted order."""
    files: list[Path] = []
    for target in map(Path, targets):
        found = [target] * target.is_file()
        if target.is_dir():
            inside = (p for p in target.rglob("*") if p.suffix.lower() in SUFFIXES and p.is_file())
            found = sorted(p for p in inside if not p.name.startswith("."))
        if not found:
            raise UsageError(f"{target}: no such file, and no folder that holds image files")
        files += found
    return files


def refuse_unusable(bad: Bad, total: int, rest: str = "") -> None:
    """Raise RunError if images, of `total`, are unusable; its first line ends with `rest`.

    The first MOST_NAMED reasons follow, one per line.
    """
    if not bad:
        return
    named = [bad[row] for row in sorted(bad)[:MOST_NAMED]]
    if len(bad) > MOST_NAMED:
        named.append(f"and {len(bad) - MOST_NAMED:,} more")
    first = f"{len(bad):,} of {total:,} images cannot be used{rest}"
    raise RunError("\n  ".join([first, *named]))


def classify_blocks(
    inference: Inference, source: Split | Images, numbers: Iterable[int]
) -> Generator[tuple[Block, np.ndarray], None, None]:
    """Yield the blocks of these `numbers`, only with usable rows (n,), and their probabilities.

    These are (n, K) float32. Rows whose probabilities are not finite are unusable, too.
    """

    def compute(inputs: Tensor, *targets: Tensor) -> dict[str, Tensor]:
        scores = network_output(inference.model, inputs, inference.task.precision)
        return {"probabilities": scores.softmax(1).float()}

    for block, found in inference.outputs(source, numbers, compute):
        probabilities = found["probabilities"]
        for row in block.rows[~np.isfinite(probabilities).all(axis=1)].tolist():
            name = source.source_of(row) or f"row {row}"
            block.bad.setdefault(row, f"{name}: the network's answer is not finite")
        usable = ~np.isin(block.rows, list(block.bad))
        labels = None if block.labels is None else block.labels[usable]
        yield block._replace(rows=block.rows[usable], labels=labels), probabilities[usable]


class Predictions(dict[str, np.ndarray]):
    """Answers to images: columns of equal length by name, which pandas.DataFrame takes as they are.

    ``file`` or ``row`` names the image, ``prediction`` is the name of its most probable class,
    ``label`` that class as a number, ``probability`` its probability. Then each class has a column
    with its probability. ``probabilities`` holds these together, (N, K) float32, and ``unusable``
    the reason for each image that was left out, by its name.
    """

    def __init__(
        self,
        names: dict[str, np.ndarray],
        classes: Sequence[str],
        probabilities: np.ndarray,
        unusable: dict[str, str],
    ) -> None:
        labels, columns = probabilities.argmax(1), answer_columns(classes)
        super().__init__(names)
        self["prediction"], self["label"] = np.array(columns)[labels], labels
        self["probability"] = probabilities[np.arange(len(labels)), labels]
        self.update(zip(columns, probabilities.T, strict=True))
        self.probabilities, self.unusable = probabilities, unusable
