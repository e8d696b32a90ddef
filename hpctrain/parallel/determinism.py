"""What the bits of a deterministic run depend on besides its plan, and what torch refuses there."""

from __future__ import annotations

import torch

from hpctrain.hardware import processor_name
from hpctrain.parallel.runtime import built_for

REFUSAL = "does not have a deterministic implementation"  # torch's words


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


def refusal(error: BaseException) -> str | None:
    """The operation that torch refused to run, in one line; None for any other error."""
    text = " ".join(str(error).split())
    if REFUSAL not in text:
        return None
    return f"--deterministic: {text.partition(REFUSAL)[0].strip()} {REFUSAL} in torch"
