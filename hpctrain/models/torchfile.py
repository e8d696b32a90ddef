"""Files of torch.save (.pth, .pt, .ckpt) as tensors and plain values, without running their code.

torch's ``weights_only`` reads tensors, numbers, texts, lists and dicts. Training scripts also store
scalars and arrays of NumPy, defaultdicts, paths, times and their arguments. A pickle makes such
objects by calling functions that it names; functions of this module take their places. Those of
NumPy are not called: a crafted dtype makes them read arbitrary memory.
"""

from __future__ import annotations

import argparse
import re
import warnings
import zipfile
from collections import OrderedDict
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from hpctrain.errors import UsageError, one_line
from hpctrain.text import brief

NUMBERS = re.compile(r"[biufc]\d{1,2}|[SU]\d{1,4}")  # dtypes that are read; none holds objects


class Dtype:
    """In place of numpy.dtype."""

    def __init__(self, code: str, *rest: object) -> None:
        """Take the first argument of numpy.dtype. Raises ValueError for other values."""
        if not NUMBERS.fullmatch(str(code)):
            raise ValueError(f"an array of NumPy's dtype {str(code)[:20]!r} holds no numbers")
        self.value = np.dtype(code)

    def __setstate__(self, state: tuple[Any, ...]) -> None:
        """Take the byte order, and nothing else of the state."""
        if state[1] == ">":
            self.value = self.value.newbyteorder(">")


class Array:
    """In place of numpy.ndarray."""

    def __init__(self, *rest: object) -> None:
        """Ignore the arguments: shape and values follow."""
        self.value = np.empty(0)

    def __setstate__(self, state: tuple[int, tuple[int, ...], Dtype, bool, bytes]) -> None:
        """Take shape, dtype, order and bytes of the values."""
        _, shape, dtype, fortran, content = state
        flat = np.frombuffer(content, dtype.value)
        self.value = flat.reshape(shape, order="F" if fortran else "C")

    def tensor(self) -> Any:
        """Return the array as a tensor, or None if torch has no such type."""
        native = self.value.astype(self.value.dtype.newbyteorder("="), order="C")
        try:
            return torch.from_numpy(native)
        except TypeError:
            return None


class LeftOut:
    """In place of values that are not read: paths, times, the factories of defaultdicts."""

    def __init__(self, *rest: object) -> None:
        """Ignore the arguments."""

    def __setstate__(self, state: object) -> None:
        """Ignore the state."""


def make_scalar(dtype: Dtype, content: bytes) -> Any:
    """Return a scalar of NumPy as a number or a text of Python."""
    return np.frombuffer(content, dtype.value)[0].item()


def make_dict(*rest: object) -> OrderedDict[Any, Any]:
    """Return an empty dict in place of a defaultdict."""
    return OrderedDict()


FACTORIES = ("bool", "dict", "float", "int", "list", "str", "tuple")
PATHS = ("Path", "PosixPath", "WindowsPath", "PurePath", "PurePosixPath", "PureWindowsPath")
TIMES = ("date", "datetime", "time", "timedelta", "timezone")
#: What is called in place of the functions that a file names.
STAND_INS: dict[str, Any] = {
    "argparse.Namespace": argparse.Namespace,  # arguments of timm's and others' scripts
    "collections.defaultdict": make_dict,
    "numpy.dtype": Dtype,
    "numpy.ndarray": Array,
    **{f"numpy.{core}.multiarray.scalar": make_scalar for core in ("core", "_core")},
    **{f"numpy.{core}.multiarray._reconstruct": Array for core in ("core", "_core")},
    **{f"builtins.{name}": LeftOut for name in FACTORIES},
    **{f"pathlib.{name}": LeftOut for name in PATHS},
    **{f"pathlib._local.{name}": LeftOut for name in PATHS},  # of Python 3.13
    **{f"datetime.{name}": LeftOut for name in TIMES},
}


def read_torch_file(path: str | Path) -> Any:
    """Read what torch.save wrote: tensors, numbers, texts, lists and dicts.

    Arrays of NumPy are tensors. Raises UsageError if the file is damaged, or holds objects that
    only code of the file could make.
    """
    try:
        if zipfile.is_zipfile(path):
            with zipfile.ZipFile(path) as archive:
                damaged = archive.testzip()  # torch.load does not compare the checksums
                if damaged:
                    raise ValueError(f"{damaged} does not match its CRC-32")
                if any(name.endswith("/constants.pkl") for name in archive.namelist()):
                    raise UsageError(
                        f"{path} is a program of TorchScript: save its .state_dict() with"
                        " torch.save"
                    )
        allowed: list[Any] = [(function, name) for name, function in STAND_INS.items()]
        with torch.serialization.safe_globals(allowed), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about old formats
            return torch.load(path, map_location="cpu", weights_only=True)
    except UsageError:
        raise
    except Exception as error:
        reason = f"cannot be read by torch.load: {brief(one_line(error), 200)}"
        unknown = re.search(r"GLOBAL (\S+)", str(error))
        if unknown:
            reason = (
                f"holds an object of the type {unknown[1]}, and no code of a file is executed to"
                " make it: save the network's .state_dict() alone"
            )
        raise UsageError(f"{path} {reason}") from error


def tensors_of(entry: Any) -> dict[str, Tensor]:
    """Return the tensors that a dict holds by name, and its arrays as tensors."""
    tensors = {}
    for name, value in entry.items():
        tensor = value.tensor() if isinstance(value, Array) else value
        if isinstance(name, str) and isinstance(tensor, Tensor):
            tensors[name] = tensor
    return tensors
