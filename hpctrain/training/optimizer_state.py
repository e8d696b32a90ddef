"""All of an optimizer's `state_dict` as named tensors, and back, with the same bits.

    optimizer.parameter.NAME.KEY    a tensor or number of the state of a parameter
    optimizer.group.N.KEY           of a group of parameters, such as the count of its steps
    optimizer.other.KEY             of no parameter, in the state or beside it
    optimizer.structure             where they belong, and all other values, as JSON (uint8)

Numbers are tensors of int64, float64 or bool. Tuples, lists and dicts are kept as such. Kept are
also the strides of tensors: sums over a tensor in another memory format are rounded otherwise.

torch's `Optimizer.load_state_dict` casts tensors to the type of their parameter, and takes strides
as it finds them, in a file those of a contiguous tensor. What it has restored is therefore replaced
by the tensors themselves, and compared with them.
"""

from __future__ import annotations

import inspect
import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from hpctrain.errors import UsageError, one_line
from hpctrain.models import as_bytes
from hpctrain.models.weights import TYPES

PREFIX = "optimizer."
STRUCTURE = f"{PREFIX}structure"
NUMBERS = {bool: torch.bool, int: torch.int64, float: torch.float64}
PLAIN = (bool, int, float, str, type(None))
LARGEST = 2**63 - 1
DECORATED = ("add_param_group", "state_dict", "load_state_dict")
Names = Mapping[Tensor, str]  # by parameter


def collect_state(optimizer: Optimizer, names: Names) -> dict[str, Tensor]:
    """Return all state of an optimizer as tensors by name, without copying tensors.

    `names` are those of its parameters. Raises UsageError for state that is neither tensors,
    numbers, texts, types of tensors, None, nor tuples, lists or dicts of them.
    """
    with without_compiler():
        state = optimizer.state_dict()
    in_order = parameter_names(optimizer, names)
    tensors: dict[str, Tensor] = {}
    by_parameter = {}
    others = {}
    for key, value in state["state"].items():
        if type(key) is int and key < len(in_order):
            name = in_order[key]
            by_parameter[name] = pack(value, f"{PREFIX}parameter.{name}", tensors)
        else:
            others[key] = value
    groups = [
        pack(without_parameters(group), f"{PREFIX}group.{number}", tensors)
        for number, group in enumerate(state["param_groups"])
    ]
    beside = {key: value for key, value in state.items() if key not in ("state", "param_groups")}
    structure = {
        "parameters": by_parameter,
        "groups": groups,
        "others": pack(others, f"{PREFIX}other.state", tensors),
        "beside": pack(beside, f"{PREFIX}other", tensors),
    }
    text = json.dumps(structure, sort_keys=True).encode()
    tensors[STRUCTURE] = torch.frombuffer(bytearray(text), dtype=torch.uint8)
    return dict(sorted(tensors.items()))


def restore_state(optimizer: Optimizer, names: Names, tensors: Mapping[str, Tensor]) -> None:
    """Give an optimizer the state of which `collect_state` returned these tensors.

    State that it makes in its first step need not be there. Raises ValueError if it does not take
    the state, bit by bit.
    """
    if STRUCTURE not in tensors:
        raise ValueError(f"it lacks the tensor {STRUCTURE!r}")
    structure = json.loads(as_bytes(tensors[STRUCTURE]).numpy().tobytes())
    in_order = parameter_names(optimizer, names)
    unknown = [name for name in structure["parameters"] if name not in in_order]
    with without_compiler():
        groups = optimizer.state_dict()["param_groups"]
    if unknown or len(groups) != len(structure["groups"]):
        raise ValueError(f"its optimizer has other parameters, such as {unknown[:1]}")
    saved: dict[Any, Any] = unpack(structure["others"], tensors)
    for number, name in enumerate(in_order):
        if name in structure["parameters"]:
            saved[number] = unpack(structure["parameters"][name], tensors)
    numbered = [
        {**unpack(packed, tensors), "params": group["params"]}
        for packed, group in zip(structure["groups"], groups, strict=True)
    ]
    beside = unpack(structure["beside"], tensors)
    try:
        with without_compiler():
            optimizer.load_state_dict({"state": dict(saved), "param_groups": numbered, **beside})
            loaded = optimizer.state_dict()["state"]
    except Exception as error:  # code of a library or of the user's own may raise any
        raise ValueError(f"the optimizer does not take its state: {one_line(error)}") from error
    for number in saved.keys() & loaded.keys() & {*range(len(in_order))}:
        for key, value in saved[number].items():
            loaded[number][key] = placed(value, loaded[number].get(key))
    check_restored(collect_state(optimizer, names), tensors)


@contextmanager
def without_compiler() -> Iterator[None]:
    """Let optimizers be made, saved and restored without torch's decorators in the block.

    They import the compiler even if nothing is compiled. That takes longer than importing torch
    itself, and makes a folder for its files.
    """
    decorated = {name: vars(Optimizer)[name] for name in DECORATED}
    for name, method in decorated.items():
        setattr(Optimizer, name, inspect.unwrap(method))
    try:
        yield
    finally:
        for name, method in decorated.items():
            setattr(Optimizer, name, method)


def check_restored(restored: Mapping[str, Tensor], saved: Mapping[str, Tensor]) -> None:
    """Raise ValueError unless all tensors have the same bits."""
    for name in sorted({*restored, *saved}):
        one = restored.get(name)
        other = saved.get(name)
        if (
            one is None
            or other is None
            or (one.shape, one.dtype) != (other.shape, other.dtype)
            or not torch.equal(as_bytes(one), as_bytes(other))
        ):
            raise ValueError(f"the optimizer does not take back its {name.removeprefix(PREFIX)}")


def parameter_names(optimizer: Optimizer, names: Names) -> list[str]:
    """Return the names of the parameters in the order in which `state_dict` numbers them."""
    return [names[parameter] for group in optimizer.param_groups for parameter in group["params"]]


def without_parameters(group: Mapping[str, Any]) -> dict[str, Any]:
    """Return the entries of a group but its parameters."""
    return {key: value for key, value in group.items() if key != "params"}


def pack(value: Any, path: str, tensors: dict[str, Tensor]) -> Any:
    """Return a value for JSON, of which tensors and numbers are added to `tensors` by their path.

    Raises UsageError as `collect_state`.
    """
    kind = type(value)
    if isinstance(value, Tensor):
        check_tensor(value, path)
        add(value.detach(), path, tensors)
        return {"tensor": path, "stride": list(value.stride())}
    if kind is dict and all(type(key) is str for key in value):
        packed = {}
        for key, item in value.items():
            if is_number(item):
                number = torch.tensor(item, dtype=NUMBERS[type(item)])
                add(number, f"{path}.{key}", tensors)
                packed[key] = {"number": f"{path}.{key}"}
            else:
                packed[key] = pack(item, f"{path}.{key}", tensors)
        return {"dict": packed}
    if kind in (tuple, list):
        items = [pack(item, f"{path}.{number}", tensors) for number, item in enumerate(value)]
        return {kind.__name__: items}
    if kind in PLAIN:
        return value
    if kind is torch.dtype:
        return {"dtype": str(value).removeprefix("torch.")}
    raise UsageError(
        f"its state holds {path.removeprefix(PREFIX)}, of the type {type(value).__name__}: only"
        " tensors, numbers, texts, None, and tuples, lists and dicts of them can be saved"
    )


def is_number(value: Any) -> bool:
    """Whether a value is a number that a tensor of `NUMBERS` holds; JSON holds larger integers."""
    return type(value) in NUMBERS and not (type(value) is int and abs(value) > LARGEST)


def add(tensor: Tensor, path: str, tensors: dict[str, Tensor]) -> None:
    """Add a tensor by its path. Raises UsageError if there is another of that path."""
    if path in tensors:
        raise UsageError(f"its state has two entries {path.removeprefix(PREFIX)}")
    tensors[path] = tensor


def check_tensor(tensor: Tensor, path: str) -> None:
    """Raise UsageError for a tensor that a file cannot hold."""
    what = ""
    if tensor.layout != torch.strided:
        what = f"a tensor of the layout {tensor.layout}"
    elif tensor.dtype not in TYPES:
        what = f"a tensor of {tensor.dtype}"
    elif any(size > 1 and not tensor.stride(axis) for axis, size in enumerate(tensor.shape)):
        what = "an expanded tensor"
    if what:
        raise UsageError(f"its state holds {path.removeprefix(PREFIX)}, {what}")


def unpack(packed: Any, tensors: Mapping[str, Tensor]) -> Any:
    """Return the value of which `pack` returned `packed`; its tensors have strides of their own.

    Raises ValueError if one is missing.
    """
    if not isinstance(packed, dict):
        return packed
    if "dict" in packed:
        return {key: unpack(item, tensors) for key, item in packed["dict"].items()}
    if "list" in packed:
        return [unpack(item, tensors) for item in packed["list"]]
    if "tuple" in packed:
        return tuple(unpack(item, tensors) for item in packed["tuple"])
    if "dtype" in packed:
        return getattr(torch, packed["dtype"])
    name = packed.get("tensor") or packed["number"]
    if name not in tensors:
        raise ValueError(f"it lacks the tensor {name!r}")
    tensor = tensors[name]
    if "number" in packed:
        return tensor.item()
    return with_strides(tensor, packed["stride"], tensor.device)


def placed(value: Any, loaded: Any) -> Any:
    """Return a saved value with its tensors on the devices where `load_state_dict` put them."""
    if isinstance(value, Tensor):
        device = loaded.device if isinstance(loaded, Tensor) else value.device
        return with_strides(value, value.stride(), device)
    if isinstance(value, dict):
        return {key: placed(item, item_of(loaded, key)) for key, item in value.items()}
    if isinstance(value, list | tuple):
        items = [placed(item, item_of(loaded, number)) for number, item in enumerate(value)]
        return type(value)(items)
    return value


def item_of(container: Any, key: str | int) -> Any:
    """Return an item of a dict, list or tuple; None if it has none."""
    try:
        return container[key]
    except (KeyError, IndexError, TypeError):
        return None


def with_strides(tensor: Tensor, stride: Sequence[int], device: torch.device) -> Tensor:
    """Return a copy of a tensor that has these strides."""
    copy = torch.empty_strided(tensor.shape, stride, dtype=tensor.dtype, device=device)
    return copy.copy_(tensor)
