"""Shell scripts in place of programs that tests do not have: srun, scontrol, squeue, uv."""

from __future__ import annotations

import os
from pathlib import Path


def write_scripts(folder: Path, **scripts: str) -> str:
    """Write programs of these names into a folder; a PATH on which they come first."""
    folder.mkdir(exist_ok=True)
    for name, text in scripts.items():
        (folder / name).write_text(f"#!/bin/bash\n{text}\n")
        (folder / name).chmod(0o755)
    return f"{folder}{os.pathsep}{os.environ['PATH']}"
