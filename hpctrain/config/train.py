"""Settings of ``hpctrain train``: ONE class, whose fields are the options, and their conflicts.

Settings do not depend on the ranks, the machine or the data; ``plan.py`` resolves them. A default
of None means "decided by the plan"; the help says how.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from typing import ClassVar, Literal

from hpctrain.config.elsewhere import ELSEWHERE
from hpctrain.config.metrics import metric_directions
from hpctrain.config.option import Settings, check_folder_name, option
from hpctrain.config.parts import EXAMPLES
from hpctrain.config.values import (
    DIVISORS,
    Bytes,
    ClassWeights,
    Every,
    Factors,
    Loads,
    Names,
    NoData,
    Patterns,
    Seconds,
    Shares,
    Threshold,
)
from hpctrain.errors import UsageError, did_you_mean
from hpctrain.tasks.facts import (
    FACTS,
    USUAL,
    TaskName,
    best_by,
    exclusions,
    other_defaults,
    task_that_learns,
    task_with,
)

Precision = Literal["default", "fp32", "tf32", "bf16"]
Layout = Literal["NHWC", "NCHW", "NHW", "NCWH", "NWH", "HWC", "CHW", "HW", "CWH", "WH"]
PURPOSES = [facts.help for facts in FACTS.values()]
DEFAULT_LEARNING_RATES = {"sgdm": 0.01, "adam": 0.001, "adamw": 0.001}
CACHE_DIR = ("folder of built-in sets", "data")


def check_no_time(every: Every) -> None:
    """Raise ValueError for an interval in time: validations come at the same steps in any run."""
    if every.seconds < float("inf"):
        raise ValueError("give epochs or steps, as in 2epochs or 500steps; 0 = only at the end")


def check_texts(texts: Sequence[str]) -> None:
    """Raise ValueError for a text that is empty."""
    if "" in texts:
        raise ValueError("the text is empty")


def check_optimizer(name: str) -> None:
    """Raise ValueError unless this is a built-in optimizer, or names a part or a function."""
    if name not in DEFAULT_LEARNING_RATES and ":" not in name:
        builtin = ", ".join(DEFAULT_LEARNING_RATES)
        near = did_you_mean(name, DEFAULT_LEARNING_RATES)
        example = f"'{EXAMPLES['optimizer']}'"
        raise ValueError(f"there are {builtin}, module:function and as in {example}{near}")


class Runs(Settings):
    """Settings of the subcommands that find runs."""

    runs_dir: str = option("folder of all runs", "runs", group="Shared", shared=True)


class OnRanks(Runs):
    """Settings of the subcommands that compute on all ranks."""

    cache_dir: str = option(*CACHE_DIR, shared=True)
    device: Literal["auto", "cpu", "cuda"] = option("compute on this device", "auto", shared=True)
    threads: int | None = option(
        "CPU threads per rank; default: allowed cores / ranks, when training --deterministic 1",
        check="[1, 1024]",
        shared=True,
    )
    hang_timeout: Seconds = option(
        "abort all ranks after so long without progress", Seconds("30m"), shared=True
    )


class Config(OnRanks):
    """All settings of one training run."""

    trust_flag: ClassVar[bool] = True
    elsewhere: ClassVar[dict[str, str]] = ELSEWHERE
    exclude: ClassVar[tuple[tuple[str, str, str], ...]] = (
        ("--batch-per-rank", "--batch-size", "give one of them"),
        ("--labels", "--targets", "give one of them"),
        ("--warmup-epochs", "--schedule one-cycle", "the schedule has a warm-up of its own"),
        ("--label-smoothing", "--loss", "smoothing is part of the cross-entropy loss"),
        ("--class-weights balanced", "--balanced-sampling", "both make up for unequal classes"),
        ("--overlap", "--cuda-graphs", "in a graph all gradients come at once"),
        ("--comm-dtype bf16", "--deterministic", "its rounding depends on the number of ranks"),
        *exclusions(),
    )

    data: str = option(
        "pack, built-in set (digits, shapes, flowers), HDF5 file of --images, or pattern of such"
        " files, as 'scans/*.h5'",
        "digits",
        group="Common",
    )
    model: str = option(
        f"network: digits, resnet18, resnet34, resnet50, autoencoder, '{EXAMPLES['model']}' or your"
        f" own package.module:function; auto = digits for 28x28x1, to {other_defaults('model')},"
        " else resnet50",
        "auto",
    )
    optimizer: str | None = option(
        f"update rule: sgdm, adam, adamw, your own module:function or '{EXAMPLES['optimizer']}';"
        f" default: {USUAL.optimizer}, to {other_defaults('optimizer')}",
        check=check_optimizer,
    )
    lr: float | None = option(
        "learning rate; default: sgdm 0.01, adam and adamw 0.001", check="(0, inf)"
    )
    epochs: int | None = option(
        f"epochs; default: digits 20, {other_defaults('epochs')}, else 100", check="[1, inf)"
    )
    batch_size: int | None = option(
        f"global batch size; default: {USUAL.batch_size} ({other_defaults('batch_size')}), on GPUs"
        " per rank or shard",
        check="[1, inf)",
    )
    seed: int = option("seed of weights, order, augmentation and dropout", 0)
    deterministic: bool = option("same bits every run, with --shards on any number of ranks", False)
    run: str | None = option("name, also to resume; default: time, model", check=check_folder_name)
    dry_run: bool = option("print the plan and exit", False)
    flip: bool = option("augment by random horizontal flips", False, group="Data")
    flip_vertical: bool = option("augment by random vertical flips", False)
    rotate90: bool = option("augment by 0 to 3 quarter turns at random; square images", False)
    shift: int = option("augment by random shifts of up to this many pixels in x and y", 0)
    normalize: Literal["auto", "unit", "pack", "image", "imagenet"] = option(
        "scale inputs to [0, 1] (unit), or by mean and std of all training images (pack), of each"
        " image by itself (image) or of ImageNet; auto = as --init or timm says (weights of other"
        " programs: imagenet), else unit",
        "auto",
    )
    random_crop: float = option(
        "random crops of at least this share of the area, aspects 3/4 to 4/3, resized; 0 = none",
        0.0,
        "[0, 1]",
    )
    augment: tuple[str, ...] = option(
        f"augment by '{EXAMPLES['augment']}' or your own module:function of images (n, C, H, W) and"
        " torch.Generator; repeated, one after the other",
        (),
        check_texts,
    )
    images: str | None = option("dataset of images in an HDF5 file, such as x or {split}/x")
    labels: str | None = option(
        "dataset of integers (made 0 ... K-1), strings or one-hot; to learn several classes, of 0"
        " and 1 (N, K), or values (N,) or (N, T)",
        needs="--images",
    )
    targets: Names | None = option(
        "datasets of values, or of 0 and 1 of a class each, in place of --labels, as in age,mass",
        needs="--images",
    )
    layout: Layout | None = option(
        "axes of --images; without N, each file is one image; default: NHWC or NHW, MATLAB NCWH or"
        " NWH",
        needs="--images",
    )
    max_value: float | None = option(
        "divide images by this; default: that of the pack, 255 for uint8, 65535 for uint16, else 1",
        check=DIVISORS,
    )
    nodata: NoData | None = option(
        "stored value of --images, or nan, that marks missing data: not in statistics, 0 as input",
        needs="--images",
    )
    split: Shares | None = option(
        "shares as in 0.8,0.2 or, with validation, 0.8,0.1,0.1; default: 0.9,0.1", needs="--images"
    )
    group: Literal["file"] | None = option(
        "file: keep all images of a file in one split", needs="--images"
    )
    split_seed: int = option("seed of the splits of --images", 0, needs="--images")
    shuffle: Literal["partition", "global", "blocks"] | None = option(
        "shuffle each shard's partition, all samples (global), or blocks of 4 MiB in a window, for"
        " slow disks; default: partition, for chunked datasets blocks"
    )
    balanced_sampling: bool = option(
        "draw all classes equally often: repeat rare images, omit some of frequent classes", False
    )
    read_buffer: Bytes = option("buffer per rank; partitions that fit are read once", Bytes("256M"))
    stage: str | None = option("copy this host's part of the pack to this local folder first")
    verify: bool = option("compare each sample's checksum at its first read", True)
    task: TaskName = option(
        f"{', '.join(PURPOSES[:-1])}, or {PURPOSES[-1]}", "classify", group="Network"
    )
    threshold: Threshold = option(
        "probability from which an image has a class; best = that of the largest F1 in validation,"
        " for each class, kept with the network",
        Threshold("0.5"),
        needs="--task multilabel",
    )
    target_scale: Literal["std", "none"] = option(
        "learn values by mean and standard deviation of each column of the training split (std), or"
        " as they are (none)",
        "std",
        needs="--task regress",
    )
    noise: Literal["salt-pepper", "gaussian"] = option(
        f"noise of --task {task_with('noise')}", "salt-pepper"
    )
    noise_level: float = option("share of salt-pepper values, std of gaussian noise", 0.1, "(0, 1]")
    init: str | None = option("start from weights of a run, or a .safetensors, .pth or .pt file")
    freeze: Patterns | None = option(
        "parameters to freeze, as in bn1,layer*; frozen batch norm keeps its statistics"
    )
    small_stem: bool = option("start ResNets with a 3x3 convolution, no pooling", False)
    batch_norm: Literal["exact", "running", "average"] = option(
        "running statistics of batch norm: exact = of the pooled batch; running = each shard's,"
        " pooled; average = weighted average",
        "exact",
    )
    momentum: float = option("momentum of sgdm", 0.9, "[0, 1)", group="Optimizer")
    scale_lr: Literal["none", "linear", "sqrt"] = option(
        "scale --lr by batch size / --batch-per-rank (or the default batch): linear, for adam sqrt",
        "none",
    )
    warmup_epochs: float | None = option(
        "epochs of linear warm-up; default: 5 with --scale-lr", check="[0, inf)"
    )
    weight_decay: float = option("L2 penalty, for adamw decoupled decay", 0.0, "[0, inf)")
    no_decay: Patterns | None = option(
        "no weight decay for normalization (norm), biases (bias) or names, as in norm,*pos_embed",
        needs="--weight-decay",
    )
    lr_factors: Factors | None = option(
        "multiply --lr for parameters by name, as in layer*=0.1,fc=1; the last match counts"
    )
    schedule: Literal["constant", "cosine", "step", "one-cycle"] = option(
        "schedule of the learning rate", "constant"
    )
    min_lr: float = option("least learning rate", 0.0, "[0, inf)", needs="--schedule cosine/step")
    step_epochs: int = option("--schedule step: epochs between drops to 1/10", 30, "[1, inf)")
    ema: float | None = option(
        "exponential average of weights; decay, such as 0.999", check="(0, 1)", needs="--final ema"
    )
    clip_norm: float | None = option("clip the gradient's L2 norm to this", check="(0, inf)")
    label_smoothing: float = option("label smoothing of (binary) cross-entropy", 0.0, "[0, 1)")
    loss: str | None = option(
        f"loss: '{EXAMPLES['loss']}' or your own module:function of outputs and targets, one value"
        f" a sample; default: {USUAL.loss}, to {other_defaults('loss')}"
    )
    class_weights: ClassWeights | None = option("weights in the loss, such as 0.2,1; or balanced")
    batch_per_rank: int | None = option(
        "batch size per rank, or with --shards per shard", check="[1, inf)", group="Batches"
    )
    shards: int | None = option(
        "shards per batch; ranks with several accumulate; default: one per rank", check="[1, inf)"
    )
    worker_load: Loads | None = option(
        "assign shards to ranks in proportions such as 3,1; their sum is the default of --shards"
    )
    channels_last: bool = option("memory format NHWC, else NCHW", True, group="Speed")
    precision: Precision = option(
        "arithmetic: fp32; tf32 = TF32 in matrix products; bf16 = autocast to bfloat16; default ="
        " torch's: fp32, but TF32 in convolutions on GPUs",
        "default",
    )
    compile: bool = option("compile the network by torch.compile", False)
    cuda_graphs: bool = option("capture forward and backward as CUDA graphs", False)
    reduce: Literal["auto", "nccl", "host", "mpi-gpu"] = option(
        "all-reduce on GPUs by nccl, pinned host memory or GPU-aware MPI; auto = nccl where every"
        " rank has its own GPU, else host",
        "auto",
    )
    overlap: int = option("sum gradients during backward in N segments; 0 = after it", 0, "[0, 64]")
    comm_dtype: Literal["fp32", "bf16"] = option("dtype of messages; bf16 rounds twice", "fp32")
    keep_checkpoints: int = option("keep this many checkpoints", 2, "[1, inf)", group="Run")
    validate_every: Every = option(
        "interval, such as 2epochs or 500steps; 0 = only at the end", Every("1epoch"), check_no_time
    )
    metric: tuple[str, ...] = option(
        f"further figures of evaluations by '{EXAMPLES['metric']}' or your own module:function of"
        " outputs and targets; may be repeated",
        (),
        check_texts,
    )
    best_by: str | None = option(
        "figure of validations that chooses the best network and ranks runs, also one of --metric;"
        f" of a function with its direction, NAME:max or NAME:min; default: {USUAL.chooses}"
    )
    patience: int | None = option(
        "stop after so many validations without a better one (--best-by); 0 = never; default: 0,"
        f" {other_defaults('patience')}",
        check="[0, inf)",
    )
    final: Literal["last", "best", "ema"] = option(
        "network to test and save: last, that of the best validation (best), or --ema's", "last"
    )
    checkpoint_every: Every = option(
        "interval, such as 10m, 2epochs or 500steps; 0 = only at the end", Every("10m")
    )
    resume: Literal["auto", "never", "must"] = option(
        "run of this name: auto = resume it; never = fail if there is one; must = if there is none",
        "auto",
    )
    time_limit: Seconds | None = option("save and exit (75) within this time; default: Slurm job's")
    test: bool = option("evaluate the test split at the end, also after a stop", True)
    tensorboard: bool = option("write TensorBoard events, too", False)
    progress: Literal["auto", "bar", "plain", "none"] = option(
        "progress bar, or plain = a line per epoch; auto = bar on a terminal", "auto"
    )

    def check_conflicts(self) -> None:
        """Raise UsageError if options conflict with each other, or with this machine."""
        super().check_conflicts()
        if self.images is not None and self.labels is None and self.targets is None:
            raise UsageError("--images needs --labels, or --targets of several datasets")
        kind = FACTS[self.task].targets
        if self.targets is not None and kind not in ("classes", "values"):
            raise UsageError(
                f"--targets names values, and --task {self.task} learns none: give --task"
                f" {task_that_learns('values')}, or for classes {task_that_learns('classes')}"
            )
        if self.task == "multilabel" and self.given("--class-weights") and self.loss:
            raise UsageError(
                f"{self.given('--class-weights')} is for the built-in loss of --task multilabel:"
                " weigh classes in --loss"
            )
        name, lr = optimizer_and_rate(self.optimizer, self.lr, self.task)
        if name not in DEFAULT_LEARNING_RATES and self.momentum != Config.momentum:
            raise UsageError(
                f"--momentum is for sgdm: give it to {name} as an argument, if it has one"
            )
        if self.scale_lr == "none" and self.min_lr > lr:
            raise UsageError(
                f"--min-lr {self.min_lr} is above --lr {lr}, where the schedule begins"
            )
        directions = metric_directions(self.metric)
        figure = best_by(self.best_by, self.task, directions).figure
        if not self.metric and figure not in FACTS[self.task].directions:
            raise UsageError(f"--best-by {self.best_by}: {figure} needs the --metric that has it")
        if self.final == "ema" and self.ema is None:
            raise UsageError("--final ema needs the decay of the average, such as --ema 0.999")
        if self.tensorboard and importlib.util.find_spec("tensorboard") is None:
            raise UsageError("--tensorboard needs its package: pip install tensorboard")


def optimizer_and_rate(optimizer: str | None, lr: float | None, task: str) -> tuple[str, float]:
    """Return the optimizer and the learning rate; the usual ones where none are given.

    Raises UsageError for an optimizer that has no usual learning rate here.
    """
    name = optimizer or FACTS[task].optimizer
    if lr is not None:
        return name, lr
    if name not in DEFAULT_LEARNING_RATES:
        raise UsageError(f"--optimizer {name} needs --lr: its learning rate has no default")
    return name, DEFAULT_LEARNING_RATES[name]
