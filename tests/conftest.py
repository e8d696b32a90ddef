"""Fixtures, and what makes one pytest session of several ranks.

`pytest` runs everything at size 1. `mpirun -n 3 python -m pytest` runs the tests marked mpi on
three ranks: rank 0 reports, and a failure or a time-out on any rank is shown by that rank and ends
all of them, because after it the others would wait in a collective for ever.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import io
import os
import shutil
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, settings

from hpctrain.launcher import launched_rank, launched_size
from tests.support.ranks import JOBS, Placed, RankError, fresh_start, job, run_test
from tests.support.runs import TrainedRuns, content_of, copy_runs, make_trained_runs

# Ranks with several threads share the cores here: a thread that waits shall not spin on one.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")  # read by libgomp when torch is imported
# Of hypothesis: the same examples in every run, however busy the machine is; or many new ones.
settings.register_profile(
    "ci",
    derandomize=True,
    deadline=None,
    max_examples=100,
    suppress_health_check=[HealthCheck.too_slow],
)
settings.register_profile(
    "nightly", settings.get_profile("ci"), derandomize=False, max_examples=2000
)
settings.load_profile(os.environ.get("HPCTRAIN_HYPOTHESIS", "ci"))
RUNNER = {"_pytest", "pytest", "pluggy", "<frozen runpy>"}  # whose frames no report needs


@functools.cache
def world() -> Any:
    """The communicator of this test session. Starts MPI. Collective."""
    from hpctrain.parallel.mpi import start_mpi

    return start_mpi()


@pytest.fixture(scope="session")
def comm(request: pytest.FixtureRequest) -> Any:
    """A communicator: of this process, or as large as a test marked `ranks` is for."""
    return Placed(request.param) if hasattr(request, "param") else world()


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if mark := metafunc.definition.get_closest_marker("ranks"):
        sizes = metafunc.config.getoption("ranks") or mark.args or (1, 3)
        names = [f"{n} ranks" if n > 1 else "1 rank" for n in sizes]
        metafunc.parametrize("comm", sizes, indirect=True, ids=names)


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[object]:
    """Start the ranks of a test before its time limit counts: other jobs may use all cores."""
    if item.get_closest_marker("ranks"):
        with contextlib.suppress(RankError):  # the test will try again, and fail
            job(max(item.callspec.params["comm"], 3)).ready()
    return (yield)


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    """Run the function of a test marked `ranks` on the ranks of the long-lived job."""
    if pyfuncitem.get_closest_marker("ranks") is None:
        return None
    own = pyfuncitem.get_closest_marker("timeout")
    limit = float(own.args[0] if own else pyfuncitem.config.getini("timeout"))
    run_test(pyfuncitem, pyfuncitem.callspec.params["comm"], max(limit - 10, limit / 2))
    return True


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--ranks",
        type=lambda text: [int(word) for word in text.split(",")],
        help="the numbers of ranks for tests marked ranks, as in --ranks 2,4",
    )
    parser.addoption("--update", action="store_true", help="write the files of tests/contract anew")


def pytest_unconfigure() -> None:
    for each in JOBS.values():
        each.end()


def own_folders() -> None:
    """Let ranks make and clean their numbered temporary folders apart: they race for them, and
    pytest takes a lost race for an error.
    """
    if rank := launched_rank():
        root = Path(tempfile.gettempdir()) / f"pytest-of-rank-{rank}"
        root.mkdir(exist_ok=True)
        os.environ["PYTEST_DEBUG_TEMPROOT"] = str(root)


@pytest.fixture
def timm_stand_in(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Make the stand-in for timm importable, where timm is not installed."""
    if importlib.util.find_spec("timm"):
        pytest.skip("timm itself is installed")
    monkeypatch.syspath_prepend(str(Path(__file__).parent / "libraries"))
    yield
    for name in [n for n in sys.modules if n.partition(".")[0] == "timm"]:
        del sys.modules[name]


@pytest.fixture
def shared_tmp(comm: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """One temporary folder for all ranks, where tmp_path is one for each rank. Collective."""
    folder = tmp_path_factory.mktemp("shared") if comm.rank == 0 else None
    folder = comm.bcast(folder)
    yield folder
    comm.Barrier()
    if comm.rank == 0:
        shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture(scope="session")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TrainedRuns]:
    """Trained runs to read, made once for all processes of this session: tests/support/runs.py."""
    root = tmp_path_factory.getbasetemp()
    made = make_trained_runs(root.parent if "PYTEST_XDIST_WORKER" in os.environ else root)
    before = content_of(made.folder)
    yield made
    assert content_of(made.folder) == before, "a test changed what others read: trained_copy"


@pytest.fixture
def trained_copy(trained: TrainedRuns, tmp_path: Path) -> TrainedRuns:
    """A copy of the trained runs that the test may change."""
    return copy_runs(trained, tmp_path)


@pytest.fixture(autouse=True)
def same_start() -> None:
    """The same random numbers and one torch thread in every test. Imports nothing itself."""
    fresh_start()


@pytest.hookimpl(trylast=True)  # the terminal reporter comes first
def pytest_configure(config: pytest.Config) -> None:
    own_folders()
    if (launched_size() or 1) > 1 and world().size > 1:
        config.pluginmanager.register(Ranks(config, world()))


class Log(io.TextIOWrapper):
    """A text file that is no terminal: mpirun gives rank 0 one even where its output is a log."""

    def isatty(self) -> bool:
        return False


class Ranks:
    """One pytest session on all ranks of `comm`."""

    def __init__(self, config: pytest.Config, comm: Any) -> None:
        self.comm = comm
        self.started = time.monotonic()
        self.timer: threading.Timer | None = None
        self.terminal = os.dup(1)  # pytest captures descriptor 1 itself while a test runs
        if comm.rank > 0 or config.option.color == "no":
            target = os.dup(1) if comm.rank == 0 else os.open(os.devnull, os.O_WRONLY)
            config.pluginmanager.unregister(name="terminalreporter")
            log = Log(os.fdopen(target, "wb"))
            config.add_cleanup(log.close)
            reporter = pytest.TerminalReporter(config, log)
            config.pluginmanager.register(reporter, "terminalreporter")
        if comm.rank > 0:  # the results of rank 0 are those of --junitxml
            for plugin in config.pluginmanager.get_plugins():
                if hasattr(plugin, "logfile"):
                    plugin.logfile = os.devnull

    def end_all(self, title: str, text: str, patience: float) -> None:
        """Show what happened on this rank and abort all, after giving others `patience` seconds."""
        where = f"rank {self.comm.rank} of {self.comm.size}"
        seconds = time.monotonic() - self.started
        closing = f"=== 1 failed in {seconds:.2f}s ({where}) ===\n"
        os.write(self.terminal, f"\n=== {title} ({where}) ===\n{text}\n{closing}".encode())
        time.sleep(patience)
        self.comm.Abort(1)

    def end_by_report(self, report: Any) -> None:
        if report.failed:
            time.sleep(0.5 * self.comm.rank)  # ranks mostly fail alike: then one report will do
            sections = "".join(f"--- {name} ---\n{content}" for name, content in report.sections)
            self.end_all(f"FAILED {report.nodeid}", f"{report.longreprtext}\n{sections}", 0)

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        self.end_by_report(report)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self.end_by_report(report)

    def pytest_internalerror(self, excrepr: Any) -> None:
        self.end_all("INTERNAL ERROR", str(excrepr), 0)

    def pytest_collection_modifyitems(
        self, config: pytest.Config, items: list[pytest.Item]
    ) -> None:
        """Everything that is not marked mpi is for size 1."""
        others = [item for item in items if item.get_closest_marker("mpi") is None]
        config.hook.pytest_deselected(items=others)
        items[:] = [item for item in items if item.get_closest_marker("mpi") is not None]

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        """Ranks that run different tests would wait for each other for ever."""
        names = self.comm.allgather([item.nodeid for item in session.items])
        for rank, theirs in enumerate(names):
            if theirs != names[0]:
                odd = sorted(set(theirs) ^ set(names[0])) or ["the same, in another order"]
                raise pytest.UsageError(f"rank {rank} collected other tests than rank 0: {odd}")

    @pytest.hookimpl(optionalhook=True)
    def pytest_timeout_set_timer(self, item: pytest.Item, settings: Any) -> bool:
        """A thread, because signal handlers do not run while a rank waits in a collective."""
        self.timer = threading.Timer(settings.timeout, self.end_by_timeout, [item.nodeid])
        self.timer.daemon = True
        self.timer.start()
        return True

    @pytest.hookimpl(optionalhook=True)
    def pytest_timeout_cancel_timer(self, item: pytest.Item) -> bool:
        if self.timer is not None:
            self.timer.cancel()
        return True

    def end_by_timeout(self, nodeid: str) -> None:
        main = sys._current_frames()[threading.main_thread().ident or 0]
        frames = [
            f for f in traceback.extract_stack(main) if not RUNNER & set(Path(f.filename).parts)
        ]
        stack = "".join(traceback.format_list(frames))
        # All ranks are about to time out, and the stack of each may be the one that explains it.
        self.end_all(f"TIMEOUT {nodeid}", stack, patience=2)

    def pytest_sessionfinish(self, session: pytest.Session, exitstatus: int) -> None:
        """No test left is no failure where the user chose a few that are for size 1 alone."""
        chosen = session.config.option.keyword or session.config.args_source.name == "ARGS"
        if exitstatus == pytest.ExitCode.NO_TESTS_COLLECTED and chosen:
            session.exitstatus = pytest.ExitCode.OK
