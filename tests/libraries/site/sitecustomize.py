"""Lets torchvision be imported beside a CPU build of torch; read by each Python of the tests.

The wheel of the package index is built for CUDA. Beside torch's CPU build its library of operators
cannot be loaded, and the import fails where it registers two of them; declared first, they are
found, and its Python part works. A torchvision that goes with its torch is imported as it is.
"""

import importlib.metadata
import sys
from importlib.abc import MetaPathFinder

DECLARED = "_declared_operators"  # in sys.modules, once they are
OPERATORS = ("nms", "qnms")
ARGUMENTS = "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor"


class DeclareOperators(MetaPathFinder):
    """Declares the operators before torchvision is imported; finds nothing itself."""

    def find_spec(self, fullname, path=None, target=None):
        if fullname == "torchvision":
            sys.meta_path.remove(self)
            self.declare()
        return None

    def declare(self):
        import torch

        is_built_for_cuda = "+" not in importlib.metadata.version("torchvision")
        if torch.version.cuda or not is_built_for_cuda or DECLARED in sys.modules:
            return
        self.library = torch.library.Library("torchvision", "DEF")
        for name in OPERATORS:
            self.library.define(name + ARGUMENTS)
        sys.modules[DECLARED] = self  # else they end with it


sys.meta_path.insert(0, DeclareOperators())
