"""Initial weights, ``--init``: from files of hpctrain, and of other programs for the same network.

Names may have a prefix: "module." (DataParallel), "model." (Lightning), "backbone.". It is found,
not listed: it is the one with which most names are those of the network. torch.compile and
DataParallel around a part of a network put "_orig_mod." or "module." inside names.

In a file of torch.save (``torchfile.py``), the tensors may lie in an entry, such as "state_dict",
or in an entry of an entry, such as "state.model".
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from hpctrain.errors import UsageError
from hpctrain.models.build import own_input
from hpctrain.models.torchfile import read_torch_file, tensors_of
from hpctrain.models.weights import COUNTER, is_torch_file, load_weights, read_model
from hpctrain.text import listed

# Entries of a checkpoint that hold weights. Averaged ones come first, as in timm.
ENTRIES = ("state_dict_ema", "model_ema", "ema", "state_dict", "model_state_dict", "model")
WRAPPERS = re.compile(r"\b(_orig_mod|module)\.")  # of torch.compile and DataParallel
DEPTH = 3  # entries of entries in which weights are looked for
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
    stored: dict[str, Any] | None  # scale of its training's images; None: the file does not say

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


def load_init(
    model: nn.Module,
    path: str | Path,
    classes: int,
    channels: int,
) -> InitialWeights:
    """Load initial weights into `model`, a network for `classes` classes and `channels` channels.

    All tensors must fit, with three exceptions. A classifier for another number of classes, or that
    is not in the file, keeps its values. A first convolution for another number of channels gets
    the file's weights as in timm: for one channel their sum over the channels, otherwise repeated
    and scaled by the ratio of the numbers of channels. Batch counters may be missing. Raises
    UsageError that names the first tensors that do not fit.
    """
    state = model.state_dict()
    found, metadata, entry = read_weights(path, state)
    tensors, prefix, left_out = rename(found, state)
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
        stored=metadata.get("scale"),
    )


def rename(found: Tensors, wanted: Tensors) -> tuple[Tensors, str, list[str]]:
    """Return the tensors whose names begin with a prefix, without it, the prefix, and other names.

    It is the one with which most names are among the `wanted`, possibly none. If more are without
    wrappers inside names, these are removed, too, and are part of the prefix that is returned.
    """
    plain = {name: name for name in found}
    own = {name: name for name in wanted}
    prefix, count = best_prefix(plain.values(), own)
    bare = {name: WRAPPERS.sub("", name) for name in found}
    own_bare = {WRAPPERS.sub("", name): name for name in wanted}
    bare_prefix, bare_count = best_prefix(bare.values(), own_bare)
    removed = ""
    if bare_count > count and len(set(bare.values())) == len(bare):
        plain, own, prefix = bare, own_bare, bare_prefix
        removed = "".join(dict.fromkeys(m[0] for name in found for m in WRAPPERS.finditer(name)))
    tensors, others = {}, []
    for name, tensor in found.items():
        if plain[name].startswith(prefix):
            short = plain[name].removeprefix(prefix)
            tensors[own.get(short, short)] = tensor
        else:
            others.append(name)
    return tensors, prefix + removed, others


def best_prefix(names: Iterable[str], wanted: Mapping[str, str]) -> tuple[str, int]:
    """Return the prefix without which most `names` are `wanted`, and their number."""
    counts = Counter({"": 0})
    for name in names:
        starts = (0, *(dot.end() for dot in re.finditer(r"\.", name)))
        counts.update(name[:start] for start in starts if name[start:] in wanted)
    return max(counts.items(), key=lambda item: item[1])


def fresh_classifier(
    model: nn.Module,
    tensors: Tensors,
    classes: int,
) -> dict[str, int]:
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


def read_weights(path: str | Path, wanted: Tensors) -> tuple[Tensors, dict[str, Any], str]:
    """Read the tensors of a file, its metadata, and the name of the entry in which they lie.

    Of several entries that fit the `wanted` tensors it is one of `ENTRIES`, else the best fitting.
    Raises UsageError if it is neither a safetensors file nor one of torch.save, is damaged, or
    holds objects that only code of the file could make.
    """
    if not is_torch_file(path):
        return *read_model(path), ""
    content = read_torch_file(path)
    tensors = {entry: tensors_of(held) for entry, held in entries_of(content)}
    holding = [e for e, held in tensors.items() if any(t.dim() > 1 for t in held.values())]
    if not holding:
        text = "no tensors by name, also not in an entry of it"
        raise UsageError(f"{path} holds no weights, {text}, but {summary(content)}")
    fitting = {entry: count_fitting(rename(tensors[entry], wanted)[0], wanted) for entry in holding}
    half = max(fitting.values()) / 2  # of the best fitting: less is another network
    entry = min(
        holding, key=lambda e: (fitting[e] < half, rank_of(e), -fitting[e], -len(tensors[e]))
    )
    return tensors[entry], {}, entry


def count_fitting(found: Tensors, wanted: Tensors) -> int:
    """Return how many tensors have the name and shape of one of the `wanted`."""
    return sum(n in wanted and t.shape == wanted[n].shape for n, t in found.items())


def entries_of(
    content: Any,
    name: str = "",
    depth: int = 0,
) -> Iterator[tuple[str, Mapping]]:
    """Yield the dicts of a file by name: "" itself, "state" an entry, "state.model" one of it."""
    if not isinstance(content, Mapping):
        return
    yield name, content
    for key, value in content.items():
        if isinstance(key, str) and depth < DEPTH:
            yield from entries_of(value, f"{name}.{key}" if name else key, depth + 1)


def rank_of(entry: str) -> int:
    """Return the place of an entry among those that usually hold weights; all others are last."""
    last = entry.rpartition(".")[2]
    return ENTRIES.index(last) if last in ENTRIES else len(ENTRIES)


def summary(content: Any) -> str:
    """Return in a few words what a file holds."""
    kind = type(content).__name__
    if isinstance(content, Mapping):
        return f"{kind} with {listed(map(str, content), 5) or 'nothing'}"
    size = f" of {len(content)}" if isinstance(content, list | tuple) else ""
    return f"{kind}{size}"
