"""Builds the stand-in for NCCL, tests/gpu/emulator/nccl.c, for tests on host memory."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from tests.support.launch import ROOT

SOURCE = ROOT / "tests" / "gpu" / "emulator" / "nccl.c"


def build(folder: Path, name: str = "libnccl.so.2") -> str:
    """The library's path. Skips the test where there is no gcc."""
    gcc = shutil.which("gcc")
    if gcc is None:
        pytest.skip("needs gcc")
    path = folder / name
    flags = [
        "-O1",
        "-Wall",
        "-Wextra",
        "-Werror",
        "-shared",
        "-fPIC",
        "-pthread",
        f"-Wl,-soname,{name}",
    ]
    subprocess.run([gcc, *flags, "-o", path, SOURCE, "-ldl", "-lrt"], check=True)
    return str(path)
