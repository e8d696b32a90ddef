"""TensorBoard events of a run, on request: ``tensorboard --logdir runs`` shows all runs.

The events hold, by step and by evaluation, the fields with `scalar` in ``record.py``, named
training/loss or validation/loss. The event file is in the run's folder.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from hpctrain.errors import UsageError
from hpctrain.files import writing
from hpctrain.report.record import fields_marked


class EventWriter:
    """Writes a run's metrics to an event file."""

    def __init__(self, folder: Path, done: int = 0) -> None:
        """Open an event file in `folder`. Events of steps after `done` will be replaced."""
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError as error:
            raise UsageError(
                "--tensorboard needs the package tensorboard: pip install tensorboard"
            ) from error
        self._what = f"TensorBoard events to {folder}"
        with writing(self._what):
            self._writer: Any = SummaryWriter(str(folder), purge_step=done + 1)

    def write(self, record: dict[str, Any]) -> None:
        """Write the scalars of a step or an evaluation; other records have none."""
        group = record.get("split", "training")
        scalars = {name: record.get(name) for name in fields_marked(record["kind"], "scalar")}
        scalars |= scalars.pop("metrics", None) or {}
        with writing(self._what):
            for name, value in scalars.items():
                if value is not None:
                    self._writer.add_scalar(f"{group}/{name}", value, record["step"])

    def close(self) -> None:
        """Write queued events and close the file."""
        with writing(self._what):
            self._writer.close()
