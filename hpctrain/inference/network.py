"""A trained network as one file, model.safetensors, with everything needed to use it again.

Metadata (JSON values): the network's name and options, image shape (H, W, C), class names, input
mean and standard deviation, the pack it was trained on, the run, the step and its figures.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from hpctrain import __version__
from hpctrain.config import Config, require_trust
from hpctrain.data.loader import Prepare, make_prepare
from hpctrain.data.pack import Pack
from hpctrain.errors import UsageError
from hpctrain.inference.tasks import Task, make_task
from hpctrain.models import build, load_weights, read_model
from hpctrain.parallel.device import place
from hpctrain.plan import EVALUATION_ROWS, Plan
from hpctrain.report.find import SWEEP_FILE, best_file, best_run, best_steps, propose_run
from hpctrain.text import say
from hpctrain.typed import typed

FILE = "model.safetensors"


def describe(config: Config, plan: Plan, pack: Pack, state: dict[str, Any]) -> dict[str, Any]:
    """Return the metadata of a network; `state` holds its run, step and figures."""
    return {
        "hpctrain": __version__,
        "model": plan.model,
        "small_stem": config.small_stem,
        "image_shape": list(plan.image_shape),
        "classes": list(pack.classes),
        "mean": list(plan.scaling[0]) if plan.scaling else None,
        "std": list(plan.scaling[1]) if plan.scaling else None,
        "pack": str(Path(pack.path).resolve()),
        "pack_uuid": pack.uuid,
        "provenance": pack.provenance,
        "external": pack.external,
        "task": config.task,
        "noise": config.noise,
        "noise_level": config.noise_level,
        "precision": plan.precision,
        "channels_last": config.channels_last,
        "evaluation_rows": plan.evaluation_rows,
        "class_weights": list(plan.class_weights) or None,
        "own_loss": config.loss,
        "own_metric": config.metric,
        **state,
    }


@dataclass(frozen=True)
class Saved:
    """A network loaded from a file, in evaluation mode on the CPU, and the file's metadata."""

    path: Path
    model: nn.Module
    image_shape: tuple[int, int, int]  # (H, W, C)
    classes: tuple[str, ...]
    scaling: tuple[torch.Tensor, torch.Tensor] | None  # mean, std by channel
    metadata: dict[str, Any]

    @property
    def crop(self) -> bool:
        """Whether images were cropped, rather than stretched, to the image shape."""
        return bool(self.metadata.get("provenance", {}).get("fit") == "crop")


def find_model(target: str, runs_dir: str, best: bool = False) -> Path:
    """Find the .safetensors file of a run by its name or folder, or given as a file.

    With `best`, `target` is a sweep, and the file is that of its best run, which is printed. Raises
    UsageError if there is none.
    """
    for path in (Path(runs_dir) / target, Path(target)):
        if (path / SWEEP_FILE).is_file():
            if not best:
                raise UsageError(f"{path} is a sweep: name one of its runs, or give --best")
            run, why = best_run(path)
            say(f"best of {path}: {run.name}, by {why}", sys.stderr)
            return run / FILE
        if best:
            continue
        if path.is_dir():
            if (path / FILE).is_file():
                return path / FILE
            if not (better := best_steps(path)):
                raise UsageError(
                    f"{path} holds no {FILE}: the run has not ended; its command continues it"
                )
            say(f"{path} has not ended: its best network so far", sys.stderr)
            return best_file(path, better[-1])
        if path.is_file():
            return path
    if best:
        what, other = f"--best: there is no sweep {target!r}", "folder"
    else:
        what, other = f"there is no run {target!r}", "file"
    raise UsageError(f"{what} in {runs_dir} and no such {other}{propose_run(target, runs_dir)}")


def restore(path: Path, trust_code: bool = False) -> Saved:
    """Build the network of a file and load its weights.

    Raises UsageError for a file not written by hpctrain, and if it names a function of the user's
    own without `trust_code`.
    """
    state, metadata = read_model(path)
    if "model" not in metadata:
        text = f"{path} holds weights but not the network they belong to"
        raise UsageError(f"{text}: it was not written at the end of a run")
    try:
        name = typed(metadata["model"], str, "model")
        shape = typed(metadata.get("image_shape"), tuple[int, int, int], "image_shape")
        classes = typed(metadata.get("classes"), tuple[str, ...], "classes")
        mean, std = (
            typed(metadata.get(key), tuple[float, ...] | None, key) for key in ("mean", "std")
        )
    except ValueError as error:
        raise UsageError(f"{path}: its metadata are corrupt, {error}") from error
    require_trust({"model": name}, path, trust_code)
    with torch.random.fork_rng(devices=[]):  # first weights are drawn, and replaced
        network = build(name, shape, len(classes), metadata.get("small_stem", False))
    load_weights(network, state, path)
    scaling = (torch.tensor(mean), torch.tensor(std)) if mean else None
    return Saved(path, network.eval(), shape, classes, scaling, metadata)


@dataclass(frozen=True)
class Network:
    """A saved network on this rank's device, ready for inference."""

    saved: Saved
    model: nn.Module
    device: torch.device
    precision: str
    task: Task
    prepare: Prepare
    block: int  # samples per forward pass


def ready_network(
    saved: Saved, device: torch.device, precision: str | None = None, block: int | None = None
) -> Network:
    """Return a saved network on `device`; precision and block default to those of its run."""
    channels_last = saved.metadata.get("channels_last", True)
    dtype = next(saved.model.parameters()).dtype
    model = place(saved.model, device, channels_last)
    prepare = make_prepare(device, dtype, channels_last, saved.scaling)
    precision = precision or saved.metadata.get("precision", "fp32")
    settings = {**saved.metadata, "precision": precision}
    task = make_task(settings, len(saved.classes), next(model.parameters()))
    rows = saved.metadata.get("evaluation_rows", EVALUATION_ROWS)
    return Network(saved, model, device, precision, task, prepare, block or rows)
