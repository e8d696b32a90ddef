"""The settings of all subcommands but train."""

from __future__ import annotations

import math
from dataclasses import dataclass

from hpctrain.config.option import option
from hpctrain.config.train import PRECISIONS, TIMEOUT

EVALUATION_ROWS = 64  # of a block, on CPUs
GPU_EVALUATION_ROWS = 256  # at most: with more of them, fewer ranks have a block
GPU_EVALUATION_VALUES = 1 << 26  # of a block: 256 MiB of float32


def evaluation_rows(device: str, image_shape: tuple[int, int, int]) -> int:
    """Rows of a block of an evaluation. Its random numbers, and the order in which it adds, belong
    to blocks: they depend on device and image, (H, W, C), and never on the ranks.
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
    encoding: str = option(
        "raw",
        "what the pack holds: raw = pixels; jpeg = JPEG files, decoded when they are read",
        "Images",
        choices=("raw", "jpeg"),
    )
    split: str = option(
        "0.9,0.1", "shares of train,test or train,validation,test, drawn per class", "Split"
    )
    seed: int = option(0, "of split and order", "Split")
    output: str | None = option(None, "the pack to write; default: the source's name .h5", "Output")
    overwrite: bool = option(False, "replace an existing pack", "Output")
    skip_bad: bool = option(False, "leave unreadable files out instead of failing", "Output")
    jobs: int | None = option(
        None,
        "worker processes, or threads of each rank under mpirun and srun; default: one for each"
        " core allowed, among ranks a fair share",
        "Output",
    )
    data_dir: str = option("data", "folder where built-in sets are kept once made", "Output")
    timeout: str = option(*TIMEOUT, "Output")
    check: str | None = option(None, "verify this pack's checksums and print its table", "Check")


@dataclass(frozen=True)
class NetworkConfig:
    """Settings of everything that uses a trained network."""

    run: str | None = option(
        None, "a run, by name or folder, or a .safetensors file", "What", positional=True
    )
    model: str | None = option(
        None,
        "the network of your own that the file names, as package.module:function: what a file"
        " names is imported only where you name it too",
        "What",
    )
    best: bool = option(False, "of a sweep: its best network, by validation", "What")
    data: str | None = option(None, "pack; default: the one it was trained on", "What")
    split: str = option("test", "split of the pack", "What")
    runs_dir: str = option("runs", "folder of all runs", "What")
    data_dir: str = option("data", "folder where built-in sets are kept once made", "What")
    batch: int | None = option(
        None,
        "rows computed at a time; default: as in the run's own test (64, on GPUs up to 256); a"
        " network that draws random numbers when asked draws them anew for each such block",
        "Machine",
    )
    device: str = option("auto", "where ranks compute", "Machine", choices=("auto", "cpu", "cuda"))
    threads: int | None = option(None, "CPU threads per rank", "Machine")
    precision: str | None = option(
        None, "arithmetic; default: as in training", "Machine", choices=PRECISIONS
    )
    timeout: str = option(*TIMEOUT, "Machine")


@dataclass(frozen=True)
class EvaluateConfig(NetworkConfig):
    """Settings of ``hpctrain evaluate``: loss, accuracy and tables over one split."""

    output: str | None = option(None, "write the figures as JSON too", "Output")


@dataclass(frozen=True)
class PredictConfig(NetworkConfig):
    """Settings of ``hpctrain predict``: a CSV of classes and probabilities."""

    split: str = option("test", "split of the pack, where no images are given", "What")
    images: tuple[str, ...] = option(
        (), "image files or folders; none: a split of --data", "What", positional=True
    )
    output: str = option(
        "predictions.csv",
        "the CSV to write (- = standard output), or the folder of restored images",
        "Output",
    )


@dataclass(frozen=True)
class SweepConfig:
    """Settings of ``hpctrain sweep``: many networks at once, each an ordinary run."""

    file: str | None = option(
        None, "TOML file of the networks; or a sweep, by name or folder", "What", positional=True
    )
    model: str | None = option(
        None,
        "of a sweep named by its folder: the networks of your own that its file names, as"
        " package.module:function,...",
        "What",
    )
    name: str | None = option(
        None,
        "name of the sweep, by which it is continued; default: the newest one of this file that is"
        " not finished, else a new one, by its time",
        "What",
    )
    runs_dir: str = option("runs", "folder of all runs", "What")
    retry: bool = option(False, "take up failed networks again, too", "What")
    prune: bool = option(
        False,
        "end weak networks early: at 1, 2, 4, ... validations only the better half goes on",
        "What",
    )
    ranks_per_network: int = option(1, "ranks of each network", "Machine")
    slots: int | None = option(
        None,
        "networks at once; default: cores, GPUs or tasks of the allocation / ranks per network",
        "Machine",
    )
    launcher: str = option(
        "auto",
        "how ranks are started; auto = srun inside a Slurm allocation, else mpirun",
        "Machine",
        choices=("auto", "mpirun", "srun"),
    )
    background: bool = option(False, "go on without this terminal", "Machine")
    slurm: bool = option(False, "submit a Slurm job array, a task for each network", "Machine")
    sbatch: str = option(
        "", "of the job array: more words for sbatch, such as '-t 2:00:00'", "Machine"
    )
    progress: str = option(
        "auto",
        "live on a terminal, plain = a line per network, none",
        "Output",
        choices=("auto", "live", "plain", "none"),
    )
    results: bool = option(False, "write results.csv from the records, launch nothing", "Output")
    dry_run: bool = option(False, "print networks, slots and the launch line, and stop", "Output")


@dataclass(frozen=True)
class StopConfig:
    """Settings of ``hpctrain stop``: all ranks end after the same step, saved."""

    target: str | None = option(
        None, "a run or a sweep, by name or folder", "What", positional=True
    )
    runs_dir: str = option("runs", "folder of all runs", "What")


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
class PlotConfig:
    """Settings of ``hpctrain plot``: accuracy and loss of runs by epoch."""

    targets: tuple[str, ...] = option(
        (), "runs or sweeps, by name or folder", "What", positional=True
    )
    runs_dir: str = option("runs", "folder of all runs", "What")
    confusion: bool = option(False, "a second figure: the confusion matrix of a split", "What")
    split: str = option("test", "split of the confusion matrix", "What")
    output: str | None = option(
        None,
        "the figure to write (.png, .svg or .pdf); default: training.png in the folder of the run"
        " or sweep, for several in that of all runs",
        "Output",
    )


@dataclass(frozen=True)
class DoctorConfig:
    """Settings of ``hpctrain doctor``: what was found on this machine, each with a verdict."""

    mib: int = option(64, "largest message of the bandwidth test, in MiB", "Test")


@dataclass(frozen=True)
class BenchConfig:
    """Settings of ``hpctrain bench``: hpctrain against the communication-free limit and DDP."""

    case: str = option(
        "digits",
        "measure training of digits or resnet50, reading (data) or allreduce",
        "Case",
        choices=("digits", "resnet50", "data", "allreduce"),
        positional=True,
    )
    data: str | None = option(
        None, "pack of pixels to read; default: digits, or made images of 100x100x3", "Case"
    )
    data_dir: str = option("data", "folder where built-in sets are kept once made", "Case")
    ranks: int = option(2, "ranks of 1 CPU thread in each job", "Case")
    rounds: int = option(3, "rounds in which each contestant runs once; medians count", "Case")


@dataclass(frozen=True)
class WatchConfig:
    """Settings of ``hpctrain watch``: runs as they learn."""

    targets: tuple[str, ...] = option(
        (), "runs or sweeps, by name or folder", "What", positional=True
    )
    runs_dir: str = option("runs", "folder of all runs", "What")
    once: bool = option(False, "print a line for each run and end", "Display")
    web: bool = option(False, "a page for the browser, on this machine alone", "Display")
    port: int = option(0, "of that page; 0 = a free one", "Display")
