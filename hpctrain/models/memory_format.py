"""The memory format of networks: NHWC (torch's channels_last) or NCHW."""

from __future__ import annotations

import os

import torch
from torch import nn


def move_model(model: nn.Module, device: torch.device, channels_last: bool) -> nn.Module:
    """Move a model to the device and its 4-d weights to the memory format, NHWC or NCHW."""
    model.to(device)
    memory_format = torch.channels_last if channels_last else torch.contiguous_format
    for parameter in model.parameters():
        if parameter.dim() == 4:  # those of 3-d convolutions have no NHWC
            parameter.data = parameter.data.contiguous(memory_format=memory_format)
    return model


def crashing_in_nhwc(model: nn.Module) -> str:
    """Return the name of the first convolution that must not be trained in NHWC; "" if none.

    On CPUs with AVX2 and without AVX-512, oneDNN's weight gradient of a 1x1 convolution that has a
    stride, and fewer input channels than a vector has values, writes beyond its memory
    (https://github.com/uxlfoundation/oneDNN/issues/6035): the process crashes, hangs, or computes
    wrong gradients. Convolutions with padding or groups use other code.
    """
    for name, module in model.named_modules():
        if not isinstance(module, nn.Conv2d) or module.kernel_size != (1, 1):
            continue
        is_plain = module.groups == 1 and module.padding in ((0, 0), "valid")
        if is_plain and max(module.stride) > 1 and 1 < module.in_channels < 8:
            return name or type(module).__name__
    return ""


def has_avx2_only() -> bool:
    """Whether oneDNN uses AVX2, and no AVX-512, on this CPU."""
    limit = os.environ.get("ONEDNN_MAX_CPU_ISA", "")
    return limit.upper().startswith("AVX2") or torch.backends.cpu.get_cpu_capability() == "AVX2"
