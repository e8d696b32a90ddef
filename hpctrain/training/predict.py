"""Classify image files, or a split of a pack, into one CSV.

    mpirun -n 4 python -m hpctrain predict RUN photos/ --output answers.csv

Rows are cut into fixed blocks as in evaluation, so the answers do not depend on the number of
ranks; rank 0 gathers them in order and writes the file.
"""

from __future__ import annotations

import csv
import io
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO

import numpy as np
import torch

from hpctrain.config import PredictConfig
from hpctrain.data.finite import nonfinite_rows
from hpctrain.data.images import BadImage, read_image
from hpctrain.data.opened import open_split
from hpctrain.errors import RunError, UsageError
from hpctrain.files import as_text, whole_file
from hpctrain.parallel.device import seed_torch
from hpctrain.parallel.mpi import Comm, agreed, allgather, everywhere, from_root, start_mpi
from hpctrain.parallel.switches import torch_settings
from hpctrain.report.pictures import write_image
from hpctrain.text import csv_cell, printable, say, told_apart
from hpctrain.training.evaluate import block_key, blocks_of
from hpctrain.training.saved import Network, first_touch, open_network, open_pack_for
from hpctrain.training.tasks import network_output
from hpctrain.watchdog import doing, started, waiting

Unusable = dict[int, str]  # by row, why
Load = Callable[[np.ndarray], tuple[torch.Tensor, Unusable]]  # of these rows, the network's input

MOST_NAMED = 20  # images that cannot be used
SUFFIXES = (".jpg", ".jpeg", ".png", ".gif", ".bmp", ".tif", ".tiff", ".webp", ".ppm", ".pgm")


def main(settings: PredictConfig) -> int:
    """``hpctrain predict``: the most probable class of every image. Collective."""
    comm = start_mpi()
    started("reading the network")
    network = open_network(settings, comm)
    with torch_settings(network.precision, by_timing=False):
        return answer(network, settings, comm)


def answer(network: Network, settings: PredictConfig, comm: Comm) -> int:
    """Ask the network about image files or a split, and write what it says. Collective."""
    restores = network.saved.metadata.get("task") == "denoise"
    if restores and not settings.images:
        raise agreed(UsageError("this network restores images: name image files"))
    if settings.images:
        files = from_root(comm, lambda: list_images(settings.images))
        crop = bool(network.saved.metadata.get("provenance", {}).get("fit") == "crop")
        load = file_reader(network, files, crop)
        if restores:
            return restore_files(network, files, load, settings, comm)
        names, labels = [str(f) for f in files], None
    else:
        pack = open_pack_for(network.saved, settings, comm)
        checks = first_touch(pack, comm)
        source = everywhere(comm, lambda: open_split(pack, settings.split, checks=checks))
        names, labels = [str(row) for row in range(len(source.labels))], source.labels

        def load(rows: np.ndarray) -> tuple[torch.Tensor, Unusable]:
            images = np.empty((len(rows), *source.image_shape), source.dtype)  # (n, H, W, C)
            bad = nonfinite_rows(source, rows, source.gather(rows, images))
            images[np.isin(rows, list(bad))] = 0
            return network.prepare(torch.from_numpy(images), 0), bad

    chances, bad = predict(network, names, load, settings, comm)
    classes = network.saved.classes
    rows = [row for row in range(len(names)) if row not in bad]
    from_root(comm, lambda: write_csv(settings.output, names, labels, rows, chances, classes))
    refuse_unusable(bad, len(names), settings.output)
    return 0


def predict(
    network: Network,
    names: list[str],
    load: Load,
    settings: PredictConfig,
    comm: Comm,
) -> tuple[np.ndarray, Unusable]:
    """Class probabilities of all rows that can be used, (N, K) float32 in the order of the rows,
    on rank 0, elsewhere none; and all other rows, of which `names` has the names. Collective.
    """
    unusable: Unusable = {}

    @torch.no_grad()
    def mine() -> list[np.ndarray]:
        found = []
        for number, rows in blocks_of(len(names), network.block, comm.size, comm.rank):
            inputs, bad = load(rows)
            chances = ask(network, number, inputs).softmax(1).float().cpu().numpy()
            for row in rows[~np.isfinite(chances).all(axis=1)].tolist():
                bad.setdefault(row, f"{names[row]}: the network's answer is not finite")
            found.append(chances[~np.isin(rows, list(bad))])
            unusable.update(bad)
        return found

    found = everywhere(comm, mine)
    with waiting():
        parts = comm.gather(found) or []
    blocks = [block for part in parts for block in part]
    chances = np.concatenate(blocks) if blocks else np.empty((0, len(network.saved.classes)))
    return chances, gather_unusable(unusable, comm)


def gather_unusable(unusable: Unusable, comm: Comm) -> Unusable:
    """What all ranks could not use, in the order of the rows. Collective."""
    return dict(sorted(item for each in allgather(comm, unusable) for item in each.items()))


def refuse_unusable(unusable: Unusable, total: int, output: str | Path) -> None:
    """Raise the same RunError on all ranks where there were rows that could not be used; it names
    the first MOST_NAMED of them, a line each.
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


def ask(network: Network, number: int, inputs: torch.Tensor) -> torch.Tensor:
    """The network's output for block `number`, which the random numbers belong to that it draws."""
    doing(f"block {number}")
    seed_torch(block_key(number), network.device)
    return network_output(network.model, inputs, network.precision)


def restore_files(
    network: Network,
    files: list[Path],
    load: Load,
    settings: PredictConfig,
    comm: Comm,
) -> int:
    """Write what the network makes of every file, as PNG, into the folder --output. Collective."""
    folder = Path("restored" if settings.output == PredictConfig.output else settings.output)
    names = from_root(comm, lambda: own_names(folder, files))

    unusable: Unusable = {}

    @torch.no_grad()
    def mine() -> None:
        for number, rows in blocks_of(len(files), network.block, comm.size, comm.rank):
            inputs, bad = load(rows)
            unusable.update(bad)
            images = ask(network, number, inputs)
            for row, image in zip(rows, images.permute(0, 2, 3, 1).cpu().numpy(), strict=True):
                if row not in bad:
                    write_image(folder / names[row], image)

    everywhere(comm, mine)
    unusable = gather_unusable(unusable, comm)
    if comm.rank == 0:
        say(f"{folder}: {len(files) - len(unusable):,} images restored")
    refuse_unusable(unusable, len(files), folder)
    return 0


def own_names(folder: Path, files: list[Path]) -> list[str]:
    """Make the folder; a name for each file's answer, numbered where files share theirs."""
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
    """The image files named, and those in the folders named, each folder in sorted order."""
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


def file_reader(network: Network, files: list[Path], crop: bool) -> Load:
    """How files become the network's input: decoded and resized as they were for the pack; black
    where they cannot be.
    """
    shape = network.saved.image_shape

    def load(rows: np.ndarray) -> tuple[torch.Tensor, Unusable]:
        images, bad = np.zeros((len(rows), *shape), np.uint8), {}
        for image, row in zip(images, rows.tolist(), strict=True):
            try:
                image[:] = read_image(str(files[row]), shape, crop)
            except BadImage as error:
                bad[row] = f"{files[row]} cannot be read as an image: {error}"
            except OSError as error:
                bad[row] = f"{files[row]} cannot be read: {error.strerror}"
        return network.prepare(torch.from_numpy(images), 0), bad

    return load


def write_csv(
    output: str,
    names: list[str],
    labels: np.ndarray | None,
    rows: list[int],
    chances: np.ndarray,
    classes: tuple[str, ...],
) -> None:
    """One line for each of `rows` (n): its name, true class of a split, answer, its probability,
    and all `chances` (n, K).
    """
    names = [names[row] for row in rows]
    labels = None if labels is None else labels[rows]
    try:
        if output == "-":
            lines = io.StringIO()
            _write_lines(lines, names, labels, chances, classes)
            say(lines.getvalue().removesuffix("\n"))
            return
        with (
            whole_file(Path(output)) as binary,
            as_text(binary) as file,
        ):
            _write_lines(file, names, labels, chances, classes)
    except OSError as error:
        raise RunError(f"cannot write {output}: {error.strerror}") from error
    say(f"{output}: {len(names):,} images classified")


def _write_lines(
    file: IO[str],
    names: list[str],
    labels: np.ndarray | None,
    chances: np.ndarray,
    classes: tuple[str, ...],
) -> None:
    writer = csv.writer(file, lineterminator="\n")
    true = [] if labels is None else ["class"]
    first = "file" if labels is None else "row"
    classes = told_apart(classes)
    writer.writerow(map(csv_cell, [first, *true, "answer", "probability", *classes]))
    writer.writerows(map(csv_cell, line) for line in _lines(names, labels, chances, classes))


def _lines(
    names: list[str], labels: np.ndarray | None, chances: np.ndarray, classes: tuple[str, ...]
) -> Iterator[list[str]]:
    for row, (name, chance) in enumerate(zip(names, chances, strict=True)):
        best = int(chance[: len(classes)].argmax())
        true = [] if labels is None else [classes[labels[row]]]
        figures = [f"{p:.6f}" for p in chance[: len(classes)]]
        yield [name, *true, classes[best], f"{chance[best]:.6f}", *figures]
