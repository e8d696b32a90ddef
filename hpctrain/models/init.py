"""Initial weights, ``--init``: from files of hpctrain, and of other programs for the same network.

Names may have a prefix: "module." (DataParallel), "model." (Lightning), "backbone.". It is found,
not listed: it is the one with which most names are those of the network.

Of files of torch.save (.pth, .pt, .ckpt), only tensors and plain values are read
(``weights_only``), so that no code of a file is executed. The tensors may lie in an entry, such as
"state_dict".
"""

from __future__ import annotations

import argparse
import re
import warnings
import zipfile
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from hpctrain.config.imports import one_line
from hpctrain.errors import UsageError
from hpctrain.models.build import convert, own_input
from hpctrain.models.weights import is_torch_file, load_weights, read_model
from hpctrain.text import listed
from hpctrain.typed import typed

COUNTER = "num_batches_tracked"  # of a batch-norm layer; old files lack it
Tensors = dict[str, Tensor]
Statistics = tuple[tuple[float, ...], tuple[float, ...]]  # mean, std by channel


@dataclass(frozen=True)
class InitialWeights:
    """What `load_init` took from a file, and what it did not."""

    path: str
    classes: int  # of the network
    channels: int
    entry: str  # of the file, in which the tensors lie; empty: the file itself
    prefix: str  # which their names had
    tensors: int  # of the network, without batch counters
    fresh: dict[str, int]  # tensors of the classifier that keep their values, and the classes of
    # the file's; 0 if it has none
    adapted: dict[str, int]  # first convolutions, and the channels of the file's
    left_out: tuple[str, ...]  # tensors of the file
    resized: tuple[str, ...]  # tensors for another size of images, such as position embeddings
    named: bool  # whether the file says how its images were normalized
    statistics: Statistics | None  # which it names; None: images in [0, 1]

    def __str__(self) -> str:
        """Return one line: what was loaded, replaced, and left out."""
        place = f"{self.entry} of {self.path}" if self.entry else self.path
        text = f"--init {place}: {self.tensors - len(self.fresh)} of {self.tensors} tensors loaded"
        if self.prefix:
            text += f", their names without {self.prefix!r}"
        if self.fresh:
            layers = listed(dict.fromkeys(name.rpartition(".")[0] for name in self.fresh))
            theirs = max(self.fresh.values())
            why = f"the file's has {theirs}" if theirs else "the file has none of this name"
            text += f"; classifier {layers} ({self.classes} classes) starts fresh: {why}"
        for name, theirs in self.adapted.items():
            text += f"; {name} adapted from {theirs} to {self.channels} channels"
        if self.resized:
            text += f"; resized for images of this size: {listed(self.resized, 3)}"
        if self.left_out:
            text += f"; left out: {listed(self.left_out, 3)}"
        return text

    def facts(self) -> dict[str, Any]:
        """Return the same for the record."""
        names = ("path", "entry", "prefix", "tensors", "fresh", "adapted", "left_out", "resized")
        return {name: getattr(self, name) for name in names}


def load_init(model: nn.Module, path: str | Path, classes: int, channels: int) -> InitialWeights:
    """Load initial weights into `model`, a network for `classes` classes and `channels` channels.

    All tensors must fit, with three exceptions. A classifier for another number of classes, or that
    is not in the file, keeps its values. A first convolution for another number of channels gets
    the file's weights as in timm: for one channel their sum over the channels, otherwise repeated
    and scaled by the ratio of the numbers of channels. Batch counters may be missing. Raises
    UsageError that names the first tensors that do not fit.
    """
    found, metadata, entry = read_weights(path)
    named = "mean" in metadata, _statistics(path, metadata)
    tensors, prefix = rename(found, model.state_dict())
    outside = tuple(name for name in found if prefix and not name.startswith(prefix))
    resized: tuple[str, ...] = ()
    try:
        loaded = _load(model, path, tensors, classes, channels)
    except UsageError as error:
        converted = convert(model, dict(tensors))
        try:
            if converted is None:
                raise
            loaded = _load(model, path, converted, classes, channels)
        except UsageError:
            saved_for = metadata.get("model")
            hint = f"; it was saved for --model {saved_for}" if saved_for else ""
            raise UsageError(f"{error}{hint}") from None
        resized = tuple(n for n in tensors if n in converted and _differs(n, tensors, converted))
    counted = sum(not name.endswith(COUNTER) for name in model.state_dict())
    loaded = loaded._replace(left_out=outside + loaded.left_out)
    own = str(path), classes, channels, entry, prefix, counted
    return InitialWeights(*own, *loaded, resized, *named)


class Loaded(NamedTuple):
    """Tensors that a network did not get as they were."""

    fresh: dict[str, int]
    adapted: dict[str, int]
    left_out: tuple[str, ...]


def _load(
    model: nn.Module, path: str | Path, tensors: Tensors, classes: int, channels: int
) -> Loaded:
    """Load tensors that fit, but for the exceptions of `load_init`, into `model`."""
    state = model.state_dict()
    fresh = _fresh_classifier(model, tensors, classes)
    left_out = [] if not fresh or max(fresh.values()) else _other_classifier(tensors, state)
    adapted = {
        name: tensors[name].shape[1]
        for name, own in state.items()
        if name in tensors and _differs_in_channels(tensors[name], own, channels)
    }
    fitting = {name: value for name, value in tensors.items() if name not in left_out}
    fitting |= {name: state[name] for name in fresh}
    fitting |= {name: adapt_channels(tensors[name], channels) for name in adapted}
    load_weights(model, fitting, path)
    return Loaded(fresh, adapted, tuple(left_out))


def _statistics(path: str | Path, metadata: Mapping[str, Any]) -> Statistics | None:
    """Return the mean and std that a file of hpctrain names. Raises UsageError if none can be."""
    try:
        mean, std = (
            typed(metadata.get(name), tuple[float, ...] | None, name) for name in ("mean", "std")
        )
        if mean is None and std is None:
            return None
        if not mean or not std or len(mean) != len(std) or not min(std) > 0:
            raise ValueError(f"mean is {mean} and std {std}")
    except ValueError as error:
        raise UsageError(f"{path}: its metadata are corrupt, {error}") from error
    return mean, std


def rename(found: Tensors, wanted: Iterable[str]) -> tuple[Tensors, str]:
    """Return the tensors whose names begin with a prefix, without it, and the prefix.

    It is the one with which most names are among the `wanted`, possibly none.
    """
    names, counts = set(wanted), Counter[str]({"": 0})
    for name in found:
        parts = name.split(".")
        for first in range(len(parts)):
            if ".".join(parts[first:]) in names:
                counts["".join(f"{part}." for part in parts[:first])] += 1
    prefix = max(counts, key=counts.__getitem__)
    return {n.removeprefix(prefix): t for n, t in found.items() if n.startswith(prefix)}, prefix


def _differs(name: str, first: Tensors, second: Tensors) -> bool:
    return first[name].shape != second[name].shape


def _fresh_classifier(model: nn.Module, tensors: Tensors, classes: int) -> dict[str, int]:
    """Return the classifier's tensors that `tensors` cannot fill, with their number of classes."""
    parameters = dict(model.named_parameters())
    known = own_input(model).get("classifier")  # timm's networks may have two
    named = known or next(reversed(parameters)).rpartition(".")[0]
    heads = (named,) if isinstance(named, str) else named
    own = [name for name in parameters if name.rpartition(".")[0] in heads]
    if any(parameters[name].shape[:1] != (classes,) for name in own):
        return {}
    if not any(name in tensors for name in own):
        return dict.fromkeys(own, 0)
    differing = [n for n in own if n in tensors and tensors[n].shape != parameters[n].shape]
    alike = all(
        tensors[n].dim() > 0 and tensors[n].shape[1:] == parameters[n].shape[1:] for n in differing
    )
    return {name: len(tensors[name]) for name in differing} if alike else {}


def _other_classifier(tensors: Tensors, state: Tensors) -> list[str]:
    """Return the names of the file's classifier, if nothing else is not in the network."""
    extra = [name for name in tensors if name not in state]
    layers = {name.rpartition(".")[0] for name in extra}
    return extra if len(layers) == 1 and len(extra) <= 2 else []


def _differs_in_channels(theirs: Tensor, own: Tensor, channels: int) -> bool:
    """Whether both are weights of a first convolution that differ in the channels of images."""
    alike = theirs.dim() == own.dim() == 4 and theirs.shape[::2] == own.shape[::2]
    sizes = theirs.shape[1] != own.shape[1] == channels if alike else False
    return alike and sizes and theirs.shape[1] in (1, 3) and theirs.shape[3] == own.shape[3]


def adapt_channels(weight: Tensor, channels: int) -> Tensor:
    """Return the weight (out, I, h, w) of a convolution for images of I channels for `channels`."""
    theirs = weight.shape[1]
    if channels == 1:
        return weight.sum(1, keepdim=True)
    times = -(-channels // theirs)
    return weight.repeat(1, times, 1, 1)[:, :channels] * (theirs / channels)


# Entries of a checkpoint that hold weights. Averaged ones come first, as in timm.
ENTRIES = ("state_dict_ema", "model_ema", "ema", "state_dict", "model_state_dict", "model")
ARGUMENTS = argparse.Namespace  # stored by training scripts of timm and others; runs no code


def read_weights(path: str | Path) -> tuple[Tensors, dict[str, Any], str]:
    """Read the tensors of a file, its metadata, and the name of the entry in which they lie.

    Raises UsageError if it is neither a safetensors file nor one of torch.save, is damaged, or
    holds objects that only code of the file could make.
    """
    try:
        with open(path, "rb") as file:
            head = file.read(4)
    except OSError as error:
        raise UsageError(f"cannot read the weights {path}: {error.strerror or error}") from error
    if not is_torch_file(head):
        return *read_model(path), ""
    try:
        if head[:2] == b"PK":
            with zipfile.ZipFile(path) as archive:
                if damaged := archive.testzip():  # torch.load does not compare the checksums
                    raise ValueError(f"{damaged} does not match its CRC-32")
        with torch.serialization.safe_globals([ARGUMENTS]), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about old formats
            found = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:
        if unknown := re.search(r"GLOBAL (\S+)", str(error)):
            raise UsageError(
                f"{path} holds an object of the type {unknown[1]}, and no code of a file is"
                " executed to make it: save the network's .state_dict() alone"
            ) from error
        size = f"{Path(path).stat().st_size:,} bytes"
        raise UsageError(
            f"{path} ({size}) cannot be read by torch.load: {one_line(error)[:200]}"
        ) from error
    return _tensors_of(path, found)


def _tensors_of(path: str | Path, found: Any) -> tuple[Tensors, dict[str, Any], str]:
    """Find the tensors among the contents of a file of torch.save."""
    homes = {"": found, **{e: found[e] for e in ENTRIES if isinstance(found, dict) and e in found}}
    if isinstance(found, dict):
        homes |= {name: value for name, value in found.items() if isinstance(name, str)}
    tensors = {entry: _by_name(homes[entry]) for entry in homes}
    usual = [entry for entry in ENTRIES if tensors.get(entry)]
    entry = usual[0] if usual else max(tensors, key=lambda name: len(tensors[name]))
    if not tensors[entry]:
        raise UsageError(f"{path} holds no weights: no tensors by name, also not in an entry of it")
    return tensors[entry], {}, entry


def _by_name(home: Any) -> Tensors:
    """Return the tensors of a dictionary, if there are matrices among them."""
    held = home.items() if isinstance(home, Mapping) else ()
    tensors = {n: t for n, t in held if isinstance(n, str) and isinstance(t, Tensor)}
    return tensors if any(tensor.dim() > 1 for tensor in tensors.values()) else {}
