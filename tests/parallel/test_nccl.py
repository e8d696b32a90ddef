"""NCCL's C functions by ctypes: which library, its errors, lost peers. On the stand-in, between
processes, on host memory.
"""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys

import pytest
import torch

from hpctrain.errors import RunError
from hpctrain.parallel import nccl
from hpctrain.parallel.nccl import Library, Nccl, nccl_version
from tests.support.launch import ROOT
from tests.support.nccl import build

RANK = """
import pickle, sys, types, torch
from hpctrain.parallel.nccl import Nccl
from hpctrain.parallel.nccl import Library
rank, size, meeting = int(sys.argv[2]), int(sys.argv[3]), bytes.fromhex(sys.argv[4])
sent = 1, pickle.dumps((meeting, None))
comm = types.SimpleNamespace(rank=rank, size=size, bcast=lambda own, root: sent)
nccl = Nccl(comm, Library(sys.argv[1]))
vector = torch.full((100_003,), 1.0 + rank)
nccl.allreduce(vector)
assert (vector == size * (size + 1) / 2).all()
"""
CUDA = """
#include <stdlib.h>
int cudaGetDevice(int *number) { *number = 0; return 0; }
int cudaSetDevice(int number) { return 0; }
int cudaDeviceGetPCIBusId(char *text, int room, int number) {
    const char *own = getenv("GPU");
    for (int i = 0; i < room; i++) if (!(text[i] = own[i])) break;
    return 0;
}
"""


@pytest.fixture(scope="module")
def library(tmp_path_factory):
    return build(tmp_path_factory.mktemp("nccl"))


def ranks(library, scripts, **variables):
    """Exit codes and last lines of stderr of one process for each script."""
    meeting = Library(library).unique_id().hex()
    words = [library, str(len(scripts)), meeting]
    found = []
    for rank, script in enumerate(scripts):
        own = {name: value[rank] for name, value in variables.items()}
        found.append(
            subprocess.Popen(
                [sys.executable, "-c", script, words[0], str(rank), *words[1:]],
                env={**os.environ, "PYTHONPATH": str(ROOT), "EMULATED_NCCL_SECONDS": "20", **own},
                stdin=subprocess.PIPE,  # closed when the ranks before it have ended
                stderr=subprocess.PIPE,
                text=True,
            )
        )
    said = [process.communicate(timeout=60)[1].strip().splitlines()[-1:] for process in found]
    codes = [process.returncode for process in found]
    return codes, ["".join(lines) for lines in said]


def test_a_peer_that_died_is_an_error_and_no_hang(library):
    died = RANK.split("vector =")[0] + "import os, signal; os.kill(os.getpid(), signal.SIGKILL)"
    codes, said = ranks(library, [RANK, died])
    assert codes == [1, -9]
    assert "RunError: ncclAllReduce failed on this rank or a rank it talks to: remote" in said[0]
    assert "rank 1 (process" in said[0] and said[0].endswith("is gone")


def test_a_peer_that_does_not_answer_is_an_error_in_the_end(library):
    asleep = RANK.split("vector =")[0] + "import sys; sys.stdin.read()"
    soon = "import os; os.environ['EMULATED_NCCL_SECONDS'] = '1'\nvector = torch"
    codes, said = ranks(library, [RANK.replace("vector = torch", soon), asleep])
    assert codes == [1, 0], said
    assert said[0].endswith("no answer from a peer for 1 s")


def test_two_ranks_on_one_gpu_are_refused(library, tmp_path):
    (tmp_path / "cuda.c").write_text(CUDA)
    cuda = str(tmp_path / "cuda.so")
    subprocess.run(["gcc", "-shared", "-fPIC", "-o", cuda, tmp_path / "cuda.c"], check=True)
    preload = {"LD_PRELOAD": [cuda] * 2}
    codes, said = ranks(library, [RANK] * 2, GPU=["0000:01:00.0"] * 2, **preload)
    assert codes == [1, 1]
    assert all(f"rank 0 and rank 1 both on CUDA device {'0000:01:00.0'}" in line for line in said)
    assert "Duplicate GPU detected" in said[0] and "ncclCommInitRank failed" in said[0]
    codes, _ = ranks(library, [RANK] * 2, GPU=["0000:01:00.0", "0000:02:00.0"], **preload)
    assert codes == [0, 0]


def test_a_group_is_closed_where_a_call_in_it_fails(library):
    """Else all that comes later would wait in it."""
    from mpi4py import MPI

    nccl = Nccl(MPI.COMM_SELF, Library(library))
    vector, twice = torch.ones(3), torch.zeros(3)
    expected = r"^ncclSend .*invalid argument: peer 99 of 1 ranks"
    with pytest.raises(RunError, match=expected), nccl._one_launch():
        nccl._call("ncclSend", vector.data_ptr(), 3, 7, 99, nccl._group, 0)
    nccl.alltoall(vector, twice)
    assert twice.tolist() == [1, 1, 1]
    with pytest.raises(RunError, match="ncclGroupEnd .*invalid usage: .*not in a group"):
        nccl._call("ncclGroupEnd")


def test_an_asynchronous_error_ends_the_run(library):
    from mpi4py import MPI

    nccl = Nccl(MPI.COMM_SELF, Library(library))
    library = nccl._call._handle
    library.ncclCommGetAsyncError = lambda group, found: setattr(found._obj, "value", 6)
    with pytest.raises(
        RunError, match=r"^an earlier call of NCCL failed .*: remote process exited"
    ):
        nccl.allreduce(torch.ones(3))


@pytest.mark.parametrize(
    ("torch_name", "nccl_name", "cuda", "hip", "version"),
    [
        ("libtorch_cuda.so", "libnccl.so.2", "13.0", None, "NCCL 2.29.7"),
        ("libtorch_hip.so", "librccl.so.1", None, "7.0.51831", "RCCL 2.29.7"),
    ],
)
def test_the_library_is_the_one_that_torch_loaded(
    tmp_path, torch_name, nccl_name, cuda, hip, version
):
    """Found among what its part for GPUs depends on, whoever the maker is."""
    build(tmp_path, nccl_name)
    link = ["-Wl,--no-as-needed", f"-Wl,-rpath,{tmp_path}", str(tmp_path / nccl_name)]
    make = ["gcc", "-shared", "-fPIC", f"-Wl,-soname,{torch_name}", "-xc", "/dev/null", "-xnone"]
    subprocess.run([*make, *link, "-o", tmp_path / torch_name], check=True)
    code = (
        "import ctypes, sys, torch; from hpctrain.parallel.nccl import nccl_version;"
        "print(repr(nccl_version())); ctypes.CDLL(sys.argv[1]);"
        f"torch.version.cuda, torch.version.hip = {cuda!r}, {hip!r}; print(nccl_version())"
    )
    command = [sys.executable, "-c", code, tmp_path / torch_name]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, timeout=60)
    assert (done.stdout, done.stderr) == (f"''\n{version}\n", "")


def test_a_torch_without_nccl_is_one_line(monkeypatch):
    if not torch.cuda.is_available():
        with pytest.raises(RunError, match=r"^torch \S+ was built without GPUs$"):
            Library()
    monkeypatch.setattr(nccl, "torch_library", lambda: ctypes.CDLL("libm.so.6"))
    with pytest.raises(RunError, match=r"^torch \S+ was built without NCCL \(.*ncclGetVersion\)$"):
        Library()
    assert nccl_version() == ""
