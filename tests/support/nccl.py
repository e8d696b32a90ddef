"""Builds the stand-in for NCCL, tests/gpu/emulator/nccl.c, for tests on host memory."""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import tempfile
from pathlib import Path

import pytest

from tests.support.launch import ROOT

SOURCE = ROOT / "tests" / "gpu" / "emulator" / "nccl.c"


def stand_in() -> str:
    """The library's path in build/, for all processes that test this source."""
    digest = hashlib.sha256(SOURCE.read_bytes()).hexdigest()[:16]
    folder = ROOT / "build" / "nccl" / digest
    if not (folder / "libnccl.so.2").exists():
        folder.parent.mkdir(parents=True, exist_ok=True)
        made = Path(tempfile.mkdtemp(dir=folder.parent))
        build(made)
        try:
            os.rename(made, folder)
        except OSError:  # another process was faster
            shutil.rmtree(made)
    return str(folder / "libnccl.so.2")


def build(folder: Path, name: str = "libnccl.so.2") -> str:
    """The library's path. Skips the test where there is no gcc."""
    gcc = shutil.which("gcc")
    if gcc is None:
        pytest.skip("needs gcc")
    path, flags = folder / name, ["-O1", "-Wall", "-Wextra", "-Werror", "-shared", "-fPIC"]
    flags += ["-pthread", f"-Wl,-soname,{name}"]
    subprocess.run([gcc, *flags, "-o", path, SOURCE, "-ldl", "-lrt"], check=True)
    return str(path)
