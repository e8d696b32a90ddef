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
from hpctrain.models.library import own_input
from hpctrain.models.torchfile import read_torch_file, tensors_of
from hpctrain.models.weights import COUNTER, Tensors, is_torch_file, load_weights, read_model
from hpctrain.text import listed

# Entries of a checkpoint that hold weights. Averaged ones come first, as in timm.
ENTRIES = ("state_dict_ema", "model_ema", "ema", "state_dict", "model_state_dict", "model")
WRAPPERS = re.compile(r"\b(_orig_mod|module)\.")  # of torch.compile and DataParallel
DEPTH = 3  # entries of entries in which weights are looked for
#: Mean and std by channel; () = images in [0, 1]; "image" = each channel of each image by itself.
Normalization = tuple[tuple[float, ...], ...] | str


@dataclass(frozen=True)
class InitialWeights:
    """The tensors that `load_init` took from a file, and those that it left out."""

    path: str
    entry: str  # of the file, in which the tensors lie; empty: the file itself
    prefix: str  # removed from their names
    tensors: int  # of the network, without batch counters
    fresh: dict[str, int]  # tensors of the classifier, which keep their values: the file's classes
    adapted: dict[str, int]  # first convolutions, and the channels of the file's
    left_out: tuple[str, ...]  # tensors of the file
    normalization: Normalization | None  # of its images; None: the file does not say
    stored: dict[str, Any] | None  # scale of its training's images; None: the file does not say
    metadata: Mapping[str, Any]  # of a file of hpctrain; else empty

    def __str__(self) -> str:
        """Return one line: what was loaded, replaced, and left out."""
        source = self.path
        if self.entry:
            source = f"{self.entry} of {self.path}"
        loaded = self.tensors - len(self.fresh)
        text = f"--init {source}: {loaded} of {self.tensors} tensors loaded"
        if self.prefix:
            text += f", their names without {self.prefix!r}"
        if self.fresh:
            classes = max(self.fresh.values()) or "no"
            text += (
                f"; the classifier starts fresh ({classes} classes in the file)"
                f": {listed(self.fresh, 3)}"
            )
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
    state = model.state_dict()
    stored, metadata, entry = read_weights(path, state)
    tensors, prefix, left_out = match_names(stored, state)
    fresh = fresh_classifier(model, tensors, classes)
    others = [name for name in tensors if name not in state]
    layers = {name.rpartition(".")[0] for name in others}
    if fresh and not any(fresh.values()) and len(layers) == 1:
        left_out += others  # the classifier of the file
        tensors = {name: tensor for name, tensor in tensors.items() if name in state}
    tensors |= {name: state[name] for name in fresh}
    adapted = {}
    for name, current in state.items():
        if name in tensors and is_for_other_channels(tensors[name], current, channels):
            adapted[name] = tensors[name].shape[1]
            tensors[name] = adapt_channels(tensors[name], channels)
    source = str(path)
    if "model" in metadata:
        source += f" (saved for --model {metadata['model']})"
    load_weights(model, tensors, source)
    return InitialWeights(
        path=str(path),
        entry=entry,
        prefix=prefix,
        tensors=len([name for name in state if not name.endswith(COUNTER)]),
        fresh=fresh,
        adapted=adapted,
        left_out=tuple(left_out),
        normalization=normalization_of(metadata),
        stored=metadata.get("scale"),
        metadata=metadata,
    )


def normalization_of(metadata: Mapping[str, Any]) -> Normalization | None:
    """Return the normalization of images in a file's metadata; None if it has none."""
    if "mean" not in metadata:
        return None
    if "normalization" in metadata:
        return str(metadata["normalization"])
    if not metadata["mean"]:
        return ()
    return tuple(metadata["mean"]), tuple(metadata["std"])


def is_for_other_channels(stored: Tensor, current: Tensor, channels: int) -> bool:
    """Whether a stored kernel fits a first convolution but for its 1 or 3 channels of images."""
    if current.dim() != 4 or current.shape[1] != channels or stored.shape == current.shape:
        return False
    out, _, *size = current.shape
    return stored.shape in ((out, 1, *size), (out, 3, *size))


def adapt_channels(kernel: Tensor, channels: int) -> Tensor:
    """Return the kernel (out, C, H, W) of a first convolution for another number of channels."""
    if channels == 1:
        return kernel.sum(1, keepdim=True)
    n = kernel.shape[1]
    repeated = kernel.repeat(1, -(-channels // n), 1, 1)[:, :channels]
    return repeated * (n / channels)


def match_names(stored: Tensors, wanted: Tensors) -> tuple[Tensors, str, list[str]]:
    """Return the tensors whose names begin with a prefix, without it, the prefix, and other names.

    It is the one with which most names are among the `wanted`, possibly none. If more are without
    wrappers inside names, these are removed, too, and are part of the prefix that is returned.
    """
    compared = {name: name for name in stored}  # by name in the file
    targets = {name: name for name in wanted}  # by the name that is compared
    prefix, count = best_prefix(compared.values(), targets)
    removed = ""
    bare = {name: WRAPPERS.sub("", name) for name in stored}
    bare_targets = {WRAPPERS.sub("", name): name for name in wanted}
    bare_prefix, bare_count = best_prefix(bare.values(), bare_targets)
    if bare_count > count and len(set(bare.values())) == len(bare):
        compared = bare
        targets = bare_targets
        prefix = bare_prefix
        wrappers = (match[0] for name in stored for match in WRAPPERS.finditer(name))
        removed = "".join(dict.fromkeys(wrappers))
    tensors = {}
    others = []
    for name, tensor in stored.items():
        if compared[name].startswith(prefix):
            short = compared[name].removeprefix(prefix)
            tensors[targets.get(short, short)] = tensor
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


def fresh_classifier(model: nn.Module, tensors: Tensors, classes: int) -> dict[str, int]:
    """Return the classifier's tensors that `tensors` cannot fill, with their number of classes."""
    parameters = dict(model.named_parameters())
    last = next(reversed(parameters)).rpartition(".")[0]
    heads = own_input(model).get("classifier") or last  # timm's networks may have two
    if isinstance(heads, str):
        heads = (heads,)
    shapes = {
        name: parameter.shape
        for name, parameter in parameters.items()
        if name.rpartition(".")[0] in heads
    }
    if any(shape[:1] != (classes,) for shape in shapes.values()):
        return {}
    if not shapes.keys() & tensors.keys():
        return dict.fromkeys(shapes, 0)
    fresh = {}
    for name, shape in shapes.items():
        stored = tensors[name].shape if name in tensors else shape
        if stored != shape and stored and stored[1:] == shape[1:]:
            fresh[name] = stored[0]
    return fresh


def read_weights(path: str | Path, wanted: Tensors) -> tuple[Tensors, dict[str, Any], str]:
    """Read the tensors of a file, its metadata, and the name of the entry in which they lie.

    Of several entries that fit the `wanted` tensors it is one of `ENTRIES`, else the best fitting.
    Raises UsageError if it is neither a safetensors file nor one of torch.save, is damaged, or
    holds objects that only code of the file could make.
    """
    if not is_torch_file(path):
        return *read_model(path), ""
    content = read_torch_file(path)
    tensors = {entry: tensors_of(value) for entry, value in entries_of(content)}
    holding = [
        entry
        for entry, by_name in tensors.items()
        if any(tensor.dim() > 1 for tensor in by_name.values())
    ]
    if not holding:
        raise UsageError(
            f"{path} holds no weights, no tensors by name, also not in an entry of it, but"
            f" {summary(content)}"
        )
    fitting = {}
    for entry in holding:
        matched, _, _ = match_names(tensors[entry], wanted)
        fitting[entry] = count_fitting(matched, wanted)
    half = max(fitting.values()) / 2  # of the best fitting: less is another network

    entry = min(
        holding,
        key=lambda entry: (
            fitting[entry] < half,
            usual_order(entry),
            -fitting[entry],
            -len(tensors[entry]),
        ),
    )
    return tensors[entry], {}, entry


def count_fitting(tensors: Tensors, wanted: Tensors) -> int:
    """Return how many tensors have the name and shape of one of the `wanted`."""
    fitting = [
        name
        for name, tensor in tensors.items()
        if name in wanted and tensor.shape == wanted[name].shape
    ]
    return len(fitting)


def entries_of(content: Any, name: str = "", depth: int = 0) -> Iterator[tuple[str, Mapping]]:
    """Yield the dicts of a file by name: "" itself, "state" an entry, "state.model" one of it."""
    if not isinstance(content, Mapping):
        return
    yield name, content
    for key, value in content.items():
        if isinstance(key, str) and depth < DEPTH:
            yield from entries_of(value, f"{name}.{key}" if name else key, depth + 1)


def usual_order(entry: str) -> int:
    """Return the place of an entry among those that usually hold weights; all others are last."""
    last = entry.rpartition(".")[2]
    if last in ENTRIES:
        return ENTRIES.index(last)
    return len(ENTRIES)


def summary(content: Any) -> str:
    """Return in a few words what a file holds."""
    kind = type(content).__name__
    if isinstance(content, Mapping):
        return f"{kind} with {listed(map(str, content), 5) or 'nothing'}"
    if isinstance(content, list | tuple):
        return f"{kind} of {len(content)}"
    return kind
