"""On a GPU: where the message lies, and what a step does to the device."""

from __future__ import annotations

import ctypes
import json
import warnings
from contextlib import ExitStack, contextmanager

import numpy as np
import pytest
import torch

from scripts.bench.steps import first_batches, ready
from tests.gpu.emulator import EMULATED
from tests.support.api import memory_of, open_transport, zeros_for_messages
from tests.support.packs import make_pack
from tests.support.ranks import alone

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.filterwarnings("default"),  # torch tells of prototypes and of its profiler's ways
]
STEPS, WARM, BATCH = 5, 3, 32
FEW_BYTES = 4096  # that may be copied to the host in a step: losses, counts, times
# Attributes of cuPointerGetAttribute (CUDA Driver API, "Unified Addressing") and their values for
# memory of cudaMalloc: CU_MEMORYTYPE_DEVICE, not managed, exportable by IPC, of no pool.
MEMORY_TYPE = 2
PLAIN = {MEMORY_TYPE: 2, 8: 0, 10: 1, 17: 0}


@contextmanager
def made_run(tmp_path, *flags):
    """A run on the GPU, and a function for a step of it, which returns what it reports."""
    shape, network = ((28, 28, 1), "digits") if EMULATED else ((100, 100, 3), "resnet50")
    pack = make_pack(tmp_path / "pack.h5", {"train": BATCH}, shape)
    words = ["--data", pack, "--model", network, "--batch-size", BATCH, "--device", "cuda"]
    with ready(*words, *flags) as run:
        (batches,) = first_batches(run)
        for _ in range(WARM):  # code that replaces a view does so in a step
            run.trainer.step(batches, BATCH).array()
        yield run, lambda: run.trainer.step(batches, BATCH)


def in_torch_pool(tensor):
    """Whether the memory is in a segment of torch's caching allocator."""
    segments = [(s["address"], s["total_size"]) for s in torch.cuda.memory_snapshot()]
    return any(first <= tensor.data_ptr() < first + size for first, size in segments)


def attribute(tensor, number):
    """The int, bool or handle that cuPointerGetAttribute gives."""
    value, place = ctypes.c_uint64(0), ctypes.c_uint64(tensor.data_ptr())
    driver = ctypes.CDLL("libcuda.so.1")
    code = driver.cuPointerGetAttribute(ctypes.byref(value), ctypes.c_int(number), place)
    assert code == 0, f"CUDA error {code}"
    return value.value


def test_parameters_lie_in_the_weights_and_gradients_in_the_message_alone(tmp_path):
    with made_run(tmp_path) as (run, _):
        weights = run.trainer.message.weights
        for parameter in run.trainer.model.parameters():
            place = parameter.data_ptr() - weights.data_ptr()
            assert 0 <= place <= weights.nbytes - parameter.nbytes and parameter.grad is None


def test_the_message_is_plain_device_memory_of_cupy(tmp_path):
    with made_run(tmp_path) as (run, _):
        message = run.trainer.message
        if memory_of(message.tensor.device)[0] != "cupy":
            pytest.skip("CuPy does not allocate it")
        assert not in_torch_pool(message.tensor) and in_torch_pool(message.weights)
        assert {number: attribute(message.tensor, number) for number in PLAIN} == PLAIN
    assert attribute(torch.zeros(1024, pin_memory=True), MEMORY_TYPE) != PLAIN[MEMORY_TYPE]


def test_a_step_reduces_once_and_copies_little_to_the_host(tmp_path, monkeypatch, record_property):
    """NCCL with one rank sums in place without a kernel: the calls are counted as well."""
    kinds, calls = torch.profiler.ProfilerActivity, []
    with made_run(tmp_path, "--reduce", "nccl") as (run, step), ExitStack() as stack:
        transport = run.trainer.reduce.transport
        allreduce = transport.allreduce
        monkeypatch.setattr(transport, "allreduce", lambda *to: calls.append(allreduce(*to)))
        if not EMULATED:
            profile = torch.profiler.profile(activities=(kinds.CPU, kinds.CUDA))
            stack.enter_context(profile)
        for _ in range(STEPS):
            step().array()
        torch.cuda.synchronize()
    assert len(calls) == STEPS
    if EMULATED:
        return  # it has no profiler
    profile.export_chrome_trace(str(tmp_path / "trace.json"))
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    kernels = [e["name"].lower() for e in events if e.get("cat") == "kernel"]
    copies = [e for e in events if e.get("cat") == "gpu_memcpy" and "DtoH" in e["name"]]
    down = sum(int(copy["args"]["bytes"]) for copy in copies) / STEPS
    record_property("kernels per step", len(kernels) / STEPS)
    record_property("bytes to the host per step", down)
    assert sum("nccl" in name for name in kernels) <= STEPS <= len(kernels)
    assert 0 < down <= FEW_BYTES


@pytest.mark.parametrize("flags", [[], ["--reduce", "nccl"]])
def test_no_step_waits_for_the_device(tmp_path, flags):
    """torch raises if an operation synchronizes, as reading a number does."""
    with made_run(tmp_path, *flags) as (run, step), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the warning that this mode is a prototype
        torch.cuda.set_sync_debug_mode("error")
        try:
            for _ in range(STEPS):
                step()
            with pytest.raises(RuntimeError, match="synchroniz"):
                run.trainer.message.scalars.tolist()
        finally:
            torch.cuda.set_sync_debug_mode("default")


def test_staging_sums_what_lies_on_the_gpu(comm):
    """Through pinned memory in pieces, and back to where it was."""
    vector = zeros_for_messages(1003, torch.float32, torch.device("cuda", 0))
    vector.copy_(torch.arange(1003))
    open_transport(comm, "host", 64).allreduce(vector)
    assert torch.equal(vector.cpu(), torch.arange(1003.0))


def test_a_gpu_finds_the_figures_of_the_cpu(tmp_path):
    pack = make_pack(tmp_path / "pack.h5", {"train": 61, "test": 47})
    same = ["--runs-dir", tmp_path / "runs", "--threads", "1"]
    train = ["train", "--data", pack, "--epochs", "1", "--batch-size", "16", "--run", "a"]
    assert alone(*train, *same, "--device", "cpu").code == 0
    found = []
    for device in ("cpu", "cuda"):
        output = tmp_path / f"{device}.json"
        assert alone("evaluate", "a", *same, "--device", device, "--output", output).code == 0
        found.append(json.loads(output.read_text()))
    assert found[0]["loss"] == pytest.approx(found[1]["loss"], rel=1e-3)  # TF32 is allowed here
    apart = np.array(found[0]["confusion"]) - np.array(found[1]["confusion"])
    assert np.abs(apart).sum() <= 2
