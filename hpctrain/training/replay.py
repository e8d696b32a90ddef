"""Test that repeated forward passes of a network give equal results.

State besides weights and running statistics must not change from call to call: results would
depend on how often a rank calls the network.

A few samples of one shard pass forward three times with the same random numbers. Between the second
and the third pass, samples of another shard pass once. Then all state is restored. The following
must be bitwise equal:

    buffers                 before and after each of the three passes
    numbers, tensors, ...   held by modules as attributes, after each of the three: they may depend
                            on the samples of the last pass, but not on earlier calls
    the output              of each of the three

On GPUs, the order of sums may vary from call to call without --deterministic. If the first two
outputs differ there, floating-point values are compared only in buffers, and only before and after
the first pass.

Before the first step, the same test runs with the first samples of the training split, which also
show what each batch-norm layer sees of them.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import nn

from hpctrain.config import Config
from hpctrain.data.checks import describe_first, find_nonfinite
from hpctrain.data.loader import Batch, Prepare, read_samples
from hpctrain.data.partition import random_key
from hpctrain.data.split import Split
from hpctrain.errors import UsageError
from hpctrain.inference.own_check import check_task
from hpctrain.inference.tasks import Task, output_shape
from hpctrain.models import ModelState, check_names, checked_output, evaluating, held_values
from hpctrain.parallel.batchnorm import BatchNorms, Probe
from hpctrain.parallel.device import fork_rng, name_refused_operation, seed_torch
from hpctrain.plan import Plan
from hpctrain.text import listed
from hpctrain.training.reading import FIRST_ROWS
from hpctrain.training.step import Trainer, checksum

Tensor = torch.Tensor
ROWS = 8  # samples of a shard, at most: whether something changes does not depend on their number
OUTPUT = "output (does it count its calls, or draw random numbers from elsewhere than torch?)"


class Sample(NamedTuple):
    """Samples for a forward pass, and the key of the random numbers that it draws."""

    inputs: Tensor  # (n, C, H, W)
    targets: Tensor
    key: int


class Listener(nn.Module):
    """A network that keeps its last output, which must have the shape (n, *output)."""

    def __init__(self, model: nn.Module, output: tuple[int, ...]) -> None:
        super().__init__()
        self.model, self._shape = model, output
        self.output = torch.empty(0)

    def forward(self, inputs: Tensor) -> Tensor:
        """Return the network's output. Raises UsageError if training is impossible with it."""
        mode = "training" if self.model.training else "evaluation"
        self.output = checked_output(self.model(inputs), len(inputs), self._shape, mode)
        return self.output


class Differences:
    """Names of values that changed. Nothing synchronizes with a GPU before `names` is called."""

    def __init__(self, device: torch.device) -> None:
        self._nothing = torch.zeros((), dtype=torch.bool, device=device)
        self._differs: dict[str, Tensor] = {}  # bools on the device

    def note(self, name: str, differs: Tensor | bool) -> None:
        """Note whether the value of this name differs."""
        if differs is not False:
            self._differs[name] = self._differs.get(name, self._nothing) | differs

    def any(self) -> Tensor:
        """Whether any value differs: a bool on the device."""
        return torch.stack([self._nothing, *self._differs.values()]).any()

    def names(self) -> list[str]:
        """Names of the values that differ (synchronizes with the device)."""
        return [name for name, differs in self._differs.items() if differs]


def changed_error(names: list[str], where: str = "") -> UsageError:
    """Return the error for a network in which these values changed."""
    names = list(dict.fromkeys(names))
    return UsageError(
        f"the network's {listed(names, 3)} changed from one forward pass to the next"
        f"{where}, with equal images and random numbers: what is learnt would depend on how many"
        " each rank does. --local-buffers lets each rank keep its own"
    )


class Value(NamedTuple):
    """Identity of a value: a text on the host and, for a tensor, a checksum on the device."""

    text: str
    words: Tensor | None  # checksum
    whole: bool  # not floating-point: the order of sums does not matter


def value_of(held: Any) -> Value:
    """Return the identity of a value that a module holds."""
    if not isinstance(held, Tensor):
        return Value(repr(held), None, not isinstance(held, float | complex))
    whole = not (held.is_floating_point() or held.is_complex())
    readable = held.layout == torch.strided and not held.is_meta
    return Value(f"{held.dtype} {tuple(held.shape)}", checksum(held) if readable else None, whole)


def compare(
    found: Differences, old: dict[str, Value], new: dict[str, Value], noisy: Tensor | None = None
) -> None:
    """Note the `old` values that differ from the `new`; if `noisy`, no floating-point ones."""
    for name, value in old.items():
        other = new.get(name)
        differs: Tensor | bool = other is None or value.text != other.text
        if not differs and value.words is not None and other and other.words is not None:
            differs = value.words != other.words
        if noisy is not None and not value.whole:
            differs = differs & ~noisy
        found.note(name, differs)


class Replay:
    """Repeats forward passes of one network."""

    def __init__(
        self,
        norms: BatchNorms,
        task: Task,
        output: tuple[int, ...],
        exact: bool,
        buffers: Collection[str],
    ) -> None:
        """`output`: the shape of the network's output for one image. `exact`: equal computations
        give bitwise equal results. `buffers`: names of the buffers that existed before the first
        step.
        """
        self._listener, self._norms, self._task = Listener(norms.model, output), norms, task
        self._exact = exact
        self._buffers = {f"buffer {name}" for name in buffers}

    def __call__(self, first: Sample, other: Sample) -> Differences:
        """Pass `first` forward twice, `other` once and `first` again; return what changed.

        Network, statistics and random generators are restored afterwards.
        """
        model, norms, device = self._norms.model, self._norms, first.inputs.device
        found, again, before = Differences(device), Differences(device), ModelState(model)

        def held() -> dict[str, Value]:
            return {n: value_of(v) for n, v in held_values(model) if not norms.owns(v)}

        def forward(sample: Sample) -> dict[str, Value]:
            seed_torch(sample.key, device)
            if not model.training:
                norms.restore()
            self._task(self._listener, sample.inputs, sample.targets)
            return {OUTPUT: value_of(self._listener.output), **held()}

        at_first = held()
        try:
            with fork_rng(device):
                one, two, _, three = map(forward, (first, first, other, first))
        finally:
            before.restore()
            norms.restore()
            self._listener.output = torch.empty(0)
        compare(found, {n: v for n, v in at_first.items() if n in self._buffers}, one)
        compare(again, {OUTPUT: one[OUTPUT]}, two)
        for later in (two, three):
            compare(found, one, later, None if self._exact else again.any())
            for name in later.keys() - one.keys():
                found.note(name, True)
        return found


class RunReplay:
    """Replays during a run, with a few samples of the first batches that this rank read."""

    def __init__(self, trainer: Trainer, task: Task, plan: Plan) -> None:
        self._trainer = trainer
        output = output_shape(plan.task, plan.image_shape, plan.classes)
        exact = plan.deterministic or trainer.message.device.type == "cpu"
        self._replay = Replay(trainer.norms, task, output, exact, trainer.buffers)
        self._constants = self._values()
        self._samples: tuple[Sample, Sample] | None = None

    def _values(self) -> dict[str, Value]:
        trainer, names = self._trainer, dict(self._trainer.model.named_parameters())
        return {
            f"{'parameter' if name in names else 'buffer'} {name}": value_of(tensor)
            for name, tensor in trainer.constants().items()
            if name in names or name in trainer.buffers
        }

    def take(self, batches: list[Batch]) -> None:
        """Copy samples of the first batches that this rank reads; later calls do nothing."""
        if batches and self._samples is None:
            first, other = batches[0], batches[-1]
            self._samples = (
                Sample(first.images[:ROWS].clone(), first.targets[:ROWS].clone(), first.key),
                Sample(other.images[-ROWS:].clone(), other.targets[-ROWS:].clone(), other.key + 1),
            )

    def __call__(self) -> Differences:
        """Return what a replay changes, and which constants changed since the launch began."""
        found = Differences(self._trainer.message.device)
        if self._samples is not None:
            found = self._replay(*self._samples)
        compare(found, self._constants, self._values())
        return found


def probe_model(
    norms: BatchNorms, task: Task, source: Split, prepare: Prepare, config: Config
) -> Probe:
    """Run one training forward of the first samples, and replays in training and evaluation mode.

    Raises UsageError for samples that are not finite, for outputs, layers or buffers that cannot be
    combined over shards, for values that change from call to call and, with --deterministic, for
    operations without a deterministic form.
    """
    model, names = norms.model, set(norms.model.state_dict())
    rows = np.arange(min(FIRST_ROWS, len(source)))
    if bad := describe_first([find_nonfinite(source, rows)]):
        raise UsageError(bad)
    images = read_samples(source, rows, prepare)
    labels = torch.from_numpy(source.read_labels(rows)).to(images.device)
    key = random_key(config.seed, "probe")
    inputs, targets = task.pair(images, labels, key)
    check_task(task, model, inputs, targets)
    output = output_shape(config.task, source.image_shape, task.classes)
    torch.manual_seed(key)
    before = ModelState(model)
    try:
        with name_refused_operation(UsageError):
            probe = norms.probe(lambda: task(Listener(model, output), inputs, targets), len(rows))
            check_names(model, names)
            if config.deterministic:  # torch refuses some operations only in backward
                loss, _ = task(model, inputs, targets)
                loss.backward()  # not autograd.grad: reentrant checkpoints refuse it
                model.zero_grad()
    finally:
        before.restore()
    if not config.local_buffers:
        first = Sample(inputs[:ROWS], targets[:ROWS], key)
        other = Sample(inputs[-ROWS:], targets[-ROWS:], key + 1)
        buffers = {name for name, _ in model.named_buffers()}
        exact = config.deterministic or inputs.device.type == "cpu"
        replay = Replay(norms, task, output, exact, buffers)
        changed = replay(first, other).names()
        with evaluating(model), torch.no_grad():
            changed += replay(first, other).names()
        if changed:
            raise changed_error(changed)
    return probe
