"""Settings of ``hpctrain train`` for its optimizer and loss."""

from __future__ import annotations

from dataclasses import dataclass

from hpctrain.config.data import COMMON
from hpctrain.config.option import (
    AT_LEAST_0,
    AT_LEAST_1,
    POSITIVE,
    Bounds,
    class_weights,
    option,
)
from hpctrain.config.patterns import learning_rate_factors, patterns

OPTIMIZER = "Optimizer"
DEFAULT_LEARNING_RATES = {"sgdm": 0.01, "adam": 0.001, "adamw": 0.001}


def optimizer_and_rate(optimizer: str | None, lr: float | None, task: str) -> tuple[str, float]:
    """Return the optimizer and the learning rate; the usual ones where none are given."""
    name = optimizer or ("adam" if task == "denoise" else "sgdm")
    return name, DEFAULT_LEARNING_RATES[name] if lr is None else lr


@dataclass(frozen=True)
class OptimizerSettings:
    """Settings of a training run for its optimizer and loss."""

    optimizer: str | None = option(
        None,
        "update rule; default: sgdm, for denoise adam",
        COMMON,
        choices=tuple(DEFAULT_LEARNING_RATES),
    )
    lr: float | None = option(
        None, "learning rate; default: 0.01 for sgdm, 0.001 for adam and adamw", COMMON, POSITIVE
    )
    scale_lr: str = option(
        "none",
        "scale the learning rate with the global batch size / --batch-per-rank (or the default"
        " batch size): linear for sgdm, sqrt for adam",
        OPTIMIZER,
        choices=("none", "linear", "sqrt"),
    )
    warmup_epochs: float | None = option(
        None, "epochs of linear warm-up; default: 5 with --scale-lr", OPTIMIZER, AT_LEAST_0
    )
    momentum: float = option(0.9, "momentum of sgdm", OPTIMIZER, Bounds(0, 1))
    weight_decay: float = option(
        0.0, "L2 penalty (sgdm, adam) or decoupled weight decay (adamw)", OPTIMIZER, AT_LEAST_0
    )
    no_decay: str | None = option(
        None,
        "apply no weight decay to these parameters: norm = of normalization layers, bias = biases,"
        " or patterns of names, as in norm,bias,*pos_embed",
        OPTIMIZER,
        patterns,
    )
    lr_factors: str | None = option(
        None,
        "multiply the learning rate of parameters by factors, as in layer*=0.1,fc=1: the last"
        " pattern that matches a name counts",
        OPTIMIZER,
        learning_rate_factors,
    )
    schedule: str = option(
        "constant",
        "schedule of the learning rate",
        OPTIMIZER,
        choices=("constant", "cosine", "step", "one-cycle"),
    )
    min_lr: float = option(
        0.0, "smallest learning rate of --schedule cosine or step", OPTIMIZER, AT_LEAST_0
    )
    step_epochs: int = option(
        30, "epochs between drops of --schedule step, each to a tenth", OPTIMIZER, AT_LEAST_1
    )
    ema: float | None = option(
        None,
        "average the weights over the steps with this decay, such as 0.999 (exponential moving"
        " average), for --final ema",
        OPTIMIZER,
        Bounds(0, 1, "()"),
    )
    clip_norm: float | None = option(
        None, "clip the L2 norm of the gradient to this; default: no clipping", OPTIMIZER, POSITIVE
    )
    label_smoothing: float = option(
        0.0, "label smoothing of the cross-entropy loss", OPTIMIZER, Bounds(0, 1)
    )
    loss: str | None = option(
        None,
        "minimize your own loss, package.module:function, called with outputs and targets; it"
        " returns one value a sample; default: cross-entropy, for denoise mean squared error",
        OPTIMIZER,
    )
    class_weights: str | None = option(
        None,
        "weigh classes in the loss: balanced = images / (classes x images of the class); or numbers"
        " in the order of the classes, such as 0.2,1",
        OPTIMIZER,
        class_weights,
    )
