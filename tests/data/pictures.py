"""Packs of image files for tests that run in a launch of several processes."""

from __future__ import annotations

from pathlib import Path

from hpctrain.config import PackConfig, check_settings
from hpctrain.data.pack import make_pack
from hpctrain.data.packed import Pack, read_pack
from tests.support.pictures import class_folders, encode, picture

__all__ = ["class_folders", "encode", "pack", "picture"]


def pack(source: object, output: Path, **settings) -> Pack:
    """Make a pack as the command does and open it; one process unless `jobs` says otherwise."""
    config = PackConfig(source=str(source), output=str(output), **{"jobs": 1, **settings})
    check_settings(config)
    return read_pack(make_pack(config))
