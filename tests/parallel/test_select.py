"""Which transport is taken, on faked facts; and the trial that may crash."""

from __future__ import annotations

import re

import pytest
import torch

from hpctrain.errors import UsageError
from hpctrain.parallel import select
from hpctrain.parallel.select import Choice, Place, choose, make, place_of, trial
from hpctrain.parallel.transport import DeviceMemory, HostMemory, Nothing, Pinned

CPU = Place("n1", "cpu")


def gpu(host="n1", uuid="a", nccl=22304, refusal=None):
    return Place(host, "cuda", uuid, nccl, refusal)


@pytest.mark.parametrize(
    ("places", "name", "why"),
    [
        ([CPU, CPU], "mpi", "CPUs"),
        ([gpu(uuid="a"), gpu(uuid="b"), gpu("n2", "a")], "nccl", "a GPU of its own"),
        ([gpu()], "none", "one rank"),
        ([gpu(), gpu()], "host", "ranks 0 and 1 share a GPU of n1"),
        (
            [gpu(uuid="a"), gpu("n2", "b"), gpu("n2", "b")],
            "host",
            "ranks 1 and 2 share a GPU of n2",
        ),
        ([gpu(), CPU._replace(host="n2")], "host", r"rank 1 \(n2\) computes on the CPU"),
        ([gpu(), gpu(uuid="b", nccl=0)], "host", "rank 1 .* finds no NCCL"),
        ([gpu(), gpu("n2", nccl=22100)], "host", "NCCL is 22304 on rank 0, 22100 on rank 1"),
    ],
)
def test_what_is_taken_and_why(places, name, why):
    choice = choose(places)
    assert choice.name == name and re.search(why, choice.reason)


def test_what_is_asked_for_is_taken_or_refused_with_the_reason():
    apart, shared = [gpu(uuid="a"), gpu(uuid="b")], [gpu(), gpu()]
    assert choose(apart, "nccl") == Choice("nccl", "asked for")
    assert choose(apart, "host") == Choice("host", "asked for")
    assert choose(shared, "mpi-gpu").name == "mpi-gpu"
    assert choose([CPU, CPU], "host").name == "mpi"
    for places, wanted, text in (
        (shared, "nccl", "--reduce nccl: ranks 0 and 1 share a GPU of n1"),
        ([CPU, gpu()], "nccl", r"--reduce nccl is for GPUs: rank 0 \(n1\) has none"),
        ([gpu(), CPU], "mpi-gpu", r"--reduce mpi-gpu is for GPUs: rank 1 \(n1\) has none"),
        ([gpu(), gpu("n2", refusal="it crashed")], "mpi-gpu", r"on rank 1 \(n2\) it crashed"),
    ):
        with pytest.raises(UsageError, match=text):
            choose(places, wanted)


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
