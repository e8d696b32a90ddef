"""Options of training that exclude or require each other, found before any data is read."""

from __future__ import annotations

import dataclasses
import importlib.util
import os
from collections.abc import Iterator

from hpctrain.config.optimizer import optimizer_and_rate
from hpctrain.config.option import flag_of
from hpctrain.config.train import Config

MOST_THREADS = 64  # that a run may use on a small machine, to repeat a run of a larger one


def conflicts(config: Config) -> Iterator[str]:
    """Yield one line for each conflict between options of training, or with this machine."""
    for name, value in dataclasses.asdict(config).items():
        if isinstance(value, str) and any("\ud800" <= letter <= "\udfff" for letter in value):
            # config.toml could not hold it: the run could not be resumed
            yield f"{flag_of(name)} {value}: this name is not UTF-8, give it another one"
    if (config.images is None) != (config.labels is None):
        there, missing = ("labels", "images") if config.images is None else ("images", "labels")
        yield f"--{there} goes with --{missing}: name both datasets of the file"
    if config.images is None:
        for name in ("layout", "split", "max_value"):
            if getattr(config, name) is not None:
                yield (
                    f"{flag_of(name)} goes with --images and --labels, for a file that is no pack:"
                    " packs have theirs"
                )
    elif config.normalize == "pack":
        yield (
            "--normalize pack takes the mean and std that a pack holds, and the file of --images"
            " holds none: use unit or imagenet"
        )
    yield from _optimizer_conflicts(config)
    yield from _machine_conflicts(config)
    yield from _loss_conflicts(config)
    if config.batch_size is not None and config.batch_per_rank is not None:
        yield (
            f"--batch-size {config.batch_size} and --batch-per-rank {config.batch_per_rank}"
            " exclude each other: give one"
        )
    if config.deterministic and config.comm_dtype != "fp32":
        yield (
            f"--deterministic and --comm-dtype {config.comm_dtype} exclude each other: how"
            " sums of bfloat16 numbers are rounded depends on the number of ranks"
        )
    if config.tensorboard and importlib.util.find_spec("tensorboard") is None:
        yield "--tensorboard needs its package: pip install 'hpctrain[tensorboard]'"


def _optimizer_conflicts(config: Config) -> Iterator[str]:
    """Yield one line for each conflict between options of the optimizer."""
    _, lr = optimizer_and_rate(config.optimizer, config.lr, config.task)
    if config.no_decay and not config.weight_decay:
        yield f"--no-decay {config.no_decay} needs a --weight-decay above 0"
    if config.min_lr and config.schedule not in ("cosine", "step"):
        yield f"--min-lr is for --schedule cosine or step, not {config.schedule}"
    if config.scale_lr == "none" and config.min_lr > lr:
        yield f"--min-lr {config.min_lr} is above --lr {lr}, from which the schedule falls"
    if config.warmup_epochs and config.schedule == "one-cycle":
        yield "--schedule one-cycle has a warm-up of its own: give no --warmup-epochs"
    if config.ema is not None and config.final != "ema":
        yield f"--ema {config.ema} needs --final ema, which tests and saves the average"
    if config.final == "ema" and config.ema is None:
        yield "--final ema needs the decay of the average, such as --ema 0.999"


def _machine_conflicts(config: Config) -> Iterator[str]:
    """Yield one line for each conflict between options of computing, or with this machine."""
    cores = os.cpu_count() or 1
    if config.threads and config.threads > max(MOST_THREADS, 2 * cores):
        yield f"--threads {config.threads}: this machine has {cores} cores"
    if config.overlap and config.cuda_graphs:
        yield (
            f"--overlap {config.overlap} and --cuda-graphs exclude each other: in a graph all"
            " gradients come at once"
        )


def _loss_conflicts(config: Config) -> Iterator[str]:
    """Yield one line for each conflict between options of the task and of its loss."""
    if config.loss and config.label_smoothing:
        yield (
            f"--loss {config.loss} and --label-smoothing exclude each other: smoothing is part of"
            " the cross-entropy loss"
        )
    if config.balanced_sampling and config.class_weights == "balanced":
        yield (
            "--balanced-sampling and --class-weights balanced both make up for unequal classes:"
            " give one of them"
        )
    if config.task == "denoise" and config.class_weights:
        yield "--class-weights has no meaning for --task denoise: its loss knows no classes"
    scaled = config.normalize not in ("auto", "unit")
    if config.task == "denoise" and (scaled or config.label_smoothing):
        flag = "--normalize" if scaled else "--label-smoothing"
        yield f"{flag} has no meaning for --task denoise: images stay in [0, 1]"
