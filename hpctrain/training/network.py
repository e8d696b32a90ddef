"""The second act of a set-up: the network before its first step, and what it learns."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import nn

from hpctrain.config import Config
from hpctrain.config.functions import is_own, source_files
from hpctrain.data.augment import Augmentation
from hpctrain.data.pack import Pack, describe_drawing
from hpctrain.data.partition import random_key
from hpctrain.data.pipeline import Pipeline
from hpctrain.data.scale import Ranges, Scale
from hpctrain.data.split import Split
from hpctrain.data.transforms import Transforms
from hpctrain.errors import UsageError
from hpctrain.inference.evaluate import evaluate
from hpctrain.inference.network import Inference, find_model
from hpctrain.models import (
    InitialWeights,
    build,
    check_forward,
    check_types,
    input_like,
    load_init,
    read_model,
)
from hpctrain.models.init import Normalization
from hpctrain.models.memory_format import crashing_in_nhwc, has_avx2_only, move_model
from hpctrain.models.weights import is_torch_file
from hpctrain.parallel.batchnorm import BatchNorms
from hpctrain.parallel.mpi import (
    Comm,
    agreed,
    alone,
    check_equal_on_all,
    minimum,
    on_all,
    on_root,
)
from hpctrain.plan import Measured, model_name
from hpctrain.tasks.facts import FACTS
from hpctrain.tasks.measures import load_measures
from hpctrain.tasks.task import Task, make_task, task_class
from hpctrain.text import listed
from hpctrain.training.augmentation import (
    describe_transforms,
    find_range,
    make_transforms,
    needs_range,
    range_note,
    unit_range,
)
from hpctrain.training.data import TrainingData
from hpctrain.training.library_optimizer import Maker, import_optimizer
from hpctrain.training.normalization import choose_normalization, rounding_note
from hpctrain.training.optimizer import freeze
from hpctrain.training.probe import FIRST_ROWS
from hpctrain.training.resume import PreviousLaunch
from hpctrain.training.statistics import describe_range, measure_training_images


class Network(NamedTuple):
    """The network before its first step, and what it learns."""

    config: Config  # with the memory format in which the network can be trained
    norms: BatchNorms
    task: Task
    init: InitialWeights | None
    optimizer: Maker | None  # of a library or the user's own
    transforms: Transforms | None  # of --augment
    augmentation: tuple[str, ...]  # in words, if parts of other libraries are in it
    augment_range: Ranges | None  # stored values that transforms see as 0 and 1
    measured: Measured  # of the training targets, by the task
    normalization: Normalization
    stored_range: Ranges | None  # of all training images, if they were measured
    pipeline: Pipeline  # for training
    is_nchw: bool  # chosen because NHWC crashes
    notes: list[str]


def make_network(
    config: Config, comm: Comm, data: TrainingData, earlier: PreviousLaunch | None
) -> Network:
    """Make the network on the device, and what it learns: its task and normalization. Collective.

    All ranks draw or read the same weights, agree on the memory format and on the weights of
    classes, and compare the files of the user's own functions.
    """
    device = data.device
    begun = earlier.plan if earlier else None
    pack = data.pack
    stored_range = None
    is_normalized = config.normalize == "pack" and bool(pack.external)
    if (is_normalized or needs_range(config, pack)) and not begun:
        images = measure_training_images(data.train, comm)
        pack = dataclasses.replace(pack, mean=images.mean, std=images.std)
        stored_range = images.stored_range
    with on_all(comm):
        model, init = make_model(config, pack, not (earlier and earlier.checkpoint))
        frozen = freeze(model, config.freeze)
        check_types(model)
    config, nchw = choose_memory_format(config, model, device, comm, resumed=begun is not None)
    move_model(model, device, config.channels_last)
    like = input_like(model)
    kind = task_class(config.task)
    measured_before = begun.measured if begun else None
    measured = on_root(comm, kind.measure, vars(config), data.train, measured_before)
    precision = begun.precision if begun else config.precision
    resolved = {"precision": precision, **measured}
    with on_all(comm):
        measures = load_measures(vars(config), config.task, pack.targets.names, like)
        optimizer = import_optimizer(config.optimizer)
        transforms = make_transforms(config)
        task = make_task({**vars(config), **resolved}, pack.targets.names, like, measures)
        normalization, why = choose_normalization(config, begun, pack, model, init)
        norms = BatchNorms(model, config.batch_norm)
        augment_range = find_range(config, begun, pack, stored_range, normalization)
        unit = unit_range(augment_range, pack.scale.divisor, device)
        if transforms is not None:
            transforms = dataclasses.replace(transforms, range=unit)
        augmentation = Augmentation(
            flip=config.flip,
            shift=config.shift,
            flip_vertical=config.flip_vertical,
            rotate90=config.rotate90,
        )
    compare_code(config, pack, comm)
    pipeline = Pipeline(
        device=device,
        dtype=like.dtype,
        channels_last=config.channels_last,
        normalization=normalization,
        augmentation=augmentation,
        transform=transforms,
        unit_range=unit,
        stage=task.stage,
        nodata=pack.scale.nodata,
    )
    notes = [
        nchw,
        describe_range(stored_range, pack.scale),
        str(init or ""),
        scale_note(init, pack),
        split_note(init, pack),
        outputs_note(init, pack, {**vars(config), **measured}),
        why,
        kind.measured_note(vars(config), measured),
        rounding_note(config, normalization, pack),
        range_note(augment_range),
        frozen,
        *(metric.note for metric in task.library_metrics),
    ]
    return Network(
        config=config,
        norms=norms,
        task=task,
        init=init,
        optimizer=optimizer,
        transforms=transforms,
        augmentation=describe_transforms(config, augmentation),
        augment_range=augment_range,
        measured=measured,
        normalization=normalization,
        stored_range=stored_range,
        pipeline=pipeline,
        is_nchw=bool(nchw),
        notes=notes,
    )


def use_network_of_init(config: Config) -> Config:
    """Return the settings with the network of the file of --init, unless --model is given (rank 0).

    A file of another program does not say which it is. Raises UsageError as `find_model` does, and
    for a function of the user's own, which is imported only if it is named on the command line.
    """
    if config.init is None or config.model != "auto":
        return config
    path = find_model(config.init, config.runs_dir)
    metadata = {} if is_torch_file(path) else read_model(path)[1]
    if metadata.get("task") != config.task:
        return config
    name = metadata["model"]
    if is_own("model", name):
        raise UsageError(f"--init {config.init}: its network is {name}: give --model {name}")
    small_stem = config.small_stem or metadata["small_stem"]
    return dataclasses.replace(config, model=name, small_stem=small_stem)


def make_model(
    config: Config, pack: Pack, first_weights: bool
) -> tuple[nn.Module, InitialWeights | None]:
    """Make the network with equal initial weights on all ranks; also return those of --init."""
    torch.manual_seed(random_key(config.seed, "weights"))
    task = task_class(config.task)
    shape = pack.image_shape
    count = len(pack.targets.names)
    outputs = task.outputs(count)
    output = task.output_shape(shape, count)
    model = build(model_name(config, shape), shape, outputs, config.small_stem, output=output)
    if not config.freeze:  # else it may freeze other types
        check_types(model)
    check_forward(model, shape, output)
    init = None
    if config.init and first_weights:
        init = load_init(model, find_model(config.init, config.runs_dir), outputs, shape[2])
    return model.train(), init


def scale_note(init: InitialWeights | None, pack: Pack) -> str:
    """Return a note if the network of --init was trained on images of another scale, or ""."""
    if init is None or init.stored is None:
        return ""
    trained = Scale(**init.stored)
    if trained.is_like(pack.scale):
        unlike = pack.scale.unlike_channels(trained)
        if not unlike:
            return ""
        return f"{pack.path}: {listed(unlike, separator='; ')} as in the training of --init"
    return f"--init {init.path}: its training was on {trained}; this one is on {pack.scale}"


def split_note(init: InitialWeights | None, pack: Pack) -> str:
    """Return a note if the network of --init was trained on another split of the data, or ""."""
    if init is None or not pack.external or not init.metadata.get("external"):
        return ""
    trained = describe_drawing(init.metadata["external"])
    drawn = describe_drawing(pack.external)
    if init.metadata["pack_uuid"] != pack.uuid or trained == drawn:
        return ""
    return (
        f"--init {init.path}: its training images were drawn from this file {trained}, and those of"
        f" this run {drawn}: it may know images that are tested here"
    )


def outputs_note(init: InitialWeights | None, pack: Pack, settings: Mapping[str, Any]) -> str:
    """Return a note if the outputs of --init, which are kept, had another meaning, or ""."""
    if init is None or init.fresh or "task" not in init.metadata:
        return ""
    metadata = init.metadata
    task = settings["task"]
    names = tuple(metadata.get("columns") or metadata["classes"])
    if (metadata["task"], names) == (task, pack.targets.names):
        note = task_class(task).init_note(metadata, settings)
        return note and f"--init {init.path}: {note}"
    if not FACTS[task].targets:
        return ""
    return (
        f"--init {init.path}: its outputs, which are kept, were those of --task {metadata['task']}"
        f" for {listed(names, 5)}; here they are for {listed(pack.targets.names, 5)}"
    )


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


def check_best_by(network: Network, train: Split, comm: Comm) -> None:
    """Test with the first samples that evaluations have the figure of --best-by. Collective."""
    task = network.task
    if not task.best_by:
        return
    inference = Inference(network.norms.model, task, network.pipeline.plain(), FIRST_ROWS)

    def check() -> None:
        result = evaluate(inference, train, alone(), most=1)
        assert result is not None
        names = [*result.means, *result.metrics]
        if task.best_by not in names:
            raise UsageError(
                f"--best-by {network.config.best_by}: evaluations of this run have no"
                f" {task.best_by}, but {listed(names)}"
            )

    on_root(comm, check)


def check_metrics(network: Network, pack: Pack, comm: Comm) -> None:
    """Check that rank 0 can hold what metrics need of the splits that are evaluated. Collective."""
    metrics = network.task.library_metrics
    if not metrics:
        return
    from hpctrain.tasks.library_metrics import check_size

    count = len(pack.targets.names)
    shape = network.task.output_shape(pack.image_shape, count)
    kind = network.task.facts.targets

    def check() -> None:
        for name, info in pack.splits.items():
            if name != "train":
                check_size(metrics, kind, info.samples, shape)

    on_root(comm, check)
