"""Classify image files, or a split of a pack, into one CSV.

    mpirun -n 4 python -m hpctrain predict RUN photos/ --output answers.csv

Images are divided into fixed blocks as in evaluation, so the predictions do not depend on the
number of ranks; rank 0 gathers a block from each rank at a time, and writes them in order.
"""

from __future__ import annotations

import random
import sys
import warnings
from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import ExitStack, closing
from pathlib import Path

import numpy as np

from hpctrain.config import PredictConfig
from hpctrain.data.scale import FULL, Scale
from hpctrain.data.split import Bad, Split
from hpctrain.errors import UsageError
from hpctrain.files import writing
from hpctrain.inference.evaluate import draw_answers, open_network, open_split, picture_path
from hpctrain.inference.network import Answer
from hpctrain.inference.trained import (
    Images,
    TrainedNetwork,
    list_images,
    refuse_unusable,
    say_range,
)
from hpctrain.parallel.mpi import Comm, agreed, allgather, on_all, on_root
from hpctrain.report.results import open_predictions, write_image
from hpctrain.text import MOST_NAMED, listed, printable, say
from hpctrain.watchdog import started, waiting


def main(settings: PredictConfig, comm: Comm) -> int:
    """``hpctrain predict``: classify, or restore, every image. Collective."""
    started("reading the network")
    with open_network(settings, comm) as network:
        restores = not network.inference.task.classes
        if restores and (settings.figure or not settings.images):
            text = "this network restores images: name image files, and leave out --figure"
            raise agreed(UsageError(text))
        if settings.images:
            warnings.filterwarnings("ignore", module=r"PIL\.")  # about unusual metadata
            files = on_root(comm, list_images, settings.images)
            images = Images(network, files, network.decoders)
            (restore if restores else classify)(network, images, settings, comm)
        else:
            with open_split(network, settings, comm) as split:
                classify(network, split, settings, comm)
    return 0


def classify(
    network: TrainedNetwork, source: Split | Images, settings: PredictConfig, comm: Comm
) -> None:
    """Write the answers to all images as CSV, and draw --figure of them at random. Collective."""
    inference = network.inference
    output = settings.output
    total = len(source)
    blocks = inference.blocks(total)
    drawn = random.Random(0).sample(range(total), min(settings.figure, total))
    bad = Bad()
    answers = list[Answer]()
    columns: dict[str, Callable[[int], str]] = {"file": source.source_of}
    if isinstance(source, Split):
        columns = {"row": str}
        if source.source_of(0):
            columns["source"] = source.source_of
    header = [*columns]
    if isinstance(source, Split):
        header.append("class")
    mine = range(comm.rank, blocks, comm.size)  # so that the blocks of a round are consecutive
    with ExitStack() as table, closing(inference.answers(source, mine)) as predicted:
        with on_all(comm):
            if comm.rank == 0:
                write = table.enter_context(open_predictions(output, network.classes, header))
        for _ in range(0, blocks, comm.size):
            with on_all(comm):
                part = next(predicted, None)
            with waiting("rank 0"):
                gathered = comm.gather(part)
            with on_all(comm):
                for block, probabilities in filter(None, gathered or ()):
                    names = [tuple(t(row) for t in columns.values()) for row in block.rows.tolist()]
                    write(names, block.labels, probabilities)
                    is_drawn = np.isin(block.rows, drawn)
                    answers += block.answers(
                        probabilities.argmax(1), probabilities.max(1), is_drawn
                    )
                    bad |= block.bad
        if isinstance(source, Images):
            say_losses(source, network.scale, comm)
        with on_all(comm):
            table.close()
            if comm.rank == 0 and output != "-":
                say(f"{output}: {total - len(bad):,} images classified")
            if answers:
                picture = picture_path(output, Path("predictions.png"))
                draw_answers(picture, source, answers, network.classes)
                text = f"{picture}: {len(answers):,} images with their answers"
                say(text, sys.stderr if output == "-" else None)
    where = "what is printed" if output == "-" else output
    rest = f"; {where} holds the answers to the others"
    on_root(comm, conclude, settings, bad, total, rest)


def say_losses(images: Images, scale: Scale, comm: Comm) -> None:
    """Print lines on what images have lost in decoding, and on another range. Collective."""
    losses = sum(map(Counter, allgather(comm, images.count_losses())), Counter())
    lows, highs = zip(*allgather(comm, images.limits), strict=True)
    if comm.rank == 0:
        say_range(images, scale, min(lows), max(highs))
    if losses and comm.rank == 0:
        counts = ", ".join(f"{count:,} {what}" for what, count in losses.items())
        say(f"of {len(images):,} images: {counts}", sys.stderr)


def restore(network: TrainedNetwork, images: Images, settings: PredictConfig, comm: Comm) -> None:
    """Restore every image with the network, and write PNG files to --output. Collective.

    They have the names of the images, all behind their numbers if two are the same, and values as
    the training had them if these are 8 bits, or gray 16 bits; else 255 is 1.0.
    """
    folder = Path("restored" if settings.output == PredictConfig.output else settings.output)
    stems = [Path(file).stem for file in images.names]
    if len({*stems}) < len(stems):
        stems = [f"{number:06}-{stem}" for number, stem in enumerate(stems)]
    names = [f"{stem}.png" for stem in stems]
    inference = network.inference
    bad = Bad()
    mine = range(comm.rank, inference.blocks(len(images)), comm.size)
    with on_all(comm):
        with writing(folder):
            folder.mkdir(parents=True, exist_ok=True)
        for block, restored in inference.answers(images, mine):
            bad |= block.bad
            for row, image in zip(block.rows.tolist(), restored, strict=True):
                write_image(folder / names[row], as_stored(image, network.scale))
    say_losses(images, network.scale, comm)
    bad = {row: why for part in allgather(comm, bad) for row, why in part.items()}
    if comm.rank == 0:
        say(f"{folder}: {len(names) - len(bad):,} images restored{png_note(network)}")
    on_root(comm, conclude, settings, bad, len(names), f"; {folder} holds the others")


def conclude(settings: PredictConfig, bad: Mapping[int, str], total: int, rest: str) -> None:
    """Raise RunError for unusable images, of `total`; with --skip-bad name them, unless all are."""
    if not settings.skip_bad or len(bad) == total:
        refuse_unusable(bad, total, rest)
    elif bad:
        texts = [printable(bad[row], newlines=False) for row in sorted(bad)]
        reasons = listed(texts, MOST_NAMED, "; ")
        say(f"left out, {len(bad):,} of {total:,} images: {reasons}", sys.stderr)


def as_stored(image: np.ndarray, scale: Scale) -> np.ndarray:
    """Return a restored image (H, W, C) as PNG can hold it: stored integers, else as it is."""
    if scale.dtype not in FULL or (scale.dtype == "uint16" and image.shape[2] > 1):
        return image
    values = (image * scale.divisor).round().clip(0, FULL[scale.dtype])
    return values.astype(scale.dtype)


def png_note(network: TrainedNetwork) -> str:
    """Return what the values of restored images mean, if that is not the same for all files."""
    if network.scale.is_bytes:
        return ""
    pixel = as_stored(np.zeros((1, 1, network.image_shape[2]), np.float32), network.scale)
    if pixel.dtype.kind == "f":
        return " as PNG of 8 bits, 255 is 1.0"
    return f" as PNG of {8 * pixel.itemsize} bits, values as in the training"
