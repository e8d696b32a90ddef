"""torch's settings for a run, put back afterwards as they were.

Under ``--deterministic`` torch uses algorithms that give the same bits every time and refuses
operations that have none (https://docs.pytorch.org/docs/stable/notes/randomness.html); cuDNN does
not choose by timing, and single precision is computed as such (no TF32). The number of CPU threads
is set too, because oneDNN and MKL cut their sums by it.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

import torch

from hpctrain.hardware import processor_name


class Switches(NamedTuple):
    """What torch lets one choose, for the whole process."""

    algorithms: bool  # only deterministic ones
    warn_only: bool
    fill: bool  # new tensors with NaN: finds bugs, changes no result, takes time
    cudnn: bool  # only deterministic ones
    choose_by_timing: bool
    tf32: bool
    matmul: str


DETERMINISTIC = Switches(
    algorithms=True,
    warn_only=False,
    fill=False,
    cudnn=True,
    choose_by_timing=False,
    tf32=False,
    matmul="highest",
)
REFUSAL = "does not have a deterministic implementation"  # torch's words


@contextmanager
def torch_settings(deterministic: bool) -> Iterator[None]:
    """Restore threads, random generators and, with `deterministic`, torch's switches at the end."""
    threads, generator = torch.get_num_threads(), torch.get_rng_state()
    on_gpus = torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else []
    switches = _switches() if deterministic else None
    try:
        if deterministic:
            # Read when cuBLAS starts; older torch refuses to be deterministic without it.
            os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
            _set_switches(DETERMINISTIC)
        yield
    finally:
        if switches is not None:
            _set_switches(switches)
        torch.set_num_threads(threads)
        torch.set_rng_state(generator)
        if on_gpus:
            torch.cuda.set_rng_state_all(on_gpus)


# fill_uninitialized_memory is a property that torch adds to its module; the stubs do not know it.
def _switches() -> Switches:
    return Switches(
        torch.are_deterministic_algorithms_enabled(),
        torch.is_deterministic_algorithms_warn_only_enabled(),
        torch.utils.deterministic.fill_uninitialized_memory,  # type: ignore[attr-defined]
        torch.backends.cudnn.deterministic,
        torch.backends.cudnn.benchmark,
        torch.backends.cudnn.allow_tf32,
        torch.get_float32_matmul_precision(),
    )


def _set_switches(to: Switches) -> None:
    torch.use_deterministic_algorithms(to.algorithms, warn_only=to.warn_only)
    torch.utils.deterministic.fill_uninitialized_memory = to.fill  # type: ignore[attr-defined]
    torch.backends.cudnn.deterministic = to.cudnn
    torch.backends.cudnn.benchmark = to.choose_by_timing
    torch.backends.cudnn.allow_tf32 = to.tf32
    torch.set_float32_matmul_precision(to.matmul)


def hardware_key(device: torch.device) -> str:
    """What the bits depend on besides the plan: torch, processor and the instructions that torch
    uses on it; on a GPU its kind, CUDA and cuDNN too.
    """
    parts = [f"torch {torch.__version__}", processor_name()]
    parts.append(torch.backends.cpu.get_cpu_capability())
    if device.type == "cuda":
        parts.append(torch.cuda.get_device_name(device))
        parts.append(f"CUDA {torch.version.cuda}, cuDNN {torch.backends.cudnn.version()}")
    return ", ".join(parts)


def refusal(error: BaseException) -> str | None:
    """The operation that torch refused to run, in one line; None for any other error."""
    text = " ".join(str(error).split())
    if REFUSAL not in text:
        return None
    return f"--deterministic: {text.partition(REFUSAL)[0].strip()} {REFUSAL} in torch"
