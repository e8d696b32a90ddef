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
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from hpctrain.config.functions import one_line
from hpctrain.errors import UsageError
from hpctrain.models.build import own_input
from hpctrain.models.weights import COUNTER, is_torch_file, load_weights, read_model
from hpctrain.text import listed

# Entries of a checkpoint that hold weights. Averaged ones come first, as in timm.
ENTRIES = ("state_dict_ema", "model_ema", "ema", "state_dict", "model_state_dict", "model")
ARGUMENTS = argparse.Namespace  # stored by training scripts of timm and others; runs no code
Tensors = dict[str, Tensor]
Scaling = tuple[tuple[float, ...], ...]  # mean and std by channel; () = images in [0, 1]


@dataclass(frozen=True)
class InitialWeights:
    """What `load_init` took from a file, and what it did not."""

    path: str
    entry: str  # of the file, in which the tensors lie; empty: the file itself
    prefix: str  # which their names had
    tensors: int  # of the network, without batch counters
    fresh: dict[str, int]  # tensors of the classifier, which keep their values: the file's classes
    adapted: dict[str, int]  # first convolutions, and the channels of the file's
    left_out: tuple[str, ...]  # tensors of the file
    scaling: Scaling | None  # of its images; None: the file does not say

    def __str__(self) -> str:
        """Return one line: what was loaded, replaced, and left out."""
        place = f"{self.entry} of {self.path}" if self.entry else self.path
        text = f"--init {place}: {self.tensors - len(self.fresh)} of {self.tensors} tensors loaded"
        if self.prefix:
            text += f", their names without {self.prefix!r}"
        if self.fresh:
            classes = max(self.fresh.values()) or "no"
            text += f"; the classifier starts fresh ({classes} classes in the file)"
            text += f": {listed(self.fresh, 3)}"
        if self.adapted:
            text += f"; adapted to the channels of the images: {listed(self.adapted)}"
        if self.left_out:
            text += f"; left out: {listed(self.left_out, 3)}"
        return text


def load_init(model: nn.Module, path: str | Path, classes: int, channels: int) -> InitialWeights:
    """Load initial weights into `model`, a network for `classes` classes and `channels` channels.

    All tensors must fit, with three exceptions. A classifier for another number of classes, or that
    is not in the file, keeps its values. A first convolution for another number of channels gets
    the file's weights as in timm: for one channel their sum over the channels, otherwise repeated
    and scaled by the ratio of the numbers of channels. Batch counters may be missing. Raises
    UsageError that names the first tensors that do not fit.
    """
    found, metadata, entry = read_weights(path)
    state = model.state_dict()
    tensors, prefix = rename(found, state)
    left_out = [name for name in found if not name.startswith(prefix)]
    fresh = fresh_classifier(model, tensors, classes)
    others = [name for name in tensors if name not in state]
    if fresh and not any(fresh.values()) and len({n.rpartition(".")[0] for n in others}) == 1:
        left_out += others  # the classifier of the file
        tensors = {name: tensor for name, tensor in tensors.items() if name in state}
    tensors |= {name: state[name] for name in fresh}
    adapted = {}
    for name, own in state.items():
        if name in tensors and own.dim() == 4 and own.shape[1] == channels:
            theirs, (out, _, *size) = tensors[name], own.shape
            if theirs.shape != own.shape and theirs.shape in ((out, 1, *size), (out, 3, *size)):
                adapted[name] = n = theirs.shape[1]
                repeated = theirs.repeat(1, -(-channels // n), 1, 1)[:, :channels] * (n / channels)
                tensors[name] = theirs.sum(1, keepdim=True) if channels == 1 else repeated
    saved_for = f" (saved for --model {metadata['model']})" if "model" in metadata else ""
    load_weights(model, tensors, f"{path}{saved_for}")
    scaling = metadata.get("mean") and (tuple(metadata["mean"]), tuple(metadata["std"]))
    return InitialWeights(
        path=str(path),
        entry=entry,
        prefix=prefix,
        tensors=sum(not name.endswith(COUNTER) for name in state),
        fresh=fresh,
        adapted=adapted,
        left_out=tuple(left_out),
        scaling=(scaling or ()) if "mean" in metadata else None,
    )


def rename(found: Tensors, wanted: Tensors) -> tuple[Tensors, str]:
    """Return the tensors whose names begin with a prefix, without it, and the prefix.

    It is the one with which most names are among the `wanted`, possibly none.
    """
    counts = Counter({"": 0})
    for name in found:
        starts = (0, *(dot.end() for dot in re.finditer(r"\.", name)))
        counts.update(name[:start] for start in starts if name[start:] in wanted)
    prefix = max(counts, key=counts.__getitem__)
    return {n.removeprefix(prefix): t for n, t in found.items() if n.startswith(prefix)}, prefix


def fresh_classifier(model: nn.Module, tensors: Tensors, classes: int) -> dict[str, int]:
    """Return the classifier's tensors that `tensors` cannot fill, with their number of classes."""
    parameters = dict(model.named_parameters())
    last = next(reversed(parameters)).rpartition(".")[0]
    heads = own_input(model).get("classifier") or last  # timm's networks may have two
    heads = (heads,) if isinstance(heads, str) else heads
    own = {n: p.shape for n, p in parameters.items() if n.rpartition(".")[0] in heads}
    if any(shape[:1] != (classes,) for shape in own.values()):
        return {}
    if not own.keys() & tensors.keys():
        return dict.fromkeys(own, 0)
    theirs = {name: tensors[name].shape for name in own if name in tensors}
    return {n: s[0] for n, s in theirs.items() if s != own[n] and s and s[1:] == own[n][1:]}


def read_weights(path: str | Path) -> tuple[Tensors, dict[str, Any], str]:
    """Read the tensors of a file, its metadata, and the name of the entry in which they lie.

    Raises UsageError if it is neither a safetensors file nor one of torch.save, is damaged, or
    holds objects that only code of the file could make.
    """
    if not is_torch_file(path):
        return *read_model(path), ""
    try:
        if zipfile.is_zipfile(path):
            with zipfile.ZipFile(path) as archive:
                if damaged := archive.testzip():  # torch.load does not compare the checksums
                    raise ValueError(f"{damaged} does not match its CRC-32")
        with torch.serialization.safe_globals([ARGUMENTS]), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about old formats
            found = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:
        reason = f"cannot be read by torch.load: {one_line(error)[:200]}"
        if unknown := re.search(r"GLOBAL (\S+)", str(error)):
            reason = (
                f"holds an object of the type {unknown[1]}, and no code of a file is executed to"
                " make it: save the network's .state_dict() alone"
            )
        raise UsageError(f"{path} {reason}") from error
    homes = {"": found, **found} if isinstance(found, dict) else {}
    tensors = {
        entry: {n: t for n, t in home.items() if isinstance(n, str) and isinstance(t, Tensor)}
        for entry, home in homes.items()
        if isinstance(home, Mapping)
    }
    holding = [e for e, held in tensors.items() if any(t.dim() > 1 for t in held.values())]
    if not holding:
        raise UsageError(f"{path} holds no weights: no tensors by name, also not in an entry of it")
    usual = [entry for entry in ENTRIES if entry in holding]
    entry = (usual or sorted(holding, key=lambda entry: -len(tensors[entry])))[0]
    return tensors[entry], {}, entry
