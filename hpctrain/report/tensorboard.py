"""TensorBoard events of a run, on request: ``tensorboard --logdir runs`` shows all runs.

The events hold, by step and by evaluation, the fields with `scalar` in ``fields.py``, named
training/loss or validation/loss. The event file is in the run's folder.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from hpctrain.errors import RunError, UsageError
from hpctrain.files import writing
from hpctrain.report.fields import fields_marked


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
        kind = record["kind"]
        group = "training" if kind == "step" else record.get("split", "")
        for name in fields_marked(kind, "scalar"):
            value = record.get(name)
            values = value if isinstance(value, dict) else {name: value}
            for own, number in values.items():
                if number is not None:
                    self._call("add_scalar", f"{group}/{own}", number, record["step"])

    def close(self) -> None:
        """Flush queued events and close the file."""
        self._call("close")
        self._writer = None

    def _call(self, method: str, *values: Any) -> None:
        """Call a method of the writer, unless an earlier call could not write."""
        if self._writer is None:
            return
        try:
            with writing(self._what):
                getattr(self._writer, method)(*values)
        except RunError:
            self._writer = None
            raise
