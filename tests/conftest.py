"""Fixtures; and what sends the tests marked `ranks` to ranks: tests/support/ranks.py."""

from __future__ import annotations

import contextlib
import os
import runpy
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, settings

import hpctrain as hp
from tests.support.ranks import JOBS, Placed, RankError, fresh_start, job, run_test
from tests.support.runs import TrainedRuns, content_of, copy_runs, make_trained_runs

# Ranks with several threads share the cores here: a thread that waits shall not spin on one.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")  # read by libgomp when torch is imported
# torchvision is imported beside a CPU build of torch: here, and in all programs that tests start.
SITE = Path(__file__).parent / "libraries" / "site"
os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, (str(SITE), os.environ.get("PYTHONPATH"))))
runpy.run_path(str(SITE / "sitecustomize.py"))
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


@pytest.fixture(scope="session")
def comm(request: pytest.FixtureRequest) -> Any:
    """A communicator: of this process, or as large as a test marked `ranks` is for."""
    return Placed(request.param) if hasattr(request, "param") else hp.start_mpi()


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if mark := metafunc.definition.get_closest_marker("ranks"):
        sizes = mark.args or (1, 3, pytest.param(4, marks=pytest.mark.slow))
        metafunc.parametrize("comm", sizes, indirect=True, ids="ranks={}".format)


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
    parser.addoption("--update", action="store_true", help="write the files of tests/contract anew")


def pytest_unconfigure() -> None:
    for each in JOBS.values():
        each.end()


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
