"""What hpctrain asks of CuPy, on the emulated GPU: CuPy's own runtime is linked into it."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from cupy import cuda

__all__ = ["cuda", "ndarray"]
__version__ = "13.0.0"


class ndarray:
    """A vector in device memory, shared by DLPack."""

    def __init__(self, shape: Any, dtype: Any, memptr: cuda.MemoryPointer) -> None:
        self.shape = (shape,) if isinstance(shape, int) else tuple(shape)
        self.dtype, self.data = np.dtype(dtype), memptr

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        place = self.data.ptr, False
        return {"shape": self.shape, "typestr": self.dtype.str, "data": place, "version": 3}

    def __len__(self) -> int:
        return self.shape[0]

    def _tensor(self) -> torch.Tensor:
        return torch.as_tensor(self, device=torch.device("cuda", self.data.device_id))

    def __dlpack__(self, **options: Any) -> Any:
        return self._tensor().__dlpack__(**options)

    def __dlpack_device__(self) -> tuple[int, int]:
        return self._tensor().__dlpack_device__()
