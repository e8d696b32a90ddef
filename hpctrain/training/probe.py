"""One check of the network before its first step, with the first samples of the training split.

It shows what each batch-norm layer sees, and that a forward pass depends on the weights, running
statistics and input alone: how often a rank calls the network depends on the number of ranks.

In training and in evaluation mode, the same samples pass forward twice, with the same random
numbers, and others between them; what the first pass set on modules is taken back before these.
Both outputs, and all buffers before and after, must be bitwise equal. On GPUs without
--deterministic, sums may be added in another order each time, and only the buffers are compared.
State that begins to change later is not seen.

In evaluation mode the output for a sample must depend on that sample alone (`check_samples`).
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.modules.dropout import _DropoutNd
from torch.nn.modules.module import (
    register_module_forward_hook,
    register_module_forward_pre_hook,
)

from hpctrain.config import Config
from hpctrain.config.functions import file_and_line, is_own_file
from hpctrain.data.loader import read_images
from hpctrain.data.partition import random_key
from hpctrain.data.pipeline import Pipeline
from hpctrain.data.split import Split
from hpctrain.errors import OwnCodeError, RunError, UsageError
from hpctrain.models import as_bytes, evaluating
from hpctrain.models.build import check_names, check_output_shape, mode_of, restored_attributes
from hpctrain.models.memory_format import move_model
from hpctrain.numerics import fork_rng, seed_torch, torch_flags, without_benchmark
from hpctrain.parallel.batchnorm import BatchNorms, Probe
from hpctrain.plan import Plan
from hpctrain.tasks.forward import explain_network, network_output
from hpctrain.tasks.functions import RELATIVE
from hpctrain.tasks.task import Task
from hpctrain.text import listed
from hpctrain.torch_errors import explain_errors

FIRST_ROWS = 32  # rank 0 tests the network and own functions with so many of the training split
ROWS = 8  # samples of a pass, at most: whether something changes does not depend on their number
COMPARED = 4  # samples beside each other in a pass in which the output for one is compared
Forward = Callable[[Tensor], Tensor]


@without_benchmark()
def probe_model(
    norms: BatchNorms, task: Task, source: Split, pipeline: Pipeline, config: Config
) -> Probe:
    """Run training forwards of the first samples, and check that they can be repeated.

    Raises UsageError for samples that are not finite, for outputs, layers or buffers that cannot be
    combined over shards, for what changes from call to call, for what is computed from other
    samples and, with --deterministic, for operations without a deterministic form. Raises
    OwnCodeError, with file and line, if the network fails.
    """
    key = random_key(config.seed, "probe")
    inputs, targets = read_first(source, FIRST_ROWS, pipeline, key)
    shape = task.output_shape(source.image_shape, len(source.pack.targets.names))
    torch.manual_seed(key)
    try:
        return check_network(norms, task, inputs, targets, shape, config)
    except OwnCodeError as error:
        plain = inputs.clone(memory_format=torch.contiguous_format)
        check = partial(check_network, norms, task, plain, targets, shape, config)
        if not config.channels_last or not works_in_nchw(norms, check):
            raise
        text = f"{error}; with --no-channels-last it works: tensors are NHWC in memory by default"
        raise OwnCodeError(text) from error.__cause__


def read_first(source: Split, samples: int, pipeline: Pipeline, key: int) -> tuple[Tensor, Tensor]:
    """Return inputs (n, C, H, W) and targets of the first `samples`, or all if there are fewer.

    Raises UsageError for images that cannot be used.
    """
    rows = np.arange(min(samples, len(source)))
    try:
        images = read_images(source, rows)
    except RunError as error:
        raise UsageError(str(error)) from None
    targets = torch.from_numpy(source.read_targets(rows))
    return pipeline.make(images, targets, key, source.divisor)


def works_in_nchw(norms: BatchNorms, check: Callable[[], object]) -> bool:
    """Whether a check that failed passes with the model, which is not used again, in NCHW."""
    model = norms.model
    move_model(model, next(model.parameters()).device, channels_last=False)
    model.zero_grad()
    norms.restore()
    try:
        check()
    except Exception:  # the user's code may raise any; the first error is the one to show
        return False
    return True


def check_network(
    norms: BatchNorms,
    task: Task,
    inputs: Tensor,
    targets: Tensor,
    shape: tuple[int, ...],
    config: Config,
) -> Probe:
    """Run the checks of `probe_model` with inputs (n, C, H, W); an output has this `shape`."""
    model = norms.model
    key = random_key(config.seed, "probe")

    def forward(inputs: Tensor, precision: str = task.precision) -> Tensor:
        output = network_output(model, inputs, precision)
        check_output_shape(model, output, len(inputs), shape)
        return output.detach()

    task.check(model, inputs, targets)
    trained = [name for name, p in model.named_parameters() if p.requires_grad]
    names = {*model.state_dict(), *dict(model.named_buffers())}
    with explain_errors(UsageError), restored_attributes(model):
        probe = norms.probe(lambda: forward(inputs), len(inputs))
        check_names(names, {*model.state_dict(), *dict(model.named_buffers())})
        check_backward(model, task, inputs[:2], targets[:2])
        if trained != [name for name, p in model.named_parameters() if p.requires_grad]:
            raise UsageError("the network changes requires_grad of its parameters in forward")
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
        with torch_flags("fp32", config.deterministic, benchmark=False), without_zeros(model):
            check_samples(model, partial(forward, precision="fp32"), inputs[:COMPARED], key)
    return probe


def check_unchanged_input(model: nn.Module, before: Tensor, after: Tensor) -> None:
    """Raise UsageError if a network has changed its input (n, C, H, W) in place."""
    if not torch.equal(before, after):
        raise UsageError(
            f"the network changes its input in place in {mode_of(model)} mode: compute with a copy"
            " (x = x - 1, not x -= 1; no inplace=True in the first layer)"
        )


def check_backward(model: nn.Module, task: Task, inputs: Tensor, targets: Tensor) -> None:
    """Run a training step without an update.

    Only in backward torch refuses some operations, and checkpoints run layers again. Raises
    UsageError if nothing is trained by it, and OwnCodeError if it fails.
    """
    loss = task(model, inputs, targets)["loss"]
    if not loss.requires_grad:
        raise UsageError(
            "the network's output depends on none of its trained parameters: torch.no_grad(),"
            " detach(), or the output is the input"
        )
    line = partial(line_of_backward, lambda: task(model, inputs, targets)["loss"])
    with explain_network(model, len(inputs), "failed in backward", line):
        loss.backward()  # not autograd.grad: reentrant checkpoints refuse it
    model.zero_grad()


def line_of_backward(forward: Callable[[], Tensor]) -> str:
    """Return file and line, of the user's own, of the operation whose backward pass fails."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            with torch.autograd.detect_anomaly(check_nan=False):
                forward().backward()
        except Exception:  # the same again; torch warns where the operation was called
            text = "".join(str(warning.message) for warning in caught)
            lines = re.findall(r'File "(.+)", line (\d+)', text)
            places = [file_and_line(file, int(line)) for file, line in lines if is_own_file(file)]
            return f"computed in {places[-1]}" if places else ""
    return ""


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

    first = inputs[:ROWS]
    last = inputs[-ROWS:]
    before = buffers()
    outputs = []
    first_before = first.clone()

    def pass_through(samples: Tensor, seed: int) -> Tensor:
        norms.restore()
        seed_torch(seed, inputs.device)
        return forward(samples)

    with fork_rng(inputs.device):
        with restored_attributes(norms.model):
            outputs.append(pass_through(first, key))
        pass_through(last, key + 1)
        outputs.append(pass_through(first, key))
    norms.restore()
    check_unchanged_input(norms.model, first_before, first)
    after = buffers()
    changed = [name for name in {**before, **after} if before.get(name) != after.get(name)]
    if exact and bits(outputs[0]) != bits(outputs[1]):
        changed.append(
            "output (does it keep something of earlier images, or draw random numbers from"
            " elsewhere than torch?)"
        )
    if changed:
        raise UsageError(
            f"the network's {listed(changed, 3)} changed from one forward pass to the next, with"
            " equal images and random numbers: what is learnt would depend on how many each rank"
            " does. Only batch norm may change buffers"
        )


# A sample alone


@contextmanager
def without_zeros(model: nn.Module) -> Iterator[None]:
    """Fill parameters that are all zero with random numbers in the block.

    Many networks begin with such a classifier, or end of a residual block: it hides what is before.
    """
    generator = torch.Generator().manual_seed(0)
    zeros = []
    for parameter in model.parameters():
        if parameter.dtype not in (torch.float32, torch.float64) or not parameter.numel():
            continue
        if not parameter[(0,) * parameter.dim()] and not parameter.any():  # the first one is quick
            zeros.append((parameter, parameter.detach().clone()))
            drawn = torch.randn(parameter.shape, generator=generator)
            parameter.copy_(0.1 * drawn)
    try:
        yield
    finally:
        for parameter, before in zeros:
            parameter.copy_(before)


def check_samples(model: nn.Module, forward: Forward, inputs: Tensor, key: int) -> None:
    """Check that the output for a sample depends on that sample alone, in evaluation mode.

    Raises UsageError as `find_difference` says, if it finds one for two of the `inputs`
    (n, C, H, W): a network that rounds its values may answer otherwise where one is on an edge.
    """
    with fork_rng(inputs.device):
        difference = find_difference(model, forward, inputs, key)
        if difference and find_difference(model, forward, inputs.flip(0), key):
            raise UsageError(difference)


def find_difference(model: nn.Module, forward: Forward, inputs: Tensor, key: int) -> str:
    """Return what the output for an image depends on beside the image, or "".

    The image passes forward in a batch with the `inputs`, beside others with other random numbers,
    in another place, and alone. The text names the first layer whose output differs.
    """
    paler = (inputs + inputs.flip(-1).roll(1, 0)) / 2  # others of a smaller range
    first = torch.cat([paler[:1], inputs[1:]])
    last = torch.cat([paler[1:], paler[:1]])
    compared = SampleInBatch(first, 0, key)
    seed = key + 1
    output = compared.pass_through(forward)
    if not output.isfinite().any():
        return not_finite(model, forward, compared)
    if not output.isfinite().all():
        return ""
    tests = (
        SampleInBatch(paler, 0, seed),
        SampleInBatch(last, len(last) - 1, seed),
        SampleInBatch(first[:1], 0, seed),
    )
    if all(is_close(output, test.pass_through(forward), output) for test in tests):
        return ""
    for cause, batch in (
        ("torch's random numbers", SampleInBatch(first, 0, seed)),
        ("the other images of the batch", SampleInBatch(paler, 0, key)),
        ("its place in the batch", SampleInBatch(first.flip(0), len(first) - 1, key)),
        ("the number of images in the batch", SampleInBatch(first[:1], 0, key)),
        *(("the rest of the batch", test) for test in tests),
    ):
        if not is_close(output, batch.pass_through(forward), output):
            return depends(cause, find_layer(model, forward, compared, batch))
    return ""


def depends(cause: str, where: str = "") -> str:
    """Return the error for a network of which an output depends on more than the image."""
    return (
        f"in evaluation mode the network's output for an image depends on {cause}{where}: it must"
        " depend on that image alone, because batches are cut into shards, and splits into blocks"
    )


class SampleInBatch(NamedTuple):
    """Inputs in which the sample that is compared is at `row`, and a seed for random numbers."""

    inputs: Tensor  # (n, C, H, W)
    row: int
    seed: int

    def pass_through(self, forward: Forward) -> Tensor:
        """Return the output for the sample."""
        seed_torch(self.seed, self.inputs.device)
        return forward(self.inputs.clone(memory_format=torch.preserve_format))[self.row]


def is_close(first: Tensor, second: Tensor, scale: Tensor) -> bool:
    """Whether two results for a sample are equal but for rounding; `scale` has its magnitudes."""
    if first.shape != second.shape:
        return False
    if not first.is_floating_point():
        return torch.equal(first, second)
    limit = RELATIVE * float(scale.abs().max()) if scale.numel() else 0.0
    return torch.allclose(first, second, RELATIVE, limit, equal_nan=True)


class Call(NamedTuple):
    """Input and output of a module for the sample; None where it cannot be told from others."""

    module: nn.Module
    input: Tensor | None
    output: Tensor | None


def record_calls(model: nn.Module, forward: Forward, batch: SampleInBatch) -> list[Call]:
    """Pass a batch forward; return the calls of all modules, in the order in which they ended."""
    calls: list[Call] = []
    running: list[Tensor | None] = []  # inputs of calls that have not ended, the innermost last
    modules = {*model.modules()}

    def of_sample(values: Any) -> Tensor | None:
        value = values[0] if isinstance(values, tuple | list) and values else values
        if isinstance(value, Tensor) and value.dim() and len(value) == len(batch.inputs):
            return value[batch.row].detach().clone()
        return None

    def before(module: nn.Module, inputs: tuple[Any, ...]) -> None:
        running.append(of_sample(inputs))

    def after(module: nn.Module, inputs: tuple[Any, ...], output: Any) -> None:
        sample = running.pop()
        if module in modules:
            calls.append(Call(module, sample, of_sample(output)))

    with register_module_forward_pre_hook(before), register_module_forward_hook(after):
        batch.pass_through(forward)
    return calls


def find_layer(
    model: nn.Module, forward: Forward, first: SampleInBatch, second: SampleInBatch
) -> str:
    """Return where the results for a sample begin to differ between two batches; "" = not known."""
    names = {module: name for name, module in model.named_modules()}
    calls = record_calls(model, forward, first)
    calls_of_second = record_calls(model, forward, second)
    for call, counterpart in zip(calls, calls_of_second, strict=False):
        module = call.module
        if module is not counterpart.module or call.output is None or counterpart.output is None:
            continue
        if is_close(call.output, counterpart.output, call.output):
            continue
        kind = type(module).__name__
        name = names[module]
        layer = f"layer {name}, {kind}" if name else f"forward of {kind}"
        if call.input is None or counterpart.input is None:
            return f" (seen first in {layer})"
        if is_close(call.input, counterpart.input, call.input):
            return f" ({layer}{by_design(module)})"
        return f" (computed before {layer})"
    return ""


def by_design(module: nn.Module) -> str:
    """Return why the output of a module of torch depends on more than a sample, or ""."""
    if isinstance(module, _NormBase | _DropoutNd) and module.training:
        return ", which the network's own train() or eval() leaves in training mode"
    if isinstance(module, _NormBase) and module.running_mean is None:
        return (
            ", by design: with track_running_stats=False it normalizes by the statistics of the"
            " batch in evaluation, too"
        )
    if isinstance(module, nn.FractionalMaxPool2d | nn.FractionalMaxPool3d):
        return ", by design: it draws its regions at random"
    if getattr(module, "batch_first", True) is False:
        return ", by design: without batch_first=True the first axis is not the batch"
    return ""


def not_finite(model: nn.Module, forward: Forward, batch: SampleInBatch) -> str:
    """Return the error for a network without a finite output, with the first tensor that is not."""
    text = "the network's output is not finite before the first step"
    for name, parameter in model.named_parameters():
        if not parameter.isfinite().all():
            return f"{text}: nor is its parameter {name}"
    names = {module: name for name, module in model.named_modules()}
    for call in record_calls(model, forward, batch):
        if call.output is not None and not call.output.isfinite().all():
            name = names[call.module] or "forward"
            return f"{text}: seen first in {name}, {type(call.module).__name__}"
    return text


# The sizes of the plan


@without_benchmark()
def check_sizes(
    norms: BatchNorms, task: Task, source: Split, pipeline: Pipeline, plan: Plan, splits: list[int]
) -> None:
    """Pass the smallest share of a step, and the smallest block of an evaluation, forward.

    `splits` are the numbers of samples in those that are evaluated. Larger sizes behave as those of
    `probe_model`. Raises UsageError as that does.
    """
    model = norms.model
    shares = [rows for rows in (*plan.partition.shares, *plan.partition.last) if rows]
    blocks = [rows % plan.evaluation_rows or plan.evaluation_rows for rows in splits if rows]
    most = min(ROWS, len(source))
    if min(shares + blocks) >= most:
        return
    key = random_key(0, "sizes")
    inputs, targets = read_first(source, most, pipeline, key)
    with fork_rng(inputs.device):
        if min(shares) < most:
            check_backward(model, task, inputs[: min(shares)], targets[: min(shares)])
            norms.restore()
        if 1 < min(blocks, default=1) < most:
            with evaluating(model), torch.no_grad(), without_zeros(model):
                block = SampleInBatch(inputs[: min(blocks)], 0, key)
                forward = partial(network_output, model, precision="fp32")
                alone = SampleInBatch(inputs[:1], 0, key).pass_through(forward)
                if not is_close(alone, block.pass_through(forward), alone):
                    size = f"the number of images in the batch ({len(block.inputs)} or 1)"
                    raise UsageError(depends(size))
