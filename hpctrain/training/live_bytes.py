"""The memory that a computation takes on the CPU, as the number of bytes of its live tensors."""

from __future__ import annotations

import weakref
from typing import Any

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode  # named in torch's notes on extending
from torch.utils._pytree import tree_leaves


class LiveBytes(TorchDispatchMode):
    """Counts the bytes of the tensors that torch makes in its context, and their peak.

    Memory that kernels take for themselves is not seen.
    """

    def __init__(self) -> None:
        super().__init__()
        self.now = self.peak = 0
        self._known: set[int] = set()

    def __torch_dispatch__(
        self, operation: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """Call the operation, and note the memory of its inputs and of its results."""
        kwargs = kwargs or {}
        for tensor in tree_leaves((args, kwargs)):
            self._note(tensor, made=False)  # it was there before
        found = operation(*args, **kwargs)
        for tensor in tree_leaves(found):
            self._note(tensor, made=True)
        return found

    def _note(self, tensor: Any, made: bool) -> None:
        if not isinstance(tensor, Tensor) or tensor.is_sparse:
            return
        storage = tensor.untyped_storage()
        key, size = storage._cdata, storage.nbytes() if made else 0
        if key not in self._known:
            self._known.add(key)
            self.now += size
            self.peak = max(self.peak, self.now)
            weakref.finalize(storage, self._forget, key, size)

    def _forget(self, key: int, size: int) -> None:
        self._known.discard(key)
        self.now -= size
