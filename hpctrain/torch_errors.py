"""Errors of torch in one line: no memory, a failed GPU, an operation that is not deterministic."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager

from hpctrain.errors import DeviceFailure, Failure, RunError, first_line
from hpctrain.text import brief

NO_MEMORY = re.compile("can't allocate memory|out of memory|STATUS_ALLOC_FAILED")  # torch, CUDA
MORE_SHARDS = (
    "a new run with more --shards needs less, but batch norm then normalizes smaller groups of"
    " images"
)
REFUSAL = "does not have a deterministic implementation"  # torch's words
OF_DEVICE = re.compile(  # of torch, and of CuPy (cudaErrorAssert: ...)
    "(CUDA|HIP) error|(cuda|hip)Error|(CUDNN|CUBLAS|MIOPEN|HIPBLAS)_STATUS|miopenStatus"
)


def is_of_device(error: BaseException) -> bool:
    """Whether an error is none of the code that was running, but of memory, a GPU or a setting."""
    text = str(error)
    if isinstance(error, MemoryError) or NO_MEMORY.search(text) or REFUSAL in text:
        return True
    return bool(OF_DEVICE.search(text)) or type(error).__module__.startswith("torch._dynamo")


@contextmanager
def explain_errors(refused: type[Failure], advice: str = MORE_SHARDS) -> Iterator[None]:
    """Raise one line in place of three errors of torch.

    RunError if memory runs out, which `advice` says how to avoid. DeviceFailure if a GPU fails.
    `refused` if --deterministic lacks an operation, which is named.
    """
    try:
        yield
    except (MemoryError, RuntimeError) as error:
        text = " ".join(str(error).split())
        line = first_line(error)
        if isinstance(error, MemoryError) or NO_MEMORY.search(text):
            needed = re.split("(?<= free)[.]", line)[0]  # then torch describes its allocator
            raise RunError(f"out of memory ({brief(needed)}): {advice}") from error
        if OF_DEVICE.search(text):
            raise DeviceFailure(
                f"a GPU or a kernel on it failed ({brief(line)}): CUDA_LAUNCH_BLOCKING=1 in the"
                " environment shows which"
            ) from error
        if REFUSAL not in text:
            raise
        operation = text.partition(REFUSAL)[0].strip()
        raise refused(f"--deterministic: {operation} {REFUSAL} in torch") from error
