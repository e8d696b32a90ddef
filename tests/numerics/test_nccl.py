"""NCCL's C functions by ctypes: which library, its errors, lost peers. On the stand-in, between
processes that a rank forks, on host memory.
"""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import warnings
from multiprocessing import Pipe
from types import SimpleNamespace

import pytest
import torch

import hpctrain as hp
from tests.support.api import RankDevice, open_transport
from tests.support.nccl import SOURCE, build, stand_in

pytestmark = pytest.mark.ranks(1)
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


def compile_library(path, source, *flags):
    (path.parent / "source.c").write_text(source)
    words = ["gcc", "-shared", "-fPIC", f"-Wl,-soname,{path.name}", str(path.parent / "source.c")]
    subprocess.run([*words, *flags, "-o", str(path)], check=True)


def forked(*works):
    """Call each work, with a function that opens its transport, in a process of its own; return
    each's exit code and error.
    """
    told, tell = Pipe(duplex=False)  # what rank 0 broadcasts
    children = []
    for rank, work in enumerate(works):
        receive, send = Pipe(duplex=False)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # there are threads, which hold no lock
            pid = os.fork()
        if pid == 0:
            send.send(error_of(work, rank, len(works), told if rank else tell))
            os._exit(0)
        send.close()
        children.append((pid, receive))
    found = []
    for pid, receive in children:
        try:
            found.append(receive.recv())
        except EOFError:
            found.append("killed")
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
    return found


def error_of(work, rank, size, pipe):
    def bcast(value, root):
        if rank:
            return pipe.recv()
        pipe.send(value)
        return value

    os.environ["EMULATED_NCCL_SECONDS"] = "20"
    comm = SimpleNamespace(rank=rank, size=size, bcast=bcast)
    try:
        work(lambda path="": open_transport(comm, "nccl", nccl=path))
    except BaseException as error:
        return f"{type(error).__name__}: {error}"
    return ""


def add(open_nccl, path=""):
    way = open_nccl(path or stand_in())
    vector = torch.full((100_003,), 1.0 + way.comm.rank)
    way.allreduce(vector)
    assert (vector == way.comm.size * (way.comm.size + 1) / 2).all()


def test_a_peer_that_died_is_an_error_and_no_hang(comm):
    def die(open_nccl):
        open_nccl(stand_in())
        os.kill(os.getpid(), signal.SIGKILL)

    said, other = forked(add, die)
    assert said.startswith("RunError: ncclAllReduce failed on this rank or a rank it talks to: ")
    assert "rank 1 (process" in said and said.endswith("is gone") and other == "killed"


def test_a_peer_that_does_not_answer_is_an_error_in_the_end(comm):
    told, tell = Pipe(duplex=False)

    def impatient(open_nccl):
        os.environ["EMULATED_NCCL_SECONDS"] = "1"
        try:
            add(open_nccl)
        finally:
            tell.send("ended")

    def silent(open_nccl):
        open_nccl(stand_in())
        told.recv()

    said, other = forked(impatient, silent)
    assert said.endswith("no answer from a peer for 1 s") and other == ""


def test_two_ranks_on_one_gpu_are_refused(comm, tmp_path):
    compile_library(tmp_path / "cuda.so", CUDA)

    def on(gpu):
        def work(open_nccl):
            os.environ["GPU"] = f"0000:{gpu}:00.0"
            ctypes.CDLL(str(tmp_path / "cuda.so"), ctypes.RTLD_GLOBAL)
            add(open_nccl)

        return work

    assert forked(on("01"), on("02")) == ["", ""]
    said = forked(on("01"), on("01"))
    assert all("rank 0 and rank 1 both on CUDA device 0000:01:00.0" in line for line in said)
    assert "Duplicate GPU detected" in said[0] and "ncclCommInitRank failed" in said[0]


def test_after_a_call_that_failed_others_work(comm):
    """The group of calls that it was in is closed; else all that comes later would wait in it."""
    way, vector, received = (
        open_transport(comm, "nccl", nccl=stand_in()),
        torch.ones(3),
        torch.zeros(3),
    )
    with pytest.raises(hp.RunError, match=r"^ncclGroupEnd .*invalid argument: peer 99 of 1 ranks"):
        way.prepare([(99, [vector])], [])()
    way.prepare([(0, [vector])], [(0, [received])])()
    assert received.tolist() == [1, 1, 1]


@pytest.mark.parametrize(
    ("torch_name", "nccl_name"),
    [("libtorch_cuda.so", "libnccl.so.2"), ("libtorch_hip.so", "librccl.so.1")],
)
def test_the_library_is_the_one_that_torch_loaded(comm, tmp_path, torch_name, nccl_name):
    """Found among what its part for GPUs depends on, whoever the maker is."""
    build(tmp_path, nccl_name)
    link = ["-Wl,--no-as-needed", f"-Wl,-rpath,{tmp_path}", str(tmp_path / nccl_name)]
    compile_library(tmp_path / torch_name, "", *link)

    def work(open_nccl):
        torch.version.hip = "7.0" if "hip" in torch_name else None
        ctypes.CDLL(str(tmp_path / torch_name))
        way = open_nccl()
        vector = torch.ones(3)
        way.allreduce(vector)
        assert vector.tolist() == [1, 1, 1]

    assert forked(work) == [""]


@pytest.mark.parametrize("flags", [[], ["-Wl,--exclude-libs,ALL"]])
def test_an_nccl_whose_functions_torch_hides_counts_for_none(comm, tmp_path, flags):
    """As where torch was built with NCCL's static library."""
    subprocess.run(["gcc", "-fPIC", "-c", SOURCE, "-o", tmp_path / "nccl.o"], check=True)
    archive = tmp_path / "libnccl_static.a"
    subprocess.run(["ar", "rcs", archive, tmp_path / "nccl.o"], check=True)
    link = ["-Wl,--whole-archive", str(archive), "-Wl,--no-whole-archive", "-ldl", "-lrt", *flags]
    compile_library(tmp_path / "libtorch_cuda.so", "", *link)

    def work(open_nccl):
        torch.cuda.nccl.version = lambda: (2, 29, 7)
        gpu = SimpleNamespace(uuid="a", pci_domain_id=0, pci_bus_id=3, pci_device_id=1)
        torch.cuda.get_device_properties = lambda device: gpu
        ctypes.CDLL(str(tmp_path / "libtorch_cuda.so"))
        own = RankDevice.find(torch.device("cuda", 0))
        assert own[1:] == ("a", "" if flags else "NCCL 2.29.7", "0000:03:01")

    assert forked(work) == [""]
