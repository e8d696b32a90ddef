"""Whether a network gives the same answer again: what it holds beside weights and running
statistics must not change from call to call, or results would depend on how often a rank calls it.

A few rows of one shard pass forward three times with the same random numbers, between the second
and the third those of another, and all is put back. Alike must be

    buffers                 before and after each of the three
    numbers, tensors, ...   that modules hold as attributes, after each of the three: what a forward
                            leaves behind may depend on its rows, not on the calls before
    the output              of the three

by their bits. On GPUs sums may come out in another order each time unless --deterministic: there,
where the second output is already another than the first, floats are not compared but in buffers.

Before the first step, the first rows of the training split show the same of a network, and what a
batch-norm layer sees of them.
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
from hpctrain.inference.tasks import Task, output_shape
from hpctrain.models import ModelState, check_names, checked_output, held_values
from hpctrain.parallel.batchnorm import BatchNorms, Probe
from hpctrain.parallel.device import fork_rng, name_refused_operation, seed_torch
from hpctrain.plan import Plan
from hpctrain.text import listed
from hpctrain.training.step import Trainer, checksum

Tensor = torch.Tensor
ROWS = 8  # of a shard, at most: whether something changes does not depend on their number
OUTPUT = "output (does it count its calls, or draw random numbers from elsewhere than torch?)"


class Sample(NamedTuple):
    """Rows to be passed forward, and the key of the random numbers drawn on the way."""

    inputs: Tensor  # (n, C, H, W)
    targets: Tensor
    key: int


class Listener(nn.Module):
    """A network, and what it gave last, which is checked to be of shape (n, *output)."""

    def __init__(self, model: nn.Module, output: tuple[int, ...]) -> None:
        super().__init__()
        self.model, self._shape = model, output
        self.output = torch.empty(0)

    def forward(self, inputs: Tensor) -> Tensor:
        """What the network gives. UsageError where that cannot be learnt from."""
        mode = "training" if self.model.training else "evaluation"
        self.output = checked_output(self.model(inputs), len(inputs), self._shape, mode)
        return self.output


class Differences:
    """What did not stay as it was, by name. On a GPU nobody waits until names are asked for."""

    def __init__(self, device: torch.device) -> None:
        self._nothing = torch.zeros((), dtype=torch.bool, device=device)
        self._differs: dict[str, Tensor] = {}  # bools on the device

    def note(self, name: str, differs: Tensor | bool) -> None:
        """Note whether what has this name differs."""
        if differs is not False:
            self._differs[name] = self._differs.get(name, self._nothing) | differs

    def any(self) -> Tensor:
        """Whether anything does: a bool on the device."""
        return torch.stack([self._nothing, *self._differs.values()]).any()

    def names(self) -> list[str]:
        """What does."""
        return [name for name, differs in self._differs.items() if differs]


def changed_error(names: list[str], where: str = "") -> UsageError:
    """The refusal of a network of which this changes."""
    names = list(dict.fromkeys(names))
    return UsageError(
        f"the network's {listed(names, 3)} changed from one forward pass to the next"
        f"{where}, with equal images and random numbers: what is learnt would depend on how many"
        " each rank does. --local-buffers lets each rank keep its own"
    )


class Value(NamedTuple):
    """What identifies a value, on the host and, of a tensor, on the device."""

    text: str
    words: Tensor | None  # checksum
    whole: bool  # no float: the order of a sum does not matter


def value_of(held: Any) -> Value:
    """Of what a module holds."""
    if not isinstance(held, Tensor):
        return Value(repr(held), None, not isinstance(held, float | complex))
    whole = not (held.is_floating_point() or held.is_complex())
    readable = held.layout == torch.strided and not held.is_meta
    return Value(f"{held.dtype} {tuple(held.shape)}", checksum(held) if readable else None, whole)


def compare(
    found: Differences, old: dict[str, Value], new: dict[str, Value], noisy: Tensor | None = None
) -> None:
    """Note what of the old is another among the new; of floats nothing where they are `noisy`."""
    for name, value in old.items():
        other = new.get(name)
        differs: Tensor | bool = other is None or value.text != other.text
        if not differs and value.words is not None and other and other.words is not None:
            differs = value.words != other.words
        if noisy is not None and not value.whole:
            differs = differs & ~noisy
        found.note(name, differs)


class Replay:
    """Replays of one network."""

    def __init__(
        self,
        norms: BatchNorms,
        task: Task,
        output: tuple[int, ...],
        exact: bool,
        buffers: Collection[str],
    ) -> None:
        """`output`: the shape of the network's output for one image. `exact`: equal work has equal
        bits. `buffers` names those that
        were there before the first step.
        """
        self._listener, self._norms, self._task = Listener(norms.model, output), norms, task
        self._exact = exact
        self._buffers = {f"buffer {name}" for name in buffers}

    def __call__(self, first: Sample, other: Sample) -> Differences:
        """Pass the first rows forward twice and again after the other; what does not stay as it
        was. Leaves network, statistics and generators as they were.
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
    """Replays of one run, with a few rows of the first shards that this rank read."""

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
        """Copy rows of the first batches that there are."""
        if batches and self._samples is None:
            first, other = batches[0], batches[-1]
            self._samples = (
                Sample(first.images[:ROWS].clone(), first.targets[:ROWS].clone(), first.key),
                Sample(other.images[-ROWS:].clone(), other.targets[-ROWS:].clone(), other.key + 1),
            )

    def __call__(self) -> Differences:
        """What a replay changes, and what has changed since the launch began and must not."""
        found = Differences(self._trainer.message.device)
        if self._samples is not None:
            found = self._replay(*self._samples)
        compare(found, self._constants, self._values())
        return found


PROBE_ROWS = 32  # for the first shift of the batch-norm moments


def probe_model(
    norms: BatchNorms, task: Task, source: Split, prepare: Prepare, config: Config
) -> Probe:
    """Look at one training forward of the first rows, and at replays in both modes. UsageError for
    an output or buffers that cannot be combined, for what changes from call to call and, under
    --deterministic, for operations that have no deterministic form.
    """
    model, names = norms.model, set(norms.model.state_dict())
    rows = np.arange(min(PROBE_ROWS, len(source.labels)))
    if bad := describe_first([find_nonfinite(source, rows)]):
        raise UsageError(bad)
    images = read_samples(source, rows, prepare)
    labels = torch.from_numpy(source.labels[rows]).to(images.device)
    key = random_key(config.seed, "probe")
    inputs, targets = task.pair(images, labels, key)
    output = output_shape(config.task, source.image_shape, task.classes)
    torch.manual_seed(key)
    before = ModelState(model)
    try:
        with name_refused_operation(UsageError):
            probe = norms.probe(lambda: task(Listener(model, output), inputs, targets), len(rows))
            check_names(model, names)
            if config.deterministic:  # one backward pass meets what torch refuses
                loss, _ = task(model, inputs, targets)
                loss.backward()  # not autograd.grad, which reentrant checkpoints refuse
                model.zero_grad()
    finally:
        before.restore()
    if not config.local_buffers:
        first = Sample(inputs[:ROWS], targets[:ROWS], key)
        other = Sample(inputs[-ROWS:], targets[-ROWS:], key + 1)
        buffers = {name for name, _ in model.named_buffers()}
        exact = config.deterministic or inputs.device.type == "cpu"
        replay, changed = Replay(norms, task, output, exact, buffers), []
        for training in (True, False):
            model.train(training)
            with torch.set_grad_enabled(training):
                changed += replay(first, other).names()
        model.train()
        if changed:
            raise changed_error(changed)
    return probe
