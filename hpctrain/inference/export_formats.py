"""The two formats of exported networks: ONNX, and the .pt2 files of torch.export."""

from __future__ import annotations

import importlib.util
import json
import logging
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, BinaryIO

import numpy as np
import torch
from torch import Tensor, nn

from hpctrain.config import ExportConfig
from hpctrain.data.augment import to_input
from hpctrain.errors import RunError, first_line
from hpctrain.inference.network import Saved

Run = Callable[[Tensor], np.ndarray]  # runs an exported file on its input
METADATA = "hpctrain.json"  # name of the extra file in a .pt2
INPUT = "images"  # name of the input
BATCH = "batch_size"  # name of the dimension that may vary
FIXED = "; try --batch-size N, a fixed number of images"
# What torch's exporter raises, and a network's own code on values that are not known yet.
UNTRACED = RuntimeError, ValueError, TypeError, AttributeError, AssertionError, LookupError
KEPT = ("hpctrain", "model", "task", "image_shape", "classes", "mean", "std", "run", "step")


class Exported(nn.Module):
    """What a file computes: a network, with the preprocessing if it is `inside`."""

    scale: Tensor
    offset: Tensor

    def __init__(self, saved: Saved, inside: bool) -> None:
        super().__init__()
        self.network, self.inside = saved.model, inside
        self.restores = saved.metadata.get("task") == "denoise"
        self.dtype = next(saved.model.parameters()).dtype
        mean, std = saved.scaling or (torch.zeros(1), torch.ones(1))  # as data.augment.to_input
        self.register_buffer("scale", (1 / (255 * std.double())).to(self.dtype).view(-1, 1, 1))
        self.register_buffer(
            "offset", (-mean.double() / std.double()).to(self.dtype).view(-1, 1, 1)
        )

    def forward(self, images: Tensor) -> Tensor:
        """Return the output for images: uint8 (N, H, W, C), or the network's input (N, C, H, W)."""
        if not self.inside:
            return self.network(images)
        output = self.network(images.permute(0, 3, 1, 2).to(self.dtype) * self.scale + self.offset)
        if not self.restores:
            return output
        return (output.clamp(0, 1) * 255).round().to(torch.uint8).permute(0, 2, 3, 1)

    def input_of(self, images: Tensor, saved: Saved) -> Tensor:
        """Return the input for images (N, H, W, C) of a pack."""
        mean, std = saved.scaling or (None, None)
        return images if self.inside else to_input(images, mean, std, self.dtype, False)


def example(exported: Exported, saved: Saved, batch: int | None) -> tuple[Tensor, Any]:
    """Return an input, and which of its dimensions may vary, as torch.export takes them."""
    images = torch.zeros((batch or 2, *saved.image_shape), dtype=torch.uint8)
    varies = None if batch else {0: torch.export.Dim(BATCH, min=1)}
    return exported.input_of(images, saved), {INPUT: varies}


@contextmanager
def tracing() -> Iterator[None]:
    """Hide the warnings of torch's exporter, and raise its errors as RunError in one line.

    Its warnings are about its own code and about packages that are not needed.
    """
    logging.disable(logging.WARNING)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    except UNTRACED as error:
        hint = FIXED if BATCH in str(error) else ""
        cause = first_line(error.__cause__ or error)
        raise RunError(f"torch cannot export this network: {cause}{hint}") from error
    finally:
        logging.disable(logging.NOTSET)


def write_onnx(file: BinaryIO, exported: Exported, batch: int | None, saved: Saved) -> str:
    """Write an ONNX file; return its opset as text."""
    images, varies = example(exported, saved, batch)
    with tracing():
        program = torch.onnx.export(
            exported,
            (images,),
            dynamo=True,
            verbose=False,
            input_names=[INPUT],
            output_names=[output_name(exported)],
            dynamic_shapes=varies,
        )
    assert program is not None
    for name, value in metadata_of(exported, saved).items():
        text = value if isinstance(value, str) else json.dumps(value)
        program.model.metadata_props[name] = text
    file.write(program.model_proto.SerializeToString())
    return f", opset {program.model.opset_imports['']}"


def write_pt2(file: BinaryIO, exported: Exported, batch: int | None, saved: Saved) -> str:
    """Write a .pt2 file of torch.export; it has no opset."""
    images, varies = example(exported, saved, batch)
    with tracing():
        program = torch.export.export(exported, (images,), dynamic_shapes=varies)
        extra = {METADATA: json.dumps(metadata_of(exported, saved))}
        torch.export.save(program, file, extra_files=extra)
    return ""


def output_name(exported: Exported) -> str:
    """Return the name of the output."""
    return "restored" if exported.restores else "scores"


def metadata_of(exported: Exported, saved: Saved) -> dict[str, Any]:
    """Return what the file says about itself."""
    kept = {name: saved.metadata[name] for name in KEPT if name in saved.metadata}
    return {**kept, "preprocess": exported.inside}


def describe_tensors(exported: Exported, saved: Saved, settings: ExportConfig) -> str:
    """Return the shapes and types of input and output as text."""
    (height, width, channels), n = saved.image_shape, settings.batch_size or "N"
    planes, pixels = (
        f"({n}, {channels}, {height}, {width})",
        f"({n}, {height}, {width}, {channels})",
    )
    dtype = str(exported.dtype).removeprefix("torch.")
    taken = f"uint8 {pixels}" if exported.inside else f"{dtype} {planes}"
    given = f"({n}, {len(saved.classes)})"
    if exported.restores:
        given = pixels if exported.inside else planes
    return f"{INPUT} {taken} -> {output_name(exported)} {given}"


def open_file(file: BinaryIO, suffix: str) -> Run | None:
    """Read an exported file back; None if there is nothing to run it with.

    Raises RunError, as the function that it returns does, if the file cannot be run.
    """
    file.seek(0)
    if suffix == ".pt2":
        with tracing():
            module = torch.export.load(file).module()
        return lambda images: np.asarray(module(images))
    if not importlib.util.find_spec("onnxruntime"):
        return None
    import onnxruntime

    @contextmanager
    def running() -> Iterator[None]:
        try:
            yield
        except Exception as error:  # its classes are not public
            hint = FIXED if "invalid dimensions" in str(error) else ""
            raise RunError(
                f"onnxruntime cannot run this network: {first_line(error)}{hint}"
            ) from error

    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3  # errors
    options.intra_op_num_threads = torch.get_num_threads()
    with running():
        session = onnxruntime.InferenceSession(file.read(), options, ["CPUExecutionProvider"])

    @running()
    def run(images: Tensor) -> np.ndarray:
        return np.asarray(session.run(None, {INPUT: images.numpy()})[0])

    return run
