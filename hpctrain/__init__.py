"""Train image networks data-parallel on HPC machines: one command, one Allreduce per step.

Importing hpctrain imports neither MPI nor torch and does not initialize CUDA. The building blocks
of a custom training loop are exported here and imported on first use (PEP 562). Everything else is
in ``hpctrain.data`` (image files -> pack -> batches), ``hpctrain.parallel`` (all communication
between ranks), ``hpctrain.models``, ``hpctrain.training`` and ``hpctrain.report``.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hpctrain.data.loader import Loader, make_prepare, read_samples
    from hpctrain.data.packed import read_pack
    from hpctrain.data.partition import cut_epoch
    from hpctrain.data.split import Split
    from hpctrain.models import build
    from hpctrain.parallel.batchnorm import BatchNorms
    from hpctrain.parallel.choose import choose_reduce
    from hpctrain.parallel.message import Message
    from hpctrain.parallel.mpi import start_mpi

__version__ = "0.1.0"

_HOME = {
    "Loader": "data.loader",
    "make_prepare": "data.loader",
    "read_samples": "data.loader",
    "Split": "data.split",
    "read_pack": "data.packed",
    "cut_epoch": "data.partition",
    "build": "models",
    "BatchNorms": "parallel.batchnorm",
    "Message": "parallel.message",
    "start_mpi": "parallel.mpi",
    "choose_reduce": "parallel.choose",
}
__all__ = list(_HOME)


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'hpctrain' has no attribute {name!r}")
    return getattr(import_module(f"hpctrain.{_HOME[name]}"), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
