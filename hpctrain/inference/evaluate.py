"""Exact distributed evaluation: every sample once, the same figures on any number of ranks.

    mpirun -n 4 python -m hpctrain evaluate RUN --data flowers.h5

The split is divided into fixed blocks of samples; each rank computes a contiguous run of blocks.
The sums of all blocks are gathered and added exactly, by math.fsum: the order has no effect.
"""

from __future__ import annotations

import heapq
import json
import math
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path, PurePath
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from hpctrain.config import EvaluateConfig, NetworkConfig, require_trust
from hpctrain.config.functions import source_files
from hpctrain.cores import check_threads
from hpctrain.data.pack import External, Pack, is_pack, read_pack
from hpctrain.data.scale import Scale
from hpctrain.data.split import Bad, Split, describe_first
from hpctrain.errors import RunError, UsageError
from hpctrain.files import write_whole, writing
from hpctrain.inference.network import Answer, Inference, find_model, require_split
from hpctrain.memory import keep_memory
from hpctrain.numerics import torch_flags
from hpctrain.packing.find import find_pack_path
from hpctrain.parallel import mpi
from hpctrain.parallel.device import choose_device
from hpctrain.parallel.hosts import share_cores
from hpctrain.parallel.mpi import Comm, agreed, allgather, on_all, on_root
from hpctrain.report import results
from hpctrain.report.record import without_nonfinite
from hpctrain.tasks.functions import import_own
from hpctrain.tasks.task import ANSWERS, TAKEN
from hpctrain.text import brief, say
from hpctrain.torch_errors import explain_errors
from hpctrain.watchdog import started, waiting

if TYPE_CHECKING:
    from hpctrain.inference.trained import Images, TrainedNetwork


@dataclass(frozen=True)
class Evaluation:
    """The results over one split."""

    rows: int
    loss: float
    accuracy: float | None  # None: the network restores images
    balanced_accuracy: float | None  # the mean recall of the classes that have samples in the split
    means: dict[str, float]  # over samples, of the task's figures
    metrics: dict[str, float]  # figures of --metric
    counts: results.Confusion | None  # by true and predicted class
    mistakes: list[Answer]  # the wrong answers of the largest probability, largest first
    classes: tuple[str, ...]  # names of the K classes

    @property
    def confusion(self) -> np.ndarray | None:
        """The matrix (K, K) int64: class i predicted as class j; None for over 2,048 classes."""
        return None if self.counts is None else self.counts.matrix

    def figures(self, balanced: bool = True) -> dict[str, Any]:
        """Return the figures as they are recorded and written; `balanced`: that accuracy, too."""
        own = {"metrics": self.metrics} if self.metrics else {}
        figures = {"rows": self.rows, **self.means, "accuracy": self.accuracy, **own}
        return figures | ({"balanced_accuracy": self.balanced_accuracy} if balanced else {})


def evaluate(
    inference: Inference,
    split: Split,
    comm: Comm,
    go_on: Callable[[], bool] = lambda: True,
    kept: int = 0,
) -> Evaluation | None:
    """Evaluate a network in its task over all samples of a split. Collective.

    The result includes the `kept` most confident mistakes, of equal ones the first rows. `go_on` is
    called before each block; if it returns False on any rank, that rank's other blocks are skipped,
    and all ranks return None. Raises RunError on all ranks for samples that are corrupt or not
    finite, and UsageError if the metric did not name the same figures for all blocks.
    """
    task, blocks = inference.task, inference.blocks(len(split))
    numbers = range(blocks * comm.rank // comm.size, blocks * (comm.rank + 1) // comm.size)
    counts, sums, bad, mistakes = results.Confusion(task.classes), [], Bad(), list[Answer]()
    most_confident = partial(heapq.nsmallest, kept, key=lambda each: (-each.probability, each.row))
    with on_all(comm):
        compute = partial(task.evaluate, inference.model)
        for block, found in inference.outputs(split, numbers, compute, go_on):
            bad |= block.bad
            if task.classes and block.labels is not None:
                answers, sure = found.pop(ANSWERS)
                answers = answers.astype(np.int64)
                counts.add(block.labels, answers)
                mistakes += block.answers(answers, sure, answers != block.labels)
                mistakes = most_confident(mistakes)
            sums.append({name: pair.tolist() for name, pair in found.items()})
    parts = allgather(comm, (sums, bad, mistakes))
    if text := describe_first(part[1] for part in parts):
        raise agreed(RunError(text))
    of_blocks = [each for part in parts for each in part[0]]
    if len(of_blocks) < blocks:
        return None
    if (own := task.metric) and len({frozenset(each) for each in of_blocks}) > 1:
        text = "did not give the same figures for each part of the split"
        raise agreed(UsageError(f"{own.setting} {text}"))
    if task.classes:
        with waiting():
            comm.Allreduce(mpi.MPI.IN_PLACE, counts.counts)
    figures = {}
    for name in of_blocks[0]:
        total, weight = map(math.fsum, zip(*(each[name] for each in of_blocks), strict=True))
        figures[name] = total / weight if weight else math.nan
    true, _, right = counts.by_class()
    recalls = right[true > 0] / true[true > 0]
    return Evaluation(
        rows=len(split),
        loss=figures["loss"],
        accuracy=float(right.sum()) / len(split) if task.classes else None,
        balanced_accuracy=float(recalls.mean()) if task.classes else None,
        means={name: value for name, value in figures.items() if name in TAKEN},
        metrics={name: value for name, value in figures.items() if name not in TAKEN},
        counts=counts if task.classes else None,
        mistakes=most_confident([each for part in parts for each in part[2]]),
        classes=split.pack.classes,
    )


# The subcommand


def main(settings: EvaluateConfig, comm: Comm) -> int:
    """``hpctrain evaluate``: loss, accuracy, per-class table, confusion matrix. Collective."""
    started("reading the network")
    evaluate_saved(settings, comm, printed=True)
    return 0


@contextmanager
def open_network(settings: NetworkConfig, comm: Comm) -> Iterator[TrainedNetwork]:
    """Load the network that the settings name onto this rank's device. Collective.

    In the block, torch has the settings of its precision.
    """
    from hpctrain.inference.trained import TrainedNetwork  # imports Pillow

    path = on_root(comm, find_model, settings.run, settings.runs_dir, settings.best)
    keep_memory()
    cores = share_cores(comm)
    threads = settings.threads or cores.threads
    torch.set_num_threads(threads)  # launchers set 1 or all
    with on_all(comm):
        check_threads(threads)
        device = choose_device(settings.device, mpi.comm_of_host(comm).rank)
        network = TrainedNetwork(path, device, settings.trust_code)
    network.decoders = cores.decoding_threads(device.type)
    if code := source_files({"model": network.metadata["model"]}):
        mpi.check_equal_on_all(comm, code)
    task, rows = network.inference.task, settings.batch_size or network.inference.rows
    task = replace(task, precision=settings.precision or task.precision)
    network.inference = network.inference._replace(task=task, rows=rows)
    # With algorithms chosen by timing, the figures would depend on the ranks.
    smaller = explain_errors(RunError, "a smaller --batch-size needs less")
    with torch_flags(task.precision, benchmark=False), smaller:
        yield network


def open_split(network: TrainedNetwork, settings: NetworkConfig, comm: Comm) -> Split:
    """Open the split of --data, by default of the pack of training. Collective.

    Raises UsageError if there is none, or if the pack is not like the one of training.
    """

    def find_pack() -> Pack:
        known = network.metadata
        if not settings.data and not Path(known["pack"]).is_file():
            what = f"the pack that {network.path} was trained on, {known['pack']},"
            raise UsageError(f"{what} is gone: give --data")
        path = find_pack_path(settings.data or known["pack"], settings.cache_dir)
        pack = read_in_scale(path, known["external"], network.scale)
        require_split(pack, settings.split)
        for what, here, trained in (
            ("images of shape", pack.image_shape, network.image_shape),
            ("classes", pack.classes, network.classes),
            ("uuid", pack.uuid, pack.uuid if settings.data else known["pack_uuid"]),
        ):
            if here != trained:
                raise UsageError(
                    f"{pack.path} is not the pack that {network.path} was trained on, nor like it:"
                    f" {what} {brief(here)}, not {brief(trained)}; give --data"
                )
        return pack

    pack = on_root(comm, find_pack)
    with on_all(comm):
        return Split(pack, settings.split, network.decoders)


def read_in_scale(path: Path, external: dict[str, Any] | None, scale: Scale) -> Pack:
    """Open a pack, or an `external` file, so that its values are scaled as those of a network.

    Raises UsageError if their scale cannot be known.
    """
    if external is None or is_pack(path):
        pack = read_pack(path)
    else:
        from hpctrain.data.external import read_external  # imports h5py

        pack = read_external(path, External(**external))
    stored = pack.scale
    try:
        divisor = scale.divisor_for(stored.dtype, stored.low, stored.high)
    except UsageError as error:
        raise UsageError(f"{pack.path}: {error}") from None
    if pack.external is None:
        if divisor != stored.divisor:
            bytes_of = f"{pack.path} is a pack, whose bytes are divided by 255"
            raise UsageError(f"{bytes_of}, and the training was on {scale}: give an HDF5 file")
        return pack
    here = stored._replace(divisor=divisor)
    if here.is_unlike(scale):
        say(f"{pack.path} holds {here}; the training was on {scale}", sys.stderr)
    if divisor == stored.divisor:
        return pack
    return read_external(path, External(**pack.external)._replace(max_value=divisor))


def evaluate_saved(settings: EvaluateConfig, comm: Comm, printed: bool = False) -> Evaluation:
    """Evaluate a saved network, and write the files that the settings ask for. Collective.

    Tables are `printed` before, so that a full disk does not lose what was computed.
    """
    with open_network(settings, comm) as network:
        inference, path = network.inference, network.path
        if settings.mistakes and not inference.task.classes:
            text = "--mistakes shows wrong classes, and this network restores images"
            raise agreed(UsageError(text))
        own = {n: getattr(settings, n) or network.metadata[n] for n in ("loss", "metric")}
        with open_split(network, settings, comm) as split:
            with on_all(comm):
                untrusted = {name: own[name] for name in own if not getattr(settings, name)}
                require_trust(untrusted, path, settings.trust_code)
                of_user: Any = {name: import_own(own[name], f"--{name}") for name in own}
            if code := source_files(own):
                mpi.check_equal_on_all(comm, code)
            inference = inference._replace(task=replace(inference.task, **of_user))
            result = evaluate(inference, split, comm, kept=settings.mistakes)
            assert result is not None  # no block was skipped

            def write() -> None:
                if printed:
                    loss = "loss" if own["loss"] else "mean squared error"
                    of_split = result.counts, result.classes, settings.split, loss
                    results.print_evaluation(result.figures(), *of_split)
                if result.mistakes:
                    picture = picture_path(settings.output, path.with_name("mistakes.png"))
                    lines = draw_answers(picture, split, result.mistakes, result.classes)
                    total = result.rows - round(result.rows * (result.accuracy or 0))
                    last = f"{picture}: the {len(lines):,} most confident of {total:,} mistakes"
                    say("\n".join([*lines, last]))
                elif settings.mistakes:
                    say(f"{settings.split}: no mistakes to draw")
                if settings.output:
                    what = result, split.pack, path, settings.split
                    write_evaluation(Path(settings.output), *what)

            on_root(comm, write)
    return result


def draw_answers(
    path: Path, source: Split | Images, answers: Sequence[Answer], classes: Sequence[str]
) -> list[str]:
    """Write a picture of images of `source`, as they are stored, each above its answer.

    Captions are the image's name, the true class if it is known, and the predicted class and its
    probability; these two are red if the answer is wrong. Returns them, one line for each image.
    """
    rows = np.array([each.row for each in answers])
    images, captions, wrong = np.empty((len(rows), *source.image_shape), source.dtype), [], []
    source.gather(rows, images, bad=Bad())
    for number, (row, label, prediction, probability) in enumerate(answers):
        true = () if label is None else (f"true: {classes[label]}",)
        answer = f"answer: {classes[prediction]}", f"{100 * probability:.1f} %"
        captions.append((source.source_of(row) or f"row {row}", *true, *answer))
        wrong += [number] * (label not in (None, prediction))
    short = [(PurePath(name).name, *answer) for name, *answer in captions]
    results.write_image(path, results.draw_captioned(images, short, wrong))
    return [", ".join(caption) for caption in captions]


def picture_path(output: str | None, default: Path) -> Path:
    """Return the name of the picture beside the file --output, or `default` if there is none."""
    if output in (None, "-"):
        return default
    path = Path(str(output))
    is_table = path.suffix.lower() in (".csv", ".json")
    return path.with_suffix(".png") if is_table else Path(f"{path}.png")


def write_evaluation(path: Path, result: Evaluation, pack: Pack, model: Path, split: str) -> None:
    """Write the results as JSON, for --output and for a run's folder. Raises RunError."""
    figures = {
        "model": str(model),
        "pack": pack.path,
        "pack_uuid": pack.uuid,
        "split": split,
        **result.figures(),
        "classes": list(result.classes),
        **(result.counts.as_json() if result.counts else {"confusion": None}),
    }
    with writing(path):
        write_whole(path, json.dumps(without_nonfinite(figures), indent=1) + "\n")
