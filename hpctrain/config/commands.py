"""Settings of all subcommands but ``hpctrain train``."""

from __future__ import annotations

from typing import ClassVar, Literal

from hpctrain.config.option import TRUST_CODE, Settings, check_folder_name, option
from hpctrain.config.train import CACHE_DIR, Layout, OnRanks, Precision, Runs, check_texts
from hpctrain.config.values import DIVISORS, Fold, Names, NoData, ShapesTask, Shares, Size


class SavedConfig(Runs):
    """Settings of all subcommands that read a trained network."""

    run: str = option("run, by name or folder, or .safetensors file", ...)
    trust_code: bool = option(TRUST_CODE, False)
    best: bool = option("best network of a sweep, by validation", False)


class NetworkConfig(SavedConfig, OnRanks):
    """Settings of the subcommands that compute with a trained network on all ranks."""

    data: str | None = option("pack; default: that of the training")
    split: str = option("split of the pack", "test")
    batch_size: int | None = option(
        "images at a time; default: as the run's own test, 64, on GPUs to 256", check="[1, inf)"
    )
    precision: Precision | None = option("arithmetic; default: as in training")


class EvaluateConfig(NetworkConfig):
    """Settings of ``hpctrain evaluate``: loss, accuracy and tables over one split."""

    loss: str | None = option("loss, module:function; default: as in training", group="Output")
    metric: tuple[str, ...] = option(
        "metric, module:function; default: as in training", (), check_texts
    )
    output: str | None = option("write the figures to this JSON file, too")
    mistakes: int = option(
        "draw the N most confident mistakes, or of values the largest errors, .png beside --output"
        " or weights",
        0,
        "[0, 1000]",
    )
    plot: str | None = option(
        "plot ROC and precision by class, or predicted by true values: .png, .svg or .pdf"
    )


class PredictConfig(NetworkConfig):
    """Settings of ``hpctrain predict``: a table of classes and probabilities, or of values."""

    files: tuple[str, ...] = option(
        "image files, HDF5 files, folders or patterns; default: a split of --data",
        (),
        positional=True,
        group="Output",
    )
    images: str | None = option(
        "dataset of FILES that are HDF5; default: that of the training", needs="files"
    )
    layout: Layout | None = option(
        "axes of HDF5 images, such as NCHW; default: those of the training", needs="files"
    )
    output: str = option(
        "CSV or HDF5 file (.h5) of answers (- = stdout), or folder of restored images",
        "predictions.csv",
    )
    figure: int = option("draw N random images with answers, .png beside --output", 0, "[0, 1000]")
    skip_bad: bool = option("leave out unusable images, exit code 0; default: name them, 1", False)


class ExportConfig(SavedConfig):
    """Settings of ``hpctrain export``: a trained network as a file for other programs."""

    preprocess: bool = option(
        "take images as stored, such as uint8 (N, H, W, C); default: the network's floats"
        " (N, C, H, W)",
        False,
    )
    batch_size: int | None = option("images that the file takes; default: any", check="[1, inf)")
    output: str | None = option(
        "new file, .onnx or .pt2 (torch.export); default: model.onnx beside the weights"
    )


class PackConfig(Settings):
    """Settings of ``hpctrain pack``: image files into one HDF5 pack."""

    source: str | None = option(
        "folder of class folders, archive of it (.tar, .tgz, .zip), table (.csv, .tsv, .txt), or"
        " built-in set: digits, shapes, flowers",
        positional=True,
    )
    task: ShapesTask | None = option(
        "what is learned of the shapes, by which they have a pack each; default: classify"
    )
    size: Size | None = option("resize to WIDTHxHEIGHT pixels; default: must agree", group="Images")
    crop: bool = option("crop the centre instead of stretching", False)
    tiles: Size | None = option("cut images into tiles of WIDTHxHEIGHT pixels, without resizing")
    overlap: int = option("pixels that neighbouring tiles share", 0, "[0, inf)", needs="--tiles")
    channels: Literal[1, 3] | None = option(
        "1 = gray, 3 = colour; default: 3 if any has colour, or as many as all files have"
    )
    pages: Literal["channels"] | None = option(
        "make the pages of a TIFF channels of one image; default: refuse several pages"
    )
    dtype: Literal["auto", "uint8"] = option(
        "type of values: auto = that of the files, uint8 = reduce 16 bits to 8", "auto"
    )
    max_value: float | None = option(
        "stored value that becomes 1.0; default: 255, of 16-bit files 65535", check=DIVISORS
    )
    nodata: NoData | None = option(
        "stored value that marks missing data, or nan; left out of mean and deviation"
    )
    background: Literal["white", "black"] = option("ground behind transparent pixels", "white")
    encoding: Literal["raw", "jpeg"] = option("pixels or JPEG files, decoded when read", "raw")
    split: Shares = option(
        "stratified shares of train,test or train,validation,test", Shares("0.9,0.1"), group="Split"
    )
    fold: Fold | None = option("hold out fold K of N as test, or validation if the source has test")
    seed: int = option("seed of split and order", 0)
    manifest: str | None = option(
        "targets: CSV table of path, label or labels (a;b), optionally unknown, split, group"
    )
    targets: Names | None = option("targets: columns of numbers of the table, as in age,mass")
    output: str | None = option("new pack; default: SOURCE.h5", group="Output")
    overwrite: bool = option("replace an existing pack, no other file", False)
    skip_bad: bool = option("skip unreadable files instead of failing", False)
    names: bool = option("keep the file names of samples", True)
    jobs: int | None = option("decoding processes; default: one per allowed core", check="[1, inf)")
    cache_dir: str = option(*CACHE_DIR)
    check: str | None = option("verify this pack's checksums, print its table")


class SweepConfig(Runs):
    """Settings of ``hpctrain sweep``: many networks at once, each an ordinary run."""

    file: str = option("TOML file of the networks; or a sweep, by name or folder", ...)
    trust_code: bool = option(TRUST_CODE, False)
    run: str | None = option(
        "name, by which it is resumed; default: that of its file", check=check_folder_name
    )
    retry: bool = option("train failed networks again, too", False)
    ranks_per_network: int = option("ranks of each network", 1, "[1, inf)", group="Machine")
    slots: int | None = option(
        "networks at once; default: cores, GPUs or tasks / ranks per network", check="[1, inf)"
    )
    launcher: Literal["auto", "mpirun", "srun"] = option(
        "start ranks by this; auto = srun in a Slurm allocation, else mpirun", "auto"
    )
    prepare: bool = option("set up slurm/sweep.sbatch, print the numbers left, and exit", False)
    results: bool = option("write results.csv from the records and exit", False, group="Output")
    dry_run: bool = option("print networks, slots and the launch line, and exit", False)


class SuperviseConfig(Settings):
    """Settings of ``hpctrain supervise``: restart a run after failures."""

    usage: ClassVar[str] = "[options] -- COMMAND"
    command: tuple[str, ...] = option("launch of the run: mpirun -n 4 python -m hpctrain ...", ...)
    max_failures: int = option("give up after N failures without a new checkpoint", 3, "[1, inf)")
    nodes: int | None = option("use N Slurm nodes, rest spares; default: all", check="[1, inf)")


class StopConfig(Runs):
    """Settings of ``hpctrain stop``: all ranks save and stop after the same step."""

    target: str = option("run or sweep, by name or folder", ...)


class CompareConfig(Runs):
    """Settings of ``hpctrain compare``: two runs, bit by bit."""

    first: str = option("run, by name or folder", ...)
    second: str = option("other run", ...)
    plot: str | None = option("plot how the first convolution's weights differ: .png, .svg or .pdf")


class PlotConfig(Runs):
    """Settings of ``hpctrain plot``: figures, such as accuracy, and loss of runs by epoch."""

    targets: tuple[str, ...] = option("runs or sweeps, by name or folder", ...)
    confusion: bool = option("plot the confusion matrix of a split, too", False)
    split: str = option("split of the confusion matrix", "test")
    overlay: bool = option("runs share panels, last half of curves; default: from 7 runs on", False)
    output: str | None = option(".png, .svg or .pdf; default: training.png in run or --runs-dir")


class WatchConfig(Runs):
    """Settings of ``hpctrain watch``: show runs as they train."""

    exclude = (("--once", "--web", "the page is served until Ctrl-C"),)

    targets: tuple[str, ...] = option(
        "runs or sweeps, by name or folder; default: list all runs", (), positional=True
    )
    once: bool = option("print the runs once and exit", False)
    web: bool = option("serve a page for the browser, on this machine alone", False)
    port: int = option("TCP port of --web; 0 = a free one", 0, "[0, 65535]", needs="--web")
