"""Settings of the subcommands that use a trained network: evaluate, predict, export."""

from __future__ import annotations

from dataclasses import dataclass

from hpctrain.config.data import CACHE_DIR
from hpctrain.config.option import AT_LEAST_1, TRUST_CODE, Bounds, check_file_name, duration, option
from hpctrain.config.train import HANG_TIMEOUT, PRECISIONS, RUNS_DIR

IMAGES_DRAWN = Bounds(0, 1000, "[]")  # on one page


@dataclass(frozen=True)
class SavedConfig:
    """Settings of all subcommands that read a trained network."""

    run: str | None = option(
        None, "run, by name or folder, or .safetensors file", "What", positional=True
    )
    trust_code: bool = option(False, TRUST_CODE, "What")
    best: bool = option(False, "use the best network of a sweep, by validation", "What")
    runs_dir: str = option(*RUNS_DIR, "What")


@dataclass(frozen=True)
class NetworkConfig(SavedConfig):
    """Settings of the subcommands that compute with a trained network on all ranks."""

    data: str | None = option(None, "read this pack; default: the one of the training", "What")
    split: str = option("test", "read this split of the pack", "What")
    cache_dir: str = option(*CACHE_DIR, "What")
    batch_size: int | None = option(
        None,
        "compute this many images at a time; default: as the run's own test (64, on GPUs up to"
        " 256); networks that draw random numbers draw them for each such block",
        "Machine",
        AT_LEAST_1,
    )
    device: str = option(
        "auto", "compute on this device", "Machine", choices=("auto", "cpu", "cuda")
    )
    threads: int | None = option(
        None, "CPU threads per rank; default: allowed cores / ranks", "Machine", AT_LEAST_1
    )
    precision: str | None = option(
        None, "arithmetic; default: as in training", "Machine", choices=PRECISIONS
    )
    hang_timeout: str = option(*HANG_TIMEOUT, "Machine", duration)


@dataclass(frozen=True)
class EvaluateConfig(NetworkConfig):
    """Settings of ``hpctrain evaluate``: loss, accuracy and tables over one split."""

    loss: str | None = option(
        None,
        "compute this loss, package.module:function; default: that of the training",
        "What",
    )
    metric: str | None = option(
        None,
        "compute this metric, package.module:function; default: that of the training",
        "What",
    )
    output: str | None = option(
        None, "write the figures to this JSON file too", "Output", check_file_name
    )
    mistakes: int = option(
        0,
        "draw this many mistakes, the most confident ones, with true class, answer and probability"
        " into a .png beside --output, by default mistakes.png beside the weights",
        "Output",
        IMAGES_DRAWN,
    )


@dataclass(frozen=True)
class PredictConfig(NetworkConfig):
    """Settings of ``hpctrain predict``: a CSV of classes and probabilities."""

    images: tuple[str, ...] = option(
        (), "image files or folders; default: a split of --data", "What", positional=True
    )
    output: str = option(
        "predictions.csv",
        "write this CSV file (- = standard output), or the folder of denoised images",
        "Output",
        check_file_name,
    )
    figure: int = option(
        0,
        "draw this many random images with their answers and probabilities into a .png beside"
        " --output, such as predictions.png",
        "Output",
        IMAGES_DRAWN,
    )


@dataclass(frozen=True)
class ExportConfig(SavedConfig):
    """Settings of ``hpctrain export``: a trained network as a file for other programs."""

    preprocess: bool = option(
        False,
        "take uint8 images (N, H, W, C) and scale them inside; default: the network's own input,"
        " floats (N, C, H, W)",
        "Output",
    )
    batch_size: int | None = option(
        None,
        "fix the number of images that the file takes at a time; default: any",
        "Output",
        AT_LEAST_1,
    )
    output: str | None = option(
        None,
        "write this new file, whose suffix decides the format: .onnx, or .pt2 of torch.export;"
        " default: model.onnx beside the weights",
        "Output",
        check_file_name,
    )
