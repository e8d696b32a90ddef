"""The two kinds of failure that are reported to the user, each with its exit code.

Any other exception that is not caught is a bug and is printed with its traceback.
"""

import difflib
from collections.abc import Iterable, Mapping
from types import MappingProxyType

from hpctrain.text import brief, printable

MOST_SHOWN = 300  # characters of an error of a library, or of the user's own code


class Failure(Exception):
    """A failure that is printed without a traceback and with control characters as escapes."""

    exit_code = 1
    agreed = False  # whether all ranks raise it: then rank 0 prints it and no rank aborts

    def __str__(self) -> str:
        return printable(super().__str__())

    def _render_traceback_(self) -> list[str]:
        """Return what IPython and Jupyter show instead of a traceback."""
        return [f"{type(self).__name__}: {self}"]


class UsageError(Failure):
    """The command line, a file or the data cannot be used; the message gives the values."""

    exit_code = 2


class OwnCodeError(UsageError):
    """Code that a setting names failed: of the user's own, or of a library."""


class RunError(Failure):
    """The job was valid but failed while it ran (full disk, NaN loss, truncated file)."""


class DeviceFailure(RunError):
    """A GPU, or a kernel on it, failed: this process cannot use it again, nor free its memory."""


def first_line(error: object) -> str:
    """Return the first line of an error's text, or the name of its class if it has no text.

    The bars that CuPy prints around its messages are removed.
    """
    lines = (line.strip(" =") for line in str(error).splitlines())
    return next(filter(None, lines), type(error).__name__)


def one_line(error: BaseException) -> str:
    """Return the class and the text of an error in one line."""
    return " ".join(f"{type(error).__name__}: {error}".split()).removesuffix(":")


def brief_error(error: BaseException) -> str:
    """Return `one_line` of an error of a library, shortened to `MOST_SHOWN` characters."""
    return brief(one_line(error), MOST_SHOWN)


def did_you_mean(
    word: str,
    choices: Iterable[str],
    elsewhere: Mapping[str, str] = MappingProxyType({}),
    alike: float = 0.6,
) -> str:
    """Return ", did you mean 'X'?" for the closest of the choices, or ""; "-" and "_" are equal.

    `elsewhere` maps what other programs call it to what it is called here, or to "" if nothing here
    is meant. `alike` is the least similarity of names, from 0 to 1 (difflib's ratio).
    """

    def bare(name: str) -> str:
        return name.strip("-").replace("-", "_")

    meant = elsewhere.get(bare(word))
    if meant is None:
        names = {bare(name): name for name in choices if name != word}
        close = difflib.get_close_matches(bare(word), names, n=1, cutoff=alike)
        meant = names[close[0]] if close else ""
    if not meant:
        return ""
    return f", did you mean {meant!r}?"
