"""Settings of all subcommands but ``hpctrain train``."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

from hpctrain.config.option import TRUST_CODE, Settings, check_folder_name, option
from hpctrain.config.train import CACHE_DIR, HANG_TIMEOUT, RUNS_DIR, Precision
from hpctrain.config.values import Fold, Seconds, Shares, Size

IMAGES_DRAWN = "[0, 1000]"  # on one page


@dataclass(frozen=True)
class SavedConfig(Settings):
    """Settings of all subcommands that read a trained network."""

    run: str = option("run, by name or folder, or .safetensors file", ...)
    trust_code: bool = option(TRUST_CODE, False)
    best: bool = option("use the best network of a sweep, by validation", False)
    runs_dir: str = option(*RUNS_DIR)


@dataclass(frozen=True)
class NetworkConfig(SavedConfig):
    """Settings of the subcommands that compute with a trained network on all ranks."""

    data: str | None = option("read this pack; default: the one of the training")
    split: str = option("read this split of the pack", "test")
    cache_dir: str = option(*CACHE_DIR)
    batch_size: int | None = option(
        "compute this many images at a time; default: as the run's own test, 64, on GPUs to 256",
        check="[1, inf)",
        group="Machine",
    )
    device: Literal["auto", "cpu", "cuda"] = option("compute on this device", "auto")
    threads: int | None = option(
        "CPU threads per rank; default: allowed cores / ranks", check="[1, inf)"
    )
    precision: Precision | None = option("arithmetic; default: as in training")
    hang_timeout: Seconds = option(*HANG_TIMEOUT)


@dataclass(frozen=True)
class EvaluateConfig(NetworkConfig):
    """Settings of ``hpctrain evaluate``: loss, accuracy and tables over one split."""

    loss: str | None = option(
        "compute this loss, package.module:function; default: that of the training", group="Output"
    )
    metric: str | None = option(
        "compute this metric, package.module:function; default: that of the training"
    )
    output: str | None = option("write the figures to this JSON file too")
    mistakes: int = option(
        "draw the N most confident mistakes into a .png beside --output or the weights",
        0,
        IMAGES_DRAWN,
    )


@dataclass(frozen=True)
class PredictConfig(NetworkConfig):
    """Settings of ``hpctrain predict``: a CSV of classes and probabilities."""

    images: tuple[str, ...] = option(
        "image files or folders; default: a split of --data", (), positional=True, group="Output"
    )
    output: str = option(
        "write this CSV file (- = standard output), or the folder of denoised images",
        "predictions.csv",
    )
    figure: int = option(
        "draw N random images with their answers into a .png beside --output", 0, IMAGES_DRAWN
    )


@dataclass(frozen=True)
class ExportConfig(SavedConfig):
    """Settings of ``hpctrain export``: a trained network as a file for other programs."""

    preprocess: bool = option(
        "take uint8 images (N, H, W, C) and scale them inside; default: the network's own input,"
        " floats (N, C, H, W)",
        False,
        group="Output",
    )
    batch_size: int | None = option(
        "fix the number of images that the file takes at a time; default: any", check="[1, inf)"
    )
    output: str | None = option(
        "write this new file, whose suffix decides the format: .onnx, or .pt2 of torch.export;"
        " default: model.onnx beside the weights"
    )


@dataclass(frozen=True)
class PackConfig(Settings):
    """Settings of ``hpctrain pack``: image files into one HDF5 pack."""

    source: str | None = option(
        "folder with a folder per class, the same as .tgz or .zip, a manifest (.csv), or a"
        " built-in set: flowers, digits",
        positional=True,
        group="Source",
    )
    size: Size | None = option(
        "resize to WIDTHxHEIGHT pixels; default: no resizing, all must agree", group="Images"
    )
    crop: bool = option("crop the centre instead of stretching", False)
    channels: Literal[1, 3] | None = option(
        "convert to 1 = gray or 3 = colour; default: 3 if any image has colour"
    )
    encoding: Literal["raw", "jpeg"] = option(
        "store pixels (raw) or JPEG files (jpeg), which are decoded when they are read", "raw"
    )
    split: Shares = option(
        "stratified split: shares of train,test or train,validation,test",
        Shares("0.9,0.1"),
        group="Split",
    )
    fold: Fold | None = option(
        "K/N: hold out fold K of N as test, or as validation if the source gives test"
    )
    seed: int = option("seed of split and order", 0)
    manifest: str | None = option(
        "read labels from this CSV table: path, label, optionally split and group"
    )
    output: str | None = option("write this pack; default: SOURCE.h5", group="Output")
    overwrite: bool = option("replace an existing pack, and no other file", False)
    skip_bad: bool = option("skip unreadable files instead of failing", False)
    names: bool = option("keep the name of each sample's file in the pack", True)
    jobs: int | None = option(
        "decode in this many worker processes; default: one per allowed core", check="[1, inf)"
    )
    cache_dir: str = option(*CACHE_DIR)
    check: str | None = option("verify this pack's checksums and print its table", group="Check")


@dataclass(frozen=True)
class SweepConfig(Settings):
    """Settings of ``hpctrain sweep``: many networks at once, each an ordinary run."""

    file: str = option("TOML file of the networks; or a sweep, by name or folder", ...)
    trust_code: bool = option(TRUST_CODE, False)
    run: str | None = option(
        "name of the sweep, by which it is resumed; default: that of its file",
        check=check_folder_name,
    )
    runs_dir: str = option(*RUNS_DIR)
    retry: bool = option("train failed networks again, too", False)
    ranks_per_network: int = option("ranks of each network", 1, "[1, inf)", group="Machine")
    slots: int | None = option(
        "train this many networks at once; default: cores, GPUs or tasks / ranks per network",
        check="[1, inf)",
    )
    launcher: Literal["auto", "mpirun", "srun"] = option(
        "start ranks by this; auto = srun inside a Slurm allocation, else mpirun", "auto"
    )
    prepare: bool = option(
        "write the settings for slurm/sweep.sbatch, print the numbers left to train, and exit",
        False,
    )
    results: bool = option("write results.csv from the records and exit", False, group="Output")
    dry_run: bool = option("print networks, slots and the launch line, and exit", False)


@dataclass(frozen=True)
class SuperviseConfig(Settings):
    """Settings of ``hpctrain supervise``: restart a run after failures."""

    usage: ClassVar[str] = "[options] -- COMMAND"
    command: tuple[str, ...] = option(
        "command that launches the run: mpirun -n 4 python -m hpctrain ...", ...
    )
    max_failures: int = option(
        "give up after N consecutive failures without a new checkpoint",
        3,
        "[1, inf)",
        group="Policy",
    )
    nodes: int | None = option(
        "use this many nodes of the Slurm allocation, the others are spares; default: all",
        check="[1, inf)",
    )


@dataclass(frozen=True)
class StopConfig(Settings):
    """Settings of ``hpctrain stop``: all ranks save and stop after the same step."""

    target: str = option("run or sweep, by name or folder", ...)
    runs_dir: str = option(*RUNS_DIR)


@dataclass(frozen=True)
class DoctorConfig(Settings):
    """Settings of ``hpctrain doctor``, facts about this machine with a verdict each: none."""


@dataclass(frozen=True)
class CompareConfig(Settings):
    """Settings of ``hpctrain compare``: two runs, bit by bit."""

    first: str = option("run, by name or folder", ...)
    second: str = option("other run", ...)
    runs_dir: str = option(*RUNS_DIR)
    plot: str | None = option(
        "plot how the first convolution's weights differ: .png, .svg or .pdf", group="Output"
    )


@dataclass(frozen=True)
class PlotConfig(Settings):
    """Settings of ``hpctrain plot``: accuracy and loss of runs by epoch."""

    targets: tuple[str, ...] = option("runs or sweeps, by name or folder", ...)
    runs_dir: str = option(*RUNS_DIR)
    confusion: bool = option("plot the confusion matrix of a split too", False)
    split: str = option("split of the confusion matrix", "test")
    overlay: bool = option(
        "draw all runs in the same panels, which show the last half of each curve; default: from"
        " 7 runs on",
        False,
    )
    output: str | None = option(
        "write this .png, .svg or .pdf; default: training.png in the run's folder, or --runs-dir",
        group="Output",
    )


@dataclass(frozen=True)
class WatchConfig(Settings):
    """Settings of ``hpctrain watch``: show runs as they train."""

    targets: tuple[str, ...] = option(
        "runs or sweeps, by name or folder; default: list all runs", (), positional=True
    )
    runs_dir: str = option(*RUNS_DIR)
    once: bool = option("print the runs once and exit", False, group="Display")
    web: bool = option("serve a page for the browser, on this machine alone", False)
    port: int = option("TCP port of --web; 0 = a free one", 0, "[0, 65535]", needs="--web")
