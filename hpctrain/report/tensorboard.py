"""TensorBoard events of a run, on request: ``tensorboard --logdir runs`` shows all runs.

By step: training/loss, training/accuracy, training/learning_rate, training/images_per_second.
By evaluation: <split>/loss and <split>/accuracy. The event file lies in the folder of the run.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from hpctrain.errors import RunError, UsageError

BY_STEP = ("loss", "accuracy", "learning_rate", "images_per_second")
BY_EVALUATION = ("loss", "accuracy")


class Events:
    """Writes the scalars of a run's records to an event file; all other records are passed by."""

    def __init__(self, folder: Path, done: int = 0) -> None:
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError as error:
            raise UsageError(
                "--tensorboard needs the package tensorboard: pip install tensorboard"
            ) from error
        self._folder = folder
        self._writer: Any = None
        try:
            self._writer = SummaryWriter(str(folder), purge_step=done + 1 if done else None)
        except OSError as error:
            raise self._failed(error) from error

    def put(self, record: dict[str, Any]) -> None:
        """Add the scalars of a step or an evaluation."""
        if record["kind"] == "step":
            self._add("training", BY_STEP, record)
        elif record["kind"] == "evaluation":
            self._add(record["split"], BY_EVALUATION, record)

    def close(self) -> None:
        """Write out what is queued."""
        if self._writer is not None:
            try:
                self._writer.close()
            except OSError as error:
                raise self._failed(error) from error

    def _add(self, group: str, names: tuple[str, ...], record: dict[str, Any]) -> None:
        if self._writer is None:
            return
        try:
            for name in names:
                if record[name] is not None:
                    self._writer.add_scalar(f"{group}/{name}", record[name], record["step"])
        except OSError as error:
            raise self._failed(error) from error

    def _failed(self, error: OSError) -> RunError:
        self._writer = None
        return RunError(f"cannot write TensorBoard events to {self._folder}: {error.strerror}")
