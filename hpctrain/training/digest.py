"""Digests: what a run is, bit by bit, in a line of text.

Every `--digest-every` steps each rank sums its weights, optimizer state and running statistics up
to 64 bits, on its device, so that nothing waits; a 24-bit part of that crosses in its slot of the
next step's message, and a rank that differs is named. Rank 0 records its digest.

The figures of all steps and evaluations are chained into a hash; together with the saved network
that is the digest at the end of a run. These are SHA-256 (FIPS 180-4).
"""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any

import torch

from hpctrain.errors import RunError
from hpctrain.models import as_bytes
from hpctrain.training.step import NETWORK, Trainer

SLOT_VALUES = 2**24 - 1  # whole numbers above zero that a float32 slot holds exactly
CHANGED = 2**24
WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}  # by bytes of a number
FACTOR = 0x9E3779B97F4A7C15 - 2**64  # odd; 2^64 / golden ratio, so that multiples look random
AT_ONCE = {"cpu": 1 << 16, "cuda": 1 << 24}  # words: 512 KiB of int64 stay in a core's cache


def _hash(tensors: Iterable[torch.Tensor]) -> Any:
    found = hashlib.sha256()
    for tensor in tensors:
        found.update(as_bytes(tensor).numpy().data)
    return found


def rank_digest(trainer: Trainer) -> torch.Tensor:
    """Of what all ranks must hold alike, weights, optimizer, running statistics, buffers and frozen
    parameters: an int64 on the device.
    """
    own = own_tensors(trainer)
    found = torch.zeros((), dtype=torch.int64, device=trainer.message.device)
    for name, tensor in trainer.state().items():
        if name not in own:
            found = found * FACTOR + checksum(tensor)
    return found


def own_tensors(trainer: Trainer) -> set[str]:
    """Names of what a rank may hold of its own, in `Trainer.state` and among all buffers."""
    norms, own = trainer.norms, set()
    if norms.mode == "local":
        own = {"norms.running", "norms.shift", "norms.updates"}
    for name, buffer in trainer.model.named_buffers():
        may_differ = norms.mode == "local" if norms.owns(buffer) else trainer.local_buffers
        if may_differ or name not in trainer.buffers:
            own.add(f"model.{name}")
    return own


def tensor_digests(trainer: Trainer) -> dict[str, int]:
    """The same tensor by tensor, weights by their parameters; waits for the device."""
    model, tensors = trainer.model, trainer.tensors()
    tensors = {name: tensor for name, tensor in tensors.items() if name not in NETWORK}
    named = (*model.named_parameters(), *model.named_buffers())
    tensors |= {f"model.{name}": tensor for name, tensor in named}
    own = own_tensors(trainer)
    return {name: int(checksum(t)) for name, t in tensors.items() if name not in own}


def checksum(tensor: torch.Tensor) -> torch.Tensor:
    """Sum over i of word i x ((i x FACTOR) | 1), modulo 2^64, of the tensor's words as they lie: an
    int64 on its device. Integers, so the order of addition does not matter; the factors are odd, so
    a single word that differs always shows, and several cancel by a chance of about 2^-64.
    """
    flat = tensor.detach().resolve_conj().resolve_neg().flatten()
    flat = torch.view_as_real(flat).flatten() if flat.is_complex() else flat
    words = flat.view(WORDS[flat.element_size()])
    found = torch.zeros((), dtype=torch.int64, device=tensor.device)
    step = AT_ONCE[tensor.device.type]
    for start in range(0, len(words), step):
        part = words[start : start + step]
        places = torch.arange(start, start + len(part), device=tensor.device)
        found += places.mul_(FACTOR).bitwise_or_(1).mul_(part).sum()
    return found


def slot_value(digest: torch.Tensor, changed: torch.Tensor | None = None) -> torch.Tensor:
    """The part of a digest that crosses in a slot: 1 ... 2^24 - 1; 0 is "none in this step", and
    CHANGED says that a rank's replay found what must not change, a bool.
    """
    value = digest.remainder(SLOT_VALUES) + 1
    return value if changed is None else torch.where(changed, CHANGED, value)


def as_hex(digest: int) -> str:
    """A digest as it is recorded: 16 digits."""
    return f"{digest % 2**64:016x}"


def check_digests(values: list[int], step: int) -> None:
    """RunError that names the ranks whose digest after `step` is not that of most ranks."""
    (usual, count), *others = Counter(values).most_common()
    if not others:
        return
    cause = "a fault of memory or GPU there, or something that changes the model outside the step"
    if 2 * count <= len(values):
        found = ", ".join(f"{value:06x}" for value in values)
        raise RunError(
            f"after step {step} the ranks did not hold the same weights (digests by rank: {found}),"
            f" and no more than half agree: {cause}"
        )
    odd = [rank for rank, value in enumerate(values) if value != usual]
    names = ", ".join(map(str, odd))
    raise RunError(
        f"after step {step} rank{'s' if len(odd) > 1 else ''} {names} of {len(values)} held"
        f" other weights than the rest (digest {values[odd[0]]:06x}, not {usual:06x}): {cause}"
    )


def chain(before: str, figures: Mapping[str, Any]) -> str:
    """The next link of the chain over a run's figures: hash of the last link and of `figures`."""
    return hashlib.sha256(f"{before}{json.dumps(figures, sort_keys=True)}".encode()).hexdigest()


def run_digest(trainer: Trainer, figures: str) -> str:
    """Of a whole run (hex): weights and buffers by name, optimizer state, the chain of figures."""
    memory = (t for name, t in trainer.tensors().items() if name.startswith("optimizer."))
    found = _hash(memory)
    for name, tensor in sorted(trainer.model.state_dict().items()):
        found.update(f"{name} {tuple(tensor.shape)} {tensor.dtype}".encode())
        found.update(_hash([tensor]).digest())
    found.update(figures.encode())
    return str(found.hexdigest())
