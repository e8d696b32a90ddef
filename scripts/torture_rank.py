"""One rank of scripts/torture: hpctrain, with one fault injected at one moment.

Environment variables: TORTURE_PHASE, TORTURE_COUNT (the occurrence of the phase at which the fault
happens), TORTURE_RANK, TORTURE_FAULT and TORTURE_STRUCK (a file that is written when it happens).
Without TORTURE_PHASE, hpctrain runs unchanged.
"""

from __future__ import annotations

import contextlib
import os
import pkgutil
import signal
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from hpctrain.cluster import launched_rank

POINTS = {  # phase -> function; the fault may happen before each call of it
    "start": "hpctrain.training.train:set_up",
    "load": "hpctrain.data.loader:Loader._read_step",
    "step": "hpctrain.parallel.batchnorm:BatchNorms.merge",
    "evaluation": "hpctrain.tasks:Classification.evaluate",
    "evaluate": "hpctrain.tasks:Classification.evaluate",
    "writing": "hpctrain.models.weights:whole_file",  # a checkpoint has been begun
    "rename": "os:replace",  # of a checkpoint
    "finalize": "hpctrain.parallel.mpi:MPI.Finalize",
}
PHASE, FAULT = os.environ.get("TORTURE_PHASE"), os.environ.get("TORTURE_FAULT", "")
left = int(os.environ.get("TORTURE_COUNT", "1"))


def strike() -> None:
    """Count the occurrences of the phase, and cause the fault once, at the chosen one."""
    global left
    left -= 1
    if left:
        return
    Path(os.environ["TORTURE_STRUCK"]).write_text(repr(time.time()))
    if FAULT == "full disk":
        with open("filler", "wb") as file, contextlib.suppress(OSError):
            while True:
                file.write(b"\0" * 4096)
                file.flush()
        return
    name, _, target = FAULT.partition(" ")
    if FAULT == "STOP mpirun":  # stopped, and continued a second later by another process
        os.system(f"(kill -STOP {os.getppid()}; sleep 1; kill -CONT {os.getppid()}) &")
        return
    pid = os.getppid() if target == "mpirun" else os.getpid()
    os.kill(pid, getattr(signal, f"SIG{name}"))


def arm(phase: str) -> None:
    """Inject the fault into the function of its phase."""
    path, _, name = POINTS[phase].replace(":", ".").rpartition(".")
    owner: Any = pkgutil.resolve_name(path)
    original: Callable = getattr(owner, name)

    def struck(*arguments: Any, **named: Any) -> Any:
        if phase != "rename" or "checkpoints" in str(arguments[1]):
            strike()
        return original(*arguments, **named)

    @contextlib.contextmanager
    def struck_within(path: Path, *arguments: Any, **named: Any) -> Iterator[Any]:
        with original(path, *arguments, **named) as file:
            if "checkpoints" in str(path):
                strike()
            yield file

    if phase == "finalize":  # functions of mpi4py's MPI cannot be replaced
        mpi, owner = pkgutil.resolve_name("hpctrain.parallel.mpi"), _Copy(owner)
        mpi.MPI = owner
    setattr(owner, name, struck_within if phase == "writing" else struck)


class _Copy:
    """A proxy of a module whose functions can be replaced."""

    def __init__(self, module: Any) -> None:
        self._module = module

    def __getattr__(self, name: str) -> Any:
        return getattr(self._module, name)


if __name__ == "__main__":
    if PHASE and str(launched_rank()) == os.environ.get("TORTURE_RANK"):
        arm(PHASE)
    from hpctrain.__main__ import program

    sys.exit(program())
