"""Settings of the subcommands that neither train nor use a trained network."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

from hpctrain.config.data import CACHE_DIR
from hpctrain.config.option import (
    AT_LEAST_1,
    TRUST_CODE,
    Bounds,
    check_channels,
    check_folder_name,
    fold_number,
    image_size,
    option,
    split_shares,
)
from hpctrain.config.train import RUNS_DIR

EVALUATION_ROWS = 64  # samples of a block, on CPUs
GPU_EVALUATION_ROWS = 256  # at most: with larger blocks, fewer ranks have one
GPU_EVALUATION_VALUES = 1 << 26  # values of a block: 256 MiB of float32


def evaluation_rows(device: str, image_shape: tuple[int, int, int]) -> int:
    """Return the number of samples in a block of an evaluation.

    Random numbers and the order of summation belong to blocks, so that they depend on the device
    and the image shape, (H, W, C), but never on the ranks.
    """
    most = GPU_EVALUATION_VALUES // math.prod(image_shape)
    return (
        EVALUATION_ROWS if device == "cpu" else max(EVALUATION_ROWS, min(GPU_EVALUATION_ROWS, most))
    )


@dataclass(frozen=True)
class PackConfig:
    """Settings of ``hpctrain pack``: image files into one HDF5 pack."""

    source: str | None = option(
        None,
        "folder with a folder per class, the same as .tgz or .zip, a manifest (.csv), or a built-in"
        " set: flowers, digits",
        "Source",
        positional=True,
    )
    size: str | None = option(
        None,
        "resize to WIDTHxHEIGHT pixels; default: no resizing, all must agree",
        "Images",
        image_size,
    )
    crop: bool = option(False, "crop the centre instead of stretching", "Images")
    channels: int | None = option(
        None,
        "convert to 1 = gray or 3 = colour; default: 3 if any image has colour",
        "Images",
        check_channels,
    )
    encoding: str = option(
        "raw",
        "store pixels (raw) or JPEG files (jpeg), which are decoded when they are read",
        "Images",
        choices=("raw", "jpeg"),
    )
    split: str = option(
        "0.9,0.1",
        "stratified split: shares of train,test or train,validation,test",
        "Split",
        split_shares,
    )
    fold: str | None = option(
        None,
        "K/N: hold out fold K of N as test, or as validation if the source gives test",
        "Split",
        fold_number,
    )
    seed: int = option(0, "seed of split and order", "Split")
    manifest: str | None = option(
        None,
        "read labels from this CSV table: path, label, optionally split and group",
        "Split",
    )
    output: str | None = option(None, "write this pack; default: SOURCE.h5", "Output")
    overwrite: bool = option(False, "replace an existing pack, and no other file", "Output")
    skip_bad: bool = option(False, "skip unreadable files instead of failing", "Output")
    names: bool = option(True, "keep the name of each sample's file in the pack", "Output")
    jobs: int | None = option(
        None,
        "decode in this many worker processes; default: one per allowed core",
        "Output",
        AT_LEAST_1,
    )
    cache_dir: str = option(*CACHE_DIR, "Output")
    check: str | None = option(None, "verify this pack's checksums and print its table", "Check")


@dataclass(frozen=True)
class SweepConfig:
    """Settings of ``hpctrain sweep``: many networks at once, each an ordinary run."""

    file: str | None = option(
        None, "TOML file of the networks; or a sweep, by name or folder", "What", positional=True
    )
    trust_code: bool = option(False, TRUST_CODE, "What")
    run: str | None = option(
        None,
        "name of the sweep, by which it is resumed; default: the newest unfinished one of this"
        " file, else the time",
        "What",
        check_folder_name,
    )
    runs_dir: str = option(*RUNS_DIR, "What")
    retry: bool = option(False, "train failed networks again, too", "What")
    ranks_per_network: int = option(1, "ranks of each network", "Machine", AT_LEAST_1)
    slots: int | None = option(
        None,
        "train this many networks at once; default: cores, GPUs or tasks of the allocation / ranks"
        " per network",
        "Machine",
        AT_LEAST_1,
    )
    launcher: str = option(
        "auto",
        "start ranks by this; auto = srun inside a Slurm allocation, else mpirun",
        "Machine",
        choices=("auto", "mpirun", "srun"),
    )
    prepare: bool = option(
        False,
        "write the settings of all networks for slurm/sweep.sbatch, print the numbers of those left"
        " to train, and exit",
        "Machine",
    )
    progress: str = option(
        "auto",
        "show a live table, or plain = a line per network; auto = live on a terminal",
        "Output",
        choices=("auto", "live", "plain", "none"),
    )
    results: bool = option(False, "write results.csv from the records and exit", "Output")
    dry_run: bool = option(False, "print networks, slots and the launch line, and exit", "Output")


@dataclass(frozen=True)
class SuperviseConfig:
    """Settings of ``hpctrain supervise``: restart a run after failures."""

    usage: ClassVar[str] = "[options] -- COMMAND"
    command: tuple[str, ...] = option(
        (),
        "command that launches the run: mpirun -n 4 python -m hpctrain ...",
        "What",
        positional=True,
    )
    max_failures: int = option(
        3,
        "give up after N consecutive failures without a new checkpoint",
        "Policy",
        AT_LEAST_1,
    )
    nodes: int | None = option(
        None,
        "use this many nodes of the Slurm allocation, the others are spares; default: all",
        "Policy",
        AT_LEAST_1,
    )


@dataclass(frozen=True)
class StopConfig:
    """Settings of ``hpctrain stop``: all ranks save and stop after the same step."""

    target: str | None = option(None, "run or sweep, by name or folder", "What", positional=True)
    runs_dir: str = option(*RUNS_DIR, "What")


@dataclass(frozen=True)
class DoctorConfig:
    """Settings of ``hpctrain doctor``, facts about this machine with a verdict each: none."""


@dataclass(frozen=True)
class CompareConfig:
    """Settings of ``hpctrain compare``: two runs, bit by bit."""

    first: str | None = option(None, "run, by name or folder", "What", positional=True)
    second: str | None = option(None, "other run", "What", positional=True)
    runs_dir: str = option(*RUNS_DIR, "What")
    plot: str | None = option(
        None, "plot one tensor's differences to this .png, .svg or .pdf", "Output"
    )
    tensor: str | None = option(
        None, "name of the tensor to plot; default: the first convolution's weights", "Output"
    )


@dataclass(frozen=True)
class PlotConfig:
    """Settings of ``hpctrain plot``: accuracy and loss of runs by epoch."""

    targets: tuple[str, ...] = option(
        (), "runs or sweeps, by name or folder", "What", positional=True
    )
    runs_dir: str = option(*RUNS_DIR, "What")
    confusion: bool = option(False, "plot the confusion matrix of a split too", "What")
    split: str = option("test", "split of the confusion matrix", "What")
    output: str | None = option(
        None,
        "write this .png, .svg or .pdf; default: training.png in the folder of the run or sweep,"
        " of several in --runs-dir",
        "Output",
    )


@dataclass(frozen=True)
class WatchConfig:
    """Settings of ``hpctrain watch``: show runs as they train."""

    targets: tuple[str, ...] = option(
        (), "runs or sweeps, by name or folder; default: list all runs", "What", positional=True
    )
    runs_dir: str = option(*RUNS_DIR, "What")
    once: bool = option(False, "print a line for each run and exit", "Display")
    web: bool = option(False, "serve a page for the browser, on this machine alone", "Display")
    port: int = option(0, "TCP port of --web; 0 = a free one", "Display", Bounds(0, 65535, "[]"))
