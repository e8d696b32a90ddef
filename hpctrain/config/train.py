"""Settings of ``hpctrain train``."""

from __future__ import annotations

from dataclasses import dataclass

from hpctrain.config.data import COMMON, DataSettings
from hpctrain.config.interval import checkpoint_interval, validation_interval
from hpctrain.config.network import NetworkSettings
from hpctrain.config.optimizer import OptimizerSettings
from hpctrain.config.option import (
    AT_LEAST_0,
    AT_LEAST_1,
    Bounds,
    check_folder_name,
    duration,
    option,
    worker_loads,
)

PRECISIONS = ("default", "fp32", "tf32", "bf16")
BATCH, MACHINE, RECORD = "Batches", "Machine", "Run, checkpoints and records"
RUNS_DIR = ("runs", "keep all runs in this folder")
MOST_SEGMENTS = 64
HANG_TIMEOUT = ("30m", "abort all ranks after so long without progress")


@dataclass(frozen=True)
class Config(OptimizerSettings, NetworkSettings, DataSettings):
    """All settings of one training run."""

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
        "batch size per rank, or with --shards per shard, instead of --batch-size",
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
        "assign shards to ranks in these proportions, such as 3,1 (default of --shards: their sum)",
        BATCH,
        worker_loads,
    )
    seed: int = option(0, "seed of weights, order, augmentation and dropout", COMMON)

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
    cuda_graphs: bool = option(
        False, "capture forward and backward as CUDA graphs, on GPUs", MACHINE
    )
    reduce: str = option(
        "auto",
        "all-reduce GPU messages by nccl; host = through pinned host memory; mpi-gpu = by GPU-aware"
        " MPI; auto = nccl where every rank has a GPU of its own, else host",
        MACHINE,
        choices=("auto", "nccl", "host", "mpi-gpu"),
    )
    overlap: int = option(
        0,
        "sum gradients during backward, in at most this many segments; 0 = one Allreduce after it",
        MACHINE,
        Bounds(0, MOST_SEGMENTS, "[]"),
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
    validate_every: str = option(
        "1epoch",
        "validate this often: epochs or steps, such as 2epochs or 500steps; 0 = only at the end",
        RECORD,
        validation_interval,
    )
    metric: str | None = option(
        None,
        "evaluate by your own function, too: package.module:function, called with outputs and"
        " targets; it returns one value a sample, or a dict of these",
        RECORD,
    )
    patience: int | None = option(
        None,
        "stop after so many validations without a smaller loss; 0 = never; default: 5 for denoise",
        RECORD,
        AT_LEAST_0,
    )
    final: str = option(
        "last",
        "test and save the network of the last step, of the smallest validation loss (best), or"
        " the average of --ema, which is then validated too",
        RECORD,
        choices=("last", "best", "ema"),
    )
    checkpoint_every: str = option(
        "10m",
        "write a checkpoint this often: a time, epochs or steps, such as 90s, 2epochs or 500steps;"
        " 0 = only at the end",
        RECORD,
        checkpoint_interval,
    )
    keep_checkpoints: int = option(2, "keep this many checkpoints", RECORD, AT_LEAST_1)
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
    hang_timeout: str = option(*HANG_TIMEOUT, RECORD, duration)
    test: bool = option(True, "evaluate the test split at the end, also after a stop", RECORD)
    tensorboard: bool = option(False, "write TensorBoard events too", RECORD)
    progress: str = option(
        "auto",
        "show a progress bar, or plain = a line per epoch; auto = bar on a terminal",
        RECORD,
        choices=("auto", "bar", "plain", "none"),
    )
    dry_run: bool = option(False, "print the plan and exit", COMMON)
