"""Weights and other tensors as safetensors files: 8-byte header length, JSON header, raw values.

Reading the format executes no code (https://github.com/huggingface/safetensors). Its own library
reads the files. They are written here, as a stream: the library's writer refuses tensors that are
not contiguous and, if its process is killed, leaves temporary files behind. Complex numbers, which
not every version of the library supports, are stored as pairs of real numbers; the metadata entry
"hpctrain.complex" names such tensors.

A file of weights holds all parameters and buffers, contiguous in torch's order, and two metadata
entries: "hpctrain", a JSON object with what the caller needs to build the model again, and
"hpctrain.sha256", the SHA-256 of the file that would be written without this entry: it covers
names, types, shapes, values and the metadata. Files of other programs lack both entries.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from safetensors import SafetensorError
from torch import Tensor, nn

from hpctrain.errors import RunError, UsageError
from hpctrain.files import whole_file
from hpctrain.text import listed
from hpctrain.typed import parse_json

ENTRY, SHA256 = "hpctrain", "hpctrain.sha256"
ORDER = "tensors"  # key in the entry: names of the tensors in the order of the model
COMPLEX = "hpctrain.complex"
TYPES = {
    torch.bool: "BOOL",
    torch.uint8: "U8",
    torch.uint16: "U16",
    torch.uint32: "U32",
    torch.uint64: "U64",
    torch.int8: "I8",
    torch.int16: "I16",
    torch.int32: "I32",
    torch.int64: "I64",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float32: "F32",
    torch.float64: "F64",
}
REAL = {torch.complex64: torch.float32, torch.complex128: torch.float64}


def check_type(name: str, value: Any) -> None:
    """Raise UsageError unless it is a dense tensor of a type that files can hold."""
    dense = isinstance(value, Tensor) and value.layout is torch.strided
    if not dense or value.dtype not in {*TYPES, *REAL}:
        raise UsageError(f"{name} is no dense tensor of a type that weight files can hold")


def as_bytes(tensor: Tensor) -> Tensor:
    """Return the values in torch's order as a vector of bytes on the CPU, copied if necessary."""
    return (
        tensor.detach().cpu().resolve_conj().resolve_neg().contiguous().flatten().view(torch.uint8)
    )


def content(tensors: Mapping[str, Tensor], metadata: Mapping[str, str]) -> Iterator[memoryview]:
    """Yield the bytes of a file of these tensors, piece by piece.

    Equal tensors and metadata give equal bytes in any order.
    """
    pairs = [name for name in sorted(tensors) if tensors[name].dtype in REAL]
    entries = {**metadata, COMPLEX: json.dumps(pairs)} if pairs else dict(metadata)
    header: dict[str, object] = {"__metadata__": dict(sorted(entries.items()))} if entries else {}
    start = 0
    # By decreasing element size, so that every tensor is aligned.
    names = sorted(tensors, key=lambda name: (-_real(tensors[name])[0].itemsize, name))
    for name in names:
        dtype, shape = _real(tensors[name])
        end = start + tensors[name].nbytes
        header[name] = {"dtype": TYPES[dtype], "shape": shape, "data_offsets": [start, end]}
        start = end
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    yield memoryview(len(text).to_bytes(8, "little") + text)
    for name in names:
        yield as_bytes(tensors[name]).numpy().data


def _real(tensor: Tensor) -> tuple[torch.dtype, list[int]]:
    """Return the type and shape that a tensor has in a file."""
    pair = [2] if tensor.dtype in REAL else []
    return REAL.get(tensor.dtype, tensor.dtype), [*tensor.shape, *pair]


def restore_complex(tensors: dict[str, Tensor], metadata: Mapping[str, str]) -> dict[str, Tensor]:
    """Convert the pairs that `content` wrote for complex tensors back to complex numbers.

    Raises ValueError if a tensor named in the metadata is missing or holds no such pairs.
    """
    named = parse_json(metadata.get(COMPLEX, "[]"))
    known = isinstance(named, list) and all(isinstance(n, str) and n in tensors for n in named)
    if not known:
        raise ValueError(f"its metadata {COMPLEX!r} are no names of its tensors")
    for name in named:
        if tensors[name].dtype not in REAL.values() or tensors[name].shape[-1:] != (2,):
            raise ValueError(f"{name} is no tensor of pairs of real numbers")
    # Copies: torch loads 16 bytes at once, and crashes if they are aligned to 8 only.
    return tensors | {name: torch.view_as_complex(tensors[name].clone()) for name in named}


def snapshot(model: nn.Module) -> dict[str, Tensor]:
    """Copy all parameters and buffers to the CPU, contiguous in torch's order."""
    # Parameters may be views of one flat vector, or channels-last: copy each separately.
    return {
        name: value.detach().to("cpu", copy=True, memory_format=torch.contiguous_format)
        for name, value in model.state_dict().items()
    }


def save_model(path: str | Path, model: nn.Module, metadata: Mapping[str, Any]) -> None:
    """Write weights, buffers and `metadata` (values for JSON) to a file, atomically.

    Raises RunError if it cannot be written.
    """
    save_tensors(path, snapshot(model), metadata)


def save_tensors(path: str | Path, tensors: dict[str, Tensor], metadata: Mapping[str, Any]) -> None:
    """Write the tensors of `snapshot`, and `metadata`, as `save_model` does."""
    entries = {ENTRY: json.dumps({**metadata, ORDER: list(tensors)}, sort_keys=True)}
    entries[SHA256] = _digest(tensors, entries)
    try:
        with whole_file(Path(path)) as file:
            file.writelines(content(tensors, entries))
    except OSError as error:
        size = f"{sum(tensor.nbytes for tensor in tensors.values()) / 1e6:.1f} MB"
        raise RunError(
            f"cannot write the weights {path} ({size}): {error.strerror or error}"
        ) from error


def _digest(tensors: Mapping[str, Tensor], entries: Mapping[str, str]) -> str:
    found = hashlib.sha256()
    for part in content(tensors, entries):
        found.update(part)
    return found.hexdigest()


def read_model(
    path: str | Path, required: tuple[str, ...] = ()
) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Read the tensors and the metadata of a file of weights.

    Tensors are in the order of the model if the file has it, otherwise sorted by name. The metadata
    of another program's file are empty. Raises UsageError if the file is missing, truncated, not in
    the safetensors format, or corrupt, or if it lacks a `required` key.
    """
    try:
        found = Path(path).read_bytes()
    except OSError as error:
        raise UsageError(f"cannot read the weights {path}: {error.strerror or error}") from error
    if is_torch_file(found):
        raise UsageError(
            f"{path} is no safetensors file, but one of torch.save: train from its weights with"
            f" --init {path}"
        )
    try:
        tensors = safetensors.torch.load(found)
        header = parse_json(found[8 : 8 + int.from_bytes(found[:8], "little")])
        entries = header.get("__metadata__") or {}
        tensors = restore_complex(tensors, entries)
        metadata = parse_json(entries.get(ENTRY, "{}"))
    except (SafetensorError, ValueError) as error:
        raise UsageError(
            f"{path} is no safetensors file, or was cut short ({len(found):,} bytes): {error}"
        ) from error
    sha256 = entries.get(SHA256)
    covered = {name: entries[name] for name in (ENTRY,) if name in entries}
    if sha256 is not None and sha256 != _digest(tensors, covered):
        raise UsageError(
            f"{path} is not what was written: its tensors or metadata do not match their SHA-256"
            f" {sha256[:16]}...; copy it again (one that was changed on purpose is to be saved"
            f" without the metadata entry {SHA256!r})"
        )
    absent = [key for key in required if key not in metadata]
    if absent:
        raise UsageError(
            f"{path} holds weights but not the {', '.join(absent)} they belong to: it was not"
            " written at the end of a run"
        )
    return _in_order(tensors, metadata.pop(ORDER, None)), metadata


def is_torch_file(start: bytes) -> bool:
    """Whether a file that starts so is one of torch.save: a zip file, or an earlier format."""
    return start[:4] == b"PK\x03\x04" or (start[:1], start[2:4]) == (b"\x80", b"\x8a\n")


def _in_order(tensors: dict[str, Tensor], names: Any) -> dict[str, Tensor]:
    """Order the tensors: the library's order differs from process to process."""
    known = isinstance(names, list) and all(isinstance(name, str) for name in names)
    wanted = names if known and sorted(names) == sorted(tensors) else sorted(tensors)
    return {name: tensors[name] for name in wanted}


def load_weights(model: nn.Module, tensors: dict[str, Tensor], source: str | Path) -> None:
    """Copy `tensors` into the parameters and buffers of `model`, in place.

    Names and shapes must match; otherwise UsageError names the first three that do not. Batch
    counters may be missing (old files lack them).
    """
    state = model.state_dict()
    differing = [n for n in state if n in tensors and tensors[n].shape != state[n].shape]
    wrong = [f"{n} is {_shape(tensors[n])}, the model's {_shape(state[n])}" for n in differing]
    wrong += [  # quantized weights, say; torch would copy the integers, and drop imaginary parts
        f"{n} is {tensors[n].dtype}, the model's {state[n].dtype}"
        for n in state
        if n in tensors and not n.endswith("num_batches_tracked")
        if _kind(tensors[n]) != _kind(state[n])
    ]
    wrong += [
        f"{n} {_shape(state[n])} is not in the file"
        for n in state
        if n not in tensors and not n.endswith("num_batches_tracked")
    ]
    wrong += [f"{n} {_shape(tensors[n])} is not in the model" for n in tensors if n not in state]
    if wrong:
        raise UsageError(f"{source} does not fit the model: {listed(wrong, 3, '; ')}")
    for name, value in tensors.items():
        if not _finite(value) and _finite(state[name]):  # a mask may hold -inf by design
            raise UsageError(f"{source}: {name} holds values that are not finite")
    state.update(tensors)  # keeps the versions of modules, which some ask for when they load
    with torch.no_grad():
        model.load_state_dict(state)


def _finite(tensor: Tensor) -> bool:
    """Whether all values are finite; torch cannot test the floating-point types of one byte."""
    small = tensor.is_floating_point() and tensor.itemsize == 1
    return bool(torch.isfinite(tensor.float() if small else tensor).all())


def _kind(tensor: Tensor) -> tuple[bool, bool]:
    return tensor.is_floating_point(), tensor.is_complex()


def _shape(tensor: Tensor) -> str:
    return "x".join(map(str, tensor.shape)) or "a number"
