"""The plan of a run: what follows from its settings together with ranks, machine, model and pack.

The first launch resolves it with a pure function and stores it beside the settings; later launches,
on other ranks, read it. `describe_plan` prints it, one line per decision.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any

from hpctrain.config import Config, optimizer_and_rate
from hpctrain.data.partition import READ_BYTES, Partition, cut_epoch, even_shares
from hpctrain.errors import UsageError
from hpctrain.tasks.facts import FACTS
from hpctrain.text import brief, counted, listed, min_to_max

#: Mean and std by channel; () = images in [0, 1]; "image" = each channel of each image by itself.
Scaling = tuple[tuple[float, ...], ...] | str
#: What a task has measured of the training targets, by name: tuples, numbers and texts.
Measured = dict[str, Any]
#: Smallest and largest stored values of the channels, (C,) each.
Ranges = tuple[tuple[float, ...], tuple[float, ...]]
#: Meaning of a plan's numbers. A default that changes raises it; a setting or field that is added
#: does not, as it has no part in a digest at its default.
VERSION = 3
MOST_SHARES = 16  # listed one by one
EPOCHS = 100
NETWORK_EPOCHS = {"digits": 20}  # by network
EVALUATION_ROWS = 64  # samples of a block, on CPUs
GPU_EVALUATION_ROWS = 256  # at most: with larger blocks, fewer ranks have one
GPU_EVALUATION_VALUES = 1 << 26  # values of a block: 256 MiB of float32
#: Settings that may change from launch to launch: they say where, how fast and how long, not what.
FREE = {
    *("run", "runs_dir", "data", "cache_dir", "read_buffer", "epochs", "worker_load", "stage"),
    *("verify", "reduce", "overlap", "device", "threads", "checkpoint_every", "keep_checkpoints"),
    *("resume", "time_limit", "hang_timeout", "test", "progress", "tensorboard", "dry_run"),
}
#: Settings that the plan resolves to numbers of other names.
RESOLVED = {"lr", "scale_lr", "warmup_epochs", "batch_per_rank", "normalize", "class_weights"}
#: Facts that a plan holds as they are.
FROM_FACTS = (
    *("rows", "image_shape", "pack_uuid", "measured", "scaling", "split_seed", "stored_range"),
    "augment_range",
)
WARMUP_EPOCHS = 5.0  # by default if the learning rate grows with the batch
WARMUP_FROM = 0.1  # fraction of the learning rate in the first step, if it does not


@dataclasses.dataclass(frozen=True)
class Facts:
    """Everything besides the configuration that a plan depends on, or that describes a launch."""

    ranks: int
    device: str  # "cpu" or "cuda"
    threads: int  # CPU threads of a rank
    rows: int  # samples of the training split
    image_shape: tuple[int, int, int]  # (H, W, C)
    row_bytes: int  # memory of a buffered sample
    targets: str  # in words: "5 classes"
    pack_uuid: str
    min_samples: int  # a shard needs per step: 2 if a layer has one value per image and channel
    block_rows: int = 0  # samples of the blocks in which a file was assigned to splits; 0 = none
    chunk_rows: int = 0  # samples of a chunk of the file; 0 = not chunked
    measured: Measured = dataclasses.field(default_factory=lambda: {"class_weights": ()})
    scaling: Scaling = ()
    split_seed: int | None = None  # of the splits of an external file; None = those of a pack
    stored_range: Ranges | None = None  # of all training images; None = not measured
    augment_range: Ranges | None = None  # stored values that transforms see as 0 and 1
    augmentation: tuple[str, ...] = ()  # in words, with parts of other libraries


@dataclasses.dataclass(frozen=True)
class Plan:
    """The resolved numbers of one run, which hold in all its launches."""

    settings: str  # digest of the other settings that no launch may change
    chosen: tuple[str, ...]  # settings, except precision, that were not at their default of then
    model: str
    image_shape: tuple[int, int, int]  # (H, W, C)
    pack_uuid: str
    rows: int  # samples of the training split
    shards: int
    batch_size: int  # global batch size: samples of a full step over all shards
    last: tuple[int, ...]  # samples of the last step of an epoch, by shard
    shuffle: str
    block_rows: int  # samples of a block, for shuffle "blocks"
    window_blocks: int  # blocks whose samples are shuffled among themselves
    epochs: int  # a later launch may extend them
    optimizer: str
    learning_rate: float  # after the warm-up
    warmup_steps: int
    warmup_from: float  # fraction of the learning rate in the first step
    patience: int  # validations without a smaller loss before training stops; 0 = never
    precision: str
    evaluation_rows: int  # samples of a block of an evaluation
    measured: Measured  # of the training targets, by the task
    scaling: Scaling
    device: str = ""  # "cpu" or "cuda" with --deterministic: bits depend on it
    threads: int = 0  # CPU threads of a rank with --deterministic: bits depend on them
    split_seed: int | None = None  # of an external file; None also where --seed drew the splits
    stored_range: Ranges | None = None  # of an external file, where it was measured
    augment_range: Ranges | None = None  # stored values that transforms see as 0 and 1
    version: int = VERSION

    @cached_property
    def partition(self) -> Partition:
        return Partition(self.rows, even_shares(self.batch_size, self.shards), self.last)

    @property
    def steps_per_epoch(self) -> int:
        return self.partition.steps

    @property
    def steps(self) -> int:
        """Steps of the whole run."""
        return self.epochs * self.steps_per_epoch

    def as_dict(self) -> dict[str, Any]:
        """Return its fields by name, and what is measured beside them, as in its file."""
        fields = dataclasses.asdict(self)
        measured: Measured = fields.pop("measured")
        if self.augment_range is None:  # a plan without it is as those before there was one
            del fields["augment_range"]
        return fields | measured

    def digest(self) -> str:
        """Return a hash of what is resolved, however the settings were given.

        A field at its default has no part in it.
        """
        fields = self.as_dict()
        del fields["chosen"]
        for field in dataclasses.fields(self):
            if field.name != "version" and fields.get(field.name) == field.default:
                fields.pop(field.name, None)
        return _digest(fields)

    def to_json(self) -> str:
        return json.dumps({**self.as_dict(), "digest": self.digest()}, sort_keys=True)


def _digest(fields: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(fields, sort_keys=True).encode()).hexdigest()[:16]


def resolve(config: Config, facts: Facts) -> Plan:
    """Resolve the plan of a first launch. Raises UsageError if the numbers are inconsistent."""
    model = model_name(config, facts.image_shape)
    task = FACTS[config.task]
    shards = config.shards or round(sum(config.worker_load or ())) or facts.ranks
    partition = cut_epoch(facts.rows, global_batch_size(config, facts), shards, facts.min_samples)
    shuffle = choose_shuffle(config, facts)
    block_rows = facts.block_rows or -(-READ_BYTES // facts.row_bytes)
    optimizer, rate = optimizer_and_rate(config.optimizer, config.lr, config.task)
    growth = rate_growth(config, partition.batch_size)
    epochs = config.epochs or task.epochs or NETWORK_EPOCHS.get(model, EPOCHS)
    elsewhere = {*FREE, *RESOLVED, *(field.name for field in dataclasses.fields(Plan))}
    return Plan(
        **{name: getattr(facts, name) for name in FROM_FACTS},
        settings=_digest({n: v for n, v in config.changed().items() if n not in elsewhere}),
        chosen=tuple(name for name in config.changed() if name != "precision"),
        model=model,
        shards=shards,
        batch_size=partition.batch_size,
        last=partition.last,
        shuffle=shuffle,
        block_rows=block_rows,
        window_blocks=max(1, config.read_buffer // (2 * shards * block_rows * facts.row_bytes)),
        epochs=epochs,
        optimizer=optimizer,
        learning_rate=rate * growth,
        warmup_steps=round(warmup_epochs(config, growth, epochs) * partition.steps),
        warmup_from=1 / growth if growth > 1 else WARMUP_FROM,
        patience=task.patience if config.patience is None else config.patience,
        precision=resolve_precision(config, facts),
        evaluation_rows=evaluation_rows(facts.device, facts.image_shape),
        device=facts.device if config.deterministic else "",
        threads=cpu_threads(config, facts.threads) if config.deterministic else 0,
    )


def global_batch_size(config: Config, facts: Facts) -> int:
    """Return --batch-size; by default --batch-per-rank, or on GPUs the task's batch, per shard."""
    if config.batch_size:
        return config.batch_size
    if config.batch_per_rank is None and facts.device == "cpu":
        return base_batch_size(config)
    return base_batch_size(config) * (config.shards or facts.ranks)


def base_batch_size(config: Config) -> int:
    """Return the batch size that --lr is meant for: --batch-per-rank, or the task's."""
    return config.batch_per_rank or FACTS[config.task].batch_size


def choose_shuffle(config: Config, facts: Facts) -> str:
    """Return --shuffle, or its default. Raises UsageError if samples cannot be balanced by it."""
    shuffle = config.shuffle or ("blocks" if facts.chunk_rows else "partition")
    if config.balanced_sampling and shuffle == "blocks":
        raise UsageError(
            "--balanced-sampling repeats images of rare classes, and --shuffle blocks (the default"
            " for a file of chunks) reads a block once per epoch: use --shuffle partition"
        )
    return shuffle


def rate_growth(config: Config, batch_size: int) -> float:
    """Return the factor by which --scale-lr raises the learning rate for a global batch size.

    It grows linearly with the batch (Goyal et al. 2017, arXiv:1706.02677), or with its square root
    (Krizhevsky 2014, arXiv:1404.5997; usual for adam).
    """
    times = batch_size / base_batch_size(config)
    return {"none": 1.0, "linear": times, "sqrt": math.sqrt(times)}[config.scale_lr]


def warmup_epochs(config: Config, growth: float, epochs: int) -> float:
    """Return --warmup-epochs, or its default. Raises UsageError if it is longer than the run."""
    warmup = 0.0
    if config.warmup_epochs is not None:
        warmup = config.warmup_epochs
    elif growth > 1 and config.schedule != "one-cycle":  # one-cycle has a warm-up of its own
        warmup = WARMUP_EPOCHS
    if warmup > epochs:
        raise UsageError(
            f"the warm-up of {warmup:g} epochs is longer than the run of"
            f" {counted(epochs, 'epoch')}: give a smaller --warmup-epochs or a larger --epochs"
        )
    return warmup


def resolve_precision(config: Config, facts: Facts) -> str:
    """Return --precision; torch's default is fp32 on CPUs, which have no TF32."""
    if config.precision == "default" and facts.device == "cpu":
        return "fp32"
    return config.precision


def evaluation_rows(device: str, image_shape: tuple[int, int, int]) -> int:
    """Return the number of samples in a block of an evaluation.

    Random numbers and the order of summation belong to blocks, so that they depend on the device
    and the image shape, (H, W, C), but never on the ranks.
    """
    if device == "cpu":
        return EVALUATION_ROWS
    most = GPU_EVALUATION_VALUES // math.prod(image_shape)
    return max(EVALUATION_ROWS, min(GPU_EVALUATION_ROWS, most))


def model_name(config: Config, image_shape: tuple[int, int, int]) -> str:
    """Resolve --model auto: that of the task, or digits for 28x28x1, else ResNet-50."""
    if config.model != "auto":
        return config.model
    if FACTS[config.task].model:
        return FACTS[config.task].model
    return "digits" if image_shape == (28, 28, 1) else "resnet50"


def cpu_threads(config: Config, allowed: int, earlier: Plan | None = None) -> int:
    """Return the CPU threads per rank: --threads, else 1 if deterministic, else `allowed`."""
    if earlier and earlier.threads:  # the run is deterministic
        return earlier.threads
    return config.threads or (1 if config.deterministic else allowed)


def read_plan(fields: Any) -> Plan:
    """Return the plan with the fields that `Plan.to_json` wrote.

    Raises ValueError if they are no plan, or if its digest is wrong; that of another version cannot
    be computed (`check_version`).
    """
    try:
        digest = fields.pop("digest", None)
        values = {name: _as_tuple(value) for name, value in fields.items()}
        names = {field.name for field in dataclasses.fields(Plan)}
        measured = {
            name: value for name, value in values.items() if name not in names and value is not None
        }
        plan = Plan(measured=measured, **{name: values[name] for name in names & values.keys()})
    except (AttributeError, TypeError) as error:  # no object, or a field is missing
        raise ValueError(str(error)) from None
    if plan.version == VERSION and digest != plan.digest():
        raise ValueError(f"its digest is {plan.digest()}, and not {str(digest)[:16]} as it says")
    return plan


def check_version(plan: Plan) -> None:
    """Raise UsageError for the plan of a run that another version of plans began."""
    if plan.version != VERSION:
        raise UsageError(
            f"the run's plan has version {plan.version}, this hpctrain's {VERSION}: finish it with"
            " the hpctrain that began it, or begin a new run with another --run"
        )


def _as_tuple(value: Any) -> Any:
    return tuple(map(_as_tuple, value)) if isinstance(value, list) else value


def extend(plan: Plan, config: Config, facts: Facts) -> Plan:
    """Return the plan of a run's first launch with the epochs of this one, if they are more.

    Raises UsageError, with the difference, if the data or the model has changed, or the device of a
    deterministic run.
    """
    for name, old, new in (
        ("pack", plan.pack_uuid, facts.pack_uuid),
        ("device", plan.device, facts.device if plan.device else ""),
        ("training images", plan.rows, facts.rows),
        ("image shape", plan.image_shape, facts.image_shape),
        ("model", plan.model, model_name(config, facts.image_shape)),
    ):
        check_unchanged(name, old, new)
    for name in {**plan.measured, **facts.measured}:
        words = name.replace("_", " ")
        check_unchanged(words, plan.measured.get(name), facts.measured.get(name))
    return dataclasses.replace(plan, epochs=max(plan.epochs, config.epochs or 0))


def check_unchanged(name: str, old: object, new: object) -> None:
    """Raise UsageError if what a run was begun with is another one now."""
    if old != new:
        text = f"the run was begun with {name} {brief(old)}, not {brief(new)}"
        raise UsageError(f"{text}: it cannot go on")


def describe_plan(
    config: Config,
    facts: Facts,
    plan: Plan,
    shards: Sequence[range],
    of_targets: Mapping[str, str],
) -> list[str]:
    """Return the plan as text, one line per decision, with the `shards` of each rank.

    Lines on what is measured `of_targets` are the task's.
    """
    height, width, channels = plan.image_shape
    sizes = min_to_max(plan.partition.sizes)
    epochs = counted(plan.epochs, "epoch")
    order = plan.shuffle
    if config.balanced_sampling:
        order += ", classes drawn equally often"
    if plan.shuffle == "blocks":
        order = f"blocks of {plan.block_rows:,} images, shuffled by {plan.window_blocks:,}"
    steps = f"{epochs} x {plan.steps_per_epoch} = {plan.steps:,}, {plan.warmup_steps:,} to warm up"
    memory_format = "NHWC" if config.channels_last else "NCHW"
    sums = "tree order, deterministic" if config.deterministic else f"in {config.comm_dtype}"
    lines = {
        "task": f"{config.task}, {width}x{height}x{channels}, {facts.targets}",
        "model": plan.model,
        **describe_augmentation(facts.augmentation),
        "input": describe_scaling(plan.scaling),
        "data": f"{plan.rows:,} training images, pack {plan.pack_uuid}",
        "ranks": f"{len(shards)} on {facts.device}, {facts.threads} CPU threads each",
        "shards": f"{plan.shards}, partitions of {sizes} images",
        "order": order,
        "mini-batch": f"{plan.batch_size} images, {describe_shares(plan, shards)}",
        "steps": f"{steps}; last step of an epoch {sum(plan.last)} images",
        "optimizer": f"{plan.optimizer}, learning rate {plan.learning_rate:g}",
        **of_targets,
        "batch norm": config.batch_norm,
        "precision": f"{plan.precision}, {memory_format}",
        "seed": describe_seeds(config.seed, plan.split_seed),
        "sums": sums,
        "plan": plan.digest(),
    }
    return [f"{name:<14} {text}" for name, text in lines.items()]


def describe_augmentation(texts: Sequence[str]) -> dict[str, str]:
    """Return a line on the transforms of images, in their order, if there are texts."""
    return {"augmentation": "; then ".join(texts)} if texts else {}


def describe_scaling(scaling: Scaling) -> str:
    """Return how images are normalized."""
    if isinstance(scaling, str):
        return f"mean and std of each {scaling} and channel"
    return "; ".join(map(listed_numbers, scaling)) or "0 to 1"  # mean; std


def describe_seeds(seed: int, split_seed: int | None) -> str:
    """Return --seed, and --split-seed where it has drawn the splits."""
    if split_seed is None:
        return str(seed)
    return f"{seed}; of the splits {split_seed}"


def describe_shares(plan: Plan, shards: Sequence[range]) -> str:
    """Return the images of a full global batch per rank; only their range for many ranks."""
    of_shards = plan.partition.shares
    shares = [sum(of_shards[carried.start : carried.stop]) for carried in shards]
    if len(shares) > MOST_SHARES:
        return f"{min_to_max(shares)} a rank"
    return f"{', '.join(map(str, shares))} by rank"


def listed_numbers(values: tuple[float, ...]) -> str:
    """Return numbers in four digits, the first of many."""
    return listed((f"{value:.4g}" for value in values), MOST_SHARES)
