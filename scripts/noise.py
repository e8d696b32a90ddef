"""Packs of noise, for scripts that need any data."""

from __future__ import annotations

from pathlib import Path

import numpy as np

import hpctrain as hp


def write_noise(
    path: Path, rows: dict[str, int], shape: tuple[int, int, int], classes: int = 3
) -> None:
    """Write a pack of noise: `rows` images of shape (H, W, C) in each split, labels in turn."""
    draw = np.random.default_rng(0)
    splits = {
        name: (draw.integers(256, size=(n, *shape), dtype=np.uint8), np.arange(n) % classes)
        for name, n in rows.items()
    }
    names = [f"class{number}" for number in range(classes)]
    hp.write_pack(path, splits, names, {"source": "scripts/noise.py"}, overwrite=True)
