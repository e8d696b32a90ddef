"""The GPUs of the ranks of a job, and the transport between them."""

from __future__ import annotations

import ctypes
import os
import socket
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from hpctrain.errors import UsageError
from hpctrain.text import counted


class RankDevice(NamedTuple):
    """The device of one rank."""

    host: str
    gpu: str = ""  # its UUID; empty: computes on the CPU
    nccl: str = ""  # torch's, such as "NCCL 2.29.7"; empty = none that can be called
    bus: str = ""  # its PCI address, which slices of one GPU (MIG) share

    @classmethod
    def find(cls, device: torch.device) -> RankDevice:
        """Return the device of this rank, which computes on `device`.

        NCCL compares PCI addresses (ncclCommInitRank), RCCL tells partitions of a GPU apart.
        """
        host = socket.gethostname()
        if device.type == "cpu":
            return cls(host)
        gpu: Any = torch.cuda.get_device_properties(device)  # torch's stub lacks the address
        uuid = str(gpu.uuid)
        if torch.version.hip:
            bus = uuid
        else:
            bus = f"{gpu.pci_domain_id:04x}:{gpu.pci_bus_id:02x}:{gpu.pci_device_id:02x}"
        return cls(host, uuid, nccl_version(), bus)


def load_nccl(path: str = "") -> ctypes.CDLL:
    """Return the NCCL or RCCL at `path`, or that which torch has loaded. Raises OSError."""
    if path:
        return ctypes.CDLL(path)
    library = "libtorch_hip.so" if torch.version.hip else "libtorch_cuda.so"  # or what it needs
    return ctypes.CDLL(library, os.RTLD_NOLOAD)


def nccl_version() -> str:
    """Return name and version of torch's NCCL, such as "NCCL 2.29.7".

    It is empty if torch was built without NCCL, or with one whose functions nobody else can call.
    """
    try:
        version = ".".join(map(str, torch.cuda.nccl.version()[:3]))
        if not hasattr(load_nccl(), "ncclAllReduce"):
            return ""
    except (AttributeError, OSError, RuntimeError):
        return ""
    if torch.version.hip:
        return f"RCCL {version}"
    return f"NCCL {version}"


class ChosenTransport(NamedTuple):
    """The transport of all ranks."""

    name: str  # of a `Transport`
    reason: str
    note: str = ""  # for the user, if ranks share GPUs or NCCL cannot be used


def choose_transport(ranks: Sequence[RankDevice], wanted: str = "auto") -> ChosenTransport:
    """Choose the transport for all ranks from their devices: NCCL where every rank can use it.

    Raises UsageError if the `wanted` one is not possible, and if only some ranks have a GPU: these
    round differently, so weights that each rank updates would drift apart.
    """
    without = [
        f"rank {rank} ({device.host})" for rank, device in enumerate(ranks) if not device.gpu
    ]
    if wanted in ("nccl", "mpi-gpu") and without:
        raise UsageError(f"--reduce {wanted} is for GPUs: {without[0]} has none")
    if len(without) == len(ranks):
        return ChosenTransport("mpi", "all ranks compute on CPUs")
    if without:
        raise UsageError(
            f"{len(without)} of {len(ranks)} ranks see no GPU, such as {without[0]}:"
            " weights would differ; give every rank a GPU, or all --device cpu"
        )
    obstacle = find_nccl_obstacle(ranks)
    if wanted == "nccl" and obstacle:
        raise UsageError(f"--reduce nccl: {obstacle}")
    shared = find_shared_gpu(ranks)
    if wanted != "auto":
        return ChosenTransport(wanted, "asked for", shared)
    if len(ranks) == 1:
        return ChosenTransport("none", "one rank", shared)
    if obstacle:
        return ChosenTransport(
            "host", obstacle, shared or f"{obstacle}: sums pass through host memory"
        )
    return ChosenTransport("nccl", "every rank has a GPU of its own", shared)


def find_nccl_obstacle(ranks: Sequence[RankDevice]) -> str:
    """Return why ranks that have GPUs cannot use NCCL together; "" if they can."""
    for rank, device in reversed([*enumerate(ranks)]):
        if not device.nccl:
            return f"torch on rank {rank} ({device.host}) has no NCCL, or hides its functions"
        if device.nccl != ranks[0].nccl:
            return f"{ranks[0].nccl} on rank 0, {device.nccl} on rank {rank} ({device.host})"
    for host, devices in devices_by_host(ranks).items():
        shared = find_shared_gpu(devices)
        if shared:
            return shared
        buses = {device.bus for device in devices}
        if len(buses) < len(devices):
            whole = counted(len(buses), "GPU")
            return (
                f"{len(devices)} ranks have slices of {whole} of {host} (MIG), which NCCL refuses"
            )
    return ""


def find_shared_gpu(ranks: Sequence[RankDevice]) -> str:
    """Return on which host, the first, several ranks share a GPU; "" if on none."""
    for host, devices in devices_by_host(ranks).items():
        gpus = {device.gpu for device in devices}
        if len(gpus) < len(devices):
            return f"{len(devices)} ranks share {counted(len(gpus), 'GPU')} of {host}"
    return ""


def devices_by_host(ranks: Sequence[RankDevice]) -> dict[str, list[RankDevice]]:
    """Return the devices of each host, hosts and devices in the order of ranks."""
    hosts: dict[str, list[RankDevice]] = {}
    for device in ranks:
        hosts.setdefault(device.host, []).append(device)
    return hosts
