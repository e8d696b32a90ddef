"""The training loop on all ranks of the session: one Allreduce a step, records, stop, NaN."""

from __future__ import annotations

import dataclasses
import json
from collections import Counter
from pathlib import Path

import pytest
import torch

from hpctrain.config import Config
from hpctrain.errors import RunError, UsageError
from hpctrain.models import read_model
from hpctrain.parallel.placement import RankDevice
from hpctrain.report.record import read_records
from hpctrain.report.recorder import Recorder
from hpctrain.training import loop as inner
from hpctrain.training import train as loop
from hpctrain.training.control import Control
from hpctrain.training.loop import train_epochs
from hpctrain.training.setup import set_up
from tests.support.packs import make_pack
from tests.training.runs import make_run

pytestmark = pytest.mark.mpi


class CountingComm:
    """A communicator that counts the calls made through it."""

    def __init__(self, comm):
        self._comm, self.calls = comm, Counter()

    def __getattr__(self, name):
        value = getattr(self._comm, name)
        if not callable(value):
            return value

        def counted(*args, **kwargs):
            self.calls[name] += 1
            return value(*args, **kwargs)

        return counted


@pytest.mark.parametrize(
    ("model", "shape", "rows", "per_rank"),
    [
        ("digits", (28, 28, 1), 101, 1),
        ("digits", (28, 28, 1), 101, 3),
        ("resnet50", (32, 32, 3), 35, 1),
    ],
)
def test_exactly_one_mpi_call_a_step(comm, shared_tmp, model, shape, rows, per_rank):
    """Whatever the network, and however many shards a rank accumulates."""
    if comm.rank == 0:
        make_pack(shared_tmp / "pack.h5", {"train": rows}, shape, 5)
    comm.Barrier()
    counting = CountingComm(comm)
    config = Config(
        data=str(shared_tmp / "pack.h5"),
        model=model,
        epochs=1,
        batch_size=16,
        threads=1,
        shards=per_rank * comm.size,
    )
    job = set_up(config, counting)
    assert job.plan.steps_per_epoch == -(-rows // 16)
    counting.calls.clear()
    with Recorder(None) as recorder:
        train_epochs(make_run(job, counting, recorder))
    assert counting.calls == {"Allreduce": job.plan.steps_per_epoch}


def test_a_run_leaves_records_configuration_plan_and_weights(comm, settings):
    assert loop.train(settings, comm) == 0
    folder = Path(settings.runs_dir) / "a"
    if comm.rank > 0:
        return
    records = list(read_records(folder))
    kinds = Counter(r["kind"] for r in records)
    assert kinds == {"run": 1, "step": 14, "epoch": 2, "digest": 2, "evaluation": 3, "end": 1}
    steps = [r for r in records if r["kind"] == "step"]
    assert [r["step"] for r in steps] == list(range(1, 15))
    assert sum(r["rows"] for r in steps) == 2 * 101
    assert set(steps[0]["seconds"]) == {"data", "compute", "reduce", "total", "idle"}
    assert records[-1]["status"] == "done"
    tensors, metadata = read_model(folder / "model.safetensors")
    assert metadata["step"] == 14
    assert metadata["classes"] == [f"class{k}" for k in range(10)]
    counters = [t.item() for name, t in tensors.items() if name.endswith("num_batches_tracked")]
    assert counters == [14, 14, 14]
    text = (folder / "config.toml").read_text()
    for field in dataclasses.fields(Config):
        assert field.name in text
    assert json.loads((folder / "plan.json").read_text())["ranks"] == comm.size


def allocate_too_much(*arguments):
    torch.empty(1 << 60, dtype=torch.uint8)


def fill_the_gpu(*arguments):
    raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")


def fill_the_host(*arguments):
    raise MemoryError


@pytest.mark.parametrize("step", [allocate_too_much, fill_the_gpu, fill_the_host])
def test_out_of_memory_is_one_line_that_names_shards(
    one_rank, settings, monkeypatch, tmp_path, step
):
    monkeypatch.setattr("hpctrain.training.loop.train_step", step)
    with pytest.raises(RunError, match="^out of memory .*emory.* more --shards .* batch norm"):
        loop.train(dataclasses.replace(settings, runs_dir=str(tmp_path)), one_rank)


def test_what_a_step_an_evaluation_and_a_save_take_is_measured(comm, settings, monkeypatch):
    """From these the run knows when to leave before its time is up."""
    seen = []
    original = Control.flags

    def flags(self, *told):
        found = self.slowest_step, self.slowest_evaluation, self.saving
        seen.append((*found, self.margin()))
        return original(self, *told)

    monkeypatch.setattr(Control, "flags", flags)
    loop.train(
        dataclasses.replace(settings, validate_every="4steps", checkpoint_every="3steps"), comm
    )
    assert seen[0][:2] == (0, 0)
    assert 0 < seen[0][2] < 1, "guessed, until one was saved"
    assert 0 < seen[1][0] < 30
    steps, evaluations, saves, margins = zip(*seen, strict=True)
    assert [s == 0 for s in evaluations] == [True] * 4 + [False] * 10
    assert list(steps) == sorted(steps)
    assert all(margin > 5 for margin in margins)
    assert (saves[-1] != saves[0]) == (comm.rank == 0)


def test_ranks_that_share_a_gpu_are_told_so(comm, settings, monkeypatch, capsys):
    """In the record, and with the plan; for ranks on CPUs nothing is said."""
    assert loop.train(dataclasses.replace(settings, run="cpu", epochs=1), comm) == 0
    shared = RankDevice("n1", "the only GPU", "NCCL 2")
    monkeypatch.setattr("hpctrain.parallel.choose.describe_rank", lambda device: shared)
    assert loop.train(dataclasses.replace(settings, run="gpu", epochs=1), comm) == 0
    capsys.readouterr()
    assert loop.train(dataclasses.replace(settings, run="dry", dry_run=True), comm) == 0
    expected = [f"{comm.size} ranks share 1 GPU of n1"] if comm.size > 1 else []
    planned = [line for line in capsys.readouterr().out.splitlines() if line[:4] == "note"]
    if comm.rank == 0:
        for run, text in (("cpu", []), ("gpu", expected)):
            records = read_records(Path(settings.runs_dir) / run)
            assert [r["text"] for r in records if r["kind"] == "note"] == text
        assert planned == [f"note           {text}" for text in expected]


def test_the_network_learns(comm, settings):
    loop.train(dataclasses.replace(settings, epochs=12), comm)
    if comm.rank == 0:
        records = list(read_records(Path(settings.runs_dir) / "a"))
        test = [r for r in records if r["kind"] == "evaluation" and r["split"] == "test"]
        assert test[-1]["accuracy"] > 0.8


def test_a_run_that_exists_is_never_overwritten(comm, settings):
    loop.train(settings, comm)
    with pytest.raises(UsageError, match="exists"):
        loop.train(dataclasses.replace(settings, resume="never"), comm)
    other = Path(settings.runs_dir) / "b"
    if comm.rank == 0:
        other.mkdir()
        (other / "notes.txt").write_text("mine")
    comm.Barrier()
    with pytest.raises(UsageError, match="exists but is no run to continue, it has no config.toml"):
        loop.train(dataclasses.replace(settings, run="b"), comm)


def test_a_stop_file_ends_training_after_the_same_step_on_all_ranks(comm, settings, monkeypatch):
    asked = []

    def stop_at_step_3(self):
        asked.append(1)
        return len(asked) >= 3 and comm.rank == comm.size - 1

    monkeypatch.setattr(Control, "asked", stop_at_step_3)
    assert loop.train(settings, comm) == 0
    assert comm.allgather(len(asked)) == [3] * comm.size
    if comm.rank == 0:
        records = list(read_records(Path(settings.runs_dir) / "a"))
        assert records[-1]["status"] == "stopped"
        assert records[-1]["steps"] == 3
        assert read_model(settings.runs_dir + "/a/model.safetensors")[1]["step"] == 3


def test_the_stop_file_is_seen(tmp_path):
    with Control(tmp_path) as control:
        assert not control.asked()
        (tmp_path / "STOP").touch()
        control._looked = 0.0
        assert control.asked()


def test_a_loss_that_is_not_finite_stops_all_ranks_and_keeps_the_last_good_weights(comm, settings):
    wild = dataclasses.replace(settings, lr=1e30)
    with pytest.raises(RunError, match=r"step \d+ \(epoch 1\) is not finite.*are kept"):
        loop.train(wild, comm)
    if comm.rank == 0:
        folder = Path(settings.runs_dir) / "a"
        end = list(read_records(folder))[-1]
        assert end["status"] == "failed"
        tensors, metadata = read_model(folder / "model.safetensors")
        assert all(torch.isfinite(t.float()).all() for t in tensors.values())
        assert metadata["step"] == int(end["reason"].split("step ")[1].split()[0]) - 1


def test_more_shards_than_ranks_accumulate_to_the_same_network(comm, settings):
    """Shards are what matters, not ranks: 6 shards give nearly the same weights on any ranks."""
    loop.train(dataclasses.replace(settings, shards=6), comm)
    mine = settings.runs_dir + "/a/model.safetensors"
    alone = comm.Split(comm.rank)
    try:
        for rank in range(comm.size):
            if rank == comm.rank == 0:
                loop.train(dataclasses.replace(settings, shards=6, run="b"), alone)
            comm.Barrier()
    finally:
        alone.Free()
    if comm.rank == 0:
        ours, other = read_model(mine)[0], read_model(mine.replace("/a/", "/b/"))[0]
        for name, value in ours.items():
            torch.testing.assert_close(value, other[name], rtol=1e-3, atol=1e-4)


def test_more_ranks_than_shards_are_refused_with_both_numbers(comm, settings):
    if comm.size == 1:
        return
    with pytest.raises(UsageError, match=rf"{comm.size} ranks cannot carry 1 shards"):
        loop.train(dataclasses.replace(settings, shards=1), comm)


def test_a_model_with_buffers_that_change_is_refused_by_name(comm, settings):
    odd = dataclasses.replace(settings, model="tests.support.nets:counting")
    with pytest.raises(UsageError, match="buffer seen changed .* Only batch norm may"):
        set_up(odd, comm)


def test_all_ranks_start_from_the_weights_of_rank_0(comm, settings):
    own = dataclasses.replace(settings, model="tests.support.nets:different_on_every_rank")
    job = set_up(own, comm)
    bits = comm.allgather(job.trainer.message.weights.detach().numpy().tobytes())
    assert len(set(bits)) == 1


def test_a_batch_norm_layer_that_is_skipped_under_way_is_an_error(comm, settings):
    odd = dataclasses.replace(settings, model="tests.support.nets:skipping")
    with pytest.raises(RunError, match="did not run exactly once in step"):
        loop.train(odd, comm)


def test_a_step_that_lost_rows_is_an_error(comm, settings, monkeypatch):
    step = inner.train_step

    def forgetful(trainer, batches, total, *args):
        return step(trainer, batches[1:], total, *args)

    monkeypatch.setattr(inner, "train_step", forgetful)
    with pytest.raises(RunError, match="step 1 summed 0 rows, but the plan has 16"):
        loop.train(settings, comm)


def test_validation_comes_at_the_end_where_no_epoch_asks_for_it(comm, settings):
    loop.train(dataclasses.replace(settings, validate_every="0"), comm)
    if comm.rank == 0:
        records = list(read_records(Path(settings.runs_dir) / "a"))
        found = [(r["split"], r["step"]) for r in records if r["kind"] == "evaluation"]
        assert found == [("validation", 14), ("test", 14)]


def test_a_corrupt_pack_is_refused(comm, settings):
    if comm.rank == 0:
        pack = Path(settings.data)
        data = bytearray(pack.read_bytes())
        data[len(data) // 2] ^= 1
        pack.write_bytes(bytes(data))
    comm.Barrier()
    with pytest.raises(UsageError, match="is corrupt"):
        set_up(settings, comm)


def test_the_ranks_whose_loss_is_not_finite_are_named(comm, settings, monkeypatch):
    def spoil(trainer, batches, *args):
        for batch in batches[: comm.rank > 0 or comm.size == 1]:
            batch.images.fill_(float("inf"))
        return step(trainer, batches, *args)

    step = inner.train_step
    monkeypatch.setattr(inner, "train_step", spoil)
    ranks = ", ".join(str(rank) for rank in range(comm.size) if rank or comm.size == 1)
    said = rf"the loss of step 1 \(epoch 1\) is not finite on rank {ranks}; the weights of step 0"
    with pytest.raises(RunError, match=said):
        loop.train(settings, comm)


def test_gradients_may_be_finite_where_moments_are_not(comm, settings):
    wild = dataclasses.replace(settings, model="tests.support.nets:overflowing", epochs=1)
    with pytest.raises(RunError, match="step 1 .* is not finite"):
        loop.train(wild, comm)


def test_an_epochs_figures_are_the_means_of_its_steps_by_rows(comm, settings):
    loop.train(settings, comm)
    if comm.rank == 0:
        records = list(read_records(Path(settings.runs_dir) / "a"))
        for epoch in (1, 2):
            steps = [r for r in records if r["kind"] == "step" and r["epoch"] == epoch]
            told = next(r for r in records if r["kind"] == "epoch" and r["epoch"] == epoch)
            rows = sum(r["rows"] for r in steps)
            assert rows == 101
            for name in ("loss", "accuracy"):
                mean = sum(r[name] * r["rows"] for r in steps) / rows
                assert told[name] == pytest.approx(mean, rel=1e-6)
