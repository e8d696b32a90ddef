"""The first watch over a rank, until MPI runs and training/watchdog.py takes over.

A rank that stops or hangs while modules are imported or in MPI_Init leaves the others waiting for
it. A timer in C, which needs no interpreter, then ends each of them with its stacks on standard
error, and the launcher ends the rest.
"""

from __future__ import annotations

import faulthandler
import itertools
from collections.abc import Sequence

from hpctrain.config import Config, duration
from hpctrain.errors import UsageError

IMPORTS = 30.0  # seconds, besides --timeout


def watch_start(words: Sequence[str]) -> None:
    """End this process with code 1 and its stacks, unless the watchdog sets the timer anew within
    the --timeout that the command line gives.
    """
    faulthandler.dump_traceback_later(start_limit(words), exit=True, file=2)


def start_limit(words: Sequence[str]) -> float:
    """Seconds that starting may take. What is wrong with --timeout is for others to say."""
    text, flag = Config.timeout, "--timeout"
    for word, following in itertools.pairwise([*words, ""]):
        if word == flag or word.startswith(f"{flag}="):
            text = following if word == flag else word.partition("=")[2]
    try:
        return duration(text, flag) + IMPORTS
    except UsageError:
        return duration(Config.timeout, flag) + IMPORTS
