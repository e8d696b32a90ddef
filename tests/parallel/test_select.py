"""A transport by its name, and the trial that may crash."""

from __future__ import annotations

import pytest
import torch

from hpctrain.parallel import select
from hpctrain.parallel.places import Choice
from hpctrain.parallel.select import make, place_of, trial
from hpctrain.parallel.transport import DeviceMemory, HostMemory, Nothing, Pinned


@pytest.mark.mpi
def test_made_by_name(comm):
    assert isinstance(make(Choice("mpi", ""), comm), HostMemory)
    assert isinstance(make(Choice("none", ""), comm), Nothing)
    assert isinstance(make(Choice("host", ""), comm), Pinned)
    assert isinstance(make(Choice("mpi-gpu", ""), comm), DeviceMemory)


def test_a_trial_crashes_alone(monkeypatch):
    assert trial(0, ("-c", "import os; assert 'OMPI_X' not in os.environ")) is None
    monkeypatch.setenv("OMPI_X", "of this job")
    assert trial(0, ("-c", "import os; assert 'OMPI_X' not in os.environ")) is None
    crash = "import os, signal; os.kill(os.getpid(), signal.SIGSEGV)"
    assert "crashed (SIGSEGV): it is not GPU-aware" in trial(0, ("-c", crash))
    assert trial(0, ("-c", "raise SystemExit('no such GPU')")).endswith("failed: no such GPU")
    monkeypatch.setattr(select, "TRIAL_SECONDS", 0.2)
    assert "did not return" in trial(0, ("-c", "import time; time.sleep(60)"))


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_the_real_trial_says_why_it_failed():
    assert "sees no GPU" in trial(0)


def test_a_rank_without_a_gpu_tells_its_host():
    place = place_of(torch.device("cpu"), "mpi-gpu")
    assert place.device == "cpu" and place.host and place.refusal is None
