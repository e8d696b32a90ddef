"""--deterministic: the same bits on any number of ranks and in every run."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import sys
from pathlib import Path
from unittest import mock

import pytest
import torch

from hpctrain.errors import RunError, UsageError
from hpctrain.parallel import mpi
from hpctrain.parallel.message import Message
from hpctrain.parallel.overlap import Overlapped
from hpctrain.report.find import checkpoint_steps
from hpctrain.report.record import read_records
from hpctrain.streams import IN_FLIGHT
from hpctrain.training import loop as inner
from hpctrain.training import train as loop
from hpctrain.training.step import (
    AT_ONCE,
    as_hex,
    checksum,
    describe_divergence,
    rank_digest,
    tensor_digests,
)
from hpctrain.training.steps import NonFinite
from tests.support.launch import mpirun, run
from tests.support.packs import make_pack
from tests.training.runs import FINE_TUNING, digest, leave_after
from tests.training.test_step import Config, make_trainer, small_model

ROWS = {"train": 101, "validation": 13, "test": 23}
MODEL = "tests.support.nets:with_dropout"
DRAWING = "tests.support.nets:drawing_in_evaluation"
CASES = {
    "digits": {},
    "six shards": {"shards": 6},
    "last step of one row": {"batch_size": 20},
    "running": {"batch_norm": "running"},
    "average": {"batch_norm": "average"},
    "dropout": {"model": MODEL},
    "augmentation": {"flip": True, "shift": 2},
    "adam": {"optimizer": "adam", "lr": 0.01},
    "adamw, clipped, cosine": {"optimizer": "adamw", "clip_norm": 0.5, "schedule": "cosine"},
    "bf16": {"precision": "bf16"},
    "NCHW": {"channels_last": False},
    "global": {"shuffle": "global"},
    "blocks": {"shuffle": "blocks", "read_buffer": "60K"},
    "denoise": {
        "task": "denoise",
        "model": "autoencoder",
        "validate_every": "3steps",
        "final": "best",
    },
    **FINE_TUNING,
    "two threads": {"threads": 2},
    "class weights": {"class_weights": "balanced", "label_smoothing": 0.1, "final": "best"},
    "balanced": {"balanced_sampling": True, "read_buffer": "4K"},
    "balanced, global": {"balanced_sampling": True, "shuffle": "global"},
    "draws in evaluation": {
        "model": DRAWING,
        "validate_every": "3steps",
        "patience": 2,
        "final": "best",
    },
}


@pytest.fixture
def settings(small_settings):
    own = {"shards": 8, "deterministic": True, "threads": None, "run": None}
    return dataclasses.replace(small_settings, **own)


@pytest.mark.mpi
@pytest.mark.parametrize(
    "case",
    # Threads of OpenMP spin where ranks share cores.
    [pytest.param(case, marks=[pytest.mark.slow] * (case == "two threads")) for case in CASES],
)
def test_the_same_bits_as_on_one_rank(comm, one_rank, settings, case, monkeypatch):
    monkeypatch.setattr("hpctrain.plan.READ_BYTES", 2000)
    monkeypatch.setattr("hpctrain.config.others.EVALUATION_ROWS", 5)  # blocks for all ranks
    config = dataclasses.replace(settings, **CASES[case])
    together = digest(config, comm, "together")
    alone = digest(config, one_rank, f"alone{comm.rank}") if comm.rank == 0 else together
    assert together == alone  # on one rank: of two runs


@pytest.mark.mpi
def test_resnet18_with_a_ragged_end(comm, one_rank, shared_tmp, settings):
    if comm.rank == 0:
        make_pack(shared_tmp / "rgb.h5", {"train": 21, "test": 5}, (16, 16, 3), 5)
    comm.Barrier()
    own = {"data": str(shared_tmp / "rgb.h5"), "model": "resnet18", "small_stem": True}
    own["epochs"] = 1
    config = dataclasses.replace(settings, **own)
    together = digest(config, comm, "together")
    assert comm.rank > 0 or digest(config, one_rank, "alone") == together


@pytest.mark.mpi
def test_the_same_bits_however_the_shards_are_carried(comm, settings):
    loads = ",".join(["3"] + ["1"] * (comm.size - 1))
    uneven = dataclasses.replace(settings, worker_load=loads)
    assert digest(settings, comm, "even") == digest(uneven, comm, "uneven")


@pytest.mark.mpi
def test_the_same_bits_while_backward_still_runs(comm, one_rank, settings, monkeypatch):
    def noting(self, shard):
        sent.append(shard)
        send(self, shard)

    send, sent = Overlapped._send, []
    monkeypatch.setattr(Overlapped, "_send", noting)
    settings = dataclasses.replace(settings, shards=4)
    whole = digest(settings, comm, "whole")
    assert not sent
    parts = dataclasses.replace(settings, overlap=3)
    assert digest(parts, comm, "parts") == whole
    assert len(sent) == 14 * (3 + 1), "segments and the rest in every step"
    assert comm.rank > 0 or digest(parts, one_rank, "alone") == whole
    if comm.rank == 0:
        facts = [next(iter(read_records(Path(settings.runs_dir) / n))) for n in ("whole", "parts")]
        assert [record["overlap"] for record in facts] == [0, 3]
        assert "overlap" not in facts[1]["settings"], "no hyper-parameter"


@pytest.mark.mpi
def test_an_mpi_without_threads_is_refused_before_anything_is_written(comm, settings, monkeypatch):
    monkeypatch.setattr(mpi.MPI, "Query_thread", lambda: mpi.MPI.THREAD_FUNNELED)
    with pytest.raises(UsageError, match="--overlap calls MPI from a thread of its own"):
        loop.train(dataclasses.replace(settings, overlap=2), comm)
    assert not Path(settings.runs_dir).exists()


@pytest.mark.mpi
def test_the_plain_allreduce_depends_on_the_number_of_ranks(comm, one_rank, settings):
    """Negative control: everything fixed but the order of the sums."""
    config = dataclasses.replace(settings, deterministic=False, threads=1)
    together = digest(config, comm, "together")
    if comm.rank == 0:
        plain = digest(config, one_rank, "plain")
        assert plain != digest(settings, one_rank, "tree")
        assert comm.size == 1 or plain != together


@pytest.mark.mpi
def test_the_digest_depends_on_seed_and_figures(comm, settings):
    digests = [digest(settings, comm, "a")]
    for number, change in enumerate(({"seed": 1}, {"lr": 0.02}, {"validate_every": "0"})):
        digests.append(digest(dataclasses.replace(settings, **change), comm, f"b{number}"))
    assert len(set(digests)) == len(digests)


MANY = ["--epochs", "2", "--batch-size", "16", "--shards", "8"]
MANY += ["--model", "digits", "--deterministic", "--progress", "none"]
# The first 7 of 8 ranks train, then all of them.
SEVEN_AND_EIGHT = """
import sys
from dataclasses import replace
from hpctrain.config import Config, parse_settings
from hpctrain.parallel.mpi import end_mpi, start_mpi
from hpctrain.training.train import train
comm = start_mpi()
config = parse_settings("train", "Train", Config, sys.argv[1:])
for size in (7, 8):
    some = comm.Split(comm.rank < size, comm.rank)
    if comm.rank < size:
        assert train(replace(config, run=str(size)), some) == 0
end_mpi()
"""


@pytest.mark.parametrize(
    ("ranks", "program", "runs"),
    [
        (5, ["-m", "hpctrain", "train", "--run", "5"], ["5"]),
        pytest.param(8, ["-c", SEVEN_AND_EIGHT], ["7", "8"], marks=pytest.mark.slow),
    ],
    ids=["5", "7 and 8"],
)
def test_more_ranks_than_the_session_has(settings, comm, ranks, program, runs, tmp_path):
    expected = digest(settings, comm, "one")
    flags = ["--data", settings.data, "--runs-dir", str(tmp_path), *MANY]
    done = run([mpirun(), "-n", str(ranks), sys.executable, *program, *flags], 100)
    assert done.returncode == 0, done.stderr
    assert [list(read_records(tmp_path / r))[-1]["digest"] for r in runs] == [expected] * len(runs)


@pytest.mark.mpi
@pytest.mark.parametrize(
    ("change", "wrong", "found", "recorded"),
    [
        ({"checkpoint_every": "4steps"}, 8, 8, [4, 7]),
        ({"checkpoint_every": "4steps"}, 5, 7, [4]),
        ({"validate_every": "6steps"}, 3, 6, []),
        ({"validate_every": "0"}, 4, 14, []),
        ({"validate_every": "0", "final": "ema", "ema": 0.9}, 14, 14, []),
    ],
    ids=["checkpoint", "epoch", "validation", "end", "last step"],
)
@pytest.mark.parametrize("in_flight", [0, 1])
def test_ranks_that_differ_are_named_and_nothing_of_them_is_saved(
    comm, settings, monkeypatch, change, wrong, found, recorded, in_flight
):
    monkeypatch.setitem(IN_FLIGHT, "cpu", in_flight)
    config = dataclasses.replace(settings, run="a", **change)
    with diverging(comm, wrong):
        if comm.size == 1:
            assert loop.train(config, comm) == 0
            return
        with pytest.raises(RunError, match=divergence(comm, found)):
            loop.train(config, comm)
    if comm.rank == 0:
        folder = Path(config.runs_dir) / "a"
        records = list(read_records(folder))
        assert [r["step"] for r in records if r["kind"] == "digest"] == recorded
        assert records[-1]["status"] == "failed"
        kept = [4] if "checkpoint_every" in change else []
        assert checkpoint_steps(folder / "checkpoints") == kept
        assert not (folder / "model.safetensors").exists()


@pytest.mark.mpi
@pytest.mark.parametrize("vote", ["preempted", "stop", "save"])
def test_divergence_and_a_request_in_one_step_save_nothing(comm, settings, vote):
    """A signal, a STOP file, or a checkpoint by time, of which rank 0 alone knows."""
    config = dataclasses.replace(settings, run="a")
    with diverging(comm, 4), leave_after(4, vote=vote, votes=comm.rank == 0):
        if comm.size == 1:
            assert loop.train(config, comm) == (75 if vote == "preempted" else 0)
            return
        with pytest.raises(RunError, match=divergence(comm, 4)):
            loop.train(config, comm)
    if comm.rank == 0:
        folder = Path(config.runs_dir) / "a"
        assert list(read_records(folder))[-1]["status"] == "failed"
        assert checkpoint_steps(folder / "checkpoints") == []


@pytest.mark.mpi
def test_ranks_that_differ_are_not_saved_when_a_step_is_not_finite(comm, settings, monkeypatch):
    original, counted = Message.set_flags, []

    def set_flags(self, *votes):
        counted.append(1)
        if len(counted) == 5:
            self.gradients[3] = float("inf")
        original(self, *votes)

    monkeypatch.setattr(Message, "set_flags", set_flags)
    config = dataclasses.replace(settings, run="a")
    words = f"; not saved: {divergence(comm, 4)}" if comm.size > 1 else "may help$"
    with diverging(comm, 4), pytest.raises(NonFinite, match=f"gradient of step 5.*{words}"):
        loop.train(config, comm)
    if comm.rank == 0:
        kept = checkpoint_steps(Path(config.runs_dir) / "a/checkpoints")
        assert kept == ([] if comm.size > 1 else [4])


@contextlib.contextmanager
def diverging(comm, wrong):
    """Within this block, step `wrong` changes a weight on the last of several ranks alone."""
    step, done = inner.train_step, []

    def faulty(trainer, *arguments):
        result = step(trainer, *arguments)
        done.append(1)
        if comm.rank == comm.size - 1 > 0 and len(done) == wrong:
            trainer.message.parameters["fc.bias"].data[1] += 1e-3
        return result

    with mock.patch.object(inner, "train_step", faulty):
        yield


def divergence(comm, step):
    """The pattern of the error for a step after `diverging`."""
    if comm.size == 2:  # nobody knows which
        words = (
            r"the ranks did not hold the same weights \(digests by rank: [0-9a-f]{16}, [0-9a-f]{16}"
        )
    else:
        words = rf"rank {comm.size - 1} of {comm.size} held other .*\(digest [0-9a-f]{{16}}, not"
    return f"after step {step} {words}.*they differ in .*fc.bias"


@pytest.mark.mpi
def test_digests_in_the_record_are_those_of_any_number_of_ranks(comm, one_rank, settings):
    config = dataclasses.replace(settings, validate_every="3steps")
    digest(config, comm, "together")
    if comm.rank == 0:
        digest(config, one_rank, "alone")
        found = [
            [r["digest"] for r in read_records(Path(settings.runs_dir) / name) if "digest" in r]
            for name in ("together", "alone")
        ]
        assert found[0] == found[1]
        assert len(set(found[0])) == 6  # after steps 3, 6, 9, 12 and 14, and of the run


def test_the_rank_in_the_minority_is_named():
    words = describe_divergence([5, 9, 5], 100)
    assert words.startswith("after step 100 rank 1 of 3 held other weights")
    assert "digest 0000000000000009, not 0000000000000005" in words
    assert "ranks 0, 2 of 5" in describe_divergence([1, 5, 2, 5, 5], 7)
    by_rank = "by rank: 0000000000000005, ffffffffffffffff), and no more than half agree"
    assert by_rank in describe_divergence([5, -1], 100)
    many = describe_divergence([*range(100, 5100), *[7] * 11384], 100)
    assert "ranks 0, 1," in many and "15 and 4,984 more of 16384 held" in many


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.int64, torch.bfloat16])
def test_a_checksum_shows_every_change(dtype, monkeypatch):
    tensor = torch.arange(1, 1004).to(dtype)
    found = checksum(tensor).item()
    assert checksum(tensor.clone()).item() == found
    monkeypatch.setitem(AT_ONCE, "cpu", 10)
    assert checksum(tensor).item() == found  # whatever is summed at once
    assert checksum(tensor.flip(0)).item() != found
    bits = tensor.view({2: torch.int16, 4: torch.int32, 8: torch.int64}[tensor.element_size()])
    for place, bit in ((0, 0), (1, 7), (500, 14), (1002, 3)):
        bits[place] ^= 1 << bit
        assert checksum(tensor).item() != found
        bits[place] ^= 1 << bit
    assert checksum(tensor).item() == found
    assert as_hex(-1) == "f" * 16 and as_hex(5) == "0" * 15 + "5"


@pytest.mark.mpi
def test_a_digest_tells_what_lies_where(comm):
    """Two vectors of the state that change places show, though together they hold the same."""
    trainer = make_trainer(small_model(), comm, Config(lr=0.1, optimizer="adam"))
    weights = trainer.message.weights
    memory = {name: torch.rand_like(weights) for name in ("exp_avg", "exp_avg_sq")}
    trainer.optimizer.state[weights].update(memory)
    first, second = memory.values()
    found = []
    for _ in range(3):
        found.append(rank_digest(trainer).item())
        first.data, second.data = second.data, first.data
    assert found[0] == found[2] != found[1]


@pytest.mark.mpi
def test_a_buffer_by_the_name_of_something_in_the_state_hides_nothing(comm):
    model = small_model()
    model.register_buffer("weights", torch.ones(3))
    trainer = make_trainer(model, comm, Config(lr=0.1))
    tensors = [trainer.message.weights.data, model.get_buffer("weights")]
    found, held = [rank_digest(trainer).item()], [tensor_digests(trainer)]
    for tensor in tensors:
        tensor[0] += 1
        found.append(rank_digest(trainer).item())
        held.append(tensor_digests(trainer))
    assert len(set(found)) == 3
    assert len({tuple(each.values()) for each in held}) == 3
    assert "model.weights" in held[0]


@pytest.mark.mpi
def test_an_operation_without_deterministic_form_is_refused_by_name(comm, settings):
    config = dataclasses.replace(settings, model="tests.support.nets:with_put", run="a")
    with pytest.raises(UsageError, match="--deterministic: put_ does not have a determin"):
        loop.train(config, comm)
    assert loop.train(dataclasses.replace(config, deterministic=False, run="b"), comm) == 0


@pytest.mark.mpi
def test_a_backward_within_backward_is_not_refused(comm, settings):
    config = dataclasses.replace(settings, model="tests.support.nets:recomputed", run="a")
    assert loop.train(config, comm) == 0


@pytest.mark.mpi
def test_a_run_leaves_no_trace_in_torch(comm, settings):
    torch.manual_seed(5)
    torch.set_num_threads(2)
    before = torch.get_rng_state()
    loop.train(dataclasses.replace(settings, run="a"), comm)
    assert torch.equal(torch.get_rng_state(), before)
    assert torch.get_num_threads() == 2
    assert not torch.are_deterministic_algorithms_enabled()


@pytest.mark.mpi
def test_the_plan_fixes_one_thread_whatever_the_launcher_says(comm, settings, monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "2")
    loop.train(dataclasses.replace(settings, run="a", epochs=1), comm)
    if comm.rank == 0:
        plan = json.loads((Path(settings.runs_dir) / "a" / "plan.json").read_text())
        assert (plan["threads"], plan["deterministic"]) == (1, True)


@pytest.mark.mpi
def test_hosts_of_two_kinds_are_refused(comm, settings, monkeypatch):
    kind = "old" if comm.rank == comm.size - 1 else "new"
    monkeypatch.setattr("hpctrain.training.trainer.hardware_key", lambda device: kind)
    config = dataclasses.replace(settings, run="a")
    if comm.size == 1:
        assert loop.train(config, comm) == 0
        return
    with pytest.raises(UsageError, match="kind of hardware differs between ranks: new on rank 0"):
        loop.train(config, comm)
    assert loop.train(dataclasses.replace(config, deterministic=False), comm) == 0
