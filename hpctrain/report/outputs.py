"""Files that subcommands write: which earlier file they may replace.

* Never one that the subcommand reads.
* A picture whose name follows from another one, as ``answers.png`` from ``answers.csv``, replaces
  only a picture that hpctrain has drawn.
* Others replace an earlier file, and the line that names them says so.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path

from hpctrain.errors import UsageError

SOFTWARE = "Software"  # keyword of PNG files, for the program that has made them
PROGRAM = "hpctrain"


def check_not_read(outputs: Iterable[Path], read: Iterable[str | os.PathLike[str]]) -> None:
    """Raise UsageError if a file would be replaced that is `read`, under whatever name."""
    existing = {_identity(path): path for path in outputs if path.is_file()}
    if not existing:
        return
    for path in read:
        output = existing.get(_identity(path))
        if output is not None:
            raise UsageError(f"{output} is read, and would be replaced: name another --output")


def _identity(path: str | os.PathLike[str]) -> tuple[int, int] | None:
    try:
        status = os.stat(path)
    except OSError:
        return None
    return status.st_dev, status.st_ino


def check_picture(path: Path) -> None:
    """Raise UsageError if there is a file of this name that is no picture of `write_image`."""
    if not path.exists():
        return
    from PIL import Image

    try:
        with Image.open(path) as image:
            is_drawn = image.info.get(SOFTWARE) == PROGRAM
    except (OSError, ValueError, SyntaxError):
        is_drawn = False
    if not is_drawn:
        raise UsageError(
            f"{path} exists, and hpctrain has not drawn it: move it, or name another --output"
        )


def output_name(path: Path) -> str:
    """Return the name of a file that is to be written, as a line names it."""
    return f"{path} (replaced)" if path.exists() else str(path)
