"""Programs of users, run on the long-lived ranks as `python PROGRAM` runs them."""

from __future__ import annotations

import contextlib
import io
import os
import runpy
import sys
import warnings
from pathlib import Path
from typing import Any

import pytest

from tests.support.ranks import on_ranks


def run_program(n: int, path: Path, **variables: str) -> list[str]:
    """Run a program in its folder on `n` ranks; what each of them printed. It must end well."""
    return on_ranks(n, _run, path=path, variables=variables)


def _run(comm: Any, path: Path, variables: dict[str, str]) -> str:
    os.chdir(path.parent)  # tests.support.ranks goes back, and forgets variables
    os.environ.update(variables)
    with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stdout(io.StringIO()) as out:
        patch.setattr(sys, "argv", [path.name])
        patch.syspath_prepend(path.parent)
        warnings.filterwarnings("ignore", "FigureCanvasAgg is non-interactive")
        try:
            runpy.run_path(str(path), run_name="__main__")
        except SystemExit as end:
            assert not end.code, end
    return out.getvalue()
