"""NCCL or RCCL: sums and moves device memory, queued on torch's current stream.

Nothing synchronizes with the host. The ranks join a communicator by an id that MPI broadcasts.
Afterwards MPI is used for host memory only, and never while a call of NCCL is in progress on the
same device (NCCL User Guide, "NCCL and MPI": both at once may deadlock).

A communicator is neither destroyed nor aborted: both may wait for a peer that is gone. The end of
the process, which MPI_Abort or MPI_Finalize causes on all ranks, frees its resources.

The library is the one that torch itself loaded; on AMD GPUs it is RCCL, which has the same
functions (NCCL User Guide, "NCCL API").
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from ctypes import POINTER, c_char_p, c_int, c_size_t, c_void_p
from typing import Any

import torch

from hpctrain.errors import RunError
from hpctrain.parallel.memory import built_for, torch_library
from hpctrain.parallel.mpi import Comm, on_root
from hpctrain.parallel.transport import Messages, Transport
from hpctrain.watchdog import waiting


class UniqueId(ctypes.Structure):
    """ncclUniqueId, passed by value."""

    _fields_ = (("internal", ctypes.c_char * 128),)


FUNCTIONS: dict[str, tuple[Any, ...]] = {  # all return a ncclResult_t, an int
    "ncclGetVersion": (POINTER(c_int),),
    "ncclGetUniqueId": (POINTER(UniqueId),),
    "ncclCommInitRank": (POINTER(c_void_p), c_int, UniqueId, c_int),
    "ncclCommGetAsyncError": (c_void_p, POINTER(c_int)),
    "ncclGroupStart": (),
    "ncclGroupEnd": (),
    # send buffer, receive buffer, count, type, operation, communicator, stream
    "ncclAllReduce": (c_void_p, c_void_p, c_size_t, c_int, c_int, c_void_p, c_void_p),
    # send buffer, receive buffer, count of a block, type, communicator, stream
    "ncclAllGather": (c_void_p, c_void_p, c_size_t, c_int, c_void_p, c_void_p),
    # buffer, count, type, peer, communicator, stream
    "ncclSend": (c_void_p, c_size_t, c_int, c_int, c_void_p, c_void_p),
    "ncclRecv": (c_void_p, c_size_t, c_int, c_int, c_void_p, c_void_p),
}


class Library:
    """The functions of an NCCL library, torch's by default. Raises RunError if it has none."""

    def __init__(self, path: str = "") -> None:
        self._handle = ctypes.CDLL(path) if path else torch_library()
        try:
            for name, arguments in FUNCTIONS.items():
                getattr(self._handle, name).argtypes = arguments
            for name, argument in (("ncclGetErrorString", c_int), ("ncclGetLastError", c_void_p)):
                getattr(self._handle, name).argtypes = (argument,)
                getattr(self._handle, name).restype = c_char_p
        except AttributeError as error:
            raise RunError(f"torch {torch.__version__} was built without NCCL ({error})") from None

    def __call__(self, name: str, *arguments: Any) -> None:
        """Call a function by its name. Raises RunError with NCCL's message if it fails."""
        if code := getattr(self._handle, name)(*arguments):
            self.fail(name, code)

    def fail(self, name: str, code: int) -> None:
        """Raise RunError for an error code that the function `name` returned."""
        words = [self._handle.ncclGetErrorString(code), self._handle.ncclGetLastError(None)]
        text = ": ".join(word.decode(errors="replace").strip() for word in words if word)
        raise RunError(f"{name} failed on this rank or a rank it talks to: {text}")

    def version(self) -> str:
        """Return name and version, such as "NCCL 2.29.7"."""
        found = c_int()
        self("ncclGetVersion", ctypes.byref(found))
        major, rest = divmod(found.value, 10000)
        name = "RCCL" if built_for().startswith("ROCm") else "NCCL"
        return f"{name} {major}.{rest // 100}.{rest % 100}"

    def unique_id(self) -> bytes:
        """Return a new id with which ranks join one communicator."""
        made = UniqueId()
        self("ncclGetUniqueId", ctypes.byref(made))
        return bytes(made)


def nccl_version() -> str:
    """Return name and version of the NCCL that torch loaded; empty if there is none."""
    try:
        return Library().version()
    except RunError:
        return ""


NUMBER_TYPES = {torch.uint8: 1, torch.float32: 7, torch.float64: 8}  # ncclDataType_t
SUM = 0  # ncclRedOp_t


class Nccl(Transport):
    """One NCCL communicator over all ranks, each with a GPU of its own."""

    def __init__(self, comm: Comm, library: Library | None = None) -> None:
        """Collective, on the current GPU of this thread."""
        super().__init__(comm)
        self._call = library or Library()
        number = UniqueId.from_buffer_copy(on_root(comm, self._call.unique_id))
        self._group = c_void_p()
        with waiting():
            self._call("ncclCommInitRank", ctypes.byref(self._group), comm.size, number, comm.rank)

    def allreduce(self, vector: torch.Tensor) -> None:
        place, where = vector.data_ptr(), (self._group, _stream(vector))
        self._call("ncclAllReduce", place, place, len(vector), _type(vector), SUM, *where)
        self._check()

    def exchange(self, sends: Messages, receives: Messages) -> None:
        """Exchange all vectors in one group, which is a single launch."""
        with self._one_launch():
            for name, messages in (("ncclSend", sends), ("ncclRecv", receives)):
                for rank, vectors in messages:
                    for vector in vectors:
                        where = rank, self._group, _stream(vector)
                        self._call(name, vector.data_ptr(), len(vector), _type(vector), *where)
        self._check()

    def allgather(self, vector: torch.Tensor) -> None:
        length, where = len(vector) // self.comm.size, (self._group, _stream(vector))
        own = vector.data_ptr() + vector.element_size() * length * self.comm.rank
        self._call("ncclAllGather", own, vector.data_ptr(), length, _type(vector), *where)
        self._check()

    @contextmanager
    def _one_launch(self) -> Iterator[None]:
        """Group the calls of a block into one launch; the group is closed even if one fails."""
        self._call("ncclGroupStart")
        try:
            yield
        except RunError as error:
            with suppress(RunError):  # the same error again
                self._call("ncclGroupEnd")
            raise error
        self._call("ncclGroupEnd")

    def _check(self) -> None:
        """Raise RunError if an earlier call has failed since, on any rank."""
        found = c_int()
        self._call("ncclCommGetAsyncError", self._group, ctypes.byref(found))
        if found.value:
            self._call.fail("an earlier call of NCCL", found.value)


def _type(vector: torch.Tensor) -> int:
    """Return NCCL's code of a type. Raises TypeError unless it is float32, float64 or bytes."""
    if vector.dtype not in NUMBER_TYPES:
        raise TypeError(f"NCCL is not asked to sum {vector.dtype}")
    return NUMBER_TYPES[vector.dtype]


def _stream(vector: torch.Tensor) -> int:
    return torch.cuda.current_stream(vector.device).cuda_stream if vector.is_cuda else 0
