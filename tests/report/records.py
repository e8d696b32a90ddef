"""Records of runs that were never trained, for tests of what reads records."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

from hpctrain.report.recorder import Recorder

STEP = {"learning_rate": 0.01, "images_per_second": 101.0, "slowest_rank": 0, "rows": 101}
EPOCH = ("epoch", "loss", "accuracy", "images_per_second", "seconds")
EVALUATION = ("epoch", "step", "split", "loss", "accuracy", "rows", "seconds")


def record_step(
    recorder: Recorder, epoch: int, step: int, loss: float, accuracy: float | None, **others: Any
) -> None:
    """Record a step."""
    own = {"epoch": epoch, "step": step, "loss": loss, "accuracy": accuracy}
    recorder.step(**own, **{**STEP, "seconds": {"total": 1.0}, **others})


def record_epoch(recorder: Recorder, *values: float | None) -> None:
    """Record an epoch of these values, in the order of `EPOCH`."""
    recorder.epoch(**dict(zip(EPOCH, values, strict=True)))


def record_evaluation(recorder: Recorder, *values: float | str | None) -> None:
    """Record an evaluation of these values, in the order of `EVALUATION`."""
    recorder.evaluation(**dict(zip(EVALUATION, values, strict=True)))


def write_record(
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
    folder.mkdir(parents=True)
    accuracy = 0.6 if classify else None
    with Recorder(folder, "none") as recorder:
        recorder.run({"name": folder.name, "epochs": epochs, "steps_per_epoch": per_epoch})
        for epoch in range(1, epochs + 1):
            for step in range((epoch - 1) * per_epoch + 1, epoch * per_epoch + 1):
                value = math.nan if step >= nan_from else loss * factor ** (step / per_epoch)
                record_step(recorder, epoch, step, value, accuracy, images_per_second=9.0, rows=8)
            record_epoch(recorder, epoch, value, accuracy, 9.0, 4.0)
            if validation:
                half = epoch * per_epoch - per_epoch // 2
                record_evaluation(recorder, epoch, half, "validation", 2 * value, accuracy, 8, 1.0)
        if test:
            record_evaluation(recorder, epochs, step, "test", value, accuracy, 8, 1.0)
        if status:
            recorder.end(status, "a reason" if status != "done" else None)
    return folder
