"""The recorder of a run: one object that writes and displays its records, on rank 0 only.

It makes each record once, from the fields listed in ``fields.py``, and passes it to the file, the
display (``progress.py``) and, on request, TensorBoard (``tensorboard.py``).
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Mapping
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hpctrain.errors import Failure, RunError
from hpctrain.fault import fault
from hpctrain.report.fields import FIELDS, encode_record
from hpctrain.report.record import FILE_NAME, cut_torn_line
from hpctrain.report.step_stats import Costs

if TYPE_CHECKING:
    from hpctrain.report.progress import Display
    from hpctrain.report.tensorboard import EventWriter

FORMAT = 1
LONGEST_WAIT = 1.0  # seconds after a write in which steps are buffered, at most
COST_RATIO = 2000  # up to that limit, the time between writes in units of the last one's duration


class RecordFile:
    """Appends records to a JSON Lines file, in writes of whole lines.

    Steps are buffered, so that encoding and writing take at most one part in `COST_RATIO` of the
    time even if appending is slow (NFS asks its server every time). Once `LONGEST_WAIT` has passed
    since the last write, the next step is written at once, with the buffered ones. Records of other
    kinds are always written immediately, with the steps before them.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._buffered: list[dict[str, Any]] = []
        self._due = 0.0
        try:
            self._descriptor = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT, 0o666)
            cut_torn_line(self._descriptor)
        except OSError as error:
            raise RunError(f"cannot open {path}: {error.strerror}") from error

    def write(self, record: dict[str, Any]) -> None:
        """Add one line. Raises RunError if it cannot be written; later lines are then dropped."""
        if self._descriptor < 0:
            return
        self._buffered.append(record)
        if record["kind"] != "step" or time.monotonic() >= self._due:
            self.flush()

    def flush(self) -> None:
        """Write the buffered records."""
        if self._descriptor < 0:
            return
        start = time.monotonic()
        data = b"".join([encode_record(record) for record in self._buffered])
        self._buffered.clear()
        try:
            while data:  # one write, unless the disk fills up: then the next write raises
                data = data[os.write(self._descriptor, data) :]
            fault("record.written")
        except OSError as error:
            raise self._failed(error) from error
        end = time.monotonic()
        self._due = end + min(COST_RATIO * (end - start), LONGEST_WAIT)

    def close(self) -> None:
        """Flush, fsync and close the file. May be called again."""
        if self._descriptor < 0:
            return
        self.flush()
        try:  # NFS reports a full disk only here
            os.fsync(self._descriptor)
            os.close(self._descriptor)
        except OSError as error:
            raise self._failed(error) from error
        self._descriptor = -1

    def _failed(self, error: OSError) -> RunError:
        """Truncate the file to whole lines, close it, and return the error to raise."""
        with suppress(OSError):
            cut_torn_line(self._descriptor)
            os.close(self._descriptor)
        self._descriptor = -1
        return RunError(f"cannot write {self._path}: {error.strerror}; the record ends here")


class Recorder:
    """Writes the records of a run to its folder and displays them on standard output.

    Rank 0 passes the folder of the run. All other ranks pass None, and nothing is written or
    displayed, so that a training loop can call the same methods on every rank.

    `progress` is "bar" (a live bar, even if output is piped), "plain" (a line per epoch), "none",
    or "auto" (the bar if a terminal shows the output, else plain). `tensorboard` adds an event
    file, in which steps after `done` are replaced. Methods raise RunError if a line cannot be
    written (disk full); this happens once, and later lines are dropped. Leaving a ``with`` block
    by an exception records an end with status "failed".
    """

    def __init__(
        self,
        folder: Path | None,
        progress: str = "auto",
        tensorboard: bool = False,
        done: int = 0,
    ) -> None:
        self._sinks: list[RecordFile | Display | EventWriter] = []
        self._started = 0.0  # when the record of kind "run" was written; 0: not yet
        self._ended = False
        self._costs = Costs()
        self._file: RecordFile | None = None
        self._display: Display | None = None
        if folder is None:
            return
        if tensorboard:
            from hpctrain.report.tensorboard import EventWriter

            self._sinks.append(EventWriter(folder, done))
        self._file = RecordFile(folder / FILE_NAME)
        self._sinks.insert(0, self._file)
        if progress != "none":
            from hpctrain.report.progress import Display

            self._display = Display(folder, progress)
            self._sinks.append(self._display)

    def run(self, facts: Mapping[str, Any]) -> None:
        """Record the description of the run as the first line, and display a header.

        All of `facts` is recorded. The display uses name, model, parameters, ranks, shards,
        batch_size, epochs, steps_per_epoch, rows {split: number}, pack, device, precision, threads,
        mpi, rank_shares, hosts [...]; all may be missing.
        """
        self._started = time.monotonic()
        self._costs.describe(facts)
        self._write("run", {"format": FORMAT, **facts})

    def step(self, **fields: Any) -> None:
        """Record one update, with the fields of kind "step".

        Metrics are means over the global mini-batch; seconds are by phase.
        """
        self._costs.add(fields["seconds"], fields["slowest_rank"])
        self._write("step", fields)

    def epoch(self, **fields: Any) -> None:
        """Record the means over the images of an epoch, which the caller computes."""
        self._write("epoch", fields)

    def evaluation(self, **fields: Any) -> dict[str, Any]:
        """Record the means over all images of a split, with the weights after a step.

        Returns the record as a reader of the file gets it.
        """
        record: dict[str, Any] = json.loads(encode_record(self._write("evaluation", fields)))
        return record

    def phase(self, text: str) -> None:
        """Show current work other than steps on the live bar only."""
        if self._display is not None:
            self._display.phase(text)

    def digest(self, step: int, digest: str) -> None:
        """Record the digest of weights and optimizer state after `step`, equal on all ranks."""
        self._write("digest", {"step": step, "digest": digest})

    def flush(self) -> None:
        """Write the buffered records to the file."""
        if self._file is not None:
            self._file.flush()

    def note(self, text: str) -> None:
        """Record a message for the user."""
        self._write("note", {"text": text})

    def end(self, status: str, reason: str | None = None, **facts: Any) -> None:
        """Record how the run ended and how the time of its steps was spent; display a summary.

        `status` is "done", "stopped", "preempted" or "failed".
        """
        self._ended = True
        seconds = round(time.monotonic() - self._started, 3) if self._started else 0.0
        fields = {"status": status, "reason": reason, "seconds": seconds, **self._costs.facts()}
        self._write("end", {**fields, **facts})

    def close(self) -> None:
        """Flush and close the file, the display and TensorBoard. May be called again."""
        with ExitStack() as stack:  # closes all of them, even if one fails
            for sink in self._sinks:
                stack.callback(sink.close)
            self._sinks, self._file = [], None

    def __enter__(self) -> Recorder:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, _: Any
    ) -> None:
        if error is None:
            self.close()
            return
        name = "" if isinstance(error, Failure) else type(error).__name__
        with suppress(RunError):  # the exception being handled matters more than its record
            if self._started and not self._ended:
                self.end("failed", ": ".join(filter(None, [name, str(error)])))
        with suppress(RunError):
            self.close()

    def _write(self, kind: str, fields: Mapping[str, Any]) -> dict[str, Any]:
        """Pass a record, with its time in seconds since 1970, to all sinks, and return it."""
        if kind not in ("run", "end") and not fields.keys() <= FIELDS[kind].keys():
            unknown = ", ".join(sorted(fields.keys() - FIELDS[kind].keys()))
            raise ValueError(f"a {kind} has no field {unknown}: add it to report/fields.py")
        record = {"kind": kind, "time": time.time(), **fields}
        for sink in self._sinks:
            sink.write(record)
        return record
