"""The state of a network besides its parameters: buffers, and attributes of its modules.

The attributes are those that are numbers, text, tensors, arrays, or lists, tuples, sets and
dictionaries of these. Other objects, globals and class attributes are not seen: they are detected
only by their effect on the output (training/replay.py).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

OF_TORCH = frozenset(vars(nn.Module()))  # attributes that every module has
DEEPEST = 5  # levels of nested containers that are inspected


class ModelState:
    """A copy of the state that can be restored: the same objects, with their former contents."""

    def __init__(self, model: nn.Module) -> None:
        """Lazy modules without shapes are skipped: they may keep the shapes that they get."""
        self._kept = [
            (home, held := _own(home), {name: _copy(value) for name, value in held.items()})
            for module in model.modules()
            if not any(map(is_lazy, (*module.parameters(False), *module.buffers(False))))
            for home in (module._buffers, vars(module))
        ]

    @torch.no_grad()
    def restore(self) -> None:
        """Restore the state, and remove what was added since."""
        for home, held, copies in self._kept:
            for name, value in held.items():
                _fill(value, copies[name])
            for name in _own(home).keys() - held.keys():
                del home[name]
            home.update(held)


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Set all modules to evaluation mode in the block, and each back to its own mode after it.

    A network's own `train` is called for both; it may do more than set the mode.
    """
    modes = {module: module.training for module in model.modules()}
    model.eval()
    try:
        yield
    finally:
        model.train(modes[model])
        for module, training in modes.items():
            module.training = training


def buffer_owner(model: nn.Module, name: str) -> nn.Module | None:
    """Return the module that has the buffer `name`, which may still be None; None if none has."""
    owner, _, own = name.rpartition(".")
    module = dict(model.named_modules()).get(owner)
    return None if module is None or own not in module._buffers else module


def replace_buffer(model: nn.Module, name: str, value: Tensor) -> bool:
    """Set a buffer that forward creates, or replaces by one of another shape, to `value`.

    Returns whether the model has a buffer of this name.
    """
    if (module := buffer_owner(model, name)) is not None:
        setattr(module, name.rpartition(".")[2], value.to(next(model.parameters()).device))
    return module is not None


def held_values(model: nn.Module) -> Iterator[tuple[str, Any]]:
    """Yield the state by name, such as "buffer norm.scale" or "attribute memory[0]".

    The values are tensors, and others that can be compared by their `repr`.
    """
    for prefix, module in model.named_modules():
        before = f"{prefix}." if prefix else ""
        for name, buffer in module._buffers.items():
            yield f"buffer {before}{name}", buffer
        for name, value in _own(vars(module)).items():
            yield from _leaves(f"attribute {before}{name}", value, DEEPEST)


def _own(home: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in home.items() if name not in OF_TORCH}


def _leaves(name: str, value: Any, deep: int) -> Iterator[tuple[str, Any]]:
    if isinstance(value, nn.Parameter):
        return
    if isinstance(value, Tensor | int | float | complex | str | bytes | np.generic | None):
        yield name, value
    elif isinstance(value, set | frozenset):
        yield name, sorted(map(repr, value))
    elif isinstance(value, np.ndarray):
        yield name, (value.shape, value.dtype, value.tobytes())
    elif isinstance(value, list | tuple | deque | dict) and deep:
        yield name, len(value)
        for key, item in value.items() if isinstance(value, dict) else enumerate(value):
            yield from _leaves(f"{name}[{key!r}]", item, deep - 1)


def _copy(value: Any, deep: int = DEEPEST) -> Any:
    """Return what `_fill` needs to restore a value; None if its contents cannot change."""
    if isinstance(value, Tensor):
        expanded = value.layout == torch.strided and value.numel() and 0 in value.stride()
        fixed = isinstance(value, nn.Parameter) or is_lazy(value) or expanded  # cannot be written
        return None if fixed else value.detach().clone()
    if isinstance(value, np.ndarray | set):
        return value.copy()
    if isinstance(value, list | tuple | deque) and deep:
        return [(item, _copy(item, deep - 1)) for item in value]
    if isinstance(value, dict) and deep:
        return {key: (item, _copy(item, deep - 1)) for key, item in value.items()}
    return None


def _fill(value: Any, copy: Any) -> None:
    """Restore the contents that a value had when it was copied."""
    if copy is None:
        return
    if isinstance(value, Tensor):
        if value.shape == copy.shape:
            value.detach().copy_(copy)
    elif isinstance(value, np.ndarray):
        value[...] = copy
    elif isinstance(value, set):
        value.clear()
        value.update(copy)
    else:
        for item, inner in copy.values() if isinstance(copy, dict) else copy:
            _fill(item, inner)
        if isinstance(value, dict):
            value.clear()
            value.update({key: item for key, (item, _) in copy.items()})
        elif isinstance(value, list | deque):
            value.clear()
            value.extend(item for item, _ in copy)
