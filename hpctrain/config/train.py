"""Settings of ``hpctrain train``: ONE class, whose fields are the options, and their conflicts.

Settings do not depend on the ranks, the machine or the data; ``plan.py`` resolves them. A default
of None means "decided by the plan"; the help says how.
"""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar, Literal

from hpctrain.config.option import Settings, check_folder_name, option
from hpctrain.config.values import (
    Bytes,
    ClassWeights,
    Every,
    Factors,
    Loads,
    Patterns,
    Seconds,
    Shares,
)

Precision = Literal["default", "fp32", "tf32", "bf16"]
DEFAULT_LEARNING_RATES = {"sgdm": 0.01, "adam": 0.001, "adamw": 0.001}
MOST_THREADS = 64  # that a run may use on a small machine, to repeat a run of a larger one
# Options that other subcommands have, too
CACHE_DIR = ("keep built-in sets in this folder", "data")
RUNS_DIR = ("keep all runs in this folder", "runs")
HANG_TIMEOUT = ("abort all ranks after so long without progress", Seconds("30m"))


def check_no_time(every: Every) -> None:
    """Raise ValueError for an interval in time: validations come at the same steps in any run."""
    if every.seconds < float("inf"):
        raise ValueError("give epochs or steps, as in 2epochs or 500steps; 0 = only at the end")


@dataclass(frozen=True)
class Config(Settings):
    """All settings of one training run."""

    trust_flag: ClassVar[bool] = True
    elsewhere: ClassVar[dict[str, str]] = {
        "learning_rate": "--lr",
        "gpus": "mpirun -n N, one rank for each GPU",
        "workers": "mpirun -n N, or --threads of each rank",
        "backend": "--reduce",
        "accumulate": "--shards",
    }
    exclude: ClassVar[tuple[tuple[str, str, str], ...]] = (
        ("--images", "--normalize pack", "mean and std are a pack's; use unit or imagenet"),
        ("--batch-size", "--batch-per-rank", "give one of them"),
        ("--min-lr", "--schedule constant", "it is the smallest rate of cosine and step"),
        ("--min-lr", "--schedule one-cycle", "it is the smallest rate of cosine and step"),
        ("--schedule one-cycle", "--warmup-epochs", "the schedule has a warm-up of its own"),
        ("--loss", "--label-smoothing", "smoothing is part of the cross-entropy loss"),
        ("--balanced-sampling", "--class-weights balanced", "both make up for unequal classes"),
        ("--task denoise", "--class-weights", "its loss knows no classes"),
        ("--task denoise", "--label-smoothing", "its loss knows no classes"),
        ("--task denoise", "--normalize pack", "images stay in [0, 1]"),
        ("--task denoise", "--normalize imagenet", "images stay in [0, 1]"),
        ("--overlap", "--cuda-graphs", "in a graph all gradients come at once"),
        ("--deterministic", "--comm-dtype bf16", "its rounding depends on the number of ranks"),
    )

    # Common options, those that most runs set
    data: str = option(
        "train on this pack, on a built-in set (digits, flowers) or, with --images, an HDF5 file",
        "digits",
        group="Common options",
    )
    model: str = option(
        "train this network: digits, resnet18, resnet34, resnet50, autoencoder, timm:NAME or your"
        " own as package.module:function; auto = digits for images of 28x28x1, autoencoder for"
        " denoise, else resnet50",
        "auto",
    )
    optimizer: Literal["sgdm", "adam", "adamw"] | None = option(
        "update rule; default: sgdm, for denoise adam"
    )
    lr: float | None = option(
        "learning rate; default: 0.01 for sgdm, 0.001 for adam and adamw", check="(0, inf)"
    )
    epochs: int | None = option(
        "epochs to train; default: 20 for digits, 5 for denoise, else 100", check="[1, inf)"
    )
    batch_size: int | None = option(
        "global batch size; default: 128 (denoise 500), on GPUs times the ranks or --shards",
        check="[1, inf)",
    )
    seed: int = option("seed of weights, order, augmentation and dropout", 0)
    device: Literal["auto", "cpu", "cuda"] = option("compute on this device", "auto")
    deterministic: bool = option(
        "compute the same bits in every run, with --shards on any number of ranks", False
    )
    run: str | None = option(
        "name of the run, to resume it; default: time and model", check=check_folder_name
    )
    dry_run: bool = option("print the plan and exit", False)
    cache_dir: str = option(*CACHE_DIR, group="Data")
    normalize: Literal["auto", "unit", "pack", "imagenet"] = option(
        "scale inputs: unit = to [0, 1]; pack = by the pack's mean and std; imagenet = by those"
        " of ImageNet; auto = as the file of --init says or, for files of other programs,"
        " ImageNet's; else as a network of timm says; else unit",
        "auto",
    )
    flip: bool = option("augment by random horizontal flips", False)
    shift: int = option("augment by random shifts of up to this many pixels in x and y", 0)
    random_crop: float = option(
        "augment by random resized crops of at least this share of the area, such as 0.08, at"
        " aspect ratios from 3/4 to 4/3; for packs of JPEG files; 0 = whole images",
        0.0,
        "[0, 1]",
    )
    augment: str | None = option(
        "augment by your own module:function, too, of images (n, C, H, W) and a torch.Generator"
    )
    images: str | None = option(
        "read images from this dataset, such as x, {split}/x or FILE:x, of an HDF5 file",
        needs="--labels",
    )
    labels: str | None = option(
        "read labels, whole numbers (mapped to 0 ... K-1) or one-hot, from this dataset",
        needs="--images",
    )
    layout: Literal["NHWC", "NCHW", "NHW", "NCWH", "NWH"] | None = option(
        "axes of --images; default: NHWC for 4 dimensions, NHW for 3, for MATLAB NCWH and NWH",
        needs="--images",
    )
    max_value: float | None = option(
        "divide values of --images by this; default: 65535 for uint16",
        check="(0, inf)",
        needs="--images",
    )
    split: Shares | None = option(
        "shares of train,test or train,validation,test in --images; default: 0.9,0.1",
        needs="--images",
    )
    shuffle: Literal["partition", "global", "blocks"] | None = option(
        "shuffle samples: partition = in each shard; global = over all; blocks = 4 MiB blocks in"
        " a window, for slow disks; default: partition, for chunked datasets blocks"
    )
    balanced_sampling: bool = option(
        "draw all classes equally often: repeat images of rare ones, leave out some of the others",
        False,
    )
    read_buffer: Bytes = option(
        "buffer at most this much data per rank; a partition that fits is read only once",
        Bytes("256M"),
    )
    stage: str | None = option(
        "copy this host's part of the pack to a folder on its own disk first"
    )
    verify: bool = option("compare the checksum of each sample when it is first read", True)
    task: Literal["classify", "denoise"] = option(
        "learn the class of an image, or to remove noise from it", "classify", group="Network"
    )
    noise: Literal["salt-pepper", "gaussian"] = option("noise of --task denoise", "salt-pepper")
    noise_level: float = option(
        "share of values with salt-pepper noise, or std of gaussian noise", 0.1, "(0, 1]"
    )
    init: str | None = option(
        "start from the weights of a run, or of a .safetensors, .pth or .pt file"
    )
    freeze: Patterns | None = option(
        "train all but these parameters, by patterns of names, as in conv1,bn1,layer*; frozen"
        " batch-norm layers keep their statistics"
    )
    small_stem: bool = option(
        "use a 3x3 first convolution without pooling in ResNets, for small images", False
    )
    batch_norm: Literal["exact", "running", "average"] = option(
        "combine batch-norm running statistics: exact = pooled batch moments; running = each"
        " shard's running statistics, pooled; average = weighted average",
        "exact",
    )
    scale_lr: Literal["none", "linear", "sqrt"] = option(
        "scale the learning rate with the global batch size / --batch-per-rank (or the default"
        " batch size): linear for sgdm, sqrt for adam",
        "none",
        group="Optimizer",
    )
    warmup_epochs: float | None = option(
        "epochs of linear warm-up; default: 5 with --scale-lr", check="[0, inf)"
    )
    momentum: float = option("momentum of sgdm", 0.9, "[0, 1)")
    weight_decay: float = option(
        "L2 penalty (sgdm, adam) or decoupled weight decay (adamw)", 0.0, "[0, inf)"
    )
    no_decay: Patterns | None = option(
        "apply no weight decay to these parameters: norm = of normalization layers, bias ="
        " biases, or patterns of names, as in norm,bias,*pos_embed",
        needs="--weight-decay",
    )
    lr_factors: Factors | None = option(
        "multiply learning rates of parameters, as in layer*=0.1,fc=1; the last match counts"
    )
    schedule: Literal["constant", "cosine", "step", "one-cycle"] = option(
        "schedule of the learning rate", "constant"
    )
    min_lr: float = option("smallest learning rate of --schedule cosine or step", 0.0, "[0, inf)")
    step_epochs: int = option(
        "epochs between drops of --schedule step, each to a tenth", 30, "[1, inf)"
    )
    ema: float | None = option(
        "exponential moving average of the weights, with this decay, such as 0.999",
        check="(0, 1)",
        needs="--final ema",
    )
    clip_norm: float | None = option(
        "clip the L2 norm of the gradient to this; default: no clipping", check="(0, inf)"
    )
    label_smoothing: float = option("label smoothing of the cross-entropy loss", 0.0, "[0, 1)")
    loss: str | None = option(
        "minimize your own loss, module:function of outputs and targets, one value a sample;"
        " default: cross-entropy, for denoise mean squared error"
    )
    class_weights: ClassWeights | None = option(
        "weights of the classes in the loss, in their order, such as 0.2,1; or balanced"
    )
    batch_per_rank: int | None = option(
        "batch size per rank, or with --shards per shard, instead of --batch-size",
        check="[1, inf)",
        group="Batches",
    )
    shards: int | None = option(
        "shards of a batch; default: one per rank; a rank with several accumulates gradients",
        check="[1, inf)",
    )
    worker_load: Loads | None = option(
        "assign shards to ranks in these proportions, such as 3,1 (default of --shards: their sum)"
    )
    threads: int | None = option(
        "CPU threads per rank; default: allowed cores / ranks, with --deterministic 1",
        check="[1, inf)",
        group="Machine",
    )
    precision: Precision = option(
        "arithmetic of forward and backward: fp32; tf32 = TF32 in all matrix products; bf16 ="
        " autocast to bfloat16; default = torch's: fp32, but TF32 in convolutions on GPUs",
        "default",
    )
    channels_last: bool = option("use the memory format NHWC instead of NCHW", True)
    compile: bool = option("compile the network by torch.compile", False)
    cuda_graphs: bool = option("capture forward and backward as CUDA graphs, on GPUs", False)
    reduce: Literal["auto", "nccl", "host", "mpi-gpu"] = option(
        "all-reduce GPU messages by nccl; host = through pinned host memory; mpi-gpu = by"
        " GPU-aware MPI; auto = nccl where every rank has a GPU of its own, else host",
        "auto",
    )
    overlap: int = option(
        "sum gradients during backward, in at most this many segments; 0 = one Allreduce after it",
        0,
        "[0, 64]",
    )
    comm_dtype: Literal["fp32", "bf16"] = option(
        "dtype of communicated gradients; bf16 rounds twice", "fp32"
    )
    runs_dir: str = option(*RUNS_DIR, group="Run, checkpoints and records")
    validate_every: Every = option(
        "validate this often, such as 2epochs or 500steps; 0 = only at the end",
        Every("1epoch"),
        check_no_time,
    )
    metric: str | None = option(
        "evaluate by your own function, too, module:function of outputs and targets"
    )
    patience: int | None = option(
        "stop after so many validations without a smaller loss; 0 = never; default: 5 for denoise",
        check="[0, inf)",
    )
    final: Literal["last", "best", "ema"] = option(
        "test and save the last network, that of the smallest validation loss, or --ema's average",
        "last",
    )
    checkpoint_every: Every = option(
        "write a checkpoint this often, such as 10m, 2epochs or 500steps; 0 = only at the end",
        Every("10m"),
    )
    keep_checkpoints: int = option("keep this many checkpoints", 2, "[1, inf)")
    resume: Literal["auto", "never", "must"] = option(
        "resume a run of this name: auto = if there is one; never = fail if there is one; must ="
        " fail if there is none",
        "auto",
    )
    time_limit: Seconds | None = option(
        "save and exit with 75 within this time; default: the Slurm job's"
    )
    hang_timeout: Seconds = option(*HANG_TIMEOUT)
    test: bool = option("evaluate the test split at the end, also after a stop", True)
    tensorboard: bool = option("write TensorBoard events too", False)
    progress: Literal["auto", "bar", "plain", "none"] = option(
        "show a progress bar, or plain = a line per epoch; auto = bar on a terminal", "auto"
    )

    def conflicts(self) -> Iterator[str]:
        """Yield one line for each conflict between options, or with this machine."""
        yield from super().conflicts()
        _, lr = optimizer_and_rate(self.optimizer, self.lr, self.task)
        if self.scale_lr == "none" and self.min_lr > lr:
            yield f"--min-lr {self.min_lr} is above --lr {lr}, from which the schedule falls"
        if self.final == "ema" and self.ema is None:
            yield "--final ema needs the decay of the average, such as --ema 0.999"
        if self.threads and self.threads > max(MOST_THREADS, 2 * (cores := os.cpu_count() or 1)):
            yield f"--threads {self.threads}: this machine has {cores} cores"
        if self.tensorboard and importlib.util.find_spec("tensorboard") is None:
            yield "--tensorboard needs its package: pip install tensorboard"


def optimizer_and_rate(optimizer: str | None, lr: float | None, task: str) -> tuple[str, float]:
    """Return the optimizer and the learning rate; the usual ones where none are given."""
    name = optimizer or ("adam" if task == "denoise" else "sgdm")
    return name, DEFAULT_LEARNING_RATES[name] if lr is None else lr
