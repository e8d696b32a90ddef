"""Classify image files, rows of HDF5 files, or a split of a pack, into one CSV or HDF5 file.

    mpirun -n 4 python -m hpctrain predict RUN photos/ --output answers.csv

Images are divided into fixed blocks as in evaluation, so the predictions do not depend on the
number of ranks; rank 0 gathers a block from each rank at a time, and writes them in order.
"""

from __future__ import annotations

import random
import sys
import warnings
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, closing, contextmanager
from pathlib import Path

import numpy as np

from hpctrain.config import PredictConfig
from hpctrain.data.scale import Scale, is_nodata
from hpctrain.data.split import Bad, Split
from hpctrain.errors import UsageError
from hpctrain.files import whole_file, writing
from hpctrain.inference.evaluate import draw_answers, open_network, open_split, picture_path
from hpctrain.inference.rows import Dataset, Part
from hpctrain.inference.trained import (
    PICTURE_CHANNELS,
    Images,
    TrainedNetwork,
    list_files,
    refuse_unusable,
    say_losses,
    say_range,
)
from hpctrain.parallel.mpi import Comm, agreed, allgather, on_all, on_root
from hpctrain.report.outputs import check_not_read, check_picture, output_name
from hpctrain.report.results import open_table, write_image
from hpctrain.tasks.tally import Block
from hpctrain.tasks.task import Caption, Task
from hpctrain.text import MOST_NAMED, counted, listed, printable, say
from hpctrain.watchdog import started, waiting

PICTURE = Path("predictions.png")  # of --figure, if the table is printed
HDF5_SUFFIXES = (".h5", ".hdf5")  # of --output
WriteAnswers = Callable[[Block, np.ndarray], None]  # the usable rows of a block, and their answers


def main(config: PredictConfig, comm: Comm) -> int:
    """``hpctrain predict``: classify, or restore, every image. Collective."""
    started("reading the network")
    with open_network(config, comm) as network:
        task = network.inference.task
        if task.gives_images and (config.figure or not config.files):
            raise agreed(
                UsageError(f"this network {task.facts.use}: name files, and leave out --figure")
            )
        if task.gives_images and is_hdf5_name(config.output):
            raise agreed(
                UsageError(
                    f"--output {config.output}: this network {task.facts.use}: give a folder for"
                    " them"
                )
            )
        if config.files:
            ignored = config.given("--data") or config.given("--split")
            if ignored:
                raise agreed(
                    UsageError(
                        f"{ignored} beside files: leave it out, or the files; all are predicted"
                    )
                )
            warnings.filterwarnings("ignore", module=r"PIL\.")  # about unusual metadata
            dataset = Dataset(config.images, config.layout)
            unusable: dict[str, str] = {}  # on rank 0: HDF5 files
            skipped = unusable if config.skip_bad else None
            files = on_root(comm, list_files, network, config.files, dataset, skipped)
            if unusable:
                say_left_out(counted(len(unusable), "file"), unusable.values())
            with on_all(comm):
                images = Images(network, files, network.decoders)
            write_answers = write_images if task.gives_images else write_table
            with closing(images):
                write_answers(network, images, paths_of(files), config, comm)
        else:
            with open_split(network, config, comm) as split:
                write_table(network, split, split.pack.sizes, config, comm)
    return 0


def paths_of(files: Sequence[Path | Part]) -> Iterator[str | Path]:
    """Yield the paths of all files."""
    for file in files:
        if isinstance(file, Path):
            yield file
        else:
            yield from file.paths


def check_outputs(config: PredictConfig, read: Iterable[str | Path]) -> None:
    """Raise UsageError if the files of a table would replace others; see report/outputs.py."""
    outputs = [Path(config.output)]
    if config.figure:
        picture = picture_path(config.output, PICTURE)
        check_picture(picture)
        outputs.append(picture)
    check_not_read(outputs, read)


def write_table(
    network: TrainedNetwork,
    source: Split | Images,
    read: Iterable[str | Path],
    config: PredictConfig,
    comm: Comm,
) -> None:
    """Write a table of the answers to all images; draw --figure of them at random. Collective.

    Files that are `read` are not replaced.
    """
    inference = network.inference
    task = inference.task
    output = config.output
    total = len(source)
    blocks = inference.blocks(total)
    on_root(comm, check_outputs, config, [network.path, *read])
    written = output if output == "-" else output_name(Path(output))
    drawn = random.Random(0).sample(range(total), min(config.figure, total))
    bad = Bad()
    captions = list[Caption]()
    mine = range(comm.rank, blocks, comm.size)  # so that the blocks of a round are consecutive
    with ExitStack() as table, closing(inference.answers(source, mine)) as predicted:
        with on_all(comm):
            if comm.rank == 0:
                write = table.enter_context(open_answers(output, network, source))
        for _ in range(0, blocks, comm.size):
            with on_all(comm):
                part = next(predicted, None)
            with waiting("rank 0"):
                gathered = comm.gather(part)
            with on_all(comm):
                for block, answers in filter(None, gathered or ()):
                    write(block, answers)
                    captions += task.captions(block, answers, np.isin(block.rows, drawn))
                    bad |= block.bad
        if isinstance(source, Images):
            say_changes(source, network.scale, comm)
        with on_all(comm):
            table.close()
            if comm.rank == 0 and output != "-":
                say(f"{written}: {total - len(bad):,} images {task.facts.answered}")
            if captions:
                picture = picture_path(output, PICTURE)
                written = output_name(picture)
                draw_answers(picture, source, captions, network)
                say(
                    f"{written}: {len(captions):,} images with their answers",
                    sys.stderr if output == "-" else None,
                )
    place = "what is printed" if output == "-" else output
    on_root(comm, report_unusable, config, bad, total, f"{place} holds the answers to the others")


def open_answers(
    output: str, network: TrainedNetwork, source: Split | Images
) -> AbstractContextManager[WriteAnswers]:
    """Open the file of answers, CSV or HDF5 by its name; "-" prints a table."""
    task = network.inference.task
    columns: dict[str, Callable[[int], str]]  # of an image
    if isinstance(source, Images):
        columns = source.columns
    else:
        columns = {"row": str}
        if source.source_of(0):
            columns["source"] = source.source_of
    if not is_hdf5_name(output):
        return open_csv(output, task, columns, has_targets=isinstance(source, Split))
    from hpctrain.inference.hdf5_answers import open_hdf5  # imports h5py

    names = network.columns or network.classes
    arrays = task.arrays(np.empty((0, task.outputs(len(names))), np.float32))
    if isinstance(source, Split) and task.target_columns():
        arrays["targets"] = source.read_targets(np.empty(0, np.int64))
    return open_hdf5(output, task, len(source), arrays, columns, names)


def is_hdf5_name(output: str) -> bool:
    """Whether --output names an HDF5 file."""
    return Path(output).suffix.lower() in HDF5_SUFFIXES


@contextmanager
def open_csv(
    output: str, task: Task, columns: Mapping[str, Callable[[int], str]], has_targets: bool
) -> Iterator[WriteAnswers]:
    """Yield a function that writes the answers to a block into a CSV file. Raises RunError."""
    targets = task.target_columns() if has_targets else ()
    header = [*columns, *targets, *task.columns()]
    with open_table(output, header) as write:
        yield lambda block, answers: write(table_rows(task, block, columns.values(), answers))


def table_rows(
    task: Task, block: Block, names: Collection[Callable[[int], str]], answers: np.ndarray
) -> Iterator[list[str]]:
    """Yield a row for each image of a block: its `names`, its target if it is known, its answer."""
    for number, row in enumerate(block.rows.tolist()):
        cells = [name(row) for name in names]
        if block.targets is not None:
            cells += task.target_cells(block.targets[number])
        yield [*cells, *task.cells(answers[number])]


def say_changes(images: Images, scale: Scale, comm: Comm) -> None:
    """Print lines on what images have lost in decoding, and on another range. Collective."""
    by_rank = allgather(comm, (images.count_losses(), *images.ranges))
    if comm.rank != 0:
        return
    counts, lows, highs = zip(*by_rank, strict=True)
    say_range(images, scale, np.min(lows, axis=0), np.max(highs, axis=0))
    say_losses(images, sum(map(Counter, counts), Counter()))


def write_images(
    network: TrainedNetwork,
    images: Images,
    read: Iterable[str | Path],
    config: PredictConfig,
    comm: Comm,
) -> None:
    """Restore every image with the network, and write files of them to --output. Collective.

    They have the names of the images, as new-5 for row 5 of new.h5, all behind their numbers if two
    are the same, and values as stored for the training, also those that are no data: PNG files
    where PNG can hold these, else .npy files (H, W, C). Files that are `read` are not replaced.
    """
    folder = Path("restored" if config.output == PredictConfig.output else config.output)
    names = images.columns
    places = [names[name] for name in ("split", "row") if name in names]
    stems = [
        "-".join([Path(names["file"](row)).stem, *(place(row) for place in places)])
        for row in range(len(images))
    ]
    if len({*stems}) < len(stems):
        stems = [f"{number:06}-{stem}" for number, stem in enumerate(stems)]
    inference = network.inference
    scale = network.scale
    suffix = ".png" if is_png(scale.dtype, network.image_shape[2]) else ".npy"
    paths = [folder / f"{stem}{suffix}" for stem in stems]
    on_root(comm, check_not_read, paths, [network.path, *read])
    replaced = on_root(comm, lambda: sum(path.exists() for path in paths))
    bad = Bad()
    mine = range(comm.rank, inference.blocks(len(images)), comm.size)
    with on_all(comm):
        with writing(folder):
            folder.mkdir(parents=True, exist_ok=True)
        for block, restored in inference.answers(images, mine):
            bad |= block.bad
            stored = as_stored(restored, scale)
            if scale.nodata is not None:
                copy_nodata(images, block.rows, stored, scale.nodata)
            for row, image in zip(block.rows.tolist(), stored, strict=True):
                write_stored(paths[row], image)
    say_changes(images, scale, comm)
    bad = {row: why for part in allgather(comm, bad) for row, why in part.items()}
    if comm.rank == 0:
        count = len(stems) - len(bad)
        note = ""
        if not scale.is_bytes or suffix == ".npy":
            note = f" as {suffix} files of {scale.dtype}, values as in the training"
        if replaced:
            note += f", in place of {counted(replaced, 'earlier file')}"
        say(f"{folder}: {count:,} images {inference.task.facts.answered}{note}")
    on_root(comm, report_unusable, config, bad, len(stems), f"{folder} holds the others")


def report_unusable(config: PredictConfig, bad: Mapping[int, str], total: int, hint: str) -> None:
    """Raise RunError for unusable images, of `total`; with --skip-bad name them, unless all are."""
    if not config.skip_bad or len(bad) == total:
        refuse_unusable(bad, total, f"; {hint}")
    elif bad:
        reasons = [bad[row] for row in sorted(bad)]
        say_left_out(f"{len(bad):,} of {total:,} images", reasons)


def say_left_out(count: str, reasons: Collection[str]) -> None:
    """Print a line on what --skip-bad has left out, such as "2 of 31 images"."""
    texts = [printable(reason, newlines=False) for reason in reasons]
    say(f"left out, {count}: {listed(texts, MOST_NAMED, '; ')}", sys.stderr)


def is_png(dtype: str, channels: int) -> bool:
    """Whether PNG files, as Pillow writes them, hold images of this type with all their values."""
    if dtype == "uint16":
        return channels == 1
    return dtype == "uint8" and channels in PICTURE_CHANNELS


def as_stored(images: np.ndarray, scale: Scale) -> np.ndarray:
    """Return restored images (n, H, W, C) with values as stored for the training."""
    values = images * scale.divisor
    dtype = np.dtype(scale.dtype)
    if dtype.kind in "iu":
        limits = np.iinfo(dtype)
        values = values.round().clip(limits.min, limits.max)
    return values.astype(dtype)


def copy_nodata(images: Images, rows: np.ndarray, restored: np.ndarray, nodata: float) -> None:
    """Set restored images (n, H, W, C) to `nodata` where those of these rows (n,) hold no data."""
    before = np.empty(restored.shape, images.dtype)
    images.gather(rows, before, bad=Bad())
    restored[is_nodata(before, nodata)] = nodata


def write_stored(path: Path, image: np.ndarray) -> None:
    """Write an image (H, W, C) of stored values as a PNG or .npy file. Raises RunError."""
    if path.suffix == ".png":
        write_image(path, image)
        return
    with writing(path), whole_file(path) as file:
        np.save(file, image)
