"""Classify image files, or a split of a pack, into one CSV.

    mpirun -n 4 python -m hpctrain predict RUN photos/ --output answers.csv

Images are divided into fixed blocks as in evaluation, so the predictions do not depend on the
number of ranks; rank 0 receives them block by block, in order, and writes each at once.
"""

from __future__ import annotations

import sys
import warnings
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import ExitStack, closing
from pathlib import Path
from typing import NamedTuple

import numpy as np

from hpctrain.config import PredictConfig
from hpctrain.data.split import Split
from hpctrain.errors import Failure, RunError, UsageError
from hpctrain.inference.blocks import (
    Classified,
    Read,
    Unusable,
    classify_blocks,
    describe_unusable,
    predict_blocks,
)
from hpctrain.inference.gallery import Answer, draw_answers, draw_rows, picture_path
from hpctrain.inference.image_files import file_reader, list_images
from hpctrain.inference.network import Network
from hpctrain.inference.opening import open_network, open_pack_for
from hpctrain.parallel.device import torch_settings
from hpctrain.parallel.mpi import Comm, agreed, allgather, on_all, on_root, start_mpi
from hpctrain.report.pictures import write_image
from hpctrain.report.tables import open_predictions
from hpctrain.text import say
from hpctrain.watchdog import started, waiting


def main(settings: PredictConfig) -> int:
    """``hpctrain predict``: predict the class of every image. Collective."""
    comm = start_mpi()
    started("reading the network")
    network = open_network(settings, comm)
    with torch_settings(network.precision, benchmark=False):
        return answer(network, settings, comm)


class PredictionInput(NamedTuple):
    """The images to be classified: image files, or the samples of a split."""

    names: Sequence[object]  # by row
    columns: tuple[str, ...]  # of the CSV file that say which image it is
    name: Callable[[int], tuple[str, ...]]  # what they say of a row
    read: Read
    dtype: np.dtype
    read_labels: Callable[[np.ndarray], np.ndarray] | None = None  # of rows (n,); None: no labels


def answer(network: Network, settings: PredictConfig, comm: Comm) -> int:
    """Run the network on image files or a split, and write its output. Collective."""
    restores = network.saved.metadata.get("task") == "denoise"
    if restores and not settings.images:
        raise agreed(UsageError("this network restores images: name image files"))
    if restores and settings.figure:
        raise agreed(UsageError("--figure shows classes, and this network restores images"))
    if not settings.images:
        return classify(network, images_of_split(network, settings, comm), settings, comm)
    files = on_root(comm, list_images, settings.images)
    warnings.filterwarnings("ignore", module=r"PIL\.")  # about unusual metadata
    how = file_reader(network.saved, files), np.dtype(np.uint8)
    images = PredictionInput(files, ("file",), lambda row: (str(files[row]),), *how)
    if restores:
        return restore_files(network, files, images.read, settings, comm)
    return classify(network, images, settings, comm)


def images_of_split(network: Network, settings: PredictConfig, comm: Comm) -> PredictionInput:
    """Open the split. Collective. Raises UsageError if its pack does not fit the network."""
    pack = open_pack_for(network.saved, settings, comm)
    with on_all(comm):
        source = Split(pack, settings.split)

    def read(rows: np.ndarray, images: np.ndarray) -> Unusable:
        bad = Unusable()
        source.gather(rows, images, bad=bad)
        return bad

    def name(row: int) -> tuple[str, ...]:
        return (str(row), source.source_of(row))[: len(columns)]

    columns = ("row", "source") if source.source_of(0) else ("row",)
    how = read, source.dtype, source.read_labels
    return PredictionInput(range(len(source)), columns, name, *how)


def classify(network: Network, images: PredictionInput, settings: PredictConfig, comm: Comm) -> int:
    """Classify the images, and write the answers. Collective."""
    with ExitStack() as opened:
        answers = Answers(network, images, settings)
        on_root(comm, answers.open, opened)
        bad = predict(network, images, comm, answers.write)
        on_root(comm, opened.close)
    on_root(comm, answers.draw)
    refuse_unusable(bad, len(images.names), settings.output)
    return 0


class Shown(NamedTuple):
    """The predictions for one block, kept for --figure, which draws some of them."""

    rows: np.ndarray  # (n,)
    labels: np.ndarray | None  # (n,)
    predictions: np.ndarray  # (n,)
    probabilities: np.ndarray  # (n,)


class Answers:
    """Writes predictions to --output block by block, and some to --figure (rank 0)."""

    def __init__(self, network: Network, images: PredictionInput, settings: PredictConfig) -> None:
        self._images, self._settings = images, settings
        self._classes, self._shape = network.saved.classes, network.saved.image_shape
        self._shown: list[Shown] = []  # all blocks

    def open(self, opened: ExitStack) -> None:
        """Open the output, to be closed with `opened`. Raises RunError."""
        true = ("class",) * (self._images.read_labels is not None)
        columns = *self._images.columns, *true
        file = open_predictions(self._settings.output, self._classes, columns)
        self._write = opened.enter_context(file)

    def write(self, block: Classified) -> None:
        """Write the answers to one block. Raises RunError."""
        rows, chances, images = block.rows, block.probabilities, self._images
        labels = images.read_labels(rows) if images.read_labels else None
        self._write([images.name(row) for row in rows.tolist()], labels, chances)
        if self._settings.figure:
            self._shown.append(Shown(rows, labels, chances.argmax(1), chances.max(1)))

    def draw(self) -> None:
        """Draw --figure images at random with their answers, if there are any."""
        answers = self._sample_answers(self._settings.figure)
        if not answers:
            return
        pixels = np.empty((len(answers), *self._shape), self._images.dtype)
        self._images.read(np.array([each.row for each in answers]), pixels)
        names = [Path(self._images.name(each.row)[-1]).name for each in answers]
        output = self._settings.output
        path = picture_path(output, Path("predictions.png"))
        write_image(path, draw_answers(pixels, answers, self._classes, names))
        text = f"{path}: {len(answers):,} images with their answers"
        say(text, sys.stderr if output == "-" else None)

    def _sample_answers(self, count: int) -> list[Answer]:
        ends = np.cumsum([len(block.rows) for block in self._shown], dtype=np.int64)
        answers = []
        for place in draw_rows(range(ends[-1] if self._shown else 0), count):
            number = int(np.searchsorted(ends, place, "right"))
            block, at = self._shown[number], place - int(ends[number])  # from the end of the block
            label = None if block.labels is None else int(block.labels[at])
            found = int(block.predictions[at]), float(block.probabilities[at])
            answers.append(Answer(int(block.rows[at]), label, *found))
        return answers


def predict(
    network: Network, images: PredictionInput, comm: Comm, write: Callable[[Classified], None]
) -> Unusable:
    """Call `write` on rank 0 with every block in order; return the unusable rows. Collective.

    Rank 0 holds at most one received block at a time. Raises the same error on all ranks.
    """
    names, read, dtype = images.names, images.read, images.dtype
    unusable: Unusable = {}
    with closing(classify_blocks(network, names, read, dtype, comm.size, comm.rank)) as own:
        for _ in range(0, len(names), network.block * comm.size):
            with on_all(comm):
                block = next(own, None)
            unusable |= block.unusable if block else {}
            if comm.rank:
                with waiting("rank 0"):
                    comm.send(block, 0)
            on_root(comm, write_all, block, comm, write)
    return gather_unusable(unusable, comm)


def write_all(own: Classified | None, comm: Comm, write: Callable[[Classified], None]) -> None:
    """Write the blocks of all ranks, in the order of the ranks (rank 0). Raises Failure."""
    failure: Failure | None = None
    for rank in range(comm.size):
        with waiting():
            block = comm.recv(source=rank) if rank else own
        try:
            if block is not None and failure is None:
                write(block)
        except Failure as error:  # the other ranks still send their blocks
            failure = error
    if failure:
        raise failure


def gather_unusable(unusable: Unusable, comm: Comm) -> Unusable:
    """Gather the unusable rows of all ranks, in the order of the rows. Collective."""
    return dict(sorted(item for each in allgather(comm, unusable) for item in each.items()))


def refuse_unusable(unusable: Unusable, total: int, output: str | Path) -> None:
    """Raise the same RunError on all ranks if there are unusable rows."""
    if unusable:
        where = "what is printed" if output == "-" else output
        rest = f"; {where} holds the answers to the others"
        raise agreed(RunError(describe_unusable(unusable, total, rest)))


def restore_files(
    network: Network, files: list[Path], read: Read, settings: PredictConfig, comm: Comm
) -> int:
    """Restore every image file with the network, and write PNG files to --output. Collective."""
    folder = Path("restored" if settings.output == PredictConfig.output else settings.output)
    names = on_root(comm, own_names, folder, files)
    unusable: Unusable = {}

    with on_all(comm):
        how = len(files), np.dtype(np.uint8), lambda images: images.permute(0, 2, 3, 1)
        for block, images in predict_blocks(network, read, *how, comm.size, comm.rank):
            unusable.update(block.bad)
            for row, image in zip(block.rows, images, strict=True):
                if row not in block.bad:
                    write_image(folder / names[row], image)
    bad = gather_unusable(unusable, comm)
    if comm.rank == 0:
        say(f"{folder}: {len(files) - len(bad):,} images restored")
    refuse_unusable(bad, len(files), folder)
    return 0


def own_names(folder: Path, files: list[Path]) -> list[str]:
    """Create the folder, and return an output name per file, numbered if files share a name."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise RunError(f"cannot make {folder}: {error.strerror}") from error
    names: dict[str, None] = {}  # in order
    again: Counter[str] = Counter()
    for file in files:
        name = file.stem
        while f"{name}.png" in names:
            again[file.stem] += 1
            name = f"{file.stem}-{again[file.stem] + 1}"
        names[f"{name}.png"] = None
    return list(names)
