"""Setup of a run before its first step.

The order is: data and device, network, plan, then the message and the objects that work on it. With
``--stage DIR`` every host copies the data that its ranks read to its own disk (``staging.py``).
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Sequence
from functools import partial
from typing import NamedTuple

import numpy as np
import torch
from torch import nn

from hpctrain.config import ClassWeights, Config, Every
from hpctrain.config.functions import Imported, is_own, source_files
from hpctrain.cores import check_threads
from hpctrain.data.augment import Augmentation
from hpctrain.data.loader import Loader, ReadOptions, read_samples
from hpctrain.data.orders import BalancedOrder, Order, make_order
from hpctrain.data.pack import External, Pack, SplitInfo, images_note, read_pack
from hpctrain.data.partition import assign_shards, random_key
from hpctrain.data.pipeline import Pipeline
from hpctrain.data.scale import UNLIKE, Scale
from hpctrain.data.split import Split
from hpctrain.errors import UsageError
from hpctrain.inference.network import find_model, require_split
from hpctrain.memory import keep_memory
from hpctrain.models import (
    InitialWeights,
    build,
    check_forward,
    check_types,
    input_like,
    load_init,
    read_model,
)
from hpctrain.models.init import Scaling
from hpctrain.models.memory_format import crashing_in_nhwc, has_avx2_only, move_model
from hpctrain.models.weights import is_torch_file
from hpctrain.packing.find import find_pack_path
from hpctrain.parallel.batchnorm import BatchNorms, Probe
from hpctrain.parallel.device import choose_device, unused_gpus_note
from hpctrain.parallel.hosts import JobCores, core_notes, share_cores
from hpctrain.parallel.mpi import (
    Comm,
    agreed,
    allgather,
    check_equal_on_all,
    comm_of_host,
    minimum,
    on_all,
    on_root,
)
from hpctrain.parallel.transport import open_transport
from hpctrain.plan import Facts, Plan, cpu_threads, extend, model_name, resolve
from hpctrain.tasks.functions import augment_by, check_augment, import_own
from hpctrain.tasks.task import Task, make_task, task_class
from hpctrain.text import brief, counted, listed
from hpctrain.training.optimizer import freeze
from hpctrain.training.probe import FIRST_ROWS, check_sizes, probe_model
from hpctrain.training.resume import PreviousLaunch
from hpctrain.training.scaling import choose_scaling
from hpctrain.training.staging import stage
from hpctrain.training.state import Run
from hpctrain.training.step import Trainer
from hpctrain.watchdog import doing

NOTED_BYTES = 1 << 30  # on each rank for what is kept of samples; if it is more, a note says so
SORTED_BYTES = 48  # of a sample while --balanced-sampling sorts samples by class


class TrainingData(NamedTuple):
    """What a rank reads samples from, and computes on."""

    pack: Pack
    train: Split
    device: torch.device
    cores: JobCores
    threads: int  # of torch


class Network(NamedTuple):
    """The network before its first step, and what it learns."""

    config: Config  # with the memory format in which the network can be trained
    norms: BatchNorms
    task: Task
    init: InitialWeights | None
    augment: Imported | None  # function of --augment
    weights: tuple[float, ...]  # of classes
    scaling: Scaling
    pipeline: Pipeline  # of training
    is_nchw: bool  # chosen because NHWC crashes
    notes: list[str]


def set_up(config: Config, comm: Comm, earlier: PreviousLaunch | None = None) -> Run:
    """Set up a run from a configuration without conflicts. Collective.

    The plan of the `earlier` launch, if this one resumes a run, is kept, and its checkpoint, if
    any, provides the weights instead of --init. Nothing that is made here is replaced later. Calls
    that are passed `comm` are collective, and all ranks make them in this order. Raises the same
    error on all ranks.
    """
    begun = earlier.plan if earlier else None
    source = open_training_data(config, comm, begun)
    network = make_network(config, comm, source, earlier)
    config = network.config
    pack = source.pack
    device = source.device
    plain = network.pipeline.plain()

    # The plan, for which the network is tested with the first samples
    probe = on_root(comm, probe_model, network.norms, network.task, source.train, plain, config)
    facts = collect_facts(config, comm, source, network, probe)
    plan = on_root(comm, make_plan, facts, source, network, begun)
    on_host = comm_of_host(comm).size
    with on_all(comm):
        shards = assign_shards(plan.shards, comm.size, config.worker_load or ())
        memory = check_memory(config, plan, pack.splits["train"], on_host)

    # Message, reduction and optimizer
    network.norms.start(probe)
    if device.type == "cuda":
        torch.cuda.empty_cache()  # what the probe took: NCCL and CuPy allocate beside torch
    transport = open_transport(comm, device, config.reduce)
    trainer = Trainer(network.norms, network.task, config, plan, transport, shards)

    # Loader
    own_shards = shards[comm.rank]
    train, order = open_order(config, plan, source.train, own_shards, comm)
    balance = balance_note(order, own_shards, pack.classes, comm)
    check_own_augment(network, train, comm)
    options = ReadOptions(config.read_buffer, config.random_crop, device)
    asked_by = "--threads" if config.threads else "OMP_NUM_THREADS"
    notes = (
        *core_notes(source.cores.scarcest, source.threads, asked_by),
        transport.note,
        unused_gpus_note(config.device, device),
        *network.notes,
        memory,
        balance,
        images_note(pack),
    )
    return Run(
        config=config,
        facts=facts,
        plan=plan,
        comm=comm,
        shards=shards,
        pack=pack,
        splits={"train": train},
        task=network.task,
        trainer=trainer,
        loader=Loader(train, order, own_shards, network.pipeline, plan.epochs, options),
        pipeline=plain,
        init=network.init,
        host=source.cores.scarcest,
        notes=[text for text in notes if text],
    )


def open_training_data(config: Config, comm: Comm, begun: Plan | None) -> TrainingData:
    """Open the training split, choose the device, and set the threads of torch. Collective."""
    pack = on_root(comm, find_pack, config)
    local_rank = comm_of_host(comm).rank
    with on_all(comm):
        check_data(config, pack)
        device = choose_device(config.device, local_rank)
    cores = share_cores(comm)
    threads = cpu_threads(config, cores.threads, begun)
    with on_all(comm):
        train = Split(pack, "train", cores.decoding_threads(device.type), config.verify)
        torch.set_num_threads(threads)  # launchers set 1 or all cores
        check_threads(threads)
    keep_memory()
    return TrainingData(pack, train, device, cores, threads)


def make_network(
    config: Config, comm: Comm, source: TrainingData, earlier: PreviousLaunch | None
) -> Network:
    """Make the network on the device, and what it learns: its task and scaling. Collective."""
    pack = source.pack
    device = source.device
    begun = earlier.plan if earlier else None
    with on_all(comm):
        model, init = make_model(config, pack, not (earlier and earlier.checkpoint))
        frozen = freeze(model, config.freeze)
        check_types(model)
    config, nchw = choose_memory_format(config, model, device, comm, resumed=begun is not None)
    move_model(model, device, config.channels_last)
    like = input_like(model)
    weights = on_root(comm, find_class_weights, config.class_weights, source.train)
    precision = begun.precision if begun else config.precision
    resolved = {"precision": precision, "class_weights": weights}
    with on_all(comm):
        loss = import_own(config.loss, "--loss")
        metric = import_own(config.metric, "--metric")
        augment = import_own(config.augment, "--augment")
        task = make_task({**vars(config), **resolved}, pack.classes, like, loss, metric)
        scaling, why = choose_scaling(config, begun, pack, model, init)
        check_normalized(scaling, pack)
        norms = BatchNorms(model, config.batch_norm)
    compare_code(config, pack, comm)
    pipeline = Pipeline(
        device=device,
        dtype=like.dtype,
        channels_last=config.channels_last,
        scaling=scaling,
        augmentation=Augmentation(config.flip, config.shift),
        transform=partial(augment_by, augment) if augment else None,
        stage=task.stage,
    )
    return Network(
        config=config,
        norms=norms,
        task=task,
        init=init,
        augment=augment,
        weights=weights,
        scaling=scaling,
        pipeline=pipeline,
        is_nchw=bool(nchw),
        notes=[nchw, str(init or ""), scale_note(init, pack), why, frozen],
    )


def compare_code(config: Config, pack: Pack, comm: Comm) -> None:
    """Raise UsageError if ranks have other files or libraries that results depend on. Collective.

    These are the files of the user's own functions, timm, and what decodes JPEG files.
    """
    code = source_files(vars(config))
    if pack.fit:
        from hpctrain.data.images import decoder_versions  # imports Pillow

        code["what decodes JPEG files"] = decoder_versions()
    if code:
        check_equal_on_all(comm, code)


def collect_facts(
    config: Config, comm: Comm, source: TrainingData, network: Network, probe: Probe
) -> Facts:
    """Return what the plan follows from, beside the settings."""
    pack = source.pack
    train = source.train
    return Facts(
        ranks=comm.size,
        device=source.device.type,
        threads=source.threads,
        rows=len(train),
        image_shape=pack.image_shape,
        row_bytes=train.stored_bytes if config.random_crop else pack.planned_bytes,
        classes=len(pack.classes),
        pack_uuid=pack.uuid,
        min_samples=probe.min_samples,
        block_rows=pack.block_rows,
        chunk_rows=pack.splits["train"].images.chunk_rows,
        class_weights=network.weights,
        scaling=network.scaling,
    )


def make_plan(facts: Facts, source: TrainingData, network: Network, begun: Plan | None) -> Plan:
    """Return the plan, that of `begun` if it is resumed; test the network in its sizes (rank 0)."""
    config = network.config
    plan = extend(begun, config, facts) if begun else resolve(config, facts)
    if network.is_nchw:  # chosen here: the same command, without --no-channels-last, resumes
        chosen = tuple(name for name in plan.chosen if name != "channels_last")
        plan = dataclasses.replace(plan, chosen=chosen)
    evaluated = [info.samples for name, info in source.pack.splits.items() if name != "train"]
    plain = network.pipeline.plain()
    check_sizes(network.norms, network.task, source.train, plain, plan, evaluated)
    return plan


def check_own_augment(network: Network, train: Split, comm: Comm) -> None:
    """Test the function of --augment, if there is one, with the first samples. Collective."""
    function = network.augment
    if function is None:
        return
    before = dataclasses.replace(network.pipeline, transform=None, scaling=None)

    def check() -> None:
        rows = np.arange(min(FIRST_ROWS, len(train)))
        check_augment(function, read_samples(train, rows, before), random_key("own functions"))

    on_root(comm, check)


def use_network_of_init(config: Config) -> Config:
    """Return the settings with the network of the file of --init, unless --model is given (rank 0).

    A file of another program does not say which it is. Raises UsageError as `find_model` does, and
    for a function of the user's own, which is imported only if it is named on the command line.
    """
    if config.init is None or config.model != "auto":
        return config
    path = find_model(config.init, config.runs_dir)
    known = {} if is_torch_file(path) else read_model(path)[1]
    if known.get("task") != config.task:
        return config
    name = known["model"]
    if is_own("model", name):
        raise UsageError(f"--init {config.init}: its network is {name}: give --model {name}")
    small = config.small_stem or known["small_stem"]
    return dataclasses.replace(config, model=name, small_stem=small)


def find_pack(config: Config) -> Pack:
    """Find (or make), check and open the pack, or the file of --images (rank 0)."""
    path = find_pack_path(config.data, config.cache_dir)
    if config.images is not None and config.labels is not None:
        from hpctrain.data.external import read_external  # imports h5py

        blocks = None if config.shuffle == "blocks" else 0
        names = config.images, config.labels, config.layout
        options = External(*names, config.table()["split"], config.seed, blocks, config.max_value)
        return read_external(path, options)
    pack = read_pack(path)
    require_split(pack, "train")
    return pack


def check_data(config: Config, pack: Pack) -> None:
    """Raise UsageError for settings that do not fit the pack."""
    height, width, _ = pack.image_shape
    if not 0 <= config.shift < min(height, width):  # else nothing of an image could be left
        most = min(height, width) - 1
        raise UsageError(f"--shift {config.shift}: images of {width}x{height} allow 0 to {most}")
    if config.random_crop and not pack.fit:
        raise UsageError(f"--random-crop: {pack.path} holds pixels; pack with --encoding jpeg")
    task_class(config.task).check_data(pack)
    require_validation("--final best", config.final == "best", pack)
    require_validation("--patience", config.patience, pack)
    every = config.validate_every not in (Config.validate_every, Every("0"))
    require_validation("--validate-every", every, pack)


def require_validation(flag: str, given: object, pack: Pack) -> None:
    """Raise UsageError if `flag` is given and the pack has no validation split."""
    if given and "validation" not in pack.splits:
        how = "train" if pack.external is not None else "pack"
        raise UsageError(
            f"{flag} needs a split validation, and {pack.path} has none: {how} with --split"
            " 0.8,0.1,0.1"
        )


def find_class_weights(given: ClassWeights | None, train: Split) -> tuple[float, ...]:
    """Return the weight of each class that --class-weights asks for, () without it.

    "balanced" stands for n / (K n_c) as in scikit-learn, with n_c of n training samples in class c
    of K. Raises UsageError.
    """
    if given is None:
        return ()
    classes, setting = train.pack.classes, f"--class-weights {brief(given)}"
    if not given:  # balanced
        counts = train.count_classes()
        if empty := [name for name, count in zip(classes, counts, strict=True) if not count]:
            none = f"no training image is of class {listed(empty, 3)}"
            raise UsageError(f"{setting}: {none}; give a number for each class")
        return tuple((counts.sum() / (len(classes) * counts)).tolist())
    if len(given) != len(classes):
        has = f"{len(given)} weights for {len(classes)} classes, {listed(classes)}"
        raise UsageError(f"{setting}: {has}")
    return tuple(given)


def make_model(
    config: Config, pack: Pack, first_weights: bool
) -> tuple[nn.Module, InitialWeights | None]:
    """Make the network with equal initial weights on all ranks; also return those of --init."""
    torch.manual_seed(random_key(config.seed, "weights"))
    shape, classes = pack.image_shape, len(pack.classes)
    model = build(model_name(config, shape), shape, classes, config.small_stem)
    if not config.freeze:  # else it may freeze other types
        check_types(model)
    check_forward(model, shape, task_class(config.task).output_shape(shape, classes))
    init = None
    if config.init and first_weights:
        init = load_init(model, find_model(config.init, config.runs_dir), classes, shape[2])
    return model.train(), init


def check_normalized(scaling: Scaling, pack: Pack) -> None:
    """Raise UsageError for mean and std, which are of images in [0, 1], of far other images."""
    if scaling and (pack.scale.low < 0 or pack.scale.reach > UNLIKE):
        text = f"are of images in [0, 1], and {pack.path} holds {pack.scale}"
        raise UsageError(f"mean and std {text}: give another --max-value, or --normalize unit")


def scale_note(init: InitialWeights | None, pack: Pack) -> str:
    """Return a note if the network of --init was trained on images of another scale, or ""."""
    if init is None or init.stored is None:
        return ""
    trained = Scale(**init.stored)
    if trained.is_like(pack.scale):
        return ""
    return f"--init {init.path}: its training was on {trained}; this one is on {pack.scale}"


def choose_memory_format(
    config: Config, model: nn.Module, device: torch.device, comm: Comm, resumed: bool
) -> tuple[Config, str]:
    """Return the settings without channels-last, and a note, if NHWC crashes on a rank. Collective.

    Raises UsageError, the same on all ranks, if the run was begun in NHWC.
    """
    layer = crashing_in_nhwc(model) if config.channels_last and device.type == "cpu" else ""
    if not layer or minimum(comm, not has_avx2_only()) == [1]:
        return config, ""
    why = (
        "oneDNN, a library of torch, writes beyond its memory in NHWC in the gradient of layer"
        f" {layer} (a 1x1 convolution with a stride and fewer than 8 input channels) on"
        " a CPU with AVX2 and without AVX-512"
    )
    if resumed:
        raise agreed(
            UsageError(
                f"the run was begun in NHWC, and {why}: resume it on the kind of CPU where it"
                " began, or begin another with --no-channels-last"
            )
        )
    return dataclasses.replace(config, channels_last=False), f"computed in NCHW: {why}"


def check_memory(config: Config, plan: Plan, info: SplitInfo, ranks: int) -> str:
    """Return a note on the memory that --shuffle global takes on each rank, "" if it is little.

    A rank then keeps the labels, checksums and offsets of all samples. Raises UsageError if that is
    more than the memory of this host, on which `ranks` ranks run.
    """
    columns = (info.labels, info.offsets, info.crc32 if config.verify else None)
    each = sum(np.dtype(column.dtype).itemsize for column in columns if column is not None)
    each += config.verify + SORTED_BYTES * config.balanced_sampling
    if plan.shuffle != "global" or each * info.samples <= NOTED_BYTES:
        return ""
    gib = each * info.samples / 2**30
    takes = (
        f"--shuffle global keeps numbers of {info.samples:,} samples: {gib:,.1f} GiB on each rank"
    )
    there = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / 2**30
    if gib * ranks > there:
        raise UsageError(
            f"{takes}, and this host has {there:,.1f} GiB for {counted(ranks, 'rank')}: use"
            " --shuffle partition or blocks, or fewer ranks per host"
        )
    return takes


def open_order(
    config: Config, plan: Plan, source: Split, shards: range, comm: Comm
) -> tuple[Split, Order]:
    """Return the training split, and the order in which this rank reads its `shards`. Collective.

    With --stage the split is that of a copy on this host, and `source` is closed. Labels, checksums
    and offsets that this rank may need are read now and kept. Raises the same error on all ranks.
    """

    def order_of(split: Split) -> Order:
        classes_of = split.read_targets if config.balanced_sampling else None
        blocks = plan.block_rows, plan.window_blocks
        return make_order(plan.shuffle, plan.partition, config.seed, *blocks, classes_of)

    train, order = source, order_of(source)
    reach = order.reach(shards)
    if config.stage and not config.dry_run:
        needed = reach
        if comm.rank == 0:  # it also tests own functions with the first samples
            needed = range(0, max(reach.stop, min(FIRST_ROWS, len(source))))
        pack = stage(config.stage, source, needed, comm)
        source.close()
        with on_all(comm):
            train = Split(pack, "train", source.threads, config.verify)
        order = order_of(train)
        doing("setting up")  # replaces the last piece that was staged
    with on_all(comm):
        train.hold(reach)
        if isinstance(order, BalancedOrder):  # reads all labels of the shards
            for shard in shards:
                order.classes(shard)
    return train, order


def balance_note(order: Order, shards: range, classes: Sequence[str], comm: Comm) -> str:
    """Return a note on classes that --balanced-sampling draws too rarely, "" if none. Collective.

    A shard of --shuffle partition cannot draw a class of which it has no sample.
    """
    if not isinstance(order, BalancedOrder) or order.everywhere:
        return ""
    own = [order.drawn(shard, len(classes)) for shard in shards]
    drawn = np.array([counts for part in allgather(comm, own) for counts in part])  # (shards, K)
    absent, totals = (drawn == 0).sum(0), drawn.sum(0)
    lacking = np.flatnonzero(absent).tolist()
    if not lacking:
        return ""
    rare = [f"{classes[k]} {absent[k]} ({totals[k]:,.0f} images an epoch)" for k in lacking]
    return (
        f"--balanced-sampling: some of {len(drawn):,} shards lack a class and cannot draw it:"
        f" {listed(rare, 3)}; of other classes up to {totals.max():,.0f} images are drawn an epoch;"
        " --shuffle global draws all equally often"
    )
