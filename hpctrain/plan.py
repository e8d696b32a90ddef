"""What will be done: everything that follows from the configuration together with the ranks,
the machine, the model and the pack. Resolved once, on rank 0, and pure: the same facts give the
same plan. `--dry-run` prints it; every run keeps it beside its configuration.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from dataclasses import dataclass
from typing import Any

from hpctrain.config import DEFAULT_LEARNING_RATES, Config
from hpctrain.data.partition import Partition, cut_epoch
from hpctrain.errors import UsageError

EVALUATION_ROWS = 64  # rows of a block: fixed, so that evaluation does not depend on ranks


@dataclass(frozen=True)
class Facts:
    """What the plan depends on besides the configuration."""

    ranks: int
    device: str  # "cpu" or "cuda"
    threads: int  # CPU threads a rank may use
    rows: int  # of the training split
    image_shape: tuple[int, int, int]  # (H, W, C)
    classes: int
    pack_uuid: str
    least_rows: int  # rows a shard needs in a step: 2 where a layer has one value per row


@dataclass(frozen=True)
class Plan:
    """The resolved numbers of one run."""

    model: str
    image_shape: tuple[int, int, int]  # (H, W, C)
    classes: int
    pack_uuid: str
    ranks: int  # at first launch
    shards: int
    batch_size: int  # rows of a full step over all shards
    shares: tuple[int, ...]  # of the mini-batch, by shard
    last: tuple[int, ...]  # of the last step of an epoch, by shard
    rows: int  # of the training split
    epochs: int
    steps_per_epoch: int
    learning_rate: float
    batch_norm: str
    precision: str
    channels_last: bool
    device: str
    threads: int
    evaluation_rows: int
    seed: int

    @property
    def partition(self) -> Partition:
        return Partition(self.rows, self.shares, self.last)

    @property
    def steps(self) -> int:
        """Steps of the whole run."""
        return self.epochs * self.steps_per_epoch

    def digest(self) -> str:
        """Hash over all fields."""
        return hashlib.sha256(self.to_json().encode()).hexdigest()[:16]

    def to_json(self) -> str:
        return json.dumps(dataclasses.asdict(self), sort_keys=True)

    def lines(self) -> list[str]:
        """The plan for a reader, a line per decision."""
        height, width, channels = self.image_shape
        sizes = self.partition.sizes()
        return [
            f"model          {self.model} for {width}x{height}x{channels}, {self.classes} classes",
            f"data           {self.rows:,} training images, pack {self.pack_uuid}",
            f"ranks          {self.ranks} on {self.device}, {self.threads} CPU threads each",
            f"shards         {self.shards}, partitions of {_range(sizes)} images",
            f"mini-batch     {self.batch_size}, shares of {_range(self.shares)} images",
            f"steps          {self.epochs} epochs x {self.steps_per_epoch} = {self.steps:,};"
            f" last step of an epoch {sum(self.last)} images",
            f"learning rate  {self.learning_rate:g}",
            f"batch norm     {self.batch_norm}",
            f"precision      {self.precision}, {'NHWC' if self.channels_last else 'NCHW'}",
            f"seed           {self.seed}",
            f"plan           {self.digest()}",
        ]


def _range(numbers: tuple[int, ...]) -> str:
    low, high = min(numbers), max(numbers)
    return f"{low:,}" if low == high else f"{low:,} to {high:,}"


def model_name(config: Config, image_shape: tuple[int, int, int]) -> str:
    """The network: as asked for, or the digits network for its image shape, else ResNet-50."""
    if config.model != "auto":
        return config.model
    return "digits" if image_shape == (28, 28, 1) else "resnet50"


def resolve(config: Config, facts: Facts) -> Plan:
    """The plan of a first launch. Raises UsageError where the numbers do not fit together."""
    model = model_name(config, facts.image_shape)
    shards = config.shards or facts.ranks
    if shards < facts.ranks:
        raise UsageError(
            f"{facts.ranks} ranks cannot carry {shards} shards: start at most {shards} ranks"
        )
    partition = cut_epoch(facts.rows, _batch_size(config, facts), shards, facts.least_rows)
    default_rate = DEFAULT_LEARNING_RATES[config.optimizer]
    return Plan(
        model=model,
        image_shape=facts.image_shape,
        classes=facts.classes,
        pack_uuid=facts.pack_uuid,
        ranks=facts.ranks,
        shards=shards,
        batch_size=partition.batch_size,
        shares=partition.shares,
        last=partition.last,
        rows=facts.rows,
        epochs=config.epochs or (20 if model == "digits" else 100),
        steps_per_epoch=partition.steps,
        learning_rate=default_rate if config.lr is None else config.lr,
        batch_norm=config.batch_norm,
        precision=config.precision,
        channels_last=config.channels_last,
        device=facts.device,
        threads=config.threads or facts.threads,
        evaluation_rows=EVALUATION_ROWS,
        seed=config.seed,
    )


def check_ranges(config: Config) -> None:
    """Raise UsageError for a number that is out of its range whatever the data."""
    at_least_one: dict[str, Any] = {
        "--epochs": config.epochs,
        "--batch-size": config.batch_size,
        "--batch-per-rank": config.batch_per_rank,
        "--shards": config.shards,
        "--threads": config.threads,
    }
    for flag, value in at_least_one.items():
        if value is not None and value < 1:
            raise UsageError(f"{flag} {value}: give 1 or more")
    if config.evaluate_every < 0:
        raise UsageError(f"--evaluate-every {config.evaluate_every}: give 0 or more")


def _batch_size(config: Config, facts: Facts) -> int:
    if config.batch_size is not None and config.batch_per_rank is not None:
        raise UsageError(
            f"--batch-size {config.batch_size} and --batch-per-rank {config.batch_per_rank}"
            " exclude each other: give one"
        )
    if config.batch_per_rank is not None:
        return config.batch_per_rank * facts.ranks
    if config.batch_size is not None:
        return config.batch_size
    return 128 * (facts.ranks if facts.device == "cuda" else 1)
