"""Classify image files, or a split of a pack, into one CSV.

    mpirun -n 4 python -m hpctrain predict RUN photos/ --output answers.csv

Images are divided into fixed blocks as in evaluation, so the predictions do not depend on the
number of ranks; rank 0 gathers them in order and writes the file.
"""

from __future__ import annotations

import sys
import warnings
from collections import Counter
from pathlib import Path

import numpy as np

from hpctrain.config import PredictConfig
from hpctrain.data.checks import find_nonfinite
from hpctrain.data.split import Split
from hpctrain.errors import RunError, UsageError
from hpctrain.inference.blocks import (
    Read,
    Unusable,
    classify_blocks,
    describe_unusable,
    predict_blocks,
)
from hpctrain.inference.gallery import Answer, draw_answers, draw_rows, picture_path
from hpctrain.inference.image_files import file_reader, list_images
from hpctrain.inference.network import Network
from hpctrain.inference.opening import first_touch, open_network, open_pack_for
from hpctrain.parallel.device import torch_settings
from hpctrain.parallel.mpi import Comm, agreed, allgather, call_on_all, call_on_root, start_mpi
from hpctrain.report.pictures import write_image
from hpctrain.report.tables import write_predictions
from hpctrain.text import say
from hpctrain.watchdog import started, waiting


def main(settings: PredictConfig) -> int:
    """``hpctrain predict``: predict the class of every image. Collective."""
    comm = start_mpi()
    started("reading the network")
    network = open_network(settings, comm)
    with torch_settings(network.precision, benchmark=False):
        return answer(network, settings, comm)


def answer(network: Network, settings: PredictConfig, comm: Comm) -> int:
    """Run the network on image files or a split, and write its output. Collective."""
    restores = network.saved.metadata.get("task") == "denoise"
    if restores and not settings.images:
        raise agreed(UsageError("this network restores images: name image files"))
    if restores and settings.figure:
        raise agreed(UsageError("--figure shows classes, and this network restores images"))
    if settings.images:
        files = call_on_root(comm, lambda: list_images(settings.images))
        read, dtype = file_reader(network.saved, files), np.dtype(np.uint8)
        warnings.filterwarnings("ignore", module=r"PIL\.")  # about unusual metadata
        if restores:
            return restore_files(network, files, read, settings, comm)
        names, labels = [str(f) for f in files], None
    else:
        pack = open_pack_for(network.saved, settings, comm)
        checks = first_touch(pack, comm)
        source = call_on_all(comm, lambda: Split(pack, settings.split, checks=checks))
        names, labels = [str(row) for row in range(len(source.labels))], source.labels
        dtype = source.dtype

        def read(rows: np.ndarray, images: np.ndarray) -> Unusable:
            return find_nonfinite(source, rows, source.gather(rows, images))

    output, classes = settings.output, network.saved.classes
    found, bad = predict(network, names, read, dtype, comm)
    rows = [row for row in range(len(names)) if row not in bad]
    call_on_root(comm, lambda: write_predictions(output, names, labels, rows, found, classes))

    def draw() -> None:
        shown = draw_rows(range(len(rows)), settings.figure)  # places in `rows` and `found`
        if not shown:
            return
        answers = [answer_of(rows[place], labels, found[place]) for place in shown]
        images = np.empty((len(shown), *network.saved.image_shape), dtype)
        read(np.array([each.row for each in answers]), images)
        path = picture_path(output, Path("predictions.png"))
        own = [Path(names[each.row]).name for each in answers]
        write_image(path, draw_answers(images, answers, classes, own))
        text = f"{path}: {len(shown):,} images with their answers"
        say(text, sys.stderr if output == "-" else None)

    call_on_root(comm, draw)
    refuse_unusable(bad, len(names), output)
    return 0


def predict(
    network: Network, names: list[str], read: Read, dtype: np.dtype, comm: Comm
) -> tuple[np.ndarray, Unusable]:
    """Return the class probabilities of all usable rows, and the unusable rows. Collective.

    The probabilities are (N, K) float32 in the order of the rows on rank 0, and empty on the other
    ranks. `names` are the names of all rows.
    """
    found, unusable = call_on_all(
        comm, lambda: classify_blocks(network, names, read, dtype, comm.size, comm.rank)
    )
    with waiting():
        parts = comm.gather(found) or []
    blocks = [block for part in parts for block in part]
    probabilities = np.concatenate(blocks) if blocks else np.empty((0, len(network.saved.classes)))
    return probabilities, gather_unusable(unusable, comm)


def answer_of(row: int, labels: np.ndarray | None, probabilities: np.ndarray) -> Answer:
    """Return the answer to one image from its class probabilities (K,)."""
    best = int(probabilities.argmax())
    return Answer(row, None if labels is None else int(labels[row]), best, probabilities[best])


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
    names = call_on_root(comm, lambda: own_names(folder, files))
    unusable: Unusable = {}

    def restore_own() -> None:
        how = len(files), np.dtype(np.uint8), lambda images: images.permute(0, 2, 3, 1)
        for block, images in predict_blocks(network, read, *how, comm.size, comm.rank):
            unusable.update(block.bad)
            for row, image in zip(block.rows, images, strict=True):
                if row not in block.bad:
                    write_image(folder / names[row], image)

    call_on_all(comm, restore_own)
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
