"""Open the network and the data that the settings of evaluate and predict name, on all ranks."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import torch

from hpctrain.config import (
    EvaluateConfig,
    NetworkConfig,
    PredictConfig,
    require_trust,
)
from hpctrain.data.loader import read_samples
from hpctrain.data.pack import External, Pack, is_pack, read_pack
from hpctrain.data.partition import random_key
from hpctrain.data.split import Split
from hpctrain.errors import UsageError
from hpctrain.inference.network import Network, Saved, find_model, ready_network, restore
from hpctrain.inference.own import import_functions
from hpctrain.inference.own_check import check_task
from hpctrain.inference.tasks import Task
from hpctrain.packing.builtin import locate
from hpctrain.parallel.mpi import Comm, fair_threads, on_all, on_root
from hpctrain.parallel.transport import open_device
from hpctrain.text import listed

CHECKED_ROWS = 32


def open_network(settings: EvaluateConfig | PredictConfig, comm: Comm) -> Network:
    """Load the network that the settings name onto this rank's device. Collective."""
    path = on_root(comm, find_model, settings.run, settings.runs_dir, settings.best)
    device = open_device(comm, settings.device)
    torch.set_num_threads(settings.threads or fair_threads(comm))  # launchers set 1 or all cores
    with on_all(comm):
        saved = restore(path, settings.trust_code)
    return ready_network(saved, device, settings.precision, settings.batch_size)


def own_task(network: Network, settings: EvaluateConfig, source: Split, comm: Comm) -> Task:
    """Return the task of a network with the loss and the metric of the user's own. Collective.

    They are those of --loss and --metric, by default those of the training. Raises UsageError if
    the latter are not trusted, and as `check_task` does, which calls them with the first samples of
    `source`.
    """
    saved = network.saved
    loss = settings.loss or saved.metadata.get("own_loss")
    metric = settings.metric or saved.metadata.get("own_metric")
    named = {"loss": loss if loss != settings.loss else None}
    named["metric"] = metric if metric != settings.metric else None
    with on_all(comm):
        require_trust(named, saved.path, settings.trust_code)
        own = import_functions(loss, metric)
    task = replace(network.task, own=own)
    key = random_key("own functions")

    def check() -> None:
        rows = np.arange(min(CHECKED_ROWS, len(source)))
        images = read_samples(source, rows, network.prepare)
        labels = torch.from_numpy(source.read_labels(rows)).to(images.device)
        check_task(task, network.model, *task.pair(images, labels, key))

    if any(own):
        on_root(comm, check)
    return task


def open_pack_for(saved: Saved, settings: NetworkConfig, comm: Comm) -> Pack:
    """Open the pack of --data, by default the one of training. Collective.

    Raises UsageError as `find_pack` does.
    """
    return on_root(comm, find_pack, saved, settings)


def find_pack(saved: Saved, settings: NetworkConfig) -> Pack:
    """Open the pack of --data, by default the one of training, on one rank.

    Raises UsageError if there is none, or if its image shape or classes are not those of the
    network.
    """
    source = settings.data or saved.metadata.get("pack")
    if source is None:
        raise UsageError(f"{saved.path} does not say what it was trained on: give --data")
    if settings.data is None and not Path(source).is_file():
        raise UsageError(
            f"the pack that {saved.path} was trained on, {source}, is gone: give --data"
        )
    path, external = locate(source, settings.cache_dir), saved.metadata.get("external")
    if external is None or is_pack(path):
        pack = read_pack(path)
    else:
        from hpctrain.data.external import read_external  # imports h5py

        pack = read_external(path, External(**external))
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


def require_split(pack: Pack, split: str) -> None:
    """Raise UsageError unless the pack has samples in this split."""
    if split not in pack.splits:
        raise UsageError(f"{pack.path} has no split {split!r}, only {', '.join(pack.splits)}")
    if pack.splits[split].samples == 0:
        raise UsageError(f"the split {split!r} of {pack.path} holds no image")


def _size(shape: tuple[int, int, int]) -> str:
    height, width, channels = shape
    return f"{width}x{height}x{channels}"
