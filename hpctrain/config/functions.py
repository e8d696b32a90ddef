"""Functions of the user's own, named by a setting as ``package.module:function``.

They are imported with the current folder importable, as under ``python -m``. A function that a file
names is imported only with --trust-code: others may have written the file.

An error in code of the user's own is one line with file and line. Its traceback is written to a
file in the folder of the run, once there is one.
"""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import os
import re
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from hpctrain.config.parts import find_part, is_part, refuse_other_library, version_of
from hpctrain.errors import MOST_SHOWN, OwnCodeError, UsageError, did_you_mean, one_line
from hpctrain.text import brief, listed

#: Settings that may name functions, or parts of other libraries.
FUNCTION_SETTINGS = ("model", "loss", "augment", "metric", "optimizer")
PACKAGE = str(Path(__file__).parents[1])
NOT_NAMED = re.compile(f"{re.escape(PACKAGE)}|.*importlib")  # files
LIBRARIES = re.compile(r"/(site|dist)-packages/|/lib/python3\.\d+/")
_places: set[str] = set()  # folders, or files, of the modules that were imported for the user
_traceback_file: Path | None = None


class Imported(NamedTuple):
    """A function of the user's own."""

    setting: str  # as it was given: "--model package.module:function"
    function: Callable[..., Any]
    source: str  # the file of its module

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the function. Raises OwnCodeError, with the line of its file, if it fails."""
        return call_guarded(self.setting, self.function, *args, **kwargs)

    def check_arguments(self, form: str, *args: Any, **kwargs: Any) -> None:
        """Raise UsageError unless the function can be called with these arguments, as in `form`."""
        try:
            inspect.signature(self.function).bind(*args, **kwargs)
        except ValueError:  # some functions in C do not tell their arguments
            return
        except TypeError as error:
            raise UsageError(f"{self.setting}: must be callable as {form}: {error}") from error


def call_guarded(setting: str, function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
    """Call a function of the user's own or of a library. Raises OwnCodeError if it fails."""
    try:
        return function(*args, **kwargs)
    except (UsageError, MemoryError):
        raise
    except (Exception, SystemExit) as error:
        if type(error).__name__ == "OutOfMemoryError":  # of a GPU: may be no fault of it
            raise
        raise own_code_error(f"{setting} failed", error) from error


def import_function(name: str, flag: str) -> Imported:
    """Import the function "package.module:function" that the setting `flag` names.

    Raises UsageError if there is none, or if importing its module fails.
    """
    setting = f"{flag} {name}"
    folder = str(Path.cwd())
    proper = name.replace("/", ".").replace(".py:", ":")
    if proper.count(":") != 1 or proper != name:
        hint = f", here {proper}" if proper != name else ""
        raise UsageError(f"{setting}: write package.module:function{hint}")
    module_name, attribute = name.split(":")
    if sys.path[0] not in (folder, ""):
        sys.path.insert(0, folder)
    try:
        _note_place(module_name)
        module = importlib.import_module(module_name)
    except (Exception, SystemExit) as error:
        text = f"{setting}: importing {module_name} in {folder} failed"
        raise own_code_error(text, error) from error
    function = getattr(module, attribute, None)
    if not callable(function):
        hint = did_you_mean(attribute, dir(module))
        raise UsageError(f"{setting}: {module_name} has no function {attribute}{hint}")
    return Imported(setting, function, getattr(module, "__file__", None) or "")


def texts_of(value: object) -> tuple[str, ...]:
    """Return the texts of a setting that has one, several or none."""
    if isinstance(value, list | tuple):
        return tuple(map(str, value))
    return () if value is None else (str(value),)


def is_own(setting: str, text: str) -> bool:
    """Whether a text of a setting, by its name, is a function of one's own."""
    return setting in FUNCTION_SETTINGS and ":" in text and not is_part(setting, text)


def named_code(settings: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield the settings that may name functions or parts, with each of their texts."""
    for name in FUNCTION_SETTINGS:
        for text in texts_of(settings.get(name)):
            yield name, text


def own_functions(settings: Mapping[str, Any]) -> list[str]:
    """Return the functions of one's own that settings name, each once."""
    return [*dict.fromkeys(text for name, text in named_code(settings) if is_own(name, text))]


def check_parts(settings: Mapping[str, Any]) -> None:
    """Raise UsageError if settings name a part of another library that is none, or refused.

    Nothing is imported.
    """
    for name, text in named_code(settings):
        if is_part(name, text):
            find_part(name, text)
        else:
            refuse_other_library(name, text)


def require_trust(settings: Mapping[str, Any], file: str | Path, trust_code: bool) -> None:
    """Raise UsageError if settings from a file name functions of one's own, without --trust-code.

    It is called wherever a file names functions: a file of --config, of a sweep, of a run or of a
    network. A function named on the command line is trusted. A run is resumed by the command that
    names its functions, as it began (training/resume.py: keep_settings). Parts of other libraries
    need no trust: parts.toml lists them.
    """
    named = own_functions(settings)
    if named and not trust_code:
        raise UsageError(
            f"{file} names {listed(named)}: a function that a file names is imported only with"
            " --trust-code (in Python, trust_code=True)"
        )


def own_code_error(
    text: str, error: BaseException, place: str = "", hint: str = ""
) -> OwnCodeError:
    """Return an error of one line for one in code of the user's own: `text`, the error, `hint`.

    It names the last line of that code, and another `place`. The traceback is written to the file
    of `tracebacks_in`.
    """
    frames = traceback.extract_tb(error.__traceback__)
    named = [frame for frame in frames if is_own_file(frame.filename)]
    if not named and not place:  # a library's line is better than none
        named = [frame for frame in frames if not NOT_NAMED.match(frame.filename)]
    places = [file_and_line(frame.filename, frame.lineno) for frame in named[-1:]]
    where = ", ".join(filter(None, [*places, place]))
    reason = brief(one_line(error).partition(" Hint: ")[0], MOST_SHOWN)  # at torch's own settings
    line = f"{text}: {reason}{where and f' ({where})'}{hint}"
    if _traceback_file:
        try:
            content = "".join(traceback.format_exception(error))
            _traceback_file.write_text(content, encoding="utf-8", errors="replace")
            line += f"; its traceback is in {_traceback_file}"
        except OSError:  # a full disk: the line remains
            pass
    return OwnCodeError(line)


@contextmanager
def tracebacks_in(file: Path) -> Iterator[None]:
    """Write the traceback of an error in code of the user's own to `file` in the block."""
    global _traceback_file
    before = _traceback_file
    _traceback_file = file
    try:
        yield
    finally:
        _traceback_file = before


def file_and_line(file: str, line: int | None) -> str:
    """Return the name of a file, in the current folder without it, and a line."""
    path = Path(file)
    shown = path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path
    return f"{shown}, line {line}"


def is_own_file(file: str) -> bool:
    """Whether a source file is one of, or beside, a module that was imported for the user."""
    for place in _places:
        inner = file.removeprefix(place)
        if inner != file and inner[:1] in ("", "/") and not file.startswith(PACKAGE + "/"):
            return not LIBRARIES.search(inner)
    return False


def source_files(settings: Mapping[str, Any]) -> dict[str, object]:
    """Return what code the settings name, after it was imported: what all ranks must have alike.

    It is the SHA-256 of the file of each function's module, and the version of each library of
    which a part is named.
    """
    code: dict[str, object] = {**library_versions(settings)}
    for name, text in named_code(settings):
        if is_own(name, text):
            code[f"the file of --{name} {text}"] = f"SHA-256 {_digest_of_module(text)}..."
    return code


def library_versions(settings: Mapping[str, Any]) -> dict[str, str]:
    """Return the version of each library of which settings name a part, after it was imported."""
    versions = {}
    for name, text in named_code(settings):
        if is_part(name, text):
            package = find_part(name, text).package
            versions[package] = version_of(package)
    return versions


def _digest_of_module(text: str) -> str:
    """Return the beginning of the SHA-256 of the file of a function's module."""
    import hashlib  # not for --help

    file = getattr(sys.modules.get(text.partition(":")[0]), "__file__", None)
    content = b""
    if file and os.path.isfile(file):  # it may have been removed since
        content = Path(file).read_bytes()
    return hashlib.sha256(content).hexdigest()[:12]


def _note_place(module_name: str) -> None:
    """Note where the code of a module lies: its package, or the folder of its file."""
    try:
        spec = importlib.util.find_spec(module_name.partition(".")[0])
    except (ImportError, ValueError):  # ValueError: __main__ of a program or a notebook
        return
    if spec is None:
        return
    _places.update(map(str, spec.submodule_search_locations or ()))
    if spec.origin and not spec.submodule_search_locations:
        folder = str(Path(spec.origin).parent)
        _places.add(spec.origin if LIBRARIES.search(f"{folder}/") else folder)
