"""Which GPU the threads of a process use, and what the emulated one tells of another."""

from __future__ import annotations

import re
import sys

import pytest

from tests.gpu.emulator import REPORT
from tests.support.launch import ROOT, run, run_mpi
from tests.support.pictures import class_folders, make_pack

pytestmark = pytest.mark.emulated_gpu
TWO = {"HPCTRAIN_EMULATED_GPUS": "2"}

FORGETFUL = """
import threading, torch, emulated_gpu
torch.cuda.set_device(1)
event = torch.cuda.current_stream().record_event()
def wait(device=None):
    if device is not None:
        torch.cuda.set_device(device)
    event.synchronize()
def in_thread(*arguments):
    thread = threading.Thread(target=wait, args=arguments)
    thread.start()
    thread.join()
in_thread(1)
assert emulated_gpu.contexts() == [1] and emulated_gpu.counts()["other_device"] == 0
in_thread()
in_thread()
print(emulated_gpu.contexts(), emulated_gpu.counts()["other_device"])
"""


def test_a_thread_that_has_another_device_is_reported_once_for_each_call():
    done = run([sys.executable, "-c", FORGETFUL], 100, TWO, ROOT)
    assert done.stdout == "[0, 1] 2\n", done.stdout + done.stderr
    assert done.stderr.splitlines() == [
        f"{REPORT}EventSynchronize creates a context on GPU 0, too",
        f"{REPORT}EventSynchronize uses GPU 1, and its thread's current device is GPU 0",
    ]


CURRENT = """
import emulated_gpu, torch
import hpctrain as hp
from tests.support.source import Source
torch.cuda.set_device(1)
order, options = hp.Order(hp.cut_epoch(101, 16, 3)), hp.ReadOptions(device="cuda")
loader = hp.Loader(Source(), order, [0, 1], hp.Pipeline("cuda"), options=options)
assert {batch.images.device.index for step in loader.epoch(0) for batch in step} == {1}
assert emulated_gpu.contexts() == [1] and emulated_gpu.counts()["other_device"] == 0
"""


def test_a_loader_for_cuda_uses_the_current_gpu_of_who_made_it():
    done = run([sys.executable, "-c", CURRENT], 100, TWO, ROOT)
    assert done.returncode == 0 and REPORT not in done.stderr, done.stdout + done.stderr


RANK = """
import os, sys, threading, emulated_gpu
import hpctrain as hp
from hpctrain.data import images
folder, failed, asked, decode_threads = sys.argv[1], [], [], images.decode_threads
os.sched_getaffinity = lambda pid: {*range(22)}  # for two ranks
images.decode_threads = lambda threads=None: asked.append(threads) or decode_threads(threads)
threading.excepthook = lambda args: failed.append(args.exc_value)
config = hp.Config(
    data=f"{folder}/pack.h5", runs_dir=folder, run="a", device="cuda", epochs=2, batch_size=32,
    shuffle="blocks", read_buffer="1k", overlap=2, checkpoint_every="1epochs", precision="default",
    progress="none", threads=1,
)
trained = threading.Thread(target=hp.train, args=[config])
trained.start()
trained.join()
assert not failed, failed
hp.evaluate("a", runs_dir=folder, device="cuda", threads=1)
assert asked == [11] * 4, asked  # train, validation, test, evaluate
rank = hp.start_mpi().rank
assert emulated_gpu.contexts() == [rank] and emulated_gpu.counts()["other_device"] == 0
"""


@pytest.mark.timeout(420)
def test_every_thread_of_a_rank_uses_its_gpu_alone(tmp_path):
    """Also if a thread of the user's trains, and of a network on another GPU than the current one.

    As many threads decode as a rank has cores.
    """
    files = class_folders(tmp_path / "images", {"a": 51, "b": 43}, ".jpg", width=37, height=31)
    flags = {"size": "17x13", "encoding": "jpeg", "split": "0.8,0.1,0.1"}
    make_pack(files, tmp_path / "pack.h5", **flags)
    done = run_mpi(2, ["-c", RANK, str(tmp_path)], 200, TWO)
    assert done.returncode == 0 and REPORT not in done.stderr, done.stdout + done.stderr
    done = run([sys.executable, "-c", LOADED, str(tmp_path / "a")], 200, TWO, ROOT)
    assert done.returncode == 0 and REPORT not in done.stderr, done.stdout + done.stderr


LOADED = """
import sys, emulated_gpu, numpy as np, torch
import hpctrain as hp
network = hp.load(sys.argv[1], device="cuda:1")
images = np.zeros((7, *network.image_shape), np.uint8)
here = hp.load(sys.argv[1], device="cpu").predict(images)
there = network.predict(images, batch_size=2)
np.testing.assert_allclose(here.probabilities, there.probabilities, rtol=1e-4)
assert emulated_gpu.contexts() == [1] and emulated_gpu.counts()["other_device"] == 0
assert torch.cuda.current_device() == 0
network.model.register_forward_hook(lambda model, given, out: torch.dropout(out, 0.5, True))
drawn = []  # by the block's own random numbers, whatever the generator did before
for _ in range(2):
    drawn.append(network.predict(images).probabilities)
    torch.randn(3, device="cuda:1")
assert np.array_equal(*drawn) and not np.array_equal(drawn[0], there.probabilities)
"""


def test_each_rank_takes_its_slice_of_a_gpu_and_nccl_is_not_used_between_them():
    env = TWO | {"HPCTRAIN_EMULATED_MIG": "yes", "CUDA_VISIBLE_DEVICES": "MIG-0202,MIG-0101"}
    done = run_mpi(2, ["-m", "hpctrain", "doctor"], 100, env)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "2 x Emulated GPU MIG 1g.16gb" in done.stdout
    slices = "2 ranks have slices of 1 GPU of .* [(]MIG[)], which NCCL refuses"
    assert re.search(f"messages +--reduce auto is host: {slices}", done.stdout)
