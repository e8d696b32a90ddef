"""Exact distributed evaluation: every sample once, the same figures on any number of ranks.

    mpirun -n 4 python -m hpctrain evaluate RUN --data flowers.h5

The split is divided into fixed blocks of samples; each rank computes a contiguous run of blocks.
The sums of all blocks are gathered and added exactly, by math.fsum: the order has no effect.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path, PurePath
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch

from hpctrain.config import (
    EvaluateConfig,
    NetworkConfig,
    PredictConfig,
    require_trust,
)
from hpctrain.data.pack import External, Pack, is_pack, read_pack
from hpctrain.data.split import Bad, Split, describe_first
from hpctrain.errors import RunError, UsageError
from hpctrain.inference.network import Inference, TrainedNetwork, find_model, require_split
from hpctrain.packing.builtin import locate
from hpctrain.parallel.device import torch_settings
from hpctrain.parallel.mpi import Comm, agreed, allgather, fair_threads, on_all, on_root
from hpctrain.parallel.reduce import allreduce
from hpctrain.parallel.transport import open_device
from hpctrain.report.results import Confusion, print_evaluation, write_json
from hpctrain.tasks import ANSWERS, TAKEN, import_own
from hpctrain.text import brief, say
from hpctrain.watchdog import started

if TYPE_CHECKING:
    from hpctrain.inference.images import Images


class Answer(NamedTuple):
    """The network's answer to one image."""

    row: int  # of the split, or of the list of files
    label: int | None  # true class, if known
    prediction: int  # class with the largest probability
    probability: float


@dataclass(frozen=True)
class Evaluation:
    """The results over one split."""

    rows: int
    means: dict[str, float]  # over samples, of the task's figures
    metrics: dict[str, float]  # figures of --metric
    counts: Confusion | None  # by true and predicted class
    mistakes: list[Answer]  # the wrong answers of the largest probability, largest first
    classes: tuple[str, ...]  # names of the K classes

    @property
    def loss(self) -> float:
        return self.means["loss"]

    @property
    def confusion(self) -> np.ndarray | None:
        """The matrix (K, K) int64: class i predicted as class j; None for over 2,048 classes."""
        return None if self.counts is None else self.counts.matrix

    @property
    def accuracy(self) -> float | None:
        return None if self.counts is None else float(self.counts.by_class()[2].sum()) / self.rows

    @property
    def balanced_accuracy(self) -> float | None:
        """The mean recall of the classes that have samples in the split."""
        if self.counts is None:
            return None
        true, _, right = self.counts.by_class()
        return float((right[true > 0] / true[true > 0]).mean())

    def figures(self) -> dict[str, Any]:
        """Return the figures as they are recorded and written."""
        own = {"metrics": self.metrics} if self.metrics else {}
        return {"rows": self.rows, **self.means, "accuracy": self.accuracy, **own}


def evaluate(
    inference: Inference,
    split: Split,
    comm: Comm,
    go_on: Callable[[], bool] = lambda: True,
    kept: int = 0,
) -> Evaluation | None:
    """Evaluate a network in its task over all samples of a split. Collective.

    The result includes the `kept` most confident mistakes. `go_on` is called before each block; if
    it returns False on any rank, that rank's other blocks are skipped, and all ranks return None.
    Raises RunError on all ranks for samples that are corrupt or not finite, and UsageError if the
    metric did not name the same figures for all blocks.
    """
    task, blocks = inference.task, inference.blocks(len(split))
    numbers = range(blocks * comm.rank // comm.size, blocks * (comm.rank + 1) // comm.size)
    counts, sums, bad, mistakes = Confusion(task.classes), [], Bad(), list[Answer]()
    with on_all(comm):
        compute = partial(task.evaluate, inference.model)
        for block, found in inference.outputs(split, numbers, compute, go_on):
            bad |= block.bad
            if task.classes and block.labels is not None:
                answers, sure = found.pop(ANSWERS)
                answers = answers.astype(np.int64)
                counts.add(block.labels, answers)
                each = block.rows, block.labels, answers, sure
                wrong = answers != block.labels
                mistakes += map(Answer, *(values[wrong].tolist() for values in each))
                mistakes = most_confident(mistakes, kept)
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
        summed = counts.counts.astype(np.float64)  # exact up to 2^53 samples
        allreduce(comm, summed)
        counts.counts = summed.astype(np.int64)
    figures = {}
    for name in of_blocks[0]:
        total, weight = map(math.fsum, zip(*(each[name] for each in of_blocks), strict=True))
        figures[name] = total / weight if weight else math.nan
    return Evaluation(
        rows=len(split),
        means={name: value for name, value in figures.items() if name in TAKEN},
        metrics={name: value for name, value in figures.items() if name not in TAKEN},
        counts=counts if task.classes else None,
        mistakes=most_confident([each for part in parts for each in part[2]], kept),
        classes=split.pack.classes,
    )


def most_confident(answers: list[Answer], count: int) -> list[Answer]:
    """Return the `count` answers of the largest probability; of equal ones the first rows."""
    return heapq.nsmallest(count, answers, lambda each: (-each.probability, each.row))


# The subcommand


def main(settings: EvaluateConfig, comm: Comm) -> int:
    """``hpctrain evaluate``: loss, accuracy, per-class table, confusion matrix. Collective."""
    started("reading the network")
    evaluate_saved(settings, comm, printed=True)
    return 0


def open_network(settings: EvaluateConfig | PredictConfig, comm: Comm) -> TrainedNetwork:
    """Load the network that the settings name onto this rank's device. Collective."""
    path = on_root(comm, find_model, settings.run, settings.runs_dir, settings.best)
    device = open_device(comm, settings.device)
    torch.set_num_threads(settings.threads or fair_threads(comm))  # launchers set 1 or all cores
    how = settings.trust_code, settings.precision, settings.batch_size
    with on_all(comm):
        return TrainedNetwork(path, device, *how)


def find_pack(network: TrainedNetwork, settings: NetworkConfig) -> Pack:
    """Open the pack of --data, by default the one of training (rank 0).

    Raises UsageError if there is none, or if it is not like the one of training.
    """
    known = network.metadata
    if not settings.data and not Path(known["pack"]).is_file():
        what = f"the pack that {network.path} was trained on, {known['pack']},"
        raise UsageError(f"{what} is gone: give --data")
    path = locate(settings.data or known["pack"], settings.cache_dir)
    if known["external"] is None or is_pack(path):
        pack = read_pack(path)
    else:
        from hpctrain.data.external import read_external  # imports h5py

        pack = read_external(path, External(**known["external"]))
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


def evaluate_saved(settings: EvaluateConfig, comm: Comm, printed: bool = False) -> Evaluation:
    """Evaluate a saved network, and write the files that the settings ask for. Collective.

    Tables are `printed` before, so that a full disk does not lose what was computed.
    """
    network = open_network(settings, comm)
    inference, path, known = network.inference, network.path, network.metadata
    if settings.mistakes and not inference.task.classes:
        raise agreed(UsageError("--mistakes shows wrong classes, and this network restores images"))
    pack = on_root(comm, find_pack, network, settings)
    of_file = {"loss": known["own_loss"], "metric": known["own_metric"]}
    own = {name: getattr(settings, name) or of_file[name] for name in of_file}
    with on_all(comm):
        untrusted = {name: own[name] for name in own if not getattr(settings, name)}
        require_trust(untrusted, path, settings.trust_code)
        of_user: Any = {name: import_own(own[name], f"--{name}") for name in own}
        source = Split(pack, settings.split)
    inference = inference._replace(task=replace(inference.task, **of_user))
    # With algorithms chosen by timing, the figures would depend on the ranks.
    with source, torch_settings(inference.task.precision, benchmark=False):
        result = evaluate(inference, source, comm, kept=settings.mistakes)
        assert result is not None  # no block was skipped

        def write() -> None:
            if printed:
                loss = "loss" if settings.loss else "mean squared error"
                figures = {**result.figures(), "balanced_accuracy": result.balanced_accuracy}
                print_evaluation(figures, result.counts, pack.classes, settings.split, loss)
            if result.mistakes:
                picture = picture_path(settings.output, path.with_name("mistakes.png"))
                lines = draw_answers(picture, source, result.mistakes, pack.classes)
                total = result.rows - round(result.rows * (result.accuracy or 0))
                last = f"{picture}: the {len(lines):,} most confident of {total:,} mistakes"
                say("\n".join([*lines, last]))
            elif settings.mistakes:
                say(f"{settings.split}: no mistakes to draw")
            if settings.output:
                write_evaluation(Path(settings.output), result, pack, path, settings.split)

        on_root(comm, write)
    return result


def draw_answers(
    path: Path, source: Split | Images, answers: Sequence[Answer], classes: Sequence[str]
) -> list[str]:
    """Write a picture of images of `source`, as they are stored, each above its answer.

    Captions are the image's name, the true class if it is known, and the predicted class and its
    probability; these two are red if the answer is wrong. Returns them, one line for each image.
    """
    from hpctrain.report.results import draw_captioned, shown_values, write_image  # imports Pillow

    rows = np.array([each.row for each in answers], np.int64)
    images, captions, lines = np.empty((len(rows), *source.image_shape), source.dtype), [], []
    source.gather(rows, images, bad=Bad())
    for row, label, prediction, probability in answers:
        name = source.source_of(row) or f"row {row}"
        true = () if label is None else (f"true: {classes[label]}",)
        answer = f"answer: {classes[prediction]}", f"{100 * probability:.1f} %"
        captions.append((PurePath(name).name, *true, *answer))
        lines.append(", ".join((name, *true, *answer)))
    wrong = [n for n, each in enumerate(answers) if each.label not in (None, each.prediction)]
    write_image(path, draw_captioned(shown_values(images), captions, wrong))
    return lines


def picture_path(output: str | None, default: Path) -> Path:
    """Return the name of the picture beside the file --output, or `default` if there is none."""
    if output in (None, "-"):
        return default
    path = Path(str(output))
    is_table = path.suffix.lower() in (".csv", ".json")
    return path.with_suffix(".png") if is_table else Path(f"{path}.png")


def write_evaluation(path: Path, result: Evaluation, pack: Pack, model: Path, split: str) -> None:
    """Write the results of an evaluation as JSON, for --output and for the folder of a run."""
    figures = {
        "model": str(model),
        "pack": pack.path,
        "pack_uuid": pack.uuid,
        "split": split,
        **result.figures(),
        "balanced_accuracy": result.balanced_accuracy,
        "classes": list(pack.classes),
        **(result.counts.as_json() if result.counts else {"confusion": None}),
    }
    write_json(path, figures)
