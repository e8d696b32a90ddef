"""A surface of scripts/fuzz on which every trial goes wrong in another way."""

from __future__ import annotations

import os
import signal
import time

from hpctrain import UsageError
from scripts.fuzzing.surface import Case, Surface


def crash():
    os.kill(os.getpid(), signal.SIGSEGV)


def allocate():
    return len(bytearray(700 << 20))


def allocate_too_much():
    return len(bytearray(1 << 40))


def fail():
    return {}["key"]


def say_much():
    raise UsageError("input.h5 is corrupt:\nand so on")


def say_little():
    raise UsageError("it is corrupt")


def refuse():
    raise UsageError("input.h5 is corrupt")


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

    def make_cases(self):
        (self.folder / "input.h5").touch()
        done = self.folder.with_name("done")  # the folder is made anew after a crash

        def next_fault():
            number = done.stat().st_size if done.exists() else 0
            with done.open("ab") as file:
                file.write(b".")
            return (*SOUND, *FAULTS)[number]()

        path = self.folder / "input.h5"
        return [Case("all faults", path, path, next_fault, "same", ("input.h5",))]

    def controls(self):
        return []


class NotSound(Faults):
    """Refuses what was not mutated."""

    def make_cases(self):
        path = self.folder / "input.h5"
        path.touch()
        return [Case("input", path, path, refuse, "same", ("input.h5",))]

    def controls(self):
        return self.cases
