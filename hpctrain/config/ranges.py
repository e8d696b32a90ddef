"""What is wrong with settings whatever the data, the ranks and the machine."""

from __future__ import annotations

import dataclasses
import math
import os
import re
from typing import NamedTuple

from hpctrain.config.train import Config
from hpctrain.errors import UsageError, brief
from hpctrain.typed import LARGEST

MOST_THREADS = 64  # that a run may ask for on a small machine, to repeat one of a larger
MOST_SEGMENTS = 64
LONGEST_NAME = 200
MOST_DIGITS = 15  # of a number of steps
LONGEST = 10 * 365 * 86400.0  # seconds of a duration that a timer takes


def check_ranges(config: Config) -> None:
    """Raise UsageError for a number that is out of its range whatever the data."""
    _check_numbers(config)
    _check_texts(config)
    cores = os.cpu_count() or 1
    if config.threads and config.threads > max(MOST_THREADS, 2 * cores):
        raise UsageError(f"--threads {config.threads}: this machine has {cores} cores")
    if segments(config.overlap) != 0 and config.graphs:
        raise UsageError(
            f"--overlap {config.overlap} and --graphs exclude each other: in a graph all gradients"
            " come at once"
        )
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
    if not 0 <= config.random_crop <= 1:
        raise UsageError(
            f"--random-crop {config.random_crop:g}: give a share of the area, such as 0.08, up to 1"
        )
    worker_loads(config.worker_load)
    byte_count(config.read_buffer, "--read-buffer")
    _check_foreign(config)
    if config.task == "denoise":
        _check_denoising(config)
    if config.deterministic and config.wire != "fp32":
        raise UsageError(
            f"--deterministic and --wire {config.wire} exclude each other: what is rounded on the"
            " way depends on the number of ranks"
        )
    if config.deterministic and config.local_buffers:
        raise UsageError(
            "--deterministic and --local-buffers exclude each other: buffers that each rank keeps"
            " for itself depend on the number of ranks"
        )


def _check_texts(config: Config) -> None:
    """Refuse names that config.toml could not hold: the run could not go on."""
    for name, value in dataclasses.asdict(config).items():
        if isinstance(value, str) and any("\ud800" <= letter <= "\udfff" for letter in value):
            flag = "--" + name.replace("_", "-")
            raise UsageError(f"{flag} {value}: this name is not UTF-8, give it another one")


def _check_numbers(config: Config) -> None:
    """What is too small, or larger than the files of a run can say."""
    for flag, value, least in (
        ("--epochs", config.epochs, 1),
        ("--batch-size", config.batch_size, 1),
        ("--batch-per-rank", config.batch_per_rank, 1),
        ("--shards", config.shards, 1),
        ("--threads", config.threads, 1),
        ("--validate-steps", config.validate_steps, 1),
        ("--keep", config.keep, 1),
        ("--evaluate-every", config.evaluate_every, 0),
        ("--digest-every", config.digest_every, 0),
        ("--patience", config.patience, 0),
    ):
        if value is not None and value < least:
            raise UsageError(f"{flag} {value}: give {least} or more")
    for field in dataclasses.fields(config):
        value = getattr(config, field.name)
        if isinstance(value, int) and abs(value) > LARGEST:
            flag = "--" + field.name.replace("_", "-")
            raise UsageError(f"{flag} {brief(value)}: give at most {LARGEST}")


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
    if config.images is not None and config.skip_bad:
        raise UsageError(
            "--skip-bad leaves out rows of a pack, whose checksums tell which are damaged: the file"
            " of --images has none"
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


def segments(text: str) -> int | None:
    """Of --overlap, at most; None for "auto". UsageError."""
    if text == "auto":
        return None
    if not re.fullmatch(r"[0-9]{1,9}", str(text)):
        raise UsageError(f"--overlap {text}: give 0 or more segments, or auto")
    if int(text) > MOST_SEGMENTS:
        raise UsageError(f"--overlap {text}: give at most {MOST_SEGMENTS} segments")
    return int(text)


def worker_loads(text: str | None) -> tuple[float, ...]:
    """The positive numbers of --worker-load, one per rank; none where they are not given."""
    if text is None or text == "auto":
        return ()
    try:
        loads = tuple(float(part) for part in text.split(","))
    except ValueError:
        loads = (0.0,)
    if not all(0 < load < math.inf for load in loads):
        raise UsageError(f"--worker-load {text}: give a positive number for every rank, as in 3,1")
    return loads


def duration(text: str, flag: str) -> float:
    """Seconds of "90s", "10m", "2h", "H:MM:SS", or minutes where there is no unit. UsageError."""
    unit = re.fullmatch(r"(\d+(?:\.\d+)?)([smh]?)", text)
    clock = re.fullmatch(r"(\d+):(\d\d):(\d\d)", text)
    if unit:
        seconds = float(unit[1]) * {"s": 1, "m": 60, "": 60, "h": 3600}[unit[2]]
    elif clock:
        seconds = 3600.0 * int(clock[1]) + 60 * int(clock[2]) + int(clock[3])
    else:
        seconds = 0.0
    if not 0 < seconds <= LONGEST:
        raise UsageError(f"{flag} {text}: give a time, such as 30m, 90s or 2:30:00")
    return seconds


class Interval(NamedTuple):
    """What lies between two checkpoints: a number of steps, or seconds."""

    steps: int = 0
    seconds: float = math.inf

    def follows(self, step: int) -> bool:
        """Whether a checkpoint follows this step, whatever the time."""
        return bool(self.steps) and step % self.steps == 0

    @staticmethod
    def parse(text: str) -> Interval:
        """Of --checkpoint-every: "500" steps or "10m". UsageError."""
        flag = "--checkpoint-every"
        if not text.isdecimal():
            return Interval(seconds=duration(text, flag))
        if len(text) > MOST_DIGITS or int(text) < 1:
            raise UsageError(f"{flag} {text[:50]}: give 1 step or more, or a time such as 10m")
        return Interval(steps=int(text))
