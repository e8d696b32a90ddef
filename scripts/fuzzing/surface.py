"""What all surfaces share: how a trial is done in this process, and what counts as right."""

from __future__ import annotations

import abc
import contextlib
import importlib
import io
import random
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

from hpctrain.cli import COMMANDS, parse
from hpctrain.errors import Failure

EQUAL, OTHER, REFUSED, WRONG = "equal", "other", "refused", "wrong"


class Outcome(NamedTuple):
    """What became of a mutated input: EQUAL to what the sound one gives, OTHER where nothing could
    tell, REFUSED in one line, or WRONG.
    """

    kind: str
    text: str = ""


class Surface(abc.ABC):
    """One kind of input. Its constructor makes the sound ones in `folder` and what they give."""

    name: ClassVar[str]
    weight: ClassVar[float] = 1.0  # its part of all inputs

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        folder.mkdir(parents=True, exist_ok=True)

    @abc.abstractmethod
    def trial(self, draw: random.Random) -> tuple[str, Outcome]:
        """What was done to which input, and what became of it."""

    @abc.abstractmethod
    def control(self) -> list[str]:
        """What is wrong although nothing was mutated."""


def attempt(action: Callable[[], Any], *names: str) -> Outcome | Any:
    """What `action` gives; REFUSED where it raises an error in one line, maybe with a list of
    files, that holds one of `names`, as what was printed may too; WRONG where it raises anything
    else.
    """
    printed = io.StringIO()
    try:
        with contextlib.redirect_stdout(printed), contextlib.redirect_stderr(printed):
            return action()
    except Failure as error:
        text = str(error)
        listed = all(line.startswith("  ") for line in text.splitlines()[1:])
        if not listed or len(text) > 2000:
            return Outcome(WRONG, f"more than one line: {text[:300]!r}")
        if not any(name in text + printed.getvalue() for name in names):
            return Outcome(WRONG, f"names none of {', '.join(names)}: {text}")
        return Outcome(REFUSED, text)
    except (Exception, SystemExit) as error:
        frames = traceback.extract_tb(error.__traceback__)
        own = [f"{Path(f.filename).name}:{f.lineno}" for f in frames if "/hpctrain/" in f.filename]
        where = " < ".join(reversed(own[-3:]))
        return Outcome(WRONG, f"{type(error).__name__} at {where}: {str(error)[:200]}")


def compared(found: Outcome | Any, sound: Any, may_differ: bool = False) -> Outcome:
    """The outcome of a trial that gave `found`, where the sound input gives `sound`."""
    if isinstance(found, Outcome):
        return found
    if found == sound:
        return Outcome(EQUAL)
    if may_differ:
        return Outcome(OTHER)
    return Outcome(WRONG, f"another result without an error: {str(found)[:150]}")


def run_command(*words: str) -> tuple[int, str]:
    """``hpctrain WORDS`` in this process: exit code and what was printed. Raises what it raises."""
    name, settings = parse(list(words))
    printed = io.StringIO()
    try:
        with contextlib.redirect_stdout(printed):
            code = importlib.import_module(COMMANDS[name].module).main(settings)
    finally:
        print(printed.getvalue(), end="")  # for `attempt`
    return int(code), printed.getvalue()


def alone() -> None:
    """Let the subcommands of this process use a communicator that needs no freeing."""
    from mpi4py import MPI

    for name in ("training.train", "inference.evaluate", "inference.predict"):
        module: Any = importlib.import_module(f"hpctrain.{name}")
        module.start_mpi = lambda: MPI.COMM_SELF
