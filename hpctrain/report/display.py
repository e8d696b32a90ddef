"""The output of a run on standard output: a header, a line per epoch and evaluation, a summary.

At a terminal, a live bar stands below these lines. Everything is derived from the records.
"""

from __future__ import annotations

import glob
import os
import sys
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.live import Live
from rich.text import Text

from hpctrain.outcome import Status
from hpctrain.report.console import make_console, output_width, styled
from hpctrain.report.metrics import metrics_of
from hpctrain.report.record import fields_marked, figures_of
from hpctrain.report.step_stats import seconds_left, shares_text
from hpctrain.tasks.facts import shown_figures
from hpctrain.text import (
    check_output,
    counted,
    discard_stdout,
    duration,
    percent,
    rate,
    say,
    short_number,
)

if TYPE_CHECKING:
    from hpctrain.report.history import History
    from hpctrain.tasks.facts import Direction

Record = Mapping[str, Any]
BEGAN = {
    Status.DONE: "Done in",
    Status.STOPPED: "Stopped after",
    Status.PREEMPTED: "Preempted after",
}
SHARES = fields_marked("evaluation", "is_share")  # shown with four decimals
SHORT = {"balanced_accuracy": "balanced"}  # names of columns
SMOOTHING = 0.1  # weight of the newest step in the bar's images/s
REDRAW = 0.5  # seconds after a drawing of the bar in which steps are not drawn


class Display:
    """Prints the records of one run as they are made. Output errors never fail the run.

    If standard output can no longer be written (its reader has ended, its disk is full), it is
    discarded, and training continues. A full disk is reported on standard error.
    """

    def __init__(self, folder: Path, progress: str) -> None:
        """`progress` is "bar", "plain", or "auto": a bar if a terminal shows the output."""
        self._folder = folder
        self._console = make_console({"bar": True, "plain": False}.get(progress))
        # No thread redraws it: that would take time from the training. Nothing without a terminal.
        self._bar = Live(console=self._console, auto_refresh=False, transient=True)
        self._due = 0.0  # when the bar is drawn next
        self._start = 0.0  # when this launch began
        self._facts: Record = {}
        self._figures: dict[str, Direction] = {}  # of the run
        self._total = 0  # steps of the whole run
        self._before = 0  # steps done when this launch began
        self._latest: Record = {}  # the last step of this launch
        self._speed = 0.0  # images/s, smoothed
        self._test = ""  # the result of the test

    def write(self, record: Record) -> None:
        """Print a record, if its kind is printed; show a "phase" on the bar until the next step."""
        try:
            self._show(record)
            check_output()
        except BrokenPipeError:
            discard_stdout()
        except OSError as error:
            discard_stdout()
            text = f"cannot write standard output: {error.strerror}; training goes on"
            say(f"hpctrain: {text}", sys.stderr)

    def close(self) -> None:
        """Remove the bar."""
        with suppress(OSError, IndexError):  # of rich, if it could not start
            self._bar.stop()

    def _show(self, record: Record) -> None:
        match record["kind"]:
            case "run":
                self._facts = record
                self._figures = figures_of(record)
                self._start = time.monotonic()
                self._total = record["epochs"] * record["steps_per_epoch"]
                first, *others = header_lines(record)
                self._say(first, "bold")
                for line in others:
                    self._say(line)
                self._bar.start()
                self._console.show_cursor(True)  # a killed run must not leave the cursor hidden
                self._draw()
            case "step":
                if not self._latest:
                    self._before = record["step"] - 1
                    self._speed = record["images_per_second"]
                self._latest = record
                self._speed += SMOOTHING * (record["images_per_second"] - self._speed)
                if time.monotonic() >= self._due or record["step"] == self._total:
                    self._draw()
            case "phase":
                self._draw(record["text"])
            case "epoch":
                columns = figures(record, self._figures)
                text = f"{self._name(record['epoch'])}  {columns}  {self._left():>10}"
                self._say(text.rstrip())
            case "evaluation":
                if record["split"] == "test":
                    result = metrics_of(record, self._figures).first_known
                    self._test = f"test {result.name} {short_number(result.value)}"
                speed = record["rows"] / record["seconds"] if record["seconds"] else None
                split = f"  {record['split']:<{len(self._name(0)) - 2}}"
                columns = figures({**record, "images_per_second": speed}, self._figures)
                self._say(f"{split}  {columns}  {record['rows']:>5,} images")
            case "note":
                self._say(record["text"])
            case "end":
                self.close()
                for line in summary_lines(record, self._test):
                    self._say(line)
                if self._facts["deterministic"] and record.get("digest"):
                    self._say(f"  digest {record['digest']}")
                self._say(f"  {self._folder}")

    def _say(self, line: str, style: str = "") -> None:
        """Print a line, above the bar if there is one; `style` is for a terminal."""
        self._console.print(styled(line, style, self._console.encoding), soft_wrap=True)

    def _draw(self, phase: str = "") -> None:
        """Draw the bar, if there is one, with `phase` in place of the remaining time."""
        if not self._console.is_terminal:
            return
        latest = self._latest
        step = latest.get("step", 0)
        share = min(step / self._total, 1.0)
        before = self._name(latest.get("epoch", 1))
        after = _joined(
            [
                f"{percent(share):>5}",
                f"step {step:,} of {self._total:,}",
                phase or self._left(),
                counted(self._facts["ranks"], "rank"),
            ],
            separator="  ",
        )
        below = "starting"
        if latest:
            below = figures({**latest, "images_per_second": self._speed}, self._figures)
        width = output_width()  # it may have changed
        self._console.width = width
        size = min(max(width - len(before) - len(after) - 4, 4), 40)
        done = int(size * share)
        full, empty = "━─" if self._console.encoding.startswith("utf") else "#-"
        lines = Text.assemble(
            f"{before}  ",
            (full * done, "bar.complete"),
            empty * (size - done),
            styled(f"  {after}\n  {below}", "", self._console.encoding),
        )
        lines.no_wrap = True
        lines.overflow = "crop"  # an ellipsis is not in every encoding
        self._bar.update(lines, refresh=True)
        self._due = time.monotonic() + REDRAW

    def _name(self, epoch: int) -> str:
        """Return "Epoch  3 of 20", with the same width for every epoch of a run."""
        epochs = str(self._facts["epochs"])
        return f"Epoch {epoch:>{len(epochs)}} of {epochs}"

    def _left(self) -> str:
        """Estimate the time to the end at the pace so far, evaluations included: "0:34 left"."""
        if not self._latest:
            return ""
        step = self._latest["step"]
        elapsed = time.monotonic() - self._start
        return f"{duration(seconds_left(elapsed, step - self._before, self._total - step))} left"


def header_lines(facts: Record) -> Iterator[str]:
    """Yield lines on the network, the data and the hardware of a run."""
    ranks = facts["ranks"]
    hosts = len(facts["hosts"])
    network = [
        facts["model"],
        counted(facts["parameters"], "parameter"),
        counted(ranks, "rank"),
    ]
    if hosts > 1:
        network[-1] += f" on {hosts} hosts"
    if facts["shards"] != ranks:
        network.append(counted(facts["shards"], "shard"))
    yield f"Run {facts['name']}: {_joined(network)}"
    data = name_of_data(facts["pack"])
    epochs = counted(facts["epochs"], "epoch")
    rows = _joined(f"{number:,} {split}" for split, number in facts["rows"].items() if number)
    steps = counted(facts["steps_per_epoch"], "step")
    yield f"  {data}: {rows}; mini-batch {facts['batch_size']:,}; {epochs} of {steps}"
    if ranks > 1:
        yield f"  shares of the mini-batch: {facts['rank_shares']}"
    threads = f"{counted(facts['threads'], 'thread')} a rank"
    yield f"  {facts['device']}, {facts['precision']}, {threads}, {facts['mpi']}"


def name_of_data(path: str) -> str:
    """Return the name of a file; of a pattern of files, also the folder before its wildcards."""
    parts = path.split(os.sep)
    first = len(parts)
    for number, part in enumerate(parts):
        if glob.has_magic(part):
            first = min(first, number)
    return os.sep.join(parts[max(0, first - 1) :])


def figures(record: Record, names: Iterable[str]) -> str:
    """Return the loss, figures of these names, all others and the speed in columns.

    Those that are None are left out.
    """
    loss = record.get("loss")
    speed = record.get("images_per_second")
    own = record.get("metrics") or {}
    texts = {
        SHORT.get(name, name): _figure_text(name, record[name])
        for name in (*names, *shown_figures())
        if name != "loss" and record.get(name) is not None
    }
    texts |= {name: short_number(value) for name, value in own.items() if value is not None}
    columns = [f"{name} {text}" for name, text in texts.items()]
    if loss is not None:
        columns.insert(0, f"loss {short_number(loss):>8}")
    if speed is not None:
        columns.append(f"{rate(speed):>7} images/s")
    return _joined(columns, separator="  ")


def _figure_text(name: str, value: float) -> str:
    if name in SHARES:
        return f"{value:.4f}"
    return short_number(value)


def summary_lines(record: Record, test: str) -> Iterator[str]:
    """Yield how a run ended, the result of its test, how its time was spent, and advice."""
    began = f"{BEGAN.get(record['status'], 'Failed after')} {duration(record['seconds'])}"
    reason = record["reason"] or ""
    is_whole = record["status"] in (Status.DONE, Status.STOPPED)
    yield _joined([began, reason.partition("\n")[0], test if is_whole else ""], ": ")
    if record["status"] in (Status.STOPPED, Status.PREEMPTED):
        yield "  the same command resumes the run"
    yield from (f"  {line}" for line in (*cost_lines(record), *record.get("advice", ())))


def cost_lines(costs: Record) -> Iterator[str]:
    """Yield how the time of steps was spent, and which rank was the slowest."""
    if "shares" in costs:
        yield f"step {1000 * costs['step_seconds']:,.1f} ms: {shares_text(costs['shares'])}"
    if "slowest_rank" in costs:
        often = percent(costs["slowest_share"])
        yield f"rank {costs['slowest_rank']} was the slowest in {often} of the steps"


def state_lines(history: History, costs: Record) -> Iterator[str]:
    """Yield how far a run is, its last results, how its time is spent, and what trains."""
    step = history.step
    facts = history.facts
    if step:
        epochs = facts.get("epochs") or "?"
        total = f"{history.total_steps:,}" if history.total_steps else "?"
        yield f"epoch {step.get('epoch')} of {epochs}, step {step['step']:,} of {total}"
    records = {
        "training": step,
        **history.evaluated,
        "best validation": history.best_validation().values,
    }
    for name, record in records.items():
        text = figures(record, history.figures)
        if text:
            yield f"{name} {' '.join(text.split())}"
    yield from cost_lines(costs)
    if facts:
        yield _joined(
            [
                facts.get("model", ""),
                counted(facts.get("ranks"), "rank"),
                facts.get("device", ""),
            ]
        )
    if history.lost:
        yield f"{counted(history.lost, 'line')} of the record cannot be read: {history.problem}"


def _joined(parts: Iterable[str], separator: str = ", ") -> str:
    return separator.join(filter(None, parts))
