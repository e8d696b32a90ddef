"""Output of a sweep: a line per network, the slots live on a terminal, and a closing table."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path

from rich.live import Live
from rich.table import Table

from hpctrain.report.console import Console, dumb_terminal, output_width, terminal_columns
from hpctrain.report.find import compared_by_accuracy
from hpctrain.report.history import UNKNOWN, History, Metrics
from hpctrain.sweep.folder import FAILED, NetworkResult
from hpctrain.sweep.machine import Slot
from hpctrain.text import counted


class SweepDisplay:
    """Prints lines and tables, and on request draws the slots while `live` is entered."""

    def __init__(self, progress: str) -> None:
        at_terminal = terminal_columns() is not None and not dumb_terminal()
        live = progress == "live" or (progress == "auto" and at_terminal)
        self._quiet = progress == "none"
        self.console = Console(width=output_width(), force_terminal=live or None)
        # Not refreshed by a thread, because this process forks.
        self.live = Live(console=self.console, auto_refresh=False, transient=True) if live else None

    def line(self, text: str) -> None:
        """Print a line above the live slots."""
        if not self._quiet:
            self.console.print(text, soft_wrap=True)

    def begin(self, name: str, slot: Slot) -> None:
        """Report that a network was launched."""
        if self.live is None:
            self.line(f"{name} begins in slot {slot.number} ({slot})")

    def end(self, result: NetworkResult, log: Path, results: Sequence[NetworkResult]) -> None:
        """Report that a network has ended."""
        history, text = result.history, f"{result.network.name} {result.status}"
        if result.status == FAILED:
            text += f": {result.reason} ({log})"
        else:
            shown = {"validation": history.best_validation(), "test": history.test}
            texts = [f"{split} {_value(each)}" for split, each in shown.items() if _value(each)]
            texts += [counted(history.completed, "epoch"), f"{history.seconds:.0f} s"]
            text = ", ".join([text, *texts]) + (f": {result.reason}" if result.reason else "")
        final = sum(other.is_final for other in results)
        self.line(f"{text}  ({final} of {len(results)})")

    def update(self, running: Sequence[tuple[str, Slot, History]]) -> None:
        """Redraw the slots."""
        if self.live:
            table = Table.grid(padding=(0, 2))
            for name, slot, history in running:
                table.add_row(f"slot {slot.number}", str(slot), name, progress_text(history))
            self.live.update(table, refresh=True)

    def results(self, results: Iterable[NetworkResult]) -> None:
        """Print the closing table, best network first, and why networks failed."""
        if self._quiet:
            return
        results = best_first(results)
        self.console.print(results_table(results))
        for result in results:
            if result.status == FAILED:
                self.line(f"{result.network.name}: {result.reason}")


def progress_text(history: History) -> str:
    """Return the progress of a run: "epoch 3 of 20, validation 0.912"."""
    if not history.planned_epochs:
        return "starting"
    last = history.validations[-1] if history.validations else history.training
    what = "validation" if history.validations else "training"
    text = f"epoch {history.completed} of {history.planned_epochs}"
    return f"{text}, {what} {_value(last)}" if _value(last) else text


def _value(metrics: Metrics) -> str:
    """Format the accuracy, else the loss; empty if both are unknown."""
    value = metrics.loss if metrics.accuracy is None else metrics.accuracy
    return "" if value is None else f"{value:.4g}"


def _by_accuracy(results: Iterable[NetworkResult]) -> bool:
    return compared_by_accuracy([result.network.config.task for result in results])


def best_first(results: Iterable[NetworkResult]) -> list[NetworkResult]:
    """Sort by accuracy, or by loss if not all networks classify; best first.

    The metric of a network is that of validation, or of training if it was not validated; never
    that of the test.
    """
    results = list(results)
    by_accuracy = _by_accuracy(results)

    def score(result: NetworkResult) -> float:
        best = result.history.best_validation()
        return (result.history.training if best == UNKNOWN else best).score(by_accuracy)

    return sorted(results, key=score, reverse=True)


def results_table(results: Sequence[NetworkResult]) -> Table:
    """Return a table of the accuracies of all networks, or of losses if not all classify."""
    by_accuracy = _by_accuracy(results)
    what = "accuracy" if by_accuracy else "loss"
    table = Table(pad_edge=False)
    table.add_column("network", overflow="fold")
    table.add_column("status")
    for name in (f"validation\n{what}", f"test\n{what}", "epochs", "seconds"):
        table.add_column(name, justify="right")
    for result in results:
        values = result.metrics()[0 if by_accuracy else 1 :: 2]
        texts = ["" if value is None else f"{value:.4f}" for value in values]
        seconds = f"{result.history.seconds:.0f}"
        epochs = str(result.history.completed)
        table.add_row(result.network.name, result.status, *texts, epochs, seconds)
    return table


def counts(results: Iterable[NetworkResult]) -> str:
    """Count the networks by status: "4 done, 1 failed"."""
    found = [result.status for result in results]
    return ", ".join(f"{found.count(name)} {name}" for name in sorted(set(found)))
