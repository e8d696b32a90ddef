"""Tensors and metadata as safetensors files: networks and checkpoints.

Reading the format executes no code (https://github.com/huggingface/safetensors). Its library reads
the files. They are written here, as a stream: the library makes a temporary file of its own, which
has other permissions and stays if the process is killed, or holds everything in memory once more.

A file has two metadata entries: "hpctrain", a JSON object, and "hpctrain.sha256", the SHA-256 of
that text and of each tensor, sorted by name: "NAME F32 (2, 3)" and its values. A file of weights
holds all parameters and buffers, contiguous in torch's order, and in the JSON object what the
caller needs to build the model again. Files of other programs lack both entries.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from hpctrain.errors import UsageError
from hpctrain.files import whole_file, writing
from hpctrain.text import listed, parse_json

Tensors = dict[str, Tensor]  # by name
ENTRY = "hpctrain"
SHA256 = "hpctrain.sha256"
ORDER = "tensors"  # key in the JSON object: names, in the order in which they were written
COUNTER = "num_batches_tracked"  # of a batch-norm layer; old files lack it
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
    torch.complex64: "C64",
}


class CorruptFile(UsageError):
    """A file that is not what was written, or none of this format."""


def as_bytes(tensor: Tensor) -> Tensor:
    """Return the values in torch's order as a vector of bytes on the CPU, copied if necessary."""
    values = tensor.detach().cpu().resolve_conj().resolve_neg().contiguous()
    return values.flatten().view(torch.uint8)


def write_tensors(
    path: Path,
    tensors: Mapping[str, Tensor],
    metadata: Mapping[str, Any],
    point: str = "",
) -> str:
    """Write a file of tensors and `metadata` (values for JSON), atomically.

    Equal tensors and metadata give equal bytes. Returns the SHA-256; fault points begin with
    `point`. Raises OSError.
    """
    text = json.dumps({**metadata, ORDER: list(tensors)}, sort_keys=True)
    sha256 = _digest(tensors, text)
    header: dict[str, object] = {"__metadata__": {ENTRY: text, SHA256: sha256}}
    # By decreasing element size, so that every tensor is aligned.
    ordered = sorted(tensors.items(), key=lambda item: (-item[1].itemsize, item[0]))
    start = 0
    for name, tensor in ordered:
        end = start + tensor.nbytes
        header[name] = {
            "dtype": TYPES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [start, end],
        }
        start = end
    text = json.dumps(header, separators=(",", ":"))
    text += " " * (-len(text) % 8)
    with whole_file(path, point=point) as file:
        file.write(len(text).to_bytes(8, "little") + text.encode())
        for _, tensor in ordered:
            file.write(as_bytes(tensor).numpy().data)
    return sha256


def read_tensors(path: Path) -> tuple[dict[str, Tensor], dict[str, Any], str | None]:
    """Read the tensors of a file, its metadata, and its SHA-256 (None: it has none).

    Tensors are in the order in which they were written. Those of another program's file are sorted
    by name, and its metadata are empty. Raises OSError, or CorruptFile if the file was cut short,
    is of another format, or does not match its SHA-256.
    """
    with open(path, "rb") as file:  # the library's errors have no reason
        size = file.seek(0, 2)
    try:
        with safe_open(path, "pt") as opened:
            # Cloned: views of the mapped file would keep its space in use after its removal.
            tensors = {name: opened.get_tensor(name).clone() for name in sorted(opened.keys())}
            entries = opened.metadata() or {}
        text = entries.get(ENTRY, "{}")
        metadata: dict[str, Any] = parse_json(text)
    except (SafetensorError, ValueError) as error:
        raise CorruptFile(
            f"{path} is no safetensors file, or was cut short ({size:,} bytes): {error}"
        ) from error
    sha256 = entries.get(SHA256)
    if sha256 is not None and sha256 != _digest(tensors, text):
        raise CorruptFile(
            f"{path} is not what was written: its tensors or metadata do not match their SHA-256;"
            f" copy it again (if you changed it on purpose, save it without its entry {SHA256!r})"
        )
    names = metadata.pop(ORDER, None)
    if sha256 is not None and names:
        tensors = {name: tensors[name] for name in names}
    return tensors, metadata, sha256


def _digest(tensors: Mapping[str, Tensor], text: str) -> str:
    digest = hashlib.sha256(text.encode())
    for name in sorted(tensors):
        tensor = tensors[name]
        digest.update(f"{name} {TYPES.get(tensor.dtype)} {tuple(tensor.shape)}".encode())
        digest.update(as_bytes(tensor).numpy().data)
    return digest.hexdigest()


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
    tensors = snapshot(model)
    size = sum(tensor.nbytes for tensor in tensors.values()) / 1e6
    with writing(f"the weights {path} ({size:.1f} MB)"):
        write_tensors(Path(path), tensors, metadata)


def read_model(path: str | Path) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Read the tensors and the metadata of a file of weights.

    The metadata of another program's file are empty. Raises UsageError if the file is missing,
    truncated, not in the safetensors format, or corrupt.
    """
    if is_torch_file(path):
        raise UsageError(
            f"{path} is no safetensors file, but one of torch.save:"
            f" train from its weights with --init {path}"
        )
    return read_tensors(Path(path))[:2]


def is_torch_file(path: str | Path) -> bool:
    """Whether a file is one of torch.save: a zip file, or an earlier format.

    Raises UsageError if it cannot be read.
    """
    try:
        with open(path, "rb") as file:
            start = file.read(4)
    except OSError as error:
        raise UsageError(f"cannot read the weights {path}: {error.strerror or error}") from error
    return start == b"PK\x03\x04" or (start[:1], start[2:]) == (b"\x80", b"\x8a\n")


def load_weights(model: nn.Module, tensors: dict[str, Tensor], source: str | Path) -> None:
    """Copy `tensors` into the parameters and buffers of `model`, in place.

    Names, shapes and kinds of numbers must match, and weights be finite; otherwise UsageError names
    the first three that do not. Batch counters may be missing (old files lack them).
    """
    state = model.state_dict()
    wrong = [
        f"{name} {_shape(tensor)} is not in the model"
        for name, tensor in tensors.items()
        if name not in state
    ]
    for name, current in state.items():
        stored = tensors.get(name)
        if stored is None:
            if not name.endswith(COUNTER):
                wrong.append(f"{name} {_shape(current)} is not in the file")
        elif stored.shape != current.shape:
            wrong.append(f"{name} is {_shape(stored)}, the model's {_shape(current)}")
        elif numbers_of(stored) != numbers_of(current) and not name.endswith(COUNTER):
            wrong.append(f"{name} is {stored.dtype}, the model's {current.dtype}")
        elif not is_finite(stored) and is_finite(current):  # a mask may hold -inf by design
            wrong.append(f"{name} holds values that are not finite")
    if wrong:
        raise UsageError(f"{source} does not fit the model: {listed(wrong, 3, '; ')}")
    state.update(tensors)  # keeps the versions of modules, which some ask for when they load
    with torch.no_grad():
        model.load_state_dict(state)


def is_finite(tensor: Tensor) -> bool:
    """Whether all values are finite; torch cannot test the floating-point types of one byte."""
    if tensor.itemsize == 1:
        tensor = tensor.float()
    return bool(torch.isfinite(tensor).all())


def numbers_of(tensor: Tensor) -> tuple[bool, bool]:
    """Return what torch must not convert: it drops imaginary parts, and scales of integers."""
    return tensor.is_floating_point(), tensor.is_complex()


def _shape(tensor: Tensor) -> str:
    return "x".join(map(str, tensor.shape)) or "a number"
