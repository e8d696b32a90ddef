"""What is wrong with settings whatever the data and the ranks: each option by the check in its own
row of the table, then the options that exclude or need each other.
"""

from __future__ import annotations

import dataclasses
import importlib.util
import os
from typing import Any

from hpctrain.config.option import flag_of, segments
from hpctrain.config.train import Config
from hpctrain.errors import UsageError, did_you_mean
from hpctrain.text import brief
from hpctrain.typed import LARGEST

MOST_THREADS = 64  # that a run may ask for on a small machine, to repeat one of a larger


def check_settings(settings: Any) -> None:
    """UsageError in one line for an option of any subcommand that cannot be."""
    for field in dataclasses.fields(settings):
        value, flag = getattr(settings, field.name), flag_of(field.name)
        choices, check = field.metadata["choices"], field.metadata["check"]
        if value is None:
            continue
        if choices and value not in choices:
            hint = did_you_mean(value, choices)
            raise UsageError(f"{flag} {value}: there are {', '.join(choices)}{hint}")
        if isinstance(value, int) and abs(value) > LARGEST:
            raise UsageError(f"{flag} {brief(value)}: give at most {LARGEST}")
        if check is not None:
            check(value, flag)
    if isinstance(settings, Config):
        _check_texts(settings)
        _check_external_data(settings)
        _check_training(settings)


def _check_texts(config: Config) -> None:
    """Refuse names that config.toml could not hold: the run could not be resumed."""
    for name, value in dataclasses.asdict(config).items():
        if isinstance(value, str) and any("\ud800" <= letter <= "\udfff" for letter in value):
            raise UsageError(
                f"{flag_of(name)} {value}: this name is not UTF-8, give it another one"
            )


def _check_external_data(config: Config) -> None:
    """Options of an HDF5 file that is no pack come together."""
    if (config.images is None) != (config.labels is None):
        there, missing = ("labels", "images") if config.images is None else ("images", "labels")
        raise UsageError(f"--{there} goes with --{missing}: name both datasets of the file")
    flags = ("layout", "split", "scale", "label_gaps")
    given = [flag_of(name) for name in flags if getattr(config, name) is not None]
    if config.images is None and given:
        flag = given[0]
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


def _check_training(config: Config) -> None:
    """Options that exclude each other, or that this machine lacks something for."""
    cores = os.cpu_count() or 1
    if config.threads and config.threads > max(MOST_THREADS, 2 * cores):
        raise UsageError(f"--threads {config.threads}: this machine has {cores} cores")
    if segments(config.overlap) != 0 and config.graphs:
        raise UsageError(
            f"--overlap {config.overlap} and --graphs exclude each other: in a graph all gradients"
            " come at once"
        )
    if config.task == "denoise" and (config.normalize != "unit" or config.label_smoothing):
        flag = "--label-smoothing" if config.normalize == "unit" else "--normalize"
        raise UsageError(f"{flag} has no meaning for --task denoise: images stay in [0, 1]")
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
    if config.tensorboard and importlib.util.find_spec("tensorboard") is None:
        raise UsageError("--tensorboard needs its package: pip install 'hpctrain[tensorboard]'")
