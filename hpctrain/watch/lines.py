"""A run in lines of text: for pipes, and for what a terminal shows above its plots."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from hpctrain.report.progress import counted, duration
from hpctrain.watch.runs import Summary

WIDEST_STATUS = 18  # characters in a table; the word alone where there is more to say


def status_line(run: Summary) -> str:
    """The whole run in one line, for pipes."""
    parts = run["name"], run["text"], way(run), figures(run), speed(run), run["damage"]
    return "  ".join(filter(None, parts))


def way(run: Summary) -> str:
    """ "epoch 3 of 100, step 12 of 400, 40 %, 0:34 left"."""
    parts = []
    if run["epoch"]:
        parts.append(f"epoch {run['epoch']}" + (f" of {run['epochs']}" if run["epochs"] else ""))
    if run["step"]:
        parts.append(f"step {run['step']:,}" + (f" of {run['steps']:,}" if run["steps"] else ""))
    if run["share"] is not None:
        parts.append(percent(run["share"]))
    if run["left"] is not None:
        parts.append(f"{duration(run['left'])} left")
    return ", ".join(parts)


def figures(run: Summary) -> str:
    """Loss and accuracy of the last step, and of the last evaluation of each split."""
    named = {"training": run, **run["evaluations"]}
    return "; ".join(
        f"{split} {words}" for split, one in named.items() if (words := _loss_accuracy(one))
    )


def speed(run: Summary) -> str:
    """Images a second, ranks, where the time goes."""
    parts = [f"{rate(run)} images/s" if rate(run) else "", counted(run["ranks"], "rank")]
    if run["slowest_rank"] is not None:
        often = f" in {round(100 * run['slowest_share'])} %" if run["slowest_share"] else ""
        parts.append(f"slowest rank {run['slowest_rank']}{often}")
    if run["step_seconds"]:
        shares = " ".join(f"{name} {share} %" for name, share in run["percents"].items())
        parts.append(f"step {1000 * run['step_seconds']:,.1f} ms ({shares})")
    return ", ".join(filter(None, parts))


def cells(run: Summary) -> Sequence[str]:
    """Of the table of all runs: name, status, epoch, done, left, loss, accuracy, images/s."""
    epochs = f"/{run['epochs']}" if run["epochs"] else ""
    return (
        run["name"],
        run["text"] if len(run["text"]) <= WIDEST_STATUS else run["status"],
        f"{run['epoch']}{epochs}" if run["epoch"] else "",
        percent(run["share"]) if run["share"] is not None else "",
        duration(run["left"]) if run["left"] is not None else "",
        short(run["loss"]),
        short(run["accuracy"]),
        rate(run),
    )


def percent(share: float) -> str:
    """ "40 %"; 100 % only for all of it."""
    return f"{int(100 * share + 1e-9)} %" if share < 1 else "100 %"


def rate(run: Summary) -> str:
    """Images a second."""
    value = run["images_per_second"]
    return "" if value is None else f"{value:,.{0 if value >= 100 else 1}f}"


def short(value: float | None) -> str:
    """Four decimals, or three digits and an exponent."""
    if value is None:
        return ""
    return f"{value:.4f}" if value == 0 or 1e-3 <= abs(value) < 1e5 else f"{value:.2e}"


def _loss_accuracy(figures: dict[str, Any]) -> str:
    names = [name for name in ("loss", "accuracy") if figures[name] is not None]
    return " ".join(f"{name} {short(figures[name])}" for name in names)
