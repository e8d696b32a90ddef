"""Records of made-up runs, for whatever reads them."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

from hpctrain.report.fields import encode_record
from hpctrain.report.record import FILE_NAME


def run_line(**facts: Any) -> bytes:
    """The first line of a record."""
    facts = {"ranks": 2, "epochs": 4, "steps_per_epoch": 10, "model": "digits", **facts}
    return line("run", **facts)


def step_line(step: int, **fields: Any) -> bytes:
    """One step, a tenth of a second long; its loss is 1/step."""
    seconds = {"data": 0.01, "compute": 0.06, "reduce": 0.02, "idle": 0.0, "total": 0.1}
    own = {"epoch": 1 + (step - 1) // 10, "step": step, "loss": 1 / step, "accuracy": 0.5}
    return line("step", **own | {"rows": 8, "seconds": seconds, "slowest_rank": step % 2} | fields)


def evaluation_line(step: int, split: str = "validation", **fields: Any) -> bytes:
    """One evaluation."""
    own = {"epoch": step // 10, "step": step, "split": split, "loss": 0.25, "accuracy": 0.75}
    return line("evaluation", **own | {"rows": 100, "seconds": 0.5} | fields)


def end_line(status: str = "done", reason: str | None = None, **fields: Any) -> bytes:
    """The last line of a launch."""
    return line("end", status=status, reason=reason, seconds=3.0, **fields)


def line(kind: str, **fields: Any) -> bytes:
    """A record of this moment, unless `time` is among its fields."""
    return encode_record({"kind": kind, "time": time.time(), **fields})


def make_run(folder: Path, *lines: bytes) -> Path:
    """A run's folder with this record."""
    folder.mkdir(parents=True)
    (folder / "config.toml").touch()
    (folder / FILE_NAME).write_bytes(b"".join(lines))
    return folder


def append(folder: Path, *lines: bytes) -> None:
    """Add to its record."""
    with (folder / FILE_NAME).open("ab") as file:
        file.write(b"".join(lines))
