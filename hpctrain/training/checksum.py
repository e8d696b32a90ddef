"""A checksum of the bits of a tensor, computed on its device."""

from __future__ import annotations

import torch
from torch import Tensor

WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32}  # by element size; others: int64
FACTOR = 0x9E3779B97F4A7C15 - 2**64  # odd; 2^64 / golden ratio, so that multiples look random
AT_ONCE = {"cpu": 1 << 16, "cuda": 1 << 24}  # words: 512 KiB of int64 stay in a core's cache


def tensor_checksum(tensor: Tensor) -> Tensor:
    """Return the sum over i of word i x ((i x FACTOR) | 1), modulo 2^64, as an int64 on the device.

    The words are the bits of the elements, in the order of `flatten`. The order of additions does
    not matter, since they are integers. The factors are odd, so a single word that differs always
    changes the sum; several cancel with a probability of about 2^-64.
    """
    flat = tensor.detach().resolve_conj().resolve_neg().contiguous().flatten()
    words = flat.view(WORDS.get(flat.element_size(), torch.int64))
    total = torch.zeros((), dtype=torch.int64, device=tensor.device)
    step = AT_ONCE[tensor.device.type]
    for start in range(0, len(words), step):
        part = words[start : start + step]
        places = torch.arange(start, start + len(part), device=tensor.device)
        total += places.mul_(FACTOR).bitwise_or_(1).mul_(part).sum()
    return total
