"""Functions of the user's own, named by a setting as ``package.module:function``.

They are imported with the current folder importable, as under ``python -m``. A function that a file
names is imported only with --trust-code: others may have written the file.
"""

from __future__ import annotations

import difflib
import importlib
import inspect
import os
import sys
import traceback
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from hpctrain.errors import UsageError
from hpctrain.text import listed

T = TypeVar("T")
SETTINGS = ("model", "loss", "augment", "metric")  # that may name a function


class Imported(NamedTuple):
    """A function of the user's own."""

    setting: str  # as it was given: "--model package.module:function"
    function: Callable[..., Any]
    source: str  # the file of its module

    def call(self, work: Callable[[], T]) -> T:
        """Return `work()`, which calls the function.

        Raises UsageError if it fails, with the line of the function's file that raised the error.
        """
        try:
            return work()
        except UsageError:
            raise
        except (Exception, SystemExit) as error:
            raise self.failure(error) from error

    def failure(self, error: BaseException) -> UsageError:
        """Return the error to raise if the function raised `error`."""
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
        absent = error.name if isinstance(error, ModuleNotFoundError) else None
        if absent and f"{module_name}.".startswith(f"{absent}."):
            message = f"{setting}: no module {absent}, installed or in {folder}"
        else:
            message = f"{setting}: importing {module_name} failed: {_cause(error)}"
        raise UsageError(message) from error
    source = getattr(module, "__file__", None) or ""
    if not hasattr(module, attribute):
        near = difflib.get_close_matches(attribute, dir(module), n=1)
        hint = f"; did you mean {module_name}:{near[0]}?" if near else ""
        raise UsageError(f"{setting}: {module_name} has no {attribute}{hint}")
    function = getattr(module, attribute)
    if not callable(function):
        kind = type(function).__name__
        raise UsageError(f"{setting}: {attribute} is a {kind}, not a function")
    return Imported(setting, function, source)


def as_setting(value: Any) -> Any:
    """Return a value of a program as the command line takes it.

    A list is "0.2,1", a path a text, and a function or class "package.module:function".
    """
    if hasattr(value, "tolist"):  # of NumPy
        value = value.tolist()
    if isinstance(value, list | tuple):
        return ",".join(map(str, value))
    if inspect.isroutine(value) or inspect.isclass(value):
        return f"{value.__module__}:{value.__qualname__}"
    return os.fspath(value) if isinstance(value, os.PathLike) else value


def own_functions(settings: Mapping[str, Any]) -> dict[str, str]:
    """Return those of `settings`, by name, that name a function of the user's own."""
    named = {name: settings.get(name) or "" for name in SETTINGS}
    if is_of_timm(named["model"]):
        del named["model"]
    return {name: value for name, value in named.items() if ":" in value}


def is_of_timm(model: str) -> bool:
    """Whether a network is one of timm, timm:NAME, and not a function of the user's own."""
    return model.startswith("timm:")


def require_trust(named: Iterable[str], file: str | Path, trust_code: bool) -> None:
    """Raise UsageError if a file names functions, module:function, without --trust-code."""
    if not trust_code and (own := dict.fromkeys(named)):
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
