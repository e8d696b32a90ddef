"""Classify image files, or a split of a pack, into one CSV.

    mpirun -n 4 python -m hpctrain predict RUN photos/ --output answers.csv

Images are divided into fixed blocks as in evaluation, so the predictions do not depend on the
number of ranks; rank 0 gathers them in order and writes the file.
"""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import torch

from hpctrain.config import PredictConfig
from hpctrain.data.checks import find_nonfinite
from hpctrain.data.images import BadImage, read_image
from hpctrain.data.jpeg import decode_threads, map_parts
from hpctrain.data.split import Split
from hpctrain.errors import RunError, UsageError
from hpctrain.inference.evaluate import Block, blocks_of, compute_blocks
from hpctrain.inference.network import Network, first_touch, open_network, open_pack_for
from hpctrain.inference.tasks import network_output
from hpctrain.parallel.device import torch_settings
from hpctrain.parallel.mpi import Comm, agreed, allgather, call_on_all, call_on_root, start_mpi
from hpctrain.report.pictures import write_image
from hpctrain.report.tables import write_predictions
from hpctrain.streams import Upload
from hpctrain.text import printable, say
from hpctrain.watchdog import doing, started, waiting

Unusable = dict[int, str]  # reason by row
# reads rows (n,) into images (n, H, W, C), and returns those that cannot be used
Read = Callable[[np.ndarray, np.ndarray], Unusable]

MOST_NAMED = 20  # unusable images listed in an error
SUFFIXES = (".jpg", ".jpeg", ".png", ".gif", ".bmp", ".tif", ".tiff", ".webp", ".ppm", ".pgm")


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
    if settings.images:
        files = call_on_root(comm, lambda: list_images(settings.images))
        crop = bool(network.saved.metadata.get("provenance", {}).get("fit") == "crop")
        read, dtype = file_reader(network, files, crop), np.dtype(np.uint8)
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
    refuse_unusable(bad, len(names), output)
    return 0


def predict(
    network: Network, names: list[str], read: Read, dtype: np.dtype, comm: Comm
) -> tuple[np.ndarray, Unusable]:
    """Return the class probabilities of all usable rows, and the unusable rows. Collective.

    The probabilities are (N, K) float32 in the order of the rows on rank 0, and empty on the other
    ranks. `names` are the names of all rows.
    """
    unusable: Unusable = {}

    def predict_own() -> list[np.ndarray]:
        found = []
        how = len(names), dtype, comm, lambda scores: scores.softmax(1).float()
        for block, scores in predict_blocks(network, read, *how):
            for row in block.rows[~np.isfinite(scores).all(axis=1)].tolist():
                block.bad.setdefault(row, f"{names[row]}: the network's answer is not finite")
            found.append(scores[~np.isin(block.rows, list(block.bad))])
            unusable.update(block.bad)
        return found

    found = call_on_all(comm, predict_own)
    with waiting():
        parts = comm.gather(found) or []
    blocks = [block for part in parts for block in part]
    probabilities = np.concatenate(blocks) if blocks else np.empty((0, len(network.saved.classes)))
    return probabilities, gather_unusable(unusable, comm)


def predict_blocks(
    network: Network,
    read: Read,
    total: int,
    dtype: np.dtype,
    comm: Comm,
    finish: Callable[[torch.Tensor], torch.Tensor],
) -> Iterator[tuple[Block, np.ndarray]]:
    """Yield this rank's blocks of `total` images of `dtype`, each with its results, (n, ...).

    `finish` converts the network's output to the result. Unusable images are replaced by black
    ones.
    """
    shape = (min(network.block, total), *network.saved.image_shape)
    upload = Upload(shape, dtype, network.device)

    def load(number: int, rows: np.ndarray) -> Block:
        images = upload.buffer(len(rows))
        bad = read(rows, images)
        images[np.isin(rows, list(bad))] = 0
        inputs = upload.make(len(rows), lambda images: network.prepare(images, 0))
        return Block(number, rows, bad, (inputs,))

    def compute(block: Block) -> torch.Tensor:
        return finish(network_output(network.model, block.tensors[0], network.precision))

    def go_on(what: str) -> bool:
        doing(what)
        return True

    parts = blocks_of(total, network.block, comm.size, comm.rank)
    return compute_blocks(load, compute, parts, upload, go_on)


def gather_unusable(unusable: Unusable, comm: Comm) -> Unusable:
    """Gather the unusable rows of all ranks, in the order of the rows. Collective."""
    return dict(sorted(item for each in allgather(comm, unusable) for item in each.items()))


def refuse_unusable(unusable: Unusable, total: int, output: str | Path) -> None:
    """Raise the same RunError on all ranks if there are unusable rows.

    It lists the first MOST_NAMED of them, one per line.
    """
    if not unusable:
        return
    named = list(unusable.values())[:MOST_NAMED]
    more = len(unusable) - len(named)
    named += [f"and {more:,} more"] if more else []
    where = "what is printed" if output == "-" else output
    raise agreed(
        RunError(
            f"{len(unusable):,} of {total:,} images cannot be used; {where} holds the answers to"
            " the others" + "".join(f"\n  {printable(text, newlines=False)}" for text in named)
        )
    )


def restore_files(
    network: Network, files: list[Path], read: Read, settings: PredictConfig, comm: Comm
) -> int:
    """Restore every image file with the network, and write PNG files to --output. Collective."""
    folder = Path("restored" if settings.output == PredictConfig.output else settings.output)
    names = call_on_root(comm, lambda: own_names(folder, files))
    unusable: Unusable = {}

    def restore_own() -> None:
        how = len(files), np.dtype(np.uint8), comm, lambda images: images.permute(0, 2, 3, 1)
        for block, images in predict_blocks(network, read, *how):
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


def list_images(targets: tuple[str, ...]) -> list[Path]:
    """List the given image files, and those in the given folders, each folder in sorted order."""
    files: list[Path] = []
    for target in map(Path, targets):
        if target.is_dir():
            found = sorted(
                p
                for p in target.rglob("*")
                if p.suffix.lower() in SUFFIXES and not p.name.startswith(".")
            )
            if not found:
                raise UsageError(f"{target} holds no image file")
            files += found
        elif target.is_file():
            files.append(target)
        else:
            raise UsageError(f"{target}: there is no such file or folder")
    return files


def file_reader(network: Network, files: list[Path], crop: bool) -> Read:
    """Return a function that decodes files in several threads and resizes them as for the pack."""
    shape, threads = network.saved.image_shape, decode_threads()
    warnings.filterwarnings("ignore", module=r"PIL\.")  # on unusual metadata

    def read(rows: np.ndarray, images: np.ndarray) -> Unusable:
        bad: Unusable = {}

        def decode(part: slice) -> None:
            for image, row in zip(images[part], rows[part].tolist(), strict=True):
                try:
                    image[:] = read_image(str(files[row]), shape, crop)
                except BadImage as error:
                    bad[row] = f"{files[row]} cannot be read as an image: {error}"
                except OSError as error:
                    bad[row] = f"{files[row]} cannot be read: {error.strerror}"

        map_parts(threads, decode, len(rows))
        return bad

    return read
