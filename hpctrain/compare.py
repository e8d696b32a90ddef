"""``hpctrain compare RUN_A RUN_B``: compare two runs bit by bit, and find the first difference.

Compared are the networks, the newest checkpoints (weights and optimizer state) if both runs have
one, and the records with their final digests; without MPI. Exit code 0 = equal, 1 = different.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from hpctrain.config import CompareConfig, Config
from hpctrain.errors import UsageError
from hpctrain.models import read_model
from hpctrain.models.weights import Tensors
from hpctrain.outcome import Status
from hpctrain.report.figures import BLUE, check_name, empty_figure, save
from hpctrain.report.find import NETWORK_FILE, find_folder
from hpctrain.report.history import History
from hpctrain.report.outputs import output_name
from hpctrain.report.record import Record, fields_marked, read_records
from hpctrain.report.settings import UnreadableFile, read_plan_of, read_settings
from hpctrain.text import brief, say
from hpctrain.training.checkpoint import newest

#: Not compared, since a run is equal without them; the plan has the learning rate.
NOT_COMPARED = ("run", "runs_dir", "progress", "tensorboard", "settings", "chosen", "lr")
MOST_TENSORS = 30  # shown
MOST_BARS = 1000  # of a plot


def main(settings: CompareConfig) -> int:
    """Print how two runs differ; return 0 if they are equal, else 1."""
    names = (settings.first, settings.second)
    folders = [find_folder(name, settings.runs_dir) for name in names]
    a, b = (read_model(folder / NETWORK_FILE)[0] for folder in folders)
    if settings.plot:
        path = Path(settings.plot)
        check_name(path, "--plot")
        _plot(path, " - ".join(names), a, b)
    steps, problems = _add_checkpoints(folders, [a, b])
    differences = {name: difference(a.get(name), b.get(name)) for name in (a | b)}
    apart = [f"{name}: {text}" for name, text in differences.items() if text]
    first = first_difference(*(read_records(folder) for folder in folders))
    records = "equal"
    if first:
        step, text = first
        records = f"differ at step {step}, {text}"
    equal = not apart and not first and not problems
    lines = [
        *apart[:MOST_TENSORS],
        f"tensors: {len(differences) - len(apart)} equal, {len(apart)} different",
        f"records: {records}",
        f"checkpoints: of steps {' and '.join(steps)}",
        *problems,
        *_settings(folders),
        *_unfinished(names, folders),
        "equal" if equal else "different",
    ]
    for line in lines:
        say(line)
    return 0 if equal else 1


def _add_checkpoints(folders: list[Path], networks: list[Tensors]) -> tuple[list[str], list[str]]:
    """Add the tensors of the newest checkpoints to the networks', if they are of the same step.

    Return the steps of both, and what stands against comparing them.
    """
    checkpoints = []
    problems: list[str] = []
    for folder in folders:
        checkpoint, skipped = newest(folder)
        checkpoints.append(checkpoint)
        problems += skipped
    steps = [str(checkpoint.step) if checkpoint else "none" for checkpoint in checkpoints]
    if None in checkpoints:
        return steps, problems
    if steps[0] != steps[1]:
        problems.append(f"the newest checkpoints are of steps {steps[0]} and {steps[1]}")
        return steps, problems
    for network, checkpoint in zip(networks, checkpoints, strict=True):
        if checkpoint:
            tensors = sorted(checkpoint.tensors().items())
            network |= {f"checkpoint {name}": tensor for name, tensor in tensors}
    return steps, problems


def _unfinished(names: Sequence[str], folders: list[Path]) -> Iterator[str]:
    """Yield a line for each run that is not done."""
    for name, folder in zip(names, folders, strict=True):
        outcome = History.read(folder, "none").outcome()
        if outcome.status != Status.DONE:
            reason = brief(outcome.reason or "no reason known")
            yield f"{name}: {outcome.status or 'not finished'} ({reason})"


def difference(a: torch.Tensor | None, b: torch.Tensor | None) -> str:
    """Describe how two tensors differ; empty if their bits are equal, also those of NaNs.

    Values that differ are counted, with the largest |a - b|, also relative to max(|a|, |b|).
    """
    kind_of_a = _kind(a)
    kind_of_b = _kind(b)
    if a is None or b is None or kind_of_a != kind_of_b:
        return f"{kind_of_a} and {kind_of_b}"
    a = a.contiguous().reshape(-1, 1)
    b = b.contiguous().reshape(-1, 1)
    differ = (a.view(torch.uint8) != b.view(torch.uint8)).any(1)
    if not differ.any():
        return ""
    one = a[differ].double()
    other = b[differ].double()
    distance = (one - other).abs()
    relative = (distance / torch.maximum(one.abs(), other.abs())).nan_to_num().max()
    numbers = f"largest difference {distance.max():.3g}, relative {relative:.3g}"
    return f"{len(one):,} of {len(a):,} values differ, {numbers}"


def _kind(tensor: torch.Tensor | None) -> str:
    if tensor is None:
        return "missing"
    return f"{tuple(tensor.shape)} {tensor.dtype}"


def first_difference(a: Iterable[Record], b: Iterable[Record]) -> tuple[float, str] | None:
    """Return the first step at which two records differ, and the difference; None if there is none.

    Compared is what equal runs record alike (`FIELDS`), and of the digests those of steps for which
    both runs have one. Values that are not finite are recorded as null.
    """
    a = list(a)
    b = list(b)
    digested = _digested(a) & _digested(b)
    pairs = itertools.zip_longest(
        _exact_values(a, digested),
        _exact_values(b, digested),
        fillvalue=NOTHING,
    )
    for one, other in pairs:
        if one[:3] != other[:3]:
            return min(one.step, other.step), f"one has {one.kind}, the other {other.kind}"
        if one != other:
            return one.step, f"{one.kind}: {one.name} {one.value} and {other.value}"
    return None


def _place(record: Record) -> tuple[int, str]:
    """Return step and kind; an end is one of all steps before it."""
    return record.get("step") or record.get("steps") or 0, record["kind"]


def _digested(records: list[Record]) -> set[tuple[int, str]]:
    """Return the places of records that have a digest."""
    return {_place(record) for record in records if record.get("digest")}


class ExactValue(NamedTuple):
    """A value that equal runs record alike."""

    step: float
    kind: str
    name: str
    value: Any


NOTHING = ExactValue(math.inf, "nothing", "", None)


def _exact_values(records: list[Record], digested: set[tuple[int, str]]) -> Iterator[ExactValue]:
    """Yield what equal runs record; digests only at the places `digested`."""
    last = {_place(record): record for record in records}  # a run may end twice after one step
    for record in records:
        place = _place(record)
        step, kind = place
        if kind not in ("digest", "end") or (place in digested and last[place] is record):
            for name in fields_marked(kind, "deterministic"):
                yield ExactValue(step, kind, name, record.get(name))


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
        both.append(settings | plan.as_dict())
    a, b = both
    names = [name for name in a if a[name] != b.get(name) and name not in NOT_COMPARED]
    texts = [f"{name} {brief(a[name], 40)} and {brief(b.get(name), 40)}" for name in names]
    if texts:
        yield f"settings that differ: {'; '.join(texts)}"


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
    axes.set_ylabel("largest difference" if apart.size > MOST_BARS else "difference")
    axes.set_title(f"{names}\n{difference(a[name], b[name]) or 'equal'}", parse_math=False)
    written = output_name(path)
    save(figure, path)
    say(f"{written}: differences of {name}")
