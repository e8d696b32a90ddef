"""Pass images through a network in fixed blocks, in this process alone.

A thread reads one block ahead of the network. Random numbers that a network draws in evaluation
mode depend on the number of the block, so the results do not depend on the rank that computes it.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import closing
from typing import NamedTuple

import numpy as np
import torch

from hpctrain.data.loader import Prefetcher
from hpctrain.data.partition import random_key
from hpctrain.inference.network import Network
from hpctrain.inference.tasks import network_output
from hpctrain.parallel.device import seed_torch
from hpctrain.streams import Upload, copy_to_host
from hpctrain.watchdog import doing

Unusable = dict[int, str]  # reason by row
# reads rows (n,) into images (n, H, W, C), and returns those that cannot be used
Read = Callable[[np.ndarray, np.ndarray], Unusable]
MOST_NAMED = 20  # unusable images listed in an error


def blocks_of(
    rows: int, block: int, size: int, rank: int, in_turns: bool = False
) -> Iterator[tuple[int, np.ndarray]]:
    """Yield this rank's blocks: (number of the block, its rows).

    These are consecutive blocks or, with `in_turns`, every `size`-th block.
    """
    blocks = -(-rows // block)
    run = range(blocks * rank // size, blocks * (rank + 1) // size)
    for number in range(rank, blocks, size) if in_turns else run:
        yield number, np.arange(number * block, min(rows, (number + 1) * block))


class Block(NamedTuple):
    """Samples that pass through the network at once."""

    number: int
    rows: np.ndarray  # (n,)
    bad: dict[int, str]  # rows whose images cannot be used, and why
    tensors: tuple[torch.Tensor, ...]  # inputs (n, C, H, W), and targets if there are any


def block_key(number: int) -> int:
    """Return the key of all random numbers of a block: noise, and those of the network itself.

    It depends on the number of the block only, so equal weights have equal figures at any step, in
    any run, on any number of ranks.
    """
    return random_key("evaluation", number)


@torch.no_grad()
def compute_blocks(
    load: Callable[[int, np.ndarray], Block],
    compute: Callable[[Block], torch.Tensor],
    parts: Iterator[tuple[int, np.ndarray]],
    upload: Upload,
    go_on: Callable[[str], bool],
) -> Generator[tuple[Block, np.ndarray], None, None]:
    """Yield the blocks of `parts`, each with its results on the host and without its tensors.

    A thread calls `load` for one block ahead of the network, through `upload`; `compute` gets each
    block with its own random numbers. The first block for which `go_on` returns False ends the
    iteration.
    """

    def queued() -> Iterator[tuple[Block, torch.Tensor]]:
        made_ahead = Prefetcher(lambda part: (load(*part), upload.record_event()), parts)
        with closing(made_ahead) as loaded:  # also if a traceback keeps this frame
            for block, made in loaded:
                if not go_on(f"block {block.number}"):
                    return
                upload.take(made, block.tensors)
                seed_torch(block_key(block.number), upload.device)
                # Blocks in flight would keep their tensors in the device's memory.
                yield block._replace(tensors=()), compute(block)

    yield from copy_to_host(queued(), upload.device)


def predict_blocks(
    network: Network,
    read: Read,
    total: int,
    dtype: np.dtype,
    finish: Callable[[torch.Tensor], torch.Tensor],
    size: int = 1,
    rank: int = 0,
) -> Generator[tuple[Block, np.ndarray], None, None]:
    """Yield the blocks of `rank` (of `size` ranks) of `total` images of `dtype`, and the results.

    Blocks are assigned to ranks in turn, so that together the ranks process the images in order.
    `finish` converts the network's output to the results (n, ...) of a block. Unusable images are
    replaced by black ones.
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

    parts = blocks_of(total, network.block, size, rank, in_turns=True)
    return compute_blocks(load, compute, parts, upload, go_on)


class Classified(NamedTuple):
    """The predictions for one block."""

    rows: np.ndarray  # (n,) usable images, ascending
    probabilities: np.ndarray  # (n, K) float32
    unusable: Unusable


def classify_blocks(
    network: Network,
    names: Sequence[object],
    read: Read,
    dtype: np.dtype,
    size: int = 1,
    rank: int = 0,
) -> Generator[Classified, None, None]:
    """Yield the class probabilities of the blocks of `rank`, one of `size`, in order.

    `names` are the names of all rows, for messages about unusable images.
    """
    how = len(names), dtype, lambda scores: scores.softmax(1).float(), size, rank
    with closing(predict_blocks(network, read, *how)) as blocks:
        for block, scores in blocks:
            for row in block.rows[~np.isfinite(scores).all(axis=1)].tolist():
                block.bad.setdefault(row, f"{names[row]}: the network's answer is not finite")
            usable = ~np.isin(block.rows, list(block.bad))
            yield Classified(block.rows[usable], scores[usable], block.bad)


def describe_unusable(unusable: Unusable, total: int, rest: str) -> str:
    """Return the text of an error about unusable rows of `total`; the first line ends with `rest`.

    The first MOST_NAMED reasons follow, one per line.
    """
    named = list(unusable.values())[:MOST_NAMED]
    more = len(unusable) - len(named)
    named += [f"and {more:,} more"] if more else []
    lines = "".join(f"\n  {text}" for text in named)
    return f"{len(unusable):,} of {total:,} images cannot be used{rest}{lines}"
