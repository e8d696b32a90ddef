"""Settings of ``hpctrain train``."""

from __future__ import annotations

from dataclasses import dataclass

from hpctrain.config.data import COMMON, DataSettings
from hpctrain.config.option import (
    AT_LEAST_0,
    AT_LEAST_1,
    POSITIVE,
    Bounds,
    Interval,
    check_folder_name,
    duration,
    option,
    segments,
    worker_loads,
)

DEFAULT_LEARNING_RATES = {"sgdm": 0.01, "adam": 0.001, "adamw": 0.001}
PRECISIONS = ("default", "fp32", "tf32", "bf16")
NETWORK, BATCH = "Network", "Batches"
OPTIMIZER, MACHINE, RECORD = "Optimizer", "Machine", "Run, checkpoints and records"
RUNS_DIR = ("runs", "keep all runs in this folder")
TIMEOUT = ("30m", "abort all ranks after so long without progress")


@dataclass(frozen=True)
class Config(DataSettings):
    """All settings of one training run."""

    task: str = option(
        "classify",
        "learn the class of an image, or to remove noise from it",
        NETWORK,
        choices=("classify", "denoise"),
    )
    noise: str = option(
        "salt-pepper", "noise of --task denoise", NETWORK, choices=("salt-pepper", "gaussian")
    )
    noise_level: float = option(
        0.1,
        "share of values with salt-pepper noise, or std of gaussian noise",
        NETWORK,
        Bounds(0, 1, "(]"),
    )
    model: str = option(
        "auto",
        "train this network: digits, resnet18, resnet34, resnet50, autoencoder or your own as"
        " package.module:function; auto = digits for images of 28x28x1, autoencoder for denoise,"
        " else resnet50",
        COMMON,
    )
    init: str | None = option(
        None, "start from the weights of a run or of a .safetensors file", NETWORK
    )
    small_stem: bool = option(
        False, "use a 3x3 first convolution without pooling in ResNets, for small images", NETWORK
    )
    batch_norm: str = option(
        "exact",
        "combine batch-norm running statistics: exact = pooled batch moments; running = each"
        " shard's running statistics, pooled; average = weighted average; local = not combined,"
        " those of rank 0 are saved",
        NETWORK,
        choices=("exact", "running", "average", "local"),
    )
    local_buffers: bool = option(
        False, "allow other buffers that change in training; each rank keeps its own", NETWORK
    )

    epochs: int | None = option(
        None, "epochs to train; default: 20 for digits, 5 for denoise, else 100", COMMON, AT_LEAST_1
    )
    batch_size: int | None = option(
        None,
        "global batch size, in images; default: 128 (denoise 500), on GPUs times the number of"
        " ranks or --shards",
        COMMON,
        AT_LEAST_1,
    )
    batch_per_rank: int | None = option(
        None,
        "batch size per rank, or with --shards per shard; instead of --batch-size",
        BATCH,
        AT_LEAST_1,
    )
    shards: int | None = option(
        None,
        "cut each batch into this many shards; default: one per rank; a rank with several"
        " accumulates their gradients",
        BATCH,
        AT_LEAST_1,
    )
    worker_load: str | None = option(
        None,
        "assign shards to ranks in these proportions, such as 3,1 (default of --shards: their sum);"
        " auto = as measured, anew between epochs (default of --shards: 4 per rank)",
        BATCH,
        worker_loads,
    )
    seed: int = option(0, "seed of weights, order, augmentation and dropout", COMMON)

    optimizer: str | None = option(
        None,
        "update rule; default: sgdm, for denoise adam",
        COMMON,
        choices=tuple(DEFAULT_LEARNING_RATES),
    )
    lr: float | None = option(
        None, "learning rate; default: 0.01 for sgdm, 0.001 for adam and adamw", COMMON, POSITIVE
    )
    lr_scaling: str = option(
        "none",
        "scale the learning rate with the global batch size / --batch-per-rank (or the default"
        " batch size): linear for sgdm, sqrt for adam",
        OPTIMIZER,
        choices=("none", "linear", "sqrt"),
    )
    warmup_epochs: float | None = option(
        None, "epochs of linear warm-up; default: 5 with --lr-scaling", OPTIMIZER, AT_LEAST_0
    )
    momentum: float = option(0.9, "momentum of sgdm", OPTIMIZER, Bounds(0, 1))
    weight_decay: float = option(
        0.0, "L2 penalty (sgdm, adam) or decoupled weight decay (adamw)", OPTIMIZER, AT_LEAST_0
    )
    schedule: str = option(
        "constant",
        "schedule of the learning rate",
        OPTIMIZER,
        choices=("constant", "cosine", "step"),
    )
    step_epochs: int = option(30, "epochs between drops of --schedule step", OPTIMIZER, AT_LEAST_1)
    step_factor: float = option(
        0.1, "factor of each drop of --schedule step", OPTIMIZER, Bounds(0, 1, "(]")
    )
    clip_norm: float | None = option(
        None, "clip the L2 norm of the gradient to this; default: no clipping", OPTIMIZER, POSITIVE
    )
    label_smoothing: float = option(
        0.0, "label smoothing of the cross-entropy loss", OPTIMIZER, Bounds(0, 1)
    )
    device: str = option("auto", "compute on this device", COMMON, choices=("auto", "cpu", "cuda"))
    threads: int | None = option(
        None, "CPU threads per rank; default: allowed cores / ranks", MACHINE, AT_LEAST_1
    )
    precision: str = option(
        "default",
        "arithmetic of forward and backward: fp32; tf32 = TF32 in all matrix products; bf16 ="
        " autocast to bfloat16; default = torch's: fp32, but TF32 in convolutions on GPUs",
        MACHINE,
        choices=PRECISIONS,
    )
    channels_last: bool = option(True, "use the memory format NHWC instead of NCHW", MACHINE)
    compile: bool = option(False, "compile the network by torch.compile", MACHINE)
    graphs: bool = option(False, "capture forward and backward as CUDA graphs, on GPUs", MACHINE)
    reduce: str = option(
        "auto",
        "all-reduce GPU messages by nccl; host = through pinned host memory; mpi-gpu = by GPU-aware"
        " MPI; auto = nccl where every rank has a GPU of its own, else host",
        MACHINE,
        choices=("auto", "nccl", "host", "mpi-gpu"),
    )
    overlap: str = option(
        "0",
        "sum gradients during backward, in at most this many segments; 0 = one Allreduce after it;"
        " auto = as many as the times of the first steps recommend",
        MACHINE,
        segments,
    )
    comm_dtype: str = option(
        "fp32",
        "dtype of communicated gradients; bf16 rounds twice",
        MACHINE,
        choices=("fp32", "bf16"),
    )
    deterministic: bool = option(
        False,
        "compute the same bits in every run, with --shards on any number of ranks; 1 CPU thread a"
        " rank by default",
        COMMON,
    )

    run: str | None = option(
        None, "name of the run, to resume it; default: time and model", COMMON, check_folder_name
    )
    runs_dir: str = option(*RUNS_DIR, RECORD)
    evaluate_every: int = option(
        1, "validate every this many epochs; 0 = only at the end", RECORD, AT_LEAST_0
    )
    validate_steps: int | None = option(
        None, "validate every this many steps, in place of epochs", RECORD, AT_LEAST_1
    )
    patience: int | None = option(
        None,
        "stop after so many validations without a smaller loss; 0 = never; default: 5 for denoise",
        RECORD,
        AT_LEAST_0,
    )
    output: str = option(
        "last",
        "test and save the network of the last step, or of the smallest validation loss",
        RECORD,
        choices=("last", "best"),
    )
    digest_every: int = option(
        100, "steps between comparisons of all ranks by digest; 0 = never", RECORD, AT_LEAST_0
    )
    checkpoint_every: str = option(
        "10m", "write a checkpoint this often: a time such as 90s, or steps", RECORD, Interval.parse
    )
    keep: int = option(2, "keep this many checkpoints", RECORD, AT_LEAST_1)
    resume: str = option(
        "auto",
        "resume a run of this name: auto = if there is one; never = fail if there is one; must ="
        " fail if there is none",
        RECORD,
        choices=("auto", "never", "must"),
    )
    time_limit: str | None = option(
        None, "save and exit with 75 within this time; default: the Slurm job's", RECORD, duration
    )
    timeout: str = option(*TIMEOUT, RECORD, duration)
    test: bool = option(True, "evaluate the test split at the end, also after a stop", RECORD)
    tensorboard: bool = option(False, "write TensorBoard events too", RECORD)
    progress: str = option(
        "auto",
        "show a progress bar, or plain = a line per epoch; auto = bar on a terminal",
        RECORD,
        choices=("auto", "bar", "plain", "none"),
    )
    dry_run: bool = option(False, "print the plan and exit", COMMON)
