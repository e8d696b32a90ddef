"""``hpctrain compare RUN_A RUN_B``: equal bit by bit or not, where, and since which step.

Reads the two folders only: no MPI. Compared are the networks, the newest checkpoints (weights,
what the optimizer remembers) where both have some, and the records with the digests at their ends.
Exit code 0 = equal, 1 = different.
"""

from __future__ import annotations

import dataclasses
import sys
from pathlib import Path
from typing import Any

from torch import Tensor

from hpctrain.config import CompareConfig, load_toml
from hpctrain.errors import UsageError
from hpctrain.inference.network import FILE
from hpctrain.models import read_model
from hpctrain.plan_check import read_plan
from hpctrain.report.differences import (
    compare_tensors,
    first_difference,
    plot_differences,
    print_differences,
    values,
)
from hpctrain.report.figures import check_name
from hpctrain.report.find import find_folder
from hpctrain.report.history import find_outcome
from hpctrain.report.record import read_history, read_records
from hpctrain.text import brief, say
from hpctrain.training.checkpoint import newest
from hpctrain.typed import parse_json

Tensors = dict[str, Tensor]
OF_THE_RUN_ALONE = ("run", "runs_dir", "progress", "tensorboard")  # settings that change no number
RESOLVED = {"lr": "learning_rate"}  # settings that have another name in the plan


def main(settings: CompareConfig) -> int:
    """Print how two runs differ; give 0 where they do not, else 1."""
    if settings.first is None or settings.second is None:
        raise UsageError("compare what? Name two runs")
    if settings.plot:
        check_name(Path(settings.plot), "--plot")
    folders = [find_folder(run, settings.runs_dir) for run in (settings.first, settings.second)]
    a, b = (read_model(folder / FILE)[0] for folder in folders)
    if settings.plot:
        name = _chosen(settings, a, b)
        _plot(settings, name, a[name], b[name])
    checkpoints, problems = _add_checkpoints(folders, a, b)
    problems += _structure(a, b)
    differences = [
        compare_tensors(name, a[name], b[name])
        for name in a
        if name in b and not _unlike(a[name], b[name])
    ]
    records = first_difference(*(read_records(folder) for folder in folders))
    print_differences(
        differences, problems, records, [*checkpoints, *_outcomes(folders), *_settings(folders)]
    )
    equal = not problems and not records and not any(d.differing for d in differences)
    say("equal" if equal else "different")
    return 0 if equal else 1


def _add_checkpoints(folders: list[Path], a: Tensors, b: Tensors) -> tuple[list[str], list[str]]:
    """Add the tensors of the newest checkpoints, where both runs have one, of the same step; lines
    to print, and what makes the runs different.
    """
    found = [newest(folder, sys.maxsize) for folder in folders]
    damage = [line for _, damaged in found for line in damaged]
    (one, _), (other, _) = found
    if one is None or other is None:
        which = "both runs have" if one is other else f"the {'second' if one else 'first'} run has"
        return [f"checkpoints: not compared, {which} none"], damage
    if one.step != other.step:
        return [], [f"the newest checkpoints are of steps {one.step} and {other.step}", *damage]
    for tensors, checkpoint in ((a, one), (b, other)):
        read = checkpoint.tensors()
        tensors |= {f"checkpoint {name}": read[name] for name in sorted(read)}
    return [f"checkpoints: of step {one.step}"], damage


def _outcomes(folders: list[Path]) -> list[str]:
    """A line for each run that is not simply done."""
    lines = []
    for which, folder in zip(("first", "second"), folders, strict=True):
        outcome = find_outcome(folder, read_history(folder, "none"))
        reason = f" ({outcome.reason})" if outcome.reason else ""
        if outcome.status != "done":
            lines.append(f"{which} run: {outcome.status or 'not finished'}{reason}")
    return lines


def _unlike(a: Tensor, b: Tensor) -> bool:
    return a.shape != b.shape or a.dtype != b.dtype


def _structure(a: Tensors, b: Tensors) -> list[str]:
    """Tensors that cannot be compared: of one side alone, or of another shape or type."""
    alone = [f"{name} is in the first run alone" for name in a if name not in b]
    alone += [f"{name} is in the second run alone" for name in b if name not in a]
    return alone + [
        f"{name} is {_kind(a[name])} and {_kind(b[name])}"
        for name in a
        if name in b and _unlike(a[name], b[name])
    ]


def _kind(tensor: Tensor) -> str:
    return f"{tuple(tensor.shape)} {str(tensor.dtype).removeprefix('torch.')}"


def _settings(folders: list[Path]) -> list[str]:
    """The settings that differ, those that were not set as the plan resolved them; and what else
    differs in the plans.
    """
    try:
        configs = [load_toml(str(folder / "config.toml")) for folder in folders]
        plans = [_plan(folder / "plan.json") for folder in folders]
    except UsageError as error:
        return [f"settings: {error}"]
    names = [name for name in {**configs[0], **configs[1]} if name not in OF_THE_RUN_ALONE]
    set_or_planned = {
        name: [
            config.get(name, plan.get(RESOLVED.get(name, name), "not set"))
            for config, plan in zip(configs, plans, strict=True)
        ]
        for name in names
    }
    known = {RESOLVED.get(name, name) for name in set_or_planned}
    planned = {
        name: [plan.get(name, "not there") for plan in plans]
        for name in {**plans[0], **plans[1]}
        if name not in known
    }
    shown = {"settings that differ": set_or_planned, "plans differ": planned}
    lines = {
        what: [f"{n} {brief(x, 40)} and {brief(y, 40)}" for n, (x, y) in pairs.items() if x != y]
        for what, pairs in shown.items()
    }
    return [f"{what}: {'; '.join(found)}" for what, found in lines.items() if found]


def _plan(path: Path) -> dict[str, Any]:
    """What the settings came to; nothing where there is no such file. UsageError."""
    try:
        return dataclasses.asdict(read_plan(parse_json(path.read_bytes())))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        raise UsageError(f"{path} is damaged: {error}") from error


def _chosen(settings: CompareConfig, a: Tensors, b: Tensors) -> str:
    """The tensor to draw: by default the weights of the model's first convolution. UsageError."""
    convolutions = [name for name, tensor in a.items() if tensor.ndim == 4]
    name = settings.tensor or next(iter(convolutions), next(iter(a), ""))
    if name not in a or name not in b or _unlike(a[name], b[name]):
        raise UsageError(f"--tensor {name}: no tensor of that name and one shape in both runs")
    return name


def _plot(settings: CompareConfig, name: str, a: Tensor, b: Tensor) -> None:
    """The bar plot of one tensor; of complex numbers the distances."""
    found = compare_tensors(name, a, b)
    title = f"{settings.first} - {settings.second}: {found.differing:,} of {found.values:,} differ"
    apart = values(a) - values(b)
    apart = apart.abs() if apart.is_complex() else apart
    plot_differences(Path(settings.plot or ""), name, apart.nan_to_num().numpy(), title)
    say(f"{settings.plot}: differences of {name}")
