"""Batch-norm statistics of a global batch that is spread over shards.

With m_j samples, batch mean x_j and biased variance s_j^2 on shard j, M = sum m_j, the statistics
of the global batch are (pooled-variance formula, per channel)

    mean x_c = 1/M sum m_j x_j        variance s_c^2 = 1/M sum m_j [s_j^2 + (x_j - x_c)^2]

One sum over ranks gives both. With a shift r that is equal on all ranks, and share_j = m_j / M,

    A = sum share_j (x_j - r)         B = sum share_j (s_j^2 + (x_j - r)^2)
    x_c = r + A                       s_c^2 = B - A^2

r is the pooled mean of the previous step (at first, the batch mean of the first samples of the
training split), so that B - A^2 does not cancel. The running statistics are then updated once with
(x_c, s_c^2 N / (N - 1)) with N values per channel, as torch does on one process.

Modes: "exact" is the above. "running" is the literal procedure of pooling running states that
every worker has already updated with weight phi: variance (1 - phi) v + phi (B - phi A^2), in
which the between-worker term is too small by the factor phi. "average" omits that term. Both use
the unbiased s_j^2, as a torch process would hold it.

torch normalises with the biased variance and stores the unbiased one. With momentum 1 its running
buffers *are* the batch statistics, so a forward pass stores them there at no cost; after every step
the buffers hold the true running statistics again. One operation gathers all buffers, which remain
torch's own, and one copies them back. Only statistics are pooled: normalisation stays in the shard.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.module import register_module_forward_pre_hook

from hpctrain.errors import UsageError
from hpctrain.text import listed


class Probe(NamedTuple):
    """Properties of the model, measured in one forward pass of the first samples."""

    means: torch.Tensor  # (C,) batch means of all tracked layers: the first shift
    elements: list[int]  # values per sample and channel, by layer
    min_samples: int  # of a forward pass: 2 if a layer has one value per sample and channel


class BatchNorms:
    """All tracked batch-norm layers of a model, their running statistics as one (2, C) matrix."""

    def __init__(self, model: nn.Module, mode: str = "exact") -> None:
        """The model must already have its device and memory format.

        Sets the momentum of the layers to 1; their own is kept here.
        """
        self.model = model
        self.mode = mode
        self.layers: dict[str, _BatchNorm] = {}  # in training mode, with running statistics
        phi = []
        for name, module in model.named_modules():
            if isinstance(module, nn.SyncBatchNorm):
                raise UsageError(
                    f"{name} is a SyncBatchNorm, which needs torch.distributed: use BatchNorm;"
                    " hpctrain pools its statistics"
                )
            if isinstance(module, _BatchNorm) and module.track_running_stats and module.training:
                self.layers[name] = module
                phi.append(-1.0 if module.momentum is None else module.momentum)
                module.momentum = 1.0
        layers = self.layers.values()
        sizes = [layer.num_features for layer in layers]
        self.channels = sum(sizes)
        means, variances, self._calls = (
            [getattr(layer, name) for layer in layers]
            for name in ("running_mean", "running_var", "num_batches_tracked")
        )
        self._buffers = means + variances
        real = (parameter for parameter in model.parameters() if not parameter.is_complex())
        like = means[0] if layers else next(real)
        # running means and variances, and the shift: what a step updates
        self._state = like.new_zeros(3, self.channels)
        self.running = self._state[:2]  # (2, C)
        self.shift = self._state[2]  # (C,)
        self._places = [v for row in self.running.unbind() for v in row.split(sizes)]
        # num_batches_tracked by layer, and its value after a forward pass
        self._counts = torch.zeros(2, len(layers), dtype=torch.int64, device=like.device)
        self.updates, self._expected = self._counts.unbind()
        self._updates = self.updates.unbind()
        self._of_layer = torch.repeat_interleave(self.updates.new_tensor(sizes))
        self.elements = torch.ones_like(self._of_layer)  # values per sample, by channel
        self._factors: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        self._weights = torch.ones_like(self._state)  # with which a step updates `_state`
        self._weights[:2] = self._state.new_tensor(phi)[self._of_layer]
        self._cumulative = self._weights[0] < 0  # momentum None: a cumulative average
        self._any_cumulative = min(phi, default=0.0) < 0
        # the weight of the variance between shards, unless it is 1
        self._between = self._weights[0] if mode == "running" else torch.zeros_like(self.shift)

        # Memory and views of it, which are operations too, for the computations of a step. Rows,
        # for the last forward pass: batch mean and variance, distance of the mean from the shift,
        # Bessel's factor, distance times its weight, second term. In this order, pairs of rows are
        # operands of single operations.
        work = self._state.new_ones(6, self.channels)
        self._mean, _, _, self._factor, self._weighed, self._second = work
        self._gathered = work[:2].view(-1)
        self._values = work[1:3]
        self._by = work[3:5]
        self._distances = work[2:5:2]
        self._terms = work[2:6:3]
        self._factor_rows = 0  # number of samples that Bessel's factor is for
        self._shift = self.shift.expand(2, -1)
        self._target = torch.zeros_like(self._state)  # towards which a step moves `_state`
        self._means = self._target[0::2]
        self._variance = self._target[1]
        self._moments = self.running, self.running[0], self.running[1]  # see `merge`
        self.read()

    def owns(self, buffer: torch.Tensor) -> bool:
        """Whether a buffer of the model is a running statistic of a tracked layer."""
        return any(buffer is statistic for statistic in (*self._buffers, *self._calls))

    def probe(self, forward: Callable[[], object], rows: int) -> Probe:
        """Run one training forward pass of `rows` samples, and restore all buffers.

        Raises UsageError for layers whose statistics cannot be pooled.
        """
        before = {n: b.clone() for n, b in self.model.named_buffers() if not self.owns(b)}
        values: dict[nn.Module, list[int]] = defaultdict(list)  # per channel, of each call

        def note(module: nn.Module, inputs: tuple[Any, ...]) -> None:
            if isinstance(module, _BatchNorm):
                values[module].append(inputs[0].numel() // module.num_features)

        try:
            with torch.no_grad(), register_module_forward_pre_hook(note):
                forward()
            if self._buffers:
                torch.cat(self._buffers, out=self._gathered)
            means = self._mean.to("cpu", copy=True)
        except ValueError as error:  # torch raises it for a single value per channel
            raise UsageError(f"the model cannot learn from {rows} images: {error}") from error
        finally:
            self.restore()
        for name, buffer in self.model.named_buffers():
            old = before.get(name, buffer)
            if old.shape == buffer.shape and not torch.equal(old, buffer):
                buffer.copy_(old)
        if idle := [name for name, layer in self.layers.items() if not values[layer]]:
            raise UsageError(
                f"no image passes batch-norm layer {listed(idle, 3)}: name such layers in --freeze,"
                " or leave them out of the network"
            )
        elements = []
        for name, layer in self.layers.items():
            calls = values[layer]
            if len(calls) != 1 or calls[0] % rows:
                raise UsageError(
                    f"batch-norm layer {name} runs {len(calls)} times in one forward pass of {rows}"
                    f" rows, on {calls} values a channel: its statistics can be combined only if it"
                    " runs once (no checkpointing), and every row brings as many values"
                )
            elements.append(calls[0] // rows)
        single = any(calls == [rows] and layer.training for layer, calls in values.items())
        return Probe(means, elements, 2 if single else 1)

    def start(self, probe: Probe) -> None:
        """Set the shift and the values per sample from a probe, equal on all ranks."""
        self.shift.copy_(probe.means)
        self.elements = self.updates.new_tensor(probe.elements)[self._of_layer]

    def irregular(self) -> list[str]:
        """Return the layers that did not run exactly once since the buffers were restored."""
        counts = zip(self.layers, self._calls, self._expected, strict=True)
        return [name for name, calls, expected in counts if calls != expected]

    def collect(self, into: torch.Tensor, rows: int, total: int) -> torch.Tensor | int:
        """Add the moments of a shard's forward pass to the message's segment `into`, (2, C).

        The shard has `rows` of the `total` samples of the global batch. Returns the number of
        layers that did not run exactly once, on the device.
        """
        if not self.channels:
            return 0
        self._forwards += 1
        torch.cat(self._buffers, out=self._gathered)
        torch.sub(self._mean, self._shift, out=self._distances)
        if self.mode != "exact":
            self._weighed.mul_(self._between)
        elif rows != self._factor_rows:
            self._factor.copy_(self._bessel(rows)[0])
            self._factor_rows = rows
        # not by addcmul, which may round once where two operations round twice
        torch.sum(self._values * self._by, 0, out=self._second)
        into.add_(self._terms, alpha=rows / total)
        calls = torch.stack(self._calls)
        if self._forwards > 1:
            calls -= self._forwards - 1
        return (calls != self._expected).sum()

    def _bessel(self, rows: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Bessel's correction by channel for n = rows x elements: (n - 1) / n and n / (n - 1)."""
        if rows not in self._factors:
            n = (rows * self.elements).to(torch.float64)
            remove = (n - 1) / n
            apply = n / (n - 1).clamp(min=1)
            self._factors[rows] = remove.to(self._state.dtype), apply.to(self._state.dtype)
        return self._factors[rows]

    def merge(self, summed: torch.Tensor, rows: int, finite: torch.Tensor) -> None:
        """Update the running statistics from the reduced moments (2, C) of `rows` samples.

        If `finite`, a bool on the device, is false, nothing changes.
        """
        if not self.channels:
            return
        if summed is not self._moments[0]:
            self._moments = summed, summed[0], summed[1]
        _, first, second = self._moments
        torch.add(self._shift, first, out=self._means)
        if self.mode == "exact":
            torch.sub(second, first * first, out=self._variance)
            self._variance.clamp_(min=0).mul_(self._bessel(rows)[1])
        else:
            torch.sub(second, self._between * first * first, out=self._variance)
        updated = torch.lerp(self._state, self._target, self._weights)
        torch.where(finite, updated, self._state, out=self._state)
        self._counts += finite
        self._put_back()

    def read(self) -> None:
        """Take the running statistics from the model's buffers."""
        if self.layers:
            torch._foreach_copy_(self._places, self._buffers)
            torch._foreach_copy_(self._updates, self._calls)
        self.restore()

    def restore(self) -> None:
        """Copy the running statistics to the model's buffers, and prepare for the next step."""
        torch.add(self.updates, 1, out=self._expected)
        self._put_back()

    def _put_back(self) -> None:
        if self.layers:
            torch._foreach_copy_(self._buffers, self._places)
            torch._foreach_copy_(self._calls, self._updates)
        if self._any_cumulative:  # the weight of the next update is 1 / its number
            average = 1.0 / (self.updates[self._of_layer] + 1).to(self._state.dtype)
            torch.where(self._cumulative, average, self._weights[:2], out=self._weights[:2])
        self._forwards = 0  # since the buffers last held the running statistics
