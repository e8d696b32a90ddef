"""Which GPU each rank uses, what is said of it, how messages travel, and whose memory they use: on
made-up hosts and libraries.
"""

from __future__ import annotations

import contextlib
import ctypes
import re
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from unittest import mock

import pytest
import torch

import hpctrain as hp
from tests.support.api import (
    RankDevice,
    choose_device,
    choose_transport,
    command_line,
    memory_of,
    open_transport,
    read_records,
)
from tests.support.packs import make_pack

CPU = RankDevice("n1")
GPU = torch.device("cuda", 1)
NODE = ("a", "b", "c", "d")
TWO = NODE[:2]
JOBS = {  # hosts with the GPUs that each of their ranks sees; their numbers, transport, note
    "two whole nodes": ([("n1", [NODE] * 4), ("n2", [NODE] * 4)], [0, 1, 2, 3] * 2, "nccl", ""),
    "each task is shown one GPU, its own": ([("n1", list(NODE))], [0] * 4, "nccl", ""),
    "each task is shown two GPUs": ([("n1", [TWO, NODE[2:]])], [0, 1], "nccl", ""),
    "fewer ranks than GPUs": ([("n1", [NODE] * 2)], [0, 1], "nccl", ""),
    "one GPU for all": ([("n1", [NODE[:1]] * 4)], [0] * 4, "host", "4 ranks share 1 GPU of n1"),
    "a rank too many": (
        *([("n1", [NODE] * 4), ("n2", [NODE] * 5)], [0, 1, 2, 3] * 2 + [0]),
        *("host", "5 ranks share 4 GPUs of n2"),
    ),
    "three crowded nodes": (
        *([(f"n{n}", [TWO] * 4) for n in range(3)], [0, 1, 0, 1] * 3),
        *("host", "4 ranks share 2 GPUs of n0"),
    ),
    "none": ([("n1", [(), ()])], [None, None], "mpi", ""),
}


def gpu(host="n1", uuid="a", version="NCCL 2.29.7", bus=None):
    return RankDevice(host, uuid, version, bus or uuid)


def of_job(hosts, patch):
    """The devices of a job's ranks, and the numbers of their GPUs."""
    devices, numbers = [], []
    patch.setattr(torch.cuda, "set_device", lambda device: None)
    patch.setattr(torch.cuda, "Event", mock.Mock())
    patch.setattr(torch.cuda, "current_stream", mock.Mock())
    for host, seen in hosts:
        for local_rank, uuids in enumerate(seen):
            patch.setattr(torch.cuda, "device_count", mock.Mock(return_value=len(uuids)))
            number = choose_device("auto", local_rank).index
            numbers.append(number)
            devices.append(CPU if number is None else gpu(host, uuids[number]))
    return devices, numbers


@pytest.mark.parametrize("name", JOBS)
def test_who_uses_which_gpu(name, monkeypatch):
    hosts, numbers, transport, note = JOBS[name]
    devices, found = of_job(hosts, monkeypatch)
    chosen, _, said = choose_transport(devices)
    assert (found, chosen, said) == (numbers, transport, note)


SLICES = [gpu(uuid="a", bus="1"), gpu(uuid="b", bus="1")]


@pytest.mark.parametrize(
    ("devices", "name", "why"),
    [
        ([CPU, CPU], "mpi", "CPUs"),
        ([gpu(version="")], "none", "one rank"),
        ([gpu(uuid="a"), gpu("n2", "b"), gpu("n2", "b")], "host", "2 ranks share 1 GPU of n2"),
        ([gpu(), gpu(uuid="b", version="")], "host", "torch on rank 1 .* no NCCL, or hides"),
        (SLICES, "host", r"2 ranks have slices of 1 GPU of n1 \(MIG\), which NCCL refuses"),
        ([gpu(), gpu("n2", "b", bus="a")], "nccl", "every rank has a GPU of its own"),
        ([gpu(), gpu("n2", version="RCCL 2")], "host", "NCCL 2.29.7 on rank 0, RCCL .* rank 1"),
    ],
)
def test_nccl_is_used_where_all_ranks_have_the_same_one_and_a_gpu_of_their_own(devices, name, why):
    chosen, reason, note = choose_transport(devices)
    assert chosen == name and re.search(why, reason)
    assert bool(note) == (name == "host") and note.startswith(reason * bool(note))


MIXED = r"1 of 3 ranks see no GPU, such as rank 2 \(n1\)"  # whose weights would drift apart


@pytest.mark.parametrize(
    ("devices", "wanted", "refusal"),
    [
        ([gpu(), gpu()], "nccl", "--reduce nccl: 2 ranks share 1 GPU of n1"),
        (SLICES, "nccl", "--reduce nccl: 2 ranks have slices of 1 GPU of n1"),
        ([CPU, gpu()], "nccl", r"--reduce nccl is for GPUs: rank 0 \(n1\) has none"),
        ([gpu(), CPU], "mpi-gpu", r"--reduce mpi-gpu is for GPUs: rank 1 \(n1\) has none"),
        *(([gpu(), gpu(), CPU], wanted, MIXED) for wanted in ("auto", "host")),
    ],
)
def test_what_is_asked_for_is_taken_or_refused_with_the_reason(devices, wanted, refusal):
    with pytest.raises(hp.UsageError, match=refusal):
        choose_transport(devices, wanted)
    if wanted != "auto":
        possible = [gpu(), gpu(uuid="b" if wanted == "nccl" else "a")]
        assert choose_transport(possible, wanted)[:2] == (wanted, "asked for")


def mpi_that(monkeypatch, **functions):
    """Let MPI's library have these functions alone."""
    monkeypatch.setattr(ctypes, "CDLL", lambda path: SimpleNamespace(**functions))


@pytest.mark.ranks
def test_an_mpi_that_is_not_gpu_aware_on_one_rank_is_given_no_device_memory(comm, monkeypatch):
    mpi_that(monkeypatch, MPIX_Query_cuda_support=lambda: comm.rank != comm.size - 1)
    with pytest.raises(hp.UsageError, match="--reduce mpi-gpu: .*MPI.* is not GPU-aware; --reduce"):
        open_transport(comm, "mpi-gpu", asked=True)


def answer_of_older_mpich(kind, answer):
    answer._obj.value = kind == 0
    return 0


@pytest.mark.ranks
@pytest.mark.parametrize(
    "functions",
    [{}, {"MPIX_Query_cuda_support": lambda: 1}, {"MPIX_GPU_query_support": answer_of_older_mpich}],
)
def test_an_mpi_that_does_not_say_that_it_is_not_gpu_aware_is_tried(comm, monkeypatch, functions):
    mpi_that(monkeypatch, **functions)
    vector = torch.full((5,), comm.rank + 1.0)
    open_transport(comm, "mpi-gpu", asked=True).allreduce(vector)
    assert vector.tolist() == [comm.size * (comm.size + 1) / 2] * 5


@pytest.mark.ranks(2, 3)
def test_a_wrong_sum_of_device_memory_on_one_rank_is_an_error_on_all(comm, monkeypatch):
    class Wrong:
        rank, size = comm.rank, comm.size

        def __getattr__(self, name):
            return getattr(comm, name)

        def Allreduce(self, sent, received, *operation):
            comm.Allreduce(sent, received, *operation)
            if not operation and comm.rank == comm.size - 1:
                received[0][-1] += 1

    mpi_that(monkeypatch)
    with pytest.raises(hp.UsageError, match="returned a wrong sum"):
        open_transport(Wrong(), "mpi-gpu", asked=True)


@pytest.mark.ranks(1)
def test_a_gpu_that_cannot_be_used_is_refused_in_one_line(comm, tmp_path, monkeypatch, capsys):
    def busy(number):
        raise RuntimeError("CUDA error: all CUDA-capable devices are busy\nmore of it")

    make_pack(tmp_path / "p.h5", {"train": 40, "test": 9})
    words = ["train", "--data", str(tmp_path / "p.h5"), "--runs-dir", str(tmp_path / "runs")]
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "set_device", busy)
    assert command_line([*words, "--device", "cuda"]) == 2
    *_, line = capsys.readouterr().err.splitlines()
    assert re.match("hpctrain: GPU 0 of 2 .* busy", line)


@pytest.mark.ranks(1)
@pytest.mark.parametrize(("device", "files"), [("auto", 1), ("cpu", 1), ("auto", 0)])
def test_gpus_that_torch_does_not_see_are_noted(comm, tmp_path, monkeypatch, device, files):
    glob = Path.glob

    def seen(folder, pattern):
        if str(folder) != "/dev":
            return glob(folder, pattern)
        return [Path("/dev/nvidia0")] * (pattern.startswith("nvidia") and files)

    monkeypatch.setattr(Path, "glob", seen)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    pack, runs = make_pack(tmp_path / "p.h5", {"train": 40, "test": 9}), str(tmp_path / "runs")
    how = {"epochs": 1, "device": device, "threads": 1, "progress": "none", "model": "digits"}
    run = hp.train(data=str(pack), runs_dir=runs, **how)
    notes = [record["text"] for record in read_records(run.folder) if record["kind"] == "note"]
    told = [text for text in notes if "this host has /dev/nvidia0, but torch sees no GPU" in text]
    assert bool(told) == (device == "auto" and files == 1)


@pytest.mark.ranks(1)
def test_on_the_cpu_nothing_imports_cupy(comm, tmp_path, monkeypatch):
    """Though it is installed, and would end whoever imports it."""
    (tmp_path / "cupy").mkdir()
    (tmp_path / "cupy" / "__init__.py").write_text("raise SystemExit('cupy was imported')\n")
    monkeypatch.syspath_prepend(tmp_path)
    make_pack(tmp_path / "p.h5", {"train": 40, "test": 9})
    common = ["--runs-dir", str(tmp_path), "--device", "cpu"]
    train = ["train", "--data", str(tmp_path / "p.h5"), "--epochs", "1", "--run", "a"]
    assert command_line([*train, *common]) == 0
    assert command_line(["evaluate", "a", *common]) == 0
    with pytest.raises(SystemExit, match="cupy was imported"):
        __import__("cupy")


def cupy_for(version, is_hip=False, fails=None):
    """A CuPy for a runtime of this version, whose memory is of the current GPU."""
    cupy, current = ModuleType("cupy"), [0]

    @contextlib.contextmanager
    def device(number):
        current.append(number)
        yield
        current.pop()

    def empty(length, dtype):
        if fails:
            raise RuntimeError(fails)
        return current[-1]

    runtime = SimpleNamespace(is_hip=is_hip, runtimeGetVersion=lambda: version)
    cupy.empty = empty
    cupy.cuda = SimpleNamespace(Device=device, using_allocator=contextlib.nullcontext)
    cupy.cuda.runtime = runtime
    return cupy


@pytest.fixture
def two_gpus(monkeypatch):
    """A torch for ROCm 7.0, which views the memory of a GPU as its number."""
    monkeypatch.setattr(torch.version, "cuda", None)
    monkeypatch.setattr(torch.version, "hip", "7.0.51831-a3e329ad8")
    monkeypatch.setattr(torch, "as_tensor", lambda number: number)
    memory_of.cache_clear()
    yield monkeypatch
    memory_of.cache_clear()


@pytest.mark.parametrize(
    ("cupy", "whose", "reason"),
    [
        (cupy_for(70051831, is_hip=True), "cupy", "CuPy and torch are built for ROCm 7"),
        (cupy_for(70051831, True, "no memory"), "torch", "no CuPy .RuntimeError: no memory"),
        (None, "torch", "no CuPy .ModuleNotFoundError"),
        (cupy_for(12090), "torch", "CuPy is built for CUDA 12, torch for ROCm 7"),
        (cupy_for(60443482, is_hip=True), "torch", "CuPy is built for ROCm 6, torch for ROCm 7"),
        (ModuleType("cupy"), "torch", "no CuPy .AttributeError"),
    ],
)
def test_memory_of_messages_is_cupys_where_it_fits(two_gpus, cupy, whose, reason):
    two_gpus.setitem(sys.modules, "cupy", cupy)
    found = memory_of(GPU)
    assert found[0] == whose and re.match(reason, found[1])


def test_a_cupy_whose_libraries_are_missing_is_not_taken_for_none(two_gpus, tmp_path):
    (tmp_path / "cupy").mkdir()
    code = "raise ImportError('libnvrtc.so.12: cannot open')"
    (tmp_path / "cupy/__init__.py").write_text(code)
    two_gpus.delitem(sys.modules, "cupy", raising=False)
    two_gpus.syspath_prepend(tmp_path)
    reason = "no CuPy (ImportError: libnvrtc.so.12: cannot open)"
    assert memory_of(GPU) == ("torch", reason)
