"""Train image networks data-parallel on HPC machines: one command, one Allreduce per step.

In Python:

    import hpctrain as hp

    result = hp.train(data="photos.h5", model="resnet18", epochs=5, run="first")
    network = hp.load("first")
    answers = network.predict("new_photos/")

* `train`, `evaluate`: what the subcommands do, on all ranks of an MPI launch or on one
* `load`: a trained network, to predict with; `history`: the record of a run as tables
* `Config`: all settings of a run; `UsageError`, `RunError`: what is raised
* `write_pack`: arrays or HDF5 data sets as a pack
* `read_pack`, `Split`, `cut_epoch`, `Loader`, `make_prepare`, `read_samples`, `build`,
  `BatchNorms`, `Message`, `choose_reduce`, `start_mpi`: for a training loop of your own

docs/python.md describes all of them. Importing hpctrain imports neither MPI nor torch and does not
initialize CUDA: each name is imported on first use (PEP 562).
"""

from __future__ import annotations

from importlib import import_module

TYPE_CHECKING = False  # type checkers take it as true; importing typing takes 20 modules
if TYPE_CHECKING:
    from typing import Any

    from hpctrain.api import History, evaluate, history, train
    from hpctrain.config import Config
    from hpctrain.data.loader import Loader, ReadOptions, make_prepare, read_samples
    from hpctrain.data.orders import Order
    from hpctrain.data.pack import read_pack
    from hpctrain.data.partition import cut_epoch
    from hpctrain.data.split import Split
    from hpctrain.errors import RunError, UsageError
    from hpctrain.inference.evaluate import Evaluation
    from hpctrain.inference.trained import Predictions, TrainedNetwork, load
    from hpctrain.models import build
    from hpctrain.packing.write import write_pack
    from hpctrain.parallel.batchnorm import BatchNorms
    from hpctrain.parallel.choose import choose_reduce
    from hpctrain.parallel.message import Message
    from hpctrain.parallel.mpi import start_mpi
    from hpctrain.training.train import TrainingResult

__version__ = "0.1.0"

_HOME = {
    "train": "api",
    "evaluate": "api",
    "load": "inference.trained",
    "history": "api",
    "Config": "config",
    "UsageError": "errors",
    "RunError": "errors",
    "TrainingResult": "training.train",
    "Evaluation": "inference.evaluate",
    "TrainedNetwork": "inference.trained",
    "Predictions": "inference.trained",
    "History": "api",
    "write_pack": "packing.write",
    "Loader": "data.loader",
    "ReadOptions": "data.loader",
    "make_prepare": "data.loader",
    "read_samples": "data.loader",
    "Split": "data.split",
    "read_pack": "data.pack",
    "Order": "data.orders",
    "cut_epoch": "data.partition",
    "build": "models",
    "BatchNorms": "parallel.batchnorm",
    "Message": "parallel.message",
    "start_mpi": "parallel.mpi",
    "choose_reduce": "parallel.choose",
}
__all__ = [  # type checkers read it
    "BatchNorms",
    "Config",
    "Evaluation",
    "History",
    "Loader",
    "Message",
    "Order",
    "Predictions",
    "ReadOptions",
    "RunError",
    "Split",
    "TrainedNetwork",
    "TrainingResult",
    "UsageError",
    "build",
    "choose_reduce",
    "cut_epoch",
    "evaluate",
    "history",
    "load",
    "make_prepare",
    "read_pack",
    "read_samples",
    "start_mpi",
    "train",
    "write_pack",
]


if not TYPE_CHECKING:  # to which every name would then be known

    def __getattr__(name: str) -> Any:
        if name not in _HOME:
            raise AttributeError(f"module 'hpctrain' has no attribute {name!r}")
        return getattr(import_module(f"hpctrain.{_HOME[name]}"), name)


def __dir__() -> list[str]:
    return sorted({*__all__, *(name for name in globals() if name.startswith("__"))})
