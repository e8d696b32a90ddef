"""--loss, --augment and --metric: right ones in whole runs, wrong ones refused by name."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.nn import functional as F

from hpctrain.cli import main
from hpctrain.config import Config
from hpctrain.config.imports import Imported, import_function
from hpctrain.data.loader import read_samples
from hpctrain.errors import Failure, UsageError
from hpctrain.inference.evaluate import evaluate
from hpctrain.inference.own import compute_losses, import_functions
from hpctrain.inference.own_check import check_task
from hpctrain.inference.tasks import Classification
from hpctrain.inference.trained import load
from hpctrain.report.record import read_records
from hpctrain.training.setup import set_up
from hpctrain.training.train import train
from hpctrain.typed import parse_json
from tests.support import own_functions
from tests.training.runs import digest

HERE = "tests.support.own_functions"


def own(name):
    return f"{HERE}:{name}"


def run_with(settings, comm, **flags):
    return train(dataclasses.replace(settings, epochs=1, **flags), comm)


def records(settings, kind):
    return [r for r in read_records(Path(settings.runs_dir) / "a") if r["kind"] == kind]


@pytest.mark.mpi
def test_torchs_own_loss_as_a_function_gives_the_same_run(comm, small_settings):
    """Bit by bit: the sum of its values is that of torch's sum."""
    plain = set_up(small_settings, comm)
    same = set_up(dataclasses.replace(small_settings, loss=own("cross_entropy")), comm)
    batches = next(plain.loader.epoch(0))
    for batch in batches:
        torch.manual_seed(0)
        found = plain.trainer.backward(batch.images, batch.targets, 16)
        torch.manual_seed(0)
        other = same.trainer.backward(batch.images, batch.targets, 16)
        torch.testing.assert_close(found, other)
    gradients = [job.trainer.message.gradients for job in (plain, same)]
    torch.testing.assert_close(*gradients, rtol=1e-4, atol=1e-7)
    assert comm.allreduce(gradients[0].norm().item()) > 0


@pytest.mark.mpi
def test_class_weights_weigh_the_values_of_a_loss(comm, small_settings):
    weights = {"class_weights": "1,2,3,4,5,6,7,8,9,10"}
    jobs = [
        set_up(dataclasses.replace(small_settings, **weights, loss=loss), comm)
        for loss in (None, own("cross_entropy"))
    ]
    for batch in next(jobs[0].loader.epoch(0)):
        for job in jobs:
            torch.manual_seed(0)
            job.trainer.backward(batch.images, batch.targets, 16)
    gradients = [job.trainer.message.gradients for job in jobs]
    torch.testing.assert_close(*gradients, rtol=1e-4, atol=1e-7)


@pytest.mark.mpi
def test_a_loss_and_a_metric_are_evaluated_as_in_one_process(comm, small_settings):
    flags = {"loss": own("focal"), "metric": own("counts"), "final": "best"}
    assert run_with(small_settings, comm, **flags) == 0
    folder = Path(small_settings.runs_dir) / "a"
    words = ["evaluate", str(folder), "--loss", own("focal"), "--metric", own("counts")]
    assert main([*words, "--output", str(folder / "again.json")]) == 0
    job = set_up(dataclasses.replace(small_settings, init=str(folder)), comm)
    if comm.rank:
        return
    with job.reading.split("test") as source:
        images = read_samples(source, np.arange(len(source.labels)))
        targets = torch.from_numpy(source.labels)
    with torch.no_grad():
        outputs = job.trainer.model.eval()(images)
    expected = {
        name: (values[0].sum() / values[1].sum() if isinstance(values, tuple) else values)
        for name, values in own_functions.counts(outputs, targets).items()
    }
    expected = {name: value.double().mean().item() for name, value in expected.items()}
    del expected["recall of none"]  # 0 / 0
    found = parse_json((folder / "evaluation-test.json").read_text())
    again = parse_json((folder / "again.json").read_text())
    (recorded,) = [r for r in records(small_settings, "evaluation") if r["split"] == "test"]
    for figures in (found, again, recorded):
        own_figures = dict(figures["metrics"])
        assert own_figures.pop("recall of none") is None
        assert own_figures == pytest.approx(expected, rel=1e-4)
        loss = own_functions.focal(outputs, targets).mean().item()
        assert figures["loss"] == pytest.approx(loss, rel=1e-4)
        assert figures["accuracy"] == found["accuracy"]
    assert abs(loss - F.cross_entropy(outputs, targets).item()) > 1e-3


@pytest.mark.mpi
@pytest.mark.parametrize("name", ["correct", "top3"])
def test_a_metric_of_one_figure_has_the_name_of_its_function(comm, small_settings, name, capsys):
    assert run_with(small_settings, comm, metric=own(name), progress="plain") == 0
    if comm.rank == 0:
        for each in records(small_settings, "evaluation"):
            assert list(each["metrics"]) == [name]
            assert name == "top3" or each["metrics"][name] == each["accuracy"]
        assert f"  {name} 0." in capsys.readouterr().out


@pytest.mark.mpi
def test_the_figures_of_blocks_are_added_by_name(comm, small_settings):
    job = set_up(dataclasses.replace(small_settings, metric=own("in_any_order")), comm)
    by_class = import_functions(None, own("by_class"))
    with job.reading.split("test") as source:
        how = job.trainer.model, source
        result = evaluate(*how, job.task, job.prepare, comm, 2)
        assert result.metrics == {"one": 1, "two": 2}
        task = dataclasses.replace(job.task, own=by_class)
        with pytest.raises(UsageError, match="by_class gave .* for one batch and not for another"):
            evaluate(*how, task, job.prepare, comm, 2)


@pytest.mark.parametrize("name", ["loss", "metric", "augment"])
def test_a_function_that_fails_later_is_one_line(comm, small_settings, name):
    with pytest.raises(Failure, match=r"failed: IndexError: no .* \(own_functions.py, line \d+\)"):
        run_with(small_settings, comm, **{name: own("fails_later")})


def test_a_memory_error_passes_a_function(comm):
    """The run says what helps."""

    def full(outputs, targets):
        raise torch.OutOfMemoryError

    with pytest.raises(torch.OutOfMemoryError):
        compute_losses(Imported("--loss a:b", full, ""), torch.zeros(1, 2), torch.zeros(1))


@pytest.mark.mpi
def test_a_denoising_run_with_a_loss_of_its_own(comm, small_settings, capsys):
    flags = {"task": "denoise", "model": "autoencoder", "loss": own("absolute")}
    assert run_with(small_settings, comm, **flags) == 0
    folder = Path(small_settings.runs_dir) / "a"
    assert main(["evaluate", str(folder), "--loss", own("absolute")]) == 0
    if comm.rank == 0:
        printed = capsys.readouterr().out
        (test,) = [r for r in records(small_settings, "evaluation") if r["split"] == "test"]
        found = float(printed.rpartition("loss ")[2].partition(",")[0])
        assert found == pytest.approx(test["loss"], rel=1e-3) and "dB" not in printed


@pytest.mark.mpi
def test_an_augmentation_works_on_what_the_network_gets(comm, small_settings):
    plain, darker, mirrored = (
        [b for step in set_up(replaced, comm).loader.epoch(0) for b in step]
        for replaced in (
            dataclasses.replace(small_settings, flip=True, augment=name)
            for name in (None, own("darken"), own("mirror"))
        )
    )
    flipped = 0
    for before, dark, after in zip(plain, darker, mirrored, strict=True):
        assert torch.equal(dark.images, before.images * 0.5)  # in place: the batch is a copy
        assert dark.images.stride() == before.images.stride() == after.images.stride()
        for one, other in zip(before.images, after.images, strict=True):
            near = [torch.allclose(other, each, atol=0.1) for each in (one, one.flip(2))]
            assert any(near)
            flipped += near == [False, True]
        assert not torch.equal(after.images, before.images)
    assert 20 < comm.allreduce(flipped) < 81
    noise = {
        after.images[0, 0, 0].sum().item() - b.images[0, 0, 0].sum().item()
        for b, after in zip(plain, mirrored, strict=True)
    }
    assert len(noise) == len(plain), "the generator depends on step and shard"
    job = set_up(dataclasses.replace(small_settings, augment=own("mirror")), comm)
    black = job.prepare(torch.zeros(1, 12, 12, 1, dtype=torch.uint8), 0)
    assert not black.any(), "an evaluation augments nothing"


CASES = {
    "loss": {"loss": own("focal"), "class_weights": "balanced"},
    "augment": {"augment": own("mirror"), "flip": True},
    "metric": {"metric": own("counts")},
}


@pytest.fixture
def deterministic(small_settings):
    own = {"shards": 5, "deterministic": True, "threads": None, "epochs": 2}
    return dataclasses.replace(small_settings, run=None, **own)


@pytest.mark.mpi
@pytest.mark.parametrize("case", CASES)
def test_the_same_bits_on_any_number_of_ranks(comm, one_rank, deterministic, case):
    config = dataclasses.replace(deterministic, **CASES[case])
    together = digest(config, comm, "together")
    if comm.rank == 0:
        assert digest(config, one_rank, "alone") == together
        assert digest(deterministic, one_rank, "without") != together


WRONG = {
    "mean": r"returned a tensor of shape \(\) for \d+ samples: return one value a sample, not their"
    r" mean or sum \(torch's losses: reduction='none'\)",
    "per_class": r"returned a tensor of shape \(\d+, 10\) for \d+ samples: return one value a",
    "number": "must return a tensor of one value a sample, not float",
    "failing": r"failed: IndexError: .* \(own_functions.py, line \d+\)",
    "draws_from_torch": "draws random numbers from torch's global generator",
    "draws_from_numpy": "draws random numbers from numpy.random",
    "draws_from_python": "draws random numbers from Python's random",
    "draws_of_its_own": "gave samples other values in a part of the batch .* nor on earlier calls",
    "counts_calls": "gave samples other values in a part of the batch .* nor on earlier calls",
    "every_fifth": "returned other values when it was called again with the same samples",
    "of_the_batch": "gave samples other values in a part of the batch",
    "in_place": "changed the outputs that it was given",
    "detached": "is not differentiable",
    "correct": "is not differentiable",
    "not_finite": "returned a value that is not finite",
    "steep": "has a gradient that is not finite with respect to the outputs",
    "absent": f"{HERE} has no absent",
    "squeezed": r"returned a tensor of shape \(\) for 1 sample: .* \(1,\): does it call squeeze",
    "of_three": r"must be callable as function\(outputs, targets\): missing .* 'gamma'",
    "Focal": r"Focal is a class: name a function, or an object .*, such as loss = Focal\(\)",
}


WRONG_METRICS = {
    "mean": r"mean returned a tensor of shape \(\) for \d+ samples: return one value a sample, not",
    "largest": r"largest returned a tensor of shape \(\) for",
    "taken": "named a figure 'accuracy': give it another name",
    "nothing": "gave 0 figures, not 1 to 32",
    "of_the_batch": r"gave samples other values in a part of the batch \(of_the_batch\)",
    "draws_from_torch": "draws random numbers from torch's global generator",
    "in_place": "changed the outputs",
    "by_class": r"gave class \d, .* for one batch and not for another",
}


WRONG_AUGMENTATIONS = {
    "mirror_by_torch": "draws random numbers from torch's global generator: .* from the generator",
    "mirror_by_numpy": "returned other images when it was called again with the same images",
    "crop": r"returned images of shape \(\d+, 1, 11, 12\), not \(\d+, 1, 12, 12\) as it got",
    "squeezed_images": r"returned images of shape \(1, 12, 12\), not \(1, 1, 12, 12\) as it got",
    "to_double": r"returned images of dtype torch.float64, not torch.float32",
    "to_nothing": "must return images, not NoneType",
    "overflow": "returned an image with NaN or infinity",
    "failing": r"failed: IndexError: .* \(own_functions.py, line \d+\)",
}

BROKEN = {"loss": WRONG, "metric": WRONG_METRICS, "augment": WRONG_AUGMENTATIONS}


@pytest.mark.mpi
@pytest.mark.parametrize(
    ("setting", "name"), [(setting, name) for setting, table in BROKEN.items() for name in table]
)
def test_a_function_that_breaks_the_rule_is_refused_by_name(comm, small_settings, setting, name):
    own_functions.CALLS.clear()
    with pytest.raises(UsageError, match=f"--{setting} {own(name)}:? {BROKEN[setting][name]}"):
        set_up(dataclasses.replace(small_settings, **{setting: own(name)}), comm)


@pytest.mark.parametrize(("name", "value"), [("centred", 0.0), ("centred_chances", 0.2)])
def test_outputs_that_are_alike_hide_nothing(name, value):
    """As those of a network with its first weights often are."""
    task = Classification(own=import_functions(own(name), None))
    outputs, targets = torch.full((8, 5), value), torch.arange(8) % 5
    with pytest.raises(UsageError, match=f"{name} gave samples other values in a part"):
        check_task(task, torch.nn.Identity(), outputs, targets)
    check_task(task, torch.nn.Identity(), outputs / 0, targets)  # a first step will report these


def test_the_test_at_the_start_changes_neither_network_nor_generator():
    model = torch.nn.Sequential(torch.nn.BatchNorm1d(5), torch.nn.Dropout(0.5)).train()
    inputs = torch.rand(8, 5)
    before = [*map(torch.clone, model.state_dict().values()), torch.get_rng_state()]
    task = Classification(own=import_functions(own("focal"), own("top3")))
    check_task(task, model, inputs, torch.arange(8) % 5)
    after = [*model.state_dict().values(), torch.get_rng_state()]
    assert all(map(torch.equal, before, after)) and model[0].training


def test_functions_of_the_training_are_imported_with_trust_code_only(comm, small_settings, capsys):
    """By evaluate, unless others are given, and by --config; predict needs none."""
    flags = {"loss": own("focal"), "metric": own("top3"), "augment": own("darken")}
    assert run_with(small_settings, comm, **flags) == 0
    folder = Path(small_settings.runs_dir) / "a"
    top3 = f"top3 {records(small_settings, 'evaluation')[-1]['metrics']['top3']:.4f}"
    capsys.readouterr()
    words = ["evaluate", str(folder)]
    given = ["--loss", own("focal"), "--metric", own("top3")]
    for some, named in (([], f"{given[1]}, {given[3]}"), (given[:2], given[3])):
        assert main([*words, *some]) == 2
        assert f"model.safetensors names {named}: a function that" in capsys.readouterr().err
    for allowed in (given, ["--trust-code"], [*given[:2], "--trust-code"]):
        assert main([*words, *allowed]) == 0
        assert top3 in capsys.readouterr().out
    wrong = own("draws_from_torch")
    assert main([*words, "--trust-code", f"--metric={wrong}"]) == 2
    assert f"--metric {wrong} draws random numbers from torch" in capsys.readouterr().err
    assert main(["predict", str(folder), "--output", str(folder / "answers.csv")]) == 0
    words = ["train", "--config", str(folder / "config.toml"), "--dry-run"]
    assert main(words) == 2
    names = ", ".join(flags[name] for name in ("loss", "augment", "metric"))
    assert f"config.toml names {names}: a function that" in capsys.readouterr().err
    assert main([*words, "--trust-code"]) == 0
    assert main([*words, *(f"--{name}={own}" for name, own in flags.items())]) == 0
    with pytest.raises(UsageError, match=r"config\.toml names .*trust_code=True"):
        _ = load(folder).config
    assert load(folder, trust_code=True).config.augment == own("darken")


@pytest.mark.parametrize(
    ("name", "hint"), [("mine.focal", ", here mine:focal"), ("focal", ""), ("mine.py", "")]
)
def test_the_name_of_a_function_has_a_colon(name, hint):
    with pytest.raises(UsageError) as caught:
        import_function(name, "--loss")
    assert str(caught.value) == f"--loss {name}: write package.module:function{hint}"


def test_smoothing_belongs_to_cross_entropy(capsys):
    words = ["train", "--data", "no.h5", "--loss", own("focal"), "--label-smoothing", "0.1"]
    assert main(words) == 2
    assert f"--loss {own('focal')} and --label-smoothing exclude" in capsys.readouterr().err
    assert Config().loss is Config().metric is Config().augment is None
