"""What hpctrain asks of CuPy, on the emulated GPU: CuPy's own runtime is linked into it.

HPCTRAIN_EMULATED_CUPY=no: as if it were not installed.
"""

from __future__ import annotations

import os

if os.environ.get("HPCTRAIN_EMULATED_CUPY") == "no":
    raise ImportError("No module named 'cupy'", name="cupy")

from typing import Any

import numpy as np

from cupy import cuda


class ndarray:
    """An array in memory of the current device, freed with it."""

    def __init__(self, length: int, dtype: Any) -> None:
        kind = np.dtype(dtype)
        self.data = cuda.Memory(length * kind.itemsize)
        self.__cuda_array_interface__ = {
            "shape": (length,),
            "typestr": kind.str,
            "data": (self.data.ptr, False),
            "version": 2,
        }


empty = ndarray
__all__ = ["cuda", "empty", "ndarray"]
__version__ = "13.0.0"
