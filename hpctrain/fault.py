"""Faults on request, for tests: a crash, a signal, a full disk or a stall at a chosen moment.

With ``HPCTRAIN_FAULT=checkpoint.renamed:kill:2`` in its environment, a process kills itself when it
passes the point ``checkpoint.renamed`` for the second time. ``usr1`` and the like are other signals
to itself. ``full`` raises the error of a full disk, once; ``stall`` waits until the variable is
removed or the process is killed.
"""

from __future__ import annotations

import errno
import os
import signal
import time


def fault(point: str) -> None:
    """Pass a point; do what HPCTRAIN_FAULT says if it names the point and the count is reached."""
    given = os.environ.get("HPCTRAIN_FAULT", "")
    if not given.startswith(f"{point}:"):
        return
    _, kind, left = f"{given}:1".split(":")[:3]
    now = f"{point}:{kind}:{max(int(left) - 1, 0)}"
    os.environ["HPCTRAIN_FAULT"] = now
    if left != "1":
        return
    match kind:
        case "full":
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        case "stall":
            while os.environ.get("HPCTRAIN_FAULT") == now:
                time.sleep(0.01)
        case _:
            os.kill(os.getpid(), signal.Signals[f"SIG{kind.upper()}"])
