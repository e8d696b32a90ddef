"""Metrics of torchmetrics, computed over the blocks of a split: the same figures on any ranks.

A metric is given probabilities (classes), values in their units, or images, and the targets, in
float64 and on the CPU. Where all of its states are sums, minima or maxima, it is updated with each
block alone, and its states are combined: sums of integers exactly, others by block and math.fsum,
in which the order has no effect. Any other metric, such as an area under a curve, is updated once:
rank 0 gathers predictions and targets in the order of the samples, up to `LARGEST` bytes of them.
torchmetrics' own synchronization is not used.

torchmetrics computes some figures in float32 even if its states are float64; `Float64` prevents it.
"""

from __future__ import annotations

import inspect
import math
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from hpctrain.config.parts import Part, build_part, load_class, taken_by
from hpctrain.errors import MOST_SHOWN, UsageError, brief_error, one_line
from hpctrain.numerics import watch_generators
from hpctrain.tasks.functions import check_names
from hpctrain.tasks.metric_inputs import (
    FAMILIES,
    IGNORED,
    Sample,
    choose_input,
    draw_sample,
    make_sample,
)
from hpctrain.tasks.scores import LARGEST, gather
from hpctrain.tasks.tally import Block, Tally
from hpctrain.text import brief, listed, say

if TYPE_CHECKING:
    from hpctrain.parallel.mpi import Comm

WITHIN = 1e-12  # of figures of whole and parts, relative and absolute
EXACT = 2.0**40  # integers up to this one are added exactly in float64, by up to 8,192 ranks
#: What combines the states of blocks, by the name of torchmetrics' function
REDUCTIONS = {"dim_zero_sum": "sum", "dim_zero_min": "min", "dim_zero_max": "max"}


class Float64(TorchFunctionMode):
    """In the block, torch's functions that this thread calls use float64 in place of float32."""

    def __torch_function__(
        self,
        function: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Call `function`; if it makes float32 of integers or numbers, again with float64."""
        if function is Tensor.float:
            function = Tensor.double
        given = tuple(map(widened, args))
        named = {name: widened(value) for name, value in (kwargs or {}).items()}
        result = function(*given, **named)
        if not isinstance(result, Tensor) or result.dtype != torch.float32:
            return result
        tensors = [value for value in given if isinstance(value, Tensor)]
        if not tensors:
            return function(*given, **{**named, "dtype": torch.float64})
        if any(tensor.is_floating_point() for tensor in tensors):
            return result.double()
        return function(*map(as_double, given), **named)


def widened(value: Any) -> Any:
    """Return float64 for the dtype float32, and any other argument as it is."""
    if value is torch.float32:
        return torch.float64
    return value


def as_double(value: Any) -> Any:
    """Return a tensor as float64, and any other argument as it is."""
    if isinstance(value, Tensor):
        return value.double()
    return value


class States:
    """The states of a metric, combined over blocks: sums, minima and maxima."""

    def __init__(self, metric: Any) -> None:
        self._reductions = {
            name: REDUCTIONS[of.__name__] for name, of in metric._reductions.items()
        }
        self.updates = 0
        self.exact: dict[str, np.ndarray] = {}  # sums of integers, and minima and maxima
        self.blocks: dict[str, list[np.ndarray]] = {}  # of other sums
        for name, default in metric._defaults.items():
            self.exact[name] = default.double().numpy().copy()
            self.blocks[name] = []
            if self._reductions[name] == "sum":
                self.exact[name][...] = 0

    def add(self, metric: Any) -> None:
        """Add the states of a metric that was updated with one block."""
        self.updates += 1
        for name, reduction in self._reductions.items():
            total = self.exact[name]
            value = getattr(metric, name).double().numpy()
            if reduction == "min":
                np.minimum(total, value, out=total)
            elif reduction == "max":
                np.maximum(total, value, out=total)
            elif value.shape == total.shape and is_small_integer(value, total):
                total += value
            else:
                self.blocks[name].append(value.copy())

    def merge(self, blocks: Sequence[tuple[int, dict[str, list[np.ndarray]]]], comm: Comm) -> None:
        """Let the states be those of all ranks, by the `updates` and `blocks` of each. Collective.

        States that are large, such as matrices, are sums of integers.
        """
        from hpctrain.parallel.mpi import MPI
        from hpctrain.watchdog import waiting

        operations = {"sum": MPI.SUM, "min": MPI.MIN, "max": MPI.MAX}
        self.updates = sum(updates for updates, _ in blocks)
        for name, reduction in self._reductions.items():
            self.blocks[name] = [value for _, of_rank in blocks for value in of_rank[name]]
            with waiting():
                comm.Allreduce(MPI.IN_PLACE, self.exact[name], operations[reduction])

    def load(self, metric: Any) -> None:
        """Let a metric have these states."""
        metric.reset()
        metric._update_count = self.updates
        for name, default in metric._defaults.items():
            value = self.exact[name]
            if self.blocks[name]:
                value = sum_exactly([value, *self.blocks[name]])
            setattr(metric, name, torch.from_numpy(np.array(value)).to(default.dtype))


def is_small_integer(value: np.ndarray, total: np.ndarray) -> bool:
    """Whether all values are integers, so small that they can be added to the total exactly."""
    if not np.isfinite(value).all():
        return False
    return bool((np.rint(value) == value).all() and (np.abs(total + value) <= EXACT).all())


def sum_exactly(values: Sequence[np.ndarray]) -> np.ndarray:
    """Return the sum of arrays (...), rounded once, whatever their order."""
    stacked = np.stack(np.broadcast_arrays(*values))
    flat = stacked.reshape(len(values), -1).T
    sums = [math.fsum(column) if np.isfinite(column).all() else column.sum() for column in flat]
    return np.array(sums).reshape(stacked.shape[1:])


@dataclass
class LibraryMetric:
    """A metric of a library with what it is given, and the names of its figures."""

    name: str  # of its figure
    flag: str  # "--metric torchmetrics:MulticlassAUROC()": begins errors
    metrics: list[Any]  # one, or one for each column of values
    #: Returns what each of `metrics` is given of samples.
    select: Callable[[Sample], list[Sample]]
    parts: tuple[str, ...]  # classes, or columns, of which it may have figures
    note: str = ""  # how it was made, with the defaults
    figures: tuple[str, ...] = ()  # see `name_figures`
    states: list[States] = field(default_factory=list)
    said: set[str] = field(default_factory=set)  # notes that were printed

    @property
    def has_sums(self) -> bool:
        """Whether the states of blocks can be combined; else it is updated with all samples."""
        return all(
            isinstance(default, Tensor) and getattr(of, "__name__", "") in REDUCTIONS
            for metric in self.metrics
            for default, of in zip(
                metric._defaults.values(), metric._reductions.values(), strict=True
            )
        )

    def start(self) -> LibraryMetric:
        """Begin an evaluation: no samples."""
        if self.has_sums:
            self.states = [States(metric) for metric in self.metrics]
        return self

    def update(self, sample: Sample) -> None:
        """Add a block of samples."""
        for metric, states, selected in zip(
            self.metrics, self.states, self.select(sample), strict=True
        ):
            if not len(selected.targets):
                continue
            metric.reset()
            with Float64(), catching_warnings():
                metric.update(*selected)
            states.add(metric)

    def compute(self, whole: Sample | None, notes: list[str] | None = None) -> list[Tensor | None]:
        """Return what each of `metrics` computes, None without samples; append warnings to `notes`.

        `whole` are all samples, of a metric without sums.
        """
        if self.has_sums:
            for metric, states in zip(self.metrics, self.states, strict=True):
                states.load(metric)
            counts = [states.updates for states in self.states]
        else:
            assert whole is not None
            selected = self.select(whole)
            counts = [len(sample.targets) for sample in selected]
        values: list[Tensor | None] = []
        for number, (metric, count) in enumerate(zip(self.metrics, counts, strict=True)):
            values.append(None)
            if not count:
                continue
            with Float64(), catching_warnings(notes):
                if not self.has_sums:
                    metric.reset()
                    metric.update(*selected[number])
                values[-1] = metric.compute()
            metric.reset()
        return values

    def named(self, values: Sequence[Tensor | None]) -> dict[str, float]:
        """Return the figures by name from what was computed."""
        if [*values] == [None]:
            return dict.fromkeys(self.figures, math.nan)
        numbers: list[float] = []
        for value in values:
            numbers += [math.nan] if value is None else value.double().flatten().tolist()
        if len(self.metrics) > 1:
            numbers = [math.fsum(numbers) / len(numbers), *numbers]
        return dict(zip(self.figures, numbers, strict=True))

    def name_figures(self, sample: Sample) -> None:
        """Set `figures` by what it computes of samples of all classes. Raises UsageError."""
        (value, *_) = self.of_parts(sample, (slice(None),))
        per_part = tuple(f"{self.name} of {part}" for part in self.parts)
        if not isinstance(value, Tensor):
            text = f"gives a {type(value).__name__}, and a figure is a number"
            raise UsageError(f"{self.flag} {text}")
        if len(self.metrics) > 1:
            self.figures = (self.name, *per_part)
        elif value.numel() == 1 and (value.dim() == 0 or len(per_part) < 2):
            self.figures = (self.name,)
        elif value.shape == (len(per_part),):
            self.figures = per_part
        else:
            text = f"gives a tensor of shape {tuple(value.shape)}, and a figure is a number"
            raise UsageError(f"{self.flag} {text}: leave out arguments that ask for more")

    def say_once(self, notes: Sequence[str]) -> None:
        """Print notes that were not printed before, a line each."""
        for note in dict.fromkeys(notes):
            if note not in self.said:
                say(f"{self.flag}: {brief(note, MOST_SHOWN)}", sys.stderr)
        self.said.update(notes)

    def of_parts(self, sample: Sample, parts: Sequence[Any]) -> list[Tensor | None]:
        """Return what it computes of samples, block by block.

        Raises UsageError if the library does.
        """
        try:
            self.start()
            if not self.has_sums:
                return self.compute(sample)
            for part in parts:
                if len(sample.targets[part]):
                    self.update(sample.take(part))
            return self.compute(None)
        except (Exception, SystemExit) as error:
            raise UsageError(f"{self.flag}: {brief_error(error)}") from error

    def check(self, sample: Sample) -> None:
        """Test that figures of samples do not depend on the blocks in which they come.

        The process-wide random generators must not change. Raises UsageError.
        """
        n = len(sample.targets)
        third = max(n // 3, 1)
        uneven = [slice(third), slice(third, n)]
        singles = [slice(number, number + 1) for number in range(n)]
        with watch_generators(torch.device("cpu")) as changed:
            whole = self.of_parts(sample, (slice(None),))
            for parts in ((slice(None),), uneven, uneven[::-1], singles):
                others = self.of_parts(sample, parts)
                if not all(map(is_close, whole, others)):
                    raise UsageError(
                        f"{self.flag} gives other figures when the same samples come in other"
                        " blocks, or again: it would depend on the ranks"
                    )
        if changed:
            raise UsageError(
                f"{self.flag} draws random numbers from {listed(changed)}: it would depend on the"
                " ranks"
            )


def is_close(first: Tensor | None, second: Tensor | None) -> bool:
    """Whether two computed values are equal but for rounding in float64."""
    if first is None or second is None:
        return first is second
    return first.shape == second.shape and torch.allclose(
        first.double(), second.double(), WITHIN, WITHIN, equal_nan=True
    )


@contextmanager
def catching_warnings(notes: list[str] | None = None) -> Iterator[None]:
    """Show no warnings of the block, but append their texts to `notes`."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        yield
    if notes is not None:
        notes += [" ".join(str(warning.message).split()) for warning in caught]


# The tally


class OfRank(NamedTuple):
    """What a rank sends to all others."""

    rows: int
    shape: tuple[int, ...]  # of one prediction; () without rows
    is_nan: bool
    failures: list[tuple[int, str]]  # by metric: block and reason; those of no block come last
    blocks: list[list[tuple[int, dict[str, list[np.ndarray]]]]]  # by metric: of its `States`


NO_FAILURE = (sys.maxsize, "")


class LibraryMetrics(Tally):
    """The figures of metrics of libraries."""

    is_metric = True

    def __init__(
        self,
        metrics: Sequence[LibraryMetric],
        kind: str,
        predict: Callable[[Tensor, Tensor], dict[str, Tensor]],
        largest: int = LARGEST,
    ) -> None:
        """`kind` is that of the targets, "" for images.

        `predict` returns "predictions" of outputs and targets and, if targets are images, these,
        too. More than `largest` bytes are not gathered.
        """
        self._kind = kind
        self._metrics = [metric.start() for metric in metrics]
        self._predict = predict
        self._largest = largest
        self._gathers = not all(metric.has_sums for metric in metrics)
        self._predictions: list[np.ndarray] = []
        self._targets: list[np.ndarray] = []
        self._rows = 0
        self._shape: tuple[int, ...] = ()
        self._is_nan = False
        self._failures = [NO_FAILURE] * len(metrics)
        self._figures: dict[str, float | None] = {}

    def measure(self, outputs: Tensor, inputs: Tensor, targets: Tensor) -> dict[str, Tensor]:
        return self._predict(outputs, targets)

    def add(self, block: Block, measured: Mapping[str, np.ndarray]) -> None:
        targets = measured.get("targets", block.targets)
        assert targets is not None
        sample = make_sample(measured["predictions"], targets, self._kind)
        self._rows += len(targets)
        self._shape = tuple(sample.predictions.shape[1:])
        self._is_nan |= bool(sample.predictions.isnan().any())
        if self._gathers and not self._is_nan:
            self._predictions.append(sample.predictions.numpy())
            self._targets.append(sample.targets.numpy())
        for number, metric in enumerate(self._metrics):
            if self._is_nan or not metric.has_sums:
                continue
            try:
                metric.update(sample)
            except Exception as error:  # of the library: some values are not in its domain
                failure = (block.number, one_line(error))
                self._failures[number] = min(self._failures[number], failure)

    def part(self) -> OfRank:
        return OfRank(
            rows=self._rows,
            shape=self._shape,
            is_nan=self._is_nan,
            failures=self._failures,
            blocks=[
                [(states.updates, states.blocks) for states in metric.states]
                for metric in self._metrics
            ],
        )

    def merge(self, parts: Sequence[OfRank], comm: Comm) -> None:
        """Raises UsageError on all ranks if rank 0 cannot hold what it would gather."""
        from hpctrain.parallel.mpi import agreed, on_root

        self._failures = [*map(min, zip(*(part.failures for part in parts), strict=True))]
        self._is_nan = any(part.is_nan for part in parts)
        for number, metric in enumerate(self._metrics):
            for place, states in enumerate(metric.states):
                states.merge([part.blocks[number][place] for part in parts], comm)
        whole = None
        if self._gathers and not self._is_nan:
            shape = max(part.shape for part in parts)
            rows = [part.rows for part in parts]
            try:
                check_size(self._metrics, self._kind, sum(rows), shape, self._largest)
            except UsageError as error:
                raise agreed(error) from None
            whole = self._gather(rows, shape, comm)
        self._figures = on_root(comm, self._compute, whole)
        self._predictions.clear()
        self._targets.clear()

    def _gather(self, rows: Sequence[int], shape: tuple[int, ...], comm: Comm) -> Sample:
        """Return the predictions and targets of all ranks, in the order of samples, on rank 0."""
        dtype = np.int64 if self._kind in FAMILIES else np.float64
        target_shape = () if self._kind == "class" else shape
        (predictions,) = gather(comm, self._predictions, rows, np.float64, shape)
        (targets,) = gather(comm, self._targets, rows, dtype, target_shape)
        return Sample(torch.from_numpy(predictions), torch.from_numpy(targets))

    def _compute(self, whole: Sample | None) -> dict[str, float | None]:
        """Return all figures (rank 0); NaN if predictions are, or if the library fails."""
        figures: dict[str, float | None] = {}
        for metric, (_, failure) in zip(self._metrics, self._failures, strict=True):
            figures |= dict.fromkeys(metric.figures, math.nan)
            if self._is_nan:
                continue
            notes = [f"NaN: {failure}"] if failure else []
            try:
                if not failure:
                    figures |= metric.named(metric.compute(whole, notes))
            except Exception as error:  # of the library, for example of a split of one sample
                notes.append(f"NaN: {one_line(error)}")
            metric.say_once(notes)
        return figures

    def figures(self) -> dict[str, float | None]:
        return self._figures


def check_size(
    metrics: Sequence[LibraryMetric],
    kind: str,
    rows: int,
    shape: tuple[int, ...],
    largest: int = LARGEST,
) -> None:
    """Raise UsageError if what rank 0 would gather of so many rows is more than `largest` bytes."""
    gathered = [metric for metric in metrics if not metric.has_sums]
    values = math.prod(shape)
    total = 8 * rows * (values + (1 if kind == "class" else values))
    if not gathered or total <= largest:
        return
    metric = gathered[0]
    hint = ""
    if hasattr(metric.metrics[0], "thresholds"):
        hint = ": give it thresholds=200, which counts in intervals"
    raise UsageError(
        f"{metric.flag} needs all predictions at once, {total / 2**30:.1f} GiB of {rows:,} samples"
        f" on rank 0, and the most are {largest / 2**30:.1f} GiB{hint}"
    )


# Making metrics


def make_metrics(
    named: Mapping[str, Part], kind: str, names: Sequence[str]
) -> tuple[LibraryMetric, ...]:
    """Make metrics by the names of their figures, for targets of a kind; "" for images.

    `names` are those of the classes or columns. Raises UsageError.
    """
    metrics = []
    sample = draw_sample(kind, len(names))
    for name, part in named.items():
        select = choose_input(part, kind, len(names))
        filled = filled_arguments(part, kind, len(names))
        metric = LibraryMetric(
            name=name,
            flag=part.flag,
            metrics=build_metrics(part, filled, len(names) if kind == "values" else 1),
            select=select,
            parts=tuple(names) if kind else (),
            note=f"{part.flag}: {describe_metric(part, filled)}",
        )
        metric.name_figures(sample)
        metrics.append(metric)
    check_names([figure for metric in metrics for figure in metric.figures])
    return tuple(metrics)


def build_metrics(part: Part, filled: Mapping[str, Any], times: int) -> list[Any]:
    """Return the metric, so many `times`. Raises UsageError."""
    metrics = []
    for _ in range(times):
        with catching_warnings():
            metrics.append(build_part(part, **filled).set_dtype(torch.float64))
    return metrics


def filled_arguments(part: Part, kind: str, count: int) -> dict[str, Any]:
    """Return the arguments that hpctrain gives a metric, for targets of a kind."""
    _, task, counted = FAMILIES.get(kind, ("", "", ""))
    filled = {
        "task": task,
        counted: count,
        "num_outputs": 1,
        "ignore_index": IGNORED if kind == "classes" else None,
        "multidim_average": "global",
    }
    return taken_by(part, filled)


def describe_metric(part: Part, filled: Mapping[str, Any]) -> str:
    """Return how a metric is made: "AUROC(task='multiclass', num_classes=5, ...)"."""
    bound = inspect.signature(load_class(part)).bind(*part.args, **part.kwargs, **filled)
    bound.apply_defaults()
    shown = {**bound.arguments}
    for name in ("kwargs", "validate_args", "multidim_average", "num_outputs"):
        shown.pop(name, None)
    return f"{part.name}({', '.join(f'{name}={value!r}' for name, value in shown.items())})"
