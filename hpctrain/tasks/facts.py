"""What is known of each task before its data are: what it does, its defaults, its figures.

The help, the plan and the readers of records use this table. It imports nothing, so that they need
no torch. ``tasks/NAME.py`` computes what a task learns, and is imported on use.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal, NamedTuple

TaskName = Literal["classify", "denoise"]
Direction = Literal["max", "min"]  # in which a figure is better

UNIT_ONLY = "images stay in [0, 1]"
NO_CLASSES = "its loss knows no classes"


class TaskFacts(NamedTuple):
    """Defaults and figures of a task; its name is that of its module."""

    help: str  # what is learned
    use: str  # what a network does, for an error where another kind is needed
    figures: dict[str, Direction]  # of records; runs are ranked by the first one
    loss: str  # its name
    model: str = ""  # of --model auto; "" = by the size of the images
    optimizer: str = "sgdm"
    epochs: int | None = None  # None = by the network
    batch_size: int = 128
    patience: int = 0
    is_unit: bool = False  # whether images must stay in [0, 1]
    excludes: tuple[tuple[str, str], ...] = ()  # options, and why


FACTS: dict[str, TaskFacts] = {
    "classify": TaskFacts(
        help="learn the class of an image",
        use="classifies images",
        figures={"accuracy": "max", "loss": "min"},
        loss="cross-entropy",
    ),
    "denoise": TaskFacts(
        help="to remove noise",
        use="restores images",
        figures={"loss": "min"},
        loss="mean squared error",
        model="autoencoder",
        optimizer="adam",
        epochs=5,
        batch_size=500,
        patience=5,
        is_unit=True,
        excludes=(
            ("--normalize pack/imagenet", UNIT_ONLY),
            ("--label-smoothing", NO_CLASSES),
            ("--class-weights", NO_CLASSES),
        ),
    ),
}
USUAL = FACTS["classify"]


def exclusions() -> Iterator[tuple[str, str, str]]:
    """Yield pairs of options that exclude each other by the task, and why."""
    for name, facts in FACTS.items():
        for option, why in facts.excludes:
            yield option, f"--task {name}", why


def other_defaults(field: str) -> str:
    """Return the tasks whose default in `field` is not the usual one, as in "denoise adam"."""
    values = {name: getattr(facts, field) for name, facts in FACTS.items()}
    usual = getattr(USUAL, field)
    return ", ".join(f"{name} {value}" for name, value in values.items() if value != usual)
