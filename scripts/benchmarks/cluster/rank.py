"""The program that cluster_check runs on every rank; rank 0 writes the result as JSON.

    mpirun -n 2 python -m scripts.benchmarks.cluster.rank facts OUTPUT.json
    mpirun -n 2 python -m scripts.benchmarks.cluster.rank files OUTPUT.json PACK FOLDER

`paced` and `mortal` build the digits network with the weights of ``--model digits``. Training is
slowed down in the first launch of a run, but not with --resume.
"""

from __future__ import annotations

import json
import os
import platform
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import h5py
import numpy as np
from torch import nn

from hpctrain.data.packed import read_pack
from hpctrain.data.split import Split
from hpctrain.errors import RunError
from hpctrain.launcher import launched_rank, launched_size
from hpctrain.models import build
from hpctrain.parallel.mpi import (
    Comm,
    call_on_all,
    call_on_root,
    conclude,
    host_name,
    library,
    start_mpi,
)
from hpctrain.training.control import RunLock, is_locked

PACE = "HPCTRAIN_CHECK_PACE"  # environment variable: seconds added to a forward pass
LIFE = 20  # forward passes before the last rank is killed
FILES = 200  # small files per rank
ROWS = 256  # samples read at once


def paced(image_shape: tuple[int, int, int], classes: int, dies: bool = False) -> nn.Module:
    """Build the network for images of (H, W, C), with a pause in each forward pass."""
    network, forwards = build("digits", image_shape, classes), 0
    dies = dies and launched_rank() == (launched_size() or 1) - 1

    def delay(module: nn.Module, _: object) -> None:
        nonlocal forwards
        if module.training:
            time.sleep(float(os.environ.get(PACE, "0.1")))
            forwards += 1
            if dies and forwards > LIFE:
                os.kill(os.getpid(), signal.SIGKILL)

    if "--resume" not in sys.argv:
        network.register_forward_pre_hook(delay)
    return network


def mortal(image_shape: tuple[int, int, int], classes: int) -> nn.Module:
    """Build the network of `paced`, in which the last rank kills itself (SIGKILL)."""
    return paced(image_shape, classes, dies=True)


def facts(started: float) -> dict[str, Any]:
    """Describe this rank: its node, the MPI library, the network adapters."""
    sys_class = Path("/sys/class")
    ports = {
        f"{path.parts[-4]} {path.with_name('link_layer').read_text()} {path.read_text()}"
        for path in sys_class.glob("infiniband/*/ports/*/rate")
    }
    others = {path.parent.name for path in sys_class.glob("net/*/device")}  # no bridge, no loopback
    others |= {f"{path.name} (Slingshot)" for path in sys_class.glob("cxi/*")}
    return {
        "host": os.environ.get("SLURMD_NODENAME") or host_name(),
        "started": started,
        "MPI": library(),
        "system": f"{platform.system()} {platform.release()} {platform.machine()}",
        "network": " ".join(", ".join(sorted(ports | others)).split()),
    }


def files(comm: Comm, pack: str, folder: Path) -> dict[str, object]:
    """Return measurements of the file system, by name. Collective."""
    paths = [folder / f"small-{comm.rank}-{number}" for number in range(FILES)]
    ways: dict[str, Callable[[Path], object]] = {
        "create": lambda path: path.write_bytes(b"x" * 100),
        "stat": os.stat,
        "open and read": Path.read_bytes,
        "remove": os.unlink,
    }
    parts = comm.allgather(call_on_all(comm, lambda: read(comm, pack)))
    rates = [size / seconds / 1e6 for size, seconds in parts]
    total = sum(size for size, _ in parts) / max(seconds for _, seconds in parts) / 1e6
    found: dict[str, object] = {
        "read by all ranks, MB/s": round(total),
        "read by a rank, MB/s": f"{min(rates):,.0f} to {max(rates):,.0f}",
    }
    for name, way in ways.items():
        comm.Barrier()
        began = time.perf_counter()
        for path in paths:
            way(path)
        slowest = max(comm.allgather(time.perf_counter() - began))
        found[f"{name}, files/s of all ranks"] = round(comm.size * FILES / slowest)
    lock = RunLock()
    call_on_root(comm, lambda: lock.take(folder))
    held = comm.allgather(comm.rank == 0 or is_locked(folder))
    lock.release()
    found["lock of a run"] = "works" if all(held) else "NOT seen by all: never start a run twice"
    return found | {"locks of HDF5 (packs need none)": call_on_root(comm, lambda: locks(folder))}


def read(comm: Comm, path: str) -> tuple[int, float]:
    """Read this rank's part of the pack; return its bytes and the seconds. Collective.

    The pack is first dropped from the node's page cache. Raises RunError for wrong pixels.
    """
    with open(path, "rb") as file:
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    comm.Barrier()
    began, done = time.perf_counter(), 0
    with Split(read_pack(path), "train") as split:
        rows = np.array_split(np.arange(len(split)), comm.size)[comm.rank]
        pixels = np.empty((ROWS, *split.image_shape), np.uint8)
        for block in np.array_split(rows, -(-len(rows) // ROWS)):
            images = split.gather(block, pixels[: len(block)])
            if (images[:, 0, 0, 0] != block % 251).any():
                raise RunError(f"{path}: other pixels were read than were written")
            done += images.nbytes
    return done, time.perf_counter() - began


def locks(folder: Path) -> str:
    """Return "work", or why HDF5 cannot lock a file here."""
    try:
        with h5py.File(folder / "lock.h5", "w", locking=True) as file:
            file["a"] = 1
    except OSError as error:
        return f"fail: {error}"
    return "work"


def main(name: str, output: str, *words: str) -> int:
    """Run `facts` or `files` on this rank; return the exit code. Collective."""
    start = int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19])
    age = time.clock_gettime(time.CLOCK_BOOTTIME) - start / os.sysconf("SC_CLK_TCK")
    try:
        comm = start_mpi()
        if name == "facts":
            found: object = comm.allgather(facts(age))
        else:
            found = files(comm, words[0], Path(words[1]))
        if comm.rank == 0:
            Path(output).write_text(json.dumps(found))
    except BaseException as error:
        return conclude(error)
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
