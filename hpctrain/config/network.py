"""Settings of ``hpctrain train`` for its network."""

from __future__ import annotations

from dataclasses import dataclass

from hpctrain.config.data import COMMON
from hpctrain.config.option import Bounds, option
from hpctrain.config.patterns import patterns

NETWORK = "Network"


@dataclass(frozen=True)
class NetworkSettings:
    """Settings of a training run for its network."""

    task: str = option(
        "classify",
        "learn the class of an image, or to remove noise from it",
        NETWORK,
        choices=("classify", "denoise"),
    )
    noise: str = option(
        "salt-pepper", "noise of --task denoise", NETWORK, choices=("salt-pepper", "gaussian")
    )
    noise_level: float = option(
        0.1,
        "share of values with salt-pepper noise, or std of gaussian noise",
        NETWORK,
        Bounds(0, 1, "(]"),
    )
    model: str = option(
        "auto",
        "train this network: digits, resnet18, resnet34, resnet50, autoencoder, timm:NAME or"
        " your own as package.module:function; auto = digits for images of 28x28x1, autoencoder for"
        " denoise, else resnet50",
        COMMON,
    )
    init: str | None = option(
        None, "start from the weights of a run, or of a .safetensors, .pth or .pt file", NETWORK
    )
    freeze: str | None = option(
        None,
        "train all but these parameters, by patterns of names, as in conv1,bn1,layer*; frozen"
        " batch-norm layers keep their statistics",
        NETWORK,
        patterns,
    )
    small_stem: bool = option(
        False, "use a 3x3 first convolution without pooling in ResNets, for small images", NETWORK
    )
    batch_norm: str = option(
        "exact",
        "combine batch-norm running statistics: exact = pooled batch moments; running = each"
        " shard's running statistics, pooled; average = weighted average",
        NETWORK,
        choices=("exact", "running", "average"),
    )
