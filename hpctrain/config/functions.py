"""Functions of the user's own, named by a setting as ``package.module:function``.

They are imported with the current folder importable, as under ``python -m``. A function that a file
names is imported only with --trust-code: others may have written the file.
"""

from __future__ import annotations

import importlib
import inspect
import sys
import traceback
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from hpctrain.errors import UsageError, did_you_mean
from hpctrain.text import listed

SETTINGS = ("model", "loss", "augment", "metric")  # that may name a function


class Imported(NamedTuple):
    """A function of the user's own."""

    setting: str  # as it was given: "--model package.module:function"
    function: Callable[..., Any]
    source: str  # the file of its module

    def failure(self, error: BaseException) -> UsageError:
        """Return the error to raise if the function raised `error`, with the line of its file."""
        return UsageError(f"{self.setting} failed: {_cause(error, self.source)}")

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
    setting = f"{flag} {name}"
    module_name, _, attribute = name.partition(":")
    if not module_name or not attribute or ":" in attribute:
        place, _, last = name.rpartition(".")
        hint = f", here {place}:{last}" if ":" not in name and place and last != "py" else ""
        raise UsageError(f"{setting}: write package.module:function{hint}")
    if module_name.endswith(".py"):
        proper = module_name.removesuffix(".py").replace("/", ".")
        raise UsageError(f"{setting}: write the module, not the file: {proper}:{attribute}")
    folder = str(Path.cwd())
    if sys.path[0] not in (folder, ""):
        sys.path.insert(0, folder)
    try:
        module = importlib.import_module(module_name)
    except (Exception, SystemExit) as error:
        message = f"{setting}: importing {module_name} failed: {_cause(error)}"
        absent = error.name if isinstance(error, ModuleNotFoundError) else None
        if absent and f"{module_name}.".startswith(f"{absent}."):
            message = f"{setting}: no module {absent}, installed or in {folder}"
        raise UsageError(message) from error
    function = getattr(module, attribute, None)
    if not callable(function):
        if hasattr(module, attribute):
            raise UsageError(f"{setting}: {attribute} is a {type(function).__name__}, no function")
        hint = did_you_mean(attribute, dir(module))
        raise UsageError(f"{setting}: {module_name} has no {attribute}{hint}")
    return Imported(setting, function, getattr(module, "__file__", None) or "")


def require_trust(settings: Mapping[str, Any], file: str | Path, trust_code: bool) -> None:
    """Raise UsageError if settings from a file name functions of one's own, without --trust-code.

    It is called wherever a file names functions: a file of --config, of a sweep, of a run or of a
    network. A function named on the command line is trusted.
    """
    named = {name: str(settings.get(name) or "") for name in SETTINGS}
    if named["model"].startswith("timm:"):
        del named["model"]
    own = dict.fromkeys(name for name in named.values() if ":" in name)
    if own and not trust_code:
        raise UsageError(
            f"{file} names {listed(own)}: a function that a file names is imported only with"
            " --trust-code (in Python, trust_code=True)"
        )


def one_line(error: BaseException) -> str:
    """Return the class and the text of an error in one line."""
    return " ".join(f"{type(error).__name__}: {error}".split())


def _cause(error: BaseException, source: str = "") -> str:
    frames = traceback.extract_tb(error.__traceback__)
    own = [frame for frame in frames if frame.filename == source]
    package = str(Path(__file__).parents[1])  # the caller of a function is not its error's place
    others = [f for f in frames if not f.filename.startswith(package)]
    own = own or [f for f in others if "importlib" not in f.filename]
    place = f" ({Path(own[-1].filename).name}, line {own[-1].lineno})" if own else ""
    return one_line(error) + place
