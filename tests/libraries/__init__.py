"""A stand-in for timm, with the few functions that hpctrain calls."""

import importlib.util
import sys
from contextlib import contextmanager
from pathlib import Path

import pytest


@contextmanager
def timm_stand_in(monkeypatch):
    """It can be imported within the block, where timm is not installed."""
    if importlib.util.find_spec("timm"):
        pytest.skip("timm itself is installed")
    monkeypatch.syspath_prepend(str(Path(__file__).parent))
    yield
    for name in [n for n in sys.modules if n.partition(".")[0] == "timm"]:
        del sys.modules[name]
