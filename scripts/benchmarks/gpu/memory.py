"""Device memory: the message is one block, of plain device memory if CuPy allocates it.

Also checks that the loader's batches on the GPU have the same bits as on the CPU.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator

import torch

from hpctrain.parallel.device import memory_of
from scripts.benchmarks.gpu.case import (
    Case,
    Result,
    attempt,
    first_batches,
    made_pack,
    not_run,
    ready,
    shown,
)

# Attributes of cuPointerGetAttribute, CUDA Driver API, "Unified Addressing".
MEMORY_TYPE, IS_MANAGED, IS_LEGACY_IPC_CAPABLE, MEMPOOL_HANDLE = 2, 8, 10, 17
DEVICE_MEMORY = 2  # CU_MEMORYTYPE_DEVICE
PLAIN = {"memory type": DEVICE_MEMORY, "managed": 0, "legacy IPC": 1, "pool": 0}
STEPS = 3


def message(case: Case) -> Iterator[Result]:
    """Check that parameters are views of the weights and gradients exist only in the message."""
    pack = made_pack(case, 64, (28, 28, 1))
    job = ready(case, "--data", pack, "--batch-size", "32")
    found = job.trainer.message
    for batches in first_batches(job, 2):
        job.trainer.step(batches, 32)  # code that replaces a view does so in a step
    tensor = found.tensor
    parameters = [p for p in job.trainer.model.parameters() if p.requires_grad]
    inside = sum(within(p, found.weights) and p.grad is None for p in parameters)
    what = "every parameter lies in the weights, its gradient in the message alone"
    yield shown(what, inside == len(parameters), f"{inside} of {len(parameters)}", "all")
    what = "message outside of torch's caching allocator"
    if memory_of(tensor.device)[0] != "cupy":
        yield not_run(what, "CuPy does not allocate it")
        return
    weights = job.trainer.message.weights
    good = not in_torch_pool(tensor) and in_torch_pool(weights)
    places = {True: "torch's", False: "outside"}
    value = f"message {places[in_torch_pool(tensor)]}, weights {places[in_torch_pool(weights)]}"
    yield shown(what, good, value, "outside, torch's")


def memory(case: Case) -> Iterator[Result]:
    """Check that the message is plain device memory and that batches equal those on the CPU."""
    what = "message is plain cudaMalloc memory"
    if memory_of(torch.empty(0, device=case.device).device)[0] != "cupy":
        yield not_run(what, "CuPy does not allocate it")
    else:
        yield attempt(what, plain_memory, case)
    flags = ("--flip", "--shift", "3", "--normalize", "pack")
    pack = made_pack(case, 101, (40, 36, 3))
    for name, more in (("plain", ()), ("flipped, shifted, normalised", flags)):
        what = f"batches as on the CPU, bit by bit: {name}"
        here, there = (batches(case, pack, device, *more) for device in (case.device, "cpu"))
        equal = sum(map(torch.equal, here, there))
        yield shown(what, equal == len(there), f"{equal} of {len(there)}", "all", n=len(there))
    other = batches(case, pack, "cpu", *flags, "--seed", "1")
    equal = sum(map(torch.equal, here, other))
    yield shown("control: batches of another seed", equal == 0, f"{equal} equal", "none")


def batches(case: Case, pack: str, device: str, *flags: str) -> list[torch.Tensor]:
    """Return images and labels of the first steps on `device`, copied to the CPU."""
    words = ["--data", pack, "--model", "resnet18", "--batch-size", "32", *flags]
    job = ready(case, *words, device=device)
    found = [batch for step in first_batches(job, STEPS) for batch in step]
    return [tensor.cpu() for batch in found for tensor in (batch.images, batch.targets)]


def within(part: torch.Tensor, whole: torch.Tensor) -> bool:
    """Whether a dense tensor lies within another tensor's memory."""
    first = part.data_ptr() - whole.data_ptr()
    return 0 <= first <= whole.nbytes - part.nbytes


def in_torch_pool(tensor: torch.Tensor) -> bool:
    """Whether the memory is in a segment of torch's caching allocator."""
    place = tensor.data_ptr()
    return any(
        segment["address"] <= place < segment["address"] + segment["total_size"]
        for segment in torch.cuda.memory_snapshot()
    )


def plain_memory(what: str, case: Case) -> Result:
    """Check the driver's attributes of the message's memory, with pinned memory as a control."""
    job = ready(case, "--data", made_pack(case, 32, (28, 28, 1)), "--batch-size", "32")
    found = attributes(job.trainer.message.tensor.data_ptr())
    control = attribute(pinned_memory().data_ptr(), MEMORY_TYPE) != DEVICE_MEMORY
    good = found == PLAIN and control
    value = ", ".join(f"{name} {number}" for name, number in found.items())
    return shown(what, good, value, ", ".join(f"{k} {v}" for k, v in PLAIN.items()))


def pinned_memory() -> torch.Tensor:
    """Return host memory that is registered with the driver."""
    return torch.zeros(1024, pin_memory=True)


def attributes(place: int) -> dict[str, int]:
    """Return the driver's attributes of the memory at an address."""
    numbers = (MEMORY_TYPE, IS_MANAGED, IS_LEGACY_IPC_CAPABLE, MEMPOOL_HANDLE)
    return dict(zip(PLAIN, (attribute(place, number) for number in numbers), strict=True))


def attribute(place: int, number: int) -> int:
    """Return the int, bool or handle that cuPointerGetAttribute gives. Raises RuntimeError."""
    driver = ctypes.CDLL("libcuda.so.1")
    value = ctypes.c_uint64(0)
    code = driver.cuPointerGetAttribute(
        ctypes.byref(value), ctypes.c_int(number), ctypes.c_uint64(place)
    )
    if code:
        raise RuntimeError(f"cuPointerGetAttribute {number}: CUDA error {code}")
    return value.value
