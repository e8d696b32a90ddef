"""Exact distributed evaluation: every sample once, the same figures on any number of ranks.

    mpirun -n 4 python -m hpctrain evaluate RUN --data flowers.h5

The split is divided into fixed blocks of samples; each rank computes a contiguous run of blocks.
The sums of all blocks are gathered and added in block order. The confusion matrix is sparse. Random
numbers that a network draws in evaluation mode depend on the block.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path, PurePath
from typing import Any

import numpy as np
import torch
from torch import nn

from hpctrain.config import EvaluateConfig
from hpctrain.data.loader import Prepare, make_pairs
from hpctrain.data.pack import Pack
from hpctrain.data.split import Bad, Split, describe_first
from hpctrain.errors import RunError, UsageError
from hpctrain.inference.blocks import Block, block_key, blocks_of, compute_blocks
from hpctrain.inference.gallery import (
    Answer,
    draw_answers,
    most_confident,
    name_rows,
    picture_path,
    read_rows,
)
from hpctrain.inference.opening import open_network, open_pack_for, own_task
from hpctrain.inference.own import TAKEN, refuse_names
from hpctrain.inference.tasks import Task
from hpctrain.models import evaluating
from hpctrain.parallel.device import fork_rng, torch_settings
from hpctrain.parallel.mpi import Comm, agreed, allgather, on_all, on_root, start_mpi
from hpctrain.parallel.reduce import allreduce
from hpctrain.report.confusion import Confusion
from hpctrain.report.tables import print_evaluation, write_json
from hpctrain.streams import Upload
from hpctrain.text import say
from hpctrain.watchdog import doing, started

GATHERED = 1 << 21  # cells of confusion matrices that a rank receives at once: 32 MiB


@dataclass(frozen=True)
class Evaluation:
    """The results over one split."""

    rows: int
    means: dict[str, float]  # over samples, of the task's figures
    metrics: dict[str, float]  # figures of --metric
    counts: Confusion | None  # sparse confusion matrix
    mistakes: list[Answer]  # the wrong answers of the largest probability, largest first
    classes: tuple[str, ...] = ()  # names of the K classes

    @property
    def loss(self) -> float:
        return self.means["loss"]

    @property
    def confusion(self) -> np.ndarray | None:
        """The dense matrix (K, K) int64, created on each access: class i predicted as class j."""
        return None if self.counts is None else self.counts.dense()

    @property
    def accuracy(self) -> float | None:
        return None if self.counts is None else float(self.counts.diagonal().sum()) / self.rows

    @property
    def balanced_accuracy(self) -> float | None:
        """The mean recall of the classes that have samples in the split."""
        if self.counts is None:
            return None
        true = self.counts.by_true()
        return float((self.counts.diagonal()[true > 0] / true[true > 0]).mean())

    def figures(self) -> dict[str, Any]:
        """Return the figures as they are recorded and written."""
        own = {"metrics": self.metrics} if self.metrics else {}
        return {"rows": self.rows, **self.means, "accuracy": self.accuracy, **own}


def main(settings: EvaluateConfig) -> int:
    """``hpctrain evaluate``: loss, accuracy, per-class table, confusion matrix. Collective."""
    comm = start_mpi()
    started("reading the network")

    def show(result: Evaluation) -> None:
        figures = {**result.figures(), "balanced_accuracy": result.balanced_accuracy}
        loss = "loss" if settings.loss else "mean squared error"
        print_evaluation(figures, result.counts, result.classes, settings.split, loss)

    evaluate_saved(settings, comm, show)
    return 0


def evaluate_saved(
    settings: EvaluateConfig, comm: Comm, show: Callable[[Evaluation], None] = lambda result: None
) -> Evaluation:
    """Evaluate a saved network, and write the files that the settings ask for. Collective.

    Rank 0 first calls `show`, so that a full disk does not lose what was computed.
    """
    network = open_network(settings, comm)
    if settings.mistakes and not network.task.classes:
        raise agreed(UsageError("--mistakes shows wrong classes, and this network restores images"))
    pack = open_pack_for(network.saved, settings, comm)
    # With algorithms chosen by timing, the figures would depend on the ranks.
    exact = torch_settings(network.precision, benchmark=False)

    def go_on(what: str) -> bool:
        doing(f"{what} of {settings.split}")
        return True

    with on_all(comm):
        source = Split(pack, settings.split)
    with source, exact:
        how = network.prepare, comm, network.block, go_on, settings.mistakes
        task = own_task(network, settings, source, comm)
        found = evaluate(network.model, source, task, *how)
        assert found is not None  # go_on always returns True
        result = dataclasses.replace(found, classes=pack.classes)
        if comm.rank == 0:
            show(result)
        on_root(comm, write_mistakes, result, source, settings, network.saved.path)
    if settings.output:
        what = Path(settings.output), result, pack, network.saved.path, settings.split
        on_root(comm, write_evaluation, *what)
    return result


def write_mistakes(
    result: Evaluation, source: Split, settings: EvaluateConfig, weights: Path
) -> None:
    """Write the picture of --mistakes, if there are any: by default beside `weights` (rank 0)."""
    if not settings.mistakes or result.counts is None:
        return
    total = result.rows - int(result.counts.diagonal().sum())
    if not total:
        say(f"{settings.split}: no mistakes to draw")
        return
    from hpctrain.report.pictures import write_image  # imports Pillow

    path = picture_path(settings.output, weights.with_name("mistakes.png"))
    classes, names = source.pack.classes, name_rows(source, result.mistakes)
    images = read_rows(source, result.mistakes)
    short = [PurePath(name).name for name in names]
    write_image(path, draw_answers(images, result.mistakes, classes, short))
    for name, (_, label, prediction, probability) in zip(names, result.mistakes, strict=True):
        true = "" if label is None else f"{classes[label]}, "
        say(f"{name}: {true}answer {classes[prediction]} ({100 * probability:.1f} %)")
    say(f"{path}: the {len(result.mistakes):,} most confident of {total:,} mistakes")


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
        "confusion": None if result.counts is None else result.counts.as_json(),
    }
    write_json(path, figures)


BlockSums = dict[str, list[float]]  # by figure: the sums of its values and of their weights


@dataclass
class RankPart:
    """The results of one rank, without its confusion matrix."""

    sums: list[BlockSums] = field(default_factory=list)  # of its blocks, in order
    rows: int = 0
    bad: dict[int, str] = field(default_factory=dict)
    mistakes: list[Answer] = field(default_factory=list)  # the most confident ones
    complete: bool = True  # `go_on` never returned False

    def add_mistakes(
        self, kept: int, rows: np.ndarray, labels: np.ndarray, found: np.ndarray, sure: np.ndarray
    ) -> None:
        """Add the mistakes among the answers `found` (n,); keep the `kept` most confident ones."""
        if kept:
            wrong = found != labels
            columns = (values[wrong].tolist() for values in (rows, labels, found, sure))
            self.mistakes = most_confident([*self.mistakes, *map(Answer, *columns)], kept)


def combine(
    own: RankPart, confusion: Confusion, task: Task, kept: int, comm: Comm
) -> Evaluation | None:
    """Combine the results of all ranks; None if one of them is not complete. Collective.

    Raises RunError on all ranks for samples that are corrupt or not finite, and UsageError if the
    metric did not name the same figures for all blocks.
    """
    parts = allgather(comm, own)
    if bad := describe_first(part.bad for part in parts):
        raise agreed(RunError(bad))
    if not all(part.complete for part in parts):
        return None
    rows = sum(part.rows for part in parts)
    blocks, found = [each for part in parts for each in part.sums], dict[str, float]()
    for other in blocks:
        if error := refuse_names(task.own.metric, blocks[0], other):
            raise agreed(error)
    for name in blocks[0]:
        total, weight = map(sum, zip(*(each[name] for each in blocks), strict=True))
        found[name] = total / weight if weight else math.nan
    means = {name: found.pop(name) for name in blocks[0] if name in TAKEN}
    mistakes = most_confident((each for part in parts for each in part.mistakes), kept)
    if not task.classes:
        return Evaluation(rows, means, found, None, mistakes)
    return Evaluation(rows, means, found, sum_confusion(confusion, comm), mistakes)


def sum_confusion(own: Confusion, comm: Comm) -> Confusion:
    """Sum the confusion matrices of all ranks, a range of true classes at a time. Collective.

    A rank thus receives about `GATHERED` cells at once, or those of one class if there are more.
    """
    numbers, _ = own.cells
    by_class = np.bincount(numbers // own.classes, minlength=own.classes).astype(np.float64)
    allreduce(comm, by_class)
    rounds = (np.cumsum(by_class) // GATHERED).astype(np.int64)
    ends = own.classes * (np.flatnonzero(np.diff(rounds, append=rounds[-1] + 1)) + 1)
    parts = np.split(own.cells, np.searchsorted(numbers, ends)[:-1], axis=1)
    found = [Confusion(own.classes, np.hstack(allgather(comm, part))).cells for part in parts]
    return Confusion(own.classes, np.hstack(found))


def evaluate(
    model: nn.Module,
    source: Split,
    task: Task,
    prepare: Prepare,
    comm: Comm,
    block: int,
    go_on: Callable[[str], bool] = lambda what: True,
    kept: int = 0,
) -> Evaluation | None:
    """Evaluate `model` in `task` over all samples of `source`. Collective.

    The result includes the `kept` most confident mistakes. `go_on` is called with a description of
    the next action; if it returns False on any rank, that rank's remaining blocks are skipped, and
    all ranks return None.
    """
    total, device = len(source), next(model.parameters()).device
    upload = Upload((min(block, total), *source.image_shape), source.dtype, device)
    confusion, own = Confusion(task.classes), RankPart()
    names: list[list[str]] = []  # of the figures, by block: one more may be under way

    def load(number: int, rows: np.ndarray) -> Block:
        bad = Bad()
        source.gather(rows, upload.buffer(len(rows)), bad=bad)
        (pair,) = make_pairs(upload, source, [(rows, block_key(number))], prepare, task.pair, bad)
        return Block(number, rows, bad, pair)

    def compute(block: Block) -> torch.Tensor:
        found, answers = task.evaluate(model, *block.tensors)
        names.append(list(found))
        sums = torch.stack([each.double() for pair in found.values() for each in pair])
        return torch.cat([sums, *(part.double() for part in answers or ())])

    def go_on_here(what: str) -> bool:
        own.complete = go_on(what)
        return own.complete

    with evaluating(model), fork_rng(device), on_all(comm):
        parts = blocks_of(total, block, comm.size, comm.rank)
        for each, values in compute_blocks(load, compute, parts, upload, go_on_here):
            figures = names[len(own.sums)]
            sums, rest = np.split(values, [2 * len(figures)])
            own.sums.append(dict(zip(figures, sums.reshape(-1, 2).tolist(), strict=True)))
            own.rows += len(each.rows)
            own.bad |= each.bad
            if task.classes:
                labels, (found, sure) = source.read_labels(each.rows, each.bad), rest.reshape(2, -1)
                found = found.astype(np.int64)
                confusion.add(labels, found)
                own.add_mistakes(kept, each.rows, labels, found, sure)
        go_on("waiting for all")
    return combine(own, confusion, task, kept, comm)
