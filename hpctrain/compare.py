"""``hpctrain compare RUN_A RUN_B``: compare two runs bit by bit, and find the first difference.

Compared are the networks, the newest checkpoints (weights and optimizer state) if both runs have
one, and the records with their final digests; without MPI. Exit code 0 = equal, 1 = different.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch

from hpctrain.config import CompareConfig, Config
from hpctrain.errors import UsageError
from hpctrain.models import read_model
from hpctrain.outcome import Status
from hpctrain.report.figures import BLUE, check_name, empty_figure, save
from hpctrain.report.find import NETWORK_FILE, find_folder
from hpctrain.report.history import History
from hpctrain.report.record import Record, fields_marked, read_records
from hpctrain.report.settings import UnreadableFile, read_plan_of, read_settings
from hpctrain.text import brief, say
from hpctrain.training.checkpoint import newest

Tensors = dict[str, torch.Tensor]
#: Not compared, since a run is equal without them; the plan has the learning rate.
NOT_COMPARED = ("run", "runs_dir", "progress", "tensorboard", "settings", "chosen", "lr")
MOST_TENSORS, MOST_BARS = 30, 1000  # shown at most


def main(settings: CompareConfig) -> int:
    """Print how two runs differ; return 0 if they are equal, else 1."""
    runs = settings.first, settings.second
    folders = [find_folder(run, settings.runs_dir) for run in runs]
    a, b = (read_model(folder / NETWORK_FILE)[0] for folder in folders)
    if settings.plot:
        check_name(Path(settings.plot), "--plot")
        _plot(Path(settings.plot), " - ".join(runs), a, b)
    (one, problems), (other, more) = map(newest, folders)
    problems += more
    steps = [each.step if each else "none" for each in (one, other)]
    if one and other and one.step == other.step:
        for tensors, checkpoint in ((a, one), (b, other)):
            tensors |= {f"checkpoint {name}": t for name, t in sorted(checkpoint.tensors().items())}
    elif one and other:
        problems.append(f"the newest checkpoints are of steps {steps[0]} and {steps[1]}")
    found = {name: difference(a.get(name), b.get(name)) for name in (a | b)}
    apart = [f"{name}: {text}" for name, text in found.items() if text]
    first = first_difference(*(read_records(folder) for folder in folders))
    lines = [
        *apart[:MOST_TENSORS],
        f"tensors: {len(found) - len(apart)} equal, {len(apart)} different",
        f"records: {f'differ at step {first[0]}, {first[1]}' if first else 'equal'}",
        f"checkpoints: of steps {steps[0]} and {steps[1]}",
        *problems,
        *_settings(folders),
    ]
    for run, folder in zip(runs, folders, strict=True):
        status, reason, _ = History.read(folder, "none").outcome()
        if status != Status.DONE:
            lines.append(
                f"{run}: {status or 'not finished'} ({brief(reason or 'no reason known')})"
            )
    equal = not apart and not first and not problems
    for line in [*lines, "equal" if equal else "different"]:
        say(line)
    return 0 if equal else 1


def difference(a: torch.Tensor | None, b: torch.Tensor | None) -> str:
    """Describe how two tensors differ; empty if their bits are equal, also those of NaNs.

    Values that differ are counted, with the largest |a - b|, also relative to max(|a|, |b|).
    """
    kinds = ["missing" if t is None else f"{tuple(t.shape)} {t.dtype}" for t in (a, b)]
    if a is None or b is None or kinds[0] != kinds[1]:
        return f"{kinds[0]} and {kinds[1]}"
    a, b = a.contiguous().reshape(-1, 1), b.contiguous().reshape(-1, 1)
    differ = (a.view(torch.uint8) != b.view(torch.uint8)).any(1)
    if not differ.any():
        return ""
    one, other = a[differ].double(), b[differ].double()
    distance = (one - other).abs()
    relative = (distance / torch.maximum(one.abs(), other.abs())).nan_to_num().max()
    numbers = f"largest difference {distance.max():.3g}, relative {relative:.3g}"
    return f"{len(one):,} of {len(a):,} values differ, {numbers}"


def first_difference(a: Iterable[Record], b: Iterable[Record]) -> tuple[float, str] | None:
    """Return the first step at which two records differ, and the difference; None if there is none.

    Compared is what equal runs record alike (`FIELDS`), and of the digests those of steps for which
    both runs have one. Values that are not finite are recorded as null.
    """
    a, b = list(a), list(b)
    in_a, in_b = ({_place(r) for r in records if r.get("digest")} for records in (a, b))
    fields = (_exact_fields(records, in_a & in_b) for records in (a, b))
    for one, other in itertools.zip_longest(*fields, fillvalue=(math.inf, "nothing", "", None)):
        if one[:3] != other[:3]:
            return min(one[0], other[0]), f"one has {one[1]}, the other {other[1]}"
        if one != other:
            return one[0], f"{one[1]}: {one[2]} {one[3]} and {other[3]}"
    return None


def _place(record: Record) -> tuple[int, str]:
    """Return step and kind; an end is one of all steps before it."""
    return record.get("step") or record.get("steps") or 0, record["kind"]


def _exact_fields(
    records: list[Record], digested: set[tuple[int, str]]
) -> Iterator[tuple[float, str, str, Any]]:
    """Yield step, kind, name and value of what equal runs record; digests only at `digested`."""
    last = {_place(record): record for record in records}  # a run may end twice after one step
    for record in records:
        place = step, kind = _place(record)
        if kind not in ("digest", "end") or (place in digested and last[place] is record):
            for name in fields_marked(kind, "deterministic"):
                yield step, kind, name, record.get(name)


def _settings(folders: list[Path]) -> Iterator[str]:
    """Yield a line with the settings that differ, those of the plan as they were resolved."""
    both = []
    for folder in folders:
        try:
            settings = Config().table() | read_settings(folder)
            plan = read_plan_of(folder)
        except UnreadableFile as error:
            yield f"settings: {error.path} is corrupt: {error.cause}"
            return
        both.append(settings | dataclasses.asdict(plan))
    a, b = both
    names = [name for name in a if a[name] != b.get(name) and name not in NOT_COMPARED]
    texts = (f"{name} {brief(a[name], 40)} and {brief(b.get(name), 40)}" for name in names)
    yield from [f"settings that differ: {'; '.join(texts)}"] if names else []


def _plot(path: Path, names: str, a: Tensors, b: Tensors) -> None:
    """Plot the differences of the first convolution's weights, of many the largest ones."""
    name = next((name for name, tensor in a.items() if tensor.ndim == 4), next(iter(a), ""))
    if name not in a or name not in b or a[name].shape != b[name].shape:
        raise UsageError(f"--plot: the runs have no {name or 'tensor'} of one shape")
    apart = (a[name].double() - b[name].double()).nan_to_num().flatten().numpy()
    parts = np.array_split(apart, min(apart.size, MOST_BARS))
    bars = [part[np.abs(part).argmax()] for part in parts]
    figure = empty_figure(8, 3.5)
    axes = figure.subplots()
    places = np.linspace(0, apart.size - 1, len(bars))
    axes.bar(places, bars, width=apart.size / len(bars), color=BLUE)
    axes.axhline(0, color="black", linewidth=0.6)
    axes.set_xlabel(f"value of {name} (0 to {apart.size - 1:,})", parse_math=False)
    axes.set_ylabel(f"{'largest ' * (apart.size > MOST_BARS)}difference")
    axes.set_title(f"{names}\n{difference(a[name], b[name]) or 'equal'}", parse_math=False)
    save(figure, path)
    say(f"{path}: differences of {name}")
