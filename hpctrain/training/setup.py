"""Setup of a run before its first step.

The order is: pack, device, network, plan, then the message and the objects that work on it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from hpctrain import __version__
from hpctrain.config import Config, byte_count, segments
from hpctrain.data.augment import Augmentation, normalization
from hpctrain.data.cache import sample_bytes
from hpctrain.data.imbalance import find_class_weights
from hpctrain.data.jpeg import decoder_versions
from hpctrain.data.loader import Loader, Prepare, make_prepare
from hpctrain.data.pack_format import Pack
from hpctrain.data.partition import random_key
from hpctrain.data.split import Split
from hpctrain.inference.network import find_model
from hpctrain.inference.tasks import Task, make_task, output_shape
from hpctrain.models import (
    InitialWeights,
    build,
    check_forward,
    checkpoint_activations,
    load_init,
)
from hpctrain.parallel.batchnorm import BatchNorms
from hpctrain.parallel.choose import choose_reduce, open_device, open_transport
from hpctrain.parallel.device import hardware_key, place
from hpctrain.parallel.message import Message
from hpctrain.parallel.mpi import (
    Comm,
    call_on_all,
    call_on_root,
    check_equal_on_all,
    check_threads,
)
from hpctrain.parallel.placement import Choice
from hpctrain.parallel.reduce import Reduce, broadcast
from hpctrain.parallel.transport import Transport
from hpctrain.plan import Facts, Plan, cpu_threads, model_name, resolve
from hpctrain.plan_check import go_on
from hpctrain.streams import IN_FLIGHT
from hpctrain.training.compute import make_backward, make_optimizer
from hpctrain.training.reading import (
    Reading,
    check_data,
    make_checks,
    open_pack,
    order_of,
    staged,
)
from hpctrain.training.replay import probe_model
from hpctrain.training.step import Trainer, hash_tensors
from hpctrain.watchdog import doing


@dataclass(frozen=True)
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


def set_up(
    config: Config,
    comm: Comm,
    earlier: Plan | None = None,
    first_weights: bool = True,
) -> Job:
    """Build a job from a configuration that passed `check_settings`. Collective.

    `earlier` is the plan of the run's first launch, if this launch resumes it. Without
    `first_weights`, --init is ignored because a checkpoint provides the weights. Raises the same
    error on all ranks.
    """
    pack = open_pack(config, "train", comm)
    doing("setting up")  # replaces the last block of the pack that rank 0 compared
    call_on_all(comm, lambda: check_data(config, pack))
    device, threads = open_device(
        comm, config.device, lambda share: cpu_threads(config, share, earlier)
    )
    if config.overlap == "auto" and comm.size > 1:
        call_on_all(comm, lambda: check_threads("--overlap"))

    model, init = call_on_all(comm, lambda: make_model(config, pack, first_weights))
    dtype = next(model.parameters()).dtype
    place(model, device, config.channels_last)
    norms = call_on_all(comm, lambda: BatchNorms(model, config.batch_norm))
    checks = make_checks(config, pack, comm)
    source = call_on_all(comm, lambda: Split(pack, "train", checks=checks))
    settings = call_on_root(comm, lambda: task_settings(config, earlier, source))
    task = make_task(settings, len(pack.classes), next(model.parameters()))
    if pack.encoded:
        check_equal_on_all(comm, {"what decodes JPEG files": decoder_versions()})
    scaling = call_on_all(comm, lambda: normalization(config.normalize, pack.mean, pack.std))
    prepare = make_prepare(device, dtype, config.channels_last, scaling)
    probe = call_on_root(comm, lambda: probe_model(norms, task, source, prepare, config))

    held = sample_bytes(source, config.random_crop > 0)
    facts = facts_of(pack, held, (comm.size, device.type, threads), probe.min_samples)
    facts = dataclasses.replace(facts, class_weights=settings["class_weights"])
    plan = call_on_root(
        comm, lambda: go_on(earlier, config, facts) if earlier else resolve(config, facts)
    )
    norms.start(probe)
    transport, choice, sharing = open_transport(comm, device, config.reduce)
    trainer = make_trainer(model, norms, task, config, plan, transport)
    shards = range(*plan.runs[comm.rank])
    reading = Reading(pack, checks, source, order_of(plan))
    if config.stage and not config.dry_run:
        moving = config.worker_load == "auto"  # any shard may move to any host
        reading = staged(config.stage, reading, range(plan.shards) if moving else shards, comm)
    augmented = make_prepare(device, dtype, config.channels_last, scaling, Augmentation.of(config))
    loader = Loader(
        *(reading.source, plan.partition, shards, plan.seed, augmented, task.pair, reading.order),
        read_buffer=byte_count(config.read_buffer, "--read-buffer"),
        random_crop=config.random_crop,
        min_samples=probe.min_samples,
        device=device,
        epochs=plan.epochs,
    )
    notes = tuple(filter(None, (sharing, init.describe() if init else None)))
    return Job(config, plan, pack, reading, choice, task, trainer, loader, prepare, init, notes)


def facts_of(pack: Pack, held: int, machine: tuple[int, str, int], min_samples: int) -> Facts:
    """Return the facts that the plan depends on besides the settings.

    `held`: host memory of a buffered sample, in bytes; `machine`: number of ranks, type of device,
    threads per rank.
    """
    external = pack.external
    return Facts(
        *machine,
        rows=pack.splits["train"].samples,
        image_shape=pack.image_shape,
        value_bytes=pack.dtype.itemsize,
        buffered_bytes=held,
        classes=len(pack.classes),
        pack_uuid=pack.uuid,
        min_samples=min_samples,
        run_rows=external.block_rows if external else 0,
        chunk_rows=external.chunk_rows if external else 0,
    )


def task_settings(config: Config, earlier: Plan | None, source: Split) -> dict[str, Any]:
    """Return the settings for `make_task`: those of `config`, with a number for each class weight.

    An `earlier` launch has resolved the precision. Raises UsageError.
    """
    weights: tuple[float, ...] = ()
    if config.class_weights is not None:
        weights = find_class_weights(config.class_weights, source.pack.classes, source.labels)
    precision = earlier.precision if earlier else config.precision
    return {**dataclasses.asdict(config), "precision": precision, "class_weights": weights}


def make_model(
    config: Config, pack: Pack, first_weights: bool = True
) -> tuple[nn.Module, InitialWeights | None]:
    """Make the network with equal initial weights on all ranks; also return those of --init."""
    torch.manual_seed(random_key(config.seed, "weights"))
    classes = len(pack.classes)
    name = model_name(config, pack.image_shape)
    model = build(name, pack.image_shape, classes, config.small_stem)
    if config.checkpoint_activations:
        checkpoint_activations(model, name)
    check_forward(model, pack.image_shape, output_shape(config.task, pack.image_shape, classes))
    init = None
    if config.init and first_weights:
        path = find_model(config.init, config.runs_dir)
        init = load_init(model, path, classes, pack.image_shape[2])
    model.train()
    return model, init


def make_trainer(
    model: nn.Module,
    norms: BatchNorms,
    task: Task,
    config: Config,
    plan: Plan,
    transport: Transport,
) -> Trainer:
    """Lay out the message, compare layouts, and broadcast rank 0's weights. Collective."""
    comm = transport.comm
    message = call_on_all(comm, lambda: Message(model, norms.channels, comm.rank, comm.size))
    fixed = [*model.buffers(), *(p for p in model.parameters() if not p.requires_grad)]
    check_equal_on_all(
        comm,
        {
            "hpctrain": __version__,
            "torch": torch.__version__,
            "the layout of the parameters": message.layout.digest(),
            "the model's fixed state": hash_tensors(fixed).hexdigest()[:16],
        },
    )
    if plan.deterministic:
        check_equal_on_all(comm, {"the kind of hardware": hardware_key(message.device)})
    backward = call_on_all(
        comm, lambda: make_backward(model, task, message, config.compile, config.graphs)
    )
    broadcast(comm, message.weights)
    runs, overlap = [range(*run) for run in plan.runs], segments(config.overlap) or 0
    norms.first_shard = runs[comm.rank].start
    return Trainer(
        model,
        message,
        norms,
        make_optimizer(plan.optimizer, plan.learning_rate, config, [message.weights]),
        call_on_all(comm, lambda: reduce_for(plan, overlap, message, runs, transport)),
        backward,
        config.clip_norm,
        config.skip_bad,
        config.local_buffers,
        overlap,
        IN_FLIGHT[message.device.type],
        task.weights,
    )


def reduce_for(
    plan: Plan, overlap: int, message: Message, runs: Sequence[range], transport: Transport
) -> Reduce:
    """Make the reduction for ranks that carry the shards `runs`."""
    in_order = runs if plan.deterministic else None
    return choose_reduce(transport.comm, message, in_order, plan.comm_dtype, transport, overlap)


def reassign_shards(job: Job, runs: Sequence[range], comm: Comm) -> None:
    """Assign the shards `runs` to the ranks from the next epoch on."""
    own = runs[comm.rank]
    job.loader.assign_shards(own)
    job.trainer.norms.first_shard = own.start
    renew_reduction(job, runs, job.trainer.segments)


def renew_reduction(job: Job, runs: Sequence[range], overlap: int) -> None:
    """Replace the reduction from the next step on, for ranks that carry the shards `runs`.

    `overlap` is the number of segments, 0 = one sum. Raises UsageError if MPI does not allow it.
    """
    trainer, transport = job.trainer, job.trainer.reduce.transport
    trainer.reduce.close()
    trainer.reduce = reduce_for(job.plan, overlap, trainer.message, runs, transport)
    trainer.segments = overlap
