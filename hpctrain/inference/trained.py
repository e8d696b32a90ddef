"""A trained network in a program of the user's own, in one process and without MPI."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from hpctrain.cluster import launched_local_rank
from hpctrain.config import Config, from_table, load_toml, require_trust
from hpctrain.errors import RunError, UsageError
from hpctrain.inference.blocks import classify_blocks, describe_unusable
from hpctrain.inference.image_files import open_images
from hpctrain.inference.network import Network, find_model, ready_network, restore
from hpctrain.models import evaluating
from hpctrain.parallel.device import choose_device, torch_settings
from hpctrain.report.find import SETTINGS_FILE
from hpctrain.report.tables import answer_columns


def load(
    run: str | os.PathLike[str],
    *,
    trust_code: bool = False,
    runs_dir: str | os.PathLike[str] = "runs",
    device: str | torch.device = "auto",
    best: bool = False,
) -> TrainedNetwork:
    """Load a trained network, in this process alone and without MPI.

    `run` is the name or the folder of a run, a .safetensors file, or with `best` a sweep, of which
    the best network is loaded. With `trust_code`, functions of your own that the files of the run
    name are imported, such as its network. `device` is "auto", "cpu", "cuda", "cuda:N" or a
    torch.device. Raises UsageError.
    """
    device = str(device)
    found = find_model(os.fspath(run), os.fspath(runs_dir), best)
    saved = restore(found, trust_code)
    if device.startswith("cuda:"):
        if not device[5:].isdigit() or int(device[5:]) >= torch.cuda.device_count():
            raise UsageError(f"device {device!r}: torch sees {torch.cuda.device_count()} GPUs")
        place = torch.device(device)
    elif device in ("auto", "cpu", "cuda"):
        place = choose_device(device, launched_local_rank())
    else:
        raise UsageError(f"device {device!r}: there are auto, cpu, cuda and cuda:N")
    return TrainedNetwork(ready_network(saved, place), trust_code)


class Predictions(dict[str, np.ndarray]):
    """Answers to images: columns of equal length by name, which pandas.DataFrame takes as they are.

    ``file`` or ``row`` names the image, ``prediction`` is the name of its most probable class,
    ``label`` that class as a number, ``probability`` its probability. Then each class has a column
    with its probability. ``probabilities`` holds these together, (N, K) float32, and ``unusable``
    the reason for each image that was left out, by its name.
    """

    def __init__(
        self,
        names: dict[str, np.ndarray],
        classes: Sequence[str],
        probabilities: np.ndarray,
        unusable: dict[str, str],
    ) -> None:
        labels = probabilities.argmax(1)
        told = answer_columns(classes)
        super().__init__(
            {
                **names,
                "prediction": np.array(told)[labels],
                "label": labels,
                "probability": probabilities[np.arange(len(labels)), labels],
                **{name: probabilities[:, k] for k, name in enumerate(told)},
            }
        )
        self.probabilities, self.unusable = probabilities, unusable


class TrainedNetwork:
    """A trained network, as `load` returns it."""

    def __init__(self, network: Network, trust_code: bool = False) -> None:
        self._network, self._trust_code = network, trust_code
        self.model: nn.Module = network.model  # plain torch, in evaluation mode
        self.device: torch.device = network.device
        self.path: Path = network.saved.path  # of the file
        self.classes: tuple[str, ...] = network.saved.classes
        self.image_shape: tuple[int, int, int] = network.saved.image_shape  # (H, W, C)
        self.metadata: dict[str, Any] = network.saved.metadata  # that the file holds: the names of
        # the network and the pack, the step, the figures and so on

    def __repr__(self) -> str:
        height, width, channels = self.image_shape
        what = f"{self.metadata['model']}, images {width}x{height}x{channels}"
        return f"<TrainedNetwork {self.path}: {what}, {len(self.classes)} classes, {self.device}>"

    @cached_property
    def config(self) -> Config | None:
        """The settings of the run; None for a file that does not lie in the folder of a run.

        Raises UsageError if they cannot be read, or name functions of the user's own without
        `trust_code`: ``train`` would import them.
        """
        path = self.path.with_name(SETTINGS_FILE)
        if not path.is_file():
            return None
        config = from_table(load_toml(str(path)), Config(), str(path))
        require_trust(vars(config), path, self._trust_code)
        return config

    def preprocess(self, images: Any) -> torch.Tensor:
        """Return images as the input of `model`, (N, C, H, W) on its device.

        They are resized as for the pack of the training, and scaled as in the training. `images`
        are files or folders, or an array (N, H, W, C) of uint8, (N, H, W) of gray images, one image
        (H, W, C) or (H, W), an image of Pillow, or a list of images of any sizes. Floats in [0, 1]
        must have the network's size. Raises UsageError, and RunError for files that are no images.
        """
        names, read, dtype, _ = open_images(self._network.saved, images)
        pixels = np.empty((len(names), *self.image_shape), dtype)
        if bad := read(np.arange(len(names)), pixels):
            raise RunError(describe_unusable(bad, len(names), ""))
        return self._network.prepare(torch.from_numpy(pixels), 0)

    def predict(
        self, images: Any, *, batch_size: int | None = None, skip_bad: bool = False
    ) -> Predictions:
        """Return the class probabilities of images, computed as by ``python -m hpctrain predict``.

        `images` are given as to `preprocess`. `batch_size` images pass through the network at a
        time, by default as many as in the run's own test. Raises RunError for images that cannot be
        used; with `skip_bad` they are left out, and listed in the result. Raises UsageError.
        """
        if not self._network.task.classes:
            raise UsageError("this network restores images: call model(preprocess(images))")
        if batch_size is not None and batch_size < 1:
            raise UsageError(f"batch_size {batch_size}: give 1 or more")
        names, read, dtype, are_files = open_images(self._network.saved, images)
        network = dataclasses.replace(self._network, block=batch_size or self._network.block)
        with evaluating(self.model), torch_settings(network.precision, benchmark=False):
            blocks = list(classify_blocks(network, names, read, dtype))
        bad = {row: why for block in blocks for row, why in block.unusable.items()}
        if bad and not skip_bad:
            raise RunError(describe_unusable(bad, len(names), ": skip_bad=True leaves them out"))
        rows = [row for row in range(len(names)) if row not in bad]
        column = np.array([names[row] for row in rows], str) if are_files else np.array(rows, int)
        nothing = np.empty((0, len(self.classes)), np.float32)
        found = np.concatenate([nothing, *(block.probabilities for block in blocks)])
        unusable = {names[row]: reason for row, reason in bad.items()}
        first = {"file" if are_files else "row": column}
        return Predictions(first, self.classes, found, unusable)
