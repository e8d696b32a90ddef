"""Runs in texts: the cells of a table, how far a run is, facts and notes, one line for pipes.

The figures of a table are those of the last and the best validation and of the test: the accuracy
in percent, or the loss where there is no accuracy.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

from hpctrain.config import Config
from hpctrain.report.history import History, Metrics, metrics_of, time_of
from hpctrain.report.record import Record
from hpctrain.text import counted, duration, percent, printable, rate, short_number, whole_percents

Row = dict[str, Any]  # of a table: see `describe` and `WatchedRun`
Cell = tuple[str, Any]  # text, and the value by which rows are sorted; None comes last

COLUMNS = ("run", "status", "done", "left", "validation", "best", "test", "images/s")


def describe(history: History, status: str) -> Row:
    """Return what is displayed of a run: progress, facts, notes, the cells of its figures."""
    step, steps = history.step.get("step", 0), history.total_steps
    share = min(step / steps, 1.0) if steps else None
    left = seconds_left(history) if status in ("running", "stopping") else None
    done = "" if share is None else percent(share)
    remaining = "" if left is None else duration(left)
    progress = [
        _counted("epoch", history.step.get("epoch"), history.facts.get("epochs")),
        _counted("step", step, steps),
        done,
        remaining and f"{remaining} left",
    ]
    last = metrics_of(history.evaluated.get("validation", {}))
    figures = (last, history.best(by_accuracy=last.accuracy is not None), history.test)
    costs = history.costs()
    speed = costs.get("images_per_second")
    lost = f"{counted(history.lost, 'line')} of the record cannot be read: {history.problem}"
    lost = lost if history.lost else ""
    return {
        "can_be_stopped": status in ("waiting", "running", "silent"),
        "version": history.version,
        "share": share,
        "progress": ", ".join(filter(None, progress)),
        "facts": facts(history, costs),
        "notes": [*history.notes, *filter(None, [lost])],
        "lost": lost,
        "cells": [
            (done, share),
            (remaining, left),
            *map(_figure, figures),
            ("" if speed is None else rate(speed), speed),
        ],
        "settings": history.facts.get("settings") or {},
    }


def _counted(noun: str, number: int | None, total: int | None) -> str:
    of = f" of {total:,}" if total else ""
    return f"{noun} {number:,}{of}" if number else ""


def _figure(metrics: Metrics) -> Cell:
    if metrics.accuracy is not None:
        return f"{100 * metrics.accuracy:.2f} %", metrics.accuracy
    return short_number(metrics.loss), None if metrics.loss is None else -metrics.loss


def seconds_left(history: History) -> float | None:
    """Estimate the seconds to the end of the run, at the pace of this launch; None if unknown."""
    first, last, steps = history.launch.first_step, history.step, history.total_steps
    if not steps or not first or last["step"] <= first["step"]:
        return None
    began, came = time_of(first), time_of(last)
    left = (steps - last["step"]) * (came - began) / (last["step"] - first["step"])
    return max(left - max(time.time() - came, 0.0), 0.0) or None


def facts(history: History, costs: Record) -> list[tuple[str, str]]:
    """Return names and texts of known facts: metrics, speed, how the time is spent, device."""
    speed, known = costs.get("images_per_second"), history.facts
    costs = history.launch.end if history.launch.end.get("shares") else costs
    shares = {name: max(share or 0.0, 0.0) for name, share in costs.get("shares", {}).items()}
    percents = ", ".join(f"{name} {each} %" for name, each in whole_percents(shares).items())
    step, rank, often = (costs.get(n) for n in ("step_seconds", "slowest_rank", "slowest_share"))
    often_text = f" in {round(100 * often)} % of steps" if often else ""
    pairs = [
        ("training", _loss_accuracy(metrics_of(history.step))),
        *((split, _loss_accuracy(metrics_of(r))) for split, r in history.evaluated.items()),
        ("best validation", _loss_accuracy(history.best_validation())),
        ("speed", "" if speed is None else f"{rate(speed)} images/s"),
        ("ranks", str(known.get("ranks") or "")),
        ("slowest rank", "" if rank is None else f"{rank}{often_text}"),
        ("step", f"{1000 * step:,.1f} ms: {percents}" if step else ""),
        ("device", known.get("device") or ""),
        ("network", known.get("model") or ""),
    ]
    return [(name, text) for name, text in pairs if text]


def _loss_accuracy(metrics: Metrics) -> str:
    pairs = zip(metrics._fields, metrics, strict=True)
    return ", ".join(f"{name} {short_number(value)}" for name, value in pairs if value is not None)


def table(rows: Sequence[Row]) -> tuple[list[str], list[Row]]:
    """Return the names of the columns, and the rows with all their cells.

    The settings that differ between the runs are columns, too; one not recorded has its default.
    """
    defaults = Config().table()
    known = [defaults | row["settings"] for row in rows if row["settings"]]
    all_names = dict.fromkeys(name for row in rows for name in row["settings"])
    names = [name for name in all_names if len({str(each.get(name)) for each in known}) > 1]
    found = []
    for row in rows:
        own = [(row[name], row[name]) for name in ("name", "status")]
        settings = defaults | row["settings"] if row["settings"] else {}
        more = [settings.get(name) for name in names]
        found.append(row | {"cells": [*own, *row["cells"], *((_setting(v), v) for v in more)]})
    return [*COLUMNS, *names], found


def _setting(value: Any) -> str:
    return f"{value:g}" if isinstance(value, float) else "" if value is None else str(value)


def order(cell: Cell) -> tuple[bool, bool, Any]:
    """Return the key by which rows are sorted by a cell: large numbers first, then texts."""
    value = cell[1]
    is_number = isinstance(value, int | float)
    return value is None, not is_number, -value if is_number else str(value)


def status_line(row: Row) -> str:
    """Return the state of a run in one line, for pipes; of its notes the one on lost lines."""
    parts = [row["name"], row["text"], row["progress"], facts_line(row), row["lost"]]
    return printable("  ".join(filter(None, parts)), newlines=False)


def facts_line(row: Row) -> str:
    """Return the facts in one line."""
    return "; ".join(f"{name} {text}" for name, text in row["facts"])
