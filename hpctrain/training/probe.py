"""One check of the network before its first step, with the first samples of the training split.

It shows what each batch-norm layer sees, and that a forward pass depends on the weights, running
statistics and input alone: how often a rank calls the network depends on the number of ranks.

In training and in evaluation mode, the same samples pass forward twice, with the same random
numbers, and others between them. Both outputs, and all buffers before and after, must be bitwise
equal. On GPUs without --deterministic, sums may be added in another order each time, and only the
buffers are compared. State that begins to change later is not seen.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import numpy as np
import torch
from torch import Tensor

from hpctrain.config import Config
from hpctrain.data.loader import Prepare, read_samples
from hpctrain.data.partition import random_key
from hpctrain.data.split import Split
from hpctrain.errors import RunError, UsageError
from hpctrain.models import as_bytes, evaluating
from hpctrain.models.build import check_names, checked_output
from hpctrain.parallel.batchnorm import BatchNorms, Probe
from hpctrain.parallel.device import explain_errors, fork_rng, seed_torch, without_benchmark
from hpctrain.tasks import Task, check_task, network_output, output_shape
from hpctrain.text import listed

FIRST_ROWS = 32  # of the training split: rank 0 tests the network and own functions with them
ROWS = 8  # samples of a pass, at most: whether something changes does not depend on their number


@without_benchmark()
def probe_model(
    norms: BatchNorms, task: Task, source: Split, prepare: Prepare, config: Config
) -> Probe:
    """Run training forwards of the first samples, and check that they can be repeated.

    Raises UsageError for samples that are not finite, for outputs, layers or buffers that cannot be
    combined over shards, for what changes from call to call and, with --deterministic, for
    operations without a deterministic form.
    """
    model, rows = norms.model, np.arange(min(FIRST_ROWS, len(source)))
    try:
        images = read_samples(source, rows, prepare)
    except RunError as error:
        raise UsageError(str(error)) from None
    labels = torch.from_numpy(source.read_labels(rows)).to(images.device)
    key = random_key(config.seed, "probe")
    inputs, targets = task.pair(images, labels, key)
    check_task(task, model, inputs, targets)
    shape = output_shape(config.task, source.image_shape, task.classes)
    checked = partial(checked_output, model, output=shape)

    def forward(inputs: Tensor) -> Tensor:
        return network_output(checked, inputs, task.precision).detach()

    torch.manual_seed(key)
    names = {*model.state_dict(), *dict(model.named_buffers())}
    with explain_errors(UsageError):
        probe = norms.probe(lambda: forward(inputs), len(rows))
        check_names(names, {*model.state_dict(), *dict(model.named_buffers())})
        # only in backward torch refuses some operations, and checkpoints run layers again
        loss, _ = task(model, inputs[:2], targets[:2])
        loss.backward()  # not autograd.grad: reentrant checkpoints refuse it
        model.zero_grad()
        if again := norms.irregular():
            raise UsageError(
                f"batch-norm layer {listed(again, 3)} does not run exactly once in a step: its"
                " statistics can be combined only if it does (no torch.utils.checkpoint around it)"
            )
        norms.restore()
    exact = config.deterministic or inputs.device.type == "cpu"
    check_repeats(norms, forward, inputs, key, exact)
    with evaluating(model), torch.no_grad():
        check_repeats(norms, forward, inputs, key, exact)
    return probe


def check_repeats(
    norms: BatchNorms, forward: Callable[[Tensor], Tensor], inputs: Tensor, key: int, exact: bool
) -> None:
    """Check that a network's buffers and, if `exact`, its output are the same in a second pass.

    `inputs` are samples (n, C, H, W). Batch norm's statistics and torch's generators are restored.
    Raises UsageError that names what differs.
    """

    def bits(tensor: Tensor) -> tuple[object, ...]:
        return tensor.dtype, tensor.shape, as_bytes(tensor).numpy().tobytes()

    def buffers() -> dict[str, tuple[object, ...]]:
        named = norms.model.named_buffers()
        return {f"buffer {name}": bits(buffer) for name, buffer in named if not norms.owns(buffer)}

    first, other, before, outputs = inputs[:ROWS], inputs[-ROWS:], buffers(), []
    with fork_rng(inputs.device):
        for samples, seed in ((first, key), (other, key + 1), (first, key)):
            norms.restore()
            seed_torch(seed, inputs.device)
            outputs.append(forward(samples))
    norms.restore()
    after = buffers()
    changed = [name for name in {**before, **after} if before.get(name) != after.get(name)]
    if exact and bits(outputs[0]) != bits(outputs[2]):
        changed.append("output (does it draw random numbers from elsewhere than torch?)")
    if changed:
        raise UsageError(
            f"the network's {listed(changed, 3)} changed from one forward pass to the next, with"
            " equal images and random numbers: what is learnt would depend on how many each rank"
            " does. Only batch norm may change buffers"
        )
