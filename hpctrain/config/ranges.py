"""What is wrong with settings whatever the data, the ranks and the machine."""

from __future__ import annotations

import math
import os
import re
from typing import Any

from hpctrain.config.train import Config
from hpctrain.errors import UsageError

MOST_THREADS = 64  # that a run may ask for on a small machine, to repeat one of a larger
LONGEST_NAME = 200


def check_ranges(config: Config) -> None:
    """Raise UsageError for a number that is out of its range whatever the data."""
    at_least_one: dict[str, Any] = {
        "--epochs": config.epochs,
        "--batch-size": config.batch_size,
        "--batch-per-rank": config.batch_per_rank,
        "--shards": config.shards,
        "--threads": config.threads,
        "--validate-steps": config.validate_steps,
        "--keep": config.keep,
    }
    for flag, value in at_least_one.items():
        if value is not None and value < 1:
            raise UsageError(f"{flag} {value}: give 1 or more")
    cores = os.cpu_count() or 1
    if config.threads and config.threads > max(MOST_THREADS, 2 * cores):
        raise UsageError(f"--threads {config.threads}: this machine has {cores} cores")
    if config.run is not None and (
        config.run in ("", ".", "..")
        or "/" in config.run
        or not config.run.isprintable()
        or len(config.run.encode()) > LONGEST_NAME
    ):
        raise UsageError(
            f"--run {config.run!r}: give the name of a folder in --runs-dir, of at most"
            f" {LONGEST_NAME} bytes and without /"
        )
    at_least_zero = {
        "--evaluate-every": config.evaluate_every,
        "--digest-every": config.digest_every,
        "--patience": config.patience,
    }
    for flag, value in at_least_zero.items():
        if value is not None and value < 0:
            raise UsageError(f"{flag} {value}: give 0 or more")
    worker_loads(config.worker_load)
    byte_count(config.read_buffer, "--read-buffer")
    _check_foreign(config)
    if config.task == "denoise":
        _check_denoising(config)
    if config.deterministic and config.local_buffers:
        raise UsageError(
            "--deterministic and --local-buffers exclude each other: buffers that each rank keeps"
            " for itself depend on the number of ranks"
        )


def _check_foreign(config: Config) -> None:
    """What belongs to a file that is no pack comes together."""
    if (config.images is None) != (config.labels is None):
        there, missing = ("labels", "images") if config.images is None else ("images", "labels")
        raise UsageError(f"--{there} goes with --{missing}: name both data sets of the file")
    if config.images is None and (config.layout or config.split):
        flag = "--layout" if config.layout else "--split"
        raise UsageError(
            f"{flag} goes with --images and --labels, for a file that is no pack: packs have theirs"
        )
    if config.images is not None and config.normalize == "pack":
        raise UsageError(
            "--normalize pack takes the mean and std that a pack holds, and the file of --images"
            " holds none: use unit or imagenet"
        )


def _check_denoising(config: Config) -> None:
    if not 0 < config.noise_level <= 1:
        raise UsageError(f"--noise-level is {config.noise_level}; it must be in (0, 1]")
    if config.normalize != "unit" or config.label_smoothing:
        flag = "--label-smoothing" if config.normalize == "unit" else "--normalize"
        raise UsageError(f"{flag} has no meaning for --task denoise: images stay in [0, 1]")


def byte_count(text: str, flag: str) -> int:
    """Bytes of "256M", "1.5G", "64KiB" or "4096": K, M and G stand for 2^10, 2^20 and 2^30."""
    found = re.fullmatch(r"(\d{1,9}(?:\.\d{1,3})?)([KMGT]?)(?:i?B)?", text, re.IGNORECASE)
    size = int(float(found[1]) * 1024 ** " KMGT".find(found[2].upper() or " ")) if found else 0
    if size < 1:
        raise UsageError(f"{flag} {text}: give a size, such as 256M or 1.5G")
    return size


def worker_loads(text: str | None) -> tuple[float, ...]:
    """The positive numbers of --worker-load, one per rank; none where it is not given."""
    if text is None:
        return ()
    try:
        loads = tuple(float(part) for part in text.split(","))
    except ValueError:
        loads = (0.0,)
    if not all(0 < load < math.inf for load in loads):
        raise UsageError(f"--worker-load {text}: give a positive number for every rank, as in 3,1")
    return loads
