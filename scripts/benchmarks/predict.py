"""Images per second of ``hpctrain predict`` and of a plain loop in one thread, which reads a block
of files and then runs the network. Both run in turn, for --rounds rounds; medians are printed, and
the answers must be equal.

    python -m scripts.benchmarks.predict runs/first photos/
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path
from statistics import median

import numpy as np
import torch

from hpctrain.config import PredictConfig
from hpctrain.data.images import read_image
from hpctrain.inference.blocks import predict_blocks
from hpctrain.inference.image_files import file_reader, list_images
from hpctrain.inference.network import Network
from hpctrain.inference.opening import open_network
from hpctrain.inference.tasks import network_output
from hpctrain.parallel.mpi import start_mpi


@torch.no_grad()
def plain(network: Network, files: list[Path]) -> np.ndarray:
    """Return probabilities, (N, K), from one thread that reads images and runs the network."""
    found = []
    for first in range(0, len(files), network.block):
        part = files[first : first + network.block]
        images = np.stack([read_image(str(file), network.saved.image_shape) for file in part])
        inputs = network.prepare(torch.from_numpy(images), 0)
        scores = network_output(network.model, inputs, network.precision)
        found.append(scores.softmax(1).float().cpu().numpy())
    return np.concatenate(found)


def main() -> None:
    """Measure both ways and print the results."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("run")
    parser.add_argument("photos")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--threads", type=int)
    given = parser.parse_args()
    comm = start_mpi()
    settings = PredictConfig(run=given.run, device=given.device, threads=given.threads)
    network, files = open_network(settings, comm), list_images((given.photos,))
    read = file_reader(network.saved, files)

    def ahead() -> np.ndarray:
        how = np.dtype(np.uint8), lambda scores: scores.softmax(1).float()
        blocks = predict_blocks(network, read, len(files), *how)
        return np.concatenate([probabilities for _, probabilities in blocks])

    ways = {"plain loop": lambda: plain(network, files), "hpctrain predict": ahead}
    rates: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(given.rounds + 1):
        found = {}
        for name, way in ways.items():
            begun = time.perf_counter()
            found[name] = way()
            rates[name].append(len(files) / (time.perf_counter() - begun))
        assert np.array_equal(found["plain loop"], found["hpctrain predict"])
    for name, each in rates.items():
        each = each[1:]  # the first warms up
        print(f"{name:16} {median(each):8.1f} images/s ({min(each):.1f} to {max(each):.1f})")
    ratio = median(b / a for a, b in list(zip(*rates.values(), strict=True))[1:])
    print(f"ratio {ratio:.2f}, n = {given.rounds}, equal answers")


if __name__ == "__main__":
    main()
