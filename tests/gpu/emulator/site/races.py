"""HPCTRAIN_EMULATED_GPU_RACES=1: torch's CUDA sanitizer is told of every kernel and copy, of all
threads. Two that touch the same memory on two streams, one of them writing, without an event
between them, are printed as RACE with the lines of Python that queued them, whatever came of it.
What a CUDA graph touches when it is launched is not seen.
"""

from __future__ import annotations

import ctypes
import sys
import threading
import traceback
from typing import Any

found: list[str] = []  # each place once


class Access(ctypes.Structure):
    """What one argument or result of a kernel touches."""

    _fields_ = (("start", ctypes.c_void_p), ("writes", ctypes.c_int), ("is_output", ctypes.c_int))


_Observer = ctypes.CFUNCTYPE(
    None, ctypes.c_char_p, ctypes.c_size_t, ctypes.POINTER(Access), ctypes.c_int
)
_kept: list[Any] = []  # what C calls, and what torch's trace calls


def watch(operators: ctypes.CDLL) -> None:
    """Look for races from now on."""
    from torch.cuda import _sanitizer

    mode = _sanitizer.CUDASanitizerDispatchMode()  # never entered: it registers what it hears of
    handler, lock = mode.event_handler, threading.RLock()

    def observe(name: bytes, stream: int, accesses: Any, count: int) -> None:
        touched = [accesses[i] for i in range(count)]
        written = {a.start for a in touched if a.writes}
        read = {a.start for a in touched} - written
        outputs = {a.start for a in touched if a.is_output}
        names = {a.start: [] for a in touched}
        with lock:
            races = handler._handle_kernel_launch(
                stream, read, written, outputs, name.decode(), names
            )
            for race in races:
                _tell(name.decode(), race)

    _kept.extend((mode, _Observer(observe)))
    operators.emulator_observe(_kept[-1])


def _tell(name: str, race: Exception) -> None:
    lines = [s for s in traceback.format_stack() if "torch/" not in s and "races.py" not in s]
    place = f"{name}\n{lines[-1] if lines else ''}"
    if place not in found:
        found.append(place)
        thread = threading.current_thread().name
        print("RACE", thread, str(race), "".join(lines[-3:]), file=sys.stderr, flush=True)
