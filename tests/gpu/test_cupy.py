"""What is asked of CuPy exists in the real one, with these arguments in this order.

Needs a CuPy; no GPU.
"""

from __future__ import annotations

import inspect

import pytest

cupy = pytest.importorskip("cupy", reason="needs CuPy")


def parameters(function):
    return [*inspect.signature(function).parameters]


def test_arrays_allocators_devices_and_versions():
    assert parameters(cupy.empty)[:2] == ["shape", "dtype"]
    assert parameters(cupy.cuda.using_allocator) == ["allocator"]
    assert cupy.cuda.Device.__doc__.startswith("Device(device=None)")
    assert hasattr(cupy.cuda.Device, "__enter__")
    assert hasattr(cupy.ndarray, "__cuda_array_interface__")
    assert cupy.cuda.runtime.is_hip in (True, False)
    assert cupy.cuda.runtime.runtimeGetVersion() > 10_000
