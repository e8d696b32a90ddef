"""What all surfaces share: sound inputs, trials of their mutations, and what counts as right."""

from __future__ import annotations

import abc
import contextlib
import importlib
import io
import random
import shutil
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

from hpctrain.cli import COMMANDS, parse
from hpctrain.errors import Failure
from scripts.fuzzing.mutations import mutate_file

EQUAL, OTHER, REFUSED, WRONG = "equal", "other", "refused", "wrong"


class Outcome(NamedTuple):
    """What became of a mutated input: EQUAL to what the sound one gives, OTHER where nothing could
    tell, REFUSED in one line, or WRONG.
    """

    kind: str
    text: str = ""


class Case(NamedTuple):
    """A sound file, and what is done with its mutation at `target`."""

    what: str
    sound: Path
    target: Path
    use: Callable[[], Any]
    expected: Any  # result of `use` for the sound file
    names: tuple[str, ...]  # one of which an error must hold
    may_differ: bool = False  # nothing in the file tells that it was changed
    weight: float = 1.0  # its part of this surface's trials


class Surface(abc.ABC):
    """One kind of input, in a new folder."""

    name: ClassVar[str]
    weight: ClassVar[float] = 1.0  # its part of all inputs
    head: ClassVar[int] = 4096  # bytes of a file in which half of all mutations lie

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        with contextlib.redirect_stderr(io.StringIO()):
            self.cases: Sequence[Case] = self.make_cases()

    @abc.abstractmethod
    def make_cases(self) -> Sequence[Case]:
        """Make the sound inputs in `folder`."""

    def controls(self) -> Sequence[Case]:
        """The cases that are tried without any mutation first."""
        return self.cases

    def control(self) -> list[str]:
        """What is wrong although nothing was mutated."""
        found = [(case, self.attempt(case, case.sound.read_bytes())) for case in self.controls()]
        return [f"{case.what}: {result}" for case, result in found if result != case.expected]

    def trial(self, draw: random.Random) -> tuple[str, Outcome]:
        """What was done to which input, and what became of it."""
        (case,) = draw.choices(self.cases, [case.weight for case in self.cases])
        data, what, may_differ = self.mutate(case, draw)
        found = self.attempt(case, data)
        return f"{case.what}, {what}", compared(found, case.expected, may_differ)

    def mutate(self, case: Case, draw: random.Random) -> tuple[bytes, str, bool]:
        """The mutated file, what was done, and whether the result may differ."""
        data, what = mutate_file(case.sound, draw, self.head)
        return data, what, case.may_differ

    def attempt(self, case: Case, data: bytes) -> Outcome | Any:
        """Use these bytes in place of the sound file."""
        sound = case.sound.read_bytes()
        case.target.write_bytes(data)
        try:
            return attempt(case.use, *case.names)
        finally:
            case.target.write_bytes(sound)


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


def compared(found: Outcome | Any, expected: Any, may_differ: bool = False) -> Outcome:
    """The outcome of a trial that gave `found`, where the sound input gives `expected`."""
    if isinstance(found, Outcome):
        return found
    if found == expected:
        return Outcome(EQUAL)
    if may_differ:
        return Outcome(OTHER)
    return Outcome(WRONG, f"another result without an error: {str(found)[:150]}")


def run_command(*words: str) -> tuple[int, str]:
    """``hpctrain WORDS`` in this process: exit code and what was printed. Raises what it raises."""
    name, settings = parse(list(words))
    module = importlib.import_module(f"hpctrain.{COMMANDS[name].module}")
    printed = io.StringIO()
    try:
        with contextlib.redirect_stdout(printed):
            code = module.main(settings)
    finally:
        print(printed.getvalue(), end="")  # for `attempt`
    return int(code), printed.getvalue()


def use_one_rank() -> None:
    """Let the subcommands of this process use a communicator that needs no freeing."""
    from mpi4py import MPI

    for name in ("training.train", "inference.evaluate", "inference.predict"):
        module: Any = importlib.import_module(f"hpctrain.{name}")
        module.start_mpi = lambda: MPI.COMM_SELF
