"""What is asked of CuPy exists in the real one, with these arguments in this order.

Needs a CuPy; no GPU.
"""

from __future__ import annotations

import re

import pytest

cupy = pytest.importorskip("cupy", reason="needs CuPy")


def parameters(text):
    """The names in the signature that Cython wrote into a docstring: "f(self, int a, b=1)"."""
    inner = re.match(r"[\w.]+\((.*?)\)", text.strip(), re.DOTALL)[1]
    found = [part.split("=")[0].split()[-1] for part in inner.split(",")]
    return [name for name in found if name != "self"]


def test_memory_devices_and_versions():
    assert parameters(cupy.cuda.Memory.__doc__) == ["size"]
    assert hasattr(cupy.cuda.Memory, "ptr")
    assert parameters(cupy.cuda.Device.__doc__) == ["device"]
    assert hasattr(cupy.cuda.Device, "__enter__")
    assert cupy.cuda.runtime.is_hip in (True, False)
    assert cupy.cuda.runtime.runtimeGetVersion() > 10_000
