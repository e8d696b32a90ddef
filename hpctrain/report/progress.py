"""The output of a run on standard output: a header, a line per epoch and evaluation, a summary.

Both modes print the same lines. "bar" also keeps a live bar below them (``console.py``); "plain" is
for batch logs. Everything is derived from the records.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hpctrain.report.step_stats import whole_percents
from hpctrain.text import counted, discard_stdout, duration, percent, rate, say, short_number

if TYPE_CHECKING:
    from hpctrain.report.console import Bar

Record = dict[str, Any]
BEGAN = {"done": "Done in", "stopped": "Stopped after", "preempted": "Preempted after"}
SMOOTHING = 0.1  # weight of the newest step in the bar's images/s


class Display:
    """Prints the records of one run as they are made. Output errors never fail the run.

    If standard output can no longer be written (its reader has ended, its disk is full), the
    display goes silent and training continues.
    """

    def __init__(self, folder: Path, progress: str) -> None:
        self._folder = folder
        self._bar: Bar | None = None
        self._wants_bar = _wants_bar(progress)
        self._silent = False
        self._facts: Record = {}
        self._start = time.monotonic()
        self._before = 0  # steps done when this launch began
        self._latest: Record = {}  # of the last step
        self._speed = 0.0  # images/s, smoothed
        self._phase = ""  # current work other than steps
        self._evaluations: dict[str, Record] = {}  # the last one of each split

    def write(self, record: Record) -> None:
        """Print one record, if its kind is printed."""
        if self._silent:
            return
        self._phase = ""
        with self._silent_where_unread():
            self._show(record)

    def phase(self, text: str) -> None:
        """Show `text` as the current phase on the bar, until the next record."""
        self._phase = text
        if self._bar is not None and not self._silent:
            with self._silent_where_unread():
                self._draw(self._bar)

    def close(self) -> None:
        """Remove the bar."""
        bar, self._bar = self._bar, None
        if bar is not None:
            with suppress(OSError):
                bar.close()

    def _show(self, record: Record) -> None:
        match record["kind"]:
            case "run":
                self._run(record)
            case "step":
                self._step(record)
            case "epoch":
                self._say(epoch_line(record, self._facts.get("epochs"), self._left()))
            case "evaluation":
                self._evaluations[record["split"]] = record
                self._say(evaluation_line(record, self._facts.get("epochs")))
            case "note":
                self._say(record["text"])
            case "end":
                self._end(record)

    def _run(self, record: Record) -> None:
        self._facts = record
        self._start = time.monotonic()
        self._latest = {}
        if self._wants_bar and self._bar is None:
            from hpctrain.report.console import Bar

            self._bar = Bar()
        first, *others = header_lines(record)
        self._say(first, style="bold")
        for line in others:
            self._say(line)
        if self._bar is not None:
            self._draw(self._bar)

    def _step(self, record: Record) -> None:
        if not self._latest:
            self._before = record["step"] - 1
            self._speed = record["images_per_second"]
        self._latest = record
        self._speed += SMOOTHING * (record["images_per_second"] - self._speed)
        if self._bar is not None and (self._bar.due() or record["step"] == self._total()):
            self._draw(self._bar)

    def _end(self, record: Record) -> None:
        if self._bar is not None:
            self._bar.close()
            self._bar = None
        first, *others = summary_lines(record, self._evaluations)
        self._say(first, style="bold")
        for line in [*others, *cost_lines(record)]:
            self._say(line)
        if self._facts.get("deterministic") and record.get("digest"):
            self._say(f"  digest {record['digest']}")
        self._say(f"  {self._folder}")

    def _say(self, text: str, style: str = "") -> None:
        if self._bar is not None:
            self._bar.line(text, style)
        else:
            say(text)

    def _draw(self, bar: Bar) -> None:
        facts, latest, total = self._facts, self._latest, self._total()
        step = latest.get("step", 0)
        share = min(step / total, 1.0) if total else 0.0
        parts = [
            f"{percent(share):>5}" if total else "",
            f"step {step:,} of {total:,}" if total else f"step {step:,}",
            self._phase or ("" if (left := self._left()) is None else f"{duration(left)} left"),
            counted(facts["ranks"], "rank") if "ranks" in facts else "",
        ]
        below = figures({**latest, "images_per_second": self._speed}) if latest else "starting"
        before = epoch_name(latest.get("epoch", 1), facts.get("epochs"))
        bar.draw(before, share, "  ".join(filter(None, parts)), below)

    def _total(self) -> int:
        """Return the steps of the whole run; 0 if unknown."""
        return (self._facts.get("epochs") or 0) * (self._facts.get("steps_per_epoch") or 0)

    def _left(self) -> float | None:
        """Estimate the seconds to the end of the run at the pace so far, evaluations included."""
        total = self._total()
        if not self._latest or not total:
            return None
        done = self._latest["step"] - self._before
        elapsed = time.monotonic() - self._start
        return max(total - self._latest["step"], 0) * elapsed / done

    @contextmanager
    def _silent_where_unread(self) -> Iterator[None]:
        """Go silent if standard output cannot be written within the block.

        Training continues, and later prints by other code must not fail either.
        """
        try:
            yield
        except OSError:
            self._silent = True
            discard_stdout()
            self.close()


def _wants_bar(progress: str) -> bool:
    if progress == "plain":
        return False
    from hpctrain.report.console import dumb_terminal, terminal_columns

    if dumb_terminal():
        return False
    return progress == "bar" or terminal_columns() is not None


def header_lines(facts: Record) -> list[str]:
    """Return up to four lines on the network, the data and the hardware of a run."""
    hosts = len(facts.get("hosts") or ())
    ranks, shards, rows = facts.get("ranks"), facts.get("shards"), facts.get("rows")
    network = [
        facts.get("model"),
        counted(facts.get("parameters"), "parameter"),
        counted(ranks, "rank") + (f" on {hosts} hosts" if hosts > 1 else ""),
        counted(shards, "shard") if shards != ranks else "",
    ]
    splits = [f"{number:,} {split}" for split, number in (rows or {}).items() if number]
    source = os.path.basename(facts.get("pack") or "images")
    per_epoch = facts.get("steps_per_epoch")
    data = [
        f"{source}: {_joined(splits)}" if splits else "",
        f"mini-batch {facts['batch_size']:,}" if facts.get("batch_size") else "",
        counted(facts.get("epochs"), "epoch")
        + (f" of {counted(per_epoch, 'step')}" if per_epoch else ""),
    ]
    machine = [
        facts.get("device"),
        facts.get("precision"),
        f"{counted(facts['threads'], 'thread')} a rank" if facts.get("threads") else "",
        facts.get("mpi"),
    ]
    shares = facts.get("rank_shares") if (ranks or 1) > 1 else None
    shares = f"shares of the mini-batch: {shares}" if shares else ""
    lines = ["Run " + _joined([facts.get("name"), _joined(network)], ": ")]
    return lines + ["  " + line for line in (_joined(data, "; "), shares, _joined(machine)) if line]


def epoch_line(record: Record, epochs: int | None, left: float | None) -> str:
    """Return the line of one epoch."""
    line = f"{epoch_name(record['epoch'], epochs)}  {figures(record)}"
    return line if left is None else f"{line}  {duration(left):>5} left"


def evaluation_line(record: Record, epochs: int | None) -> str:
    """Return the line of one evaluation, in the columns of `epoch_line`."""
    width = len(epoch_name(record["epoch"], epochs))
    seconds = record["seconds"]
    speed = record["rows"] / seconds if seconds else None
    line = f"{'  ' + record['split']:<{width}}  {figures({**record, 'images_per_second': speed})}"
    return f"{line}  {record['rows']:>5,} images"


def summary_lines(record: Record, evaluations: dict[str, Record]) -> list[str]:
    """Return lines on how a run ended, after how long, and the last evaluation of each split."""
    began = BEGAN.get(record["status"], "Failed after")
    reason = (record.get("reason") or "").partition("\n")[0]
    results = {}
    for split, last in evaluations.items() if record["status"] in ("done", "stopped") else ():
        name = "loss" if last["accuracy"] is None else "accuracy"
        results[split] = f"{split} {name} {short_number(last[name])}"
        if (balanced := last.get("balanced_accuracy")) is not None:
            results[split] += f" (balanced {short_number(balanced)})"
    first = [f"{began} {duration(record['seconds'])}", reason, results.pop("test", None)]
    lines = [_joined(first, ": "), "  " + _joined(list(results.values()))][: 1 + bool(results)]
    resumes = record["status"] in ("stopped", "preempted")
    return lines + ["  the same command resumes the run"] * resumes


def cost_lines(record: Record) -> list[str]:
    """Return lines on the mean time of a step, its phases, the slowest rank, and advice."""
    if "shares" not in record:
        return []
    percents = whole_percents(record["shares"])
    shares = [f"{phase} {percent} %" for phase, percent in percents.items()]
    lines = [f"  step {1000 * record['step_seconds']:,.1f} ms: {_joined(shares)}"]
    if record.get("slowest_rank") is not None:
        often = f"{round(100 * record['slowest_share'])} % of the steps"
        lines.append(f"  rank {record['slowest_rank']} was the slowest in {often}")
    return [*lines, *(f"  {line}" for line in record["advice"])]


def epoch_name(epoch: int, epochs: int | None) -> str:
    """Return "Epoch  3 of 20", with the same width for every epoch of a run."""
    return f"Epoch {epoch:>{len(str(epochs))}} of {epochs}" if epochs else f"Epoch {epoch:>3}"


def figures(record: Record) -> str:
    """Return loss, accuracy and speed in columns, without those that are None."""
    loss, accuracy, speed = record["loss"], record["accuracy"], record["images_per_second"]
    balanced = record.get("balanced_accuracy")
    columns = [
        "" if loss is None else f"loss {short_number(loss):>8}",
        "" if accuracy is None else f"accuracy {accuracy:.4f}",
        "" if balanced is None else f"balanced {balanced:.4f}",
        *(f"{name} {value:.4f}" for name, value in (record.get("metrics") or {}).items()),
        "" if speed is None else f"{rate(speed):>7} images/s",
    ]
    return _joined(columns, "  ")


def _joined(parts: Sequence[Any], separator: str = ", ") -> str:
    return separator.join(str(part) for part in parts if part)
