"""What the user asks for: one flat frozen dataclass per subcommand.

A dataclass here is the only source of a subcommand's flags, TOML keys, defaults and help
(``cli.py`` builds the parser from it). Nothing here depends on ranks, the machine or the
data: ``plan.py`` resolves that. A default of None means "decided by the plan"; the help says how.
"""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass
from typing import Any


def option(
    default: Any, help: str, group: str, choices: tuple[str, ...] = (), positional: bool = False
) -> Any:
    """A dataclass field that is also a flag: its help, the group it is listed in, its choices."""
    metadata = {"help": help, "group": group, "choices": choices, "positional": positional}
    return dataclasses.field(default=default, metadata=metadata)


DEFAULT_LEARNING_RATES = {"sgdm": 0.01, "adam": 0.001, "adamw": 0.001}
DATA, NETWORK, BATCH = "Data", "Network", "Mini-batch"
OPTIMIZER, MACHINE, RECORD = "Optimizer", "Machine", "Run and records"


@dataclass(frozen=True)
class Config:
    """All settings of one training run."""

    data: str = option("digits", "a pack, or a built-in set by name: digits, flowers", DATA)
    data_dir: str = option("data", "folder where built-in sets are kept once made", DATA)
    normalize: str = option(
        "unit",
        "input scaling: unit = [0, 1]; pack = by the pack's mean and std; imagenet",
        DATA,
        choices=("unit", "pack", "imagenet"),
    )
    flip: bool = option(False, "augment by random horizontal flips", DATA)
    shift: int = option(0, "augment by random shifts of up to this many pixels in x and y", DATA)

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
        None, "share of the shards by rank, such as 3,1; without --shards it makes 4 of them", BATCH
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
        "fp32", "arithmetic of forward and backward", MACHINE, choices=("fp32", "bf16")
    )
    channels_last: bool = option(True, "memory format NHWC (faster) instead of NCHW", MACHINE)
    deterministic: bool = option(
        False,
        "the same bits in every run, and with --shards on any number of ranks; 1 CPU thread a rank"
        " unless --threads says otherwise",
        MACHINE,
    )

    run: str | None = option(
        None, "name of the run; default: time and model. A name is used once", RECORD
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
    tensorboard: bool = option(False, "write TensorBoard events too", RECORD)
    progress: str = option(
        "auto",
        "bar on a terminal, plain = a line per epoch, none",
        RECORD,
        choices=("auto", "bar", "plain", "none"),
    )
    dry_run: bool = option(False, "print the plan and stop", RECORD)


@dataclass(frozen=True)
class PackConfig:
    """Settings of ``hpctrain pack``: image files into one HDF5 pack."""

    source: str | None = option(
        None,
        "folder with a folder per class, the same as .tgz/.zip, idx files (a folder, or the"
        " image file), .npz, or by name: flowers, digits",
        "Source",
        positional=True,
    )
    size: str | None = option(
        None, "WIDTHxHEIGHT in pixels; default: as they are, all must agree", "Images"
    )
    crop: bool = option(False, "keep proportions and cut the centre; default: stretch", "Images")
    channels: int | None = option(
        None, "1 = gray, 3 = colour; default: 3 if any image has colour", "Images"
    )
    split: str = option(
        "0.9,0.1", "shares of train,test or train,validation,test, drawn per class", "Split"
    )
    seed: int = option(0, "of split and order", "Split")
    output: str | None = option(None, "the pack to write; default: the source's name .h5", "Output")
    overwrite: bool = option(False, "replace an existing pack", "Output")
    skip_bad: bool = option(False, "leave unreadable files out instead of failing", "Output")
    jobs: int | None = option(None, "worker processes; default: all cores allowed", "Output")
    data_dir: str = option("data", "folder where built-in sets are kept once made", "Output")
    check: str | None = option(None, "verify this pack's checksums and print its table", "Check")


@dataclass(frozen=True)
class EvaluateConfig:
    """Settings of ``hpctrain evaluate``: loss, accuracy and tables over one split."""

    model: str | None = option(
        None, "a run, by name or folder, or a .safetensors file", "What", positional=True
    )
    data: str | None = option(None, "pack; default: the one it was trained on", "What")
    split: str = option("test", "split of the pack", "What")
    runs_dir: str = option("runs", "folder of all runs", "What")
    data_dir: str = option("data", "folder where built-in sets are kept once made", "What")
    output: str | None = option(None, "write the figures as JSON too", "Output")
    batch: int = option(256, "rows computed at a time", "Machine")
    device: str = option("auto", "where ranks compute", "Machine", choices=("auto", "cpu", "cuda"))
    threads: int | None = option(None, "CPU threads per rank", "Machine")
    precision: str | None = option(
        None, "arithmetic; default: as in training", "Machine", choices=("fp32", "bf16")
    )


@dataclass(frozen=True)
class PredictConfig:
    """Settings of ``hpctrain predict``: a CSV of classes and probabilities."""

    model: str | None = option(
        None, "a run, by name or folder, or a .safetensors file", "What", positional=True
    )
    images: tuple[str, ...] = option(
        (), "image files or folders; none: a split of --data", "What", positional=True
    )
    data: str | None = option(None, "pack; default: the one it was trained on", "What")
    split: str = option("test", "split of the pack, where no images are given", "What")
    runs_dir: str = option("runs", "folder of all runs", "What")
    data_dir: str = option("data", "folder where built-in sets are kept once made", "What")
    output: str = option(
        "predictions.csv",
        "the CSV to write (- = standard output), or the folder of restored images",
        "Output",
    )
    batch: int = option(256, "rows computed at a time", "Machine")
    device: str = option("auto", "where ranks compute", "Machine", choices=("auto", "cpu", "cuda"))
    threads: int | None = option(None, "CPU threads per rank", "Machine")
    precision: str | None = option(
        None, "arithmetic; default: as in training", "Machine", choices=("fp32", "bf16")
    )


@dataclass(frozen=True)
class CompareConfig:
    """Settings of ``hpctrain compare``: two runs, bit by bit."""

    first: str | None = option(None, "a run, by name or folder", "What", positional=True)
    second: str | None = option(None, "another", "What", positional=True)
    runs_dir: str = option("runs", "folder of all runs", "What")
    plot: str | None = option(
        None, "write a bar plot of one tensor's differences (.png, .svg or .pdf)", "Output"
    )
    tensor: str | None = option(None, "its name; default: the first convolution's", "Output")


@dataclass(frozen=True)
class DoctorConfig:
    """Settings of ``hpctrain doctor``: what was found on this machine, each with a verdict."""

    mib: int = option(64, "largest message of the bandwidth test, in MiB", "Test")


@dataclass(frozen=True)
class BenchConfig:
    """Settings of ``hpctrain bench``: hpctrain, its limit and PyTorch DDP, in turn."""

    case: str = option(
        "digits",
        "what is measured",
        "Case",
        choices=("digits", "resnet50", "tree"),
        positional=True,
    )
    data: str | None = option(None, "pack; default: digits, or a made one of 100x100x3", "Case")
    data_dir: str = option("data", "folder where built-in sets are kept once made", "Case")
    rounds: int = option(3, "interleaved rounds; the median counts", "Case")


def to_toml(config: Any) -> str:
    """All settings as TOML; one that is left to the plan stands as a comment."""
    lines = []
    for field in dataclasses.fields(config):
        value = getattr(config, field.name)
        if value is None:
            lines.append(f"# {field.name}: not set, decided by the plan")
        else:
            lines.append(f"{field.name} = {json.dumps(value)}")
    return "\n".join(lines) + "\n"
