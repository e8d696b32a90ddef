"""Runs by name, and what their records say of them."""

from __future__ import annotations

import json
from contextlib import suppress
from pathlib import Path

from hpctrain.errors import UsageError
from hpctrain.report.jsonlines import FILE_NAME, read_records


def find_run(target: str, runs_dir: str) -> Path:
    """The folder of a run, by its name or as it is. Raises UsageError."""
    for path in (Path(runs_dir) / target, Path(target)):
        if path.is_dir():
            return path
    raise UsageError(f"there is no run {target!r} in {runs_dir} and no such folder")


def evaluation_file(folder: Path, split: str) -> Path:
    """Where a run's folder keeps the figures of its network over a split, confusion matrix too."""
    return folder / f"evaluation-{split}.json"


def last_step(folder: Path) -> int:
    """The last step of which a run's record tells, as far as it can be read; 0 for none."""
    last = 0
    with suppress(UsageError):
        for record in read_records(folder):
            if record["kind"] == "step":
                last = max(last, record["step"])
    return last


def is_finished(folder: Path) -> bool:
    """Whether the last launch of a run came to its end by itself."""
    try:
        lines = (folder / FILE_NAME).read_bytes().splitlines()
        return bool(lines) and json.loads(lines[-1]).get("status") == "done"
    except (OSError, ValueError, AttributeError):
        return False
