"""The output of a run on standard output: a header, a line per epoch and evaluation, a summary.

At a terminal, a live bar stands below these lines. Everything is derived from the records.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from rich.live import Live
from rich.text import Text

from hpctrain.report.console import (
    Console,
    dumb_terminal,
    output_width,
    styled,
    terminal_columns,
)
from hpctrain.text import (
    counted,
    discard_stdout,
    duration,
    percent,
    rate,
    say,
    short_number,
    whole_percents,
)

Record = Mapping[str, Any]
BEGAN = {"done": "Done in", "stopped": "Stopped after", "preempted": "Preempted after"}
SMOOTHING = 0.1  # weight of the newest step in the bar's images/s
REDRAW = 0.5  # seconds after a drawing of the bar in which steps are not drawn
WIDTH = 100  # columns of a bar if the width of the output is unknown


class Display:
    """Prints the records of one run as they are made. Output errors never fail the run.

    If standard output can no longer be written (its reader has ended, its disk is full), it is
    discarded, and training continues.
    """

    def __init__(self, folder: Path, progress: str) -> None:
        """`progress` is "bar", "plain", or "auto": a bar if a terminal shows the output."""
        self._folder = folder
        wanted = progress == "bar" or (progress == "auto" and terminal_columns() is not None)
        self._wants_bar = wanted and not dumb_terminal()
        self._bar: Live | None = None
        self._due = 0.0  # when the bar is drawn next
        self._facts: Record = {}
        self._start = time.monotonic()
        self._before = 0  # steps done when this launch began
        self._latest: Record = {}  # of the last step
        self._speed = 0.0  # images/s, smoothed
        self._evaluations: dict[str, Record] = {}  # the last one of each split

    def write(self, record: Record) -> None:
        """Print one record, if its kind is printed."""
        with self._discarding_errors():
            match record["kind"]:
                case "run":
                    self._run(record)
                case "step":
                    self._step(record)
                case "epoch":
                    left = "" if self._left() is None else f"  {self._left():>5} left"
                    self._say(f"{self._name(record)}  {figures(record)}{left}")
                case "evaluation":
                    self._evaluations[record["split"]] = record
                    speed = record["rows"] / record["seconds"] if record["seconds"] else None
                    split = f"{'  ' + record['split']:<{len(self._name(record))}}"
                    found = figures({**record, "images_per_second": speed})
                    self._say(f"{split}  {found}  {record['rows']:>5,} images")
                case "note":
                    self._say(record["text"])
                case "end":
                    self._end(record)

    def phase(self, text: str) -> None:
        """Show `text` as the current phase on the bar, until it is drawn for the next step."""
        with self._discarding_errors():
            self._draw(text)

    def close(self) -> None:
        """Remove the bar."""
        bar, self._bar = self._bar, None
        if bar is not None:
            with suppress(OSError):
                bar.stop()

    def _run(self, record: Record) -> None:
        self._facts, self._latest, self._start = record, {}, time.monotonic()
        if self._wants_bar and self._bar is None:
            console = Console(force_terminal=True, width=output_width(WIDTH))
            # No thread redraws it: that would take time from the training.
            bar = Live(console=console, auto_refresh=False, transient=True)
            bar.start()
            console.show_cursor(True)  # a killed run must not leave the cursor hidden
            self._bar = bar
        for number, line in enumerate(header_lines(record)):
            self._say(line, "" if number else "bold")
        self._draw()

    def _step(self, record: Record) -> None:
        if not self._latest:
            self._before = record["step"] - 1
            self._speed = record["images_per_second"]
        self._latest = record
        self._speed += SMOOTHING * (record["images_per_second"] - self._speed)
        if time.monotonic() >= self._due or record["step"] == self._total():
            self._draw()

    def _end(self, record: Record) -> None:
        self.close()
        lines = [*summary_lines(record, self._evaluations), *cost_lines(record)]
        if self._facts.get("deterministic") and record.get("digest"):
            lines.append(f"  digest {record['digest']}")
        for line in [*lines, f"  {self._folder}"]:
            self._say(line)

    def _say(self, line: str, style: str = "") -> None:
        """Print a line, above the bar if there is one; `style` is for a terminal."""
        if self._bar is None:
            say(line)
        else:
            self._bar.console.print(styled(line, style, self._bar.console.encoding))

    def _draw(self, phase: str = "") -> None:
        """Draw the bar, if there is one, with `phase` in place of the remaining time."""
        if self._bar is None:
            return
        latest, total, step = self._latest, self._total(), self._latest.get("step", 0)
        share = min(step / total, 1.0) if total else 0.0
        parts = [
            f"{percent(share):>5}" if total else "",
            f"step {step:,} of {total:,}" if total else f"step {step:,}",
            phase or (f"{self._left()} left" if self._left() else ""),
            counted(self._facts.get("ranks"), "rank"),
        ]
        before, after = self._name({"epoch": latest.get("epoch", 1)}), _joined(parts, "  ")
        below = figures({**latest, "images_per_second": self._speed}) if latest else "starting"
        console = self._bar.console
        width = console.width = output_width(WIDTH)  # it may have changed
        size = min(max(width - len(before) - len(after) - 4, 4), 40)
        done, to_do = "━─" if console.encoding.startswith("utf") else "#-"
        bar = (done * int(size * share), "bar.complete"), to_do * (size - int(size * share))
        lines = Text.assemble(f"{before}  ", *bar, styled(f"  {after}\n  {below}"))
        lines.no_wrap, lines.overflow = True, "ellipsis"
        self._bar.update(lines, refresh=True)
        self._due = time.monotonic() + REDRAW

    def _name(self, record: Record) -> str:
        """Return "Epoch  3 of 20", with the same width for every epoch of a run."""
        epoch, epochs = record["epoch"], self._facts.get("epochs")
        return f"Epoch {epoch:>{len(str(epochs))}} of {epochs}" if epochs else f"Epoch {epoch:>3}"

    def _total(self) -> int:
        """Return the steps of the whole run; 0 if unknown."""
        return (self._facts.get("epochs") or 0) * (self._facts.get("steps_per_epoch") or 0)

    def _left(self) -> str | None:
        """Estimate the time to the end of the run at the pace so far, evaluations included."""
        if not self._latest or not self._total():
            return None
        elapsed = time.monotonic() - self._start
        rest = max(self._total() - self._latest["step"], 0)
        return duration(rest * elapsed / (self._latest["step"] - self._before))

    @contextmanager
    def _discarding_errors(self) -> Iterator[None]:
        """Discard standard output if it cannot be written in the block, also by other code."""
        try:
            yield
        except OSError:
            discard_stdout()
            self._wants_bar = False
            self.close()


def header_lines(facts: Record) -> list[str]:
    """Return up to four lines on the network, the data and the hardware of a run."""
    hosts = len(facts.get("hosts") or ())
    ranks, shards, epochs = facts.get("ranks"), facts.get("shards"), facts.get("epochs")
    network = [
        facts.get("model"),
        counted(facts.get("parameters"), "parameter"),
        counted(ranks, "rank") + (f" on {hosts} hosts" if hosts > 1 else ""),
        counted(shards, "shard") if shards != ranks else "",
    ]
    rows = (facts.get("rows") or {}).items()
    splits = [f"{number:,} {split}" for split, number in rows if number]
    steps = counted(facts.get("steps_per_epoch"), "step")
    data = [
        f"{os.path.basename(facts.get('pack') or 'images')}: {_joined(splits)}" if splits else "",
        f"mini-batch {facts['batch_size']:,}" if facts.get("batch_size") else "",
        counted(epochs, "epoch") + (f" of {steps}" if steps else ""),
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


def figures(record: Record) -> str:
    """Return loss, accuracy and speed in columns, without those that are None."""
    loss, speed = record["loss"], record["images_per_second"]
    shares = {"accuracy": record["accuracy"], "balanced": record.get("balanced_accuracy")}
    shares |= record.get("metrics") or {}
    columns = [
        "" if loss is None else f"loss {short_number(loss):>8}",
        *(f"{name} {value:.4f}" for name, value in shares.items() if value is not None),
        "" if speed is None else f"{rate(speed):>7} images/s",
    ]
    return _joined(columns, "  ")


def summary_lines(record: Record, evaluations: Mapping[str, Record]) -> list[str]:
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
    lines = [_joined(first, ": "), "  " + _joined(results.values())][: 1 + bool(results)]
    resumes = record["status"] in ("stopped", "preempted")
    return lines + ["  the same command resumes the run"] * resumes


def cost_lines(record: Record) -> list[str]:
    """Return lines on the mean time of a step, its phases, the slowest rank, and advice."""
    if "shares" not in record:
        return []
    shares = [f"{phase} {share} %" for phase, share in whole_percents(record["shares"]).items()]
    lines = [f"step {1000 * record['step_seconds']:,.1f} ms: {_joined(shares)}"]
    if record.get("slowest_rank") is not None:
        often = percent(record["slowest_share"])
        lines.append(f"rank {record['slowest_rank']} was the slowest in {often} of the steps")
    return [f"  {line}" for line in (*lines, *record["advice"])]


def _joined(parts: Iterable[Any], separator: str = ", ") -> str:
    return separator.join(str(part) for part in parts if part)
