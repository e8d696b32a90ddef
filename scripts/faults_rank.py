"""One rank of a run that scripts/faults breaks: hpctrain, with a fault when it passes a point.

The environment variable FAULTS is a JSON object: the rank, the point (hpctrain/fault.py), the
occurrence of the point at which the fault happens, the seconds after it, the fault, and a file that
is written when it happens. Without it, hpctrain runs unchanged.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sys
import threading
import time
from pathlib import Path

from hpctrain import fault
from hpctrain.cluster import launched_rank

GIVEN = json.loads(os.environ.get("FAULTS", "{}"))


def pass_point(point: str) -> None:
    """Take the place of hpctrain.fault.fault: cause the fault once, at the chosen occurrence."""
    if point == GIVEN["point"]:
        GIVEN["count"] -= 1
        if GIVEN["count"] == 0:
            if not GIVEN["delay"]:
                strike()
                return
            later = threading.Timer(GIVEN["delay"], strike)
            later.daemon = True
            later.start()


def strike() -> None:
    """Cause the fault."""
    Path(GIVEN["struck"]).write_text(repr(time.time()))
    name, _, target = GIVEN["fault"].partition(" ")
    if (name, target) == ("full", "disk"):
        with open("filler", "wb") as file, contextlib.suppress(OSError):
            while True:
                file.write(b"\0" * 4096)
                file.flush()
    elif (name, target) == ("STOP", "mpirun"):  # and continued a second later by another process
        os.system(f"(kill -STOP {os.getppid()}; sleep 1; kill -CONT {os.getppid()}) &")
    else:
        pid = os.getppid() if target == "mpirun" else os.getpid()
        os.kill(pid, signal.Signals[f"SIG{name}"])


if __name__ == "__main__":
    if GIVEN and launched_rank() == GIVEN["rank"]:
        fault.fault = pass_point  # before any module imports it
    from hpctrain.__main__ import program

    sys.exit(program())
