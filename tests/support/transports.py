"""Every way of moving data between ranks, on host memory: for tests that run with each of them."""

from __future__ import annotations

from tests.support.api import open_transport
from tests.support.nccl import stand_in

MAKERS = {
    "host memory": lambda comm: open_transport(comm, "mpi"),
    "host memory, in pieces": lambda comm: open_transport(comm, "mpi", 256),
    "pinned": lambda comm: open_transport(comm, "host"),
    "pinned, in pieces": lambda comm: open_transport(comm, "host", 256),
    "device memory": lambda comm: open_transport(comm, "mpi-gpu"),
    "NCCL": lambda comm: open_transport(comm, "nccl", nccl=stand_in()),
}
