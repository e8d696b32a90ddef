"""Import installed libraries only: no file of the current folder may take a library's place.

``python -m`` puts the current folder first on ``sys.path``. A part of a library may be named by a
file (a recipe, the file of a network) that others have written, and a ``kornia.py`` may lie beside
it: importing that would be running their code. So a library, and what it imports, is looked for in
the folders of installed packages and of Python itself alone.
"""

from __future__ import annotations

import importlib
import importlib.util
import site
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.machinery import PathFinder
from pathlib import Path
from types import ModuleType

from hpctrain.errors import UsageError, brief_error

NAMES_OF_FOLDERS = ("site-packages", "dist-packages")


def import_installed(name: str, flag: str, extra: str) -> ModuleType:
    """Import a module of an installed library, for the setting `flag`.

    Raises UsageError if it is not installed (`extra` installs it), if a file outside the folders of
    installed packages has its name, or if the import fails, as one for another torch does.
    """
    package = name.partition(".")[0]
    check_installed(package, flag, extra)
    before = {*sys.modules}
    try:
        with installed_only():
            module = importlib.import_module(name)
    except (Exception, SystemExit) as error:
        text = f"{flag}: {package} cannot be imported: {brief_error(error)}"
        raise UsageError(text) from error
    imported = {other.partition(".")[0] for other in {*sys.modules} - before}
    for other in sorted(imported):
        _check_not_shadowed(other, flag, package)
    return module


def check_installed(package: str, flag: str, extra: str) -> None:
    """Raise UsageError unless a package is installed; it is not imported."""
    if package == "torch":  # hpctrain has imported it
        return
    spec = importlib.util.find_spec(package)
    if spec is None or spec.origin is None:  # None: a folder without a module
        raise UsageError(f"{flag} needs {package}: pip install 'hpctrain[{extra}]'")
    if not is_installed(spec.origin):
        raise UsageError(
            f"{flag}: {spec.origin} is not the installed {package} (pip install"
            f" 'hpctrain[{extra}]'): move it away"
        )


def is_installed(file: str) -> bool:
    """Whether a file lies in a folder of installed packages, or of Python itself."""
    parents = {str(parent) for parent in Path(file).parents}
    return any(_is_of_installed(entry) for entry in parents.intersection(sys.path))


@contextmanager
def installed_only() -> Iterator[None]:
    """Let modules be found in the folders of installed packages and of Python alone, in the block.

    The import system is that of the process: no other thread may import in the block.
    """
    before = sys.path[:]
    sys.path[:] = [entry for entry in before if _is_of_installed(entry)]
    try:
        yield
    finally:
        added = [entry for entry in sys.path if entry not in before]
        sys.path[:] = before + added


def _is_of_installed(entry: str) -> bool:
    """Whether an entry of ``sys.path`` is a folder of installed packages, or of Python itself."""
    import sysconfig  # only if a part is named

    path = Path(entry)
    library = Path(sysconfig.get_path("stdlib"))
    if path.name in NAMES_OF_FOLDERS and path.is_absolute():
        return path != Path.cwd() or entry in site.getsitepackages()
    is_zip = path.suffix == ".zip" and path.parent == library.parent
    return is_zip or path.is_relative_to(library)


def _check_not_shadowed(name: str, flag: str, package: str) -> None:
    """Raise UsageError if a file of another folder would be imported in place of a module."""
    if name in sys.builtin_module_names:
        return
    for entry in sys.path:
        if _is_of_installed(entry):
            continue
        spec = PathFinder.find_spec(name, [entry or str(Path.cwd())])
        if spec is not None and spec.origin is not None:
            raise UsageError(
                f"{flag}: {spec.origin} has the name of a module that {package} imports: move it"
                " away"
            )
