"""``hpctrain compare RUN_A RUN_B``: compare two runs bit by bit, and find the first difference.

Only the two run folders are read, without MPI. The networks, the newest checkpoints (weights and
optimizer state) if both runs have one, and the records with their final digests are compared.
Exit code 0 = equal, 1 = different.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.table import Table
from torch import Tensor

from hpctrain.config import CompareConfig, Config, load_toml
from hpctrain.errors import UsageError
from hpctrain.models import read_model
from hpctrain.plan import read_plan
from hpctrain.report.console import make_console
from hpctrain.report.fields import Record, fields_marked
from hpctrain.report.figures import BLUE, check_name, empty_figure, save
from hpctrain.report.find import NETWORK_FILE, find_folder
from hpctrain.report.history import History
from hpctrain.report.record import read_records
from hpctrain.text import brief, listed, say
from hpctrain.training.checkpoint import newest
from hpctrain.typed import parse_json

Tensors = dict[str, Tensor]
OF_THE_RUN_ALONE = ("run", "runs_dir", "progress", "tensorboard")  # do not affect the results
RESOLVED = {"lr": "learning_rate"}  # settings that have another name in the plan
MOST_TENSORS, MOST_PROBLEMS = 30, 6  # shown at most
MOST_BARS = 1000


def main(settings: CompareConfig) -> int:
    """Print how two runs differ; return 0 if they are equal, else 1."""
    if settings.plot:
        check_name(Path(settings.plot), "--plot")
    folders = [find_folder(run, settings.runs_dir) for run in (settings.first, settings.second)]
    a, b = (read_model(folder / NETWORK_FILE)[0] for folder in folders)
    if settings.plot:
        _plot(settings, a, b)
    notes, problems = _add_checkpoints(folders, a, b)
    problems += [f"{name} is in the first run alone" for name in a if name not in b]
    problems += [f"{name} is in the second run alone" for name in b if name not in a]
    both = {name: (_kind(a[name]), _kind(b[name])) for name in a if name in b}
    problems += [f"{name} is {x} and {y}" for name, (x, y) in both.items() if x != y]
    differences = [compare_tensors(n, a[n], b[n]) for n, (x, y) in both.items() if x == y]
    apart = [difference for difference in differences if difference.differing]
    first = first_difference(*(read_records(folder) for folder in folders))
    if apart:
        make_console().print(_difference_table(apart))
    lines = [f"tensors: {len(differences) - len(apart)} equal, {len(apart)} different"]
    lines += [f"tensors: {listed(problems, MOST_PROBLEMS, '; ')}"] if problems else []
    lines += [f"records: {f'differ at step {first[0]}, {first[1]}' if first else 'equal'}"]
    for line in [*lines, *notes, *_outcomes(folders), *_settings(folders)]:
        say(line)
    equal = not problems and not first and not apart
    say("equal" if equal else "different")
    return 0 if equal else 1


@dataclass(frozen=True)
class Difference:
    """The differences between two tensors of the same name, bit by bit."""

    name: str
    values: int  # in each tensor
    differing: int  # values whose bits differ
    largest: float  # |a - b|; infinite or NaN if a differing value is not finite
    relative: float  # largest |a - b| / max(|a|, |b|); NaN counts as 0


def compare_tensors(name: str, a: Tensor, b: Tensor) -> Difference:
    """Compare two tensors of the same shape and dtype; NaNs with the same bits are equal."""
    differ = (_bytes(a) != _bytes(b)).any(1)
    if not differ.any():
        return Difference(name, len(differ), 0, 0.0, 0.0)
    one, other = values(a)[differ], values(b)[differ]
    distance = (one - other).abs()
    relative = (distance / torch.maximum(one.abs(), other.abs())).nan_to_num()
    largest = float(distance.max()), float(relative.max())
    return Difference(name, len(differ), len(one), *largest)


def values(tensor: Tensor) -> Tensor:
    """Return the values of a tensor of any dtype and shape as (n,) float64 or complex128."""
    return tensor.reshape(-1).to(torch.complex128 if tensor.is_complex() else torch.float64)


def _bytes(tensor: Tensor) -> Tensor:
    """Return the bytes of each value, (n, itemsize)."""
    return tensor.contiguous().reshape(-1, 1).view(torch.uint8)


def first_difference(a: Iterable[Record], b: Iterable[Record]) -> tuple[int, str] | None:
    """Return the first step at which two records differ, and the difference; None if there is none.

    The fields that equal runs record identically are compared: losses, accuracies, learning rates,
    digests of the steps for which both runs have one (checkpoints may be of other steps), and
    finally the digest at the end of both runs.
    """
    a, b = list(a), list(b)
    in_a, in_b = ({r["step"] for r in records if r["kind"] == "digest"} for records in (a, b))
    compared = (_deterministic(records, in_a & in_b) for records in (a, b))
    for one, other in itertools.zip_longest(*compared):
        if one == other:
            continue
        if one is None or other is None or one[:2] != other[:2]:
            step = min(item[0] for item in (one, other) if item is not None)
            named = [f"{item[1]} {item[0]}" if item else "ended" for item in (one, other)]
            return step, f"one has {named[0]}, the other {named[1]}"
        step, kind, found = one
        name = next(name for name, value in found.items() if value != other[2][name])
        return step, f"{kind}: {name} {found[name]} and {other[2][name]}"
    # Preempted launches end without a digest.
    ends = [[r for r in records if r["kind"] == "end" and r.get("digest")] for records in (a, b)]
    digests = [found[-1]["digest"] for found in ends if found]
    if len(set(digests)) > 1:
        return ends[0][-1].get("steps") or 0, f"end: digest {digests[0]} and {digests[1]}"
    return None


def _deterministic(
    records: Iterable[Record], digests: set[int]
) -> Iterable[tuple[int, str, dict[str, Any]]]:
    """Yield step, kind and deterministic fields of each record; digests only at `digests`."""
    for record in records:
        kind = record["kind"]
        names = fields_marked(kind, "deterministic")
        if names and (kind != "digest" or record["step"] in digests):
            yield record["step"], kind, {name: record.get(name) for name in names}


def _difference_table(differences: list[Difference]) -> Table:
    table = Table(title="Tensors that differ")
    for name in ("tensor", "values", "differing", "largest", "relative"):
        table.add_column(name, justify="left" if name == "tensor" else "right")
    for d in differences[:MOST_TENSORS]:
        cells = (f"{d.values:,}", f"{d.differing:,}", f"{d.largest:.3g}", f"{d.relative:.3g}")
        table.add_row(d.name, *cells)
    if (more := len(differences) - MOST_TENSORS) > 0:
        table.caption = f"and {more} more tensors"
    return table


def _add_checkpoints(folders: list[Path], a: Tensors, b: Tensors) -> tuple[list[str], list[str]]:
    """Add the tensors of the newest checkpoints, if both runs have one, of the same step.

    Returns lines to print, and the reasons why the runs are different.
    """
    found = [newest(folder) for folder in folders]
    corrupt = [line for _, lines in found for line in lines]
    (one, _), (other, _) = found
    if one is None or other is None:
        which = "both runs have" if one is other else f"the {'second' if one else 'first'} run has"
        return [f"checkpoints: not compared, {which} none"], corrupt
    if one.step != other.step:
        return [], [f"the newest checkpoints are of steps {one.step} and {other.step}", *corrupt]
    for tensors, checkpoint in ((a, one), (b, other)):
        read = checkpoint.tensors()
        tensors |= {f"checkpoint {name}": read[name] for name in sorted(read)}
    return [f"checkpoints: of step {one.step}"], corrupt


def _outcomes(folders: list[Path]) -> Iterable[str]:
    """Yield a line for each run that is not done."""
    for which, folder in zip(("first", "second"), folders, strict=True):
        outcome = History.read(folder, "none").outcome()
        reason = f" ({brief(outcome.reason)})" if outcome.reason else ""
        if outcome.status != "done":
            yield f"{which} run: {outcome.status or 'not finished'}{reason}"


def _kind(tensor: Tensor) -> str:
    return f"{tuple(tensor.shape)} {str(tensor.dtype).removeprefix('torch.')}"


def _settings(folders: list[Path]) -> list[str]:
    """Return lines with the settings that differ and with other differences between the plans.

    A setting that was not set has the value to which the plan resolved it.
    """
    try:
        default = {name: v for name, v in Config().table().items() if v is not None}
        configs = [default | load_toml(str(folder / "config.toml")) for folder in folders]
        plans = [_plan(folder / "plan.json") for folder in folders]
    except UsageError as error:
        return [f"settings: {error}"]
    both = list(zip(configs, plans, strict=True))
    names = [name for name in {**configs[0], **configs[1]} if name not in OF_THE_RUN_ALONE]
    planned = {RESOLVED.get(name, name): name for name in names}  # by their names in the plan
    pairs = {
        "settings that differ": {
            name: [config.get(name, plan.get(key, "not set")) for config, plan in both]
            for key, name in planned.items()
        },
        "plans differ": {
            key: [plan.get(key, "not there") for plan in plans]
            for key in {**plans[0], **plans[1]}
            if key not in planned and key not in ("settings", "chosen")
        },
    }
    lines = {
        what: [f"{n} {brief(x, 40)} and {brief(y, 40)}" for n, (x, y) in found.items() if x != y]
        for what, found in pairs.items()
    }
    return [f"{what}: {'; '.join(found)}" for what, found in lines.items() if found]


def _plan(path: Path) -> dict[str, Any]:
    """Return the fields of a plan, or {} if there is no such file. Raises UsageError."""
    try:
        return dataclasses.asdict(read_plan(parse_json(path.read_bytes())))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        raise UsageError(f"{path} is corrupt: {error}") from error


def _plot(settings: CompareConfig, a: Tensors, b: Tensors) -> None:
    """Plot the differences of one tensor, by default the weights of the first convolution.

    For complex values these are absolute differences. Raises UsageError.
    """
    convolutions = [name for name, tensor in a.items() if tensor.ndim == 4]
    name = settings.tensor or next(iter(convolutions), next(iter(a), ""))
    if name not in a or name not in b or _kind(a[name]) != _kind(b[name]):
        raise UsageError(f"--tensor {name}: no tensor of that name and one shape in both runs")
    found = compare_tensors(name, a[name], b[name])
    title = f"{settings.first} - {settings.second}: {found.differing:,} of {found.values:,} differ"
    apart = values(a[name]) - values(b[name])
    apart = apart.abs() if apart.is_complex() else apart
    plot_differences(Path(settings.plot or ""), name, apart.nan_to_num().numpy(), title)
    say(f"{settings.plot}: differences of {name}")


def largest_of_neighbours(values: np.ndarray, count: int) -> np.ndarray:
    """Return, for every `count` neighbours in (n,), the one farthest from zero with its sign."""
    padded = np.pad(values, (0, -values.size % count)).reshape(-1, count)
    return np.take_along_axis(padded, np.abs(padded).argmax(1)[:, None], 1)[:, 0]


def plot_differences(path: Path, name: str, differences: np.ndarray, title: str) -> None:
    """Draw a bar for each difference, (n,), in the order of the tensor's elements.

    For a large tensor, each bar is the largest difference among several neighbours.
    """
    figure = empty_figure(8, 3.5)
    axes = figure.subplots()
    step = -(-differences.size // MOST_BARS)
    bars = largest_of_neighbours(differences, step)
    axes.bar((np.arange(bars.size) + 0.5) * step - 0.5, bars, width=step, color=BLUE)
    axes.axhline(0, color="black", linewidth=0.6)
    axes.set_xlim(-0.5, differences.size - 0.5)
    axes.set_xlabel(f"value of {name} (0 to {differences.size - 1:,})", parse_math=False)
    axes.set_ylabel("difference" if step == 1 else f"largest difference among {step:,} values")
    axes.set_title(title, fontsize=10, parse_math=False)
    save(figure, path)
