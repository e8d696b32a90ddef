"""The recorder of a run: one object that writes and shows what happens, on rank 0 alone.

It makes each record once and hands it to the file (``jsonlines.py``, where the format stands),
the display (``progress.py``) and, on request, TensorBoard (``tensorboard.py``).
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from hpctrain.errors import Failure, RunError
from hpctrain.report.costs import Costs
from hpctrain.report.jsonlines import FILE_NAME, RecordFile, read_records

if TYPE_CHECKING:
    import numpy as np

    from hpctrain.report.progress import Display
    from hpctrain.report.tensorboard import Events

__all__ = ["Recorder", "read_records"]

FORMAT = 1
SET_HERE = {"kind", "time", "format", "nonfinite"}  # fields a caller's facts must not replace


class Sink(Protocol):
    """What a recorder hands its records to: the file, the display, TensorBoard.

    A record's time is still a number there (seconds since 1970): a step happens often.
    """

    def put(self, record: dict[str, Any]) -> None: ...

    def close(self) -> None: ...


class Recorder:
    """Writes what happens in a run to its folder and shows it on standard output.

    Rank 0 gives the folder of the run. All other ranks give None, and then nothing is written or
    shown, so that a training loop calls the same methods on every rank.

    `progress` is "bar" (a live bar, even where output is piped), "plain" (a line per epoch),
    "none", or "auto" (the bar where the output reaches a terminal, else plain); `tensorboard` adds
    an event file, in which steps after `done` are told anew. Methods raise RunError when a line
    cannot be written (disk full); that happens once, later lines are dropped. Leaving a ``with``
    block by an exception records end: failed.
    """

    def __init__(
        self,
        folder: Path | None,
        progress: str = "auto",
        tensorboard: bool = False,
        done: int = 0,
    ) -> None:
        self._sinks: list[Sink] = []
        self._started = 0.0  # when the run line was written; 0 = not yet
        self._ended = False
        self._costs = Costs()
        self._events: Events | None = None
        self._display: Display | None = None
        if folder is None:
            return
        if tensorboard:
            from hpctrain.report.tensorboard import Events

            self._events = Events(folder, done)
            self._sinks.append(self._events)
        self._sinks.insert(0, RecordFile(folder / FILE_NAME))
        if progress != "none":
            from hpctrain.report.progress import Display

            self._display = Display(folder, progress)
            self._sinks.append(self._display)

    def run(self, facts: Mapping[str, Any]) -> None:
        """Describe the run: the first line. `facts` is written as it is; a header is shown.

        The display knows name, model, parameters, ranks, shards, batch_size, epochs,
        steps_per_epoch, rows {split: number}, pack, device, precision, threads, mpi, hosts [...];
        all may be missing.
        """
        self._started = time.monotonic()
        self._costs.know(facts)
        self._put("run", {"format": FORMAT, **_checked(facts)})

    def step(
        self,
        epoch: int,
        step: int,
        loss: float,
        accuracy: float | None,
        learning_rate: float,
        images_per_second: float,
        seconds: Mapping[str, float],
        slowest_rank: int | None,
        rows: int,
    ) -> None:
        """Record one update: means over the mini-batch of all ranks, seconds by phase."""
        fields = {
            "epoch": epoch,
            "step": step,
            "loss": loss,
            "accuracy": accuracy,
            "learning_rate": learning_rate,
            "images_per_second": images_per_second,
            "slowest_rank": slowest_rank,
            "rows": rows,
            "seconds": dict(seconds),
        }
        self._costs.add(seconds, slowest_rank)
        self._put("step", fields)

    def epoch(
        self,
        epoch: int,
        loss: float,
        accuracy: float | None,
        images_per_second: float,
        seconds: float,
    ) -> None:
        """Record the means over an epoch, weighted by rows (the caller computes them)."""
        fields = {
            "epoch": epoch,
            "loss": loss,
            "accuracy": accuracy,
            "images_per_second": images_per_second,
            "seconds": seconds,
        }
        self._put("epoch", fields)

    def evaluation(
        self,
        epoch: int,
        step: int,
        split: str,
        loss: float,
        accuracy: float | None,
        rows: int,
        seconds: float,
        **means: float,
    ) -> None:
        """Record means over all rows of a split, computed with the weights after `step`; a task
        may have others than loss and accuracy.
        """
        fields = {
            "epoch": epoch,
            "step": step,
            "split": split,
            "loss": loss,
            "accuracy": accuracy,
            **means,
            "rows": rows,
            "seconds": seconds,
        }
        self._put("evaluation", fields)

    def picture(self, name: str, step: int, image: np.ndarray) -> None:
        """Show an image (H, W, 3) of bytes after `step` in TensorBoard; the record has none."""
        if self._events is not None:
            self._events.picture(name, step, image)

    def phase(self, text: str) -> None:
        """Say on the live bar what is done now, besides steps; the record has none."""
        if self._display is not None:
            self._display.phase(text)

    def digest(self, step: int, digest: str) -> None:
        """Record the digest of weights and optimizer after `step`, which all ranks share."""
        self._put("digest", {"step": step, "digest": digest})

    def flush(self) -> None:
        """Write to the file what waits to be written."""
        for sink in self._sinks:
            if isinstance(sink, RecordFile):
                sink.flush()

    def note(self, text: str) -> None:
        """Record a line for the reader of the log."""
        self._put("note", {"text": text})

    def end(self, status: str, reason: str | None = None, **facts: Any) -> None:
        """Record how the run ended ("done", "stopped", "failed"), where the time of its steps went,
        and show a short summary.
        """
        self._ended = True
        seconds = round(time.monotonic() - self._started, 3) if self._started else 0.0
        fields = {"status": status, "reason": reason, "seconds": seconds, **self._costs.facts()}
        self._put("end", {**fields, **_checked(facts)})

    def close(self) -> None:
        """Write what is pending and close the file; harmless when repeated."""
        with ExitStack() as stack:  # closes all, whichever fails
            for sink in self._sinks:
                stack.callback(sink.close)
            self._sinks, self._events = [], None

    def __enter__(self) -> Recorder:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, _: Any
    ) -> None:
        if error is None:
            self.close()
            return
        name = "" if isinstance(error, Failure) else type(error).__name__
        with suppress(RunError):  # the error under way matters more than its record
            if self._started and not self._ended:
                self.end("failed", ": ".join(filter(None, [name, str(error)])))
        with suppress(RunError):
            self.close()

    def _put(self, kind: str, fields: dict[str, Any]) -> None:
        if self._sinks:
            record = {"kind": kind, "time": time.time(), **fields}
            for sink in self._sinks:
                sink.put(record)


def _checked(facts: Mapping[str, Any]) -> dict[str, Any]:
    taken = SET_HERE.intersection(facts)
    if taken:
        raise ValueError(f"the recorder itself sets {', '.join(sorted(taken))}")
    return dict(facts)
