"""Weights in safetensors files: eight bytes of header length, a JSON header, raw values.

The format runs no code when it is read (https://github.com/huggingface/safetensors). A file of
ours holds all parameters and buffers, contiguous in torch's order, and one metadata entry
"hpctrain": a JSON object with what the caller needs to build the model again. One entry, because
the library writes several in an order that changes from process to process, and equal weights
are to be equal files.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from safetensors import SafetensorError
from torch import Tensor, nn

from hpctrain.errors import RunError, UsageError
from hpctrain.files import whole_file
from hpctrain.strictjson import parse_json

ENTRY = "hpctrain"
ORDER = "tensors"  # in the entry: their names in the order of the model


def snapshot(model: nn.Module) -> dict[str, Tensor]:
    """Copies of all parameters and buffers on the CPU, contiguous in torch's order."""
    # Parameters may be views of one flat vector, or lie in memory as NHWC: copy each by itself.
    return {
        name: value.detach().to("cpu", copy=True).contiguous()
        for name, value in model.state_dict().items()
    }


def save_model(path: str | Path, model: nn.Module, metadata: Mapping[str, Any]) -> None:
    """Write weights, buffers and `metadata` (what JSON can hold), whole or not at all.

    RunError if the disk does not take it.
    """
    save_tensors(path, snapshot(model), metadata)


def save_tensors(path: str | Path, tensors: dict[str, Tensor], metadata: Mapping[str, Any]) -> None:
    """Write what `snapshot` gave, and `metadata`, as `save_model` does."""
    entry = json.dumps({**metadata, ORDER: list(tensors)}, sort_keys=True)
    content = safetensors.torch.save(tensors, {ENTRY: entry})
    try:
        with whole_file(Path(path)) as temporary:
            temporary.write_bytes(content)
    except OSError as error:
        size = f"{len(content) / 1e6:.1f} MB"
        raise RunError(
            f"cannot write the weights {path} ({size}): {error.strerror or error}"
        ) from error


def read_model(
    path: str | Path, required: tuple[str, ...] = ()
) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """The tensors in the order of the model, where the file tells it, else by their names; and the
    metadata, of another program's file empty.

    UsageError if it is missing, cut short, no safetensors file, or lacks a `required` key.
    """
    try:
        content = Path(path).read_bytes()
    except OSError as error:
        raise UsageError(f"cannot read the weights {path}: {error.strerror or error}") from error
    try:
        tensors = safetensors.torch.load(content)
        header = parse_json(content[8 : 8 + int.from_bytes(content[:8], "little")])
        metadata = parse_json((header.get("__metadata__") or {}).get(ENTRY, "{}"))
        if not isinstance(metadata, dict):
            raise ValueError(f"its metadata {ENTRY!r} are no JSON object")
    except (SafetensorError, ValueError) as error:
        raise UsageError(
            f"{path} is no safetensors file, or was cut short ({len(content):,} bytes): {error}"
        ) from error
    absent = [key for key in required if key not in metadata]
    if absent:
        raise UsageError(
            f"{path} holds weights but not the {', '.join(absent)} they belong to: it was not"
            " written at the end of a run"
        )
    return _in_order(tensors, metadata.pop(ORDER, None)), metadata


def _in_order(tensors: dict[str, Tensor], names: Any) -> dict[str, Tensor]:
    """The library gives them in an order that changes from process to process."""
    known = isinstance(names, list) and all(isinstance(name, str) for name in names)
    wanted = names if known and sorted(names) == sorted(tensors) else sorted(tensors)
    return {name: tensors[name] for name in wanted}


def load_weights(
    model: nn.Module, tensors: dict[str, Tensor], source: str | Path, classes: int | None = None
) -> list[str]:
    """Copy `tensors` into the parameters and buffers of `model`, which stay where they are.

    Names and shapes must match; UsageError names the first three that do not. With `classes`,
    a last layer made for another number of classes keeps its fresh weights; the names that were
    therefore not loaded are returned. Counters of batches may be absent (old files lack them).
    """
    state = model.state_dict()
    differing = [n for n in state if n in tensors and tensors[n].shape != state[n].shape]
    fresh: list[str] = []
    if classes is not None and _last_layer_only(model, differing, tensors, classes):
        fresh, differing = differing, []
    wrong = [f"{n} is {_shape(tensors[n])}, the model's {_shape(state[n])}" for n in differing]
    wrong += [
        f"{n} {_shape(state[n])} is not in the file"
        for n in state
        if n not in tensors and not n.endswith("num_batches_tracked")
    ]
    wrong += [f"{n} {_shape(tensors[n])} is not in the model" for n in tensors if n not in state]
    if wrong:
        more = f"; and {len(wrong) - 3} more" if len(wrong) > 3 else ""
        raise UsageError(f"{source} does not fit the model: {'; '.join(wrong[:3])}{more}")
    for name, value in tensors.items():
        if not torch.isfinite(value).all():
            raise UsageError(f"{source}: {name} holds values that are not finite")
    kept = {name: value for name, value in tensors.items() if name not in fresh}
    with torch.no_grad():
        model.load_state_dict(kept, strict=False)
    return fresh


def load_init(model: nn.Module, path: str | Path, classes: int) -> list[str]:
    """Start `model` from a file of ours or with torchvision's names; see `load_weights`."""
    return load_weights(model, read_model(path)[0], path, classes)


def _last_layer_only(
    model: nn.Module, differing: list[str], tensors: dict[str, Tensor], classes: int
) -> bool:
    """Whether the tensors that differ are the last layer's, and only in the number of classes."""
    parameters = dict(model.named_parameters())
    layer = next(reversed(parameters)).rpartition(".")[0]
    return bool(differing) and all(
        name.rpartition(".")[0] == layer
        and name in parameters
        and parameters[name].shape[:1] == (classes,)
        and parameters[name].shape[1:] == tensors[name].shape[1:]
        for name in differing
    )


def _shape(tensor: Tensor) -> str:
    return "x".join(map(str, tensor.shape)) or "a number"
