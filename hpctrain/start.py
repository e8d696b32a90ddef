"""The first watch over a rank, until MPI runs and training/watchdog.py takes over.

A rank that stops or hangs while modules are imported or in MPI_Init leaves the others waiting for
it. A timer in C, which needs no interpreter, then ends each of them with its stacks on standard
error, and the launcher ends the rest.
"""

from __future__ import annotations

import faulthandler
import re
from collections.abc import Sequence

IMPORTS = 30.0  # seconds, besides --timeout
USUAL = 1800.0  # --timeout where none can be told this early
UNITS = {"s": 1, "m": 60, "": 60, "h": 3600}


def watch_start(words: Sequence[str]) -> None:
    """End this process with code 1 and its stacks, unless the watchdog sets the timer anew within
    the --timeout that the command line gives.
    """
    faulthandler.dump_traceback_later(start_limit(words), exit=True, file=2)


def start_limit(words: Sequence[str]) -> float:
    """Seconds that starting may take. What is wrong with --timeout is for others to say."""
    given = re.search(r"(?:^|\0)--timeout[=\0](\d{1,6})([smh]?)(?:\0|$)", "\0".join(words))
    return (float(given[1]) * UNITS[given[2]] if given else USUAL) + IMPORTS
