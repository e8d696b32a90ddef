"""A trained network: its file, model.safetensors, and the loop that passes images through it.

The file holds everything needed to use the network again. Its metadata (JSON values) are the
network's name and options, image shape (H, W, C), class names, input mean and standard deviation,
the pack it was trained on, the run, the step and its figures.

Images pass through the network in fixed blocks, while a thread reads one block ahead. Random
numbers that are drawn for a block depend on its number only: equal weights have equal figures at
any step, in any run, on any number of ranks.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Generator, Iterable, Iterator
from contextlib import closing
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from hpctrain import __version__
from hpctrain.cluster import launched_local_rank
from hpctrain.config import Config, from_table, load_toml, require_trust
from hpctrain.config.functions import one_line
from hpctrain.data.loader import Prefetcher, Prepare, make_prepare
from hpctrain.data.pack import Pack
from hpctrain.data.partition import random_key
from hpctrain.data.split import Bad, Split
from hpctrain.errors import UsageError
from hpctrain.models import build, evaluating, load_weights, read_model
from hpctrain.parallel.device import choose_device, fork_rng, place, seed_torch, torch_settings
from hpctrain.plan import Plan
from hpctrain.report import find
from hpctrain.streams import Event, Upload, copy_to_device, copy_to_host
from hpctrain.tasks import Task, make_task
from hpctrain.text import say
from hpctrain.watchdog import doing

if TYPE_CHECKING:
    from hpctrain.inference.images import Images, Predictions


def describe(config: Config, plan: Plan, pack: Pack, state: dict[str, Any]) -> dict[str, Any]:
    """Return the metadata of a network; `state` holds its run, step and figures."""
    options = ("small_stem", "task", "noise", "noise_level", "channels_last")
    mean, std = plan.scaling or (None, None)
    return {
        "hpctrain": __version__,
        "model": plan.model,
        **{name: getattr(config, name) for name in options},
        "image_shape": plan.image_shape,
        "classes": pack.classes,
        "mean": mean,
        "std": std,
        "pack": str(Path(pack.path).resolve()),
        "pack_uuid": pack.uuid,
        "provenance": pack.provenance,
        "external": pack.external,
        "precision": plan.precision,
        "evaluation_rows": plan.evaluation_rows,
        "class_weights": plan.class_weights,
        "own_loss": config.loss,
        "own_metric": config.metric,
        **state,
    }


def find_model(target: str, runs_dir: str, best: bool = False) -> Path:
    """Find the .safetensors file of a run by its name or folder, or given as a file.

    With `best`, `target` is a sweep, and the file is that of its best run, which is printed. Raises
    UsageError if there is none.
    """
    for path in (Path(runs_dir) / target, Path(target)):
        file = path / find.NETWORK_FILE
        if (path / find.SWEEP_FILE).is_file():
            if not best:
                raise UsageError(f"{path} is a sweep: name one of its runs, or give --best")
            run, why = find.best_run(path)
            say(f"best of {path}: {run.name}, by {why}", sys.stderr)
            return run / file.name
        if best or not path.exists():
            continue
        if path.is_file() or file.is_file():
            return path if path.is_file() else file
        if not (better := find.best_steps(path)):
            text = "the run has not ended; its command continues it"
            raise UsageError(f"{path} holds no {file.name}: {text}")
        say(f"{path} has not ended: its best network so far", sys.stderr)
        return find.best_file(path, better[-1])
    what, other = ("sweep", "folder") if best else ("run", "file")
    near = find.propose_run(target, runs_dir)
    raise UsageError(f"there is no {what} {target!r} in {runs_dir} and no such {other}{near}")


class Block(NamedTuple):
    """Samples that pass through the network at once."""

    number: int
    rows: np.ndarray  # (n,)
    labels: np.ndarray | None  # (n,); None: not known
    bad: Bad  # rows that cannot be used, and why


class Inference(NamedTuple):
    """A network on its device, ready to compute blocks of images."""

    model: nn.Module
    task: Task
    prepare: Prepare
    rows: int  # of a block: images that pass through the network at a time

    def blocks(self, samples: int) -> int:
        """Return the number of blocks of so many samples."""
        return -(-samples // self.rows)

    @torch.no_grad()
    def outputs(
        self,
        source: Split | Images,
        numbers: Iterable[int],
        compute: Callable[..., dict[str, Tensor]],
        go_on: Callable[[], bool] = lambda: True,
    ) -> Generator[tuple[Block, dict[str, np.ndarray]], None, None]:
        """Yield the blocks of these `numbers`, each with its results on the host, by name.

        `compute` is called with the input of a block and, if there are labels, the task's target,
        in evaluation mode and with the block's own random numbers. Unusable images are replaced by
        black ones. The first block for which `go_on` returns False ends the iteration.
        """
        device = next(self.model.parameters()).device
        shape = min(self.rows, len(source)), *source.image_shape
        upload = Upload(shape, source.dtype, device)

        def load(number: int) -> tuple[Block, tuple[Tensor, ...], Event]:
            rows = np.arange(number * self.rows, min(len(source), (number + 1) * self.rows))
            images, bad, key = upload.buffer(len(rows)), Bad(), random_key("evaluation", number)
            source.gather(rows, images, bad=bad)
            images[np.isin(rows, list(bad))] = 0
            labels = source.read_labels(rows, bad)

            def work(images: Tensor) -> tuple[Tensor, ...]:
                inputs = self.prepare(images, key)
                if labels is None:
                    return (inputs,)
                return self.task.pair(inputs, copy_to_device(torch.from_numpy(labels), device), key)

            tensors = upload.make(len(rows), work)
            return Block(number, rows, labels, bad), tensors, upload.record_event()

        def computed(loaded: Prefetcher) -> Iterator[tuple[Block, dict[str, Tensor]]]:
            for block, tensors, made in loaded:
                doing(f"block {block.number} of {source.name}")
                if not go_on():
                    return
                upload.take(made, tensors)
                seed_torch(random_key("evaluation", block.number), device)
                yield block, compute(*tensors)

        with (
            evaluating(self.model),
            fork_rng(device),
            closing(Prefetcher(load, numbers)) as loaded,  # also if a traceback keeps this frame
        ):
            yield from copy_to_host(computed(loaded), device)


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
    torch.device. Raises UsageError, or for a device that is not there what torch raises.
    """
    path, name = find_model(os.fspath(run), os.fspath(runs_dir), best), str(device)
    if name in ("auto", "cpu", "cuda"):
        return TrainedNetwork(path, choose_device(name, launched_local_rank()), trust_code)
    return TrainedNetwork(path, torch.device(name), trust_code)


class TrainedNetwork:
    """A trained network, as `load` returns it."""

    def __init__(
        self,
        path: Path,
        device: torch.device,
        trust_code: bool = False,
        precision: str | None = None,
        rows: int | None = None,
    ) -> None:
        """Read the network of a file; precision and rows of a block default to those of its run.

        Raises UsageError for a file not written by hpctrain, and if it names a function of the
        user's own without `trust_code`.
        """
        state, known = read_model(path)
        try:
            name, last, settings = known["model"], known["channels_last"], {**known}
            shape, classes = tuple(known["image_shape"]), tuple(known["classes"])
            require_trust({"model": name}, path, trust_code)
            with torch.random.fork_rng(devices=[]):  # first weights are drawn, and replaced
                model = build(name, shape, len(classes), known["small_stem"])
        except (KeyError, TypeError, ValueError) as error:
            why = "" if isinstance(error, KeyError) else f" ({one_line(error)})"
            raise UsageError(
                f"{path} holds weights but not the network they belong to{why}: it was not written"
                " at the end of a run"
            ) from error
        load_weights(model, state, path)
        self.path, self.device, self._trust_code = path, device, trust_code
        self.model: nn.Module = place(model.eval(), device, last)  # plain torch
        self.classes: tuple[str, ...] = classes
        self.image_shape: tuple[int, int, int] = shape  # (H, W, C)
        #: All that the file holds: names of the network and the pack, step, figures and so on.
        self.metadata: dict[str, Any] = known
        like, scaling = next(model.parameters()), known["mean"] and (known["mean"], known["std"])
        settings["precision"] = precision or known["precision"]
        task = make_task(settings, len(classes), like)
        prepare = make_prepare(device, like.dtype, last, scaling)
        self.inference = Inference(model, task, prepare, rows or known["evaluation_rows"])

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
        path = self.path.with_name(find.SETTINGS_FILE)
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
        from hpctrain.inference.images import open_images, refuse_unusable  # imports Pillow

        opened, bad = open_images(self, images), Bad()
        pixels = np.empty((len(opened), *self.image_shape), opened.dtype)
        opened.gather(np.arange(len(opened)), pixels, bad=bad)
        refuse_unusable(bad, len(opened))
        return self.inference.prepare(torch.from_numpy(pixels), 0)

    def predict(
        self, images: Any, *, batch_size: int | None = None, skip_bad: bool = False
    ) -> Predictions:
        """Return the class probabilities of images, computed as by ``python -m hpctrain predict``.

        `images` are given as to `preprocess`. `batch_size` images pass through the network at a
        time, by default as many as in the run's own test. Raises RunError for images that cannot be
        used; with `skip_bad` they are left out, and listed in the result. Raises UsageError.
        """
        from hpctrain.inference import images as given  # imports Pillow

        if not self.inference.task.classes:
            raise UsageError("this network restores images: call model(preprocess(images))")
        if batch_size is not None and batch_size < 1:
            raise UsageError(f"batch_size {batch_size}: give 1 or more")
        opened, none = given.open_images(self, images), np.empty((0, len(self.classes)), np.float32)
        inference = self.inference._replace(rows=batch_size or self.inference.rows)
        with torch_settings(inference.task.precision, benchmark=False):
            numbers = range(inference.blocks(len(opened)))
            found = list(given.classify_blocks(inference, opened, numbers))
        bad = {row: why for block, _ in found for row, why in block.bad.items()}
        if not skip_bad:
            given.refuse_unusable(bad, len(opened), ": skip_bad=True leaves them out")
        rows = np.concatenate([np.arange(0), *(block.rows for block, _ in found)])
        files = np.array([opened.names[row] for row in rows], str)
        probabilities = np.concatenate([none, *(part for _, part in found)])
        unusable = {opened.names[row]: why for row, why in bad.items()}
        names = {"file": files} if opened.are_files else {"row": rows}
        return given.Predictions(names, self.classes, probabilities, unusable)


def require_split(pack: Pack, split: str) -> None:
    """Raise UsageError unless the pack has samples in this split."""
    if split not in pack.splits or not pack.splits[split].samples:
        there = ", ".join(name for name, info in pack.splits.items() if info.samples)
        raise UsageError(f"{pack.path} has no images in the split {split!r}, only in {there}")
