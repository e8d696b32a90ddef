"""Weights in files of ``torch.save``: .pth, .pt, .ckpt.

Only tensors and plain values are read (``weights_only``), so that no code of a file is executed.
The tensors may lie in an entry of the file, such as "state_dict".
"""

from __future__ import annotations

import argparse
import re
import warnings
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from hpctrain.config.imports import one_line
from hpctrain.errors import UsageError
from hpctrain.models.weights import is_torch_file, read_model

# Entries of a checkpoint that hold weights. Averaged ones come first, as in timm.
ENTRIES = ("state_dict_ema", "model_ema", "ema", "state_dict", "model_state_dict", "model")
ARGUMENTS = argparse.Namespace  # stored by training scripts of timm and others; runs no code
Tensors = dict[str, Tensor]


def read_weights(path: str | Path) -> tuple[Tensors, dict[str, Any], str]:
    """Read the tensors of a file, its metadata, and the name of the entry in which they lie.

    Raises UsageError if it is neither a safetensors file nor one of torch.save, is damaged, or
    holds objects that only code of the file could make.
    """
    try:
        with open(path, "rb") as file:
            head = file.read(4)
    except OSError as error:
        raise UsageError(f"cannot read the weights {path}: {error.strerror or error}") from error
    if not is_torch_file(head):
        return *read_model(path), ""
    try:
        if head[:2] == b"PK":
            with zipfile.ZipFile(path) as archive:
                if damaged := archive.testzip():  # torch.load does not compare the checksums
                    raise ValueError(f"{damaged} does not match its CRC-32")
        with torch.serialization.safe_globals([ARGUMENTS]), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about old formats
            found = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:
        if unknown := re.search(r"GLOBAL (\S+)", str(error)):
            raise UsageError(
                f"{path} holds an object of the type {unknown[1]}, and no code of a file is"
                " executed to make it: save the network's .state_dict() alone"
            ) from error
        size = f"{Path(path).stat().st_size:,} bytes"
        raise UsageError(
            f"{path} ({size}) cannot be read by torch.load: {one_line(error)[:200]}"
        ) from error
    return _tensors_of(path, found)


def _tensors_of(path: str | Path, found: Any) -> tuple[Tensors, dict[str, Any], str]:
    """Find the tensors among the contents of a file of torch.save."""
    homes = {"": found, **{e: found[e] for e in ENTRIES if isinstance(found, dict) and e in found}}
    if isinstance(found, dict):
        homes |= {name: value for name, value in found.items() if isinstance(name, str)}
    tensors = {entry: _by_name(homes[entry]) for entry in homes}
    usual = [entry for entry in ENTRIES if tensors.get(entry)]
    entry = usual[0] if usual else max(tensors, key=lambda name: len(tensors[name]))
    if not tensors[entry]:
        raise UsageError(f"{path} holds no weights: no tensors by name, also not in an entry of it")
    return tensors[entry], {}, entry


def _by_name(home: Any) -> Tensors:
    """Return the tensors of a dictionary, if there are matrices among them."""
    held = home.items() if isinstance(home, Mapping) else ()
    tensors = {n: t for n, t in held if isinstance(n, str) and isinstance(t, Tensor)}
    return tensors if any(tensor.dim() > 1 for tensor in tensors.values()) else {}
