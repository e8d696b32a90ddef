"""Classes of unequal size: class weights exact on any cut, and the figures of an evaluation."""

from __future__ import annotations

import dataclasses
import json
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch.nn import functional as F

from hpctrain.cli import main
from hpctrain.config import Config
from hpctrain.data.imbalance import find_class_weights
from hpctrain.data.loader import read_samples
from hpctrain.data.partition import Partition, cut_epoch
from hpctrain.errors import UsageError
from hpctrain.inference.evaluate import evaluate
from hpctrain.report.record import read_records
from hpctrain.training.reading import check_data
from hpctrain.training.setup import set_up
from hpctrain.training.train import train as train_run
from tests.training.runs import digest, leave_after
from tests.training.test_step import (
    ROWS,
    Arrays,
    make_trainer,
    parameters,
    plain_torch,
    small_model,
    train,
)

WEIGHTS = torch.tensor([0.2, 1.0, 7.5], dtype=torch.float64)
CLASSES = ("cat", "dog", "owl")
LABELS = np.array([0, 0, 0, 0, 0, 0, 1, 1, 2])
CUTS = {
    "1 shard": cut_epoch(ROWS, 7, 1),
    "2 shards": cut_epoch(ROWS, 7, 2),
    "3 shards": cut_epoch(ROWS, 7, 3),
    "5 shards, a last step without some": cut_epoch(ROWS, 7, 5),
    "uneven shares": Partition(23, (5, 1, 4), (1, 0, 2)),
}


@pytest.mark.mpi
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize("cut", CUTS)
def test_weighted_gradients_are_those_of_torch_on_the_whole_batch(comm, cut, smoothing):
    source, partition = Arrays(), CUTS[cut]
    config = Config(lr=0.1, label_smoothing=smoothing, clip_norm=0.3)
    trainer = make_trainer(small_model(), comm, config, WEIGHTS)
    if len(partition.shares) < comm.size:
        return
    train(trainer, source, partition, comm)
    expected = plain_torch(source, partition, config, weights=WEIGHTS)
    assert (parameters(trainer) - expected).abs().max() < 1e-12
    plain = plain_torch(source, partition, config)
    assert (expected - plain).abs().max() > 1e-3, "the weights change nothing"


@pytest.mark.mpi
def test_the_loss_of_a_step_is_the_weighted_mean(comm):
    source, partition = Arrays(), cut_epoch(ROWS, ROWS, comm.size)
    trainer = make_trainer(small_model(), comm, Config(lr=1e-9), WEIGHTS)
    (loss,) = train(trainer, source, partition, comm, epochs=1)
    images = torch.from_numpy(source.images).permute(0, 3, 1, 2) / 255.0
    scores = small_model()(images.double())
    expected = F.cross_entropy(scores, torch.from_numpy(source.labels), WEIGHTS)
    assert loss == pytest.approx(expected.item(), rel=1e-6)


@pytest.mark.mpi
def test_moments_stay_by_counts(comm):
    """Running statistics of weighted and other training are those of the same images."""

    def statistics(weights):
        torch.manual_seed(5)
        layers = [torch.nn.BatchNorm2d(2), torch.nn.Flatten(), torch.nn.Linear(60, 3)]
        trainer = make_trainer(torch.nn.Sequential(*layers).double(), comm, weights=weights)
        train(trainer, Arrays(), cut_epoch(ROWS, 7, comm.size), comm, epochs=1)
        return trainer.norms.running.clone()

    assert torch.equal(statistics(WEIGHTS), statistics(None))


@pytest.mark.mpi
def test_an_evaluation_gives_both_losses_and_the_balanced_accuracy(comm, small_settings, capsys):
    weights = [0.5, 1, 2, 1, 1, 3, 1, 1, 1, 10]
    config = dataclasses.replace(
        small_settings,
        class_weights=",".join(map(str, weights)),
        epochs=1,
        final="best",
        progress="plain",
    )
    assert train_run(config, comm) == 0
    printed = capsys.readouterr().out
    folder = Path(config.runs_dir) / "a"
    assert main(["evaluate", str(folder), "--output", str(folder / "again.json")]) == 0
    comm.Barrier()
    found = json.loads((folder / "evaluation-test.json").read_text())
    confusion = np.array(found["confusion"])
    true = confusion.sum(1)
    recalls = confusion.diagonal()[true > 0] / true[true > 0]
    assert found["balanced_accuracy"] == pytest.approx(recalls.mean())
    recorded = [r for r in read_records(folder) if r["kind"] == "evaluation"]
    assert {r["split"] for r in recorded} == {"validation", "test"}
    last = recorded[-1]
    for name in ("loss", "unweighted_loss", "accuracy", "balanced_accuracy"):
        assert last[name] == found[name]
    assert abs(found["loss"] - found["unweighted_loss"]) > 1e-4
    if comm.rank == 0:
        both = f"{found['accuracy']:.4f} (balanced {found['balanced_accuracy']:.4f})"
        assert f": test accuracy {both}\n" in printed
    again = json.loads((folder / "again.json").read_text())
    assert again.keys() == found.keys()
    for name in ("loss", "unweighted_loss", "accuracy", "balanced_accuracy"):
        assert again[name] == pytest.approx(found[name], rel=1e-5)


@pytest.mark.mpi
def test_the_loss_of_an_epoch_is_the_weighted_mean_also_after_a_resume(comm, small_settings):
    """At a learning rate of nothing, it is the loss of the first weights over all images."""
    weights = "1,2,3,4,5,6,7,8,9,100"
    own = {"model": "tests.support.nets:frozen", "lr": 1e-12, "epochs": 2}
    config = dataclasses.replace(small_settings, class_weights=weights, **own)
    job = set_up(config, comm)
    rows = np.arange(len(job.reading.source.labels))
    with torch.no_grad():
        scores = job.trainer.model(read_samples(job.reading.source, rows))
    expected = F.cross_entropy(
        scores, torch.from_numpy(job.reading.source.labels), torch.tensor(job.plan.class_weights)
    )
    with leave_after(3):
        assert train_run(config, comm) == 75
    assert train_run(config, comm) == 0
    if comm.rank == 0:
        records = read_records(Path(config.runs_dir) / "a")
        losses = [r["loss"] for r in records if r["kind"] == "epoch"]
        assert losses == pytest.approx([expected.item()] * 2, rel=1e-4)


@pytest.mark.mpi
def test_losses_of_an_evaluation_are_those_of_torch(comm, small_settings):
    own = {"class_weights": "1,2,3,4,5,6,7,8,9,10", "label_smoothing": 0.2}  # for training alone
    job = set_up(dataclasses.replace(small_settings, **own), comm)
    with job.reading.split("test") as source:
        result = evaluate(job.trainer.model, source, job.task, job.prepare, comm, 5)
        rows = np.arange(len(source.labels))
        held = np.empty((len(rows), *source.image_shape), source.dtype)
        source.gather(rows, held)
        labels = torch.from_numpy(source.labels[rows])
    with torch.no_grad():
        scores = job.trainer.model.eval()(job.prepare(torch.from_numpy(held), 0))
    weights = torch.arange(1.0, 11.0)
    assert result.means["loss"] == pytest.approx(F.cross_entropy(scores, labels, weights).item())
    plain = F.cross_entropy(scores, labels).item()
    assert result.means["unweighted_loss"] == pytest.approx(plain)


@pytest.mark.mpi
def test_a_run_is_resumed_with_the_weights_that_it_began_with(comm, small_settings):
    weights = ",".join(map(str, range(1, 11)))
    config = dataclasses.replace(small_settings, class_weights=weights, epochs=1)
    whole = digest(dataclasses.replace(config, epochs=2), comm, "whole")
    assert digest(config, comm, "parts") != whole
    assert digest(dataclasses.replace(config, epochs=2), comm, "parts") == whole
    others = {"epochs": 3, "class_weights": f"9{weights[1:]}"}
    with pytest.raises(
        UsageError, match="begun with --class-weights 1,2,.* not with --class-weights 9,2,"
    ):
        digest(dataclasses.replace(config, **others), comm, "parts")


@pytest.mark.mpi
@pytest.mark.parametrize("shuffle", ["partition", "global"])
def test_balanced_sampling_in_a_whole_run(comm, small_settings, shared_tmp, shuffle):
    """The classes of an epoch, and the same bits when staged, resumed in mid-epoch, or by need."""
    own = {"balanced_sampling": True, "shuffle": shuffle, "shards": 4, "deterministic": True}
    config = dataclasses.replace(small_settings, **own, threads=None)
    job = set_up(config, comm)
    drawn = [b.targets.tolist() for step in job.loader.epoch(0) for b in step]
    labels = [label for part in comm.allgather(drawn) for each in part for label in each]
    counts = np.bincount(labels, minlength=10)
    lacking = [note for note in job.notes if "--balanced-sampling: some shards have no" in note]
    assert len(labels) == 101 and bool(lacking) == (shuffle == "partition")
    spread = 1 if shuffle == "global" else 4 + 101 // 10
    assert counts.max() - counts.min() <= spread
    plain = np.bincount(job.reading.source.labels, minlength=10)
    assert plain.max() - plain.min() > counts.max() - counts.min()
    whole = digest(config, comm, "whole")
    staged = dataclasses.replace(config, stage=str(shared_tmp / "local"), read_buffer="4K")
    assert digest(staged, comm, "staged") == whole
    with leave_after(3):
        assert train_run(dataclasses.replace(config, run="parts"), comm) == 75
    assert digest(config, comm, "parts") == whole
    if comm.rank == 0:
        last = list(read_records(Path(config.runs_dir) / "whole"))
        assert all("balanced_accuracy" in r for r in last if r["kind"] == "evaluation")


@pytest.mark.parametrize(
    ("shuffle", "chunks", "message"),
    [
        ("blocks", 0, "--shuffle blocks exclude each other: a block is read once"),
        (None, 5, r"--shuffle blocks \(the default for a file of chunks\) exclude each other"),
        ("partition", 5, None),
        (None, 0, None),
    ],
)
def test_blocks_are_not_sampled_by_class(shuffle, chunks, message):
    external = SimpleNamespace(chunk_rows=chunks) if chunks else None
    pack = SimpleNamespace(image_shape=(8, 8, 1), external=external, splits={}, encoded=False)
    config = Config(balanced_sampling=True, shuffle=shuffle)
    with pytest.raises(UsageError, match=message) if message else nullcontext():
        check_data(config, pack)


def test_balanced_weights_are_those_of_scikit_learn():
    weights = find_class_weights("balanced", CLASSES, lambda: np.bincount(LABELS, minlength=3))
    assert weights == pytest.approx((9 / (3 * 6), 9 / (3 * 2), 9 / (3 * 1)))
    assert np.average(np.take(weights, LABELS)) == pytest.approx(1)
    with pytest.raises(UsageError, match="balanced: no training image is of class yak, so its"):
        find_class_weights("balanced", (*CLASSES, "yak"), lambda: np.bincount(LABELS, minlength=4))


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ("1,2", "these are 2 weights, and the data has 3 classes: cat, dog, owl"),
        ("balance", "give balanced, or a number for each class such as 0.2,1"),
    ],
)
def test_weights_that_do_not_fit_are_refused(given, message):
    with pytest.raises(UsageError, match=f"--class-weights {given}:? .*{message}|{message}"):
        find_class_weights(given, CLASSES, lambda: np.bincount(LABELS, minlength=3))


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--class-weights", "1,0"], "--class-weights 1,0: give a number above 0 for every class"),
        (["--class-weights", "1,inf"], "give a number above 0"),
        (
            ["--class-weights", "balanced", "--balanced-sampling"],
            "--balanced-sampling and --class-weights balanced both make up for unequal classes",
        ),
        (["--class-weights", "balanced", "--task", "denoise"], "--class-weights has no meaning"),
    ],
)
def test_a_mistake_on_the_command_line_is_one_line(flags, message, capsys):
    assert main(["train", "--data", "nowhere.h5", *flags]) == 2
    assert message in capsys.readouterr().err
