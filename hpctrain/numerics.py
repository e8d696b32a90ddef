"""How torch computes: precision, deterministic algorithms, random generators.

GPUs can round the factors of products to TF32, 10 bits of mantissa. "default" is torch's default:
cuDNN's convolutions may use TF32, matrix products do not
(https://docs.pytorch.org/docs/stable/notes/cuda.html). With "tf32" both may, with "fp32" neither.
Unless bits must be reproducible, cuDNN times its algorithms for each shape and uses the fastest.

With ``--deterministic`` torch uses algorithms with bitwise reproducible results and refuses
operations that have none (https://docs.pytorch.org/docs/stable/notes/randomness.html), and cuDNN
does not choose by timing. TF32 is reproducible on the same kind of GPU, which is all that is
promised there, so "default" keeps its meaning. The number of CPU threads is set too, because oneDNN
and MKL split their sums by it.
"""

from __future__ import annotations

import os
import pickle
import random
import sys
from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager

import numpy as np
import torch

#: Torch's modes for operations that have no deterministic form.
OFF = 0
WARN = 1
ERROR = 2


def seed_torch(key: int, device: torch.device) -> None:
    """Seed the generators that a model on this device draws from (dropout).

    `torch.manual_seed` is not used: it spends 0.3 ms per call on devices that do not exist. Neither
    is `torch.cuda.manual_seed`, which seeds the current GPU of the thread, whichever that is.
    """
    torch.default_generator.manual_seed(key)
    if device.type == "cuda":
        torch.cuda.default_generators[device.index].manual_seed(key)


def fork_rng(device: torch.device) -> AbstractContextManager[None]:
    """Return a context that restores the generators of `seed_torch` at its end."""
    gpus = [device] if device.type == "cuda" else []
    return torch.random.fork_rng(gpus)


@contextmanager
def watch_generators(device: torch.device) -> Iterator[list[str]]:
    """Yield a list to which the process-wide generators that the block has changed are added.

    They are restored at its end, torch's among them on this device: libraries may draw from them,
    whose states ranks do not share and no checkpoint holds.
    """
    changed: list[str] = []
    before = generator_states(device)
    python_state = random.getstate()
    numpy_state = np.random.get_state()
    with fork_rng(device):
        try:
            yield changed
        finally:
            after = generator_states(device)
            changed += [name for name, state in before.items() if after[name] != state]
            random.setstate(python_state)
            np.random.set_state(numpy_state)


def generator_states(device: torch.device) -> dict[str, bytes]:
    """Return the states of the generators of this process, by what they belong to."""
    states = {
        "random": pickle.dumps(random.getstate()),
        "numpy.random": pickle.dumps(np.random.get_state(legacy=False)),
        "torch's default generator": torch.default_generator.get_state().numpy().tobytes(),
    }
    if device.type == "cuda":
        generator = torch.cuda.default_generators[device.index]
        states["that of the GPU"] = generator.get_state().numpy().tobytes()
    return states


@contextmanager
def torch_flags(
    precision: str,
    deterministic: bool = False,
    benchmark: bool = True,
) -> Iterator[None]:
    """Set torch's backend flags for this --precision in a context.

    Algorithms are `deterministic`, or chosen by timing (`benchmark`). At the end the flags, the
    number of threads and the random generators are restored.
    """
    cudnn = torch.backends.cudnn
    flags = (
        (torch.utils.deterministic, "fill_uninitialized_memory", False),
        (cudnn, "deterministic", deterministic),
        (cudnn, "benchmark", benchmark and not deterministic),
        (cudnn, "allow_tf32", precision in ("default", "tf32")),  # for "bf16", autocast does more
    )
    gpus = range(0)
    if torch.cuda.is_initialized():
        gpus = range(torch.cuda.device_count())
    with ExitStack() as stack:
        stack.enter_context(torch.random.fork_rng(gpus))
        stack.callback(torch.set_num_threads, torch.get_num_threads())
        stack.callback(torch.set_float32_matmul_precision, torch.get_float32_matmul_precision())
        torch.set_float32_matmul_precision("high" if precision == "tf32" else "highest")
        stack.callback(_set_debug_mode, torch.get_deterministic_debug_mode())
        if deterministic:
            # Read when cuBLAS starts; older torch refuses to be deterministic without it.
            os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        _set_debug_mode(ERROR if deterministic else OFF)
        for owner, name, value in flags:
            stack.callback(setattr, owner, name, getattr(owner, name))
            setattr(owner, name, value)
        yield


@contextmanager
def without_benchmark() -> Iterator[None]:
    """Let cuDNN choose its algorithms without timing them, for shapes that occur only once."""
    cudnn = torch.backends.cudnn
    before = cudnn.benchmark
    cudnn.benchmark = False
    try:
        yield
    finally:
        cudnn.benchmark = before


def _set_debug_mode(mode: int) -> None:
    """Set torch's deterministic mode: `OFF`, `WARN` or `ERROR`."""
    if "torch._inductor.config" in sys.modules:  # the compiler has a switch of its own
        torch.use_deterministic_algorithms(mode != OFF, warn_only=mode == WARN)
    else:  # the same without importing the compiler, which takes longer than importing torch
        torch.set_deterministic_debug_mode(mode)
