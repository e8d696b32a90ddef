"""The program that scripts/cluster_check runs on every rank; rank 0 writes the result as JSON.

    mpirun -n 2 python -m scripts.cluster_rank OUTPUT.json

`paced` and `mortal` build the digits network with the weights of ``--model digits``. Training is
slowed down in the first launch of a run, but not with --resume.
"""

from __future__ import annotations

import json
import os
import platform
import signal
import socket
import sys
import time
from pathlib import Path

from torch import nn

import hpctrain as hp
from hpctrain.cluster import launched_rank, launched_size
from hpctrain.parallel.mpi import conclude, library

PACE = 0.1  # seconds added to a forward pass
ADAPTERS = ("infiniband/*", "cxi/*")  # InfiniBand, Slingshot
LIFE = 20  # forward passes before the last rank is killed


def paced(image_shape: tuple[int, int, int], classes: int, dies: bool = False) -> nn.Module:
    """Build the network for images of (H, W, C), with a pause in each forward pass."""
    network = hp.build("digits", image_shape, classes)
    forwards = 0
    dies = dies and launched_rank() == (launched_size() or 1) - 1

    def delay(module: nn.Module, _: object) -> None:
        nonlocal forwards
        if module.training:
            time.sleep(PACE)
            forwards += 1
            if dies and forwards > LIFE:
                os.kill(os.getpid(), signal.SIGKILL)

    if "--resume" not in sys.argv:
        network.register_forward_pre_hook(delay)
    return network


def mortal(image_shape: tuple[int, int, int], classes: int) -> nn.Module:
    """Build the network of `paced`, in which the last rank kills itself (SIGKILL)."""
    return paced(image_shape, classes, dies=True)


def main(output: str) -> int:
    """Collect facts of all ranks: node, system, MPI library, seconds of the start. Collective."""
    start = int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19])
    age = time.clock_gettime(time.CLOCK_BOOTTIME) - start / os.sysconf("SC_CLK_TCK")
    adapters = sorted(path.name for name in ADAPTERS for path in Path("/sys/class").glob(name))
    facts = {
        "host": os.environ.get("SLURMD_NODENAME") or socket.gethostname(),
        "started": age,
        "MPI": library(),
        "system": f"{platform.system()} {platform.release()} {platform.machine()}",
        "network": ", ".join(adapters),
    }
    try:
        comm = hp.start_mpi()
        facts_by_rank = comm.allgather(facts)
        if comm.rank == 0:
            Path(output).write_text(json.dumps(facts_by_rank))
    except BaseException as error:
        return conclude(error)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
