"""Facts of each task that do not depend on data: its purpose, its defaults, its figures.

The help, the plan and the readers of records use this table. It imports nothing, so that they need
no torch. ``tasks/NAME.py`` computes what a task learns, and is imported on use.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from types import MappingProxyType
from typing import Literal, NamedTuple

from hpctrain.errors import UsageError

TaskName = Literal["classify", "multilabel", "regress", "denoise"]
Direction = Literal["max", "min"]  # in which a figure is better
DIRECTIONS: dict[str, Direction] = {"max": "max", "min": "min"}

#: Kinds of targets of a pack, in words (data/targets.py).
KINDS = {
    "class": "one class an image",
    "classes": "any number of classes an image",
    "values": "columns of values",
}
NO_CLASSES = "its loss knows no classes"
NOT_ONE_CLASS = "it draws images by their one class"


class FigureFacts(NamedTuple):
    """How a figure of evaluations is read."""

    direction: Direction  # in which it is better
    is_share: bool = False  # whether it is from 0 to 1
    is_shown: bool = True  # by displays of validations, and as a curve


SHARE = FigureFacts("max", is_share=True)
SCORE = FigureFacts("max")
ERROR = FigureFacts("min")
BESIDE_LOSS = FigureFacts("min", is_shown=False)  # a loss that explains another one


class TaskFacts(NamedTuple):
    """Defaults and figures of a task; its name is that of its module."""

    help: str  # purpose, for the help: "learn the class of an image"
    use: str  # verb and object, for errors: "this network classifies images"
    answered: str  # participle, for reports: "5 images classified"
    figures: Mapping[str, FigureFacts]  # in records; runs are ranked by the first one
    loss: str  # name of its loss
    targets: str = ""  # kind of targets that it learns, of `KINDS`; "" = any
    more: Mapping[str, FigureFacts] = MappingProxyType({})  # further figures of evaluations
    best_by: str = ""  # figure that chooses the best network; "" = the first one
    settings: tuple[tuple[str, type], ...] = ()  # its own, held by a network's file
    model: str = ""  # for --model auto; "" = by the size of the images
    optimizer: str = "sgdm"
    epochs: int | None = None  # None = by the network
    batch_size: int = 128
    patience: int = 0
    is_unit: bool = False  # whether images must be in [0, 1], without a normalization
    excludes: tuple[tuple[str, str], ...] = ()  # options, and why

    @property
    def directions(self) -> dict[str, Direction]:
        """All figures of evaluations, and the direction in which each is better."""
        return {name: figure.direction for name, figure in {**self.figures, **self.more}.items()}

    @property
    def recorded(self) -> dict[str, Direction]:
        """The figures of all its records, and the direction in which each is better."""
        return {name: figure.direction for name, figure in self.figures.items()}

    @property
    def chooses(self) -> str:
        """The figure that chooses the best network, unless --best-by names one."""
        return self.best_by or next(iter(self.figures))


class BestBy(NamedTuple):
    """The figure that chooses the best network of a run."""

    figure: str
    direction: Direction  # in which it is better


FACTS: dict[str, TaskFacts] = {
    "classify": TaskFacts(
        help="learn the class of an image",
        use="classifies images",
        answered="classified",
        figures={"accuracy": SHARE, "loss": ERROR},
        loss="cross-entropy",
        targets="class",
        more={
            "unweighted_loss": BESIDE_LOSS,
            "balanced_accuracy": SHARE,
            "top5_accuracy": SHARE,
            "auroc": SHARE,
            "auroc_binned": SHARE,
            "f1_macro": SHARE,
        },
        best_by="loss",
    ),
    # Adam: the loss is a mean over K entries of which most are easy, so its gradient is small, and
    # of another size for each K. Patience: both losses rise again long before the usual 100 epochs.
    "multilabel": TaskFacts(
        help="all of its classes",
        use="finds classes of images",
        answered="labelled",
        figures={"mAP": SHARE, "loss": ERROR},
        loss="binary cross-entropy",
        targets="classes",
        more={
            "unweighted_loss": BESIDE_LOSS,
            "auroc": SHARE,
            "f1_macro": SHARE,
            "f1_micro": SHARE,
            "mAP_binned": SHARE,
            "auroc_binned": SHARE,
        },
        optimizer="adam",
        patience=10,
        excludes=(("--balanced-sampling", NOT_ONE_CLASS),),
    ),
    "regress": TaskFacts(
        help="values, such as an age",
        use="measures images",
        answered="measured",
        figures={"relative_mae": ERROR, "loss": ERROR},
        loss="mean squared error of standardized values",
        targets="values",
        more={"r2": SCORE, "mae": ERROR, "rmse": ERROR},
        optimizer="adam",
        patience=10,
        excludes=(
            ("--label-smoothing", NO_CLASSES),
            ("--class-weights", NO_CLASSES),
            ("--balanced-sampling", NOT_ONE_CLASS),
        ),
    ),
    "denoise": TaskFacts(
        help="to remove noise",
        use="restores images",
        answered="restored",
        figures={"loss": ERROR},
        loss="mean squared error",
        more={"noisy": BESIDE_LOSS},
        settings=(("noise", str), ("noise_level", float)),
        model="autoencoder",
        optimizer="adam",
        epochs=5,
        batch_size=500,
        patience=5,
        is_unit=True,
        excludes=(
            ("--label-smoothing", NO_CLASSES),
            ("--class-weights", NO_CLASSES),
        ),
    ),
}
USUAL = FACTS["classify"]


def all_figures() -> dict[str, FigureFacts]:
    """Return the figures of all tasks."""
    return {
        name: figure
        for facts in FACTS.values()
        for name, figure in (*facts.figures.items(), *facts.more.items())
    }


def shown_figures() -> list[str]:
    """Return the names of the figures beside the loss that displays and curves have."""
    return [name for name, figure in all_figures().items() if figure.is_shown and name != "loss"]


def best_by(
    setting: str | None, task: str, metrics: Mapping[str, str] = MappingProxyType({})
) -> BestBy:
    """Return the figure that chooses the best network, by the setting --best-by.

    `metrics` are the directions of the figures of libraries, "" if they have none; other figures of
    --metric are given with their direction. Raises UsageError for one that has none.
    """
    facts = FACTS.get(task, USUAL)
    name = setting or facts.chooses

    def direction_of(figure: str) -> Direction | None:
        of_metric = metrics.get(figure, metrics.get(figure.partition(" of ")[0], ""))
        return facts.directions.get(figure, DIRECTIONS.get(of_metric))

    usual = direction_of(name)
    if usual:
        return BestBy(name, usual)
    figure, _, word = name.rpartition(":")
    direction = DIRECTIONS.get(word)
    flag = f"--best-by {name}"
    if direction is None:
        raise UsageError(
            f"{flag}: no figure of --task {task}, which has"
            f" {', '.join([*facts.directions, *metrics])}; one of"
            f" --metric needs its direction, as in {name}:max or {name}:min"
        )
    usual = direction_of(figure)
    if usual and usual != direction:
        raise UsageError(f"{flag}: of {figure}, the {usual} is the best: give --best-by {figure}")
    return BestBy(figure, direction)


def all_settings() -> dict[str, type]:
    """Return the settings that belong to one task, and their types."""
    return {name: kind for facts in FACTS.values() for name, kind in facts.settings}


def task_that_learns(kind: str) -> str:
    """Return the name of the task that learns targets of a kind."""
    return next(name for name, facts in FACTS.items() if facts.targets == kind)


def task_with(setting: str) -> str:
    """Return the name of the task to which a setting belongs."""
    return next(name for name, facts in FACTS.items() if setting in dict(facts.settings))


def exclusions() -> Iterator[tuple[str, str, str]]:
    """Yield pairs of options that exclude each other by the task, and why."""
    for name, facts in FACTS.items():
        if facts.is_unit:
            yield "--normalize pack/image/imagenet", f"--task {name}", "images stay in [0, 1]"
        for option, why in facts.excludes:
            yield option, f"--task {name}", why


def other_defaults(field: str) -> str:
    """Return the tasks whose default in `field` is not the usual one, as in "denoise adam"."""
    values = {name: getattr(facts, field) for name, facts in FACTS.items()}
    usual = getattr(USUAL, field)
    return ", ".join(f"{name} {value}" for name, value in values.items() if value != usual)
