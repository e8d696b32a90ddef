"""One rank of scripts/torture: hpctrain, with one fault at one moment.

From the environment: TORTURE_PHASE, TORTURE_COUNT (which time the phase begins), TORTURE_RANK,
TORTURE_FAULT and TORTURE_STRUCK (the file that tells when it happened). Without TORTURE_PHASE it is
hpctrain alone.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from hpctrain.launcher import launched_rank

PHASE, FAULT = os.environ.get("TORTURE_PHASE"), os.environ.get("TORTURE_FAULT", "")
left = int(os.environ.get("TORTURE_COUNT", "1"))


def strike() -> None:
    """The fault, once, when its time has come."""
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
    if FAULT == "STOP mpirun":  # stopped, and continued a second later by someone else
        os.system(f"(kill -STOP {os.getppid()}; sleep 1; kill -CONT {os.getppid()}) &")
        return
    pid = os.getppid() if target == "mpirun" else os.getpid()
    os.kill(pid, getattr(signal, f"SIG{name}"))


def before(owner: Any, name: str) -> None:
    """Strike before each call of owner.name."""
    original: Callable = getattr(owner, name)

    def struck(*arguments: Any, **named: Any) -> Any:
        strike()
        return original(*arguments, **named)

    setattr(owner, name, struck)


def arm() -> None:
    """Put the fault into its phase."""
    if PHASE == "start":
        import hpctrain.training.train as train

        before(train, "set_up")
    elif PHASE == "load":
        from hpctrain.data.loader import Loader

        before(Loader, "_read_step")
    elif PHASE == "step":
        from hpctrain.parallel.batchnorm import BatchNorms

        before(BatchNorms, "merge")
    elif PHASE in ("evaluation", "evaluate"):
        from hpctrain.inference.tasks import Classification

        before(Classification, "judge")
    elif PHASE == "writing":
        from hpctrain.training import checkpoint

        original_content = checkpoint.content

        def half(*arguments: Any) -> Any:
            for number, part in enumerate(original_content(*arguments)):
                if number == 1:  # the header is written
                    strike()
                yield part

        checkpoint.content = half
    elif PHASE == "pack":
        from hpctrain.data.packing import decode

        before(decode, "show_image")
    elif PHASE == "rename":
        original = os.replace

        def struck(source: Any, target: Any) -> None:
            if "checkpoints" in str(Path(target)):
                strike()
            original(source, target)

        os.replace = struck
    elif PHASE == "finalize":
        from hpctrain.parallel import mpi

        class Last:
            """MPI, but for the moment before its end."""

            def __getattr__(self, name: str) -> Any:
                return getattr(real, name)

            def Finalize(self) -> None:
                strike()
                real.Finalize()

        real, mpi.MPI = mpi.MPI, Last()


if __name__ == "__main__":
    if PHASE and str(launched_rank()) == os.environ.get("TORTURE_RANK"):
        arm()
    from hpctrain.__main__ import program

    sys.exit(program())
