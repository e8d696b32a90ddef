"""On a GPU: hpctrain's step against a plain torch loop and against DDP, alternating in one process.

All use the same network, precision, memory format, fused SGD and the same batches, which are on the
GPU; cuDNN chooses its algorithms by timing for all. A round is a number of steps and a
synchronization with the device at its end. Medians over rounds, in which all alternate, are
compared. On an emulated GPU, sizes are tiny, and speeds are not judged.
"""

from __future__ import annotations

import statistics
import time

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import hpctrain as hp
from scripts.bench.steps import first_batches, plain_step, ready
from tests.gpu.emulator import EMULATED
from tests.support.api import open_transport, zeros_for_messages
from tests.support.packs import make_pack

pytestmark = [pytest.mark.gpu, pytest.mark.slow, pytest.mark.filterwarnings("default")]
TARGET, STAGED_TARGET = 0.98, 0.8  # of the others' speed; of the speed of copies
BATCHES, ROUNDS = 4, 5
NUMBERS = 250_000 if EMULATED else 25_000_000  # float32: 100 MB, as the message of ResNet-50
WORK = [("digits", (28, 28, 1), "fp32", 128, 200), ("resnet50", (100, 100, 3), "bf16", 128, 30)]
if EMULATED:
    WORK = [("digits", (28, 28, 1), "fp32", 8, 3), ("resnet18", (32, 32, 3), "bf16", 4, 2)]


def seconds(ways, steps):
    """The median seconds of each way's rounds of `steps`, alternating; the first is not counted."""
    found = {name: [] for name in ways}
    for _ in range(1 + ROUNDS):
        for name, way in ways.items():
            torch.cuda.synchronize()
            began = time.perf_counter()
            for number in range(steps):
                way(number)
            torch.cuda.synchronize()
            found[name].append(time.perf_counter() - began)
    return {name: statistics.median(times[1:]) for name, times in found.items()}


def stepping(step, batches):
    """A function for the n-th step of a plain loop."""

    def work(n):
        (batch,) = batches[n % BATCHES]
        step(batch.images, batch.targets)

    return work


@pytest.fixture
def one_process():
    """A process group of torch for one process."""
    backend = "gloo" if EMULATED else "nccl"
    dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.parametrize(("network", "shape", "precision", "batch", "steps"), WORK)
def test_a_step_is_as_fast_as_a_plain_one(
    tmp_path, one_process, network, shape, precision, batch, steps, record_property
):
    pack = make_pack(tmp_path / "pack.h5", {"train": batch * BATCHES}, shape)
    flags = f"--data {pack} --model {network} --batch-size {batch} --precision {precision}"
    flags += " --device cuda"
    with ready(*flags.split()) as run, ready(*flags.split(), "--cuda-graphs") as graphs:
        batches = first_batches(run, BATCHES)
        ways = {
            "ours": lambda n: run.trainer.step(batches[n % BATCHES], batch),
            "ours, graphs": lambda n: graphs.trainer.step(batches[n % BATCHES], batch),
        }
        for name, wrap in {"plain": lambda model: model, "DDP": DistributedDataParallel}.items():
            model = hp.build(network, shape, 10).train().cuda()
            model = wrap(model.to(memory_format=torch.channels_last))
            ways[name] = stepping(plain_step(model, precision, fused=True), batches)
        found = seconds(ways, steps)
    for name, spent in found.items():
        record_property(f"images/s, {name}", batch * steps / spent)
    best = min(found["plain"], found["DDP"])
    assert EMULATED or max(found["ours"], found["ours, graphs"]) * TARGET <= best, found


def test_staging_is_nearly_as_fast_as_copying(comm, record_property):
    """A staged Allreduce of one rank, which sums nothing, against a copy down and one up."""
    vector = zeros_for_messages(NUMBERS, torch.float32, torch.device("cuda", 0))
    host = torch.zeros(NUMBERS, pin_memory=True)
    transport = open_transport(comm, "host")

    def copy(number):
        host.copy_(vector, non_blocking=True)
        vector.copy_(host, non_blocking=True)

    found = seconds({"staged": lambda _: transport.allreduce(vector), "copied": copy}, 10)
    for name, spent in found.items():
        record_property(f"GB/s, {name}", 20 * vector.nbytes / spent / 1e9)
    assert EMULATED or STAGED_TARGET * found["staged"] <= found["copied"]
