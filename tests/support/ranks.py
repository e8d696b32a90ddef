"""A long-lived MPI job that runs tests on 1, 2, ... of its ranks.

Starting Python with torch three times takes ten seconds of a core; a test takes milliseconds. So
each pytest process starts one job at most, when a first test needs it, and sends it the tests that
are marked `ranks`: their functions run on the ranks, with `comm` a communicator of as many of them
as the test is for. What a rank prints is captured. If a test fails on one rank, the others may wait
in a collective forever: the job is ended then, and the next test starts a new one.

Inside a test the world is that communicator: MPI.COMM_WORLD as hpctrain sees it, and the launcher's
variables. So `hpctrain.cli.main` and `hpctrain.train` may be called like everything else. What
aborts ranks or kills them needs a launch of its own: tests/support/launch.py.
"""

from __future__ import annotations

import contextlib
import functools
import io
import os
import random
import select
import shutil
import signal
import sys
import tempfile
import threading
import time
import traceback
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from multiprocessing.connection import Client, Connection, Listener, wait
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import cloudpickle
import pytest

from tests.support.launch import LAUNCHER_PREFIXES, ROOT, mpirun
from tests.support.launch import Job as Launch
from tests.support.wait import wait_for, when

STACKS = signal.SIGRTMIN  # a rank then writes where each of its threads is
SIZES = ("OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_SIZE")  # variables with the world's size
SIZES += ("PMI_SIZE", "PMI_LOCAL_SIZE", "MPI_LOCALNRANKS")
FAULT = "HPCTRAIN_FAULT"
WIDE = {"COLUMNS": "200"}  # so that no table is cut
START, GRACE = 120.0, 5.0  # seconds: to start all ranks; for the others after the first failure


class Outcome(NamedTuple):
    """How a call ended on one rank."""

    kind: str  # passed, failed or skipped
    value: Any  # what it returned, the traceback, or the reason
    out: str
    err: str


class RankError(AssertionError):
    """A call that failed on some ranks; the text shows how on each."""


@dataclass
class Placed:
    """A `comm` in the process that sends a test: enough for fixtures that prepare files."""

    size: int
    rank: int = 0

    def Barrier(self) -> None:
        """Only one process prepares a test."""

    def bcast(self, value: Any) -> Any:
        return value


@dataclass(frozen=True)
class OnRank:
    """An argument that each rank makes itself: comm, monkeypatch, capsys."""

    name: str


# In the process that sends


class Job:
    """`size` ranks that wait for calls; started at the first one, and again after a failure."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.launch: Launch | None = None
        self.ranks: list[Connection] = []

    def ready(self) -> None:
        """Start the ranks, if they are not running."""
        if self.launch is not None and self.launch.poll() is None:
            return
        self.end()
        try:
            self.start()
        except BaseException:
            self.end()
            raise

    def start(self) -> None:
        self.folder = tempfile.TemporaryDirectory(prefix="hpctrain-ranks-")
        with Listener(f"{self.folder.name}/socket", backlog=self.size) as listener:
            words = [mpirun(), "-n", str(self.size), sys.executable, "-m", "tests.support.ranks"]
            # The ranks of several jobs share the cores.
            free = {"PRTE_MCA_hwloc_default_binding_policy": "none", "OMP_WAIT_POLICY": "passive"}
            # Not in the folder of the test that comes first, which is removed after it.
            self.launch = Launch([*words, str(listener.address)], free | WIDE, ROOT)
            listener._listener._socket.settimeout(1)  # type: ignore[attr-defined]
            arrived, until = [], time.monotonic() + START
            while len(arrived) < self.size:
                try:
                    arrived.append(listener.accept())
                except TimeoutError:
                    if self.launch.poll() is not None or time.monotonic() > until:
                        out, err = self.launch.end()
                        raise RankError(f"not all ranks have started\n{out}{err}") from None
        by_rank = {connection.recv(): connection for connection in arrived}
        self.pids = [pid for _, pid in sorted(by_rank)]
        self.ranks = [by_rank[key] for key in sorted(by_rank)]

    def call(
        self, n: int, function: Callable[..., Any], arguments: dict[str, Any], seconds: float
    ) -> list[Outcome]:
        """Call the function on the first `n` ranks; return how it ended on each.

        Raises RankError if some have not ended in time, or if the job has died.
        """
        self.ready()
        try:
            request = cloudpickle.dumps((n, function, arguments))
            for connection in self.ranks[:n]:
                connection.send_bytes(request)
            return self.gather(n, seconds)
        except BaseException:  # a time limit of pytest's, Ctrl-C
            self.end()
            raise

    def gather(self, n: int, seconds: float) -> list[Outcome]:
        outcomes: dict[int, Outcome] = {}
        waiting = {connection: rank for rank, connection in enumerate(self.ranks[:n])}
        until = time.monotonic() + seconds
        while waiting and (left := until - time.monotonic()) > 0:
            for connection in wait(list(waiting), timeout=left):
                assert isinstance(connection, Connection)
                rank = waiting.pop(connection)
                try:
                    outcomes[rank] = cloudpickle.loads(connection.recv_bytes())
                except (EOFError, ConnectionError):
                    outcomes[rank] = Outcome("failed", "the rank has died", "", "")
                if outcomes[rank].kind == "failed":
                    until = min(until, time.monotonic() + GRACE)
        failed = any(outcome.kind == "failed" for outcome in outcomes.values())
        if waiting or failed:
            text = self.describe(outcomes, waiting.values(), seconds)
            out, err = self.end()
            raise RankError(text + out + err)
        return [outcomes[rank] for rank in range(n)]

    def describe(self, outcomes: dict[int, Outcome], late: Any, seconds: float) -> str:
        texts = {}
        for rank, outcome in sorted(outcomes.items()):
            if outcome.kind == "failed":
                texts[f"{outcome.value}{outcome.out}{outcome.err}"] = f"--- rank {rank}"
        for rank in late:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pids[rank], STACKS)
        files = {rank: Path(f"{self.folder.name}/{rank}.stacks") for rank in late}
        with contextlib.suppress(AssertionError):  # the main thread's is the last one
            wait_for(lambda: all("_run_module" in f.read_text() for f in files.values()), 5)
        parts = [f"{head}\n{text}" for text, head in texts.items()]
        for rank, file in files.items():
            stacks = file.read_text()
            parts.append(f"--- rank {rank} had not ended (limit {seconds:.0f} s)\n{stacks}")
        return "\n" + "\n".join(parts)

    def end(self) -> tuple[str, str]:
        """End the job; what its ranks printed outside of calls."""
        if self.launch is None:
            return "", ""
        printed = self.launch.end()
        for connection in self.ranks:
            connection.close()
        self.launch, self.ranks = None, []
        self.folder.cleanup()
        return printed


JOBS: dict[int, Job] = {}


def job(size: int = 3) -> Job:
    """The job of this process with so many ranks."""
    return JOBS.setdefault(size, Job(size))


def on_ranks(n: int, function: Callable[..., Any], **arguments: Any) -> list[Any]:
    """Return what ``function(comm, **arguments)`` returns on each of `n` ranks.

    Raises RankError with the tracebacks if it fails on any.
    """
    given = {"comm": OnRank("comm"), **arguments}
    return [outcome.value for outcome in job(max(n, 3)).call(n, function, given, 100)]


class Ended(NamedTuple):
    """A command line that was run on ranks: what they returned and printed."""

    code: int
    out: str  # rank 0's
    err: str  # of all ranks


def _command(comm: Any, words: list[str], cwd: str, fault: str) -> int:
    from hpctrain.cli import main

    os.chdir(cwd)  # world_of() goes back
    struck = ":".join([*fault.split(":")[:2], "0"])
    if fault and comm.rank == 0:
        os.environ[FAULT] = fault
    if ":stall:" in fault and comm.rank == 0:
        when(lambda: os.environ.get(FAULT) == struck, lambda: os.environ.pop(FAULT))
    try:
        return main(words)
    except SystemExit as end:  # --help
        return int(end.code or 0)
    finally:
        assert os.environ.pop(FAULT, struck) == struck, f"{fault} did not happen"


def command(n: int, *words: object, cwd: Path | str = ".", fault: str = "") -> Ended:
    """Run ``python -m hpctrain WORDS`` on `n` ranks of the job. All ranks must return one code.

    Rank 0 has the `fault` (hpctrain/fault.py), which must happen; a stall ends as it has begun.
    """
    given = {"comm": OnRank("comm"), "words": [str(word) for word in words]}
    given |= {"cwd": str(cwd), "fault": fault}
    outcomes = job(max(n, 3)).call(n, _command, given, 100)
    codes = {outcome.value for outcome in outcomes}
    if len(codes) > 1:
        raise RankError(f"ranks returned different exit codes: {sorted(codes)}")
    return Ended(codes.pop(), outcomes[0].out, "".join(outcome.err for outcome in outcomes))


def alone(*words: object, env: Mapping[str, str] | None = None) -> Ended:
    """Run ``python -m hpctrain WORDS`` in this process, which no launcher has started, for what
    does not start MPI.
    """
    own = {name: os.environ[name] for name in os.environ if not name.startswith(LAUNCHER_PREFIXES)}
    out, err = io.StringIO(), io.StringIO()
    with (
        contextlib.redirect_stdout(out),
        contextlib.redirect_stderr(err),
        mock.patch.dict(os.environ, {**WIDE, **own, **(env or {})}, clear=True),
    ):
        code = _command(None, [str(word) for word in words], ".", "")
    return Ended(code, out.getvalue(), err.getvalue())


def run_test(item: pytest.Function, n: int, limit: float) -> None:
    """Run a test's function on `n` ranks in place of this process."""
    arguments = {name: item.funcargs[name] for name in item._fixtureinfo.argnames}
    for name in MAKERS.keys() & arguments.keys():
        arguments[name] = OnRank(name)
    outcomes = job(max(n, 3)).call(n, item.function, arguments, limit)
    for outcome in outcomes:
        if outcome.kind == "skipped":
            pytest.skip(outcome.value)


# On the ranks


class Captured:
    """What this rank prints, on descriptors 1 and 2; as pytest's capfd."""

    def __init__(self) -> None:
        self.files = [tempfile.TemporaryFile() for _ in range(2)]  # noqa: SIM115 -- see restore
        sys.stdout.flush()
        sys.stderr.flush()
        self.saved = [os.dup(1), os.dup(2)]
        for number, file in zip((1, 2), self.files, strict=True):
            os.dup2(file.fileno(), number)

    def readouterr(self) -> tuple[str, str]:
        """Return what was printed since the last call."""
        sys.stdout.flush()
        sys.stderr.flush()
        texts = []
        for file in self.files:
            file.seek(0)
            texts.append(file.read().decode(errors="replace"))
            file.seek(0)
            file.truncate()
        return Printed(*texts)

    def restore(self) -> None:
        for number, file in zip((1, 2), self.saved, strict=True):
            os.dup2(file, number)
            os.close(file)
        for each in self.files:
            each.close()


class Printed(NamedTuple):
    """As what pytest's capsys returns."""

    out: str
    err: str


#: What a rank makes in place of pytest's fixture.
MAKERS: dict[str, Callable[[Any, pytest.MonkeyPatch, Captured], Any]] = {
    "comm": lambda comm, patch, captured: comm,
    "monkeypatch": lambda comm, patch, captured: patch,
    "capsys": lambda comm, patch, captured: captured,
    "capfd": lambda comm, patch, captured: captured,
}


class World:
    """mpi4py's MPI, with another COMM_WORLD."""

    def __init__(self, mpi: Any, comm: Any) -> None:
        self._mpi, self.COMM_WORLD = mpi, comm

    def __getattr__(self, name: str) -> Any:
        return getattr(self._mpi, name)


@contextlib.contextmanager
def world_of(n: int) -> Iterator[Any]:
    """A communicator of the first `n` ranks, which is the world within the block."""
    from hpctrain.parallel import mpi

    real = mpi.MPI
    variables, folder = dict(os.environ), os.getcwd()
    comm = _group(n)
    os.environ.update({name: str(n) for name in SIZES if name in os.environ})
    mpi.MPI = World(real, comm)
    try:
        yield comm
    finally:
        mpi.MPI = real
        os.environ.clear()
        os.environ.update(variables)
        os.chdir(folder)


@functools.cache
def _group(n: int) -> Any:
    """A communicator of the first `n` ranks. Collective over these."""
    from mpi4py import MPI

    comm = MPI.COMM_WORLD.Create_group(MPI.COMM_WORLD.group.Incl(range(n)))
    comm.Set_errhandler(MPI.ERRORS_RETURN)
    return comm


def fresh_start() -> None:
    """The same random numbers and one torch thread in every test. Imports nothing itself."""
    random.seed(0)
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed(0)
    if "torch" in sys.modules:
        sys.modules["torch"].manual_seed(0)
        sys.modules["torch"].set_num_threads(1)


def answer(request: bytes) -> Outcome:
    """Do one call on this rank."""
    captured, patch = Captured(), pytest.MonkeyPatch()
    try:
        n, function, arguments = cloudpickle.loads(request)
        fresh_start()
        with world_of(n) as comm, warnings.catch_warnings():
            warnings.simplefilter("error")
            for name, value in arguments.items():
                if isinstance(value, OnRank):
                    arguments[name] = MAKERS[value.name](comm, patch, captured)
            try:
                value = function(**arguments)
                cloudpickle.dumps(value)
                kind = "passed"
            finally:
                patch.undo()
    except pytest.skip.Exception as skipped:
        kind, value = "skipped", str(skipped)
    except BaseException as error:
        kind, value = "failed", describe_error(error)
    out, err = captured.readouterr()
    captured.restore()
    return Outcome(kind, value, out, err)


def describe_error(error: BaseException) -> str:
    """The traceback below this file, with the local variables of tests and of the last frame."""
    try:
        shown = traceback.TracebackException.from_exception(error, capture_locals=True)
    except Exception:  # of the repr of one of them
        shown = traceback.TracebackException.from_exception(error)
    own = [k for k, frame in enumerate(shown.stack) if frame.filename == __file__]
    del shown.stack[: own[-1] + 1 if own else 0]
    for frame in shown.stack:
        if frame is not shown.stack[-1] and f"{ROOT}/tests/" not in frame.filename:
            frame.locals = None
        for name, text in (frame.locals or {}).items():
            if len(text) > 300:
                frame.locals[name] = text[:300] + "..."
    return "".join(shown.format())


def serve(address: str) -> None:
    """Answer calls until the other side closes the connection."""
    import faulthandler

    import hpctrain

    folder, comm = Path(address).parent, hpctrain.start_mpi()
    with Client(address) as connection, open(folder / f"{comm.rank}.stacks", "w") as stacks:
        threading.Thread(target=end_with, args=(connection, folder), daemon=True).start()
        faulthandler.register(STACKS, file=stacks, all_threads=True)
        import h5py  # noqa: F401 -- now, for all tests
        import torch  # noqa: F401

        connection.send((comm.rank, os.getpid()))
        while True:
            connection.send_bytes(cloudpickle.dumps(answer(connection.recv_bytes())))


def end_with(connection: Connection, folder: Path) -> None:
    """End this rank when the other side is gone, even by SIGKILL, whatever the rank is doing."""
    gone = select.poll()
    gone.register(connection.fileno(), select.POLLRDHUP)
    gone.poll()
    shutil.rmtree(folder, ignore_errors=True)
    os._exit(1)


if __name__ == "__main__":
    # Tests import this module by its name; what they send must be of the same classes.
    from tests.support import ranks

    ranks.serve(sys.argv[1])
