"""TensorBoard events of a run, on request: ``tensorboard --logdir runs`` shows all runs.

The events hold, by step and by evaluation, the fields with `scalar` in ``fields.py``, named
training/loss or validation/loss, and the image <split>/mistakes. The page HParams compares the
settings of all runs. The event file is in the run's folder.
"""

from __future__ import annotations

from operator import attrgetter
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hpctrain.errors import RunError, UsageError
from hpctrain.files import writing
from hpctrain.report.fields import fields_marked
from hpctrain.text import printable

if TYPE_CHECKING:
    import numpy as np


class EventWriter:
    """Writes a run's metrics, settings and images to an event file."""

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
            purged = done + 1 if done else None
            self._writer: Any = SummaryWriter(str(folder), purge_step=purged)

    def write(self, record: dict[str, Any]) -> None:
        """Write the scalars of a step or an evaluation, the settings of a run, or its outcome."""
        kind = record["kind"]
        if kind == "run":
            self._call("file_writer.add_summary", session_start(record), 0)
        elif kind == "end" and record["status"] != "preempted":
            self._call("file_writer.add_summary", session_end(record), 0)
        group = printable("training" if kind == "step" else record.get("split", ""))
        for name in fields_marked(kind, "scalar"):
            value = record.get(name)
            values = value if isinstance(value, dict) else {name: value}
            for own, number in values.items():
                if number is not None:
                    self._call("add_scalar", f"{group}/{printable(own)}", number, record["step"])

    def picture(self, name: str, step: int, image: np.ndarray) -> None:
        """Write an image (H, W, 3) of uint8."""
        self._call("add_image", printable(name), image, step, None, "HWC")

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
                attrgetter(method)(self._writer)(*values)
        except RunError:
            self._writer = None
            raise


def session_start(record: dict[str, Any]) -> Any:
    """Return the settings of a run for HParams; all launches of a run are one trial."""
    from tensorboard.plugins.hparams.summary_v2 import hparams_pb

    settings = {
        name: value if isinstance(value, bool | int | float) else printable(str(value))
        for name, value in record.get("settings", {}).items()
    }
    return hparams_pb(
        settings, trial_id=printable(str(record.get("folder"))), start_time_secs=record["time"]
    )


def session_end(record: dict[str, Any]) -> Any:
    """Return how a run ended, for HParams."""
    from tensorboard.compat.proto.summary_pb2 import Summary
    from tensorboard.plugins.hparams import api_pb2, metadata, plugin_data_pb2

    failed = record["status"] == "failed"
    end = plugin_data_pb2.SessionEndInfo(
        status=api_pb2.STATUS_FAILURE if failed else api_pb2.STATUS_SUCCESS,
        end_time_secs=record["time"],
    )
    data = plugin_data_pb2.HParamsPluginData(session_end_info=end)
    found = metadata.create_summary_metadata(data)
    tag = metadata.SESSION_END_INFO_TAG
    return Summary(value=[Summary.Value(tag=tag, metadata=found, tensor=metadata.NULL_TENSOR)])
