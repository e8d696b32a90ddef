"""Tensors as safetensors files: eight bytes of header length, a JSON header, raw values.

The format runs no code when it is read (https://github.com/huggingface/safetensors), and its own
library reads them. They are written here, as a stream: the library's writer refuses tensors that
are not contiguous and, where its process is killed, leaves temporary files that nobody knows.

Complex numbers, which not every version of the library takes, are pairs of real ones in the file;
the metadata entry "hpctrain.complex" names such tensors.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping

import torch
from torch import Tensor

from hpctrain.errors import UsageError
from hpctrain.typed import parse_json

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


def check_type(name: str, tensor: Tensor) -> None:
    """UsageError where a file cannot hold such a tensor."""
    known = tensor.dtype in TYPES or tensor.dtype in REAL
    if not known or tensor.layout is not torch.strided:
        kind = f"{tensor.dtype}" if not known else f"stored as {tensor.layout}"
        raise UsageError(f"{name} is {kind}, which weight files cannot hold")


def as_bytes(tensor: Tensor) -> Tensor:
    """The values in torch's order as a vector of bytes on the CPU, a copy where need be."""
    return (
        tensor.detach().cpu().resolve_conj().resolve_neg().contiguous().flatten().view(torch.uint8)
    )


def content(tensors: Mapping[str, Tensor], metadata: Mapping[str, str]) -> Iterator[memoryview]:
    """The bytes of a file of these tensors, piece by piece. Equal tensors and metadata give equal
    bytes, whatever their order. UsageError as `check_type`.
    """
    pairs = [name for name in sorted(tensors) if tensors[name].dtype in REAL]
    entries = {**metadata, COMPLEX: json.dumps(pairs)} if pairs else dict(metadata)
    header: dict[str, object] = {"__metadata__": dict(sorted(entries.items()))} if entries else {}
    start = 0
    # By falling size of a number, so that every tensor lies aligned.
    names = sorted(tensors, key=lambda name: (-_real(tensors[name])[0].itemsize, name))
    for name in names:
        check_type(name, tensors[name])
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
    """Type and shape in a file."""
    pair = [2] if tensor.dtype in REAL else []
    return REAL.get(tensor.dtype, tensor.dtype), [*tensor.shape, *pair]


def restore_complex(tensors: dict[str, Tensor], metadata: Mapping[str, str]) -> dict[str, Tensor]:
    """What was read from a file, with the complex tensors that `content` wrote as pairs.
    ValueError where there are no such pairs.
    """
    named = parse_json(metadata.get(COMPLEX, "[]"))
    known = isinstance(named, list) and all(isinstance(n, str) and n in tensors for n in named)
    if not known:
        raise ValueError(f"its metadata {COMPLEX!r} are no names of its tensors")
    for name in named:
        if tensors[name].dtype not in REAL.values() or tensors[name].shape[-1:] != (2,):
            raise ValueError(f"{name} is no tensor of pairs of real numbers")
    # Copies: torch takes 16 bytes at once, and crashes where they are at a multiple of 8.
    return tensors | {name: torch.view_as_complex(tensors[name].clone()) for name in named}
