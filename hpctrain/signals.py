"""Notices of the scheduler, caught from the first moment on: a handler only sets a flag.

SIGUSR2 and SIGUSR1 are what a batch script asks Slurm to send before the end. SIGTERM is a notice
where its sender then waits: Slurm at preemption (to the tasks of srun), or a person at a single
process. Under mpirun it is none: the ranks are killed a quarter of a second later.
"""

from __future__ import annotations

import signal
from types import FrameType

from hpctrain.launcher import under_mpirun

_noticed: list[int] = []


def listen() -> None:
    """Catch the notices from now on; harmless when repeated. In the main thread only."""
    for number in notices():
        signal.signal(number, _on_notice)


def notices() -> tuple[signal.Signals, ...]:
    """The signals that are a notice here."""
    always = (signal.SIGUSR2, signal.SIGUSR1)
    return always if under_mpirun() else (*always, signal.SIGTERM)


def noticed() -> str | None:
    """The name of the first notice that came, if one did."""
    return signal.Signals(_noticed[0]).name if _noticed else None


def ignore() -> None:
    """From now on nothing is left to save: this process ends by itself, with its own exit code.

    Launchers send SIGTERM to all other ranks once the first has ended with an exit code that is
    not 0, and `srun` would then give 143 (128 + SIGTERM) in place of our 75.
    """
    for number in (signal.SIGUSR2, signal.SIGUSR1, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)


def forget() -> None:
    """As if no notice had come, and let signals do what they do by default."""
    _noticed.clear()
    for number in (signal.SIGUSR2, signal.SIGUSR1, signal.SIGTERM):
        if signal.getsignal(number) is _on_notice:
            signal.signal(number, signal.SIG_DFL)


def _on_notice(number: int, frame: FrameType | None) -> None:
    _noticed.append(number)
