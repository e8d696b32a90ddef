"""The task of a network: its loss and figures, with the functions of the user's own.

Losses and figures are sums over samples, so that the parts of a batch or a split add up. A figure
is the quotient of two sums: of values, and of their weights, 1 unless the figure is weighted.

The user's own functions, --loss, --metric and --augment, are described in docs/networks.md. Batches
are cut into shards, and splits into blocks: the value of a sample must not depend on the others,
nor a call on earlier ones. `check_task` and `check_augment` test this before the first step.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hpctrain.config.functions import Imported, import_function, own_code_error
from hpctrain.data.loader import Prepare
from hpctrain.data.partition import random_key
from hpctrain.errors import Failure, UsageError
from hpctrain.models import evaluating
from hpctrain.models.build import check_is_tensor, failing_layer, mode_of
from hpctrain.parallel.device import fork_rng, is_of_device, seed_torch
from hpctrain.text import counted

ANSWERS = ""  # in the results of `evaluate`; no figure has this name
TAKEN = ("loss", "unweighted_loss", "noisy", "accuracy", "balanced_accuracy", "rows")  # figures
RELATIVE, ABSOLUTE = 1e-3, 1e-5  # of a sample's value in a part of a batch: kernels round otherwise
# By figure: the sums of its values and weights, (2,); under ANSWERS: the predicted classes and
# their probabilities, (2, n). All are float64.
Sums = dict[str, Tensor]


def network_output(model: nn.Module, inputs: Tensor, precision: str) -> Tensor:
    """Return the model's output for inputs (n, C, H, W), never as bfloat16.

    With precision "bf16" it is computed under autocast; parallel/device.py describes the others.
    Raises OwnCodeError as `explain_network` does, and UsageError if the output is no tensor.
    """
    autocast = torch.autocast(inputs.device.type, torch.bfloat16, precision == "bf16")
    with explain_network(model, len(inputs), "failed"), autocast:
        output: Tensor = model(inputs)
    check_is_tensor(model, output)
    return output.float() if output.dtype == torch.bfloat16 else output


@contextmanager
def explain_network(
    model: nn.Module, n: int, failed: str, find_place: Callable[[], str] = str
) -> Iterator[None]:
    """Raise OwnCodeError for an error of a network that is not hpctrain's, in a pass of n images.

    It names file and line, and the layer, or else what `find_place` returns. Errors of memory, of a
    GPU and of a setting are raised as they are.
    """
    try:
        yield
    except (Failure, MemoryError):
        raise
    except (Exception, SystemExit) as error:
        network = getattr(model, "_orig_mod", model)  # of torch.compile
        if type(network).__module__.startswith("hpctrain.") or is_of_device(error):
            raise
        text = f"the network {failed} in {mode_of(model)} mode on {counted(n, 'image')}"
        place = failing_layer(error, network) or find_place()
        raise own_code_error(text, error, place) from error


@dataclass(frozen=True)
class Task:
    """Classify images by cross-entropy, or restore noisy ones by mean squared error."""

    precision: str = "fp32"
    classes: int = 0  # of the confusion matrix; 0: images are restored
    label_smoothing: float = 0.0
    weights: Tensor | None = None  # (classes,) of the classes in the loss; None = all alike
    noise: str = "salt-pepper"
    level: float = 0.1
    loss: Imported | None = None  # the user's own
    metric: Imported | None = None  # the user's own

    def pair(self, images: Tensor, labels: Tensor, key: int) -> tuple[Tensor, Tensor]:
        """Return input and target of a batch: images (n, C, H, W) in the network's scale and labels
        (n,), or these images with noise drawn by `key`, and without.
        """
        if self.classes:
            return images, labels
        return add_noise(images, self.noise, self.level, random_key(key, "noise")), images

    def __call__(self, model: nn.Module, inputs: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        """Return the sums of losses and of correct predictions of a batch, both on the device."""
        outputs = network_output(model, inputs, self.precision)  # (n, classes) or (n, C, H, W)
        loss = self._loss(outputs, targets, self.weights, self.label_smoothing)
        if self.classes:
            return loss, (outputs.detach().argmax(1) == targets).sum()
        return loss, inputs.new_zeros((), dtype=torch.int64)

    def evaluate(self, model: nn.Module, inputs: Tensor, targets: Tensor) -> Sums:
        """Return the sums of a batch for each figure, and a classifier's answers."""
        outputs = network_output(model, inputs, self.precision)
        sums = {"loss": _sums(self._loss(outputs, targets), len(targets))}
        if self.weights is not None:
            weighted = self._loss(outputs, targets, self.weights)
            sums["unweighted_loss"] = sums["loss"]
            sums["loss"] = _sums(weighted, self.weights[targets].sum())
        if not self.classes:
            sums["noisy"] = _sums(self._loss(inputs, targets), len(targets))
        if self.metric:
            found = compute_metric(self.metric, outputs, targets)
            sums |= {name: figure.sum(1) for name, figure in found.items()}
        if self.classes:
            answers = outputs.argmax(1)
            probabilities = outputs.softmax(1).gather(1, answers[:, None]).squeeze(1)
            sums[ANSWERS] = torch.stack([answers.double(), probabilities.double()])
        return sums

    def answer(self, model: nn.Module, inputs: Tensor) -> Tensor:
        """Return the probabilities (n, classes), or the restored images (n, H, W, C)."""
        outputs = network_output(model, inputs, self.precision)
        return (outputs.softmax(1) if self.classes else outputs.permute(0, 2, 3, 1)).float()

    def _loss(
        self, outputs: Tensor, targets: Tensor, weights: Tensor | None = None, smooth: float = 0.0
    ) -> Tensor:
        """Return the sum of the samples' losses, weighted by class if there are `weights`."""
        if self.loss:
            losses = compute_losses(self.loss, outputs, targets)
            return (losses if weights is None else losses * weights[targets]).sum()
        if not self.classes:
            return F.mse_loss(outputs, targets, reduction="sum") / targets[0].numel()
        return F.cross_entropy(outputs, targets, weights, reduction="sum", label_smoothing=smooth)


def _sums(values: Tensor, weights: Tensor | int) -> Tensor:
    """Return two sums as one tensor (2,) float64; a number of weights 1 is their sum."""
    total = weights if isinstance(weights, Tensor) else values.new_full((), weights)
    return torch.stack([values.double(), total.double()])


def add_noise(images: Tensor, kind: str, level: float, key: int) -> Tensor:
    """Return a copy of images (n, C, H, W) in [0, 1] with noise.

    "salt-pepper": every value becomes 0 or 1, each with probability level / 2. "gaussian": a
    normal deviate of standard deviation `level` is added and the sum clamped to [0, 1]. The noise
    depends on `key`, shape and model of the device alone.
    """
    generator = torch.Generator(images.device).manual_seed(key)
    draw = torch.randn if kind == "gaussian" else torch.rand
    drawn = draw(images.shape, generator=generator, device=images.device).to(images.dtype)
    noisy = images.clone()  # with the same strides
    if kind == "gaussian":
        # Not add_(drawn, alpha=level): some devices round its sum only, not its product.
        return noisy.add_(drawn.mul_(level)).clamp_(0, 1)
    return noisy.masked_fill_(drawn < level / 2, 0).masked_fill_(drawn >= 1 - level / 2, 1)


def make_task(
    settings: Mapping[str, Any],
    classes: int,
    like: Tensor,
    loss: Imported | None = None,
    metric: Imported | None = None,
) -> Task:
    """Make the task for `classes` classes, as a configuration or a file's metadata describe it.

    The task computes on the device and in the dtype of `like`, a parameter of the network. Its
    loss is hpctrain's unless another is given, whatever the settings name.
    """
    return Task(
        precision=settings["precision"],
        classes=0 if settings["task"] == "denoise" else classes,
        label_smoothing=settings.get("label_smoothing", 0.0),
        weights=like.new_tensor(given) if (given := settings["class_weights"]) else None,
        noise=settings["noise"],
        level=settings["noise_level"],
        loss=loss,
        metric=metric,
    )


def output_shape(task: str, image_shape: tuple[int, int, int], classes: int) -> tuple[int, ...]:
    """Return the output shape for one image (H, W, C): (classes,), or (C, H, W) to restore it."""
    height, width, channels = image_shape
    return (channels, height, width) if task == "denoise" else (classes,)


# Functions of the user's own


def import_own(name: str | None, flag: str) -> Imported | None:
    """Import the function of the user's own that a setting names, if any. Raises UsageError."""
    if name is None:
        return None
    own = import_function(name, flag)
    arguments = ("images", "generator") if flag == "--augment" else ("outputs", "targets")
    own.check_arguments(f"function({', '.join(arguments)})", *arguments)
    return own


def compute_losses(own: Imported, outputs: Tensor, targets: Tensor) -> Tensor:
    """Return the losses (n,) of samples."""
    return _per_sample(own(outputs, targets), len(outputs), own.setting)


def compute_metric(own: Imported, outputs: Tensor, targets: Tensor) -> dict[str, Tensor]:
    """Return the metric's figures of n samples: values and weights, (2, n) float64, by name."""
    n, found, figures = len(outputs), own(outputs, targets), {}
    if not isinstance(found, Mapping):
        found = {own.setting.rpartition(":")[2]: found}
    for name, value in found.items():
        if not isinstance(name, str) or not name.isprintable() or name in (ANSWERS, *TAKEN):
            raise UsageError(f"{own.setting} named a figure {name!r}: give it another name")
        is_pair = isinstance(value, tuple) and len(value) == 2
        both = value if is_pair else (value, torch.ones(n, device=outputs.device))
        parts = [_per_sample(part, n, f"{own.setting}: {name}").double() for part in both]
        figures[name] = torch.stack(parts)
    if not figures:
        raise UsageError(f"{own.setting} gave no figure")
    return figures


def _per_sample(found: Any, n: int, what: str) -> Tensor:
    """Return what a function has `found` for n samples. Raises UsageError if that is not (n,)."""
    is_tensor = isinstance(found, Tensor)
    if is_tensor and found.shape == (n,):
        return found
    got = f"a tensor of shape {tuple(found.shape)}" if is_tensor else type(found).__name__
    raise UsageError(
        f"{what} returned {got} for {n} sample{'s' * (n > 1)}: return one value a sample, a tensor"
        f" of shape ({n},), not their mean or sum (torch's losses: reduction='none')"
    )


@torch.no_grad()
def augment_by(own: Imported, prepare: Prepare, images: Tensor, key: int) -> Tensor:
    """Return images prepared by `prepare`, then augmented by `own` with numbers of `key` alone."""
    images = prepare(images, key)
    generator = torch.Generator(images.device).manual_seed(random_key(key, "own augmentation"))
    wanted, strides = (images.shape, images.dtype, images.device), images.stride()
    found = own(images, generator)
    if not isinstance(found, Tensor) or (found.shape, found.dtype, found.device) != wanted:
        text = f"{wanted[1]} on {wanted[2]}, shape {tuple(wanted[0])}"
        raise UsageError(f"{own.setting} must return images like those that it is given: {text}")
    # Convolutions read the memory format of the network.
    return found if found.stride() == strides else torch.empty_like(images).copy_(found)


# Tests of these functions before their first use


def check_task(task: Task, model: nn.Module, inputs: Tensor, targets: Tensor) -> None:
    """Test the loss and the metric of `task` with samples (n, C, H, W) and their targets.

    Raises UsageError that names the function. Model and torch's generators are restored.
    """
    loss, metric = task.loss, task.metric
    if not loss and not metric:
        return
    with evaluating(model), torch.no_grad(), fork_rng(inputs.device):
        outputs = network_output(model, inputs, task.precision)
        if not outputs.isfinite().all():
            return  # a first step will report it
        if metric:
            check_values(metric, compute_metric, outputs, targets)
        if loss:
            check_values(loss, lambda *given: {"": compute_losses(*given)}, outputs, targets)
            leaf, gradient = outputs.clone().requires_grad_(), None
            with torch.enable_grad():
                total = compute_losses(loss, leaf, targets).sum()
            if total.requires_grad:
                (gradient,) = torch.autograd.grad(total, leaf, allow_unused=True)
            if gradient is None or not gradient.isfinite().all():
                raise UsageError(f"{loss.setting} has no finite gradient for the outputs")


def check_values(
    own: Imported,
    compute: Callable[[Imported, Tensor, Tensor], dict[str, Tensor]],
    outputs: Tensor,
    targets: Tensor,
) -> None:
    """Test that the value of a sample depends on its output and target alone.

    `compute` returns the values of samples, (..., n) by name. It is called for all samples, again
    with torch's generator in another state, and for parts, one of which is a single sample.
    """
    n, before = len(outputs), (outputs.clone(), targets.clone())
    whole = compute(own, outputs, targets)
    if not torch.equal(before[0], outputs) or not torch.equal(before[1], targets):
        raise UsageError(f"{own.setting} changed its outputs or targets: compute with copies")
    if not all(values.isfinite().all() for values in whole.values()):
        raise UsageError(f"{own.setting} returned a value that is not finite")
    for seed, part in enumerate((slice(n), slice(1), slice(n // 2, n))):
        seed_torch(seed, outputs.device)
        found = compute(own, outputs[part], targets[part])
        within = (RELATIVE, ABSOLUTE) if seed else (0, 0)
        if found.keys() != whole.keys() or not all(
            torch.allclose(found[name].double(), values[..., part].double(), *within)
            for name, values in whole.items()
        ):
            raise UsageError(
                f"{own.setting} gave other values {'for a part of the batch' * bool(seed)}"
                f"{'in a second call' * (not seed)}: the value of a sample must depend on its"
                " output and target alone, because batches are cut into shards"
            )


def check_augment(own: Imported, images: Tensor, key: int) -> None:
    """Test that images (n, C, H, W) are augmented by the generator alone. Raises UsageError."""
    found = []
    with fork_rng(images.device):
        for seed, part in enumerate((images, images, images[:1])):
            seed_torch(seed, images.device)
            found.append(augment_by(own, lambda images, key: images.clone(), part, key))
    if images.isfinite().all() and not found[0].isfinite().all():
        raise UsageError(f"{own.setting} returned an image with NaN or infinity")
    if not torch.equal(found[0], found[1]):
        raise UsageError(
            f"{own.setting} returned other images for the same images and a generator of the same"
            " seed: all random numbers must come from the generator"
        )
