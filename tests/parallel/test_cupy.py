"""What is asked of CuPy and its NCCL exists in the real ones, with these arguments in this order.

Needs cupy-cuda12x (or 13x) and the NCCL that it finds; no GPU.
"""

from __future__ import annotations

import re

import pytest

from tests.parallel.fake_nccl import FakeNccl

cupy = pytest.importorskip("cupy", reason="needs CuPy")


def parameters(text):
    """The names in the signature that Cython wrote into a docstring: "f(self, int a, b=1)"."""
    inner = re.match(r"[\w.]+\((.*?)\)", text.strip(), re.DOTALL)[1]
    found = [part.split("=")[0].split()[-1] for part in inner.split(",")]
    return [name for name in found if name != "self"]


@pytest.fixture
def nccl():
    from cupy.cuda import nccl

    if not getattr(nccl, "available", False):
        pytest.skip("needs the NCCL that CuPy finds")
    return nccl


def test_memory_and_arrays():
    assert parameters(cupy.cuda.Memory.__doc__) == ["size"]
    assert parameters(cupy.cuda.MemoryPointer.__doc__) == ["mem", "offset"]
    assert parameters(cupy.ndarray.__doc__)[:3] == ["shape", "dtype", "memptr"]
    assert 12 <= cupy.cuda.runtime.runtimeGetVersion() // 1000 <= 13


@pytest.mark.parametrize(
    ("name", "asked"),
    [
        ("allReduce", ["sendbuf", "recvbuf", "count", "datatype", "op", "stream"]),
        ("send", ["sendbuf", "count", "datatype", "peer", "stream"]),
        ("recv", ["recvbuf", "count", "datatype", "peer", "stream"]),
        ("check_async_error", []),
        ("abort", []),
    ],
)
def test_calls_of_a_communicator(nccl, name, asked):
    assert parameters(getattr(nccl.NcclCommunicator, name).__doc__) == asked
    fake = getattr(FakeNccl, name).__code__
    assert fake.co_argcount == 1 + len(asked)


def test_calls_of_nccl(nccl):
    assert parameters(nccl.NcclCommunicator.__doc__)[:3] == ["ndev", "commId", "rank"]
    for name in ("NCCL_UINT8", "NCCL_FLOAT32", "NCCL_FLOAT64", "NCCL_SUM"):
        assert getattr(nccl, name) == getattr(FakeNccl, name)
    assert isinstance(nccl.get_unique_id(), (bytes, tuple))
    assert nccl.get_version() > 20000
    assert callable(nccl.groupStart) and callable(nccl.groupEnd)
