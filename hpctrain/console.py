"""Rich's console for text from data: a string is shown as it is, never read as markup."""

from __future__ import annotations

from typing import Any

from rich.console import Console as RichConsole
from rich.text import Text

from hpctrain.text import printable


class Console(RichConsole):
    """Shows strings, those in tables too, without reading markup or emoji in them, and control
    characters, ends of lines too, as escapes. What has a style or several lines is a
    ``rich.text.Text``, made by `styled`.
    """

    def __init__(self, **options: Any) -> None:
        super().__init__(markup=False, emoji=False, highlight=False, **options)

    def render_str(self, text: str, **options: Any) -> Text:
        """What rich makes of every string that it is given."""
        return super().render_str(printable(text, self.encoding, newlines=False), **options)

    def on_broken_pipe(self) -> None:
        """Raise the error: rich would end the process, and with it the training."""
        raise


def styled(text: str, style: str = "", encoding: str = "utf-8") -> Text:
    """Text with a style, control characters as escapes."""
    return Text(printable(text, encoding), style)
