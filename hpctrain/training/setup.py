"""Set up a run before its first step, in three acts: its data, its network, its step.

Each act returns a small object, and states what all ranks do together.
"""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

import torch

from hpctrain.config import Config
from hpctrain.data.loader import Loader, ReadOptions
from hpctrain.data.pack import images_note
from hpctrain.data.partition import assign_shards
from hpctrain.data.split import Split
from hpctrain.parallel.batchnorm import Probe
from hpctrain.parallel.mpi import Comm, comm_of_host, on_all, on_root
from hpctrain.parallel.transport import open_transport
from hpctrain.plan import Facts, Plan, extend, resolve
from hpctrain.training.augmentation import check_augmentation
from hpctrain.training.data import (
    TrainingData,
    balance_note,
    check_memory,
    open_data,
    open_order,
)
from hpctrain.training.library_optimizer import LibraryUpdate, describe_arguments
from hpctrain.training.network import Network, check_best_by, check_metrics, make_network
from hpctrain.training.optimizer import FusedUpdate
from hpctrain.training.optimizer_check import check_optimizer
from hpctrain.training.probe import check_sizes, probe_model
from hpctrain.training.resume import PreviousLaunch
from hpctrain.training.state import Run
from hpctrain.training.step import Trainer


class Step(NamedTuple):
    """The parts that update the network: the plan of its batches, the trainer, and the loader."""

    facts: Facts
    plan: Plan
    shards: list[range]  # by rank
    trainer: Trainer
    train: Split  # with --stage, in a copy
    loader: Loader
    notes: list[str]


def set_up(config: Config, comm: Comm, earlier: PreviousLaunch | None = None) -> Run:
    """Set up a run from a configuration without conflicts. Collective.

    The plan of the `earlier` launch, if this one resumes a run, is kept, and its checkpoint, if
    any, provides the weights instead of --init. Nothing that is made here is replaced later. Calls
    that are passed `comm` are collective, and all ranks make them in this order. Raises the same
    error on all ranks.
    """
    begun = earlier.plan if earlier else None
    data = open_data(config, comm, earlier)
    network = make_network(config, comm, data, earlier)
    step = make_step(comm, data, network, begun)
    notes = (*data.notes, *network.notes, *step.notes)
    return Run(
        config=network.config,
        facts=step.facts,
        plan=step.plan,
        comm=comm,
        shards=step.shards,
        pack=data.pack,
        splits={"train": step.train},
        task=network.task,
        trainer=step.trainer,
        loader=step.loader,
        pipeline=network.pipeline.plain(),
        init=network.init,
        host=data.cores.scarcest,
        notes=[text for text in notes if text],
    )


def make_step(comm: Comm, data: TrainingData, network: Network, begun: Plan | None) -> Step:
    """Resolve the plan, and make the trainer and the loader. Collective.

    Rank 0 tests the network with the first samples and resolves the plan, or extends that of a run
    that was `begun`. All ranks lay out the message, open the transport, compare what they compute
    with, and get rank 0's weights.
    """
    config = network.config
    device = data.device
    plain = network.pipeline.plain()
    probe = on_root(comm, probe_model, network.norms, network.task, data.train, plain, config)
    facts = collect_facts(config, comm, data, network, probe)
    plan = on_root(comm, make_plan, facts, data, network, begun)
    ranks_on_host = comm_of_host(comm).size
    with on_all(comm):
        shards = assign_shards(plan.shards, comm.size, config.worker_load or ())
        memory = check_memory(config, plan, data.pack.splits["train"], ranks_on_host)

    network.norms.start(probe)
    if device.type == "cuda":
        torch.cuda.empty_cache()  # memory of the probe: NCCL and CuPy allocate beside torch
    transport = open_transport(comm, device, config.reduce)
    trainer = Trainer(
        network.norms, network.task, config, plan, transport, shards, network.optimizer
    )

    mine = shards[comm.rank]
    train, order = open_order(config, plan, data.train, mine, comm)
    balance = balance_note(order, mine, data.pack.classes, comm)
    check_augmentation(config, network.transforms, network.pipeline, train, comm)
    check_metrics(network, data.pack, comm)
    check_best_by(network, data.train, comm)
    described = on_root(comm, check_update, trainer.update, plan)
    options = ReadOptions(config.read_buffer, config.random_crop, device)
    loader = Loader(train, order, mine, network.pipeline, plan.epochs, options)
    return Step(
        facts=facts,
        plan=plan,
        shards=shards,
        trainer=trainer,
        train=train,
        loader=loader,
        notes=[transport.note, memory, balance, images_note(data.pack) or "", described],
    )


def check_update(update: FusedUpdate | LibraryUpdate, plan: Plan) -> str:
    """Test an optimizer that is not fused (rank 0), and return a note on its arguments, or ""."""
    if isinstance(update, FusedUpdate):
        return ""
    check_optimizer(update.make, update.parameters, plan.learning_rate)
    return f"{plan.optimizer}: {describe_arguments(update.optimizer)}"


def collect_facts(
    config: Config, comm: Comm, data: TrainingData, network: Network, probe: Probe
) -> Facts:
    """Return what the plan follows from, beside the settings."""
    pack = data.pack
    train = data.train
    return Facts(
        ranks=comm.size,
        device=data.device.type,
        threads=data.threads,
        rows=len(train),
        image_shape=pack.image_shape,
        row_bytes=train.stored_bytes if config.random_crop and pack.fit else pack.planned_bytes,
        targets=pack.targets.summary,
        pack_uuid=pack.uuid,
        min_samples=probe.min_samples,
        block_rows=pack.block_rows,
        chunk_rows=pack.splits["train"].images.chunk_rows,
        scaling=network.normalization,
        split_seed=pack.external["seed"] if pack.external else None,
        stored_range=network.stored_range,
        augment_range=network.augment_range,
        augmentation=network.augmentation,
        measured=network.measured,
    )


def make_plan(facts: Facts, data: TrainingData, network: Network, begun: Plan | None) -> Plan:
    """Return the plan, that of `begun` if it is resumed; test the network in its sizes (rank 0)."""
    config = network.config
    plan = extend(begun, config, facts) if begun else resolve(config, facts)
    if network.is_nchw:  # chosen here: the same command, without --no-channels-last, resumes
        chosen = tuple(name for name in plan.chosen if name != "channels_last")
        plan = dataclasses.replace(plan, chosen=chosen)
    evaluated = [info.samples for name, info in data.pack.splits.items() if name != "train"]
    plain = network.pipeline.plain()
    check_sizes(network.norms, network.task, data.train, plain, plan, evaluated)
    return plan
