"""Launches of a run on the long-lived ranks, interrupted or not, and what they leave."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from safetensors.torch import load_file

import hpctrain as hp
from tests.support.ranks import FAULT, on_ranks
from tests.support.short import records

Patching = Callable[[pytest.MonkeyPatch], object]


class Launch(NamedTuple):
    """How a launch ended: as a TrainingResult, or with an error for all ranks."""

    code: int
    status: str = ""
    step: int = 0
    error: str = ""


def launch(
    settings: dict[str, Any],
    size: int = 3,
    leave: int | str = 0,
    signal: str = "usr1",
    fault: str = "",
    first: Patching | None = None,
    **more: Any,
) -> Launch:
    """Train the run of these settings, and `more`, until it ends.

    With `leave`, its last rank gets a notice, a `signal`: after so many steps of this launch, so
    that one more is done, or as it passes a point (hpctrain/fault.py) such as "evaluation.begun:2".
    A `fault` is that of rank 0. `first` may patch something on every rank for this launch.
    """
    point, _, count = (leave if isinstance(leave, str) else f"step.done:{leave}").partition(":")
    notice = f"{point}:{signal}:{count or 1}" if leave else ""
    given = {"settings": {**settings, **more}, "notice": notice, "fault": fault, "first": first}
    ended, *others = on_ranks(size, _launch, **given)
    assert others == [ended] * len(others)
    return Launch(*ended)


def _launch(
    comm: Any,
    settings: dict[str, Any],
    notice: str,
    fault: str,
    first: Patching | None,
) -> Launch:
    if notice and comm.rank == comm.size - 1:
        os.environ[FAULT] = notice
    elif fault and comm.rank == 0:
        os.environ[FAULT] = fault
    with pytest.MonkeyPatch.context() as patch:
        if first:
            first(patch)
        try:
            result = hp.train(**settings)
        except (hp.UsageError, hp.RunError) as error:
            return Launch(error.exit_code, error=str(error))
    return Launch(result.exit_code, result.status, result.step)


def run_of(settings: dict[str, Any]) -> Path:
    """The folder of the run."""
    return Path(settings["runs_dir"]) / settings["run"]


def notes(settings: dict[str, Any]) -> list[str]:
    """The notes in the record of the run, but on the cores of this machine."""
    texts = [record["text"] for record in records(settings, "note")]
    return [text for text in texts if " of a host" not in text]


def check_same(settings: dict[str, Any], other: dict[str, Any], whole_record: bool = True) -> None:
    """Both runs are done, with the same digest, weights and figures, each told once, in order."""
    (*_, end), (*_, expected) = (records(each, "end") for each in (settings, other))
    assert (end["status"], expected["status"]) == ("done", "done")
    assert (end["digest"], end["steps"]) == (expected["digest"], expected["steps"])
    one, two = (load_file(run_of(each) / "model.safetensors") for each in (settings, other))
    assert one.keys() == two.keys()
    for name in one:
        assert one[name].dtype == two[name].dtype and one[name].shape == two[name].shape, name
        a, b = (each[name].reshape(-1).view(torch.uint8) for each in (one, two))
        assert torch.equal(a, b), name
    if whole_record:
        assert figures(settings) == figures(other)


def figures(settings: dict[str, Any]) -> list[tuple[Any, ...]]:
    """What the record tells of steps, epochs and evaluations, in order."""
    names = ("kind", "split", "step", "epoch", "loss", "accuracy", "learning_rate", "rows")
    kinds = ("step", "epoch", "evaluation")
    return [tuple(r.get(n) for n in names) for r in records(settings) if r["kind"] in kinds]


def checkpoint_steps(settings: dict[str, Any]) -> list[int]:
    """The steps of the checkpoints of a run."""
    return sorted(
        int(path.stem) for path in (run_of(settings) / "checkpoints").glob("[0-9]*.safetensors")
    )


def change_lines(settings: dict[str, Any], change: Callable[[list[bytes]], list[bytes]]) -> None:
    """Change the lines of the record of a run."""
    path = run_of(settings) / "progress.jsonl"
    path.write_bytes(b"".join(change(path.read_bytes().splitlines(keepends=True))))


def place_of(lines: list[bytes], kind: str, **fields: Any) -> int:
    """The place of the first record with these fields."""
    found = (json.loads(line) for line in lines)
    wanted = {"kind": kind, **fields}.items()
    return next(place for place, record in enumerate(found) if wanted <= record.items())
