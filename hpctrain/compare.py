"""``hpctrain compare RUN_A RUN_B``: compare two runs bit by bit, and find the first difference.

Compared are the networks, the newest checkpoints (weights and optimizer state) if both runs have
one, and the records with their final digests; without MPI. Exit code 0 = equal, 1 = different.
"""

from __future__ import annotations

import dataclasses
import itertools
import tomllib
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.table import Table

from hpctrain.config import CompareConfig, Config
from hpctrain.errors import UsageError
from hpctrain.models import read_model
from hpctrain.plan import read_plan
from hpctrain.report.console import make_console
from hpctrain.report.figures import BLUE, check_name, empty_figure, save
from hpctrain.report.find import NETWORK_FILE, find_folder
from hpctrain.report.history import History
from hpctrain.report.record import Record, fields_marked, read_records
from hpctrain.text import brief, listed, say
from hpctrain.training.checkpoint import newest
from hpctrain.typed import parse_json

Tensors = dict[str, torch.Tensor]
NOT_COMPARED = ("run", "runs_dir", "progress", "tensorboard", "settings", "chosen")
MOST_TENSORS, MOST_PROBLEMS, MOST_BARS = 30, 6, 1000  # shown at most


def main(settings: CompareConfig) -> int:
    """Print how two runs differ; return 0 if they are equal, else 1."""
    folders = [find_folder(run, settings.runs_dir) for run in (settings.first, settings.second)]
    a, b = (read_model(folder / NETWORK_FILE)[0] for folder in folders)
    if settings.plot:
        check_name(Path(settings.plot), "--plot")
        _plot(Path(settings.plot), f"{settings.first} - {settings.second}", a, b)
    notes, problems = _add_checkpoints(folders, a, b)
    problems += [f"{name} is in the first run alone" for name in a if name not in b]
    problems += [f"{name} is in the second run alone" for name in b if name not in a]
    kinds = {name: (_kind(a[name]), _kind(b[name])) for name in a if name in b}
    found = {n: compare_tensors(a[n], b[n]) for n, (x, y) in kinds.items() if x == y}
    problems += [f"{name} is {x} and {y}" for name, (x, y) in kinds.items() if x != y]
    if apart := {name: numbers for name, numbers in found.items() if numbers[1]}:
        make_console().print(_table(apart))
    first = first_difference(*(read_records(folder) for folder in folders))
    lines = [f"tensors: {len(found) - len(apart)} equal, {len(apart)} different"]
    lines += [f"tensors: {listed(problems, MOST_PROBLEMS, '; ')}"] if problems else []
    lines += [f"records: {f'differ at step {first[0]}, {first[1]}' if first else 'equal'}", *notes]
    for which, folder in zip(("first", "second"), folders, strict=True):
        outcome = History.read(folder, "none").outcome()
        reason = f" ({brief(outcome.reason)})" if outcome.reason else ""
        if outcome.status != "done":
            lines.append(f"{which} run: {outcome.status or 'not finished'}{reason}")
    equal = not problems and not first and not apart
    for line in [*lines, *_settings(folders), "equal" if equal else "different"]:
        say(line)
    return 0 if equal else 1


def _kind(tensor: torch.Tensor) -> str:
    return f"{tuple(tensor.shape)} {str(tensor.dtype).removeprefix('torch.')}"


def compare_tensors(a: torch.Tensor, b: torch.Tensor) -> tuple[int, int, float, float]:
    """Compare two tensors of the same shape and dtype; NaNs with the same bits are equal.

    Returns how many values there are, how many differ in their bits, and the largest |a - b| of
    these, which may be infinite or NaN, and relative to max(|a|, |b|).
    """
    a, b = a.contiguous().reshape(-1, 1), b.contiguous().reshape(-1, 1)
    differ = (a.view(torch.uint8) != b.view(torch.uint8)).any(1)
    if not differ.any():
        return len(a), 0, 0.0, 0.0
    one, other = a[differ].double(), b[differ].double()
    distance = (one - other).abs()
    relative = (distance / torch.maximum(one.abs(), other.abs())).nan_to_num()
    return len(a), len(one), float(distance.max()), float(relative.max())


def _table(apart: dict[str, tuple[int, int, float, float]]) -> Table:
    table = Table("tensor", title="Tensors that differ")
    for name in ("values", "differing", "largest", "relative"):
        table.add_column(name, justify="right")
    for name, (count, differing, largest, relative) in list(apart.items())[:MOST_TENSORS]:
        table.add_row(name, f"{count:,}", f"{differing:,}", f"{largest:.3g}", f"{relative:.3g}")
    if len(apart) > MOST_TENSORS:
        table.caption = f"and {len(apart) - MOST_TENSORS} more tensors"
    return table


def _add_checkpoints(folders: list[Path], a: Tensors, b: Tensors) -> tuple[list[str], list[str]]:
    """Add the tensors of checkpoints of the same step; return notes, and why the runs differ."""
    (one, problems), (other, more) = map(newest, folders)
    problems += more
    if one is None or other is None:
        which = "both runs have" if one is other else f"the {'second' if one else 'first'} run has"
        return [f"checkpoints: not compared, {which} none"], problems
    if one.step != other.step:
        return [], [f"the newest checkpoints are of steps {one.step} and {other.step}", *problems]
    for tensors, checkpoint in ((a, one), (b, other)):
        tensors |= {f"checkpoint {name}": t for name, t in sorted(checkpoint.tensors().items())}
    return [f"checkpoints: of step {one.step}"], problems


def first_difference(a: Iterable[Record], b: Iterable[Record]) -> tuple[int, str] | None:
    """Return the first step at which two records differ, and the difference; None if there is none.

    Losses, accuracies, learning rates, digests of the steps for which both runs have one, and the
    digest at the end of both runs are compared. Values that are not finite are recorded as null.
    """
    a, b = list(a), list(b)
    in_a, in_b = ({r["step"] for r in records if r["kind"] == "digest"} for records in (a, b))
    pairs = itertools.zip_longest(*(_exact_fields(records, in_a & in_b) for records in (a, b)))
    one, other = next((pair for pair in pairs if pair[0] != pair[1]), (None, None))
    if one and other and one[:3] == other[:3]:
        return one[0], f"{one[1]}: {one[2]} {one[3]} and {other[3]}"
    if one or other:
        named = [f"{item[1]} {item[0]}" if item else "ended" for item in (one, other)]
        first = min(item[0] for item in (one, other) if item)
        return first, f"one has {named[0]}, the other {named[1]}"
    ends = [[r for r in records if r["kind"] == "end" and r.get("digest")] for records in (a, b)]
    digests = [found[-1]["digest"] for found in ends if found]  # not of preempted launches
    if len(set(digests)) > 1:
        return ends[0][-1].get("steps") or 0, f"end: digest {digests[0]} and {digests[1]}"
    return None


def _exact_fields(records: list[Record], digests: set[int]) -> Iterator[tuple[int, str, str, Any]]:
    """Yield step, kind, name and value of what equal runs record; digests only at `digests`."""
    for record in records:
        kind, step = record["kind"], record.get("step", 0)
        if kind != "digest" or step in digests:
            for name in fields_marked(kind, "deterministic"):
                yield step, kind, name, record.get(name)


def _settings(folders: list[Path]) -> Iterator[str]:
    """Yield lines with the settings that differ, as resolved, and what else does in the plans."""
    both = []
    for folder in folders:
        path = folder / "config.toml"
        try:
            settings = Config().table() | tomllib.loads(path.read_text())
            path = folder / "plan.json"
            plan = dataclasses.asdict(read_plan(parse_json(path.read_bytes())))
        except (OSError, ValueError) as error:
            yield f"settings: {path} is corrupt: {error}"
            return
        for name, value in settings.items():
            planned = plan.pop("learning_rate" if name == "lr" else name, None)
            settings[name] = planned if value is None else value
        both.append((settings, plan))
    for what, x, y in zip(("settings that differ", "plans differ"), *both, strict=True):
        names = [n for n in x if x[n] != y.get(n) and n not in NOT_COMPARED]
        if names:
            texts = (f"{n} {brief(x[n], 40)} and {brief(y.get(n), 40)}" for n in names)
            yield f"{what}: {'; '.join(texts)}"


def _plot(path: Path, names: str, a: Tensors, b: Tensors) -> None:
    """Plot the differences of the first convolution's weights, of many the largest ones."""
    name = next((name for name, tensor in a.items() if tensor.ndim == 4), next(iter(a), ""))
    if name not in a or name not in b or _kind(a[name]) != _kind(b[name]):
        raise UsageError(f"--plot: the runs have no {name or 'tensor'} of one shape")
    count, differing, *_ = compare_tensors(a[name], b[name])
    apart = (a[name].double() - b[name].double()).nan_to_num().flatten().numpy()
    step = -(-apart.size // MOST_BARS)
    rows = np.pad(apart, (0, -apart.size % step)).reshape(-1, step)
    bars = rows[np.arange(len(rows)), np.abs(rows).argmax(1)]
    figure = empty_figure(8, 3.5)
    axes = figure.subplots()
    axes.bar((np.arange(bars.size) + 0.5) * step - 0.5, bars, width=step, color=BLUE)
    axes.axhline(0, color="black", linewidth=0.6)
    axes.set_xlim(-0.5, apart.size - 0.5)
    axes.set_xlabel(f"value of {name} (0 to {apart.size - 1:,})", parse_math=False)
    axes.set_ylabel("difference" if step == 1 else f"largest difference among {step:,} values")
    axes.set_title(f"{names}: {differing:,} of {count:,} differ", fontsize=10, parse_math=False)
    save(figure, path)
    say(f"{path}: differences of {name}")
