"""Rich's console for text from data: strings are printed literally, never parsed as markup."""

from __future__ import annotations

from typing import Any

from rich.console import Console as RichConsole
from rich.text import Text

from hpctrain.text import printable


class Console(RichConsole):
    """Prints strings, also in tables, without interpreting markup or emoji codes in them.

    Control characters, including newlines, are printed as escapes. Text with a style or with
    several lines must be a ``rich.text.Text`` made by `styled`.
    """

    def __init__(self, **options: Any) -> None:
        super().__init__(markup=False, emoji=False, highlight=False, **options)

    def render_str(self, text: str, **options: Any) -> Text:
        """Convert a string to rich's Text; rich calls this for every string to print."""
        return super().render_str(printable(text, self.encoding, newlines=False), **options)

    def on_broken_pipe(self) -> None:
        """Raise the error; rich would exit the process, and thereby end the training."""
        raise


def styled(text: str, style: str = "", encoding: str = "utf-8") -> Text:
    """Return text with a style, control characters as escapes."""
    return Text(printable(text, encoding), style)
