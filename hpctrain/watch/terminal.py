"""The display in a terminal: a table of all runs, plots of the selected one, keys.

It is redrawn only on changes. A plot is not redrawn before 100 times the duration of the last
drawing has passed, so that watching costs little on a machine that others use, too.
"""

from __future__ import annotations

import time
from typing import Any, ClassVar

from hpctrain.errors import Failure, UsageError
from hpctrain.watch.drawing import cells, draw, facts_line, progress
from hpctrain.watch.runs import Summary, WatchedRun, WatchedRuns

try:
    from rich.text import Text
    from textual.app import App, ComposeResult
    from textual.binding import Binding
    from textual.containers import Container
    from textual.coordinate import Coordinate
    from textual.screen import ModalScreen
    from textual.widgets import DataTable, Footer, Static
except ImportError as error:
    raise UsageError(
        "watch needs the package textual: pip install 'hpctrain[watch]';"
        " --once and --web do without"
    ) from error

POLL_EVERY = 1.5  # seconds
LEAST_WAIT = 4.0  # minimum seconds between two drawings of a run's plots
COST_RATIO = 100  # the same in units of the last drawing's duration; the longer wait applies
WIDE, SHORT = 100, 36  # with at least WIDE columns or fewer than SHORT rows, plots are side by side
COLUMNS = ("run", "status", "epoch", "done", "left", "loss", "accuracy", "images/s")
STYLES = {"running": "green", "done": "blue", "failed": "bold red", "silent": "bold yellow"}


def show(runs: WatchedRuns) -> int:
    """Watch until q is pressed."""
    WatchApp(runs).run()
    return 0


class Question(ModalScreen[bool]):
    """A dialog to be answered with y or n."""

    CSS = """
    Question { align: center middle; }
    Question > Static { width: auto; max-width: 80%; padding: 1 3; border: round $warning; }
    """
    BINDINGS: ClassVar = [
        ("y", "answer(True)", "Yes"),
        ("n", "answer(False)", "No"),
        ("escape", "answer(False)", "No"),
    ]

    def __init__(self, text: str) -> None:
        super().__init__()
        self._text = text

    def compose(self) -> ComposeResult:
        """Show the question."""
        yield Static(Text(f"{self._text}\n\ny  yes      n  no"))

    def action_answer(self, yes: bool) -> None:
        """Return the answer and close the dialog."""
        self.dismiss(yes)


class WatchApp(App[None]):
    """The display of `runs`."""

    TITLE = "hpctrain watch"
    ENABLE_COMMAND_PALETTE = False
    CSS = """
    #table { height: auto; max-height: 40%; }
    #table.short { max-height: 28%; }
    #facts { height: auto; padding: 0 1; border-top: solid $primary; }
    #plots { height: 1fr; layout: vertical; }
    #plots.wide { layout: horizontal; }
    #plots > Static { width: 1fr; height: 1fr; }
    """
    BINDINGS: ClassVar = [
        ("q", "quit", "Quit"),
        ("s", "stop", "Stop the run"),
        Binding("j,tab", "choose(1)", "Next run", key_display="j", priority=True),
        Binding("k,shift+tab", "choose(-1)", "Previous", key_display="k", priority=True),
    ]

    def __init__(self, runs: WatchedRuns) -> None:
        super().__init__(ansi_color=False)
        self._runs = runs
        self._rows: list[tuple[int, tuple[str, ...]]] = []  # of the table: key and cells of a run
        self._facts = ""
        self._drawn: tuple[Any, int] | None = None  # run, sizes and version of the plots drawn
        self._due = 0.0

    def compose(self) -> ComposeResult:
        """Lay out the table, the facts, two plots and the keys."""
        yield DataTable(id="table", cursor_type="row", zebra_stripes=True)
        yield Static(id="facts")
        with Container(id="plots"):
            yield Static(id="loss")
            yield Static(id="accuracy")
        yield Footer()

    def on_mount(self) -> None:
        """Fill the display and start polling."""
        table = self._table()
        table.add_columns(*COLUMNS)
        table.focus()
        self._tick()
        self.set_interval(POLL_EVERY, self._tick)

    def on_resize(self) -> None:
        """Adapt the layout to a new size of the terminal."""
        self.query_one("#plots").set_class(
            self.size.width >= WIDE or self.size.height < SHORT, "wide"
        )
        self._table().set_class(self.size.height < SHORT, "short")
        self.call_after_refresh(self._draw)

    def on_data_table_row_highlighted(self) -> None:
        """Show the run that was selected."""
        self._show_facts()
        self.call_after_refresh(self._draw)

    def action_choose(self, by: int) -> None:
        """Select the next (1) or the previous (-1) run."""
        table = self._table()
        if table.row_count and not self._is_asking():
            table.move_cursor(row=(table.cursor_row + by) % table.row_count)

    def action_stop(self) -> None:
        """Ask whether to stop the selected run."""
        run = self._chosen()
        if run is None:
            return
        if not run.status.can_be_stopped:
            self.notify(f"{run.name}: {run.status.text}", markup=False)
            return
        self.push_screen(
            Question(f"Stop {run.name} after its next step?"), lambda yes: self._stop(run, yes)
        )

    def _stop(self, run: WatchedRun, yes: bool | None) -> None:
        if not yes:
            return
        try:
            self.notify(run.stop(), markup=False)
        except Failure as error:
            self.notify(str(error), severity="error", markup=False)
        self._tick()

    def _table(self) -> DataTable[Any]:
        return self.query_one("#table", DataTable)

    def _chosen(self) -> WatchedRun | None:
        row = self._table().cursor_row
        return self._runs.get(self._rows[row][0]) if 0 <= row < len(self._rows) else None

    def _is_asking(self) -> bool:
        return isinstance(self.screen, Question)

    def _tick(self) -> None:
        if self._is_asking():
            return
        self._runs.poll()
        self._fill_table()
        self._show_facts()
        self._draw()

    def _fill_table(self) -> None:
        summaries = [run.summary() for run in self._runs.all()]
        rows = [(summary["key"], cells(summary)) for summary in summaries]
        if rows == self._rows:
            return
        before, chosen, table = self._rows, self._chosen(), self._table()
        self._rows, keys = rows, [key for key, _ in rows]
        lines = []
        for summary, (_, texts) in zip(summaries, rows, strict=True):
            styles = ["", STYLES.get(summary["status"], ""), *[""] * (len(texts) - 2)]
            lines.append([*map(Text, texts, styles)])
        if keys == [key for key, _ in before]:  # refilled, the table would scroll back to its top
            for row, ((_, old), line) in enumerate(zip(before, lines, strict=True)):
                for column, text in enumerate(line):
                    if text.plain != old[column]:
                        table.update_cell_at(Coordinate(row, column), text, update_width=True)
            return
        with self.prevent(DataTable.RowHighlighted):  # the same run stays selected
            table.clear()
            for line in lines:
                table.add_row(*line)
            if chosen is not None and chosen.key in keys:
                table.move_cursor(row=keys.index(chosen.key))

    def _show_facts(self) -> None:
        run = self._chosen()
        text = facts(run.summary()) if run else "no run has begun yet"
        if text != self._facts:
            self._facts = text
            self.query_one("#facts", Static).update(Text(text))

    def _draw(self) -> None:
        run, areas = self._chosen(), [self.query_one(f"#{n}", Static) for n in ("loss", "accuracy")]
        if run is None or self._is_asking():
            return
        place = (run.key, [area.size for area in areas])
        wanted = (place, run.history.version)
        if wanted == self._drawn or (
            self._drawn and place == self._drawn[0] and time.monotonic() < self._due
        ):
            return
        start = time.monotonic()
        for area in areas:
            plot = draw(run.history, str(area.id), area.size.width, area.size.height)
            area.update(plot)
        end = time.monotonic()
        self._drawn = wanted
        self._due = end + max(LEAST_WAIT, COST_RATIO * (end - start))


def facts(run: Summary) -> str:
    """Return the lines between table and plots: progress, facts, the last notes."""
    share = run["share"]
    bar = "" if share is None else "█" * int(30 * share) + "░" * (30 - int(30 * share)) + "  "
    head = f"{run['name']}: {run['text']}" + (f"  ({run['model']})" if run["model"] else "")
    return "\n".join(filter(None, [head, bar + progress(run), facts_line(run), *run["notes"]]))
