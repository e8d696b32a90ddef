"""Judge the optimizers of torch.optim and timm.optim.

An optimizer is accepted if 40 steps of a small network in float32 and float64 (convolution, batch
norm, linear layers, biases, weights in NHWC, two learning rates, weight decay of some parameters)
have the bits of 17 steps, a file, and 23 further steps of another optimizer that has read the file;
and if it passes the test that each run makes before its first step.
"""

from __future__ import annotations

import inspect
import tempfile
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import nn

from hpctrain.errors import UsageError
from hpctrain.models.memory_format import move_model
from hpctrain.models.weights import read_tensors, write_tensors
from hpctrain.parallel.message import Group, Message
from hpctrain.training.library_optimizer import LibraryUpdate, maker_of_part
from hpctrain.training.optimizer_check import check_optimizer
from scripts.parts import Verdict, part_of

STEPS = 40
SAVED = 17
RATE = 0.01
#: The reason to refuse an optimizer, by words of the error.
REASONS = {
    "only supports 2D": "it takes 2-d weights alone, and networks have others: timm:muon has a"
    " rule for all",
    "sparse": "it is for sparse gradients",
    "does not use the learning rate": "it ignores the learning rate after its first step",
    "gradients of gradients": "it needs gradients of gradients",
    "draws random numbers": "it draws random numbers from the generator of the process",
    "torch.compile": "it compiles code while it runs, and draws random numbers",
    "CUDA required for bitsandbytes": "it needs the package bitsandbytes, which is not tested",
    "CUDA required for APEX": "it needs the package apex, which is not tested",
}


def candidates() -> dict[str, Any]:
    """Return all optimizers of both libraries."""
    from timm.optim import get_optimizer_info, list_optimizers

    classes = {
        f"timm:{name}": get_optimizer_info(str(name)).opt_class for name in list_optimizers()
    }
    for name, kind in vars(torch.optim).items():
        if inspect.isclass(kind) and issubclass(kind, torch.optim.Optimizer):
            classes[f"torch:{name}"] = kind
    del classes["torch:Optimizer"]  # their base class
    return classes


class Training:
    """A small network, trained by an optimizer that sees each of its parameters."""

    def __init__(self, name: str, dtype: torch.dtype) -> None:
        torch.default_generator.manual_seed(0)
        self.model = nn.Sequential(
            nn.Conv2d(3, 16, 3, bias=False),
            nn.BatchNorm2d(16),
            nn.ReLU(),
            nn.Conv2d(16, 4, 1),
            nn.AdaptiveAvgPool2d(2),
            nn.Flatten(),
            nn.Linear(16, 24),
            nn.Linear(24, 3),
        )
        move_model(self.model.to(dtype), torch.device("cpu"), channels_last=True)
        groups = {
            name: Group(0.5 if name[0] == "0" else 1.0, 0.01 if parameter.ndim > 1 else 0.0)
            for name, parameter in self.model.named_parameters()
        }
        self.message = Message(self.model, 16, 0, 1, groups)
        maker = maker_of_part(part_of("optimizer", name, {}))
        self.update = LibraryUpdate(maker, RATE, self.message)

    def run(self, steps: range) -> None:
        """Make steps, each with images and a learning rate of its own."""
        for step in steps:
            generator = torch.Generator().manual_seed(step)
            images = torch.randn(8, 3, 8, 8, generator=generator).to(self.message.weights.dtype)
            classes = torch.randint(3, (8,), generator=generator)
            self.message.zero()
            nn.functional.cross_entropy(self.model(images), classes).backward()
            self.message.add_gradients()
            self.update.set_rate(RATE / (1 + step))
            self.update(torch.zeros(()))

    def state(self) -> dict[str, torch.Tensor]:
        """Return what a checkpoint holds."""
        return {
            "weights": self.message.weights.data,
            **self.update.state(),
            **dict(self.model.named_buffers()),
        }


def judge(name: str) -> Verdict:
    """Judge an optimizer."""
    kind = candidates()[name]
    step = getattr(kind, "step", None)
    if step and inspect.signature(step).parameters["closure"].default is inspect.Parameter.empty:
        return Verdict("it calls the network itself, by a closure")
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # more of them take longer for a small network
    try:
        with warnings.catch_warnings(), refusing_compiler():
            warnings.simplefilter("ignore")
            for dtype in (torch.float32, torch.float64):
                compare(name, dtype)
    except (UsageError, AssertionError) as error:
        for words, reason in REASONS.items():
            if words in str(error):
                return Verdict(reason)
        return Verdict(str(error))
    finally:
        torch.set_num_threads(threads)
    return Verdict()


def compare(name: str, dtype: torch.dtype) -> None:
    """Compare 40 steps with those that a file interrupts. Raises UsageError if they differ."""
    whole = Training(name, dtype)
    check_optimizer(whole.update.make, whole.update.parameters, RATE)
    whole.run(range(STEPS))
    first = Training(name, dtype)
    first.run(range(SAVED))
    second = Training(name, dtype)
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "checkpoint.safetensors"
        write_tensors(file, first.state(), {})
        tensors, _, _ = read_tensors(file)
    second.message.weights.data.copy_(tensors["weights"])
    for buffer, tensor in second.model.named_buffers():
        tensor.copy_(tensors[buffer])
    second.update.load(tensors)
    second.run(range(SAVED, STEPS))
    expected = whole.state()
    state = second.state()
    differ = [key for key in {**expected, **state} if not is_same(expected, state, key)]
    if differ:
        raise UsageError(f"other bits after a resume in {len(differ)} tensors, as {differ[0]}")


def is_same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor], key: str) -> bool:
    """Whether two have the same tensor, in the same memory format."""
    first = one.get(key)
    second = other.get(key)
    if first is None or second is None:
        return False
    return first.stride() == second.stride() and torch.equal(first, second)


@contextmanager
def refusing_compiler() -> Iterator[None]:
    """Raise UsageError where code asks for the compiler, which starts processes."""

    def refuse(*arguments: Any, **options: Any) -> None:
        raise UsageError("torch.compile is called")

    with mock.patch.object(torch, "compile", refuse):
        yield


def sample(name: str) -> None:
    """Make an optimizer and one step."""
    Training(name, torch.float32).run(range(1))
