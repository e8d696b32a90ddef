"""Functions of the user's own, named by a setting as ``package.module:function``.

They are imported with the current folder importable, as under ``python -m``. A function that a file
names is imported only with --trust-code: others may have written the file.
"""

from __future__ import annotations

import importlib
import inspect
import re
import sys
import traceback
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from hpctrain.errors import UsageError, did_you_mean
from hpctrain.text import listed

SETTINGS = ("model", "loss", "augment", "metric")  # that may name a function
PACKAGE = str(Path(__file__).parents[1])


class Imported(NamedTuple):
    """A function of the user's own."""

    setting: str  # as it was given: "--model package.module:function"
    function: Callable[..., Any]
    source: str  # the file of its module

    def __call__(self, *given: Any, **named: Any) -> Any:
        """Call the function. Raises UsageError, with the line of its file, if it fails."""
        try:
            return self.function(*given, **named)
        except (UsageError, MemoryError):
            raise
        except (Exception, SystemExit) as error:
            if type(error).__name__ == "OutOfMemoryError":  # of a GPU: may be no fault of it
                raise
            raise UsageError(f"{self.setting} failed: {_cause(error, self.source)}") from error

    def check_arguments(self, form: str, *given: Any, **named: Any) -> None:
        """Raise UsageError unless the function can be called with these arguments, as in `form`."""
        try:
            inspect.signature(self.function).bind(*given, **named)
        except ValueError:  # some functions in C do not tell their arguments
            return
        except TypeError as error:
            raise UsageError(f"{self.setting}: must be callable as {form}: {error}") from error


def import_function(name: str, flag: str) -> Imported:
    """Import the function "package.module:function" that the setting `flag` names.

    Raises UsageError if there is none, or if importing its module fails.
    """
    setting, folder = f"{flag} {name}", str(Path.cwd())
    proper = name.replace("/", ".").replace(".py:", ":")
    if proper.count(":") != 1 or proper != name:
        hint = f", here {proper}" if proper != name else ""
        raise UsageError(f"{setting}: write package.module:function{hint}")
    module_name, attribute = name.split(":")
    if sys.path[0] not in (folder, ""):
        sys.path.insert(0, folder)
    try:
        module = importlib.import_module(module_name)
    except (Exception, SystemExit) as error:
        text = f"{setting}: importing {module_name} in {folder} failed: {_cause(error)}"
        raise UsageError(text) from error
    function = getattr(module, attribute, None)
    if not callable(function):
        hint = did_you_mean(attribute, dir(module))
        raise UsageError(f"{setting}: {module_name} has no function {attribute}{hint}")
    return Imported(setting, function, getattr(module, "__file__", None) or "")


def is_own(setting: str, value: object) -> bool:
    """Whether this value of a setting, by its name in `SETTINGS`, is a function of one's own."""
    if setting not in SETTINGS or ":" not in str(value):
        return False
    return setting != "model" or not str(value).startswith("timm:")


def require_trust(settings: Mapping[str, Any], file: str | Path, trust_code: bool) -> None:
    """Raise UsageError if settings from a file name functions of one's own, without --trust-code.

    It is called wherever a file names functions: a file of --config, of a sweep, of a run or of a
    network. A function named on the command line is trusted. A run is resumed by the command that
    names its functions, as it began (training/folder.py: keep_settings).
    """
    named = dict.fromkeys(str(value) for name, value in settings.items() if is_own(name, value))
    if named and not trust_code:
        raise UsageError(
            f"{file} names {listed(named)}: a function that a file names is imported only with"
            " --trust-code (in Python, trust_code=True)"
        )


def one_line(error: BaseException) -> str:
    """Return the class and the text of an error in one line."""
    return " ".join(f"{type(error).__name__}: {error}".split())


def _cause(error: BaseException, source: str = "") -> str:
    """Return the error with its line in the file `source`, or else in the last one not of ours."""
    ours = re.compile(f"{re.escape(PACKAGE)}|.*importlib")
    frames = [f for f in traceback.extract_tb(error.__traceback__) if not ours.match(f.filename)]
    own = [frame for frame in frames if frame.filename == source] or frames
    place = f" ({Path(own[-1].filename).name}, line {own[-1].lineno})" if own else ""
    return one_line(error) + place
