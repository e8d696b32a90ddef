"""``python -m scripts.bench transforms``: the time of each transform that --augment accepts.

Batches of 64 images of 64x64x3 are transformed on one core, each image (p = 1); the time is that of
the processor, the median of the rounds. Beside it is the time of the tests before a run.
"""

from __future__ import annotations

import argparse
import time
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from statistics import median

import torch

from hpctrain.data.transform_checks import check_part
from hpctrain.data.transforms import always_applied, build_transform
from scripts.parts import accepted_parts
from scripts.parts.transforms import ROWS, draw_images, make_part


def measure_transforms(options: argparse.Namespace, folder: Path) -> None:
    """Print a table of all transforms, those that are quick first."""
    warnings.simplefilter("ignore")  # of the libraries
    torch.set_num_threads(1)
    images = draw_images(ROWS)
    rows = []
    for name in accepted_parts("augment"):
        part = make_part(name)
        transform = build_transform(part)
        always = build_transform(always_applied(part) or part)
        always(images, 0)
        times = [seconds(partial(always, images, 1)) for _ in range(options.rounds)]
        tested = sum(seconds(partial(check_part, t, images, 1)) for t in {always, transform})
        rows.append((median(times) / ROWS * 1e6, tested, part.text))
    print("| Transform | us an image | Test, s |\n|---|---:|---:|")
    for microseconds, tested, text in sorted(rows):
        print(f"| `{text}` | {microseconds:,.0f} | {tested:.1f} |")


def seconds(work: Callable[[], object]) -> float:
    """Return the processor's time for a call."""
    began = time.process_time()
    work()
    return time.process_time() - began
