"""What a person sees of a sweep: the slots, live on a terminal, and a line for each network."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from types import TracebackType

from rich.live import Live
from rich.table import Table

from hpctrain.console import Console
from hpctrain.report.bar import dumb_terminal, terminal_columns
from hpctrain.report.history import RunHistory
from hpctrain.report.progress import counted
from hpctrain.sweep.results import FAILED, FINAL, Row, ordered, results_table
from hpctrain.sweep.slots import Slot


def progress_text(history: RunHistory) -> str:
    """ "epoch 3 of 20, validation 0.912"."""
    last = history.validations[-1] if history.validations else history.training
    value = last.accuracy if last.accuracy is not None else last.loss
    what = "validation" if history.validations else "training"
    text = f"epoch {history.epochs} of {history.planned_epochs}"
    text = text if history.planned_epochs else "starting"
    return text if value is None else f"{text}, {what} {value:.4g}"


class Show:
    """Prints; within a ``with`` block, and where asked for, also draws the slots."""

    def __init__(self, progress: str) -> None:
        columns = terminal_columns()
        live = progress == "live" or (progress == "auto" and columns and not dumb_terminal())
        self._quiet = progress == "none"
        self.console = Console(width=columns or 120, force_terminal=True if live else None)
        # No thread of its own: processes are forked beside it.
        self._live = (
            Live(console=self.console, auto_refresh=False, transient=True) if live else None
        )

    def __enter__(self) -> Show:
        if self._live:
            self._live.start()
        return self

    def __exit__(
        self, kind: type | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._live:
            self._live.stop()

    def line(self, text: str) -> None:
        """A line that stays."""
        if not self._quiet:
            self.console.print(text, soft_wrap=True)

    def begins(self, name: str, slot: Slot) -> None:
        """A network was launched."""
        if self._live is None:
            self.line(f"{name} begins in slot {slot.number} ({slot.place()})")

    def ended(self, row: Row, log: Path, rows: Sequence[Row]) -> None:
        """A network has ended."""
        final = sum(other.status in FINAL for other in rows)
        text = f"{row.network.name} {row.status}"
        if row.status == FAILED:
            text += f": {row.reason} ({log})"
        else:
            best, test = row.history.best_validation(), row.history.test
            shown = {"validation": best, "test": test}
            for what, point in shown.items():
                value = point.accuracy if point.accuracy is not None else point.loss
                text += "" if value is None else f", {what} {value:.4g}"
            text += f", {counted(row.history.epochs, 'epoch')}, {row.history.seconds:.0f} s"
            text += f": {row.reason}" if row.reason else ""
        self.line(f"{text}  ({final} of {len(rows)})")

    def update(self, running: Sequence[tuple[str, Slot, RunHistory]]) -> None:
        """Draw the slots."""
        if self._live:
            table = Table.grid(padding=(0, 2))
            for name, slot, history in running:
                table.add_row(f"slot {slot.number}", slot.place(), name, progress_text(history))
            self._live.update(table, refresh=True)

    def results(self, rows: Sequence[Row]) -> None:
        """The closing table, best first, and why networks failed."""
        if self._quiet:
            return
        self.console.print(results_table(rows))
        for row in ordered(rows):
            if row.status == FAILED:
                self.line(f"{row.network.name}: {row.reason}")
