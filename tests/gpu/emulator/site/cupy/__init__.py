"""What hpctrain asks of CuPy, on the emulated GPU: CuPy's own runtime is linked into it.

HPCTRAIN_EMULATED_CUPY=no: as if it were not installed.
"""

from __future__ import annotations

import os

if os.environ.get("HPCTRAIN_EMULATED_CUPY") == "no":
    raise ImportError("No module named 'cupy'", name="cupy")

from cupy import cuda

__all__ = ["cuda"]
__version__ = "13.0.0"
