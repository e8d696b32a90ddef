"""Runs in texts: the cells of a table, how far a run is, facts and notes, one line for pipes.

The figures of a table are those of the last and the best validation and of the test: the accuracy
in percent, or the loss where there is no accuracy.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from hpctrain.report.history import History, Metrics, metrics_of, number
from hpctrain.text import counted, duration, percent, rate, short_number, whole_percents

Summary = dict[str, Any]  # what `WatchedRun.summary` holds
Cell = tuple[str, Any]  # text, and the value by which rows are sorted; None comes last

COLUMNS = ("run", "status", "done", "left", "validation", "best", "test", "images/s")


def cells(history: History, name: str, status: str, share: float | None, left: Any) -> list[Cell]:
    """Return the cells of a run under `COLUMNS`; `left` is in seconds."""
    last = metrics_of(history.evaluated.get("validation", {}))
    best = history.best(by_accuracy=last.accuracy is not None)
    speed = history.images_per_second()
    return [
        (name, name),
        (status, status),
        ("", None) if share is None else (percent(share), share),
        ("", None) if left is None else (duration(left), left),
        *(_figure(metrics) for metrics in (last, best, history.test)),
        ("", None) if speed is None else (rate(speed), speed),
    ]


def _figure(metrics: Metrics) -> Cell:
    if metrics.accuracy is not None:
        return f"{100 * metrics.accuracy:.2f} %", metrics.accuracy
    return short_number(metrics.loss), None if metrics.loss is None else -metrics.loss


def table(runs: Sequence[Summary]) -> tuple[list[str], list[list[Cell]]]:
    """Return the names of the columns, and the cells of each run.

    The settings that differ between the runs are columns, too.
    """
    known = [run["settings"] for run in runs if run["settings"]]
    all_names = dict.fromkeys(name for settings in known for name in settings)
    names = [name for name in all_names if len({str(each.get(name)) for each in known}) > 1]
    rows = []
    for run in runs:
        values = [run["settings"].get(name) for name in names]
        rows.append([*run["cells"], *((_setting(value), value) for value in values)])
    return [*COLUMNS, *names], rows


def _setting(value: Any) -> str:
    return f"{value:g}" if isinstance(value, float) else "" if value is None else str(value)


def order(cell: Cell) -> tuple[bool, bool, Any]:
    """Return the key by which rows are sorted by a cell: large numbers first, then texts."""
    value = cell[1]
    is_number = isinstance(value, int | float)
    return value is None, not is_number, -value if is_number else str(value)


def progress(history: History, share: float | None, left: float | None) -> str:
    """Return the progress: "epoch 3 of 100, step 12 of 400, 40 %, 0:34 left"."""
    epoch, step, steps = history.step.get("epoch"), history.last_step, history.total_steps
    parts = []
    if epoch:
        of = f" of {history.planned_epochs}" if history.planned_epochs else ""
        parts.append(f"epoch {epoch}{of}")
    if step:
        parts.append(f"step {step:,}" + (f" of {steps:,}" if steps else ""))
    if share is not None:
        parts.append(percent(share))
    if left is not None:
        parts.append(f"{duration(left)} left")
    return ", ".join(parts)


def facts(history: History) -> list[tuple[str, str]]:
    """Return names and texts of known facts: metrics, speed, how the time is spent, device."""
    end, known = history.launch.end, history.facts
    costs = end if end.get("shares") else history.costs()
    shares = {name: max(number(v) or 0.0, 0.0) for name, v in (costs.get("shares") or {}).items()}
    percents = ", ".join(f"{name} {each} %" for name, each in whole_percents(shares).items())
    step, often = number(costs.get("step_seconds")), number(costs.get("slowest_share"))
    speed, rank = history.images_per_second(), number(costs.get("slowest_rank"))
    often_text = f" in {round(100 * often)} % of steps" if often else ""
    evaluated = {split: metrics_of(record) for split, record in history.evaluated.items()}
    pairs = [
        ("training", _loss_accuracy(metrics_of(history.step))),
        *((split, _loss_accuracy(metrics)) for split, metrics in evaluated.items()),
        ("best validation", _loss_accuracy(history.best_validation())),
        ("speed", "" if speed is None else f"{rate(speed)} images/s"),
        ("ranks", str(number(known.get("ranks")) or "")),
        ("slowest rank", "" if rank is None else f"{rank}{often_text}"),
        ("step", f"{1000 * step:,.1f} ms: {percents}" if step else ""),
        ("device", known.get("device") or ""),
        ("network", known.get("model") or ""),
    ]
    return [(name, text) for name, text in pairs if text]


def _loss_accuracy(metrics: Metrics) -> str:
    pairs = zip(metrics._fields, metrics, strict=True)
    return ", ".join(f"{name} {short_number(value)}" for name, value in pairs if value is not None)


def notes(history: History) -> list[str]:
    """Return the last notes of a run, and one on lines of its record that cannot be read."""
    lost = f"{counted(history.lost, 'line')} of the record cannot be read: {history.problem}"
    return [*history.notes, *([lost] if history.lost else [])]


def facts_line(run: Summary) -> str:
    """Return the facts in one line, without the folder."""
    return "; ".join(f"{name} {text}" for name, text in run["facts"] if name != "folder")


def status_line(run: Summary) -> str:
    """Return the state of a run in one line, for pipes; of its notes the last."""
    lost = [note for note in run["notes"][-1:] if " of the record cannot be read: " in note]
    return "  ".join(
        filter(None, [run["name"], run["text"], run["progress"], facts_line(run), *lost])
    )
