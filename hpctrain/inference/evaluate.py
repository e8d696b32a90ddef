"""Exact distributed evaluation: every row once, the same figures on any number of ranks.

    mpirun -n 4 python -m hpctrain evaluate RUN --data flowers.h5

The split is cut into fixed blocks of rows; ranks take contiguous runs of blocks. Every block has
its own slots in one float64 vector, written by one rank only, so that the sum over ranks keeps
them apart and rank 0 adds them in block order. Class counts are whole numbers, exact to 2^53.
Random numbers that a network draws in evaluation mode belong to the block.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import nn

from hpctrain.config import EvaluateConfig
from hpctrain.data.checks import describe_first, find_nonfinite
from hpctrain.data.loader import Prepare, ahead, keep_usable, make_pairs
from hpctrain.data.pack_format import Pack
from hpctrain.data.partition import random_key
from hpctrain.data.split import Split
from hpctrain.errors import RunError
from hpctrain.inference.network import first_touch, open_network, open_pack_for
from hpctrain.inference.tasks import Task
from hpctrain.parallel.device import fork_rng, seed_torch, torch_settings
from hpctrain.parallel.mpi import Comm, agreed, allgather, call_on_all, start_mpi
from hpctrain.parallel.reduce import allreduce
from hpctrain.report.tables import print_evaluation, write_json
from hpctrain.streams import Upload, copy_to_host
from hpctrain.watchdog import doing, started


@dataclass(frozen=True)
class Evaluation:
    """What was found over one split."""

    rows: int
    means: dict[str, float]  # over rows, of what the task adds up
    confusion: np.ndarray | None  # (K, K) int64: rows of true class i answered as class j
    mistakes: np.ndarray  # (n, 2) int64: the first rows answered wrongly, and the answers

    @property
    def loss(self) -> float:
        return self.means["loss"]

    @property
    def accuracy(self) -> float | None:
        return None if self.confusion is None else float(np.trace(self.confusion)) / self.rows

    def figures(self) -> dict[str, Any]:
        """The figures as they are recorded and written."""
        return {"rows": self.rows, **self.means, "accuracy": self.accuracy}


def main(settings: EvaluateConfig) -> int:
    """``hpctrain evaluate``: loss, accuracy, per-class table, confusion matrix. Collective."""
    comm = start_mpi()
    started("reading the network")
    network = open_network(settings, comm)
    pack = open_pack_for(network.saved, settings, comm)
    checks = first_touch(pack, comm)
    # Algorithms chosen by timing would let the figures depend on the ranks.
    exact = torch_settings(network.precision, benchmark=False)

    def go_on(what: str) -> bool:
        doing(f"{what} of {settings.split}")
        return True

    with (
        call_on_all(comm, lambda: Split(pack, settings.split, checks=checks)) as source,
        exact,
    ):
        result = evaluate(
            network.model, source, network.task, network.prepare, comm, network.block, go_on
        )
    if comm.rank == 0 and result is not None:
        print_evaluation(result.figures(), result.confusion, pack.classes, settings.split)
        if settings.output:
            write_json(
                Path(settings.output), as_json(result, pack, network.saved.path, settings.split)
            )
    return 0


def as_json(result: Evaluation, pack: Pack, model: Path, split: str) -> dict[str, Any]:
    """The figures of an evaluation for --output and for the folder of a run."""
    return {
        "model": str(model),
        "pack": pack.path,
        "pack_uuid": pack.uuid,
        "split": split,
        **result.figures(),
        "classes": list(pack.classes),
        "confusion": None if result.confusion is None else result.confusion.tolist(),
    }


def blocks_of(rows: int, block: int, size: int, rank: int) -> Iterator[tuple[int, np.ndarray]]:
    """This rank's blocks: (number of the block, its rows)."""
    blocks = -(-rows // block)
    for number in range(blocks * rank // size, blocks * (rank + 1) // size):
        yield number, np.arange(number * block, min(rows, (number + 1) * block))


class Block(NamedTuple):
    """Rows that the network is asked about at once."""

    number: int
    rows: np.ndarray  # (n,)
    bad: dict[int, str]  # rows whose images cannot be used, and why
    tensors: tuple[torch.Tensor, ...]  # inputs (n, C, H, W), and targets if there are any


def block_key(number: int) -> int:
    """The key of all random numbers that a block draws: noise, and those of the network itself.

    Of nothing but its number, so equal weights have equal figures whatever the step, run or ranks.
    """
    return random_key("evaluation", number)


@torch.no_grad()
def compute_blocks(
    load: Callable[[int, np.ndarray], Block],
    compute: Callable[[Block], torch.Tensor],
    parts: Iterator[tuple[int, np.ndarray]],
    upload: Upload,
    go_on: Callable[[str], bool],
) -> Iterator[tuple[Block, np.ndarray]]:
    """`load` the blocks of `parts` through `upload`, in a thread and one ahead of the network,
    and `compute` each with its own random numbers; results come on the host. Blocks without rows
    are left out, and all from the one on to which `go_on` says no.
    """

    def queued() -> Iterator[tuple[Block, torch.Tensor]]:
        loaded = ahead(lambda part: (load(*part), upload.record_event()), parts)
        for block, made in loaded:
            if not go_on(f"block {block.number}"):
                return
            if len(block.rows):
                upload.take(made, block.tensors)
                seed_torch(block_key(block.number), upload.device)
                yield block, compute(block)

    yield from copy_to_host(queued(), upload.device)


class Tally:
    """What the ranks find, in one float64 vector that is summed: every number is written by one
    rank only, or is a count, exact to 2^53.
    """

    def __init__(self, blocks: int, task: Task, ranks: int, kept: int) -> None:
        sums, pairs = (blocks, len(task.sums)), (task.classes, task.classes)
        shapes = (sums, pairs, (ranks, kept, 2), (1,), (1,), (1,))
        sizes = [math.prod(shape) for shape in shapes]
        self.vector = np.zeros(sum(sizes))
        parts = np.split(self.vector, np.cumsum(sizes)[:-1])  # views
        self.sums, self.pairs, self.mistakes, self.rows, self.left, self.bad = (
            part.reshape(shape) for part, shape in zip(parts, shapes, strict=True)
        )
        self._noted = 0  # mistakes of this rank

    def add(
        self, rank: int, block: Block, sums: np.ndarray, labels: np.ndarray, found: np.ndarray
    ) -> None:
        """Add a block of this `rank`: its `sums`, and the classes that were `found` (n,), if any;
        `labels` are those of all rows. Notes the first mistakes.
        """
        self.sums[block.number] = sums
        self.rows += len(block.rows)
        self.bad += len(block.bad)
        if not len(found):
            return
        labels = labels[block.rows]
        np.add.at(self.pairs, (labels, found), 1)
        room = self.mistakes[rank, self._noted :]
        wrong = np.flatnonzero(found != labels)[: len(room)]
        room[: len(wrong), 0], room[: len(wrong), 1] = block.rows[wrong] + 1, found[wrong]
        self._noted += len(wrong)

    def result(self, task: Task) -> Evaluation | None:
        """The figures, from the sum over all ranks; None where one of them left."""
        if self.left[0]:
            return None
        total = round(self.rows[0])
        if not total:
            raise agreed(RunError("no row of the split can be used"))
        means = {name: sum(self.sums[:, i].tolist()) / total for i, name in enumerate(task.sums)}
        confusion = self.pairs.round().astype(np.int64) if task.classes else None
        kept = self.mistakes.shape[1]
        first = self.mistakes[self.mistakes[:, :, 0] > 0][:kept].astype(np.int64) - [1, 0]
        return Evaluation(total, means, confusion, first)


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
    """The figures of `model` in `task` over all rows of `source` that can be used, and its first
    `kept` mistakes. Collective.

    `go_on` is called with what comes next; where it returns False on any rank, the rest of that
    rank's blocks is left out, and None returned on all.
    """
    total, device = len(source.labels), next(model.parameters()).device
    tally = Tally(-(-total // block), task, comm.size, kept)
    upload = Upload((min(block, total), *source.image_shape), source.dtype, device)

    def load(number: int, rows: np.ndarray) -> Block:
        images = upload.buffer(len(rows))
        source.gather(rows, images)
        bad = find_nonfinite(source, rows, images)
        rows = keep_usable(source, rows, images)
        (pair,) = make_pairs(upload, source, [(rows, block_key(number))], prepare, task.pair)
        return Block(number, rows, bad, pair)

    def compute(block: Block) -> torch.Tensor:
        found, answers = task.evaluate(model, *block.tensors)
        parts = [torch.stack(found), *([] if answers is None else [answers])]
        return torch.cat([part.double() for part in parts])

    def go_on_here(what: str) -> bool:
        tally.left[0] = not go_on(what)
        return not tally.left[0]

    def add_own() -> dict[int, str]:
        parts, bad = blocks_of(total, block, comm.size, comm.rank), dict[int, str]()
        for each, values in compute_blocks(load, compute, parts, upload, go_on_here):
            sums, answers = np.split(values, [len(task.sums)])
            tally.add(comm.rank, each, sums, source.labels, answers.astype(np.int64))
            bad |= each.bad
        return bad

    training = model.training
    model.eval()
    with fork_rng(device):
        bad = call_on_all(comm, add_own)
    model.train(training)
    go_on("waiting for all")
    allreduce(comm, tally.vector)
    if tally.bad[0]:
        raise agreed(RunError(str(describe_first(allgather(comm, bad)))))
    return tally.result(task)
