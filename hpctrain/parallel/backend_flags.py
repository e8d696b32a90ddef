"""torch's backend flags for a run, restored afterwards, and what bits depend on besides the plan.

GPUs can round the factors of products to TF32, 10 bits of mantissa. "default" is what torch does by
default: cuDNN's convolutions may, matrix products do not
(https://docs.pytorch.org/docs/stable/notes/cuda.html). With "tf32" both may, with "fp32" neither.
Where bits need not repeat, cuDNN tries its algorithms for each shape and takes the fastest.

Under ``--deterministic`` torch uses algorithms that give the same bits every time and refuses
operations that have none (https://docs.pytorch.org/docs/stable/notes/randomness.html), and cuDNN
does not choose by timing. TF32 repeats its bits on the same kind of GPU, which is all that is
promised there, so "default" stays what it is.
The number of CPU threads is set too, because oneDNN and MKL cut their sums by it.
"""

from __future__ import annotations

import os
import platform
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

import torch

from hpctrain.errors import Failure
from hpctrain.parallel.runtime import built_for


class BackendFlags(NamedTuple):
    """What torch lets one choose, for the whole process."""

    algorithms: bool  # only deterministic ones
    warn_only: bool
    fill: bool  # new tensors with NaN: finds bugs, changes no result, takes time
    cudnn: bool  # only deterministic ones
    choose_by_timing: bool
    tf32: bool
    matmul: str


def chosen(precision: str, deterministic: bool, benchmark: bool) -> BackendFlags:
    """The switches for a --precision; of "bf16", torch's autocast does the rest."""
    return BackendFlags(
        algorithms=deterministic,
        warn_only=False,
        fill=False,
        cudnn=deterministic,
        choose_by_timing=benchmark and not deterministic,
        tf32=precision in ("default", "tf32"),
        matmul="high" if precision == "tf32" else "highest",
    )


@contextmanager
def torch_settings(
    precision: str, deterministic: bool = False, benchmark: bool = True
) -> Iterator[None]:
    """Compute in this --precision, with algorithms that are `deterministic` or chosen `benchmark`;
    at the end put back torch's switches, threads and random generators.
    """
    threads, generator = torch.get_num_threads(), torch.get_rng_state()
    on_gpus = torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else []
    switches = _current_flags()
    try:
        if deterministic:
            # Read when cuBLAS starts; older torch refuses to be deterministic without it.
            os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        _set_flags(chosen(precision, deterministic, benchmark))
        yield
    finally:
        _set_flags(switches)
        torch.set_num_threads(threads)
        torch.set_rng_state(generator)
        if on_gpus:
            torch.cuda.set_rng_state_all(on_gpus)


# fill_uninitialized_memory is a property that torch adds to its module; the stubs do not know it.
def _current_flags() -> BackendFlags:
    return BackendFlags(
        torch.are_deterministic_algorithms_enabled(),
        torch.is_deterministic_algorithms_warn_only_enabled(),
        torch.utils.deterministic.fill_uninitialized_memory,  # type: ignore[attr-defined]
        torch.backends.cudnn.deterministic,
        torch.backends.cudnn.benchmark,
        torch.backends.cudnn.allow_tf32,
        torch.get_float32_matmul_precision(),
    )


def _set_flags(to: BackendFlags) -> None:
    if "torch._inductor.config" in sys.modules:  # the compiler has a switch of its own
        torch.use_deterministic_algorithms(to.algorithms, warn_only=to.warn_only)
    else:  # the same without importing the compiler, which takes longer than importing torch
        wanted = "warn" if to.warn_only else "error"
        torch.set_deterministic_debug_mode(wanted if to.algorithms else "default")
    torch.utils.deterministic.fill_uninitialized_memory = to.fill  # type: ignore[attr-defined]
    torch.backends.cudnn.deterministic = to.cudnn
    torch.backends.cudnn.benchmark = to.choose_by_timing
    torch.backends.cudnn.allow_tf32 = to.tf32
    torch.set_float32_matmul_precision(to.matmul)


REFUSAL = "does not have a deterministic implementation"  # torch's words


def processor_name() -> str:
    """The processor's name, family and model: "AMD EPYC 9654 96-Core Processor (25.17)"."""
    found: dict[str, str] = {}
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as file:
            for line in file:
                name, _, value = line.partition(":")
                found.setdefault(name.strip(), value.strip())
    except OSError:
        pass
    if "model name" not in found:
        return platform.processor() or platform.machine()
    return f"{found['model name']} ({found.get('cpu family', '?')}.{found.get('model', '?')})"


def hardware_key(device: torch.device) -> str:
    """What the bits depend on besides the plan: torch, processor and the instructions that torch
    uses on it; on a GPU its kind, CUDA and cuDNN (ROCm and MIOpen) too.
    """
    parts = [f"torch {torch.__version__}", processor_name()]
    parts.append(torch.backends.cpu.get_cpu_capability())
    if device.type == "cuda":
        parts.append(torch.cuda.get_device_name(device))
        name = "MIOpen" if torch.version.hip else "cuDNN"
        parts.append(f"{built_for()}, {name} {torch.backends.cudnn.version()}")
    return ", ".join(parts)


@contextmanager
def name_refused_operation(kind: type[Failure]) -> Iterator[None]:
    """An operation that torch refuses to run under --deterministic becomes one line, an error of
    this kind.
    """
    try:
        yield
    except RuntimeError as error:
        text = " ".join(str(error).split())
        if REFUSAL not in text:
            raise
        refused = f"{text.partition(REFUSAL)[0].strip()} {REFUSAL} in torch"
        raise kind(f"--deterministic: {refused}") from error
