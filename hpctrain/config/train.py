"""All settings of ``hpctrain train``."""

from __future__ import annotations

from dataclasses import dataclass

from hpctrain.config.option import option

DEFAULT_LEARNING_RATES = {"sgdm": 0.01, "adam": 0.001, "adamw": 0.001}
PRECISIONS = ("default", "fp32", "tf32", "bf16")
DATA, NETWORK, BATCH = "Data", "Network", "Mini-batch"
OPTIMIZER, MACHINE, RECORD = "Optimizer", "Machine", "Run and records"
TIMEOUT = ("30m", "end all ranks where nothing new happens for so long")  # of all that ranks share


@dataclass(frozen=True)
class Config:
    """All settings of one training run."""

    data: str = option(
        "digits",
        "a pack, a built-in set by name (digits, flowers), or with --images and --labels any HDF5"
        " file",
        DATA,
    )
    data_dir: str = option("data", "folder where built-in sets are kept once made", DATA)
    normalize: str = option(
        "unit",
        "input scaling: unit = [0, 1]; pack = by the pack's mean and std; imagenet",
        DATA,
        choices=("unit", "pack", "imagenet"),
    )
    flip: bool = option(False, "augment by random horizontal flips", DATA)
    shift: int = option(0, "augment by random shifts of up to this many pixels in x and y", DATA)
    random_crop: float = option(
        0.0,
        "augment by a random part of each image of at least this share of its area, such as 0.08,"
        " at ratios from 3/4 to 4/3; for packs of JPEG files (0 = whole images)",
        DATA,
    )

    images: str | None = option(
        None, "data set of the images in an HDF5 file that is no pack, such as /train/images", DATA
    )
    labels: str | None = option(None, "data set of their labels, whole numbers 0 ... K-1", DATA)
    layout: str | None = option(
        None,
        "how --images lie; default: NHWC for 4 dimensions, NHW for 3",
        DATA,
        choices=("NHWC", "NCHW", "NHW"),
    )
    split: str | None = option(
        None,
        "of such a file: shares of train,test or train,validation,test, drawn by --seed; default"
        " 0.9,0.1",
        DATA,
    )
    shuffle: str | None = option(
        None,
        "order of the rows: partition = each shard's own, anew every epoch; global = dealt anew to"
        " all shards; blocks = runs of 4 MiB, shuffled within a window, for slow disks; default"
        " partition, for images stored in chunks blocks",
        DATA,
        choices=("partition", "global", "blocks"),
    )
    read_buffer: str = option(
        "256M", "memory of a rank for rows; what fits is read once and kept", DATA
    )

    stage: str | None = option(
        None, "folder on each host's own disk to copy the host's part of the pack to first", DATA
    )
    verify: str = option(
        "auto",
        "when the pack's checksums are compared: start = before the first step; first-touch = a"
        " block when it is first read; never; auto = start up to 1 GiB, else"
        " first-touch; with --skip-bad first-touch",
        DATA,
        choices=("auto", "start", "first-touch", "never"),
    )
    skip_bad: bool = option(
        False, "give rows of a pack that are damaged or no image no weight, instead of ending", DATA
    )

    task: str = option(
        "classify",
        "what is learnt: the class of an image, or an image without its noise",
        NETWORK,
        choices=("classify", "denoise"),
    )
    noise: str = option(
        "salt-pepper", "denoise: kind of noise", NETWORK, choices=("salt-pepper", "gaussian")
    )
    noise_level: float = option(
        0.1, "denoise: share of values replaced, or standard deviation on [0, 1]", NETWORK
    )
    model: str = option(
        "auto",
        "digits, resnet18, resnet34, resnet50, autoencoder or package.module:function; auto ="
        " digits for images of 28x28x1, else resnet50; autoencoder for denoise",
        NETWORK,
    )
    init: str | None = option(
        None,
        "start from these weights: a run, or a .safetensors file (own or torchvision's names)",
        NETWORK,
    )
    small_stem: bool = option(
        False, "ResNet: 3x3 first convolution without pooling, for small images", NETWORK
    )
    batch_norm: str = option(
        "exact",
        "running statistics from: exact = pooled batch statistics; running = each shard's own"
        " running state, pooled; average = weighted average; local = not combined, rank 0's are"
        " saved",
        NETWORK,
        choices=("exact", "running", "average", "local"),
    )
    local_buffers: bool = option(
        False, "allow other buffers that change in training; each rank keeps its own", NETWORK
    )

    epochs: int | None = option(
        None, "default: 20 for the digits network, 5 for denoise, else 100", BATCH
    )
    batch_size: int | None = option(
        None,
        "mini-batch over all ranks; default 128 (denoise 500), on GPUs as many per rank (or shard)",
        BATCH,
    )
    batch_per_rank: int | None = option(
        None, "mini-batch as a number per rank instead; per shard where --shards is given", BATCH
    )
    shards: int | None = option(
        None, "logical workers; default one per rank, more accumulate gradients", BATCH
    )
    worker_load: str | None = option(
        None,
        "share of the shards by rank, such as 3,1 (without --shards it makes 4 of them); auto ="
        " measured, shards move between epochs (without --shards 4 a rank)",
        BATCH,
    )
    seed: int = option(0, "of weights, order, augmentation and dropout", BATCH)

    optimizer: str | None = option(
        None,
        "update rule; default sgdm, for denoise adam",
        OPTIMIZER,
        choices=("sgdm", "adam", "adamw"),
    )
    lr: float | None = option(
        None, "learning rate; default 0.01 for sgdm, 0.001 for adam and adamw", OPTIMIZER
    )
    lr_scaling: str = option(
        "none",
        "of the learning rate with the mini-batch, against that of one rank (--batch-per-rank, else"
        " the default): linear for sgdm, sqrt for adam",
        OPTIMIZER,
        choices=("none", "linear", "sqrt"),
    )
    warmup_epochs: float | None = option(
        None, "epochs in which the learning rate rises; default 5 where it was scaled", OPTIMIZER
    )
    momentum: float = option(0.9, "of sgdm", OPTIMIZER)
    weight_decay: float = option(0.0, "L2 penalty (sgdm, adam) or decoupled (adamw)", OPTIMIZER)
    schedule: str = option(
        "constant",
        "learning rate over the run",
        OPTIMIZER,
        choices=("constant", "cosine", "step"),
    )
    step_epochs: int = option(30, "schedule step: epochs between drops", OPTIMIZER)
    step_factor: float = option(0.1, "schedule step: factor of each drop", OPTIMIZER)
    clip_norm: float | None = option(None, "largest L2 norm of the gradient", OPTIMIZER)
    label_smoothing: float = option(0.0, "of the cross-entropy loss, in [0, 1)", OPTIMIZER)

    device: str = option("auto", "where ranks compute", MACHINE, choices=("auto", "cpu", "cuda"))
    threads: int | None = option(
        None, "CPU threads per rank; default: cores allowed / ranks of the host", MACHINE
    )
    precision: str = option(
        "default",
        "arithmetic of forward and backward: default = torch's default, float32 with TF32 in"
        " convolutions on GPUs; fp32 = no TF32; tf32 = TF32 in convolutions and matrix products;"
        " bf16 = autocast to bfloat16. A resumed run keeps its own",
        MACHINE,
        choices=PRECISIONS,
    )
    channels_last: bool = option(True, "memory format NHWC (faster) instead of NCHW", MACHINE)
    compile: bool = option(
        False, "let torch.compile make the kernels, which takes a while at the start", MACHINE
    )
    graphs: bool = option(
        False, "GPUs: record forward and backward as CUDA graphs, and launch them at once", MACHINE
    )
    reduce: str = option(
        "auto",
        "how messages of GPUs travel: nccl; host = through pinned host memory; mpi-gpu = device"
        " memory is given to MPI, which must be GPU-aware; auto = nccl where every rank has a GPU"
        " of its own, else host",
        MACHINE,
        choices=("auto", "nccl", "host", "mpi-gpu"),
    )
    overlap: str = option(
        "0",
        "gradient segments that are summed while backward still runs, at most; 0 = one Allreduce a"
        " step; auto = by the times of the first steps",
        MACHINE,
    )
    wire: str = option(
        "fp32",
        "type in which gradients travel: fp32, or bf16 for half the bytes, rounded twice",
        MACHINE,
        choices=("fp32", "bf16"),
    )
    deterministic: bool = option(
        False,
        "the same bits in every run, and with --shards on any number of ranks; 1 CPU thread a rank"
        " unless --threads says otherwise",
        MACHINE,
    )

    run: str | None = option(
        None, "name of the run, by which it is continued; default: time and model", RECORD
    )
    runs_dir: str = option("runs", "folder of all runs", RECORD)
    evaluate_every: int = option(1, "epochs between validations (0 = only at the end)", RECORD)
    validate_steps: int | None = option(
        None, "steps between validations, instead of epochs", RECORD
    )
    patience: int | None = option(
        None,
        "end after this many validations without a smaller loss (0 = never); default 5 for denoise",
        RECORD,
    )
    output: str = option(
        "last",
        "network that is tested and saved: of the last step, or of the smallest validation loss",
        RECORD,
        choices=("last", "best"),
    )
    digest_every: int = option(
        100, "steps between comparisons of all ranks' weights by digest (0 = never)", RECORD
    )
    checkpoint_every: str = option(
        "10m", "between checkpoints: a time, such as 10m or 90s, or a number of steps", RECORD
    )
    keep: int = option(2, "checkpoints that are kept", RECORD)
    resume: str = option(
        "auto",
        "a run of this name that exists: auto = go on; never = refuse; must = refuse anything else",
        RECORD,
        choices=("auto", "never", "must"),
    )
    time_limit: str | None = option(
        None, "leave in time, saved, with exit code 75; default: the end of the Slurm job", RECORD
    )
    timeout: str = option(*TIMEOUT, RECORD)
    test: bool = option(True, "evaluate the test split at the end, also after a stop", RECORD)
    tensorboard: bool = option(False, "write TensorBoard events too", RECORD)
    progress: str = option(
        "auto",
        "bar on a terminal, plain = a line per epoch, none",
        RECORD,
        choices=("auto", "bar", "plain", "none"),
    )
    dry_run: bool = option(False, "print the plan and stop", RECORD)
