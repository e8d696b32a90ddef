"""``hpctrain compare RUN_A RUN_B``: equal bit by bit or not, where, and since which step.

Reads the two folders only: no MPI. Exit code 0 = equal, 1 = different.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from hpctrain.config import CompareConfig
from hpctrain.errors import UsageError
from hpctrain.models import read_model
from hpctrain.report.differences import Difference, compare_tensors, first_difference
from hpctrain.report.figures import check_name
from hpctrain.report.folders import find_run
from hpctrain.report.plot_differences import plot_differences
from hpctrain.report.record import read_records
from hpctrain.report.tables import print_differences
from hpctrain.training.saved import FILE
from hpctrain.typed import parse_toml

Tensors = dict[str, np.ndarray]
OF_THE_RUN_ALONE = ("run", "runs_dir", "progress", "tensorboard")  # settings that change no number


def main(settings: CompareConfig) -> int:
    """Print how two runs differ; give 0 where they do not, else 1."""
    if settings.first is None or settings.second is None:
        raise UsageError("compare what? Name two runs")
    if settings.plot:
        check_name(Path(settings.plot), "--plot")
    folders = [find_run(run, settings.runs_dir) for run in (settings.first, settings.second)]
    a, b = (_tensors(folder) for folder in folders)
    problems = _structure(a, b)
    differences = [
        compare_tensors(name, a[name], b[name])
        for name in sorted(a)
        if name in b and not _unlike(a[name], b[name])
    ]
    records = first_difference(*(read_records(folder) for folder in folders))
    print_differences(differences, problems, records, _settings(folders))
    if settings.plot:
        _plot(settings, a, b)
    equal = not problems and not records and not any(d.differing for d in differences)
    print("equal" if equal else "different")
    return 0 if equal else 1


def _tensors(folder: Path) -> Tensors:
    tensors, _ = read_model(folder / FILE)
    return {name: tensor.numpy() for name, tensor in tensors.items()}


def _unlike(a: np.ndarray, b: np.ndarray) -> bool:
    return a.shape != b.shape or a.dtype != b.dtype


def _structure(a: Tensors, b: Tensors) -> list[str]:
    """Tensors that cannot be compared: of one side alone, or of another shape or type."""
    alone = [f"{name} is in the first run alone" for name in sorted(a) if name not in b]
    alone += [f"{name} is in the second run alone" for name in sorted(b) if name not in a]
    return alone + [
        f"{name} is {a[name].shape} {a[name].dtype} and {b[name].shape} {b[name].dtype}"
        for name in a
        if name in b and _unlike(a[name], b[name])
    ]


def _settings(folders: list[Path]) -> list[str]:
    """The settings that differ: "seed 0 and 1"."""
    try:
        one, other = (parse_toml((folder / "config.toml").read_text()) for folder in folders)
    except (OSError, ValueError):
        return []
    names = [name for name in {**one, **other} if name not in OF_THE_RUN_ALONE]
    shown: dict[str, tuple[Any, Any]] = {n: (one.get(n), other.get(n)) for n in names}
    return [f"{name} {x} and {y}" for name, (x, y) in shown.items() if x != y]


def _plot(settings: CompareConfig, a: Tensors, b: Tensors) -> None:
    """The bar plot of one tensor, by default the weights of the first convolution."""
    convolutions = [name for name, tensor in a.items() if tensor.ndim == 4]
    name = settings.tensor or next(iter(convolutions), next(iter(a)))
    if name not in a or name not in b or _unlike(a[name], b[name]):
        raise UsageError(f"--tensor {name}: no tensor of that name and one shape in both runs")
    found: Difference = compare_tensors(name, a[name], b[name])
    title = f"{settings.first} - {settings.second}: {found.differing:,} of {found.values:,} differ"
    if not found.differing:
        print(f"{name} is equal in both runs: there is nothing to draw")
        return
    apart = (a[name].astype(np.float64) - b[name].astype(np.float64)).reshape(-1)
    plot_differences(Path(settings.plot or ""), name, apart, title)
    print(f"{settings.plot}: differences of {name}")
