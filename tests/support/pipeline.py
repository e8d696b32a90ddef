"""The tensors of samples on their way from a file to the network, as a training makes them.

The only place in the tests that knows this way: when its stages move, this file follows, and what
it returns stays. Digests are of values in the order of their shape, whatever the strides.

    stored     values as they lie in the file, or as they are decoded, (n, H, W, C)
    augmented  these after flips and shifts, of the same type
    unit       as floats, before the user's own augmentation and normalization, (n, C, H, W)
    input      what the network is given, (n, C, H, W)
    target     what its outputs are compared with
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from contextlib import closing
from typing import Any

import numpy as np
import torch
from torch import Tensor

import hpctrain as hp
from hpctrain.inference.network import Inference
from hpctrain.training.setup import set_up

STEP = 1  # of the first epoch
BLOCK = 0  # of the validation


def describe_tensors(comm: Any, settings: dict[str, Any]) -> list[str]:
    """The lines of this rank's shards in one step, and of one block of the validation. Collective.

    A line is the place, the stage, and its dtype, shape and digest, or the key of random numbers.
    """
    with closing(set_up(hp.Config(**settings), comm)) as run:
        return [*lines_of_step(run), *lines_of_block(run)]


def lines_of_step(run: Any) -> Iterator[str]:
    """The lines of each shard of this rank."""
    with closing(run.loader.epoch(0, STEP)) as steps:
        for batch in next(steps):
            where = f"shard {batch.shard}"
            yield f"{where} key {batch.key:#x}"
            stages = stages_before_input(run, batch.shard, batch.key)
            stages |= {"input": batch.images, "target": batch.targets}
            for stage, values in stages.items():
                yield f"{where} {stage} {digest(values)}"


def stages_before_input(run: Any, shard: int, key: int) -> dict[str, Tensor | np.ndarray]:
    """The stages that a batch no longer holds."""
    loader = run.loader
    partition = loader.partition
    split = loader.split
    read = np.empty((partition.count(STEP, shard), *split.image_shape), split.dtype)
    loader._read((0, shard, STEP * partition.shares[shard]), key, read)
    pipeline = hp.Pipeline(augmentation=run.loader.pipeline.augmentation)
    unit = pipeline.inputs(torch.from_numpy(read), key, split.divisor)
    augmented = unit.permute(0, 2, 3, 1).numpy()
    if read.dtype.kind == "u":
        augmented = (augmented * split.divisor).round().astype(read.dtype)
    return {"stored": read, "augmented": augmented, "unit": unit}


def lines_of_block(run: Any) -> list[str]:
    """The lines of a block of the validation."""
    lines: list[str] = []

    def compute(inputs: Tensor, targets: Tensor) -> dict[str, Tensor]:
        lines.append(f"block key {torch.initial_seed():#x}")
        lines.append(f"block input {digest(inputs)}")
        lines.append(f"block target {digest(targets)}")
        return {}

    inference = Inference(run.trainer.model, run.task, run.pipeline, run.plan.evaluation_rows)
    for _ in inference.outputs(run.split("validation"), [BLOCK], compute):
        pass
    return lines


def digest(values: Tensor | np.ndarray) -> str:
    """Dtype, shape and a digest of the values of a tensor on any device, or of an array."""
    if isinstance(values, Tensor):
        values = values.detach().cpu().numpy()
    shape = "x".join(map(str, values.shape))
    digits = hashlib.sha256(np.ascontiguousarray(values)).hexdigest()
    return f"{values.dtype} {shape} {digits[:16]}"
