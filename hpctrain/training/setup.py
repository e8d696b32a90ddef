"""Everything that a run needs before its first step, in the order in which it is found out:
pack, device, network, plan, then the message and what surrounds it.
"""

from __future__ import annotations

import dataclasses
import hashlib
import importlib.util
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import nn

from hpctrain import __version__
from hpctrain.config import Config, byte_count, check_ranges, validate_optimizer
from hpctrain.data.augment import check_shift, normalization
from hpctrain.data.builtin import locate
from hpctrain.data.foreign import read_foreign
from hpctrain.data.jpeg import decoder_versions
from hpctrain.data.loader import Loader, Prepare, make_prepare, read_rows
from hpctrain.data.opened import open_split
from hpctrain.data.orders import Order, make_order
from hpctrain.data.packed import Pack, read_pack, verify
from hpctrain.data.source import Source, as_kept, held_bytes
from hpctrain.errors import UsageError
from hpctrain.keys import random_key
from hpctrain.models import build, check_forward, load_init
from hpctrain.parallel.batchnorm import BatchNorms, Probe
from hpctrain.parallel.determinism import hardware_key, refusal
from hpctrain.parallel.device import choose_device, keep_memory, place, set_threads
from hpctrain.parallel.message import Message
from hpctrain.parallel.mpi import (
    Comm,
    everywhere,
    fair_threads,
    from_root,
    local_ranks,
    same_everywhere,
)
from hpctrain.parallel.reduce import Reduce, broadcast, choose_reduce
from hpctrain.plan import Facts, Plan, cpu_threads, go_on, model_name, resolve
from hpctrain.training.optim import make_optimizer
from hpctrain.training.saved import find_model, require_split
from hpctrain.training.step import Trainer
from hpctrain.training.tasks import Task, make_task, output_shape

VERIFIED_BYTES = 1 << 30  # packs up to this size are verified at start, about 1 s per GB
PROBE_ROWS = 32  # of the training split, for the first shift of the batch-norm moments


@dataclass(frozen=True)
class Job:
    """One run, ready for its first step."""

    config: Config
    plan: Plan
    pack: Pack
    task: Task
    trainer: Trainer
    loader: Loader
    prepare: Prepare  # without augmentation, for evaluation
    kept_fresh: tuple[str, ...]  # parameters that --init did not fill


def set_up(
    config: Config, comm: Comm, earlier: Plan | None = None, first_weights: bool = True
) -> Job:
    """Build a job from a configuration that passed `check_settings`, and from the plan of its first
    launch where that was an `earlier` one; without `first_weights` a checkpoint will give them, not
    --init. Raises the same error on all ranks. Collective.
    """
    config = comm.bcast(config)
    pack = open_pack(config, "train", comm)
    everywhere(comm, lambda: check_data(config, pack))
    local_rank, _ = local_ranks(comm)
    device = everywhere(comm, lambda: choose_device(config.device, local_rank))
    threads = fair_threads(comm)
    set_threads(cpu_threads(config, threads, earlier))
    keep_memory()

    model, fresh = everywhere(comm, lambda: make_model(config, pack, first_weights))
    dtype = next(model.parameters()).dtype
    place(model, device, config.channels_last)
    norms = everywhere(comm, lambda: BatchNorms(model, config.batch_norm))
    task = make_task(dataclasses.asdict(config), len(pack.classes))
    source = everywhere(comm, lambda: open_split(pack, "train"))
    if pack.encoded:
        same_everywhere(comm, {"what decodes JPEG files": decoder_versions()})
    scaling = everywhere(comm, lambda: normalization(config.normalize, pack.mean, pack.std))
    prepare = make_prepare(device, dtype, config.channels_last, scaling)
    probe = from_root(comm, lambda: probe_model(norms, task, source, prepare, config))

    facts = Facts(
        ranks=comm.size,
        device=device.type,
        threads=threads,
        rows=len(source.labels),
        image_shape=pack.image_shape,
        value_bytes=source.dtype.itemsize,
        held_bytes=held_bytes(as_kept(source, config.random_crop)),
        classes=len(pack.classes),
        pack_uuid=pack.uuid,
        least_rows=probe.least_rows,
        run_rows=pack.foreign.run_rows if pack.foreign else 0,
        chunk_rows=pack.foreign.chunk_rows if pack.foreign else 0,
    )
    plan = from_root(
        comm, lambda: go_on(earlier, config, facts) if earlier else resolve(config, facts)
    )
    norms.start(probe)
    trainer = make_trainer(model, norms, task, config, plan, comm)
    loader = Loader(
        source,
        plan.partition,
        range(*plan.runs[comm.rank]),
        plan.seed,
        make_prepare(device, dtype, config.channels_last, scaling, config.flip, config.shift),
        task.pair,
        order_of(plan),
        byte_count(config.read_buffer, "--read-buffer"),
        config.random_crop,
    )
    return Job(config, plan, pack, task, trainer, loader, prepare, fresh)


def order_of(plan: Plan) -> Order:
    """In which order the shards read the training rows."""
    runs = plan.block_rows, plan.window_blocks, plan.scattered
    return make_order(plan.shuffle, plan.partition, plan.seed, *runs)


def check_settings(config: Config) -> None:
    """Refuse what is wrong whatever the data, before anything is read or made."""
    check_ranges(config)
    validate_optimizer(config)
    if config.tensorboard and importlib.util.find_spec("tensorboard") is None:
        raise UsageError("--tensorboard needs its package: pip install 'hpctrain[tensorboard]'")


def check_data(config: Config, pack: Pack) -> None:
    """Refuse settings that do not fit the pack."""
    check_shift(config.shift, pack.image_shape)
    if config.random_crop and not pack.encoded:
        raise UsageError(
            f"--random-crop cuts JPEG files as they are decoded, but {pack.path} holds pixels: pack"
            " with --encoding jpeg"
        )
    needs = {
        "--output best": config.output == "best",
        "--patience": config.patience,
        "--validate-steps": config.validate_steps,
    }
    for flag, given in needs.items():
        if given and "validation" not in pack.splits:
            raise UsageError(
                f"{flag} needs a split validation, and {pack.path} has none:"
                f" {'train' if pack.foreign else 'pack'} with --split 0.8,0.1,0.1"
            )


def open_pack(config: Config, split: str, comm: Comm) -> Pack:
    """The pack, found (or made) and validated by rank 0, seen by all ranks; or the file that
    --images is about. Collective.
    """

    def find() -> Pack:
        path = locate(config.data, config.data_dir)
        if config.images is not None and config.labels is not None:
            names = config.images, config.labels, config.layout
            runs = None if config.shuffle == "blocks" else 0
            return read_foreign(path, *names, config.split, config.seed, runs)
        pack = read_pack(path)
        require_split(pack, split)
        damage = verify(pack) if pack.file_size <= VERIFIED_BYTES else []
        if damage:
            raise UsageError(f"{pack.path} is damaged: {damage[0]} ({len(damage)} damaged blocks)")
        return pack

    return from_root(comm, find)


def make_model(
    config: Config, pack: Pack, first_weights: bool = True
) -> tuple[nn.Module, tuple[str, ...]]:
    """The network with its first weights, equal on all ranks, and the names --init left fresh."""
    torch.manual_seed(random_key(config.seed, "weights"))
    classes = len(pack.classes)
    name = model_name(config, pack.image_shape)
    model = build(name, pack.image_shape, classes, config.small_stem)
    check_forward(model, pack.image_shape, output_shape(config.task, pack.image_shape, classes))
    fresh: list[str] = []
    if config.init and first_weights:
        fresh = load_init(model, find_model(config.init, config.runs_dir), classes)
    model.train()
    return model, tuple(fresh)


def probe_model(
    norms: BatchNorms, task: Task, source: Source, prepare: Prepare, config: Config
) -> Probe:
    """Look at one training forward of the first rows. Refuses buffers that cannot be combined and,
    under --deterministic, operations that have no deterministic form.
    """
    rows = np.arange(min(PROBE_ROWS, len(source.labels)))
    images = read_rows(source, rows, prepare)
    labels = torch.from_numpy(source.labels[rows]).to(images.device)
    key = random_key(config.seed, "probe")
    inputs, targets = task.pair(images, labels, key)
    torch.manual_seed(key)
    try:
        probe = norms.probe(lambda: task(norms.model, inputs, targets), len(rows))
        if config.deterministic:
            check_backward(norms, task, inputs, targets)
    except RuntimeError as error:
        if text := refusal(error):
            raise UsageError(text) from error
        raise
    if probe.changed and not config.local_buffers:
        raise UsageError(
            f"the model's buffers {', '.join(probe.changed[:3])} change in training and cannot be"
            " combined over ranks; --local-buffers lets each rank keep its own"
        )
    return probe


def check_backward(
    norms: BatchNorms, task: Task, inputs: torch.Tensor, targets: torch.Tensor
) -> None:
    """One backward pass that leaves no trace: it meets what torch refuses before training does."""
    parameters = [p for p in norms.model.parameters() if p.requires_grad]
    buffers = {name: buffer.clone() for name, buffer in norms.model.named_buffers()}
    try:
        loss, _ = task(norms.model, inputs, targets)
        torch.autograd.grad(loss, parameters, allow_unused=True)
    finally:
        for name, buffer in norms.model.named_buffers():
            buffer.copy_(buffers[name])


def make_trainer(
    model: nn.Module,
    norms: BatchNorms,
    task: Task,
    config: Config,
    plan: Plan,
    comm: Comm,
) -> Trainer:
    """Lay out the message, make all ranks hold rank 0's weights, compare layouts. Collective."""
    message = everywhere(comm, lambda: Message(model, norms.channels, comm.rank, comm.size))
    same_everywhere(
        comm,
        {
            "hpctrain": __version__,
            "torch": torch.__version__,
            "the layout of the parameters": message.layout.digest(),
            "the model's fixed state": _fixed_state(model),
        },
    )
    if plan.deterministic:
        same_everywhere(comm, {"the kind of hardware": hardware_key(message.device)})
    broadcast(comm, message.weights)
    runs = [range(*run) for run in plan.runs]
    norms.first_shard = runs[comm.rank].start
    return Trainer(
        model,
        message,
        norms,
        make_optimizer(plan.optimizer, plan.learning_rate, config, [message.weights]),
        reduce_for(plan, message, runs, comm),
        task,
        config.clip_norm,
    )


def reduce_for(plan: Plan, message: Message, runs: Sequence[range], comm: Comm) -> Reduce:
    """The reduction where ranks carry these shards."""
    return choose_reduce(comm, message, runs if plan.deterministic else None, plan.wire)


def carry(job: Job, runs: Sequence[range], comm: Comm) -> None:
    """Let every rank carry these shards from the next epoch on."""
    own = runs[comm.rank]
    job.loader.carry(own)
    job.trainer.norms.first_shard = own.start
    job.trainer.reduce = reduce_for(job.plan, job.trainer.message, runs, comm)


def _fixed_state(model: nn.Module) -> str:
    """Hash of what is neither trained nor broadcast: buffers and frozen parameters."""
    digest = hashlib.sha256()
    frozen = [p.detach() for p in model.parameters() if not p.requires_grad]
    for tensor in (*model.buffers(), *frozen):
        digest.update(tensor.cpu().flatten().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()[:16]
