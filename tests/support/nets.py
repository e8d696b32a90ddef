"""Networks of users: ordinary ones, odd ones, and ones that hpctrain must refuse."""

from __future__ import annotations

import math
import os
import random
import time
from functools import partial
from types import SimpleNamespace

import torch
from torch import nn
from torch.nn.utils.parametrizations import orthogonal
from torch.utils.checkpoint import CheckpointFunction


class OneLayer(nn.Module):
    """One linear layer, of all values of an image."""

    def __init__(self, image_shape, classes):
        super().__init__()
        self.linear = nn.Linear(math.prod(image_shape), classes)

    def forward(self, x):
        return self.linear(x.flatten(1))


class DifferentOnEveryRank(OneLayer):
    """Draws its first weights from something that differs by process."""

    def __init__(self, image_shape, classes):
        super().__init__(image_shape, classes)
        generator = torch.Generator().manual_seed(os.getpid())
        nn.init.normal_(self.linear.weight, generator=generator)


class Skipping(OneLayer):
    """Leaves its batch norm out in training from the tenth pass on."""

    def __init__(self, image_shape, classes):
        super().__init__(image_shape, classes)
        self.norm, self.passes = nn.BatchNorm1d(classes), 0

    def forward(self, x):
        x = super().forward(x)
        self.passes += self.training
        return x if self.training and self.passes > 9 else self.norm(x)


class Overflowing(OneLayer):
    """A batch norm that sees values whose variance float32 cannot hold, beside a sane network."""

    def __init__(self, image_shape, classes):
        super().__init__(image_shape, classes)
        self.norm = nn.BatchNorm1d(math.prod(image_shape))

    def forward(self, x):
        x = x.flatten(1)
        if self.training and torch.is_grad_enabled():
            self.norm(x.detach() * 1e25)
        else:
            self.norm(x)
        return super().forward(x)


def with_dropout(image_shape, classes):
    height, width, channels = image_shape
    layers = [nn.Conv2d(channels, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Dropout2d(0.5)]
    linear = nn.Linear(4 * (height - 2) * (width - 2), classes)
    return nn.Sequential(*layers, nn.Flatten(), nn.Dropout(0.3), linear)


class AlwaysDropping(nn.Dropout):
    """Drops in evaluation too, but in batches of the sizes `sparing`."""

    def __init__(self, p, sparing=()):
        super().__init__(p)
        self.sparing = sparing

    def forward(self, x):
        return nn.functional.dropout(x, self.p, self.training or len(x) not in self.sparing)


def drawing_in_evaluation(image_shape, classes):
    """Draws random numbers in evaluation mode, but not where hpctrain looks for it."""
    linear = nn.Linear(math.prod(image_shape), classes)
    return nn.Sequential(AlwaysDropping(0.3, (1, 2, 4, 8)), nn.Flatten(), linear)


class WithPut(OneLayer):
    """Uses an operation that torch has no deterministic algorithm for, in training alone."""

    def forward(self, x):
        x = super().forward(x)
        if self.training:
            x = x + torch.zeros_like(x).put_(torch.tensor([0]), torch.zeros(1, dtype=x.dtype))
        return x


class Slow(OneLayer):
    """Takes HPCTRAIN_TEST_PACE seconds for each shard of a training step, by default 0.025."""

    def forward(self, x):
        if self.training:
            time.sleep(float(os.environ.get("HPCTRAIN_TEST_PACE", "0.025")))
        return super().forward(x)


def frozen(image_shape, classes):
    """Its first layer is random and never trained."""
    height, width, channels = image_shape
    first = nn.Linear(height * width * channels, 8)
    first.requires_grad_(False)
    return nn.Sequential(nn.Flatten(), first, nn.ReLU(), nn.Linear(8, classes))


class FineTuned(nn.Module):
    """A frozen convolution, an orthogonal layer, tied weights, and buffers of all kinds, which all
    count: what is not as it was changes the loss.
    """

    def __init__(self, image_shape, classes):
        super().__init__()
        self.trained, self.norm = nn.Conv2d(image_shape[2], 8, 3, stride=3), nn.BatchNorm2d(8)
        self.frozen = nn.Conv2d(8, 8, 3, padding=1).requires_grad_(False)
        self.first = orthogonal(nn.Linear(8, 8))
        self.second, self.third = nn.Linear(8, 8), nn.Linear(8, 8)
        self.third.weight = self.second.weight
        self.last = nn.Linear(8, classes)
        wide = torch.rand(8, 16)
        kinds = {
            "complex64": torch.rand(8, dtype=torch.complex64),
            "conjugate": torch.rand(8, dtype=torch.complex64).conj(),
            "single": torch.rand((), dtype=torch.complex64),
            "bf16": torch.rand(8).to(torch.bfloat16),
            "float8": torch.rand(8).to(torch.float8_e4m3fn),
            "bool": torch.rand(8) > 0.5,
            "scalar": torch.rand(()),
            "negative": torch.rand(8, dtype=torch.complex64).conj().imag,
            "empty": torch.empty(0, 3),
            "every_other": wide[:, ::2],
            "transposed": torch.rand(8, 8).T,
            "expanded": torch.rand(8).expand(8, 8),
            "kernel": torch.rand(8, 8, 3, 3).to(memory_format=torch.channels_last),
        }
        for name, tensor in kinds.items():
            self.register_buffer(name, tensor)
        self.register_buffer("shared", wide)
        self.register_buffer("mask", torch.full((8,), -torch.inf))
        unsaved = torch.linspace(0.5, 1, 8, dtype=torch.complex64)
        self.register_buffer("unsaved", unsaved, persistent=False)

    def forward(self, x):
        x = self.norm(self.frozen(self.trained(x))).relu().mean((2, 3))
        x = self.third(self.second(self.first(x)).tanh())
        real = self.single.real * (self.complex64 * self.conjugate * self.unsaved).real
        x = x * real.to(x.dtype) * self.bf16 + self.float8.to(x.dtype)
        x = x @ (self.every_other @ self.transposed * self.expanded).to(x.dtype) * self.scalar
        x = (
            x
            + self.kernel.mean((0, 2, 3))
            + self.shared.mean()
            + self.empty.sum()
            + self.negative.sum()
        )
        return self.last(torch.where(self.bool & (self.mask < 0), x, x / 2))


class Recomputed(nn.Module):
    """Computes its second layer again in a backward within backward."""

    def __init__(self, image_shape, classes):
        super().__init__()
        self.first, self.second = nn.Linear(math.prod(image_shape), 8), nn.Linear(8, 8)
        self.last = nn.Linear(8, classes)

    def forward(self, x):
        x = self.first(x.flatten(1))
        if torch.is_grad_enabled():
            x = CheckpointFunction.apply(self.second, True, x)  # checkpoint imports the compiler
        else:
            x = self.second(x)
        return self.last(x.tanh())


class RecomputedNorm(Recomputed):
    """Runs a batch norm a second time, in backward."""

    def __init__(self, image_shape, classes):
        super().__init__(image_shape, classes)
        self.second = nn.Sequential(self.second, nn.BatchNorm1d(8))


class Branches(OneLayer):
    """Beside its layer one that is left out of most training steps, and one of all."""

    def __init__(self, image_shape, classes):
        super().__init__(image_shape, classes)
        self.rare, self.spare = OneLayer(image_shape, classes), nn.Linear(classes, classes)

    def forward(self, x):
        left_out = self.training and torch.rand(()) > 0.05
        return super().forward(x) if left_out else super().forward(x) + self.rare(x)


class Remembering(OneLayer):
    """Holds something beside its parameters, as its `kind` says; `out_of_sight` counts its calls
    in training where nobody can look.
    """

    def __init__(self, kind, image_shape, classes):
        super().__init__(image_shape, classes)
        self.norm, self.kind, self.classes = nn.BatchNorm1d(classes), kind, classes
        self.out_of_sight = SimpleNamespace(calls=0)
        self.register_buffer("late", torch.zeros(2))
        self.register_buffer("mask", None, persistent="made" not in kind)
        self.memory, self.calls, self.seen = [], 0, []
        self.first = None
        if kind == "frozen":
            self.frozen = nn.Parameter(torch.ones(classes), requires_grad=False)

    def forward(self, x):
        x = self.norm(super().forward(x))
        changed = getattr(self, f"_{self.kind}")(x)
        self.out_of_sight.calls += self.training
        return x if changed is None else changed

    def _frozen(self, x):
        return x * self.frozen

    def _counter(self, x):
        """Changes nothing else."""
        self.calls += 1

    def _counting_buffer(self, x):
        self.late += self.training

    def _evaluation_buffer(self, x):
        self.late = self.late + (not self.training)

    def _queue(self, x):
        self.memory.append(x.detach().mean(0))
        return x + torch.stack(self.memory[-3:]).mean(0)

    def _first_images(self, x):
        """Keeps their mean, in no weight file."""
        if self.first is None:
            self.first = x.detach().mean(0)
        return x - self.first

    def _first_in_training(self, x):
        return self._first_images(x) if self.training else None

    def _hidden(self, x):
        return x * (1 + self.out_of_sight.calls)

    def _hidden_cycle(self, x):
        return x * (1 + self.out_of_sight.calls % 3)

    def _flag(self, x):
        """Says that there was a call, for ever after."""
        self.late = torch.ones(2)

    def _draws(self, x):
        return x * random.random()

    def _none(self, x):
        self.mask = torch.ones(self.classes)
        return x * self.mask

    def _none_in_training(self, x):
        if not self.training:
            self._none(x)

    def _registered_in_training(self, x):
        if self.training and not hasattr(self, "scale"):
            self.register_buffer("scale", torch.ones(1))

    def _tuple(self, x):
        return (x, x) if self.training else x

    def _cache(self, x):
        """What this forward leaves for its own backward."""
        self.seen = [x.detach(), {"rows": len(x), "largest": x.max().item()}]

    def _made_later(self, x):
        """Kept for all batches of as many rows, which are not the same on all ranks."""
        if self.mask is None or len(self.mask) != len(x):
            self.mask = torch.ones(len(x), 1)
        return x * self.mask

    def _made_once(self, x):
        """In the first forward of all, which every rank does in evaluation mode."""
        if self.mask is None:
            self.mask = torch.ones(self.classes)
        return x * self.mask

    def _made_in_training(self, x):
        if self.training:
            return self._made_once(x)

    def _drops(self, x):
        return nn.functional.dropout(x, 0.4, self.training)


for name in [name for name in vars(Remembering) if name[0] == "_" != name[1]]:
    globals()[f"remembering{name}"] = partial(Remembering, name[1:])


class DataDependent(OneLayer):
    """Its path depends on the values of its input, which cannot be traced."""

    def forward(self, x):
        return super().forward(x if x.sum() > 0 else -x)


class Asking(OneLayer):
    """Computes in Python with a value of its input."""

    def forward(self, x):
        return super().forward(x) * float(x[0, 0, 0, :2].tolist()[0] > -9)


class PairsOnly(OneLayer):
    """Takes two images at a time, as far as torch's exporter can tell."""

    def forward(self, x):
        return super().forward(x.reshape(2, -1) if len(x) == 2 else x)


class OutOfMemory(OneLayer):
    """In training, from the sixth pass on, there is no memory left: what it does is called."""

    def __init__(self, allocate, image_shape, classes):
        super().__init__(image_shape, classes)
        self.allocate, self.passes = allocate, 0

    def forward(self, x):
        self.passes += self.training
        if self.passes > 5:
            self.allocate()
        return super().forward(x)


def fill_host():
    torch.empty(1 << 60, dtype=torch.uint8)


def fill_gpu():
    raise torch.OutOfMemoryError(
        "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 15.77 GiB of"
        " which 1.50 GiB is free. Of the allocated memory 14.27 GiB is allocated by PyTorch. See"
        " documentation for Memory Management"
    )


def fill_gpu_beside_torch():
    text = "CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"
    raise RuntimeError(f"CUDA error: {text}")


def index_outside():
    indices = torch.full((3,), 99, device="cuda")
    torch.embedding(torch.zeros(5, 3, device="cuda"), indices)


def fill_python():
    raise MemoryError


out_of_host_memory = partial(OutOfMemory, fill_host)
out_of_gpu_memory = partial(OutOfMemory, fill_gpu)
failing_on_gpu = partial(OutOfMemory, index_outside)
out_of_cublas_memory = partial(OutOfMemory, fill_gpu_beside_torch)
out_of_python_memory = partial(OutOfMemory, fill_python)


class Unanswered(OneLayer):
    """In evaluation, an image that begins with 255 has no finite answer."""

    def forward(self, x):
        marked = (x[:, 0, 0, 0] == 1) & (not self.training)
        return super().forward(x) + torch.where(marked, math.inf, 0.0)[:, None]


class ExportedOtherwise(OneLayer):
    """Gives other answers, off by so much, once it is exported."""

    def __init__(self, off, image_shape, classes):
        super().__init__(image_shape, classes)
        self.off = off

    def forward(self, x):
        return super().forward(x) + (self.off if torch.compiler.is_exporting() else 0)


exported_with_an_error = partial(ExportedOtherwise, 0.01)
exported_as_nan = partial(ExportedOtherwise, math.nan)


class Faulty(OneLayer):
    """Fails in training on an image that begins with 255, as HPCTRAIN_TEST_FAULT says: "nan" and
    "inf" are of its output, "gradient" of that alone; the name of a tensor changes this one.
    """

    def __init__(self, image_shape, classes):
        super().__init__(image_shape, classes)
        self.norm = nn.BatchNorm1d(classes)
        self.frozen = nn.Parameter(torch.ones(classes), requires_grad=False)
        self.register_buffer("late", torch.ones(2))

    def forward(self, x):
        fault = os.environ.get("HPCTRAIN_TEST_FAULT", "")
        marked = self.training and bool((x[:, 0, 0, 0] == 1).any())
        x = self.norm(super().forward(x)) * self.frozen * self.late.mean()
        if not marked or not fault:
            return x
        if fault == "gradient":
            return x + torch.sqrt(x.sum() * 0) * 0
        if fault in ("nan", "inf"):
            return x * float(fault)
        self.get_submodule(fault.rpartition(".")[0]).__getattr__(fault.rpartition(".")[2]).data += 1
        return x


class Merging(nn.BatchNorm2d):
    """Notes the calls of `train`, as a layer does that merges its weights for evaluation."""

    merged = False

    def train(self, mode=True):
        self.merged = not mode
        return super().train(mode)

    def forward(self, x):
        assert self.merged != self.training or not self.weight.requires_grad
        return super().forward(x)


class OfMerging(OneLayer):
    """Behind two such layers, one of which can be frozen."""

    def __init__(self, image_shape, classes):
        super().__init__(image_shape, classes)
        self.frozen, self.last = Merging(image_shape[2]), Merging(image_shape[2])

    def forward(self, x):
        return super().forward(self.last(self.frozen(x)))


class Coupled(OneLayer):
    """In evaluation, an image's output depends on more than the image, as its `kind` says."""

    def __init__(self, kind, image_shape, classes):
        super().__init__(image_shape, classes)
        self.kind, self.channels = kind, image_shape[2]
        if made := getattr(self, f"make_{kind}", None):
            self.layer = made(classes)

    def forward(self, x):
        return getattr(self, f"of_{self.kind}")(x)

    def of_mean(self, x):
        return super().forward(x - x.mean(0))

    def of_softmax(self, x):
        return super().forward(x).softmax(0)

    def of_sorting(self, x):
        return super().forward(x).sort(0).values

    def of_sums_before(self, x):
        return super().forward(x).cumsum(0)

    def of_neighbour(self, x):
        x = super().forward(x)
        return x + 0.01 * x.roll(1, 0)

    def of_place(self, x):
        return super().forward(x) + torch.arange(len(x))[:, None]

    def of_size(self, x):
        return super().forward(x) / len(x)

    def of_draws(self, x):
        return nn.functional.dropout(super().forward(x), 0.1)

    def make_zeros(self, classes):
        """The classifier's weights are 0 at first: no output tells what is before it."""
        nn.init.zeros_(self.linear.weight)

    def of_zeros(self, x):
        return self.of_mean(x)

    def make_groups(self, classes):
        return nn.GroupNorm(1, classes)

    def of_groups(self, x):
        """Takes the batch for channels."""
        x = super().forward(x)
        return self.layer(x.T[None]).squeeze(0).T

    def make_attention(self, classes):
        return nn.MultiheadAttention(classes, 1)

    def of_attention(self, x):
        x = super().forward(x)[:, None]
        return self.layer(x, x, x)[0].squeeze(1)

    def make_statistics(self, classes):
        return nn.BatchNorm1d(classes, track_running_stats=False)

    def of_statistics(self, x):
        return self.layer(super().forward(x))

    def make_training(self, classes):
        return nn.Dropout(0.1)

    def of_training(self, x):
        return self.layer(super().forward(x))

    def train(self, mode=True):
        super().train(mode)
        if self.kind == "training":
            self.layer.train()
        return self

    def of_input(self, x):
        x -= 0.5
        return super().forward(x)

    def of_nothing(self, x):
        """Gives no finite number."""
        return super().forward(x).sub(1e30).exp().log()

    def of_one(self, x):
        return super().forward(x).squeeze()

    def of_no_gradient(self, x):
        return super().forward(x).detach()

    def of_freezing(self, x):
        self.linear.bias.requires_grad_(not self.training)
        return super().forward(x)


for name in [name for name in vars(Coupled) if name.startswith("of_")]:
    globals()[f"coupled_{name[3:]}"] = partial(Coupled, name[3:])


class Tiny(OneLayer):
    """Its outputs are far below 1, beside a large constant, and its classifier begins at zero."""

    def __init__(self, image_shape, classes):
        super().__init__(image_shape, classes)
        nn.init.zeros_(self.linear.weight)

    def forward(self, x):
        return 1e-9 * super().forward(x * 1e3)


class Failing(OneLayer):
    """Fails in some passes, as its `kind` says; "later" is after the first step."""

    def __init__(self, kind, image_shape, classes):
        super().__init__(image_shape, classes)
        self.kind, self.first = kind, self.linear.bias.detach().clone()

    def forward(self, x):
        getattr(self, f"when_{self.kind}", lambda x: None)(x)
        x = super().forward(x)
        return self.spoil(x) if self.kind == "backward" else x

    @property
    def begun(self):
        return self.training and not torch.equal(self.first, self.linear.bias)

    def when_training(self, x):
        if self.training:
            raise KeyError("teacher")

    def when_exit(self, x):
        if self.training:
            raise SystemExit(3)

    def when_later(self, x):
        if self.begun:
            raise KeyError("teacher")

    def when_later_inside(self, x):
        if self.begun:
            self.linear(x)

    def when_small(self, x):
        """In training on the five images of the last step."""
        if self.training:
            assert len(x) != 5, "five"

    def when_evaluation(self, x):
        """On more images than in any check before the first step."""
        if not self.training and len(x) > 8:
            raise KeyError("block")

    def spoil(self, x):
        x = x.sigmoid()
        y = x * 2
        x.add_(1)
        return x * y


for name in [name for name in vars(Failing) if name.startswith("when_")] + ["when_backward"]:
    globals()[f"failing_{name[5:]}"] = partial(Failing, name[5:])


class Viewing(nn.Module):
    """Needs the values of an image next to each other, as they are without channels-last."""

    def __init__(self, image_shape, classes):
        super().__init__()
        height, width, channels = image_shape
        self.conv = nn.Conv2d(channels, 2, 3, padding=1)
        self.linear = nn.Linear(2 * height * width, classes)

    def forward(self, x):
        return self.linear(self.conv(x).view(len(x), -1))


def strided(image_shape, classes):
    """Its first layer crashes in NHWC with oneDNN of AVX2."""
    convolution = nn.Conv2d(image_shape[2], 16, 1, stride=2)
    return nn.Sequential(convolution, nn.ReLU(), nn.Flatten(), nn.LazyLinear(classes))


class Typed(OneLayer):
    """A parameter of another type, `first`, is used beside its layer; `kind` says how."""

    def __init__(self, kind, image_shape, classes):
        nn.Module.__init__(self)
        first = torch.ones(classes, dtype=getattr(torch, kind.removeprefix("frozen_")))
        self.first = nn.Parameter(first, requires_grad="frozen" not in kind)
        self.linear = nn.Linear(math.prod(image_shape), classes)
        if kind == "float64":
            self.double()

    def forward(self, x):
        assert x.dtype == self.linear.weight.dtype
        return super().forward(x) * self.first.real.to(x.dtype)


TYPES = ("float16", "bfloat16", "float64", "complex64", "frozen_complex64", "frozen_int64")
for name in TYPES:
    globals()[f"typed_{name}"] = partial(Typed, name)


class MixedTypes(OneLayer):
    """Its bias is float64."""

    def __init__(self, image_shape, classes):
        super().__init__(image_shape, classes)
        self.linear.bias.data = self.linear.bias.data.double()


def on_meta(image_shape, classes):
    with torch.device("meta"):
        return OneLayer(image_shape, classes)
