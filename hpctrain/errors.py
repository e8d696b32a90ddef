"""The two kinds of failure that a user meets, each with its exit code.

Anything else that escapes is a bug and is shown with its traceback.
"""

import difflib
from collections.abc import Iterable

from hpctrain.text import printable


class Failure(Exception):
    """A failure that is printed in one line, whatever the names in it hold."""

    exit_code = 1
    agreed = False  # whether all ranks raise it alike: rank 0 prints it then, and nobody aborts

    def __str__(self) -> str:
        return printable(super().__str__())


class UsageError(Failure):
    """The command line, a file or the data cannot be used as asked: say what, with the numbers."""

    exit_code = 2


class RunError(Failure):
    """The job was valid but failed while it ran (full disk, NaN loss, truncated file)."""


def first_line(error: object) -> str:
    """The first line of an error's text, without the bars that CuPy draws around it; its class's
    name where there is none.
    """
    lines = (line.strip(" =") for line in str(error).splitlines())
    return next(filter(None, lines), type(error).__name__)


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """', did you mean X?' for the nearest known name, or nothing; "-" and "_" are one."""
    names = {_bare(name): name for name in known if name != word}
    match = difflib.get_close_matches(_bare(word), names, n=1, cutoff=0.6)
    return f", did you mean {names[match[0]]!r}?" if match else ""


def _bare(name: str) -> str:
    return name.strip("-").replace("-", "_")
