"""What each task must keep: shapes, names, and that samples do not depend on each other."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from mpi4py import MPI

import hpctrain as hp
from tests.support.api import task_class

N, SHAPE, CLASSES = 7, (6, 5, 3), ("a", "b", "c", "d")
DEFAULTS = {
    **vars(hp.Config()),
    "class_weights": (),
    "target_scaling": ((0.5, -30, 1e3, 0), (0.25, 10, 1e-2, 4)),
}
UNKNOWN = {"classes": 255, "values": torch.nan}
_, TASKS = hp.Config.types["task"]


def draw_targets(kind, generator):
    """Targets as they are stored; of several entries, all of sample 2 and some others unknown."""
    if kind not in UNKNOWN:
        return torch.randint(0, len(CLASSES), (N,), generator=generator)
    shape = N, len(CLASSES)
    targets = torch.randint(0, 2, shape, dtype=torch.uint8, generator=generator)
    if kind == "values":
        mean, std = map(torch.tensor, DEFAULTS["target_scaling"])
        targets = mean + std * torch.randn(shape, generator=generator)
    targets[torch.rand(shape, generator=generator) < 0.3] = UNKNOWN[kind]
    targets[2] = UNKNOWN[kind]
    return targets


class Batch:
    """Outputs and targets of a task for random images."""

    def __init__(self, name):
        generator = torch.Generator().manual_seed(1)
        height, width, channels = SHAPE
        self.task = task_class(name).from_settings(DEFAULTS, CLASSES, torch.zeros(1))
        images = torch.rand(N, channels, height, width, generator=generator)
        labels = draw_targets(self.task.facts.targets, generator)
        self.inputs, self.targets = self.task.stage(images, labels, 5)
        shape = self.task.output_shape(SHAPE, len(CLASSES))
        self.outputs = torch.rand(N, *shape, generator=generator)
        self.block = SimpleNamespace(rows=np.arange(N), targets=labels.numpy())


@pytest.fixture(params=TASKS)
def batch(request):
    return Batch(request.param)


def test_the_loss_is_one_value_a_sample_and_that_of_the_sample_alone(batch):
    losses = batch.task.losses(batch.outputs, batch.targets)
    assert losses.shape == (N,) and losses.isfinite().all()
    weights = batch.task.weights(batch.targets)
    weighted = losses if weights is None else losses * weights
    torch.testing.assert_close(batch.task.loss_sum(batch.outputs, batch.targets), weighted.sum())
    for row in range(N):
        part = slice(row, row + 1)
        alone = batch.task.losses(batch.outputs[part], batch.targets[part])
        torch.testing.assert_close(alone, losses[part])


def test_sums_of_a_step_have_their_names_and_the_figures_of_the_task(batch):
    task = batch.task
    sums = task.named_sums(batch.outputs, batch.targets)
    assert sums.keys() == task.sums.keys()
    message = hp.Message(torch.nn.Linear(1, 1), 0, 0, 1, sums=task.sums)
    assert len(message.scalar) == len(message.scalars), "a sum has the name of another scalar"
    assert all(value.shape == () for value in sums.values())
    figures = task.step_figures({name: value.item() for name, value in sums.items()}, N)
    given = {name for name, value in figures.items() if value is not None}
    assert given <= {*task.facts.figures}


def test_an_evaluation_that_was_not_asked_for_mistakes_has_none(batch):
    assert batch.task.mistakes(batch.task.tallies()) == ([], 0)


def test_an_evaluation_gives_the_figures_of_the_task(batch):
    task = batch.task
    figures = {}
    for tally in task.tallies():
        measured = tally.measure(batch.outputs, batch.inputs, batch.targets)
        tally.add(batch.block, {name: value.numpy() for name, value in measured.items()})
        tally.merge([tally.part()], MPI.COMM_SELF)
        figures |= tally.figures()
    given = {name for name, value in figures.items() if value is not None}
    assert {*task.facts.figures} <= given <= {*task.facts.figures, *task.facts.more}
    assert "loss" in given and task.describe(figures)


def test_small_figures_are_printed_with_their_digits(batch):
    if not batch.task.gives_images:
        assert batch.task.describe({"loss": 0.25, "mae": 2.46e-10}) == "loss 0.2500, mae 2.46e-10"


def test_answers_are_images_or_rows_of_a_table(batch):
    task = batch.task
    answers = task.answers(batch.outputs).numpy()
    assert answers.dtype == np.float32 and len(answers) == N
    if task.gives_images:
        assert answers.shape[1:] == SHAPE
        return
    assert len(task.cells(answers[0])) == len(task.columns())
    assert all(len(column) == N for column in task.table(answers).values())
    captions = task.captions(batch.block, answers, np.arange(N) < 2)
    assert [caption.row for caption in captions] == [0, 1]


def test_of_equally_confident_mistakes_the_first_rows_are_kept():
    """Whichever block comes first."""
    tally = task_class("classify")(classes=CLASSES).tallies(mistakes=2)[-1]
    outputs = torch.zeros(3, len(CLASSES))
    outputs[:, 1] = 5
    for rows in ((6, 7, 8), (0, 1, 2)):
        block = SimpleNamespace(rows=np.array(rows), targets=np.zeros(3, np.int64))
        measured = tally.measure(outputs, None, None)
        tally.add(block, {name: value.numpy() for name, value in measured.items()})
    assert [answer.row for answer in tally.worst] == [0, 1] and tally.total == 6


def test_balanced_weights_are_those_of_known_entries_and_rare_classes_are_noted(tmp_path):
    """Of 400 images, one has class a; class b has a third of the 30 of which it is known."""
    labels = np.zeros((400, 3), np.uint8)
    labels[7, 0] = 1
    labels[30:, 1] = 255
    labels[:10, 1] = 1
    labels[::4, 2] = 1
    images = np.arange(400 * 9 * 9).reshape(400, 9, 9) % 251
    hp.write_pack(tmp_path / "a.h5", {"train": (images.astype(np.uint8), labels)}, ["a", "b", "c"])
    kind = task_class("multilabel")
    settings = vars(hp.Config(task="multilabel", class_weights="balanced"))
    with hp.Split(hp.read_pack(tmp_path / "a.h5"), "train") as train:
        weights = kind.find_weights(settings, train)
    measured = {"class_weights": weights}
    assert weights == (100, 2, 3)
    assert "1 of 3 classes" in kind.measured_note(settings, measured)
    given = vars(hp.Config(task="multilabel", class_weights="100,2,3"))
    assert not kind.measured_note(given, measured)


def test_classes_that_all_images_have_or_none_have_no_balanced_weight(tmp_path):
    """Of one that all have, nothing would be learned with a weight of 0."""
    labels = np.array([[1, 0, 0], [0, 1, 0], [0, 255, 0]] * 2, np.uint8)
    labels[:, 2] = [0, 1, 1] * 2
    settings = vars(hp.Config(task="multilabel", class_weights="balanced"))
    for value, text in ((0, "of class b; give"), (1, "without class b, whose weight would be 0")):
        labels[:, 1][labels[:, 1] < 255] = value
        path = tmp_path / f"{value}.h5"
        hp.write_pack(path, {"train": (np.zeros((6, 9, 9), np.uint8), labels)}, ["a", "b", "c"])
        refused = pytest.raises(hp.UsageError, match=f"no training image is {text}")
        with hp.Split(hp.read_pack(path), "train") as train, refused:
            task_class("multilabel").find_weights(settings, train)


def test_figures_in_small_units_are_printed_with_their_digits():
    assert (
        task_class("regress")().describe({"mae": 3.4998e-7, "r2": 0.5}) == "mae 3.50e-07, r2 0.5000"
    )


@pytest.mark.parametrize("name", ["multilabel", "regress"])
def test_figures_of_right_answers_are_the_better_ones(name):
    targets = torch.tensor([[0.0, 1.0], [1.0, 0.0], [1.0, 1.0], [0.0, 0.0]])
    given = {"thresholds": (0.5, 0.5)}
    if name == "regress":
        given = {"scaling": ((0.0, 0.0), (1.0, 1.0))}
    task = task_class(name)(names=("a", "b"), **given)
    stored = targets.numpy().astype("u1" if name == "multilabel" else "f4")
    block = SimpleNamespace(rows=np.arange(4), targets=stored)
    right, wrong = {}, {}
    for outputs, figures in ((targets - 0.1, right), (0.9 - targets, wrong)):
        for tally in task.tallies():
            measured = tally.measure(outputs, None, targets)
            tally.add(block, {key: value.numpy() for key, value in measured.items()})
            tally.merge([tally.part()], MPI.COMM_SELF)
            figures |= tally.figures()
    assert {*task.facts.figures} <= {*right}
    for figure, value in right.items():
        better = {"max": value > wrong[figure], "min": value < wrong[figure]}
        assert better[task.facts.directions[figure]], figure
