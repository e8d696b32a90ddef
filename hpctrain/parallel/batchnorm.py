"""Batch-norm statistics of a mini-batch that is spread over shards.

With m_j rows, batch mean x_j and biased variance s_j^2 on shard j, M = sum m_j, the statistics
of the whole mini-batch are (pooled-variance formula, per channel)

    mean x_c = 1/M sum m_j x_j        variance s_c^2 = 1/M sum m_j [s_j^2 + (x_j - x_c)^2]

Both come out of one sum over ranks. With a shift r that is equal everywhere, share_j = m_j / M,

    A = sum share_j (x_j - r)         B = sum share_j (s_j^2 + (x_j - r)^2)
    x_c = r + A                       s_c^2 = B - A^2

r is the pooled mean of the step before (at first, the batch mean of the first shard's first
batch), so that B - A^2 does not cancel. The running statistics then take one update from
(x_c, s_c^2 N / (N - 1)) with N values per channel, as torch does on one process.

Modes: "exact" is the above. "running" is the literal procedure of pooling running states that
every worker has already updated with weight phi: variance (1 - phi) v + phi (B - phi A^2), in
which the between-worker term is too small by the factor phi. "average" leaves that term out.
"local" combines nothing: a rank keeps the statistics of its first shard. The last three take s_j^2
unbiased, as a torch process would hold it.

torch normalises with the biased variance and stores the unbiased one. With momentum 1 its
running buffers *are* the batch statistics, so they serve as scratch during forward, at no cost;
after every step they hold the true running statistics again. Only statistics are pooled:
normalisation itself stays within the shard.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from hpctrain.errors import UsageError


def pooled(shift: torch.Tensor, first: torch.Tensor, second: torch.Tensor) -> tuple:
    """Mean and biased variance, each (C,), from the shift r and the sums A and B."""
    return shift + first, (second - first * first).clamp_(min=0)


def moments(
    mean: torch.Tensor,
    variance: torch.Tensor,
    shift: torch.Tensor,
    share: float,
    square: torch.Tensor | float = 1.0,
) -> tuple[torch.Tensor, torch.Tensor]:
    """One shard's terms of A and of B, each (C,); `square` weighs (x_j - r)^2 in B."""
    distance = mean - shift
    return distance * share, (variance + square * distance * distance) * share


def tracked_layers(model: nn.Module) -> dict[str, _BatchNorm]:
    """The batch-norm layers in training mode that keep running statistics, by name."""
    layers = {}
    for name, module in model.named_modules():
        if isinstance(module, nn.SyncBatchNorm):
            raise UsageError(
                f"{name} is a SyncBatchNorm, which needs torch.distributed: use BatchNorm;"
                " hpctrain pools its statistics"
            )
        if isinstance(module, _BatchNorm) and module.track_running_stats and module.training:
            layers[name] = module
    return layers


class Probe(NamedTuple):
    """What one forward pass of the first batch tells about the model."""

    means: torch.Tensor  # (C,) batch means of all tracked layers: the first shift
    elements: list[int]  # values per row and channel, by layer
    least_rows: int  # that a forward takes: 2 where a layer has one value per row and channel


class BatchNorms:
    """All tracked batch-norm layers of a model as two flat vectors of C channels."""

    def __init__(self, model: nn.Module, mode: str = "exact") -> None:
        """Turn the layers' buffers into views; device and memory format of the model come first.

        The layers' own momentum is 1 from now on; theirs is kept here.
        """
        self.model, self.mode = model, mode
        self.layers = tracked_layers(model)
        self.sizes = [layer.num_features for layer in self.layers.values()]
        self.channels = sum(self.sizes)
        some = next(model.parameters())
        statistics = [layer.running_mean for layer in self.layers.values()]
        like = next((s for s in statistics if s is not None), some)
        self.scratch = torch.zeros(2, self.channels, dtype=like.dtype, device=some.device)
        self.calls = torch.zeros(len(self.layers), dtype=torch.int64, device=some.device)
        # phi; negative = cumulative average (momentum None)
        self.momentum = self.scratch.new_zeros(self.channels)
        self._adopt()
        self.running = self.scratch.clone()  # (2, C): means, variances
        self.updates = self.calls.clone()  # num_batches_tracked, by layer
        self.shift = self.scratch.new_zeros(self.channels)
        self.elements = torch.ones(self.channels, dtype=torch.int64, device=some.device)
        self._of_layer = torch.repeat_interleave(
            torch.arange(len(self.layers)), torch.tensor(self.sizes, dtype=torch.int64)
        ).to(some.device)
        self._private = torch.zeros_like(self.scratch) if mode == "local" else None
        self._private_share = 0.0
        self.first_shard = 0  # of this rank, for "local"
        self._cumulative = bool((self.momentum < 0).any()) if self.channels else False
        self._factors: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

    def _adopt(self) -> None:
        start = 0
        for number, (layer, size) in enumerate(zip(self.layers.values(), self.sizes, strict=True)):
            channels = slice(start, start + size)
            for row, name in enumerate(("running_mean", "running_var")):
                self.scratch[row, channels] = getattr(layer, name)
                setattr(layer, name, self.scratch[row, channels])
            if layer.num_batches_tracked is not None:
                self.calls[number] = layer.num_batches_tracked
            layer.num_batches_tracked = self.calls[number]
            self.momentum[channels] = -1.0 if layer.momentum is None else layer.momentum
            layer.momentum = 1.0
            start += size

    def probe(self, forward: Callable[[], object], rows: int) -> Probe:
        """Run one training forward of `rows` rows and undo its traces in all buffers."""
        before = {n: b.clone() for n, b in self.model.named_buffers() if not self.owns(b)}
        layers = {n: m for n, m in self.model.named_modules() if isinstance(m, _BatchNorm)}
        inputs: dict[str, list[int]] = {name: [] for name in layers}
        hooks = [
            layer.register_forward_pre_hook(
                lambda layer, args, name=name: inputs[name].append(
                    args[0].numel() // layer.num_features
                )
            )
            for name, layer in layers.items()
        ]
        try:
            self.scratch.zero_()
            with torch.no_grad():
                forward()
            means = self.scratch[0].to("cpu", copy=True)
        except ValueError as error:  # torch's word for a single value per channel
            raise UsageError(f"the model cannot learn from {rows} images: {error}") from error
        finally:
            for hook in hooks:
                hook.remove()
            self.restore()
        for name, buffer in self.model.named_buffers():
            old = before.get(name)
            if old is not None and old.shape == buffer.shape and not torch.equal(old, buffer):
                buffer.copy_(old)
        single = any(calls == [rows] and layers[name].training for name, calls in inputs.items())
        return Probe(means, list(self._elements_per_row(inputs, rows)), 2 if single else 1)

    def owns(self, held: object) -> bool:
        """Whether what a module holds is a running statistic of a tracked layer."""
        if not isinstance(held, torch.Tensor) or held.layout != torch.strided:
            return False
        own = (self.scratch.untyped_storage().data_ptr(), self.calls.untyped_storage().data_ptr())
        return held.untyped_storage().data_ptr() in own

    def _elements_per_row(self, inputs: dict[str, list[int]], rows: int) -> Iterator[int]:
        for name in self.layers:
            calls = inputs[name]
            if len(calls) != 1:
                raise UsageError(
                    f"batch-norm layer {name} runs {len(calls)} times in one forward pass: its"
                    " statistics can be combined only if it runs once (no checkpointing)"
                )
            if calls[0] % rows:
                raise UsageError(
                    f"batch-norm layer {name} sees {calls[0]} values a channel for {rows} rows:"
                    " its statistics can be combined only if every row brings as many"
                )
            yield calls[0] // rows

    def start(self, probe: Probe) -> None:
        """Take the shift and the values per row from a probe that is equal on all ranks."""
        self.shift.copy_(probe.means)
        self.elements.copy_(torch.tensor(probe.elements, dtype=torch.int64)[self._of_layer.cpu()])
        self._factors.clear()

    def clear(self) -> None:
        """Before a shard's forward: with momentum 1 a NaN in the scratch would stay (0 * NaN)."""
        self.scratch.zero_()
        self.calls.zero_()

    def collect(
        self, into: torch.Tensor, rows: int, total: int, shard: int | None = None
    ) -> torch.Tensor:
        """After the forward of a shard's `rows` of a mini-batch of `total`: add its moments to
        the message's segment `into`, (2, C). `shard` matters under "local" only.

        Returns how many layers did not run exactly once, as a number on the device.
        """
        share, (mean, variance) = rows / total, self.scratch
        if self.mode == "exact":
            variance = variance * self._bessel(rows)[0]
        square = {"exact": 1.0, "running": self._weight()}.get(self.mode, 0.0)
        terms = torch.stack(moments(mean, variance, self.shift, share, square))
        if self._private is None:
            into += terms
        elif shard is None or shard == self.first_shard:
            self._private += terms
            self._private_share += share
        return (self.calls != 1).sum()

    def _bessel(self, rows: int | torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Bessel's correction by channel for n = rows x elements: (n - 1) / n, and n / (n - 1)."""
        if isinstance(rows, int) and rows in self._factors:
            return self._factors[rows]
        n = (rows * self.elements).to(torch.float64)
        remove, apply = (n - 1) / n, n / (n - 1).clamp(min=1)
        found = remove.to(self.scratch.dtype), apply.to(self.scratch.dtype)
        if isinstance(rows, int):
            self._factors[rows] = found
        return found

    def _weight(self) -> torch.Tensor | float:
        """phi by channel; 1 / (number of this update) where momentum is None."""
        if not self._cumulative:
            return self.momentum
        average = 1.0 / (self.updates[self._of_layer] + 1).to(self.scratch.dtype)
        return torch.where(self.momentum < 0, average, self.momentum)

    def merge(self, summed: torch.Tensor, rows: int | torch.Tensor, finite: torch.Tensor) -> None:
        """Update the running statistics from the reduced moments (2, C) of `rows` rows, a number
        or one on the device.

        `finite` gates the update on the device: a step that is not finite leaves no trace.
        """
        if not self.channels:
            return
        first, second = summed
        if self._private is not None:
            if self._private_share == 0.0:
                return self.restore()
            first, second = self._private / self._private_share
        mean, variance = pooled(self.shift, first, second)
        weight = self._weight()
        if self.mode == "exact":
            variance = variance * self._bessel(rows)[1]
        elif self.mode == "running":
            variance = second - weight * first * first
        else:
            variance = second
        target = torch.stack([mean, variance])
        updated = torch.lerp(self.running, target, torch.as_tensor(weight).expand_as(target))
        torch.where(finite, updated, self.running, out=self.running)
        torch.where(finite, mean, self.shift, out=self.shift)
        self.updates += finite
        self.restore()

    def restore(self) -> None:
        """Put the running statistics into the model's buffers and make ready for the next step."""
        self.scratch.copy_(self.running)
        self.calls.copy_(self.updates)
        if self._private is not None:
            self._private.zero_()
            self._private_share = 0.0
