"""A trained network as one file, model.safetensors, with everything needed to use it again.

Metadata (JSON values): the network's name and options, image shape (H, W, C), class names, input
mean and standard deviation, the pack it was trained on, the run, the step and its figures.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from hpctrain import __version__
from hpctrain.config import (
    PRECISIONS,
    Config,
    EvaluateConfig,
    NetworkConfig,
    PredictConfig,
    as_words,
    check_imports,
    check_settings,
    command_line,
)
from hpctrain.config.others import EVALUATION_ROWS
from hpctrain.data.augment import normalization
from hpctrain.data.builtin import locate
from hpctrain.data.checks import Checks, Sums
from hpctrain.data.loader import Prepare, make_prepare
from hpctrain.data.pack_format import Pack, earlier_external_arguments, valid_external_arguments
from hpctrain.errors import UsageError
from hpctrain.inference.tasks import Task, make_task
from hpctrain.models import build, load_weights, read_model
from hpctrain.parallel.choose import open_device
from hpctrain.parallel.device import place
from hpctrain.parallel.mpi import Comm, call_on_all, call_on_root
from hpctrain.plan import Plan
from hpctrain.report.find import SWEEP_FILE, best_run, propose_run
from hpctrain.text import listed, say

FILE, BEST = "model.safetensors", "best.safetensors"


def describe(config: Config, plan: Plan, pack: Pack, state: dict[str, Any]) -> dict[str, Any]:
    """Return the metadata of a network; `state` holds its run, step and figures."""
    scaling = normalization(config.normalize, pack.mean, pack.std)
    return {
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
        "external": pack.external_arguments or None,
        "task": plan.task,
        "noise": plan.noise,
        "noise_level": plan.noise_level,
        "precision": plan.precision,
        "channels_last": plan.channels_last,
        "evaluation_rows": plan.evaluation_rows,
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


def find_model(target: str | None, runs_dir: str, best: bool = False) -> Path:
    """Find the .safetensors file of a run by its name or folder, or given as a file.

    With `best`, `target` is a sweep, and the file is that of its best run, which is printed. Raises
    UsageError if there is none.
    """
    if target is None:
        raise UsageError("name a run or a .safetensors file")
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
            files = [path / name for name in (FILE, BEST) if (path / name).is_file()]
            if not files:
                raise UsageError(
                    f"{path} holds no {FILE}: the run has not ended; its command continues it"
                )
            if files[0].name == BEST:
                say(f"{path} has not ended: its best network so far", sys.stderr)
            return files[0]
        if path.is_file():
            return path
    if best:
        what, other = f"--best: there is no sweep {target!r}", "folder"
    else:
        what, other = f"there is no run {target!r}", "file"
    raise UsageError(f"{what} in {runs_dir} and no such {other}{propose_run(target, runs_dir)}")


def restore(path: Path, model: str | None = None, words: Sequence[str] = ()) -> Saved:
    """Build the network of a file and load its weights.

    Raises UsageError for a file not written by hpctrain, and if it names a network that is neither
    hpctrain's nor equal to `model` (--model). `words` are those of the command line, without
    --model, for the message.
    """
    state, metadata = read_model(path, required=("model", "image_shape", "classes"))
    if isinstance(earlier := metadata.pop("foreign", None), dict):
        metadata["external"] = earlier_external_arguments(earlier)
    check_metadata(path, metadata)
    height, width, channels = metadata["image_shape"]
    shape, classes = (height, width, channels), tuple(metadata["classes"])
    name = trusted_name(path, metadata["model"], model, words or ("evaluate", str(path)))
    network = build(name, shape, len(classes), metadata.get("small_stem", False))
    load_weights(network, state, path)
    scaling = None
    if metadata.get("mean"):
        scaling = (torch.tensor(metadata["mean"]), torch.tensor(metadata["std"]))
    return Saved(path, network.eval(), shape, classes, scaling, metadata)


def trusted_name(path: Path, named: str, model: str | None, words: Sequence[str]) -> str:
    """Return the network that the file names, if it is hpctrain's own or --model names it too.

    Otherwise raises UsageError: the author of a file must not choose what is imported.
    """
    if model is not None and model != named:
        raise UsageError(f"--model {model}: {path} names the network {named!r}")
    allowed = [] if model is None else [model]
    check_imports(str(path), [named], allowed, f"type {command_line(*words, '--model', named)}")
    return named


def check_metadata(path: Path, metadata: dict[str, Any]) -> None:
    """Raise UsageError that names the first invalid entry of the metadata."""

    def numbers(value: Any, kind: type[int] | type[float], count: int, above: float) -> bool:
        good = isinstance(value, list) and len(value) == count
        return good and all(type(v) is kind and above < float(v) < 1e6 for v in value)

    shape, classes = metadata["image_shape"], metadata["classes"]
    channels = shape[2] if numbers(shape, int, 3, 0) else 0
    mean, std = metadata.get("mean"), metadata.get("std")
    good = {
        "image_shape": channels > 0,
        "model": isinstance(metadata["model"], str) and metadata["model"].isprintable(),
        "classes": isinstance(classes, list)
        and len(classes) > 0
        and all(isinstance(name, str) for name in classes),
        "mean": mean is None or numbers(mean, float, channels, -1e6),
        "std": std is None if mean is None else numbers(std, float, channels, 0.0),
        "pack": isinstance(metadata.get("pack", ""), str),
        "provenance": isinstance(metadata.get("provenance", {}), dict),
        "external": metadata.get("external") is None
        or valid_external_arguments(metadata["external"]),
        "precision": metadata.get("precision", "fp32") in PRECISIONS,
        "evaluation_rows": numbers([_block(metadata)], int, 1, 0),
        "channels_last": isinstance(metadata.get("channels_last", True), bool),
        "task": metadata.get("task", "classify") in ("classify", "denoise"),
    }
    for name, fine in good.items():
        if not fine:
            raise UsageError(f"{path}: its metadata are corrupt, {name} is {metadata.get(name)!r}")


def _block(metadata: dict[str, Any]) -> Any:
    """Return the samples per block of the run's own evaluations, which older files lack."""
    return metadata.get("evaluation_rows", EVALUATION_ROWS)


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


def open_network(settings: EvaluateConfig | PredictConfig, comm: Comm) -> Network:
    """Load the network that the settings name onto this rank's device. Collective."""
    call_on_root(comm, lambda: check_settings(settings))
    path = call_on_root(comm, lambda: find_model(settings.run, settings.runs_dir, settings.best))
    threads = settings.threads
    device, _ = open_device(comm, settings.device, lambda share: threads or share)
    command = "predict" if isinstance(settings, PredictConfig) else "evaluate"
    words = command, *as_words(settings, without=("model",))
    saved = call_on_all(comm, lambda: restore(path, settings.model, words))
    channels_last = saved.metadata.get("channels_last", True)
    dtype = next(saved.model.parameters()).dtype
    model = place(saved.model, device, channels_last)
    prepare = make_prepare(device, dtype, channels_last, saved.scaling)
    precision = settings.precision or saved.metadata.get("precision", "fp32")
    task = make_task({**saved.metadata, "precision": precision}, len(saved.classes))
    block = settings.batch or _block(saved.metadata)
    return Network(saved, model, device, precision, task, prepare, block)


def first_touch(pack: Pack, comm: Comm) -> Checks:
    """Return checks that verify every block of a pack when it is first read. Collective.

    Results from corrupt samples would be wrong.
    """
    return Checks(None if pack.external else call_on_root(comm, lambda: find_sums(pack)))


def find_sums(pack: Pack) -> Sums:
    """Read the checksums of a pack (rank 0): other ranks never need h5py."""
    from hpctrain.data.packed import read_sums

    return read_sums(pack)


def open_pack_for(saved: Saved, settings: NetworkConfig, comm: Comm) -> Pack:
    """Open the pack of --data, by default the one of training. Collective.

    Raises UsageError if its image shape or classes are not those of the network.
    """

    def find() -> Pack:
        from hpctrain.data.packed import read_again

        source = settings.data or saved.metadata.get("pack")
        if source is None:
            raise UsageError(f"{saved.path} does not say what it was trained on: give --data")
        if settings.data is None and not Path(source).is_file():
            raise UsageError(
                f"the pack that {saved.path} was trained on, {source}, is gone: give --data"
            )
        pack = read_again(locate(source, settings.data_dir), saved.metadata.get("external"))
        require_split(pack, settings.split)
        if pack.image_shape != saved.image_shape:
            raise UsageError(
                f"{pack.path} holds images of {_size(pack.image_shape)}, but {saved.path} was"
                f" trained on {_size(saved.image_shape)}"
            )
        if pack.classes != saved.classes:
            raise UsageError(
                f"{pack.path} has {len(pack.classes)} classes ({listed(pack.classes, 3)}), but"
                f" {saved.path} was trained on {len(saved.classes)} ({listed(saved.classes, 3)})"
            )
        if settings.data is None and pack.uuid != saved.metadata.get("pack_uuid"):
            raise UsageError(
                f"{pack.path} is not the pack that {saved.path} was trained on (uuid {pack.uuid},"
                f" not {saved.metadata.get('pack_uuid')}): give --data {pack.path} if it is meant"
            )
        return pack

    return call_on_root(comm, find)


def require_split(pack: Pack, split: str) -> None:
    """Raise UsageError unless the pack has samples in this split."""
    if split not in pack.splits:
        raise UsageError(f"{pack.path} has no split {split!r}, only {', '.join(pack.splits)}")
    if pack.splits[split].samples == 0:
        raise UsageError(f"the split {split!r} of {pack.path} holds no image")


def _size(shape: tuple[int, int, int]) -> str:
    height, width, channels = shape
    return f"{width}x{height}x{channels}"
