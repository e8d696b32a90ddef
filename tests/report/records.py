"""Records of runs that were never trained, for tests of what reads records."""

from __future__ import annotations

import math
from pathlib import Path

from hpctrain.report.record import Recorder


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
                recorder.step(epoch, step, value, accuracy, 0.1, 9.0, {"total": 1.0}, 0, 8)
            recorder.epoch(epoch, value, accuracy, 9.0, 4.0)
            if validation:
                half = epoch * per_epoch - per_epoch // 2
                recorder.evaluation(epoch, half, "validation", 2 * value, accuracy, 8, 1.0)
        if test:
            recorder.evaluation(epochs, step, "test", value, accuracy, 8, 1.0)
        if status:
            recorder.end(status, "a reason" if status != "done" else None)
    return folder
