"""Setup of a run before its first step.

The order is: pack, device, network, plan, then the message and the objects that work on it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import nn

from hpctrain.config import Config, byte_count
from hpctrain.config.option import class_weights
from hpctrain.data.augment import Augmentation
from hpctrain.data.loader import Loader, Prepare, ReadOptions, make_prepare, read_samples
from hpctrain.data.pack import Pack
from hpctrain.data.partition import random_key
from hpctrain.data.split import Split
from hpctrain.errors import UsageError
from hpctrain.inference.network import find_model
from hpctrain.inference.own import import_functions, import_own, with_augment
from hpctrain.inference.own_check import check_augment
from hpctrain.inference.tasks import Task, make_task, output_shape
from hpctrain.models import InitialWeights, build, check_forward, load_init
from hpctrain.parallel.batchnorm import BatchNorms
from hpctrain.parallel.choose import open_device, open_transport
from hpctrain.parallel.device import place
from hpctrain.parallel.hosts import local_ranks
from hpctrain.parallel.mpi import (
    Comm,
    call_on_all,
    call_on_root,
    check_equal_on_all,
)
from hpctrain.parallel.placement import Choice
from hpctrain.plan import Facts, Plan, cpu_threads, go_on, model_name, resolve
from hpctrain.text import brief, listed
from hpctrain.training.finetune import describe_frozen, freeze
from hpctrain.training.probe import probe_model
from hpctrain.training.reading import (
    FIRST_ROWS,
    Reading,
    check_data,
    check_memory,
    make_reading,
    open_pack,
)
from hpctrain.training.scaling import Scaling, choose_scaling
from hpctrain.training.trainer import Trainer
from hpctrain.watchdog import doing


@dataclass
class Job:
    """One run, ready for its first step."""

    config: Config
    plan: Plan
    pack: Pack
    reading: Reading
    transport: Choice
    task: Task
    trainer: Trainer
    loader: Loader
    prepare: Prepare  # without augmentation, for evaluation
    init: InitialWeights | None  # what this launch took from --init
    notes: tuple[str, ...]  # on these choices, for the user

    def close(self) -> None:
        """Release the hooks and the threads, and close all splits, after the last step."""
        self.trainer.close()
        self.loader.close()
        self.reading.close()


def set_up(config: Config, comm: Comm, earlier: Plan | None = None, saved: bool = False) -> Job:
    """Build a job from a configuration that passed `check_settings`. Collective.

    `earlier` is the plan of the run's first launch, if this launch resumes it, and `saved` whether
    it left a checkpoint, which then provides the weights instead of --init. Raises the same error
    on all ranks.
    """
    pack = open_pack(config, "train", comm)
    call_on_all(comm, lambda: check_data(config, pack))
    device, threads = open_device(
        comm, config.device, lambda share: cpu_threads(config, share, earlier)
    )

    model, init = call_on_all(comm, lambda: make_model(config, pack, not saved))
    dtype = next(model.parameters()).dtype
    place(model, device, config.channels_last)
    frozen = call_on_all(comm, lambda: freeze(model, config.freeze))
    source = call_on_all(comm, lambda: Split(pack, "train", verify=config.verify))
    task, weights = task_of(config, earlier, source, next(model.parameters()), comm)
    if pack.fit:
        from hpctrain.data.images import decoder_versions  # imports Pillow

        check_equal_on_all(comm, {"what decodes JPEG files": decoder_versions()})
    scaling, why = call_on_all(comm, lambda: choose_scaling(config, earlier, pack, model, init))
    prepare = make_prepare(device, dtype, config.channels_last, scaling)
    norms = call_on_all(comm, lambda: BatchNorms(model, config.batch_norm))
    probe = call_on_root(comm, lambda: probe_model(norms, task, source, prepare, config))

    held = source.stored_bytes if config.random_crop else pack.image_bytes
    machine = comm.size, device.type, threads
    facts = facts_of(pack, held, machine, probe.min_samples, weights, scaling)
    plan = call_on_root(
        comm, lambda: go_on(earlier, config, facts) if earlier else resolve(config, facts)
    )
    norms.start(probe)
    transport, choice, sharing = open_transport(comm, device, config.reduce)
    runs = [range(*run) for run in plan.runs]
    trainer = Trainer(norms, task, config, plan, transport, runs)
    shards = runs[comm.rank]
    memory = pack.splits["train"], config.verify, local_ranks(comm)[1]
    kept = call_on_all(comm, lambda: check_memory(plan, *memory))
    reading = make_reading(config, plan, source, shards, comm)
    doing("setting up")  # replaces the last piece that was staged
    augmented = make_prepare(device, dtype, config.channels_last, scaling, Augmentation.of(config))
    augmented = with_own_augment(config.augment, augmented, reading.source, comm)
    loader = make_loader(config, plan, reading, shards, task, augmented, device)
    texts = sharing, init, why, describe_frozen(frozen, trainer.message), kept
    made = pack, reading, choice, task, trainer, loader, prepare, init
    return Job(config, plan, *made, tuple(map(str, filter(None, texts))))


def make_loader(
    config: Config,
    plan: Plan,
    reading: Reading,
    shards: range,
    task: Task,
    augmented: Prepare,
    device: torch.device,
) -> Loader:
    """Make the loader of the training split for the `shards` of this rank."""
    buffer = byte_count(config.read_buffer, "--read-buffer")
    options = ReadOptions(buffer, config.random_crop, device)
    made = reading.source, reading.order, shards, augmented, task.pair, plan.epochs
    return Loader(*made, options)


def with_own_augment(name: str | None, prepare: Prepare, source: Split, comm: Comm) -> Prepare:
    """Return `prepare` followed by the function of --augment, if any. Collective.

    Raises UsageError if the function breaks a rule.
    """
    if name is None:
        return prepare
    own = call_on_all(comm, lambda: import_own(name, "--augment", "images", "generator"))
    rows, key = np.arange(min(FIRST_ROWS, len(source))), random_key("own functions")
    call_on_root(comm, lambda: check_augment(own, read_samples(source, rows, prepare), key))
    return with_augment(own, prepare)


def facts_of(
    pack: Pack,
    held: int,
    machine: tuple[int, str, int],
    min_samples: int,
    class_weights: tuple[float, ...],
    scaling: Scaling,
) -> Facts:
    """Return the facts that the plan depends on besides the settings.

    `held`: host memory of a buffered sample, in bytes; `machine`: number of ranks, type of device,
    threads per rank.
    """
    return Facts(
        *machine,
        rows=pack.splits["train"].samples,
        image_shape=pack.image_shape,
        value_bytes=pack.dtype.itemsize,
        buffered_bytes=held,
        classes=len(pack.classes),
        pack_uuid=pack.uuid,
        min_samples=min_samples,
        block_rows=pack.block_rows,
        chunk_rows=pack.splits["train"].images.chunk_rows,
        class_weights=class_weights,
        scaling=scaling,
    )


def task_of(
    config: Config, earlier: Plan | None, source: Split, like: torch.Tensor, comm: Comm
) -> tuple[Task, tuple[float, ...]]:
    """Make the task, for a network with the parameter `like`. Collective.

    Also returns the weights of the classes, () without --class-weights. An `earlier` launch has
    resolved the precision.
    """

    def find() -> tuple[float, ...]:
        given, classes = config.class_weights, source.pack.classes
        return () if given is None else find_class_weights(given, classes, source.count_classes)

    weights = call_on_root(comm, find)
    own = call_on_all(comm, lambda: import_functions(config.loss, config.metric))
    precision = earlier.precision if earlier else config.precision
    resolved = {"precision": precision, "class_weights": weights}
    settings = {**dataclasses.asdict(config), **resolved}
    return make_task(settings, len(source.pack.classes), like, own), weights


def find_class_weights(
    given: str, classes: Sequence[str], count_classes: Callable[[], np.ndarray]
) -> tuple[float, ...]:
    """Return the weight of each class that --class-weights asks for.

    `given` is "balanced", for n / (K n_c) as in scikit-learn, with n_c of n samples in class c of K
    (`count_classes` returns the n_c); or numbers in the order of `classes`. Raises UsageError.
    """
    setting = f"--class-weights {brief(given)}"
    if given == "balanced":
        counts = count_classes()
        if empty := [name for name, count in zip(classes, counts, strict=True) if not count]:
            raise UsageError(
                f"{setting}: no training image is of class {listed(empty, 3)}, so its weight would"
                " be infinite: give a number for each class"
            )
        return tuple((counts.sum() / (len(classes) * counts)).tolist())
    weights = class_weights(given)
    if len(weights) != len(classes):
        raise UsageError(
            f"{setting}: these are {len(weights)} weights, and the data has {len(classes)} classes:"
            f" {listed(classes)}"
        )
    return weights


def make_model(
    config: Config, pack: Pack, first_weights: bool = True
) -> tuple[nn.Module, InitialWeights | None]:
    """Make the network with equal initial weights on all ranks; also return those of --init."""
    torch.manual_seed(random_key(config.seed, "weights"))
    classes = len(pack.classes)
    name = model_name(config, pack.image_shape)
    model = build(name, pack.image_shape, classes, config.small_stem)
    check_forward(model, pack.image_shape, output_shape(config.task, pack.image_shape, classes))
    init = None
    if config.init and first_weights:
        path = find_model(config.init, config.runs_dir)
        init = load_init(model, path, classes, pack.image_shape[2])
    model.train()
    return model, init
