"""The base of all surfaces: sound inputs, trials of their mutations, and their outcomes."""

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
    """The outcome for a mutated input: EQUAL, OTHER, REFUSED or WRONG.

    EQUAL: the same result as for the sound input. OTHER: a different result, where the mutation
    cannot be detected. REFUSED: an error of one line. WRONG: anything else.
    """

    kind: str
    text: str = ""


class Case(NamedTuple):
    """A sound file, and the function that uses its mutation at `target`."""

    what: str
    sound: Path
    target: Path
    use: Callable[[], Any]
    expected: Any  # result of `use` for the sound file
    names: tuple[str, ...]  # an error must contain one of them
    may_differ: bool = False  # a change of the file cannot be detected
    weight: float = 1.0  # relative number of trials in this surface


class Surface(abc.ABC):
    """One kind of input, in a new folder."""

    name: ClassVar[str]
    weight: ClassVar[float] = 1.0  # relative number of inputs
    head: ClassVar[int] = 4096  # first bytes of a file, in which half of all mutations are

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
        """Return the cases that are first tried without a mutation."""
        return self.cases

    def control(self) -> list[str]:
        """Return a line for each case that fails without a mutation."""
        found = [(case, self.attempt(case, case.sound.read_bytes())) for case in self.controls()]
        return [f"{case.what}: {result}" for case, result in found if result != case.expected]

    def trial(self, draw: random.Random) -> tuple[str, Outcome]:
        """Try one mutation; return its description and its outcome."""
        (case,) = draw.choices(self.cases, [case.weight for case in self.cases])
        data, what, may_differ = self.mutate(case, draw)
        found = self.attempt(case, data)
        return f"{case.what}, {what}", compared(found, case.expected, may_differ)

    def mutate(self, case: Case, draw: random.Random) -> tuple[bytes, str, bool]:
        """Return the mutated file, what was done, and whether the result may differ."""
        data, what = mutate_file(case.sound, draw, self.head)
        return data, what, case.may_differ

    def attempt(self, case: Case, data: bytes) -> Outcome | Any:
        """Run the case with these bytes in place of the sound file."""
        sound = case.sound.read_bytes()
        case.target.write_bytes(data)
        try:
            return attempt(case.use, *case.names)
        finally:
            case.target.write_bytes(sound)


def attempt(action: Callable[[], Any], *names: str) -> Outcome | Any:
    """Return the result of `action`, or an outcome if it raises.

    REFUSED if the error is one line, possibly with a list of files, and the error or the printed
    text contains one of `names`; WRONG for any other error.
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
    """Return the outcome of a trial with result `found`, if the sound input gives `expected`."""
    if isinstance(found, Outcome):
        return found
    if found == expected:
        return Outcome(EQUAL)
    if may_differ:
        return Outcome(OTHER)
    return Outcome(WRONG, f"another result without an error: {str(found)[:150]}")


def run_command(*words: str) -> tuple[int, str]:
    """Run ``hpctrain WORDS`` in this process; return the exit code and the printed text."""
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
    """Make the subcommands of this process use COMM_SELF, which need not be freed."""
    from mpi4py import MPI

    for name in ("training.train", "inference.evaluate", "inference.predict"):
        module: Any = importlib.import_module(f"hpctrain.{name}")
        module.start_mpi = lambda: MPI.COMM_SELF
