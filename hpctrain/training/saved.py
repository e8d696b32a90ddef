"""A trained network as one file, model.safetensors, with all that is needed to use it again.

Metadata (JSON values): the network's name and options, image shape (H, W, C), class names, input
mean and standard deviation, the pack it was trained on, the run, the step and its figures.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import nn

from hpctrain import __version__
from hpctrain.config import Config
from hpctrain.data.augment import normalization
from hpctrain.data.packed import Pack
from hpctrain.errors import UsageError
from hpctrain.models import build, load_weights, read_model, save_model
from hpctrain.plan import Plan

FILE = "model.safetensors"


def save(
    path: Path, model: nn.Module, config: Config, plan: Plan, pack: Pack, state: dict[str, Any]
) -> None:
    """Write weights, buffers and metadata; `state` tells the run, step and figures reached."""
    scaling = normalization(config.normalize, pack.mean, pack.std)
    metadata = {
        "hpctrain": __version__,
        "model": plan.model,
        "small_stem": config.small_stem,
        "image_shape": list(plan.image_shape),
        "classes": list(pack.classes),
        "mean": scaling[0].tolist() if scaling else None,
        "std": scaling[1].tolist() if scaling else None,
        "pack": str(Path(pack.path).resolve()),
        "pack_uuid": pack.uuid,
        "provenance": pack.provenance,
        "precision": plan.precision,
        "channels_last": plan.channels_last,
        **state,
    }
    save_model(path, model, metadata)


@dataclass(frozen=True)
class Saved:
    """A network read back, in evaluation mode on the CPU, and what its file says."""

    path: Path
    model: nn.Module
    image_shape: tuple[int, int, int]  # (H, W, C)
    classes: tuple[str, ...]
    scaling: tuple[tuple[float, ...], tuple[float, ...]] | None  # mean, std by channel
    metadata: dict[str, Any]


def locate(target: str | None, runs_dir: str) -> Path:
    """The .safetensors file of a run's name, a run's folder, or the file itself."""
    if target is None:
        raise UsageError("name a run or a .safetensors file")
    for path in (Path(runs_dir) / target, Path(target)):
        if path.is_dir():
            if not (path / FILE).is_file():
                raise UsageError(f"{path} holds no {FILE}: the run has not ended")
            return path / FILE
        if path.is_file():
            return path
    raise UsageError(f"there is no run {target!r} in {runs_dir} and no such file")


def restore(path: Path) -> Saved:
    """Build the network and load its weights. Raises UsageError for a file that is not ours."""
    state, metadata = read_model(path, required=("model", "image_shape", "classes"))
    shape = tuple(metadata["image_shape"])
    classes = tuple(metadata["classes"])
    model = build(metadata["model"], shape, len(classes), metadata.get("small_stem", False))
    load_weights(model, state, path)
    model.eval()
    scaling = None
    if metadata.get("mean"):
        scaling = (tuple(metadata["mean"]), tuple(metadata["std"]))
    return Saved(path, model, shape, classes, scaling, metadata)
