"""Setup of a run before its first step.

The order is: data and device, network, plan, then the message and the objects that work on it.
"""

from __future__ import annotations

import dataclasses

import numpy as np
import torch
from torch import nn

from hpctrain.config import (
    Config,
    byte_count,
    checkpoint_interval,
    validation_interval,
    worker_loads,
)
from hpctrain.config.option import class_weights
from hpctrain.data.augment import Augmentation
from hpctrain.data.loader import Loader, Prepare, ReadOptions, make_prepare, read_samples
from hpctrain.data.pack import Pack
from hpctrain.data.partition import assign_shards, random_key
from hpctrain.data.split import Split
from hpctrain.errors import UsageError
from hpctrain.inference.network import find_model
from hpctrain.inference.own import import_functions, import_own, with_augment
from hpctrain.inference.own_check import check_augment
from hpctrain.inference.tasks import make_task, output_shape
from hpctrain.models import InitialWeights, build, check_forward, load_init
from hpctrain.parallel.batchnorm import BatchNorms
from hpctrain.parallel.device import place
from hpctrain.parallel.mpi import (
    Comm,
    check_equal_on_all,
    comm_of_host,
    fair_threads,
    on_all,
    on_root,
)
from hpctrain.parallel.transport import open_device, open_transport
from hpctrain.plan import Facts, Plan, cpu_threads, extend, model_name, resolve
from hpctrain.text import brief, listed
from hpctrain.training.input import FIRST_ROWS, check_data, check_memory, open_input, open_pack
from hpctrain.training.optimizer import freeze
from hpctrain.training.probe import probe_model
from hpctrain.training.run import Progress, Run
from hpctrain.training.scaling import choose_scaling
from hpctrain.training.trainer import Trainer


def set_up(config: Config, comm: Comm, earlier: Plan | None = None, saved: bool = False) -> Run:
    """Set up a run from a configuration that passed `check_settings`. Collective.

    `earlier` is the plan of the run's first launch, if this launch resumes it, and `saved` whether
    it left a checkpoint, which then provides the weights instead of --init. Nothing that is made
    here is replaced later. Calls that are passed `comm` are collective, and all ranks make them in
    this order. Raises the same error on all ranks.
    """
    # Data and device
    pack = open_pack(config, comm)
    with on_all(comm):
        check_data(config, pack)
        train = Split(pack, "train", verify=config.verify)
    if pack.fit:
        from hpctrain.data.images import decoder_versions  # imports Pillow

        check_equal_on_all(comm, {"what decodes JPEG files": decoder_versions()})
    device = open_device(comm, config.device)
    threads = cpu_threads(config, fair_threads(comm), earlier)
    torch.set_num_threads(threads)  # launchers set 1 or all cores

    # Network: what it learns, how its input is scaled, what it does with the first samples
    with on_all(comm):
        model, init = make_model(config, pack, not saved)
    like = next(model.parameters())
    place(model, device, config.channels_last)
    with on_all(comm):
        frozen = freeze(model, config.freeze)
    weights = on_root(comm, find_class_weights, config.class_weights, train)
    resolved = {
        "precision": earlier.precision if earlier else config.precision,
        "class_weights": weights,
    }
    with on_all(comm):
        own = import_functions(config.loss, config.metric)
        task = make_task({**dataclasses.asdict(config), **resolved}, len(pack.classes), like, own)
        scaling, why = choose_scaling(config, earlier, pack, model, init)
        norms = BatchNorms(model, config.batch_norm)
    prepare = make_prepare(device, like.dtype, config.channels_last, scaling)
    probe = on_root(comm, probe_model, norms, task, train, prepare, config)

    # Plan
    facts = Facts(
        ranks=comm.size,
        device=device.type,
        threads=threads,
        rows=len(train),
        image_shape=pack.image_shape,
        row_bytes=train.stored_bytes if config.random_crop else pack.image_bytes,
        classes=len(pack.classes),
        pack_uuid=pack.uuid,
        min_samples=probe.min_samples,
        block_rows=pack.block_rows,
        chunk_rows=pack.splits["train"].images.chunk_rows,
        class_weights=weights,
        scaling=scaling,
    )
    plan = on_root(
        comm, lambda: extend(earlier, config, facts) if earlier else resolve(config, facts)
    )
    with on_all(comm):
        runs = assign_shards(plan.shards, comm.size, worker_loads(config.worker_load))

    # Message, reduction and optimizer
    norms.start(probe)
    if device.type == "cuda":
        torch.cuda.empty_cache()  # what the probe took: NCCL and CuPy allocate beside torch
    transport, choice, sharing = open_transport(comm, device, config.reduce)
    trainer = Trainer(norms, task, config, plan, transport, runs)

    # Loader
    on_host = comm_of_host(comm).size
    with on_all(comm):
        kept = check_memory(config, plan, pack.splits["train"], on_host)
    opened = open_input(config, plan, train, runs[comm.rank], comm)
    augmentation = Augmentation.of(config)
    augmented = make_prepare(device, like.dtype, config.channels_last, scaling, augmentation)
    if config.augment:
        augmented = with_own_augment(config.augment, augmented, opened.train, comm)
    buffer = byte_count(config.read_buffer, "--read-buffer")
    loader = Loader(
        opened.train,
        opened.order,
        runs[comm.rank],
        augmented,
        task.pair,
        plan.epochs,
        ReadOptions(buffer, config.random_crop, device),
    )
    texts = sharing, init, why, frozen, kept
    return Run(
        config=config,
        facts=facts,
        plan=plan,
        comm=comm,
        shards=runs,
        pack=pack,
        input=opened,
        task=task,
        trainer=trainer,
        loader=loader,
        prepare=prepare,
        validations=validation_interval(config.validate_every),
        checkpoints=checkpoint_interval(config.checkpoint_every),
        transport=choice,
        init=init,
        notes=tuple(map(str, filter(None, texts))),
        progress=Progress(planned=plan.epochs),
    )


def with_own_augment(name: str, prepare: Prepare, source: Split, comm: Comm) -> Prepare:
    """Return `prepare` followed by the function that --augment names. Collective.

    Raises UsageError if the function breaks a rule.
    """
    with on_all(comm):
        own = import_own(name, "--augment", "images", "generator")
    rows, key = np.arange(min(FIRST_ROWS, len(source))), random_key("own functions")
    on_root(comm, lambda: check_augment(own, read_samples(source, rows, prepare), key))
    return with_augment(own, prepare)


def find_class_weights(given: str | None, train: Split) -> tuple[float, ...]:
    """Return the weight of each class that --class-weights asks for, () without it.

    `given` is "balanced", for n / (K n_c) as in scikit-learn, with n_c of n training samples in
    class c of K; or numbers in the order of the classes. Raises UsageError.
    """
    if given is None:
        return ()
    classes, setting = train.pack.classes, f"--class-weights {brief(given)}"
    if given == "balanced":
        counts = train.count_classes()
        if empty := [name for name, count in zip(classes, counts, strict=True) if not count]:
            none = f"no training image is of class {listed(empty, 3)}: its weight would be infinite"
            raise UsageError(f"{setting}: {none}; give a number for each class")
        return tuple((counts.sum() / (len(classes) * counts)).tolist())
    weights = class_weights(given)
    if len(weights) != len(classes):
        has = f"the data has {len(classes)} classes: {listed(classes)}"
        raise UsageError(f"{setting}: these are {len(weights)} weights, and {has}")
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
