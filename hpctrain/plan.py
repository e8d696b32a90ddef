"""The plan of a run: all that follows from configuration, ranks, machine, model and pack.

Rank 0 resolves it once, with a pure function, and stores it; later launches, on other ranks, read
it. `describe_plan` prints it, one line per decision.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
from collections.abc import Sequence
from functools import cached_property
from typing import Any

from hpctrain.config import Config, byte_count, optimizer_and_rate, worker_loads
from hpctrain.config.others import evaluation_rows
from hpctrain.data.partition import READ_BYTES, Partition, cut_epoch
from hpctrain.errors import UsageError
from hpctrain.text import brief, counted, min_to_max
from hpctrain.typed import from_fields, parse_toml

VERSION = 2  # meaning of a plan's numbers


@dataclasses.dataclass(frozen=True)
class Facts:
    """Everything besides the configuration that a plan depends on."""

    ranks: int
    device: str  # "cpu" or "cuda"
    threads: int  # CPU threads a rank may use
    rows: int  # samples of the training split
    image_shape: tuple[int, int, int]  # (H, W, C)
    value_bytes: int  # bytes of one value of an image
    classes: int
    pack_uuid: str
    min_samples: int  # a shard needs per step: 2 if a layer has one value per image and channel
    buffered_bytes: int = 0  # memory of a buffered sample; 0 = that of its values
    block_rows: int = 0  # samples of the blocks in which a file was assigned to splits; 0 = none
    chunk_rows: int = 0  # samples of a chunk of the file; 0 = not chunked
    class_weights: tuple[float, ...] = ()  # in the loss; () = all alike
    scaling: tuple[tuple[float, ...], ...] = ()  # mean and std by channel; () = images in [0, 1]


@dataclasses.dataclass(frozen=True)
class Plan:
    """The resolved numbers of one run."""

    task: str
    model: str
    image_shape: tuple[int, int, int]  # (H, W, C)
    classes: int
    pack_uuid: str
    shards: int
    batch_size: int  # global batch size: samples of a full step over all shards
    shares: tuple[int, ...]  # samples of a full step, by shard
    last: tuple[int, ...]  # samples of the last step of an epoch, by shard
    rows: int  # samples of the training split
    shuffle: str
    block_rows: int  # samples of a block, for shuffle "blocks"
    window_blocks: int  # blocks whose samples are shuffled among themselves
    epochs: int
    steps_per_epoch: int
    optimizer: str
    learning_rate: float  # after the warm-up
    warmup_steps: int
    warmup_from: float  # fraction of the learning rate in the first step
    label_smoothing: float
    noise: str
    noise_level: float
    patience: int  # validations without a smaller loss before training stops; 0 = never
    batch_norm: str
    precision: str
    channels_last: bool
    device: str
    threads: int
    deterministic: bool
    comm_dtype: str
    evaluation_rows: int
    seed: int
    chunk_rows: int = 0  # samples of a chunk of the file; 0 = not chunked
    version: int = VERSION
    class_weights: tuple[float, ...] = ()  # in the loss; () = all alike
    balanced_sampling: bool = False  # classes are drawn equally often
    scaling: tuple[tuple[float, ...], ...] = ()  # mean and std by channel; () = images in [0, 1]

    @cached_property
    def partition(self) -> Partition:
        return Partition(self.rows, self.shares, self.last)

    @property
    def steps(self) -> int:
        """Steps of the whole run."""
        return self.epochs * self.steps_per_epoch

    def digest(self) -> str:
        """Return a hash of all fields."""
        fields = json.dumps(dataclasses.asdict(self), sort_keys=True)
        return hashlib.sha256(fields.encode()).hexdigest()[:16]

    def to_json(self) -> str:
        return json.dumps({**dataclasses.asdict(self), "digest": self.digest()}, sort_keys=True)


def model_name(config: Config, image_shape: tuple[int, int, int]) -> str:
    """Resolve --model auto: the autoencoder to denoise, digits for 28x28x1, else ResNet-50."""
    if config.model != "auto":
        return config.model
    if config.task == "denoise":
        return "autoencoder"
    return "digits" if image_shape == (28, 28, 1) else "resnet50"


def resolve(config: Config, facts: Facts) -> Plan:
    """Resolve the plan of a first launch. Raises UsageError if the numbers are inconsistent."""
    model = model_name(config, facts.image_shape)
    shards = shard_count(config, facts.ranks)
    partition = cut_epoch(facts.rows, _batch_size(config, facts, shards), shards, facts.min_samples)
    row_bytes = facts.buffered_bytes or math.prod(facts.image_shape) * facts.value_bytes
    block_rows = facts.block_rows or -(-READ_BYTES // row_bytes)
    buffer = byte_count(config.read_buffer, "--read-buffer")  # holds two windows of every shard
    denoise = config.task == "denoise"
    no_tf32 = config.precision == "default" and facts.device == "cpu"
    optimizer, rate = optimizer_and_rate(config.optimizer, config.lr, config.task)
    growth = rate_growth(config, partition.batch_size)
    usual = 5.0 * (growth > 1 and config.schedule != "one-cycle")  # which has a warm-up itself
    warm = usual if config.warmup_epochs is None else config.warmup_epochs
    epochs = config.epochs or (5 if denoise else 20 if model == "digits" else 100)
    if warm > epochs:
        raise UsageError(
            f"the warm-up of {warm:g} epochs is longer than the run of {counted(epochs, 'epoch')}:"
            " give a smaller --warmup-epochs or a larger --epochs"
        )
    return Plan(
        task=config.task,
        model=model,
        image_shape=facts.image_shape,
        classes=facts.classes,
        pack_uuid=facts.pack_uuid,
        shards=shards,
        batch_size=partition.batch_size,
        shares=partition.shares,
        last=partition.last,
        rows=facts.rows,
        shuffle=config.shuffle or ("blocks" if facts.chunk_rows else "partition"),
        block_rows=block_rows,
        window_blocks=max(1, buffer // (2 * shards * block_rows * row_bytes)),
        epochs=epochs,
        steps_per_epoch=partition.steps,
        optimizer=optimizer,
        learning_rate=rate * growth,
        warmup_steps=round(warm * partition.steps),
        warmup_from=1 / growth if growth > 1 else 0.1,
        label_smoothing=config.label_smoothing,
        noise=config.noise,
        noise_level=config.noise_level,
        patience=(5 if denoise else 0) if config.patience is None else config.patience,
        batch_norm=config.batch_norm,
        precision="fp32" if no_tf32 else config.precision,
        channels_last=config.channels_last,
        device=facts.device,
        threads=cpu_threads(config, facts.threads),
        deterministic=config.deterministic,
        comm_dtype=config.comm_dtype,
        evaluation_rows=evaluation_rows(facts.device, facts.image_shape),
        seed=config.seed,
        chunk_rows=facts.chunk_rows,
        class_weights=facts.class_weights,
        balanced_sampling=config.balanced_sampling,
        scaling=facts.scaling,
    )


def shard_count(config: Config, ranks: int) -> int:
    """Return the number of shards on `ranks` ranks: --shards, or its default."""
    loads = worker_loads(config.worker_load)
    return config.shards or (round(sum(loads)) if loads else ranks)


def cpu_threads(config: Config, allowed: int, earlier: Plan | None = None) -> int:
    """Return the CPU threads per rank: --threads, else 1 if deterministic, else `allowed`. Bits of
    a deterministic run depend on them, so it keeps those of an `earlier` launch.
    """
    if earlier is not None and earlier.deterministic:
        return earlier.threads
    return config.threads or (1 if config.deterministic else allowed)


def usual_batch(config: Config) -> int:
    """Return the default batch size of a single worker."""
    return 500 if config.task == "denoise" else 128


def rate_growth(config: Config, batch_size: int) -> float:
    """Return the factor by which the learning rate is scaled with the global batch size.

    It is linear (Goyal et al. 2017, arXiv:1706.02677) or the square root (Krizhevsky 2014,
    arXiv:1404.5997; usual for adam).
    """
    times = batch_size / (config.batch_per_rank or usual_batch(config))
    return {"none": 1.0, "linear": times, "sqrt": math.sqrt(times)}[config.scale_lr]


def _batch_size(config: Config, facts: Facts, shards: int) -> int:
    if config.batch_size is not None and config.batch_per_rank is not None:
        raise UsageError(
            f"--batch-size {config.batch_size} and --batch-per-rank {config.batch_per_rank}"
            " exclude each other: give one"
        )
    workers = shards if config.shards else facts.ranks
    if config.batch_per_rank is not None:
        return config.batch_per_rank * workers
    if config.batch_size is not None:
        return config.batch_size
    return usual_batch(config) * (workers if facts.device == "cuda" else 1)


def read_config(text: bytes) -> Config:
    """Return the settings of a run from the text of its config.toml.

    Raises ValueError that names the field if one is unknown or of another type.
    """
    return from_fields(Config, parse_toml(text))


def read_plan(fields: Any) -> Plan:
    """Return the plan with the fields that `Plan.to_json` wrote.

    Raises ValueError that names the field if one is missing, unknown or of another type, and
    ValueError if the digest is not that of the fields.
    """
    digest = fields.pop("digest", None) if isinstance(fields, dict) else None
    plan = from_fields(Plan, fields)
    if digest != plan.digest():
        raise ValueError(f"its digest is {plan.digest()}, and not {str(digest)[:16]} as it says")
    return plan


def go_on(plan: Plan, config: Config, facts: Facts) -> Plan:
    """Adapt the plan of a run's first launch to the threads and the larger --epochs of this one.

    Raises UsageError, with the difference, if the data, the device, the model or the version of
    the plan has changed.
    """
    if plan.version != VERSION:
        raise UsageError(
            f"the run was begun by an hpctrain that reads the rows in another order (its plan has"
            f" version {plan.version}, this hpctrain's {VERSION}): finish it with the one that"
            " began it, or begin a new run with another --run"
        )
    for what, old, new in (
        ("pack", plan.pack_uuid, facts.pack_uuid),
        ("device", plan.device, facts.device),
        ("training images", plan.rows, facts.rows),
        ("image shape", plan.image_shape, facts.image_shape),
        ("model", plan.model, model_name(config, facts.image_shape)),
        ("class weights", plan.class_weights, facts.class_weights),
    ):
        check_unchanged(what, old, new)
    epochs = max(plan.epochs, config.epochs or 0)
    return dataclasses.replace(
        plan,
        threads=cpu_threads(config, facts.threads, plan),
        epochs=epochs,
    )


def check_unchanged(what: str, old: object, new: object) -> None:
    """Raise UsageError if what a run was begun with is another one now."""
    if old != new:
        raise UsageError(
            f"the run was begun with {what} {brief(old)}, not {brief(new)}: it cannot go on"
        )


MOST_SHARES = 16  # listed one by one


def describe_plan(plan: Plan, runs: Sequence[range]) -> list[str]:
    """Return the plan as text, one line per decision, with the shards of each rank, `runs`."""
    height, width, channels = plan.image_shape
    last = sum(plan.last)
    warmup = f" after {plan.warmup_steps:,} steps" if plan.warmup_steps else ""
    lines = [
        ("task", f"{plan.task}, {width}x{height}x{channels}, {plan.classes} classes"),
        ("model", plan.model),
        *(("input", _listed(values)) for values in plan.scaling),  # mean, std
        ("data", f"{plan.rows:,} training images, pack {plan.pack_uuid}"),
        ("ranks", f"{len(runs)} on {plan.device}, {plan.threads} CPU threads each"),
        ("shards", _shards(plan, runs)),
        ("order", _order(plan)),
        ("mini-batch", _batch(plan, runs)),
        (
            "steps",
            f"{counted(plan.epochs, 'epoch')} x {plan.steps_per_epoch} = {plan.steps:,};"
            f" last step of an epoch {last} images",
        ),
        ("optimizer", f"{plan.optimizer}, learning rate {plan.learning_rate:g}{warmup}"),
        *([("class weights", _listed(plan.class_weights))] if plan.class_weights else []),
        ("batch norm", plan.batch_norm),
        ("precision", _precision(plan)),
        ("seed", str(plan.seed)),
        ("sums", _sums(plan)),
        ("plan", plan.digest()),
    ]
    return [f"{name:<14} {text}" for name, text in lines]


def describe_shares(plan: Plan, runs: Sequence[range]) -> str:
    """Return the images of a full global batch per rank; only their range for many ranks."""
    shares = tuple(sum(plan.shares[run.start : run.stop]) for run in runs)
    if len(shares) > MOST_SHARES:
        return f"{min_to_max(shares)} a rank"
    return f"{', '.join(map(str, shares))} by rank"


def _shards(plan: Plan, runs: Sequence[range]) -> str:
    counts = min_to_max(map(len, runs))
    sizes = min_to_max(plan.partition.sizes)
    return f"{plan.shards}, partitions of {sizes} images, {counts} on a rank"


def _batch(plan: Plan, runs: Sequence[range]) -> str:
    shares = min_to_max(plan.shares)
    return f"{plan.batch_size}, shares of {shares} images; {describe_shares(plan, runs)}"


def _order(plan: Plan) -> str:
    chunks = f"; the file has chunks of {plan.chunk_rows:,} images" if plan.chunk_rows else ""
    if plan.shuffle != "blocks":
        alike = ", classes drawn equally often" if plan.balanced_sampling else ""
        return plan.shuffle + alike + chunks
    return f"blocks of {plan.block_rows:,} images, shuffled by {plan.window_blocks:,}{chunks}"


def _precision(plan: Plan) -> str:
    precision = plan.precision.replace("default", "default (TF32 in convolutions)")
    return f"{precision}, {'NHWC' if plan.channels_last else 'NCHW'}"


def _sums(plan: Plan) -> str:
    if plan.deterministic:
        return "tree order, deterministic"
    return "Allreduce" if plan.comm_dtype == "fp32" else f"gradients in {plan.comm_dtype}"


def _listed(values: tuple[float, ...]) -> str:
    shown = values if len(values) <= MOST_SHARES else (min(values), max(values))
    return (", " if shown is values else " to ").join(f"{value:.4g}" for value in shown)
