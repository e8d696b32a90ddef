"""A stand-in for timm, with the few functions that hpctrain calls, and small networks."""

import sys
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def timm_stand_in(monkeypatch):
    """It is imported within the block in place of timm."""
    monkeypatch.syspath_prepend(str(Path(__file__).parent))
    installed = take_modules()
    yield
    take_modules()
    sys.modules.update(installed)


def take_modules():
    """Remove the modules of timm from those that are imported, and return them."""
    names = [name for name in sys.modules if name.partition(".")[0] == "timm"]
    return {name: sys.modules.pop(name) for name in names}
