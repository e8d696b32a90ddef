"""A surface of scripts/fuzz on which every trial goes wrong in another way."""

from __future__ import annotations

import os
import signal
import time

from hpctrain.errors import UsageError
from scripts.fuzzing.surface import Surface, attempt, compared


def crash():
    os.kill(os.getpid(), signal.SIGSEGV)


def allocate():
    return len(bytearray(700 << 20))


def allocate_too_much():
    return len(bytearray(1 << 40))


def fail():
    return {}["key"]


def say_much():
    raise UsageError("input.h5 is damaged:\nand so on")


def say_little():
    raise UsageError("it is damaged")


def refuse():
    raise UsageError("input.h5 is damaged")


def give_another():
    return "other"


def give_the_same():
    return "same"


def leave():
    raise SystemExit(3)


def hang():
    time.sleep(600)


FAULTS = (crash, allocate, allocate_too_much, fail, say_much, say_little, give_another, leave, hang)
SOUND = (refuse, give_the_same)


class Faults(Surface):
    """All of these in turn."""

    name = "faults"

    def __init__(self, folder):
        super().__init__(folder)
        self.done = folder / "done"

    def control(self):
        return []

    def trial(self, draw):
        number = self.done.stat().st_size if self.done.exists() else 0
        with self.done.open("ab") as file:
            file.write(b".")
        action = (*SOUND, *FAULTS)[number]
        return action.__name__, compared(attempt(action, "input.h5"), "same")


class NotSound(Faults):
    """Refuses what was not mutated."""

    def control(self):
        return ["the sound input is refused"]
