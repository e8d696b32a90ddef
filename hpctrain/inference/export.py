"""Export a trained network as one file that other programs run: ONNX, or .pt2 of torch.export.

    python -m hpctrain export RUN --output photos.onnx

The network computes in float32 (or in its own dtype, if that is another), on any number of images
at a time. Classifiers give scores, of which softmax (of several classes, sigmoid) makes the
probabilities of ``predict``; values are in the units of the data. With
--preprocess the input is images (N, H, W, C) as the training had them: of their size and type
(float16 as float32), with the stored values.

Before the file gets its name, it is read back and run on images of random values. Its output must
be that of the network in torch.
"""

from __future__ import annotations

import importlib.util
import json
import logging
import math
import os
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import torch
from torch import Tensor, nn

from hpctrain.config import ExportConfig
from hpctrain.data.pipeline import Pipeline
from hpctrain.data.scale import WIDE, Scale
from hpctrain.data.standardize import image_statistics, is_nodata, standardize
from hpctrain.errors import Failure, RunError, UsageError, first_line
from hpctrain.files import whole_file, writing
from hpctrain.inference.network import find_model
from hpctrain.inference.trained import TrainedNetwork
from hpctrain.models.memory_format import move_model
from hpctrain.tasks.forward import network_output
from hpctrain.text import say

METADATA = "hpctrain.json"  # name of the extra file in a .pt2
OF_NETWORK = ("hpctrain", "model", "task", "image_shape", "classes", "run", "step")
KEPT = (*OF_NETWORK, "mean", "std", "normalization", "scale")
INPUT = "images"  # name of the input
COMPARED = 16  # images on which the file is compared with torch
TOLERANCE = 1e-4  # relative to a column's largest output, or to 1 if that is smaller
ROUNDING = 2 * torch.finfo(torch.float32).eps  # of outputs in the units of the data, relative


class Preprocess(nn.Module):
    """Makes a network's input of stored images (N, H, W, C), as a `Pipeline` does it."""

    def __init__(self, pipeline: Pipeline, scale: Scale) -> None:
        """Take the pipeline of a network, and the scale of its images."""
        super().__init__()
        self.dtype = pipeline.dtype
        self.is_by_image = pipeline.is_by_image
        self.nodata = scale.nodata
        if self.nodata is not None:
            stored = np.dtype(scale.dtype).type(self.nodata)
            self.nodata = input_type(scale).type(stored).item()
        is_wide = scale.dtype in WIDE
        self.arithmetic = torch.float32
        if self.is_by_image or is_wide or pipeline.dtype == torch.float64:
            self.arithmetic = torch.float64
        normalization = pipeline.normalization
        if self.is_by_image or not normalization:
            normalization = [0.0], [1.0]
        rounded = torch.float64 if is_wide else torch.float32
        mean, std = (torch.as_tensor(values, dtype=rounded).double() for values in normalization)
        self.factor = nn.Buffer((1 / (scale.divisor * std)).to(self.arithmetic))
        self.offset = nn.Buffer((-mean / std).to(self.arithmetic))

    def forward(self, images: Tensor) -> Tensor:
        """Return the input (N, C, H, W)."""
        stored = images.to(self.arithmetic)
        if self.is_by_image:
            mean, std = image_statistics(stored, self.nodata)
            inputs = standardize(stored, mean, std, self.nodata)
        else:
            inputs = stored * self.factor + self.offset
            if self.nodata is not None:
                inputs = inputs.masked_fill(is_nodata(stored, self.nodata), 0)
        return inputs.to(self.dtype).permute(0, 3, 1, 2)


def input_type(scale: Scale) -> np.dtype:
    """Return the type of images that an exported network takes: float16 as float32."""
    if scale.is_integer:
        return np.dtype(scale.dtype)
    return np.result_type(scale.dtype, np.float32)


def draw_images(scale: Scale, shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
    """Return random images (N, H, W, C) as they are stored, in the range of the training.

    A pixel of each has no data, if the training left out such values.
    """
    if scale.is_integer:
        values = torch.randint(int(scale.low), int(scale.high) + 1, shape, generator=generator)
    else:
        values = torch.rand(shape, generator=generator) * (scale.high - scale.low) + scale.low
    if scale.nodata is not None:
        values[:, 0, 0] = values.new_tensor(scale.nodata)
    return torch.from_numpy(values.numpy().astype(scale.dtype))


@torch.no_grad()
def main(config: ExportConfig) -> int:
    """``hpctrain export``: write a network as ONNX or .pt2, after comparing it with torch."""
    path = find_model(config.run, config.runs_dir, config.best)
    fixed = config.batch_size
    output = Path(config.output) if config.output else path.with_suffix(".onnx")
    check_output(output)
    network = TrainedNetwork(path, torch.device("cpu"), config.trust_code)
    model = move_model(network.model, network.device, channels_last=False)
    shape = fixed or COMPARED, *network.image_shape
    images = draw_images(network.scale, shape, torch.Generator().manual_seed(0))
    pipeline = network.inference.pipeline
    inputs = pipeline.inputs(images, divisor=network.scale.divisor).contiguous()
    logging.disable(logging.WARNING)  # torch's exporter warns a lot
    try:
        with warnings.catch_warnings(action="ignore"), writing(output), whole_file(output) as file:
            metadata = {key: network.metadata.get(key) for key in KEPT}
            of_targets = ("columns", *network.inference.task.metadata())
            metadata |= {
                key: network.metadata[key] for key in of_targets if key in network.metadata
            }
            metadata["scale"] = {
                **network.scale.as_metadata(),
                "nodata": nodata_text(network.scale),
            }
            metadata |= {"preprocess": config.preprocess, "output": network.inference.task.output}
            outputs = network_output(model, inputs, "fp32")
            expected = outputs
            last = network.inference.task.exported()
            allowed = Allowed(outputs, last)
            if last:
                expected = last(outputs)
                model = nn.Sequential(model, last)
            if config.preprocess:
                model = nn.Sequential(Preprocess(pipeline, network.scale), model)
                inputs = torch.from_numpy(images.numpy().astype(input_type(network.scale)))
            model.eval().requires_grad_(False)
            write_file(file, output.suffix, model, inputs[: fixed or 2], bool(fixed), metadata)
            size = file.seek(0, os.SEEK_END)
            run = open_file(file, output.suffix)
            counts = {len(images), fixed or 1}
            difference = max(compare(run, inputs[:n], expected[:n], allowed) for n in counts)
    except (Failure, OSError):
        raise
    except Exception as error:  # some classes of onnxruntime are not public
        hint = "" if fixed else "; try --batch-size N, a fixed number of images"
        cause = first_line(error.__cause__ or error)
        raise RunError(f"this network cannot be exported: {cause}{hint}") from error
    finally:
        logging.disable(logging.NOTSET)
    takes = f"{INPUT} {describe(inputs, fixed)}"
    gives = f"{metadata['output']} {describe(expected, fixed)}"
    say(f"{output}: {size / 1e6:,.1f} MB, {takes} -> {gives}")
    say(
        f"  differs from torch by at most {difference:.2g}{allowed.unit_name} on {len(images)}"
        " images of random values"
    )
    return 0


def nodata_text(scale: Scale) -> float | str | None:
    """Return what is no data as JSON can hold it: NaN as "nan"."""
    if scale.nodata is not None and math.isnan(scale.nodata):
        return "nan"
    return scale.nodata


def describe(batch: Tensor, fixed: int | None) -> str:
    """Return the dtype and shape of a batch, with "N" unless its size is fixed."""
    axes = ", ".join(map(str, (fixed or "N", *batch.shape[1:])))
    return f"{str(batch.dtype).removeprefix('torch.')} ({axes})"


def check_output(path: Path) -> None:
    """Raise UsageError if a file cannot be written because it exists, or packages are missing."""
    if path.suffix not in (".onnx", ".pt2"):
        raise UsageError(f"--output {path}: export writes .onnx and .pt2 files")
    if path.exists():
        raise UsageError(f"{path} exists: remove it, or name another --output")
    packages = ("onnx", "onnxscript", "onnxruntime")
    missing = " ".join(name for name in packages if not importlib.util.find_spec(name))
    if path.suffix == ".onnx" and missing:
        raise UsageError(
            f"{path}: ONNX needs more packages: pip install {missing}; a .pt2 file needs none"
        )


def write_file(
    file: BinaryIO,
    suffix: str,
    model: nn.Module,
    inputs: Tensor,
    fixed: bool,
    metadata: dict[str, Any],
) -> None:
    """Write a file with `metadata` for inputs like `inputs`, of any batch size unless `fixed`."""
    varies = (None if fixed else {0: torch.export.Dim("batch_size", min=1)},)
    if suffix == ".pt2":
        program = torch.export.export(model, (inputs,), dynamic_shapes=varies)
        torch.export.save(program, file, extra_files={METADATA: json.dumps(metadata)})
        return
    exported = torch.onnx.export(
        model,
        (inputs,),
        dynamo=True,
        verbose=False,
        input_names=[INPUT],
        output_names=[metadata["output"]],
        dynamic_shapes=varies,
    )
    assert exported is not None  # it is with dynamo
    for name, value in metadata.items():
        text = value if isinstance(value, str) else json.dumps(value)
        exported.model.metadata_props[name] = text
    file.write(exported.model_proto.SerializeToString())


def open_file(file: BinaryIO, suffix: str) -> Callable[[Tensor], np.ndarray]:
    """Read an exported file back as a function."""
    file.seek(0)
    if suffix == ".pt2":
        module = torch.export.load(file).module()
        return lambda images: np.asarray(module(images))
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3  # errors
    options.intra_op_num_threads = torch.get_num_threads()
    session = onnxruntime.InferenceSession(file.read(), options, ["CPUExecutionProvider"])
    return lambda images: np.asarray(session.run(None, {INPUT: images.numpy()})[0])


class Allowed:
    """By how much the output of a file may differ from a network's, by column of rows.

    Differences are measured in the units of the network's outputs: of values, which `last` turns
    into the units of the data, in standard deviations of their columns, so that those of small
    units are not compared loosely. Images are compared as one column.
    """

    def __init__(self, outputs: Tensor, last: nn.Module | None) -> None:
        """Take outputs of the network, (n, K) or images, and the module applied to them, if any."""
        self.unit: np.ndarray = np.ones(())
        self.unit_name = ""
        self.largest = TOLERANCE * np.maximum(1, largest_by_column(outputs))
        if last:
            ones = torch.ones_like(outputs[:1], dtype=torch.float64)
            (self.unit,) = (last(ones) - last(0 * ones)).abs().numpy()
            self.unit_name = " standard deviations"
            self.largest += ROUNDING * largest_by_column(last(outputs)) / self.unit


def largest_by_column(outputs: Tensor) -> np.ndarray:
    """Return the largest absolute value of each column, (K,) float64, or of images, ()."""
    values = outputs.double().abs().numpy()
    return np.asarray(values.max(axis=0 if values.ndim == 2 else None))


def compare(
    run: Callable[[Tensor], np.ndarray], inputs: Tensor, expected: Tensor, allowed: Allowed
) -> float:
    """Return the largest difference of a file's output from `expected`. Raises RunError."""
    output = run(inputs).astype(np.float64)
    differences = np.abs(output - expected.double().numpy()) / allowed.unit
    is_more = ~(differences <= allowed.largest)  # also NaN
    if is_more.any():
        limits = np.broadcast_to(allowed.largest, differences.shape)
        raise RunError(
            f"the file's output differs from the network's by {differences[is_more][0]:.3g}"
            f"{allowed.unit_name}, more than {limits[is_more][0]:.3g}: it is not kept"
        )
    return float(differences.max())
