"""--batch-per-rank auto: what fits is found before the first step, and is part of the plan."""

from __future__ import annotations

import contextlib
import dataclasses
import json

import pytest
import torch

from hpctrain.config import Config, check_settings
from hpctrain.data.loader import make_prepare
from hpctrain.data.packed import read_pack
from hpctrain.data.split import Split
from hpctrain.errors import UsageError
from hpctrain.inference.tasks import Classification
from hpctrain.models import build
from hpctrain.parallel.batchnorm import BatchNorms
from hpctrain.plan import Facts, resolve
from hpctrain.training import batch_fit
from hpctrain.training.batch_fit import MemoryTrial, fit_batch, free_memory
from hpctrain.training.live_bytes import LiveBytes
from hpctrain.training.train import train
from tests.packs import make_pack
from tests.training.runs import digest, short_run

FACTS = Facts(4, "cpu", 1, 1001, (28, 28, 1), 1, 10, "uuid", 1)
MIB = 1 << 20


def fit(most, facts=FACTS, **given):
    """The plan, the note and what was tried, where `most` images of a shard fit."""
    tried = []

    def fits(images, shards):
        tried.append((images, shards))
        return images <= most

    config, note = fit_batch(Config(batch_per_rank="auto", **given), facts, fits)
    return resolve(config, facts), note, tried


def test_the_largest_power_of_two_for_every_shard():
    plan, note, tried = fit(100)
    assert (plan.batch_size, plan.shards) == (4 * 64, 4) and "64 images per shard" in note
    assert tried == [(n, 4) for n in (1, 2, 4, 8, 16, 32, 64, 128)]
    assert fit(100, shards=12)[0].batch_size == 12 * 64
    assert fit(100, worker_load="3,1,1,1")[0].batch_size == 6 * 64
    assert fit(1 << 30)[0].batch_size == 4 * 128  # 1001 images over 4 shards: at least one step
    # lr-scaling: from the batch size of one worker, as where no batch size is given
    scaled = fit(100, lr=0.1, lr_scaling="linear")[0]
    assert scaled.learning_rate == pytest.approx(0.1 * 256 / 128)


def test_a_batch_that_leaves_too_few_for_the_last_step_is_a_little_smaller():
    """65 images in steps of 4 x 16 leave 1, where a shard needs 2."""
    facts = dataclasses.replace(FACTS, rows=65, min_samples=2)
    with pytest.raises(UsageError):
        resolve(Config(batch_size=64), facts)
    plan, note, tried = fit(16, facts)
    assert plan.batch_size == 4 * 15 and "15 images per shard" in note
    assert tried[0] == (2, 4)


def test_a_given_batch_is_cut_into_as_many_shards_as_needed():
    plan, note, tried = fit(100, batch_size=1000)
    assert (plan.batch_size, plan.shards) == (1000, 16)
    assert (
        tried == [(250, 4), (125, 8), (63, 16)] and "up to 63 images per shard, 16 shards" in note
    )
    assert fit(250, batch_size=1000)[0].shards == 4
    assert resolve(Config(batch_size=1000, shards=16), FACTS) == plan


def test_given_shards_are_kept_or_refused_with_those_that_would_fit():
    """The plan, and so every bit of the result, is that of the same settings without auto."""
    plain = resolve(Config(batch_size=960, shards=8), FACTS)
    for most in (120, 1000):
        assert fit(most, batch_size=960, shards=8)[0] == plain
    with pytest.raises(UsageError, match="120 images of a shard do not fit .* --shards 32 would"):
        fit(30, batch_size=960, shards=8)


@pytest.mark.parametrize("given", [{}, {"batch_size": 64}, {"batch_size": 64, "shards": 4}])
def test_where_nothing_fits_it_says_so(given):
    with pytest.raises(UsageError, match="not even 1 image of a shard fit") as caught:
        fit(0, **given)
    assert caught.value.agreed


def test_other_settings_are_not_measured():
    config = Config(batch_per_rank="16")
    assert fit_batch(config, FACTS, None) == (config, "")
    for text in ("many", "2.5", ""):
        with pytest.raises(UsageError, match=f"--batch-per-rank {text}: give a number of images"):
            check_settings(Config(batch_per_rank=text))
    with pytest.raises(UsageError, match="auto and --graphs exclude"):
        check_settings(Config(batch_per_rank="auto", graphs=True))


def test_live_bytes_are_those_of_tensors():
    before = torch.ones(1000)
    with LiveBytes() as live:
        a = torch.ones(1000)
        b = a + before  # three vectors, one of which was there
        view = b.view(10, 100)
        del a
        assert (live.now, live.peak) == (4000, 8000)
        before.add_(1)
        del b
        assert live.now == 4000  # held by the view
        del view
        assert (live.now, live.peak) == (0, 8000)


@pytest.fixture
def make_trial(comm, shared_tmp):
    if comm.rank == 0:
        make_pack(shared_tmp / "p.h5", {"train": 600, "test": 5})
    comm.Barrier()
    pack = read_pack(shared_tmp / "p.h5")

    def make(config=Config()):  # noqa: B008
        torch.manual_seed(1)
        model = build("digits", pack.image_shape, 10).train()
        source = Split(pack, "train")
        BatchNorms(model)  # sets the momentum of a run
        task = Classification(classes=10)
        return MemoryTrial(model, task, source, make_prepare(), config, comm), model

    return make


@pytest.mark.mpi
def test_on_cpus_two_steps_are_extrapolated(comm, make_trial, monkeypatch):
    """The rank with the least memory decides; afterwards the network is as before."""
    trial, model = make_trial(Config(read_buffer="1M"))
    state = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    generator = torch.get_rng_state()
    monkeypatch.setattr(
        batch_fit, "free_memory", lambda: comm.size * MIB * (200 if comm.rank else 100)
    )
    largest = max(n for n in range(0, 400, 10) if n == 0 or trial(n, comm.size))
    least = 100 * MIB - MIB - trial._weights * 5 - 2 * largest * 28 * 28 * 4
    with LiveBytes() as live:
        trial.step(largest)
    assert live.peak * 2 == pytest.approx(least, rel=0.1)
    assert comm.allgather(largest) == [largest] * comm.size
    assert torch.equal(torch.get_rng_state(), generator)
    assert all(torch.equal(tensor, state[name]) for name, tensor in model.state_dict().items())
    assert all(parameter.grad is None for parameter in model.parameters())


def test_a_step_that_may_not_fit_is_not_run(make_trial, monkeypatch):
    trial, _ = make_trial(Config(read_buffer="1M"))
    monkeypatch.setattr(batch_fit, "free_memory", lambda: 12.0 * MIB)
    ran = []
    step = MemoryTrial.step
    monkeypatch.setattr(MemoryTrial, "step", lambda self, n: (ran.append(n), step(self, n)))
    assert trial(1, 1) and not trial(64, 1)
    assert ran == [4]


def test_a_rank_without_free_memory_asks_the_others_once_too(make_trial, monkeypatch):
    """It is a collective call: a rank that repeats it waits for ever."""
    trial, _ = make_trial(Config(read_buffer="1M"))
    asked = []

    def free():
        asked.append(1)
        return 0.0

    monkeypatch.setattr(batch_fit, "free_memory", free)
    assert not trial(1, 1) and not trial(1, 1)
    assert asked == [1]


@pytest.mark.mpi
def test_out_of_memory_on_any_rank_counts_for_all(comm, make_trial, monkeypatch):
    """The way of GPUs, with a step that fails as theirs do."""
    trial, _ = make_trial()
    limit = 100 if comm.rank == comm.size - 1 else 300

    def step(self, images):
        if images > limit:
            raise torch.cuda.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(MemoryTrial, "step", step)
    monkeypatch.setattr(MemoryTrial, "_fits_cpu", MemoryTrial._fits_gpu)
    monkeypatch.setattr(batch_fit, "limited", lambda *_: contextlib.nullcontext())
    facts = dataclasses.replace(FACTS, ranks=comm.size)
    config, _ = fit_batch(Config(batch_per_rank="auto"), facts, trial)
    assert config.batch_size == 64 * comm.size


@pytest.mark.mpi
def test_a_resumed_run_does_not_measure_again(comm, shared_tmp, monkeypatch):
    if comm.rank == 0:
        make_pack(shared_tmp / "p.h5", {"train": 600, "test": 5})
    comm.Barrier()
    config = short_run(shared_tmp, "p.h5", run="a", batch_per_rank="auto", read_buffer="1M")
    monkeypatch.setattr(batch_fit, "free_memory", lambda: comm.size * 60.0 * MIB)
    train(config, comm)
    plan = json.loads((shared_tmp / "runs" / "a" / "plan.json").read_text())
    assert plan["batch_size"] in [n * comm.size for n in (16, 32, 64)]
    monkeypatch.setattr(batch_fit, "free_memory", None)
    train(dataclasses.replace(config, epochs=2), comm)
    again = json.loads((shared_tmp / "runs" / "a" / "plan.json").read_text())
    assert (again["batch_size"], again["epochs"]) == (plan["batch_size"], 2)


@pytest.mark.mpi
def test_with_batch_size_and_shards_the_bits_do_not_depend_on_memory(comm, shared_tmp, monkeypatch):
    if comm.rank == 0:
        make_pack(shared_tmp / "p.h5", {"train": 100, "test": 5})
    comm.Barrier()
    given = {"batch_size": 40, "shards": 4, "deterministic": True, "read_buffer": "1M"}
    config = short_run(shared_tmp, "p.h5", **given)
    plain = digest(config, comm, "plain")
    config = dataclasses.replace(config, batch_per_rank="auto")
    for name, memory in (("little", 60.0), ("much", 6000.0)):
        monkeypatch.setattr(batch_fit, "free_memory", lambda m=memory: comm.size * m * MIB)
        assert digest(config, comm, name) == plain
    monkeypatch.setattr(batch_fit, "free_memory", lambda: comm.size * 12.0 * MIB)
    with pytest.raises(UsageError, match="--batch-size 40 with --shards 4: 10 images .* --shards"):
        train(config, comm)


def host(root, groups, files):
    """A /proc and a /sys with 1 GiB available."""
    (root / "proc/self").mkdir(parents=True)
    (root / "proc/meminfo").write_text("MemFree: 1 kB\nMemAvailable:    1048576 kB\n")
    (root / "proc/self/cgroup").write_text(groups)
    for name, text in files.items():
        path = root / "sys/fs/cgroup" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return free_memory(root) / MIB


def test_free_memory_is_that_of_the_host_or_of_its_control_group(tmp_path):
    def group(folder, limit, used, cached):
        return {
            f"{folder}/memory.max": f"{limit}\n",
            f"{folder}/memory.current": f"{used * MIB}\n",
            f"{folder}/memory.stat": f"anon 5\ninactive_file {cached * MIB}\n",
        }

    assert host(tmp_path / "none", "0::/\n", {}) == 1024
    own = group("job/step", 500 * MIB, 200, 50)
    assert host(tmp_path / "own", "0::/job/step\n", own) == 350
    above = group("job", 300 * MIB, 200, 0) | group("job/step", "max", 100, 0)
    assert host(tmp_path / "above", "0::/job/step\n", above) == 100
    old = {
        "memory/job/memory.limit_in_bytes": str(90 * MIB),
        "memory/job/memory.usage_in_bytes": str(80 * MIB),
        "memory/job/memory.stat": f"inactive_file 0\ntotal_inactive_file {10 * MIB}\n",
    }
    assert host(tmp_path / "old", "4:cpu,memory:/job\n3:pids:/\n", old) == 20
