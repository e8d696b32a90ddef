"""Export a trained network as one file that other programs run: ONNX, or .pt2 of torch.export.

    python -m hpctrain export RUN --output photos.onnx

The network computes in float32 (or in its own dtype, if that is another), on any number of images
at a time. Classifiers give scores, of which softmax makes the probabilities of ``predict``. With
--preprocess the input is uint8 images (N, H, W, C) at the size of the training images, and a
network that restores images returns such images.

Before the file gets its name, it is read back and run on images of random bytes. Its output must be
that of the network in torch.
"""

from __future__ import annotations

import importlib.util
import os
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from hpctrain.config import ExportConfig
from hpctrain.data.augment import to_input
from hpctrain.errors import RunError, UsageError
from hpctrain.files import whole_file, writing
from hpctrain.inference.export_formats import (
    Exported,
    Run,
    describe_tensors,
    open_file,
    write_onnx,
    write_pt2,
)
from hpctrain.inference.network import Saved, find_model, restore
from hpctrain.inference.tasks import network_output
from hpctrain.text import say

SUFFIXES = ".onnx", ".pt2"
COMPARED = 16  # images on which the file is compared with torch
TOLERANCE = 1e-4  # of the largest output, or of 1 if that is smaller; 1 level for uint8 images


def main(settings: ExportConfig) -> int:
    """``hpctrain export``: write a network as ONNX or .pt2, after comparing it with torch."""
    path = find_model(settings.run, settings.runs_dir, settings.best)
    output = output_file(settings, path)
    saved = restore(path, settings.trust_code)
    images = make_images(saved, settings.batch_size or COMPARED)
    exported = Exported(saved, settings.preprocess).eval().requires_grad_(False)
    with torch.no_grad(), writing(output), whole_file(output) as file:
        write = write_onnx if output.suffix == ".onnx" else write_pt2
        opset = write(file, exported, settings.batch_size, saved)
        file.flush()
        run = open_file(file, output.suffix)
        found = compare(run, exported, saved, images, settings) if run else None
        size = file.seek(0, os.SEEK_END)
    say(f"{output}: {size / 1e6:,.1f} MB{opset}, {describe_tensors(exported, saved, settings)}")
    if found is None:
        say("  not compared with torch: pip install onnxruntime")
    else:
        say(f"  differs from torch by at most {found:.2g} on {len(images)} images of random bytes")
    if saved.metadata.get("precision") == "bf16":
        say("  computes in float32: compare it with evaluate --precision fp32")
    return 0


def output_file(settings: ExportConfig, model: Path) -> Path:
    """Return the file to write. Raises UsageError if it exists, or packages are missing."""
    path = Path(settings.output) if settings.output else model.with_suffix(".onnx")
    if path.suffix not in SUFFIXES:
        raise UsageError(f"--output {path}: export writes {' and '.join(SUFFIXES)} files")
    if path.exists():
        raise UsageError(f"{path} exists: remove it, or name another --output")
    missing = [name for name in ("onnx", "onnxscript") if not importlib.util.find_spec(name)]
    if path.suffix == ".onnx" and missing:
        raise UsageError(
            f"{path}: ONNX needs {' and '.join(missing)}: pip install 'hpctrain[export]';"
            " a .pt2 file needs nothing more"
        )
    return path


def make_images(saved: Saved, count: int) -> Tensor:
    """Return images (n, H, W, C) of random bytes to compare with."""
    generator = torch.Generator().manual_seed(0)
    return torch.randint(
        0, 256, (count, *saved.image_shape), dtype=torch.uint8, generator=generator
    )


def compare(
    run: Run, exported: Exported, saved: Saved, images: Tensor, settings: ExportConfig
) -> float:
    """Return the largest difference between a file and the network in torch, on `images`.

    Files for any number of images get all of them, then one. Raises RunError if they differ.
    """
    mean, std = saved.scaling or (None, None)
    inputs = to_input(images, mean, std, exported.dtype, channels_last=False)
    expected = network_output(saved.model, inputs, "fp32").double()
    limit = TOLERANCE * max(1.0, expected.abs().max().item())
    if exported.inside and exported.restores:
        expected, limit = (expected.permute(0, 2, 3, 1).clamp(0, 1) * 255).round(), 1.0
    differences = []
    for count in (len(images),) if settings.batch_size else (len(images), 1):
        found = run(exported.input_of(images[:count], saved)).astype(np.float64)
        wanted = expected[:count].numpy()
        if found.shape != wanted.shape:
            raise RunError(f"the file gives {found.shape} for {count} images, not {wanted.shape}")
        differences.append(np.abs(found - wanted).max())
    largest = float(np.max(differences))  # NaN if one of them is
    if not largest <= limit:
        raise RunError(
            f"the file's output differs from the network's by {largest:.3g}, more than"
            f" {limit:.3g}: it is not kept"
        )
    return largest
