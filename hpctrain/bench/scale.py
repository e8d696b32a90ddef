"""``hpctrain bench scale``: what a step costs on 8 to 16,384 ranks, and a model of its efficiency.

Nothing runs on that many ranks. Messages and bytes are counted from the communication schedule of
rank 0. For CPU time and memory in Python, this process creates the plan, the message and the
reduction of rank 0, without the other ranks. The efficiency is computed by a model
(``step_model.py``), which is first compared with published runs. Its inputs, the time of a step,
latency and bandwidth, are given or measured on a few ranks (``network_job.py``).
"""

from __future__ import annotations

import json
import time
import tracemalloc
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
from rich.table import Table
from torch import nn

from hpctrain.bench.harness import number_text, python, run_job
from hpctrain.bench.network_job import CLASSES, Measured
from hpctrain.bench.step_model import (
    NUMBER,
    PUBLISHED,
    Computation,
    Link,
    Traffic,
    best_segments,
    bfloat16,
    efficiency,
    ring,
    slowest,
    step_times,
    tree,
)
from hpctrain.config import BenchConfig, Config
from hpctrain.data.partition import even_shares
from hpctrain.models import build
from hpctrain.parallel.batchnorm import tracked_layers
from hpctrain.parallel.choose import choose_reduce
from hpctrain.parallel.layout import Layout, lay_out
from hpctrain.parallel.message import Message
from hpctrain.parallel.overlap import cut
from hpctrain.parallel.placement import assign_shards
from hpctrain.parallel.transport import Transport
from hpctrain.plan import Facts, resolve
from hpctrain.text import counted
from hpctrain.training.steps import time_shares

RANKS = tuple(2**power for power in range(3, 15))
WAYS = ("plain", "tree", "tree + overlap", "bf16")
PIECES = 64  # parameter tensors of a network of which only the number of parameters is known
STEPS = 8  # measured
USUAL_SPREAD = 1.0  # percent
MEASURED = "measured"
BLOCKS, CALLS = 5, 64  # of steps whose CPU time is measured; the fastest block counts


class Inputs(NamedTuple):
    """The inputs of the model, and lines that describe them and their origin."""

    layout: Layout  # of the gradients
    channels: int  # of batch norm
    computation: Computation
    link: Link
    lines: tuple[str, ...]


class Objects(NamedTuple):
    """Costs of one rank in Python, with a tiny network, so that they depend on the ranks only."""

    rest: int  # numbers of the message besides gradients and moments
    start: float  # CPU seconds to create plan, message and reduction
    step: float  # CPU seconds of the parts of a step that depend on the number of ranks
    memory: int  # bytes


class RankCosts(NamedTuple):
    """The costs of a step on rank 0 of `ranks`."""

    ranks: int
    ways: dict[str, tuple[Traffic, int]]  # by reduction: traffic, segments (0 = no overlap)
    objects: Objects


def bench_scale(config: BenchConfig, folder: Path, show: Callable[[object], object]) -> None:
    """Show published runs and the model, then costs and efficiency by number of ranks."""
    show(published_table())
    inputs = find_inputs(config, folder)
    for line in inputs.lines:
        show(line)
    alone = [make_objects(1), make_objects(1)][1]  # the first one warms up
    costs = []
    for ranks in RANKS:
        objects = make_objects(ranks)
        rest = objects.rest + 2 * inputs.channels
        costs.append(RankCosts(ranks, find_ways(inputs, rest, ranks), objects))
    show(cost_table(costs, alone))
    show(efficiency_table(inputs, costs))
    if config.plot:
        from hpctrain.bench.scale_figure import plot_scale
        from hpctrain.report.figures import save

        curves = {way: [model(inputs, cost, way) for cost in costs] for way in WAYS}
        save(plot_scale(RANKS, curves, inputs.lines), Path(config.plot))
        show(f"{config.plot}: efficiency by number of ranks")


def find_inputs(config: BenchConfig, folder: Path) -> Inputs:
    """Return the inputs of the model: as given, otherwise measured on --ranks ranks."""
    found = Measured()
    if None in (config.step_time, config.latency, config.bandwidth):
        output, steps = folder / "measured.json", 0 if config.step_time else STEPS
        job = python("hpctrain.bench.network_job", str(output), str(steps), ranks=config.ranks)
        run_job(job, f"a job of {counted(config.ranks, 'rank')}")
        found = Measured(**json.loads(output.read_text()))

    def pick(given: float | None, measured: float, source: str = MEASURED) -> tuple[float, str]:
        return (measured, source) if given is None else (given, "given")

    seconds, of_seconds = pick(config.step_time, found.seconds)
    usual = USUAL_SPREAD if config.step_time else 100 * found.spread
    spread, of_spread = pick(config.spread, usual, "assumed" if config.step_time else MEASURED)
    latency, of_latency = pick(config.latency, 1e6 * found.latency)
    bandwidth, of_bandwidth = pick(config.bandwidth, found.bandwidth / 1e9)
    layout, channels = lay_out_network(config.parameters)
    name = "ResNet-50" if config.parameters is None else "given"
    lines = [
        f"gradients: {layout.length:,} numbers ({name})",
        f"step: {seconds:.3g} s ({of_seconds}), standard deviation {spread:.2g} % ({of_spread})",
        f"link: {latency:.3g} us a message ({of_latency}), {bandwidth:.3g} GB/s ({of_bandwidth})",
    ]
    if found.ranks:
        lines.append(f"measured: {counted(found.ranks, 'rank')} on {counted(found.hosts, 'host')}")
    if found.hosts == 1 and MEASURED in (of_latency, of_bandwidth):
        lines[-1] += "; messages within a host say nothing about a network"
    computation, link = Computation(seconds, spread / 100), Link(latency / 1e6, bandwidth * 1e9)
    return Inputs(layout, channels, computation, link, tuple(lines))


def lay_out_network(parameters: int | None) -> tuple[Layout, int]:
    """Return the layout and the batch-norm channels of ResNet-50 or a network of `parameters`."""
    with torch.device("meta"):  # allocates no memory
        if parameters is None:
            model = build("resnet50", (224, 224, 3), CLASSES)
        else:
            sizes = even_shares(parameters, min(parameters, PIECES))
            model = nn.ParameterList([torch.empty(size) for size in sizes])
    return lay_out(model), sum(layer.num_features for layer in tracked_layers(model).values())


def find_ways(inputs: Inputs, rest: int, ranks: int) -> dict[str, tuple[Traffic, int]]:
    """Return what rank 0 sends in a step, by reduction; `rest` numbers follow the gradients."""
    gradients = inputs.layout.length
    whole = tree(gradients + rest, ranks)
    segments = best_segments(step_times(inputs.computation, inputs.link, whole, ranks))
    spans = cut(inputs.layout, segments) if segments else []
    parts = [tree(length, ranks) for length in (*map(len, spans), rest)] if spans else [whole]
    overlapped = Traffic(*map(sum, zip(*parts, strict=True)))
    return {
        "plain": (ring(gradients + rest, ranks), 0),
        "tree": (whole, 0),
        "tree + overlap": (overlapped, len(spans)),
        "bf16": (bfloat16(gradients, rest, ranks), 0),
    }


def make_objects(ranks: int) -> Objects:
    """Create the plan, message and tree-order reduction of rank 0 of `ranks`; measure the costs."""

    def make() -> tuple[Message, Callable[[], None], object]:
        settings = replace(Config(), batch_per_rank=32, epochs=1, deterministic=True)
        plan = resolve(settings, Facts(ranks, "cpu", 1, 64 * ranks, (100, 100, 3), 1, 5, "", 1))
        comm: Any = SimpleNamespace(rank=0, size=ranks)
        message = Message(nn.Linear(8, 8), 0, 0, ranks)
        runs = assign_shards(plan.shards, ranks)
        reduce = choose_reduce(comm, message, runs, transport=Transport(comm))  # sends nothing

        def step() -> None:
            message.zero()
            reduce.begin([0])
            reduce.accumulate(0)
            message.set_seconds(1.0, 0.0)
            reduce()
            time_shares(message.totals(), 0.0)

        return message, step, plan

    began = time.thread_time()
    message, step, _ = make()
    start, blocks = time.thread_time() - began, []
    for _ in range(BLOCKS):
        began = time.thread_time()
        for _ in range(CALLS):
            step()
        blocks.append((time.thread_time() - began) / CALLS)
    tracemalloc.start()
    kept = make()
    memory = tracemalloc.get_traced_memory()[0]
    tracemalloc.stop()
    rest = len(kept[0].tensor) - message.layout.length
    return Objects(rest, start, min(blocks), memory)


def model(inputs: Inputs, cost: RankCosts, way: str) -> float:
    """Return the efficiency of a reduction by the model."""
    traffic, segments = cost.ways[way]
    return efficiency(inputs.computation, inputs.link, traffic, cost.ranks, segments)


def _table(title: str, heads: str, rows: Iterable[Iterable[str]], caption: str) -> Table:
    """Return a table; `heads` are the column headings, separated by bars."""
    table = Table(title=title, caption=caption)
    for head in heads.split("|"):
        table.add_column(head, justify="left" if head in ("machine", "network") else "right")
    for row in rows:
        table.add_row(*row)
    return table


def published_table() -> Table:
    """Return a table of published runs and of the model's results for them."""
    rows = []
    for run in PUBLISHED:
        link, spread = run.machine.link, run.machine.spread
        published, predicted = 100 * run.published, 100 * run.predict()
        rows.append(
            (
                *(run.machine.name, run.network, f"{run.ranks:,}"),
                *(f"{run.seconds:.2f}", f"{run.parameters * NUMBER / 1e6:.0f}"),
                *(f"{1e6 * link.latency:.1f}", f"{link.bandwidth / 1e9:.1f}", f"{100 * spread:g}"),
                *(f"{published:.1f}", f"{predicted:.1f}"),
                "fitted" if run.fitted else f"{predicted - published:+.1f}",
            )
        )
    heads = "machine|network|ranks|step, s|MB|us|GB/s|deviation, %|published, %|model, %|difference"
    caption = (
        "Horovod: arXiv:1802.05799 and its documentation; Summit: arXiv:1810.01993. The standard"
        " deviation of the step times was fitted to one run of each machine (docs/speed.md)"
    )
    return _table("Efficiency: published runs and the model", heads, rows, caption)


def cost_table(costs: list[RankCosts], alone: Objects) -> Table:
    """Return a table of what rank 0 sends in a step, and of CPU time and memory in Python."""
    rows = (
        (
            f"{ranks:,}",
            *(f"{each.messages:,} | {each.bytes / 1e6:.1f}" for each, _ in ways.values()),
            number_text(max(0.0, objects.step - alone.step) * 1e6),
            number_text(max(0.0, objects.start - alone.start) * 1e3),
            number_text((objects.memory - alone.memory) / 1024),
        )
        for ranks, ways, objects in costs
    )
    heads = "|".join(("ranks", *WAYS, "step, us", "start, ms", "memory, KiB"))
    caption = (
        "Messages | MB that rank 0 sends in a step. CPU time in Python per step and at the start,"
        " and memory of Python objects, each minus that of a single rank"
    )
    return _table("Costs of a step", heads, rows, caption)


def efficiency_table(inputs: Inputs, costs: list[RankCosts]) -> Table:
    """Return a table of the efficiency by the model."""
    rows = (
        (
            f"{cost.ranks:,}",
            f"{slowest(inputs.computation, cost.ranks):.4g}",
            *(f"{100 * model(inputs, cost, way):.1f}" for way in WAYS),
            str(cost.ways["tree + overlap"][1]),
        )
        for cost in costs
    )
    heads = "|".join(("ranks", "slowest rank, s", *WAYS, "segments"))
    caption = (
        "Weak scaling. This is a model: nothing ran on so many ranks. plain is counted as a ring,"
        " as MPI and NCCL use for long messages; for many ranks they may choose an algorithm with"
        " fewer messages"
    )
    return _table("Efficiency by the model, %", heads, rows, caption)
