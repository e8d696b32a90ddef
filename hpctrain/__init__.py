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
* `read_pack`, `Split`, `cut_epoch`, `Pipeline`, `Loader`, `read_samples`, `build`, `BatchNorms`,
  `Message`, `choose_reduce`, `start_mpi`: for a training loop of your own

docs/python.md describes all of them. Importing hpctrain imports neither MPI nor torch and does not
initialize CUDA: each name is imported on first use (PEP 562).
"""

from __future__ import annotations

from importlib import import_module

_NAMES = {  # of the public API, by module
    "api": ("evaluate", "history", "train"),
    "config": ("Config",),
    "data.loader": ("Loader", "ReadOptions", "read_samples"),
    "data.orders": ("Order",),
    "data.pack": ("read_pack",),
    "data.partition": ("cut_epoch",),
    "data.pipeline": ("Pipeline",),
    "data.split": ("Split",),
    "errors": ("RunError", "UsageError"),
    "inference.evaluate": ("Evaluation",),
    "inference.trained": ("Predictions", "TrainedNetwork", "load"),
    "models": ("build",),
    "packing.arrays": ("write_pack",),
    "parallel.batchnorm": ("BatchNorms",),
    "parallel.message": ("Message",),
    "parallel.mpi": ("start_mpi",),
    "parallel.overlap": ("choose_reduce",),
    "report.history": ("History",),
    "training.session": ("TrainingResult",),
}
__version__ = "0.1.0"
__all__ = sorted(name for names in _NAMES.values() for name in names)

TYPE_CHECKING = False  # type checkers take it as true; importing typing takes 20 modules
if TYPE_CHECKING:  # "as" exports a name
    from hpctrain.api import evaluate as evaluate
    from hpctrain.api import history as history
    from hpctrain.api import train as train
    from hpctrain.config import Config as Config
    from hpctrain.data.loader import Loader as Loader
    from hpctrain.data.loader import ReadOptions as ReadOptions
    from hpctrain.data.loader import read_samples as read_samples
    from hpctrain.data.orders import Order as Order
    from hpctrain.data.pack import read_pack as read_pack
    from hpctrain.data.partition import cut_epoch as cut_epoch
    from hpctrain.data.pipeline import Pipeline as Pipeline
    from hpctrain.data.split import Split as Split
    from hpctrain.errors import RunError as RunError
    from hpctrain.errors import UsageError as UsageError
    from hpctrain.inference.evaluate import Evaluation as Evaluation
    from hpctrain.inference.trained import Predictions as Predictions
    from hpctrain.inference.trained import TrainedNetwork as TrainedNetwork
    from hpctrain.inference.trained import load as load
    from hpctrain.models import build as build
    from hpctrain.packing.arrays import write_pack as write_pack
    from hpctrain.parallel.batchnorm import BatchNorms as BatchNorms
    from hpctrain.parallel.message import Message as Message
    from hpctrain.parallel.mpi import start_mpi as start_mpi
    from hpctrain.parallel.overlap import choose_reduce as choose_reduce
    from hpctrain.report.history import History as History
    from hpctrain.training.session import TrainingResult as TrainingResult
else:  # to a type checker, every name would be known

    def __getattr__(name):
        for module, names in _NAMES.items():
            if name in names:
                return getattr(import_module(f"hpctrain.{module}"), name)
        raise AttributeError(f"module 'hpctrain' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*__all__, *(name for name in globals() if name.startswith("__"))})
