"""Records of runs that were never trained, for whatever reads or shows records.

Lines are made as docs/runs.md describes the file, without the package: `run_line`, `step_line` and
the others give bytes, `make_run` a run's folder. `tell` gives a recorder what a training would.
"""

from __future__ import annotations

import csv
import json
import os
import sys
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

FILE = "progress.jsonl"
#: Fields without which a record is corrupt, by kind.
NEEDED = {"step": ["step"], "epoch": ["epoch"], "evaluation": ["step", "split"]}
NEEDED |= {"note": ["text"], "digest": ["step", "digest"], "end": ["status"]}
SECONDS = {"data": 0.01, "compute": 0.06, "reduce": 0.02, "idle": 0.0, "total": 0.1}


def line(kind: str, **fields: Any) -> bytes:
    """A record of this moment, unless `time`, in seconds since 1970, is among its fields."""
    moment = datetime.fromtimestamp(fields.pop("time", time.time()), UTC)
    text = moment.isoformat(timespec="milliseconds").replace("+00:00", "Z")
    return json.dumps({"kind": kind, "time": text, **fields}).encode() + b"\n"


def run_line(**facts: Any) -> bytes:
    """The first line of a launch."""
    facts = {"ranks": 2, "epochs": 4, "steps_per_epoch": 10, "model": "digits", **facts}
    return line("run", **facts)


def step_line(step: int, **fields: Any) -> bytes:
    """One step, a tenth of a second long; its loss is 1/step."""
    own = {"epoch": 1 + (step - 1) // 10, "step": step, "loss": 1 / step, "accuracy": 0.5}
    return line("step", **own | {"rows": 8, "seconds": SECONDS, "slowest_rank": step % 2} | fields)


def step_lines(first: int, last: int, **fields: Any) -> list[bytes]:
    """The steps from `first` to `last`."""
    return [step_line(number, **fields) for number in range(first, last + 1)]


def epoch_line(epoch: int, **fields: Any) -> bytes:
    """The means of one epoch."""
    own = {"epoch": epoch, "loss": 1 / epoch, "accuracy": 0.5, "images_per_second": 80.0}
    return line("epoch", **own | {"seconds": 1.0} | fields)


def evaluation_line(step: int, split: str = "validation", **fields: Any) -> bytes:
    """One evaluation."""
    own = {"epoch": step // 10, "step": step, "split": split, "loss": 0.25, "accuracy": 0.75}
    return line("evaluation", **own | {"rows": 100, "seconds": 0.5} | fields)


def end_line(status: str = "done", reason: str | None = None, **fields: Any) -> bytes:
    """The last line of a launch."""
    return line("end", status=status, reason=reason, seconds=3.0, **fields)


def make_run(folder: Path, *lines: bytes) -> Path:
    """A run's folder with this record."""
    folder.mkdir(parents=True)
    (folder / "config.toml").touch()
    (folder / FILE).write_bytes(b"".join(lines))
    return folder


def append(folder: Path, *lines: bytes) -> None:
    """Add to its record."""
    with (folder / FILE).open("ab") as file:
        file.write(b"".join(lines))


def make_trained(
    folder: Path,
    epochs: int = 3,
    per_epoch: int = 4,
    classify: bool = True,
    validation: bool = True,
    test: bool = True,
    status: str | None = "done",
    loss: float = 2.0,
    factor: float = 0.5,
    nan_from: int = 10**9,
) -> Path:
    """A run whose loss starts at `loss` and changes by `factor` an epoch; its accuracy is 0.6."""
    accuracy = 0.6 if classify else None
    lines = [run_line(name=folder.name, epochs=epochs, steps_per_epoch=per_epoch)]
    for epoch in range(1, epochs + 1):
        for step in range((epoch - 1) * per_epoch + 1, epoch * per_epoch + 1):
            value = None if step >= nan_from else loss * factor ** (step / per_epoch)
            lines.append(step_line(step, epoch=epoch, loss=value, accuracy=accuracy))
        lines.append(epoch_line(epoch, loss=value, accuracy=accuracy))
        if validation:
            half = epoch * per_epoch - per_epoch // 2
            worse = None if value is None else 2 * value
            lines.append(evaluation_line(half, epoch=epoch, loss=worse, accuracy=accuracy))
    if test:
        lines.append(evaluation_line(step, "test", epoch=epochs, loss=value, accuracy=accuracy))
    if status:
        lines.append(end_line(status, "a reason" if status != "done" else None))
    return make_run(folder, *lines)


#: Figures of a task that hpctrain does not have.
OTHER = {"mae": "min", "loss": "min"}


def make_other(folder: Path, *errors: float) -> Path:
    """A run with `OTHER` figures: these errors by epoch. Its losses are their reciprocals."""
    lines = [run_line(name=folder.name, epochs=len(errors), figures=OTHER)]
    for epoch, error in enumerate(errors, start=1):
        own = {"epoch": epoch, "loss": 1 / error, "mae": error}
        tested = own | {"step": 10 * epoch, "rows": 100, "seconds": 0.5}
        lines.append(line("step", **own, step=10 * epoch, rows=8, seconds=SECONDS))
        lines.append(line("epoch", **own, images_per_second=80.0, seconds=1.0))
        lines.append(line("evaluation", **tested, split="validation"))
    return make_run(folder, *lines, line("evaluation", **tested, split="test"), end_line())


def beat(run: Path, **fields: Any) -> Path:
    """Write the heartbeat of its rank 0, on another machine unless `fields` say so; the file."""
    (run / "ranks").mkdir(exist_ok=True)
    own = {"rank": 0, "host": "far", "pid": 1, "doing": "step 3", "seconds": 2, "time": time.time()}
    own |= fields
    file = run / f"ranks/{own['rank']}.json"
    file.write_text(json.dumps(own))
    os.utime(file, (own["time"], own["time"]))
    return file


def statuses(sweep: Path) -> dict[str, str]:
    """The status of each network of a sweep by its number, as results.csv tells."""
    with open(sweep / "results.csv", newline="") as file:
        return {row["name"][:2]: row["status"] for row in csv.DictReader(file)}


def read_strictly(folder: Path, kind: str = "") -> list[dict[str, Any]]:
    """Every line of its record, or those of this kind, read as strict JSON in ASCII."""
    text = (folder / FILE).read_text("ascii")
    assert text == "" or text.endswith("\n")
    found = [json.loads(line, parse_constant=refuse_constant) for line in text.splitlines()]
    return [record for record in found if kind in ("", record["kind"])]


def refuse_constant(name: str) -> None:
    """Called by json for NaN and infinities."""
    raise AssertionError(f"{name} is not JSON")


RUN = {
    "name": "first",
    "model": "digits",
    "parameters": 1234567,
    "ranks": 4,
    "hosts": ["a", "b"],
    "shards": 8,
    "batch_size": 101,
    "rank_shares": "26, 25, 25, 25 by rank",
    "epochs": 10,
    "steps_per_epoch": 3,
    "rows": {"train": 9000, "validation": 0, "test": 1000},
    "pack": "data/digits.h5",
    "device": "cpu",
    "precision": "bf16",
    "threads": 1,
    "mpi": "Open MPI 5",
    "deterministic": False,
}
STEP = {
    "epoch": 1,
    "accuracy": 0.5,
    "learning_rate": 0.01,
    "images_per_second": 101.0,
    "seconds": {"data": 0.25, "compute": 1.5, "reduce": 0.125, "total": 2.0},
    "slowest_rank": 2,
    "rows": 101,
}
EPOCH = {"epoch": 1, "loss": 0.75, "accuracy": 0.625, "images_per_second": 99.5, "seconds": 12.5}
EVALUATION = {"epoch": 1, "step": 1, "split": "test", "loss": 0.5, "accuracy": None}
EVALUATION |= {"rows": 23, "seconds": 0.25}
MADE_UP = {"run": RUN, "step": STEP, "epoch": EPOCH, "evaluation": EVALUATION}


def tell(recorder: Any, kind: str, **fields: Any) -> None:
    """Record this; what is not given is made up."""
    if kind == "end":
        recorder.end(**fields)
        return
    loss = {"loss": 1 / (fields["step"] or 1)} if kind == "step" else {}
    recorder.write(kind, **{**MADE_UP.get(kind, {}), **loss, **fields})


def recording(body: str, folder: Path, progress: str = "none") -> list[str]:
    """The command of a small process that records: in `body` recorder, run, step(number), count."""
    program = f"""
from itertools import count
from pathlib import Path
from hpctrain.report.sinks import open_recorder  # not tests.support.api: that would import torch
run = {RUN!r}
def step(number):
    recorder.write('step', **{STEP!r}, step=number, loss=1 / number)
with open_recorder(Path({str(folder)!r}), {progress!r}) as recorder:
"""
    lines = [f"    {each}" for each in body.strip().splitlines()]
    return [sys.executable, "-c", program + "\n".join(lines)]
