"""Open the record of a run, and what shows it while it is written: the display, TensorBoard."""

from __future__ import annotations

from pathlib import Path

from hpctrain.report.record import Recorder, Sink


def open_recorder(
    folder: Path | None,
    progress: str = "auto",
    tensorboard: bool = False,
    done: int = 0,
) -> Recorder:
    """Return the recorder of the run in `folder`; without a folder, it records nothing.

    `progress` is "bar" (a live bar, even if output is piped), "plain" (a line per epoch), "none",
    or "auto" (the bar if a terminal shows the output, else plain). `tensorboard` adds an event
    file, in which steps after `done` are replaced. Raises UsageError if tensorboard is missing, and
    RunError if a file cannot be opened.
    """
    if folder is None:
        return Recorder(folder)
    sinks: list[Sink] = []
    if progress != "none":
        from hpctrain.report.display import Display  # imports rich

        sinks.append(Display(folder, progress))
    if tensorboard:
        from hpctrain.report.tensorboard import EventWriter

        sinks.append(EventWriter(folder, done))
    return Recorder(folder, sinks)
