"""The file of a trained network, model.safetensors, and the loop that passes images through one.

The file holds everything needed to use the network again, in metadata (JSON values) that training
writes (``training/validate.py``) and ``trained.py`` reads.

Images pass through the network in fixed blocks, while a thread reads one block ahead. Random
numbers that are drawn for a block depend on its number only: equal weights have equal figures at
any step, in any run, on any number of ranks.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Generator, Iterable, Iterator
from contextlib import closing
from pathlib import Path
from typing import NamedTuple, Protocol, TypeVar

import numpy as np
import torch
from torch import Tensor, nn

from hpctrain.data.loader import Prefetcher
from hpctrain.data.pack import Pack
from hpctrain.data.partition import random_key
from hpctrain.data.pipeline import Pipeline
from hpctrain.data.split import Bad
from hpctrain.errors import UsageError
from hpctrain.models import evaluating
from hpctrain.numerics import fork_rng, seed_torch
from hpctrain.report import find
from hpctrain.streams import Event, Upload, copy_to_device, copy_to_host
from hpctrain.tasks.forward import network_output
from hpctrain.tasks.tally import Block
from hpctrain.tasks.task import Task
from hpctrain.text import say
from hpctrain.watchdog import doing

Key = TypeVar("Key")  # names one result of a block


def find_model(target: str, runs_dir: str, best: bool = False) -> Path:
    """Find the .safetensors file of a run by its name or folder, or given as a file.

    With `best`, `target` is a sweep: the file is that of its best run, which is printed. Raises
    UsageError if there is none.
    """
    for path in (Path(runs_dir) / target, Path(target)):
        if (path / find.SWEEP_FILE).is_file():
            if not best:
                raise UsageError(f"{path} is a sweep: name one of its runs, or give --best")
            if not (ranked := find.ranked_runs(path)):
                raise UsageError(f"{path} holds no network yet: none of its runs has ended")
            run, why = ranked[0]
            say(f"best of {path}: {run.name}, by {why}", sys.stderr)
            return run / find.NETWORK_FILE
        if best and path.exists():
            raise UsageError(f"{path} is no sweep: leave out --best")
        for file in (path, path / find.NETWORK_FILE):
            if file.is_file():
                return file
        if steps := find.best_steps(path):
            say(f"{path} has not ended: its best network so far", sys.stderr)
            return find.best_file(path, steps[-1])
        if path.exists():
            raise UsageError(
                f"{path} holds no {find.NETWORK_FILE}: the run has not ended; its command"
                " continues it"
            )
    near = find.propose_run(target, runs_dir)
    raise UsageError(f"there is no run {target!r} in {runs_dir}, and no such file{near}")


class ImageSource(Protocol):
    """Images that can be read by row: a `Split`, or files and arrays of a user."""

    name: str
    image_shape: tuple[int, int, int]  # (H, W, C)
    dtype: np.dtype

    @property
    def divisor(self) -> float:
        """By which the pipeline divides its values."""

    def __len__(self) -> int: ...

    def source_of(self, index: int) -> str:
        """Return where an image came from, or ""."""

    def read_targets(self, indices: np.ndarray, bad: Bad) -> np.ndarray | None:
        """Return the targets (n, ...) of rows (n,), and describe wrong ones; None if unknown."""

    def gather(self, indices: np.ndarray, out: np.ndarray, *, bad: Bad) -> object:
        """Read rows (n,) into `out` (n, H, W, C), and describe those that cannot be used."""


class Inference(NamedTuple):
    """A network on its device, ready to compute blocks of images."""

    model: nn.Module
    task: Task
    pipeline: Pipeline  # without augmentation
    rows: int  # images of a block, which pass through the network at a time

    def blocks(self, samples: int) -> int:
        """Return the number of blocks of so many samples."""
        return -(-samples // self.rows)

    def answers(
        self, source: ImageSource, numbers: Iterable[int]
    ) -> Generator[tuple[Block, np.ndarray], None, None]:
        """Yield blocks with their usable rows only, and what the network answers to these.

        These are the task's answers, such as probabilities (n, K), of float32. Rows of which an
        answer is not finite are unusable, too.
        """

        def compute(inputs: Tensor, *targets: Tensor) -> dict[str, Tensor]:
            outputs = network_output(self.model, inputs, self.task.precision)
            return {"answers": self.task.answers(outputs)}

        for block, computed in self.outputs(source, numbers, compute):
            answers = computed["answers"]
            finite = np.isfinite(answers).reshape(len(answers), -1).all(axis=1)
            for row in block.rows[~finite].tolist():
                name = source.source_of(row) or f"row {row}"
                block.bad.setdefault(row, f"{name}: the network's answer is not finite")
            usable = ~np.isin(block.rows, list(block.bad))
            yield block.of_rows(usable), answers[usable]

    @torch.no_grad()
    def outputs(
        self,
        source: ImageSource,
        numbers: Iterable[int],
        compute: Callable[..., dict[Key, Tensor]],
        go_on: Callable[[], bool] = lambda: True,
    ) -> Generator[tuple[Block, dict[Key, np.ndarray]], None, None]:
        """Yield the blocks of these `numbers`, each with its results on the host, by name.

        `compute` is called with the input of a block and, if there are targets, the task's targets,
        in evaluation mode and with the block's own random numbers. Unusable images are replaced by
        black ones. The first block for which `go_on` returns False ends the iteration.
        """
        device = next(self.model.parameters()).device
        shape = min(self.rows, len(source)), *source.image_shape
        upload = Upload(shape, source.dtype, device)

        def load(number: int) -> tuple[Block, tuple[Tensor, ...], Event]:
            rows = np.arange(number * self.rows, min(len(source), (number + 1) * self.rows))
            key = random_key("evaluation", number)
            images = upload.buffer(len(rows))
            bad = Bad()
            source.gather(rows, images, bad=bad)
            images[np.isin(rows, list(bad))] = 0
            stored = source.read_targets(rows, bad)

            def work(images: Tensor) -> tuple[Tensor, ...]:
                if stored is None:
                    return (self.pipeline.inputs(images, key, source.divisor),)
                targets = copy_to_device(torch.from_numpy(stored), device)
                return self.pipeline.make(images, targets, key, source.divisor)

            tensors = upload.make(len(rows), work)
            return Block(number, rows, stored, bad), tensors, upload.record_event()

        def computed(loaded: Prefetcher) -> Iterator[tuple[Block, dict[Key, Tensor]]]:
            for block, tensors, ready in loaded:
                doing(f"block {block.number} of {source.name}")
                if not go_on():
                    return
                upload.take(ready, tensors)
                seed_torch(random_key("evaluation", block.number), device)
                yield block, compute(*tensors)

        with (
            evaluating(self.model),
            fork_rng(device),
            # Closed also if a traceback keeps this frame.
            closing(Prefetcher(load, numbers, device=device)) as loaded,
        ):
            yield from copy_to_host(computed(loaded), device)


def require_split(pack: Pack, split: str) -> None:
    """Raise UsageError unless the pack has samples in this split."""
    splits = [name for name, info in pack.splits.items() if info.samples]
    if split not in splits:
        raise UsageError(
            f"{pack.path} has no images in the split {split!r}, only in {', '.join(splits)}"
        )
